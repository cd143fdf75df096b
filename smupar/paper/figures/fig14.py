"""Figure 14: loss over the learning rate for the ablations of SmuPar, which correct only the init or only the learning rate."""

from __future__ import annotations

from smupar.paper.figure import (
    MORE,
    Claim,
    Figure,
    Rows,
    all_of,
    at_dense_optimum,
    curves,
    edge,
    panels,
    spread_of_seeds,
    sweep_rules,
    title,
)
from smupar.study.curves.optima import Curve, farthest_move, times

ABLATIONS = ("smupar-init-only", "smupar-lr-only")
WITH_ABLATIONS = ("sp", "mup", *ABLATIONS, "smupar")


def ablated(rows: Rows, axis: str = "lr") -> Claim:
    smupar, spread = curves(rows, "smupar", axis), spread_of_seeds(rows)
    return all_of(
        *(part for rule in ABLATIONS for part in _worse(curves(rows, rule, axis), smupar, title(rule), spread)),
    )


def _worse(ablation: list[Curve], smupar: list[Curve], name: str, spread: float) -> tuple[Claim, Claim]:
    """Whether the ablation's optimum moves farther than SmuPar's, and whether its loss at the dense optimum is higher at the
    highest sparsity."""
    move, ours = farthest_move(ablation), farthest_move(smupar)
    last = len(smupar) - 1
    loss, our_loss = (at_dense_optimum(curves, last) for curves in (ablation, smupar))
    gap = loss / our_loss - 1
    return (
        Claim(
            move > MORE * ours,
            f"the optimum of '{name}' moves by {times(move)}{edge(ablation)}, more than {MORE:g} x SmuPar's {times(ours)}",
        ),
        Claim(
            gap > spread,
            f"'{name}' ends above SmuPar at the dense optimum and the highest sparsity, by more than {spread:.1%}, the spread "
            f"of seeds: {loss:.3f} against {our_loss:.3f}, {gap:+.1%}",
        ),
    )


FIGURE = Figure(
    title="Both corrections are needed: learning rate",
    claimed="Both of SmuPar's corrections are needed to keep the best learning rate",
    shows="muP with SmuPar's init alone, or its learning rate alone, does not keep the best learning rate.",
    finding=3,
    runs=lambda scale: sweep_rules(scale, "sweep", WITH_ABLATIONS),
    swept=("sweep", "lr"),
    draw=lambda rows: panels(rows, WITH_ABLATIONS),
    claim=ablated,
)
