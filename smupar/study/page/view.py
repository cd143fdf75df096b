"""Makes the document that the page of a study shows, whether the study is finished or not.

A running study writes each run's summary last. So a run with a summary is complete, and any other run is waiting, running, or
was left by a process that has ended. Each finished run is read only once; after that a refresh reads only the runs that have
ended since. Half-written and damaged files are ignored.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from smupar.lm.config.run_config import RunConfig
from smupar.output.json_files import WRONG_TYPES, DamagedFileError, printable
from smupar.output.page import write_page
from smupar.output.page.document import Chart, Document, thinned
from smupar.study.curves.curves import chart_of
from smupar.study.definition import Findings, StudyDefinition
from smupar.study.kinds.reproduction import reproduction_from_json
from smupar.study.kinds.sweep import sweep_from_json
from smupar.study.kinds.transfer import transfer_from_json
from smupar.study.kinds.tune import search_from_json
from smupar.study.live import Signs, read_planned, read_signs, repeated
from smupar.study.page.run_table import (
    progress_of,
    read_metrics,
    read_run,
    rules_of_dense_runs,
    shown_rule,
    table_of,
    unfinished_row,
)
from smupar.study.run_configs import unique
from smupar.study.store import Result, Study, fields_of

# Readers of study.json by kind. Any other kind is read as a sweep without axes.
FROM_JSON: dict[str, Callable[[dict[str, Any]], StudyDefinition]] = {
    "reproduce": reproduction_from_json,
    "sweep": sweep_from_json,
    "transfer": transfer_from_json,
    "tune": search_from_json,
}
_REFRESH_SECONDS = 10.0
_MOST_CURVES, _MOST_POINTS = 300, 40  # loss curves in a page, and points in each


def definition_of(study: Study) -> StudyDefinition:
    """The study that its study.json describes."""
    stored = study.describe()["definition"]
    kind = stored.get("kind")
    try:
        return FROM_JSON.get(kind if isinstance(kind, str) else "", sweep_from_json)(stored)
    except (ValueError, *WRONG_TYPES) as error:
        raise DamagedFileError(
            f"{study.folder / 'study.json'} is damaged, or of another version ({printable(str(error))}): restore it from a "
            "copy, or start the study's command again with another --out"
        ) from error


def _nothing_found(read: Callable[[Study], Findings], study: Study) -> Findings:
    """The findings before any run has ended: charts with waiting points and how to read them, if these can be drawn."""
    found = Findings("", (), ())
    with contextlib.suppress(ValueError):
        found = read(study)
    return Findings(found.sentence, found.panels, (), "No result yet: the first runs have not ended.")


def left_out(study: Study) -> str:
    """A sentence that names runs whose files are damaged."""
    if not study.damaged:
        return ""
    return (
        f"Left out, because their files are damaged: {', '.join(sorted(study.damaged))}; the study's command runs them again."
    )


def mixed_decay(results: Sequence[Result]) -> str:
    """A warning if runs have different kinds of weight decay, so that their losses cannot be compared."""
    kinds = Counter(result.config.decay for result in results if result.config.weight_decay)
    if len(kinds) < 2:
        return ""
    counts = ", ".join(f"{kind} in {count}" for kind, count in sorted(kinds.items()))
    coupled = " Coupled decay shrinks weights more where a rule raises their learning rate." if "coupled" in kinds else ""
    return f"This study mixes decay conventions (runs: {counts}).{coupled} Compare only runs of one kind."


@contextlib.contextmanager
def refreshed(study: Study, definition: StudyDefinition) -> Iterator[None]:
    """Keeps the page of a study up to date during a block. If the block is interrupted, the page says so: the sign of life must
    have ended by then."""
    view = StudyView(study.folder, definition)

    def write() -> None:
        write_page(study.folder / "report.html", view.document())

    try:
        with repeated(write, every=_REFRESH_SECONDS):
            yield
    except BaseException:
        with contextlib.suppress(Exception):  # it must not hide what interrupted the study
            write()
        raise


class StudyView:
    """Reads a study's folder. ``document()`` is the current content of its page."""

    def __init__(self, folder: Path, definition: StudyDefinition | None = None) -> None:
        """``definition`` is the definition from the command that runs the study. By default it is read from study.json."""
        self.study = _RememberedStudy(folder)
        self._given, self._definition = definition, definition
        self._described: dict[str, Any] = {}
        self._found: tuple[object, Findings, list[Chart]] | None = None
        self._metrics: dict[str, list[list[float | None]]] = {}

    def document(self, *, with_curves: bool = True) -> Document:
        """The current document, with the loss curves of runs if ``with_curves``."""
        self._refresh()
        signs, waiting = read_signs(self.study.folder), self._waiting()
        results = self.study.results()
        findings, charts = self._read(waiting, is_open=bool(waiting) or signs.is_running)
        rows = self._rows(results, waiting, signs)
        progress = progress_of(rows, signs)
        found = " ".join(findings.remarks) if findings.answers else findings.sentence  # the cards show the rest
        sentences = (left_out(self.study), found, mixed_decay(findings.results))  # the page shows how many runs are done
        return {
            "kind": "study",
            "title": self.definition.title,
            "headline": findings.headline,
            "sentence": " ".join(filter(None, sentences)),
            "answers": list(findings.answers),
            "charts": charts,
            "table": table_of(rows),
            "progress": progress,
            "curves": self._curves(rows, signs) if with_curves else {},
            "command": self._described["command"],
            "folder": str(self.study.folder),
            "details": [("Configuration", json.dumps(self._described["definition"], indent=1))],
            "is_live": signs.is_running,
            "made": time.time(),
        }

    @property
    def definition(self) -> StudyDefinition:
        assert self._definition is not None, "_refresh makes it"
        return self._definition

    @property
    def version(self) -> tuple[object, ...]:
        """Changes when a run ends or the study grows, but not with live losses."""
        self._refresh()
        return len(self.study.ended), json.dumps(self._described), self._beside()

    def _beside(self) -> object:
        return self.definition.beside(self.study) if self.definition.beside else None

    def curve(self, run: str) -> list[list[float | None]]:
        """Step, loss and validation loss of a run, from its metrics or from its process's sign of life."""
        if run in self.study.ended and run not in self._metrics:
            self._metrics[run] = read_metrics(self.study.runs / run)
        return (
            self._metrics.get(run) or read_metrics(self.study.runs / run) or read_signs(self.study.folder).losses.get(run, [])
        )

    def _refresh(self) -> None:
        self.study.refresh()
        described = self.study.describe()
        if described != self._described:
            self._described = described
            self._definition = self._given or definition_of(self.study)

    def _read(self, waiting: Iterable[str], *, is_open: bool) -> tuple[Findings, list[Chart]]:
        """The findings and charts of the study. They are read again only if a run has ended since. ``is_open``: whether more
        runs may follow."""
        state = len(self.study.ended), sorted(waiting), self._described, self._beside(), is_open
        if self._found is None or self._found[0] != state:
            definition = self.definition
            read = (definition.read_so_far or definition.read) if is_open else definition.read
            findings = read(self.study) if self.study.ended else _nothing_found(read, self.study)
            self._found = state, findings, [chart_of(panel) for panel in findings.panels]
        return self._found[1:]

    def _waiting(self) -> dict[str, dict[str, Any]]:
        """The rows of unfinished runs by id: those that the running command plans, or else those that the definition
        proposes."""
        planned = read_planned(self.study.folder)
        if planned is None:
            planned = {}
            for propose in self.definition.stages:
                with contextlib.suppress(ValueError, OSError):
                    planned = {config.id: fields_of(config) for config in self.study.missing(propose(self.study))}
                if planned:  # later stages are not known yet
                    break
        return {run: row for run, row in planned.items() if run not in self.study.ended}

    def _rows(self, results: Sequence[Result], waiting: Mapping[str, Mapping[str, Any]], signs: Signs) -> list[dict[str, Any]]:
        rows = [self.study.rows[result.config.id] for result in results]
        rows += [unfinished_row(run, fields, signs) for run, fields in waiting.items()]
        shared = rules_of_dense_runs(self._described["definition"], rows)
        return [row | {"rule": shown_rule(row, shared)} for row in rows]

    def _curves(self, rows: Sequence[Mapping[str, Any]], signs: Signs) -> dict[str, list[list[float | None]]]:
        """The thinned loss curves of running runs and of the best ones, for a page without a server."""
        ranked = sorted(
            rows, key=lambda row: (row["state"] not in ("running", "stalled"), row["loss"] is None, row["loss"] or 0)
        )
        curves = {row["id"]: self.curve(row["id"]) for row in ranked[:_MOST_CURVES] if row["state"] != "waiting"}
        return {run: thinned(curve, _MOST_POINTS) for run, curve in curves.items() if curve}


class _RememberedStudy(Study):
    """A study that reads each finished run only once. Its content is as of the last ``refresh``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ended: dict[str, Result] = {}
        self.rows: dict[str, dict[str, Any]] = {}  # the rows of the page, except for the rule

    def refresh(self) -> None:
        for path in self.runs.glob("*"):
            if path.name not in self.ended and (path / "summary.json").exists():
                try:
                    self.ended[path.name], self.rows[path.name] = read_run(path)
                except (ValueError, OSError, *WRONG_TYPES) as error:
                    self.damaged[path.name] = str(error)
                else:
                    self.damaged.pop(path.name, None)

    def results(self, configs: Sequence[RunConfig] | None = None) -> list[Result]:
        if configs is None:
            return [self.ended[run] for run in sorted(self.ended)]
        return [self.ended[config.id] for config in configs if config.id in self.ended]

    def missing(self, configs: Sequence[RunConfig]) -> list[RunConfig]:
        return [config for config in unique(configs) if config.id not in self.ended]
