"""Sends the metrics of a run to TensorBoard and Weights & Biases too, the same rows to both.

A row is what metrics.jsonl gets. Another tool is another class with ``write`` and ``close``, and a flag of ``Execution``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from smupar.lm.config.run import Execution, RunConfig
from smupar.lm.run.folder import Row
from smupar.output.files import write_atomic


class Tracker:
    """All trackers that ``how`` asks for, on the rank that writes. They are closed when the block ends, in any way."""

    def __init__(self, path: Path, config: RunConfig, how: Execution, first: int, *, writes: bool = True) -> None:
        self._sinks: list[_TensorBoard | _WeightsAndBiases] = []
        if how.tensorboard and writes:
            self._sinks.append(_TensorBoard(path, first))
        if how.wandb and writes:
            self._sinks.append(_WeightsAndBiases(path, config))

    def write(self, row: Row) -> None:
        values = {name: value for name, value in row.items() if value is not None and name != "step"}
        for sink in self._sinks:
            sink.write(values, int(row["step"] or 0))

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.ExitStack() as closing:  # a sink that cannot be closed does not keep the others open
            for sink in self._sinks:
                closing.callback(sink.close, failed=error is not None)


class _TensorBoard:
    def __init__(self, path: Path, first: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModuleNotFoundError("--tensorboard needs tensorboard: pip install 'smupar[tracking]'") from error
        self._writer = SummaryWriter(str(path / "tensorboard"), purge_step=first + 1)

    def write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """Project, entity and mode are set as everywhere, by WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        try:
            # By name: where wandb is missing, a folder of that name in the working directory would be imported instead.
            from wandb import Settings, init
            from wandb.errors import Error
        except ImportError as error:
            raise ModuleNotFoundError("--wandb needs wandb: pip install 'smupar[tracking]'") from error
        try:
            self._run = init(
                project=os.environ.get("WANDB_PROJECT", "smupar"),
                dir=str(path),
                id=_id(path),
                resume="allow",
                name=path.name,
                config=asdict(config),
                settings=Settings(console="off"),  # what is printed stays where it is
            )
        except Error as error:
            raise ValueError(
                f"Weights & Biases did not start ({error}): run `wandb login`, or set WANDB_MODE=offline and `wandb sync` later"
            ) from error

    def write(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _id(path: Path) -> str:
    """The id of this folder's run, the same when it goes on. The hash of the configuration is not enough, since two people may
    run the same configuration."""
    file = path / "wandb" / "id"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, secrets.token_hex(4))
    return file.read_text()
