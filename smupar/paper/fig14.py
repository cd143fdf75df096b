"""Figure 14: the ablations of SmuPar, loss over the learning rate: init alone, learning rate alone."""

from __future__ import annotations

from smupar.lm.config import RunConfig
from smupar.paper.fig06 import curves
from smupar.paper.figure import Claim, Figure, Rows, all_of, at_dense_optimum, edge, panel, sweep, title
from smupar.paper.settings import Scale
from smupar.study.curves import Panel
from smupar.study.optima import Curve, farthest_move, times

RULES = ("sp", "mup", "smupar-init-only", "smupar-lr-only", "smupar")
ABLATIONS = ("smupar-init-only", "smupar-lr-only")


def runs(scale: Scale) -> list[RunConfig]:
    return sweep(scale, "sweep", RULES)


def draw(rows: Rows) -> list[Panel]:
    return [panel(curves(rows, rule), title(rule)) for rule in RULES]


def claim(rows: Rows) -> Claim:
    return all_of(*(worse(curves(rows, rule), curves(rows, "smupar"), title(rule)) for rule in ABLATIONS))


def worse(ablation: list[Curve], smupar: list[Curve], name: str) -> Claim:
    """Its optimum moves further, or it loses more at the value tuned when dense, at the sparsest level."""
    mine, theirs = farthest_move(ablation), farthest_move(smupar)
    last = len(smupar) - 1
    cost, their_cost = (at_dense_optimum(curves, last) for curves in (ablation, smupar))
    moves = f"{name} moves {times(mine)}{edge(ablation)} (SmuPar {times(theirs)})"
    return Claim(mine > theirs or cost > their_cost, f"{moves}, at the dense optimum {cost:.3f} ({their_cost:.3f})")


FIGURE = Figure(
    title="Both corrections are needed: learning rate",
    shows="muP with SmuPar's init alone, or its learning rate alone, does not keep the best learning rate.",
    finding=3,
    runs=runs,
    swept=("sweep", "lr"),
    draw=draw,
    claim=claim,
)
