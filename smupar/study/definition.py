"""The definition of a study: which runs it needs, and how it reads their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from smupar.lm.config.run_config import RunConfig
from smupar.output.page.document import Answer
from smupar.study.curves.curves import Panel
from smupar.study.curves.optima import Curve
from smupar.study.run_configs import grouped, with_fields
from smupar.study.store import Result, Study, row_of

# Proposes runs, given the results that the study has so far.
Stage = Callable[[Study], Sequence[RunConfig]]

# Columns of the table that are not fields of the configuration.
_RESULT_COLUMNS = ("id", "status", "steps_done", "train_loss", "valid_loss", "num_parameters", "hidden_sparsity")
USUAL = ("rule", "sparsity", "width", "depth", "lr")  # the fields that most studies vary
_MOST_FIELDS = 5  # that a sentence names


@dataclass(frozen=True)
class Findings:
    """The findings of a study, for its page."""

    sentence: str
    panels: Sequence[Panel]
    results: Sequence[Result]
    headline: str = ""  # the answer in a few words
    answers: Sequence[Answer] = ()
    remarks: tuple[str, ...] = ()  # sentences that go with the answers: reasons for doubt, and what to do next


@dataclass(frozen=True)
class StudyDefinition:
    """One sweep, transfer study or search. A command makes it from its flags, and a report from study.json."""

    # The content of study.json. Its "kind" tells view.py which reader makes the study again. A study continues only with the
    # same values, or with some that add runs.
    stored: dict[str, Any]
    stages: Sequence[Stage]  # proposes the runs; a stage may depend on the results of earlier ones
    read: Callable[[Study], Findings]
    title: str = "Study"
    read_so_far: Callable[[Study], Findings] | None = None  # reads an unfinished study; default: ``read``
    # Returns a value that changes with the files that ``read`` reads, apart from the files of runs.
    beside: Callable[[Study], object] | None = None


def with_more_seeds(stages: Sequence[Stage], axis: str, seeds: int) -> list[Stage]:
    """Each stage, followed by a stage that runs more seeds of its runs around the best value of the axis."""
    return [stage for first in stages for stage in (first, partial(_more_seeds_of, first, axis, seeds))]


def _more_seeds_of(stage: Stage, axis: str, seeds: int, study: Study) -> list[RunConfig]:
    return more_seeds(study, stage(study), axis, seeds)


def more_seeds(study: Study, first: Sequence[RunConfig], axis: str, seeds: int) -> list[RunConfig]:
    """More seeds where they matter, at the best value of every curve and its two neighbours. The new results may move the best
    value, so a study calls this again until it proposes nothing new."""
    if seeds == 1:  # saves time: the page of a large study calls this whenever it is made
        return []
    runs = []
    for curve in grouped(first, lambda config: with_fields(config, {axis: 1.0}).id):
        points = [seeds_of(config, seeds) for config in sorted(curve, key=lambda config: getattr(config, axis))]
        losses = {result.config.id: result.loss for point in points for result in study.results(point)}
        asked = _points_with_seeds(points, losses)
        runs += [run for n, point in enumerate(points) for run in point[1:] if n in asked or run.id in losses]
    return runs


def _points_with_seeds(points: Sequence[Sequence[RunConfig]], losses: Mapping[str, float]) -> set[int]:
    """The indices of the points of a curve that get all seeds. Points are added in rounds, and each round depends only on
    results of earlier rounds. So a study that was interrupted in the middle of a round proposes the same runs again."""
    asked: set[int] = set()
    while True:
        known = [[run.id for run in (point if n in asked else point[:1])] for n, point in enumerate(points)]
        if any(run not in losses for n in asked for run in known[n]):
            return asked
        ended = [[losses[run] for run in ids if run in losses] for ids in known]
        means = [sum(own) / len(own) if own else math.inf for own in ended]
        best = means.index(min(means))
        around = {n for n in range(len(points)) if abs(n - best) <= 1}
        if around <= asked:
            return asked
        asked |= around


def seeds_of(config: RunConfig, seeds: int) -> list[RunConfig]:
    """The run, and the runs that differ from it only in their seed."""
    return [config, *(replace(config, seed=config.seed + number) for number in range(1, seeds))]


def by_seeds(results: Sequence[Result]) -> list[list[Result]]:
    """The results in groups of runs that differ only in their seed."""
    return grouped(results, lambda result: replace(result.config, seed=0).id)


def mean_loss(results: Sequence[Result]) -> float:
    return sum(result.loss for result in results) / len(results)


def curve_of(
    results: dict[float, list[Result]],
    *,
    rule: str,
    width: int,
    sparsity: float,
    is_proxy: bool = False,
    depth: int | None = None,
) -> Curve:
    """The curve of one model, from the results of all seeds at each swept value."""
    values = sorted(results)
    losses = tuple(mean_loss(results[value]) for value in values)
    seeds = tuple(tuple(result.loss for result in results[value]) for value in values)
    return Curve(rule, width, sparsity, tuple(values), losses, is_proxy, seeds, depth)


def best_in_words(results: Sequence[Result]) -> str:
    """The best run in one sentence. Runs that differ only in their seed count as one, with their mean loss."""
    best = min(by_seeds(results), key=mean_loss)
    diverged = sum(result.summary.status == "diverged" for result in results)
    several, where, plural = len(best) > 1, _where(best[0], results), "s" if len(results) > 1 else ""
    runs = f"run{'s' if several else ''} {', '.join(result.config.id for result in best)}"
    losses = [result.loss for result in best]
    spread = f", the mean of {len(best)} seeds ({min(losses):.4f} to {max(losses):.4f})" if several else ""
    return (
        f"Of {len(results)} run{plural}, {diverged} diverged; the best ends at a loss of {mean_loss(best):.4f}{spread}: "
        f"{where + ', ' if where else ''}{runs}."
    )


def best_row(results: Sequence[Result]) -> dict[str, Any]:
    """The best runs, which differ only in their seed: their mean loss, ids, and the fields that vary in the study."""
    best = min(by_seeds(results), key=mean_loss)
    row = row_of(best[0])
    varied = varied_columns([row_of(result) for result in results], (*_RESULT_COLUMNS, "seed"))
    fields = {name: row[name] for name in varied}
    return {"loss": mean_loss(best), "runs": [result.config.id for result in best], "fields": fields}


def best_in_short(results: Sequence[Result]) -> str:
    """The best loss and where it is, in a few words."""
    best = min(by_seeds(results), key=mean_loss)
    if math.isinf(mean_loss(best)):
        return "Every run diverged."
    where = _where(best[0], results)
    return f"The best loss is {mean_loss(best):.4f}{f', at {where}' if where else ''}."


def _where(best: Result, results: Sequence[Result]) -> str:
    """The fields that tell a result from others, in words."""
    row, rows = row_of(best), [row_of(result) for result in results]
    return ", ".join(f"{name} {cell(row[name])}" for name in _telling(rows)[:_MOST_FIELDS])


def _telling(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The columns that tell runs apart, the usual ones first. A column is left out if its value follows from earlier columns.
    An example is the init std in a study where each rule has its own."""
    varied = varied_columns(rows, (*_RESULT_COLUMNS, "seed"))
    chosen: list[str] = []
    kinds = 1
    for name in sorted(varied, key=lambda name: USUAL.index(name) if name in USUAL else len(USUAL)):
        found = len({tuple(str(row[column]) for column in (*chosen, name)) for row in rows})
        if found > kinds:
            chosen, kinds = [*chosen, name], found
    return chosen


def varied_columns(rows: Sequence[dict[str, Any]], others: Sequence[str]) -> list[str]:
    """The columns in which rows differ, apart from ``others``."""
    return [name for name in rows[0] if name not in others and len({str(row[name]) for row in rows}) > 1]


def cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else str(value)
