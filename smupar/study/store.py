"""A study on disk: a folder with one folder per run, named by the run's id. A run is finished once its summary is there.

study.json       what the study is, and the command that made it
data.json        checksums of the texts and traces that its runs read
runs/<id>/       config.json, metrics.jsonl, and, last, summary.json
planned.json, live/  what the running command will do, and its signs of life (study/live.py)
stacks/          which runs are trained together, and the states of running stacks
damaged/<id>/    folders of damaged runs, which were run again
table.csv        one row for each run, also as table.json, and as table.parquet on request
report.html      the page, with picture.png beside it
best.json        the best hyperparameters, for a search
proxy-*.trace.json  traces that runs follow
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smupar import __version__
from smupar.lm.config.fields import default_of, differences, flat
from smupar.lm.config.run_config import LATER_FIELDS, RunConfig
from smupar.lm.run.metrics import METRICS_FILE, Row, metrics_line
from smupar.output.checksums import SUMS
from smupar.output.files import locked, refuse_other_files, write_atomic
from smupar.output.json_files import DamagedFileError, printable, read_object, read_record, write_sealed
from smupar.output.optional import optional
from smupar.refusals import refuse
from smupar.study.config import TransferConfig
from smupar.study.run_configs import unique

if TYPE_CHECKING:  # torch takes seconds to load, and the page of a study needs none of it
    from smupar.lm.run.folder import Summary
    from smupar.updates.trace import Trace

FORMAT = "smupar-study/1"
_SAME_RUNS_SINCE = "0.1.0"  # the first version whose runs are the same as this one's: its studies can go on
_REMEDY = "restore it from a copy, or choose another --out"
# What may grow when a study continues: the lists of a transfer study, the axes of a sweep and the number of seeds. Finished
# runs stay, since they are found by their ids.
_LISTS = {item.name for item in fields(TransferConfig) if isinstance(default_of(item), tuple)}


@dataclass(frozen=True)
class Result:
    """A finished run."""

    config: RunConfig
    summary: Summary

    @property
    def loss(self) -> float:
        """The loss that sweeps compare: the mean over the last 5 % of the steps; infinite if the run diverged."""
        loss = self.summary.train_loss
        return float("inf") if loss is None or self.summary.status == "diverged" else loss


@dataclass(frozen=True)
class _Described:
    """The content of study.json."""

    format: str
    version: str
    definition: dict[str, Any]
    command: str


class Study:
    """Open it with ``with Study.open(...) as study`` to add runs; one process at a time can. ``Study(folder)`` only reads."""

    def __init__(self, folder: str | Path, *, keeps_weights: bool = False) -> None:
        self.folder = Path(folder)
        self.runs, self.stacks = self.folder / "runs", self.folder / "stacks"
        self.keeps_weights = keeps_weights  # whether runs save a checkpoint at their end
        self.may_write = False
        self.damaged: dict[str, str] = {}  # ids of damaged runs, and their damage
        self._without_summary: set[str] = set()

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, folder: str | Path, definition: dict[str, Any], command: str, *, keeps_weights: bool = False
    ) -> Iterator[Study]:
        """Makes the folder, or continues in it if it holds the same study from the same version."""
        study = cls(folder, keeps_weights=keeps_weights)
        study.may_write = True
        file, is_new = study.folder / "study.json", not study.folder.exists()
        with locked(study.folder), study._undone_if_nothing_ran(is_new):
            if not file.exists():
                refuse_other_files(study.folder, "study")
            stored = json.loads(json.dumps(definition))  # a round trip, so that tuples become lists, as on disk
            described = {"format": FORMAT, "version": __version__, "definition": stored, "command": command}
            if not file.exists() or _has_grown(study, described):
                write_sealed(file, described)
            study.runs.mkdir(exist_ok=True)
            yield study

    @contextlib.contextmanager
    def _undone_if_nothing_ran(self, is_new: bool) -> Iterator[None]:
        """Removes or restores the folder if a command fails before its first run. Such a command has a mistake, and the
        corrected one must find the folder free."""
        file, begun = self.folder / "study.json", self._begun()
        before = file.read_bytes() if file.is_file() else None
        try:
            yield
        except BaseException:
            if self._begun() == begun and before is not None:
                if file.read_bytes() != before:
                    write_atomic(file, before.decode())  # as it was before it grew
            elif is_new and not self._begun():
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _begun(self) -> set[Path]:
        """The files that runs and stacks have left in the folder."""
        return {*self.runs.glob("*"), *self.stacks.glob("*")}

    def record_checksum(self, what: str, name: str, sha256: str) -> None:
        """Records the checksum of a text or a trace. Raises if another checksum is recorded under this name."""
        checksums = self._checksums()
        refuse(
            checksums.setdefault(f"{what} {name}", sha256) != sha256,
            f"the {what} {name!r} is not the one that {self.folder} was started with: restore that one, rename this one, or "
            "choose another --out",
        )
        write_sealed(self.folder / "data.json", checksums)

    def files(self, configs: Sequence[RunConfig]) -> dict[str, str]:
        """The sha256 of each text of the study, and of each trace that these runs follow."""
        traces = {f"trace {config.portable.follow}" for config in configs}
        return {name: sha256 for name, sha256 in self._checksums().items() if name.startswith("text ") or name in traces}

    def _checksums(self) -> dict[str, str]:
        path = self.folder / "data.json"
        checksums = read_object(path, remedy=_REMEDY) if path.exists() else {}
        for name, sha256 in checksums.items():
            if not isinstance(sha256, str):
                raise DamagedFileError(f"{path} is damaged ({name!r} should be text, is {sha256!r}): {_REMEDY}")
        return checksums

    def describe(self) -> dict[str, Any]:
        """Reads study.json."""
        path = self.folder / "study.json"
        if not path.exists():
            raise FileNotFoundError(f"{self.folder} is not the folder of a study: it has no study.json")
        return vars(read_record(_Described, path, remedy=_REMEDY))

    def missing(self, configs: Sequence[RunConfig]) -> list[RunConfig]:
        """The runs without a result, each once."""
        return [config for config in unique(configs) if self._result(config.id) is None]

    def has_ended(self, runs: Iterable[str]) -> bool:
        """Whether all runs with these ids have a result."""
        return all(self._result(run) is not None for run in runs)

    def _result(self, run: str) -> Result | None:
        """The result of a run; None until it has ended. A damaged result counts as None, and is reported once."""
        from smupar.lm.run.folder import read_config, read_summary

        folder = self.runs / run
        if not (folder / "summary.json").exists():
            return None
        try:
            config, summary = read_config(folder), read_summary(folder)
            assert summary is not None
            for name, own in (("config.json", config.id), ("summary.json", summary.id)):
                refuse(own != run, f"{folder / name} is damaged (it belongs to run {own})")
        except (ValueError, OSError) as error:
            if run not in self.damaged:
                self.damaged[run] = str(error)
                warnings.warn(f"run {run} is left out, and the study's command runs it again: {error}", stacklevel=4)
            return None
        return Result(config, summary)

    def set_aside_damaged(self, configs: Sequence[RunConfig]) -> None:
        """Moves the folders of damaged runs away, so that the runs can be run again."""
        for config in configs:
            if self.damaged.pop(config.id, None):
                place = self.folder / "damaged" / config.id
                shutil.rmtree(place, ignore_errors=True)
                place.parent.mkdir(exist_ok=True)
                (self.runs / config.id).replace(place)

    def add(self, config: RunConfig, summary: Summary, metrics: Sequence[Row] = (), trace: Trace | None = None) -> None:
        """Writes a finished run; its summary comes last."""
        folder = self.runs / config.id
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "config.json", config.to_json())
        write_atomic(folder / METRICS_FILE, "".join(map(metrics_line, metrics)))
        summary.write(folder, trace)

    def results(self, configs: Sequence[RunConfig] | None = None) -> list[Result]:
        """The results of these runs, in their order; by default the results of all finished runs."""
        if configs is None:
            self._name_lost_summaries()
            every = [self._result(path.parent.name) for path in sorted(self.runs.glob("*/summary.json"))]
        else:
            every = [result and replace(result, config=config) for config in configs for result in [self._result(config.id)]]
        return [result for result in every if result is not None]

    def _name_lost_summaries(self) -> None:
        """Names each run, once, that has ended (its checksums are there) but has no summary."""
        for folder in sorted(path.parent for path in self.runs.glob(f"*/{SUMS}")):
            if folder.name not in self._without_summary and not (folder / "summary.json").exists():
                self._without_summary.add(folder.name)
                warnings.warn(
                    f"run {folder.name} is left out, and the study's command runs it again: {folder / 'summary.json'} is "
                    "missing",
                    stacklevel=4,
                )

    def trace_to_follow(self, config: RunConfig) -> Path:
        """The file with the trace of a finished run, for other runs to follow. It lies in the study's folder, under a name made
        from its content. An open study writes it; a study that only reads returns the name."""
        from smupar.lm.run.folder import TRACE_FILE
        from smupar.updates.trace import Trace

        trace = Trace.load(self.runs / config.id / TRACE_FILE)
        path = self.folder.resolve() / f"proxy-{hashlib.sha256(trace.to_json().encode()).hexdigest()[:8]}.trace.json"
        if self.may_write and not path.exists():
            trace.save(path)
        return path

    def write_table(self) -> None:
        write_rows(self.folder / "table", [row_of(result) for result in self.results()])

    def write_parquet(self) -> None:
        """Writes the rows of the table with their types."""
        arrow, parquet = (optional(name, "table.parquet") for name in ("pyarrow", "pyarrow.parquet"))
        content = io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist([row_of(result) for result in self.results()]), content)
        write_atomic(self.folder / "table.parquet", content.getvalue())


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as JSON and as CSV; ``path`` has no suffix."""
    write_atomic(path.with_suffix(".json"), json.dumps(rows, indent=1))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path.with_suffix(".csv"), text.getvalue())


