"""Figure 14: loss over the learning rate for the ablations of SmuPar, which correct only the init or only the learning rate."""

from __future__ import annotations

from smupar.paper.figure import Claim, Figure, Rows, all_of, at_dense_optimum, curves, edge, panels, sweep_rules, title
from smupar.study.optima import Curve, farthest_move, times

ABLATIONS = ("smupar-init-only", "smupar-lr-only")
WITH_ABLATIONS = ("sp", "mup", *ABLATIONS, "smupar")


def ablated(rows: Rows, axis: str = "lr") -> Claim:
    smupar = curves(rows, "smupar", axis)
    return all_of(*(_worse(curves(rows, rule, axis), smupar, title(rule)) for rule in ABLATIONS))


def _worse(ablation: list[Curve], smupar: list[Curve], name: str) -> Claim:
    """Whether the ablation's optimum moves farther than SmuPar's, or its loss at the dense optimum is higher at the highest
    sparsity."""
    move, ours = farthest_move(ablation), farthest_move(smupar)
    last = len(smupar) - 1
    cost, our_cost = (at_dense_optimum(curves, last) for curves in (ablation, smupar))
    moves = f"{name} moves {times(move)}{edge(ablation)} (SmuPar {times(ours)})"
    return Claim(move > ours or cost > our_cost, f"{moves}, at the dense optimum {cost:.3f} ({our_cost:.3f})")


FIGURE = Figure(
    title="Both corrections are needed: learning rate",
    shows="muP with SmuPar's init alone, or its learning rate alone, does not keep the best learning rate.",
    finding=3,
    runs=lambda scale: sweep_rules(scale, "sweep", WITH_ABLATIONS),
    swept=("sweep", "lr"),
    draw=lambda rows: panels(rows, WITH_ABLATIONS),
    claim=ablated,
)
