"""A study on disk: a folder with one folder per run, named by the run's id. A run whose summary is there is finished.

study.json       what the study is, and the command that made it
data.json        fingerprints of its texts and traces
runs/<id>/       config.json, metrics.jsonl, and, last, summary.json
table.csv        one row per run, made from them; also table.json, and table.parquet for those who ask
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smupar import __version__
from smupar.lm.config.run import LATER_FIELDS, RunConfig
from smupar.lm.run.folder import TRACE_FILE, Row, Summary, metrics_line, read_config, read_summary
from smupar.output.files import locked, write_atomic
from smupar.output.optional import optional
from smupar.updates.trace import Trace

FORMAT = "smupar-study/1"


@dataclass(frozen=True)
class Result:
    """A finished run."""

    config: RunConfig
    summary: Summary

    @property
    def loss(self) -> float:
        """What sweeps compare: the mean over the last 5 % of the steps; infinite if the run diverged."""
        loss = self.summary.train_loss
        return float("inf") if loss is None or self.summary.status == "diverged" else loss


class Study:
    """``with Study.open(...) as study``: one process at a time adds runs, others may read."""

    keeps_weights = False
    """Whether runs leave a checkpoint at their end, for what is done with the models."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.runs = self.folder / "runs"

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: str | Path, definition: dict[str, Any], command: str) -> Iterator[Study]:
        """Makes the folder, or goes on in it if it holds the same study of the same version."""
        study = cls(folder)
        if study.folder.is_file():
            raise ValueError(f"{folder} is a file: choose another --out")
        if study.folder.exists() and not (study.folder / "study.json").exists() and any(study.folder.iterdir()):
            raise ValueError(f"{folder} holds other files and no study: choose another --out")
        is_new = not study.folder.exists()
        with locked(study.folder), study._undone_if_nothing_ran(is_new):
            described = {"format": FORMAT, "version": __version__, "definition": _plain(definition), "command": command}
            if not (study.folder / "study.json").exists() or _has_grown(study, described):
                write_atomic(study.folder / "study.json", json.dumps(described, indent=1))
            study.runs.mkdir(exist_ok=True)
            yield study

    @contextlib.contextmanager
    def _undone_if_nothing_ran(self, is_new: bool) -> Iterator[None]:
        """A command that fails before its first run has a mistake: it must not keep the right one out of the folder."""
        file, runs = self.folder / "study.json", set(self.runs.glob("*"))
        before = file.read_text() if file.exists() else None
        try:
            yield
        except BaseException:
            if set(self.runs.glob("*")) == runs and before is not None:
                write_atomic(file, before)  # as it was before it grew
            elif is_new and not any(self.runs.glob("*")):
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def remember(self, what: str, name: str, sha256: str) -> None:
        """Raises if a text or a trace is not the one that runs of the study read under that name."""
        known = self._remembered()
        if known.setdefault(f"{what} {name}", sha256) != sha256:
            raise ValueError(
                f"the {what} {name!r} is not the one that {self.folder} was started with: bring that back, give it another "
                "name, or choose another --out"
            )
        write_atomic(self.folder / "data.json", json.dumps(known, indent=1))

    def files(self, configs: Sequence[RunConfig]) -> dict[str, str]:
        """sha256 of the texts of the study and of the traces that these runs follow."""
        traces = {f"trace {config.portable.follow}" for config in configs}
        return {name: sha256 for name, sha256 in self._remembered().items() if name.startswith("text ") or name in traces}

    def _remembered(self) -> dict[str, str]:
        path = self.folder / "data.json"
        known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        return known

    def describe(self) -> dict[str, Any]:
        """study.json."""
        try:
            described: dict[str, Any] = json.loads((self.folder / "study.json").read_text())
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.folder} is not the folder of a study: it has no study.json") from error
        return described

    def missing(self, configs: Sequence[RunConfig]) -> list[RunConfig]:
        """Those without a finished result, each once."""
        unique = {config.id: config for config in configs}
        return [config for id_, config in unique.items() if not (self.runs / id_ / "summary.json").exists()]

    def add(self, config: RunConfig, summary: Summary, metrics: Sequence[Row] = (), trace: Trace | None = None) -> None:
        """Writes a finished run; its summary comes last."""
        folder = self.runs / config.id
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "config.json", config.to_json())
        write_atomic(folder / "metrics.jsonl", "".join(map(metrics_line, metrics)))
        if trace is not None:
            write_atomic(folder / TRACE_FILE, trace.to_json())
        write_atomic(folder / "summary.json", json.dumps(asdict(summary), indent=1))

    def results(self, configs: Sequence[RunConfig] | None = None) -> list[Result]:
        """Of these runs, in their order; default all finished ones."""
        if configs is None:
            folders = sorted(path.parent for path in self.runs.glob("*/summary.json"))
            configs = [read_config(folder) for folder in folders]
        found = [(config, read_summary(self.runs / config.id)) for config in configs]
        return [Result(config, summary) for config, summary in found if summary is not None]

    def write_table(self) -> None:
        write_rows(self.folder / "table", [row_of(result) for result in self.results()])

    def write_parquet(self) -> None:
        """The same rows, with their types."""
        arrow, parquet = (optional(name, "table.parquet") for name in ("pyarrow", "pyarrow.parquet"))
        file = io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist([row_of(result) for result in self.results()]), file)
        temporary = self.folder / "table.parquet.tmp"
        temporary.write_bytes(file.getvalue())
        temporary.replace(self.folder / "table.parquet")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The same rows as JSON and as CSV; ``path`` has no suffix."""
    write_atomic(path.with_suffix(".json"), json.dumps(rows, indent=1))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path.with_suffix(".csv"), text.getvalue())


def row_of(result: Result) -> dict[str, Any]:
    """A run as a flat row: its configuration, then how it ended. The speed is left out, so that tables can be compared."""
    config = asdict(result.config.portable)
    model = config.pop("model")
    names = ("status", "steps", "train_loss", "valid_loss", "num_parameters")
    summary = {name: getattr(result.summary, name) for name in names}
    summary["hidden_sparsity"] = result.summary.sparsity
    summary["steps_done"] = summary.pop("steps")
    config["betas"] = " ".join(map(str, config["betas"]))
    return {"id": result.config.id, **model, **config, **summary}


def _has_grown(study: Study, wanted: dict[str, Any]) -> bool:
    """Whether it asks for more runs than before; raises if it is another study."""
    there = study.describe()
    if there.get("format") != FORMAT or there["version"] != wanted["version"]:
        raise ValueError(
            f"{study.folder} was made by smupar {there.get('version')}, this is {wanted['version']}: choose another --out"
        )
    old, new = ({**LATER_FIELDS, **_flat(described["definition"])} for described in (there, wanted))
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    different = [
        f"{name} {old.get(name)} there, {new.get(name)} here"
        for name in changed
        if not _grows(name, old.get(name), new.get(name))
    ]
    if different:
        raise ValueError(f"{study.folder} holds another study ({'; '.join(different[:4])}): choose another --out")
    return bool(changed)


def _grows(name: str, old: Any, new: Any) -> bool:
    """Runs go by their ids, so a study may ask for more: values, rules, sparsities, widths, seeds."""
    if old is None or new is None:
        return False
    if name == "axes":
        return old.keys() == new.keys() and all(_holds(new[axis], old[axis]) for axis in old)
    return new >= old if name == "seeds" else name in ("values", "rules", "sparsities", "widths") and _holds(new, old)


def _holds(new: list[Any], old: list[Any]) -> bool:
    return all(value in new for value in old)


def _flat(definition: dict[str, Any]) -> dict[str, Any]:
    """The fields of the run beside the others, so that those that differ can be named."""
    flat: dict[str, Any] = {}
    for name, value in definition.items():
        flat |= _flat(value) if name in ("run", "model") else {name: value}
    return flat


def _plain(value: Any) -> Any:
    """As JSON would give it back."""
    return json.loads(json.dumps(value))
