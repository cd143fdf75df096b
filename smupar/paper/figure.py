"""Defines ``Figure``, and functions that the files of figures share: reading curves from results, drawing them, and making
claims with numbers.

Each figure or table is one file that ends with ``FIGURE = Figure(...)``. reproduce.py runs it, page.py shows it while it runs
and when it is judged, and publish.py writes its page in the docs. A figure must have a title, a sentence on what the paper
shows, and a claim that can fail. The rest is optional, and is called in this order:

prepare         raises before anything is trained if something is missing
runs            proposes the runs to train
then            proposes runs that depend on the results of the first runs
swept           adds seeds around the best value of every curve
last            proposes runs that come after all others and get no additional seeds
measure         computes the input of ``draw`` and ``claim``, with or without runs. By default both take the rows of the runs
draw            draws the picture
text            makes a table that needs no run
claim           says with numbers whether the paper's statement holds, or that the runs cannot tell

``from_published`` reads measurements from a published file, so that claim and picture can be made again without the runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from smupar.lm.config.run_config import RunConfig
from smupar.output.colours import rule_colour
from smupar.paper.settings import Scale
from smupar.rules import get_rule
from smupar.study.conventions import as_rule, density_in_words
from smupar.study.curves.curves import LOSS, Line, Panel, Point, line_of
from smupar.study.curves.optima import STABLE as STABLE
from smupar.study.curves.optima import Curve, farthest_move, is_lower_bound, move_in_words, times
from smupar.study.definition import by_seeds, curve_of
from smupar.study.run_configs import unique, with_fields
from smupar.study.store import Result, Study

Rows = Sequence[Result]
RULES = ("sp", "mup", "smupar")
# A lead counts if it is larger than the spread of seeds by this factor.
NUM_SPREADS = 2
# The spread of seeds for figures with one seed: the median over the configurations of Figures 6 and 12 without decay that have
# three seeds.
USUAL_SPREAD = 0.002
MORE = 1.1  # one optimum moves more than another if its move is larger by this factor
# Matches the colon before the numbers of a claim. A number follows it, or the name of a rule (": SP +3.8% at 1/4"), or a power
# of the density.
_NUMBERS = re.compile(r": (?=(?:\w+ )?[+-]?\d|as density\^)")
_AXES = {"lr": "learning rate", "init_std": "init std"}


@dataclass(frozen=True)
class Claim:
    """Whether the paper's statement about a figure holds for these runs, with the numbers that decide it."""

    holds: bool | None  # None if these runs cannot tell
    text: str  # a statement; long lists of numbers come last, after a colon
    parts: tuple[Claim, ...] = ()  # the parts, if this claim combines several

    @property
    def statement(self) -> str:
        """The text without the numbers after its colon."""
        return _NUMBERS.split(self.text, maxsplit=1)[0]

    @property
    def numbers(self) -> str:
        """The numbers after the colon of the text; "" if there are none."""
        return self.text[len(self.statement) + 2 :]


def all_of(*claims: Claim) -> Claim:
    """A claim that holds if all parts hold, fails if one fails, and is otherwise unknown."""
    words = {True: "yes", False: "NO", None: "CANNOT TELL"}
    answers = [claim.holds for claim in claims]
    holds = False if False in answers else None if None in answers else True
    return Claim(holds, "; ".join(f"{words[claim.holds]}: {claim.text}" for claim in claims), claims)


@dataclass(frozen=True)
class Place:
    """The folders and device of a figure."""

    scale: Scale
    folder: Path  # folder for the figure's files
    runs: Path  # folder that holds a folder for each run, named by its id
    device: str = "auto"
    data_dir: str | None = None  # local copies of the tasks of Table 2


