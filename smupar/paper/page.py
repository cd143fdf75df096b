"""The page of a figure. While its runs are trained it fills in, without a verdict; then it has the parts of the claim."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from smupar.lm.config.run_config import RunConfig
from smupar.output.page import write_page
from smupar.output.page.document import Answer, Chart, Document, Tone
from smupar.paper.figure import Claim, Figure, Place
from smupar.rules import get_rule
from smupar.study.curves.curves import chart_of
from smupar.study.definition import Stage
from smupar.study.kinds.reproduction import CLAIM, PAGE
from smupar.study.kinds.sweep import sweep_panels
from smupar.study.live import read_signs, repeated
from smupar.study.page.run_table import progress_of, result_rows, table_of, unfinished_row
from smupar.study.run_configs import unique
from smupar.study.store import Result, Study, fields_of

ANSWERS: dict[bool | None, str] = {True: "HOLDS", False: "DOES NOT HOLD", None: "CANNOT TELL"}
_HEADLINES: dict[bool | None, str] = {
    True: "Holds at scale {scale}{parts}.",
    False: "Does not hold at scale {scale}{parts}.",
    None: "Scale {scale} cannot tell{parts}.",
}
_REFRESH_SECONDS = 10.0
_TELLING = ("width", "sparsity", "pattern", "dynamic", "follow")  # the fields that tell curves of a rule apart


class GrowingPage:
    """The page of a figure whose runs are being trained. Figures share their runs, so it counts only its own."""

    def __init__(self, name: str, fig: Figure, place: Place, command: str) -> None:
        self.name, self.fig, self.place, self.command = name, fig, place, command
        self._study = Study(place.runs.parent)
        self._proposed: list[RunConfig] = []

    def announcing(self, stage: Stage) -> Stage:
        """The stage, which now also makes the folder of the figure, so that the page of the study names it. If runs are
        missing, it takes away an old verdict, which was about fewer runs."""

        def announced(study: Study) -> Sequence[RunConfig]:
            configs = stage(study)
            if study.may_write:
                self.place.folder.mkdir(parents=True, exist_ok=True)
                self._proposed = unique([*self._proposed, *configs])
                if study.missing(configs):
                    (self.place.folder / CLAIM).unlink(missing_ok=True)
            return configs

        return announced

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Keeps the page up to date during a block, and leaves it as it is when the block is interrupted."""
        try:
            with repeated(self.write, every=_REFRESH_SECONDS):
                yield
        finally:
            with contextlib.suppress(Exception):  # as in ``repeated``: the page only informs readers
                self.write()

    def write(self) -> None:
        """Writes the page, unless all runs have ended: then the figure is judged."""
        proposed = self._proposed
        results = self._study.results(proposed)
        if len(results) < len(proposed):
            write_page(self.place.folder / PAGE, self._document(results, proposed))

    def _document(self, results: Sequence[Result], proposed: Sequence[RunConfig]) -> Document:
        signs, ended = read_signs(self._study.folder), {result.config.id for result in results}
        open_ = [config for config in proposed if config.id not in ended]
        rows = result_rows(results)
        rows += [unfinished_row(run.id, fields_of(run), signs) | {"rule": get_rule(run.rule).title} for run in open_]
        document = _document(self.name, self.fig, self.place, self.command, self._charts(results, proposed), rows)
        return {**document, "progress": progress_of(rows, signs), "is_live": signs.is_running}

    def _charts(self, results: Sequence[Result], proposed: Sequence[RunConfig]) -> list[Chart]:
        """The charts of the figure. Until each of its curves has a point, they are the sweeps of its rules instead."""
        if self.fig.draw and not self.fig.measure:
            with contextlib.suppress(ValueError, LookupError, StopIteration):
                return [chart_of(panel) for panel in self.fig.draw(results)]
        return _sweeps(results, proposed, self.fig.swept[1]) if self.fig.swept else []


def _sweeps(results: Sequence[Result], proposed: Sequence[RunConfig], axis: str) -> list[Chart]:
    """A chart over the swept field for each rule, with a curve for each kind of model, and points for missing runs."""
    charts = []
    for rule in dict.fromkeys(config.rule for config in proposed):
        configs = [config for config in proposed if config.rule == rule]
        rows = [fields_of(config) for config in configs]
        values = {name: sorted({row[name] for row in rows}) for name in (axis, *_TELLING)}
        axes = {name: own for name, own in values.items() if name == axis or len(own) > 1}
        ended = [result for result in results if result.config.rule == rule]
        title = get_rule(rule).title
        charts += [chart_of(replace(panel, title=title, rule=title)) for panel in sweep_panels(ended, axes, configs)]
    return charts


def judged(
    name: str, fig: Figure, claim: Claim, place: Place, command: str, charts: list[Chart], rows: Sequence[dict[str, Any]]
) -> Document:
    """The page of a figure whose claim is decided."""
    headline = _HEADLINES[claim.holds].format(scale=place.scale.name, parts=parts_in_words(claim))
    answers = [_answer(part) for part in claim.parts or (claim,)]
    return {**_document(name, fig, place, command, charts, rows), "headline": headline, "answers": answers}


def _document(
    name: str, fig: Figure, place: Place, command: str, charts: list[Chart], rows: Sequence[dict[str, Any]]
) -> Document:
    """The page of a figure without a verdict."""
    text = place.folder / "table.txt"
    return {
        "kind": "reproduction",
        "title": f"{name}: {fig.title}",
        "headline": "Not judged yet.",
        "sentence": f"The paper: {fig.shows}",
        "answers": [],
        "charts": charts,
        "table": table_of(rows),
        "progress": None,
        "curves": {},
        "command": command,
        "folder": str(place.folder),
        "details": [("Table", text.read_text(encoding="utf-8"))] if text.exists() else [],
        "is_live": False,
        "made": time.time(),
    }


def _answer(claim: Claim) -> Answer:
    tones: dict[bool | None, Tone] = {True: "good", False: "bad", None: "unclear"}
    return {
        "name": "",
        "value": ANSWERS[claim.holds].lower(),
        "text": "\n".join(filter(None, (_capital(claim.statement), claim.numbers))),
        "tone": tones[claim.holds],
        "rule": "",
    }


def parts_in_words(claim: Claim) -> str:
    """How many parts of a claim hold, if they differ."""
    holding = [part.holds for part in claim.parts].count(True)
    return f": {holding} of {len(claim.parts)} parts hold" if len(claim.parts) > 1 and holding < len(claim.parts) else ""


def _capital(text: str) -> str:
    return text if text.startswith("muP") else text[:1].upper() + text[1:]
