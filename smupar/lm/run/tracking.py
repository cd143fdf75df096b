"""Sends the rows of a run to TensorBoard and Weights & Biases.

The rows are those of metrics.jsonl. To add a tool, write a context manager that yields a function for rows, and add a flag to
``Execution``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from smupar.lm.config.run_config import Execution, RunConfig
from smupar.lm.run.metrics import Row
from smupar.output.files import write_atomic

_Sink = Callable[[dict[str, float], int], None]  # (metric -> value, step)


@contextlib.contextmanager
def tracked(
    path: Path, config: RunConfig, how: Execution, first: int, *, writes: bool = True
) -> Iterator[Callable[[Row], None]]:
    """Yields a function that sends rows to the tools that ``how`` asks for, on the rank that writes. The tools are closed when
    the block ends, also after an error."""
    with contextlib.ExitStack() as opened:  # if one sink cannot be closed, the others still are
        sinks: list[_Sink] = []
        if how.tensorboard and writes:
            sinks.append(opened.enter_context(_tensorboard(path, first)))
        if how.wandb and writes:
            sinks.append(opened.enter_context(_weights_and_biases(path, config)))

        def track(row: Row) -> None:
            values = {name: value for name, value in row.items() if value is not None and name != "step"}
            for sink in sinks:
                sink(values, int(row["step"] or 0))

        yield track


@contextlib.contextmanager
def _tensorboard(path: Path, first: int) -> Iterator[_Sink]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ModuleNotFoundError("--tensorboard needs tensorboard: pip install 'smupar[tracking]'") from error
    with SummaryWriter(str(path / "tensorboard"), purge_step=first + 1) as writer:

        def write(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield write


@contextlib.contextmanager
def _weights_and_biases(path: Path, config: RunConfig) -> Iterator[_Sink]:
    """Sends rows to Weights & Biases. WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE work as usual."""
    try:
        # Imports names, not the module: if wandb is missing, `import wandb` would import its folder in the working directory.
        from wandb import Settings, init
        from wandb.errors import Error
    except ImportError as error:
        raise ModuleNotFoundError("--wandb needs wandb: pip install 'smupar[tracking]'") from error
    try:
        run = init(
            project=os.environ.get("WANDB_PROJECT", "smupar"),
            dir=str(path),
            id=_id(path),
            resume="allow",
            name=path.name,
            config=asdict(config),
            settings=Settings(console="off"),  # do not capture what is printed
        )
    except Error as error:
        raise ValueError(
            f"Weights & Biases did not start ({error}): run `wandb login`, or set WANDB_MODE=offline and `wandb sync` later"
        ) from error
    try:
        yield lambda values, step: run.log(values, step=step)
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def _id(path: Path) -> str:
    """The id of this folder's run, the same after a resume. The hash of the configuration is not enough, since two people may
    run the same configuration."""
    file = path / "wandb" / "id"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, secrets.token_hex(4))
    return file.read_text(encoding="utf-8")
