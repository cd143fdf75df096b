"""What a figure is, and what the files of figures share: reading curves off results, drawing them, claims with their numbers.

Each figure or table is one file that ends with ``FIGURE = Figure(...)``; reproduce.py runs it, publish.py writes its page. A
figure must say its title, what the paper shows, and a claim that can fail. All else is optional, and happens in this order:

prepare         raises before anything is trained if something is missing
runs, then      what is trained; ``then`` proposes runs that depend on the results of the first
swept           more seeds are run round the best value of every curve
measure         turns the runs, or nothing at all, into what the claim is about; without it the claim is about the runs' rows
draw, text      the picture of the rows; a table that needs no run
claim           yes or no, with numbers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smupar.lm.config.run import RunConfig
from smupar.paper.settings import Scale
from smupar.rules import get_rule
from smupar.study.curves import LOSS, Panel, Point, Series
from smupar.study.optima import Curve, farthest_move, move_in_words, times
from smupar.study.space import with_fields
from smupar.study.store import Result, Study

Rows = Sequence[Result]
STABLE = 2.0
"""An optimum that moves by no more than this factor is called stable."""
_MORE = 1.1
"""How much farther one must move than another to be said to move more."""


@dataclass(frozen=True)
class Claim:
    """What the paper says about a figure, as a yes or no about these runs, with the numbers behind it."""

    holds: bool
    text: str
    parts: tuple[Claim, ...] = ()
    """Where it is made of several."""


def all_of(*claims: Claim) -> Claim:
    text = "; ".join(f"{'yes' if claim.holds else 'NO'}: {claim.text}" for claim in claims)
    return Claim(all(claim.holds for claim in claims), text, claims)


@dataclass(frozen=True)
class Place:
    """Where and how a figure is made."""

    scale: Scale
    folder: Path  # for what the figure writes
    runs: Path  # holds the folders of runs, by their ids
    device: str = "auto"
    data_dir: str | None = None  # local copies of the tasks of Table 2


@dataclass(frozen=True)
class Figure:
    """A figure or table of the paper, or one beside it."""

    title: str
    shows: str  # by the paper, in a sentence
    claim: Callable[[Any], Claim]
    """About what ``measure`` returns; without it, about the rows."""
    finding: int | None = None  # of the paper's four
    prepare: Callable[[str | None], None] | None = None  # given --data-dir
    runs: Callable[[Scale], list[RunConfig]] | None = None
    then: Callable[[Scale, Study], list[RunConfig]] | None = None
    swept: tuple[str, str] | None = None
    """The experiment whose number of seeds counts, and the field that is swept."""
    keeps_weights: bool = False
    measure: Callable[[Place, Rows], Any] | None = None
    what: Callable[[Scale], str] | None = None
    """A sentence about what is measured, where nothing is trained for it."""
    draw: Callable[[Rows], list[Panel]] | None = None
    columns: int | None = None  # panels in a row of the picture; default all
    text: Callable[[], str] | None = None


# Proposing


def sweep(
    scale: Scale,
    experiment: str,
    rules: Iterable[str],
    *,
    axis: str = "lr",
    width: Callable[[float], int] | None = None,
    change: Callable[[RunConfig], RunConfig] = lambda run: run,
) -> list[RunConfig]:
    """Every rule, sparsity and value of the axis of an experiment, with the first seed; ``width`` of a sparsity, where that
    varies. A dense model under SmuPar or an ablation of it is the one under muP, and run once."""
    starts = []
    for rule in rules:
        for sparsity in scale.size(experiment).sparsities:
            shared = "mup" if sparsity == 0 and rule != "sp" else rule
            run = scale.run(experiment, rule=shared, width=width(sparsity) if width else None, sparsity=sparsity)
            starts.append(change(run))
    return sweep_values(scale, experiment, axis, starts)


def sweep_values(scale: Scale, experiment: str, axis: str, starts: Iterable[RunConfig]) -> list[RunConfig]:
    """Each run at every value of the axis."""
    values = [2.0**log2 for log2 in scale.size(experiment).log2_values]
    runs = [with_fields(start, {axis: value}) for start in starts for value in values]
    return list({run.id: run for run in runs}.values())


# Reading


def curve(
    rows: Rows, rule: str, sparsity: float, *, axis: str = "lr", keep: Callable[[RunConfig], bool] | None = None
) -> Curve:
    """Loss over the swept values, means over seeds, of one rule and sparsity. ``keep`` tells runs apart that share both."""
    same = {rule, "mup"} if sparsity == 0 and rule != "sp" else {rule}
    losses: dict[float, list[float]] = {}
    width = 0
    for row in rows:
        config = row.config
        if config.rule in same and config.sparsity == sparsity and (keep is None or keep(config)):
            losses.setdefault(getattr(config, axis), []).append(row.loss)
            width = config.model.width
    values = sorted(losses)
    if not values:
        raise ValueError(f"no finished run of {rule} at sparsity {sparsity:g}")
    means = tuple(sum(losses[value]) / len(losses[value]) for value in values)
    return Curve(rule, width, sparsity, tuple(values), means)


def curves(rows: Rows, rule: str, axis: str = "lr") -> list[Curve]:
    """One for each sparsity, the dense one first."""
    return [curve(rows, rule, sparsity, axis=axis) for sparsity in sparsities(rows)]


def sparsities(rows: Rows) -> list[float]:
    return sorted({row.config.sparsity for row in rows if row.config.sparsity is not None})


def at_dense_optimum(curves: Sequence[Curve], index: int) -> float:
    """Loss of a curve at the value of the grid that is best for the first one."""
    best = curves[0].values[curves[0].best_index]
    losses = dict(zip(curves[index].values, curves[index].losses, strict=True))
    return losses.get(best, math.inf)


def title(rule: str) -> str:
    return get_rule(rule).title


# Drawing


def panel(curves: Sequence[Curve], heading: str, x_label: str = "learning rate") -> Panel:
    """A rule's curves over the swept value, light for sparse."""
    series = tuple(
        Series(
            f"sparsity {own.sparsity:.4g}",
            tuple(Point(x, y) for x, y in zip(own.values, own.losses, strict=True)),
            number / max(1, len(curves) - 1),
            best=own.best_value,
        )
        for number, own in enumerate(curves)
    )
    return Panel(f"{heading}: best moves {move_in_words(curves)}", x_label, LOSS, series, curves[0].best)


def over_sparsity(lines: dict[str, dict[float, float]], heading: str, y_label: str, x_label: str = "density") -> Panel:
    """One curve for each rule over the density."""
    series = tuple(
        Series(label, tuple(Point(1 - s, loss) for s, loss in sorted(values.items())), number / max(1, len(lines) - 1))
        for number, (label, values) in enumerate(lines.items())
    )
    return Panel(heading, x_label, y_label, series)


# Claiming


def stable(curves: Sequence[Curve], name: str, what: str = "learning rate") -> Claim:
    move = farthest_move(curves)
    return Claim(move <= STABLE, f"{name}'s best {what} moves {times(move)}{edge(curves)}, at most {STABLE:g}x asked")


def moves_more(curves: Sequence[Curve], than: Sequence[Curve], name: str, other: str) -> Claim:
    mine, theirs = farthest_move(curves), farthest_move(than)
    return Claim(mine > _MORE * theirs, f"{name}'s moves {times(mine)}{edge(curves)}, more than {other}'s {times(theirs)}")


def edge(curves: Sequence[Curve]) -> str:
    return " or further (edge of the grid)" if any(one.on_edge for one in curves) else ""
