"""Figure 14: the ablations of SmuPar, loss over the learning rate: init alone, learning rate alone."""

from __future__ import annotations

from smupar.paper.figure import Claim, Figure, Rows, all_of, at_dense_optimum, curves, edge, panel, sweep, title
from smupar.study.optima import Curve, farthest_move, times

RULES = ("sp", "mup", "smupar-init-only", "smupar-lr-only", "smupar")
ABLATIONS = ("smupar-init-only", "smupar-lr-only")


def ablated(rows: Rows, axis: str = "lr") -> Claim:
    smupar = curves(rows, "smupar", axis)
    return all_of(*(_worse(curves(rows, rule, axis), smupar, title(rule)) for rule in ABLATIONS))


def _worse(ablation: list[Curve], smupar: list[Curve], name: str) -> Claim:
    """Its optimum moves further, or it loses more at the value tuned when dense, at the sparsest level."""
    mine, theirs = farthest_move(ablation), farthest_move(smupar)
    last = len(smupar) - 1
    cost, their_cost = (at_dense_optimum(own, last) for own in (ablation, smupar))
    moves = f"{name} moves {times(mine)}{edge(ablation)} (SmuPar {times(theirs)})"
    return Claim(mine > theirs or cost > their_cost, f"{moves}, at the dense optimum {cost:.3f} ({their_cost:.3f})")


FIGURE = Figure(
    title="Both corrections are needed: learning rate",
    shows="muP with SmuPar's init alone, or its learning rate alone, does not keep the best learning rate.",
    finding=3,
    runs=lambda scale: sweep(scale, "sweep", RULES),
    swept=("sweep", "lr"),
    draw=lambda rows: [panel(curves(rows, rule), title(rule)) for rule in RULES],
    claim=ablated,
)