@dataclass(frozen=True)
class Figure:
    """A figure or table of the paper, or one of our own."""

    title: str
    shows: str  # a sentence on what the paper shows
    claim: Callable[[Any], Claim]  # like ``draw``, takes the result of ``measure``, or the rows without ``measure``
    claimed: str = ""  # what is claimed, for README, in words that do not depend on what came out
    finding: int | None = None  # number of the paper's finding, 1 to 4
    prepare: Callable[[str | None], None] | None = None  # takes --data-dir
    runs: Callable[[Scale], list[RunConfig]] | None = None
    then: Callable[[Scale, Study], list[RunConfig]] | None = None
    expected: Callable[[Scale], list[RunConfig]] | None = None  # what ``then`` will propose, for the cost
    swept: tuple[str, str] | None = None  # the experiment that sets the number of seeds, and the swept field
    last: Callable[[Scale], list[RunConfig]] | None = None
    keeps_weights: bool = False
    measure: Callable[[Place, Rows], Any] | None = None
    from_published: Callable[[dict[str, Any]], Any] | None = None  # the result of ``measure``, from a published file
    what: Callable[[Scale], str] | None = None  # a sentence about the measurement, if no runs are trained
    draw: Callable[[Any], list[Panel]] | None = None
    columns: int | None = None  # number of panels in a row of the picture; by default all
    text: Callable[[], str] | None = None


# Proposing


def runs_of(
    scale: Scale, experiment: str, rules: Iterable[str] = RULES, *, width: Callable[[float], int] | None = None
) -> list[RunConfig]:
    """A run for every rule and sparsity of an experiment, with the first seed. ``width`` maps a sparsity to a width, if the
    width varies."""
    return unique(
        scale.run(experiment, rule=as_rule(rule, sparsity), width=width(sparsity) if width else None, sparsity=sparsity)
        for rule in rules
        for sparsity in scale.size(experiment).sparsities
    )


def swept(scale: Scale, experiment: str, runs: Iterable[RunConfig], axis: str = "lr") -> list[RunConfig]:
    """Each run at every value of the axis."""
    values = [2.0**log2 for log2 in scale.size(experiment).log2_values]
    return unique(with_fields(run, {axis: value}) for run in runs for value in values)


def sweep_rules(scale: Scale, experiment: str, rules: Iterable[str] = RULES, axis: str = "lr") -> list[RunConfig]:
    return swept(scale, experiment, runs_of(scale, experiment, rules), axis)


# Reading


def curve(
    rows: Rows, rule: str, sparsity: float, *, axis: str = "lr", keep: Callable[[RunConfig], bool] | None = None
) -> Curve:
    """The curve of one rule and sparsity: for each swept value, the mean loss over seeds. ``keep`` selects runs."""
    results: dict[float, list[Result]] = {}
    for row in rows:
        is_wanted = row.config.rule in (rule, as_rule(rule, sparsity)) and row.config.sparsity == sparsity
        if is_wanted and (keep is None or keep(row.config)):
            results.setdefault(getattr(row.config, axis), []).append(row)
    if not results:
        raise ValueError(f"no finished run of {rule} at sparsity {sparsity:g}")
    width = next(iter(results.values()))[0].config.model.width
    return curve_of(results, rule=rule, width=width, sparsity=sparsity)


def curves(rows: Rows, rule: str, axis: str = "lr") -> list[Curve]:
    """A curve for each sparsity, the dense model's first."""
    return [curve(rows, rule, sparsity, axis=axis) for sparsity in sparsities(rows)]


def sparsities(rows: Rows) -> list[float]:
    return sorted({row.config.sparsity for row in rows if row.config.sparsity is not None})


def at_dense_optimum(curves: Sequence[Curve], index: int) -> float:
    """The loss of a curve at the grid value that is best for the first curve."""
    losses = dict(zip(curves[index].values, curves[index].losses, strict=True))
    return losses.get(curves[0].best_value, math.inf)


def valid_loss(row: Result) -> float:
    loss = row.summary.valid_loss
    return math.inf if loss is None else loss


def spread_of_seeds(rows: Rows) -> float:
    """The standard deviation of the training loss over seeds, as a share of the loss, pooled over all configurations with
    several seeds. If every configuration has one seed, it is ``USUAL_SPREAD``."""
    return pooled_spread([row.loss for row in group] for group in by_seeds(rows)) or USUAL_SPREAD


