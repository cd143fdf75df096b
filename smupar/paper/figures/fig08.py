"""Figure 8: the runs of Figure 6, with the best learning rate for each rule and sparsity."""

from __future__ import annotations

from smupar.output.colours import rule_colour
from smupar.paper.figure import (
    NUM_SPREADS,
    RULES,
    Claim,
    Figure,
    Rows,
    all_of,
    curves,
    spread_of_seeds,
    title,
)
from smupar.paper.figures import fig06
from smupar.study.conventions import density_in_words
from smupar.study.curves.curves import LOSS, Line, Panel, Point
from smupar.study.curves.optima import Curve


def draw(rows: Rows) -> list[Panel]:
    """A line for each rule over density, with the dense model on the left. Triangles mark optima at the edge of the grid, whose
    loss is an upper bound."""
    lines = []
    for rule in RULES:
        own, colour = curves(rows, rule), rule_colour(title(rule))
        lines.append(Line(title(rule), tuple(map(_point, own)), colour))
        if at_edge := tuple(_point(curve) for curve in own if curve.on_edge):
            lines.append(Line(f"{title(rule)}: edge of the grid, could be lower", at_edge, colour, joined=False, marker="v"))
    return [Panel("", "density", LOSS, tuple(lines), falling_x=True)]


def _point(curve: Curve) -> Point:
    seeds = curve.seeds[curve.best_index] if curve.seeds else ()
    return Point(1 - curve.sparsity, curve.best_loss, seeds=seeds)


def claim(rows: Rows) -> Claim:
    """Density 1 is left out, since there SmuPar is muP, and SP's gap has nothing to do with sparsity."""
    asked, smupar = NUM_SPREADS * spread_of_seeds(rows), curves(rows, "smupar")
    return all_of(*(_is_behind(title(rule), curves(rows, rule), smupar, asked) for rule in ("sp", "mup")))


def _is_behind(name: str, theirs: list[Curve], ours: list[Curve], asked: float) -> Claim:
    pairs = [(other, own) for other, own in zip(theirs, ours, strict=True) if own.sparsity]
    gaps = [other.best_loss / own.best_loss - 1 for other, own in pairs]
    mean = sum(gaps) / len(gaps)
    words = ", ".join(
        f"{gap:+.1%} at {density_in_words(own.sparsity)}{' (edge of the grid)' if other.on_edge else ''}"
        for gap, (other, own) in zip(gaps, pairs, strict=True)
    )
    text = f"{name} ends above SmuPar by more than {asked:.1%} on average over sparse models, by {mean:+.1%}: {words}"
    return Claim(mean > asked, text)


FIGURE = Figure(
    title="The best of each rule at each sparsity",
    claimed="With each rule at its own best learning rate, sparse models end worse under SP and muP than under SmuPar",
    shows="SmuPar is on the frontier: 0.8 % better than SP and 2.1 % better than muP on average, even if both are tuned again.",
    finding=4,
    runs=fig06.FIGURE.runs,
    swept=("sweep", "lr"),
    draw=draw,
    claim=claim,
)