def fields_of(config: RunConfig) -> dict[str, Any]:
    """The first part of a run's row: its configuration."""
    return {"id": config.id, **flat(asdict(config.portable)), "betas": " ".join(map(str, config.betas))}


def row_of(result: Result) -> dict[str, Any]:
    """A run as a flat row: its configuration, then its results. The speed is left out, so that tables can be compared."""
    config, summary = result.config, result.summary
    return {
        **fields_of(config),
        "status": summary.status,
        "train_loss": summary.train_loss,
        "valid_loss": summary.valid_loss,
        "num_parameters": summary.num_parameters,
        "hidden_sparsity": summary.sparsity,
        "steps_done": summary.steps,
    }


def _has_grown(study: Study, here: dict[str, Any]) -> bool:
    """Whether a study now has more runs than before. Raises if it is another study."""
    there = study.describe()
    refuse(
        there["format"] != FORMAT or not _release(_SAME_RUNS_SINCE) <= _release(there["version"]) <= _release(here["version"]),
        f"{study.folder} was made by smupar {printable(there['version'])}, this is {here['version']}: choose another --out",
    )
    old, new = (_comparable(described["definition"]) for described in (there, here))
    grown = {name for name in old.keys() & new.keys() if old[name] != new[name] and _grows(name, old[name], new[name])}
    other = differences(*({name: value for name, value in values.items() if name not in grown} for values in (old, new)))
    refuse(other, f"{study.folder} holds another study ({printable(other)}): choose another --out")
    return bool(grown)


def _release(version: object) -> tuple[int, ...]:
    """The numbers in a version, for comparisons; empty for text that is not a version."""
    return tuple(int(number) for number in re.findall(r"\d+", str(version))[:3])


def _comparable(definition: dict[str, Any]) -> dict[str, Any]:
    """All fields by name, to compare studies. A field that the older version lacks gets the value that its runs had."""
    later = {**LATER_FIELDS, **({"depths": []} if definition.get("kind") == "transfer" else {})}
    return {**later, **flat({**definition, "axes": None}), "axes": definition.get("axes")}


def _grows(name: str, old: Any, new: Any) -> bool:
    if old is None or new is None:
        return False
    if name == "axes":
        are_axes = (
            isinstance(old, dict) and old.keys() == new.keys() and all(isinstance(values, list) for values in old.values())
        )
        return are_axes and all(value in new[axis] for axis in old for value in old[axis])
    if name == "seeds":
        return isinstance(old, int) and bool(new >= old)
    return name in _LISTS and isinstance(old, list) and all(value in new for value in old)