def pooled_spread(groups: Iterable[Sequence[float]]) -> float | None:
    """The pooled standard deviation within groups of losses, as a share of the loss; None if no group has two losses. Groups
    with diverged runs do not count."""
    seeded = [losses for losses in groups if len(losses) > 1 and all(map(math.isfinite, losses))]
    return math.sqrt(fmean(variance(losses) / fmean(losses) ** 2 for losses in seeded)) if seeded else None


def spread_in_words(spread: float | None) -> str:
    return "the spread of seeds" if spread else "the usual spread of seeds (one seed here)"


def title(rule: str) -> str:
    return get_rule(rule).title


# Drawing


def panel(
    curves: Sequence[Curve], heading: str, x_label: str = "learning rate", *, label: Callable[[Curve], str] | None = None
) -> Panel:
    """A rule's curves over the swept value. Sparser models have lighter lines. By default labels have the density, and the
    width if it varies."""
    varies = len({curve.width for curve in curves}) > 1
    lines = tuple(
        line_of(curve, label(curve) if label else _label(curve, with_width=varies), number / max(1, len(curves) - 1))
        for number, curve in enumerate(curves)
    )
    marked = curves[0].best, "best when dense"
    return Panel(heading, x_label, LOSS, lines, *marked, finding=moving(curves))


def moving(curves: Sequence[Curve]) -> str:
    """How far the best value of some curves moves, in words; "" if there is only one curve yet."""
    return f"best moves {move_in_words(curves)}" if len(curves) > 1 else ""


def _label(curve: Curve, *, with_width: bool) -> str:
    return (f"width {curve.width}, " if with_width else "") + f"density {density_in_words(curve.sparsity)}"


def panels(rows: Rows, rules: Iterable[str] = RULES, axis: str = "lr") -> list[Panel]:
    """A panel for each rule."""
    x_label = "base init std" if axis == "init_std" else _AXES[axis]
    return [panel(curves(rows, rule, axis), title(rule), x_label) for rule in rules]


def over(xs: dict[float, float], lines: dict[str, dict[float, list[float]]]) -> tuple[Line, ...]:
    """A line for each rule, through the mean losses of seeds. ``xs`` maps sparsities to x, ``lines`` holds the losses of all
    seeds by rule and sparsity."""
    return tuple(
        Line(
            label, tuple(Point(xs[s], fmean(seeds), seeds=tuple(seeds)) for s, seeds in sorted(own.items())), rule_colour(label)
        )
        for label, own in lines.items()
    )


def widths(rows: Rows) -> dict[float, int]:
    """Sparsity -> width of its models, of which there must be only one."""
    return {row.config.sparsity: row.config.model.width for row in rows if row.config.sparsity is not None}


# Claiming


def is_stable(rows: Rows, rule: str = "smupar", axis: str = "lr") -> Claim:
    """Whether the best value of the rule moves by at most a factor of ``STABLE`` over sparsities. If the move is at most that,
    but only a lower bound, this is unknown."""
    moves = curves(rows, rule, axis)
    move = farthest_move(moves)
    text = f"{title(rule)}'s best {_AXES[axis]} moves by {times(move)}{edge(moves)} (at most {STABLE:g}x is allowed)"
    return Claim(None if move <= STABLE and is_lower_bound(moves) else move <= STABLE, text)


def moves_more(rows: Rows, rule: str, axis: str = "lr") -> Claim:
    """Whether the best value of the rule moves farther than SmuPar's."""
    theirs = curves(rows, rule, axis)
    move, ours = farthest_move(theirs), farthest_move(curves(rows, "smupar", axis))
    text = f"{title(rule)}'s best {_AXES[axis]} moves by {times(move)}{edge(theirs)}, more than {MORE:g} x SmuPar's "
    return Claim(move > MORE * ours, text + times(ours))


def edge(curves: Sequence[Curve]) -> str:
    return " or more (edge of the grid)" if any(curve.on_edge for curve in curves) else ""
