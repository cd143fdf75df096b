"""Figure 6: loss over the learning rate at each sparsity, under SP, muP and SmuPar."""

from __future__ import annotations

from smupar.paper.figure import Claim, Figure, Rows, all_of, at_dense_optimum, curves, moves_more, panel, stable, sweep, title
from smupar.study.optima import Curve

RULES = ("sp", "mup", "smupar")
_SPARSE = 0.75


def claim(rows: Rows) -> Claim:
    sp, mup, smupar = (curves(rows, rule) for rule in RULES)
    return all_of(
        stable(smupar, "SmuPar"),
        moves_more(sp, smupar, "SP", "SmuPar"),
        moves_more(mup, smupar, "muP", "SmuPar"),
        _better(smupar, {"SP": sp, "muP": mup}),
    )


def _better(smupar: list[Curve], others: dict[str, list[Curve]]) -> Claim:
    """Each at the learning rate that is best for it when dense."""
    gaps = []
    for index, curve in enumerate(smupar):
        if curve.sparsity >= _SPARSE:
            ours = at_dense_optimum(smupar, index)
            gaps += [(name, curve.sparsity, at_dense_optimum(other, index) / ours - 1) for name, other in others.items()]
    words = ", ".join(f"{name} {gap:+.1%} at {sparsity:.4g}" for name, sparsity, gap in gaps)
    return Claim(all(gap > 0 for _, _, gap in gaps), f"at dense-tuned learning rates others lose more than SmuPar: {words}")


FIGURE = Figure(
    title="Learning-rate transfer over sparsity",
    shows="SmuPar's best learning rate is the dense model's at every sparsity; SP's and muP's move.",
    finding=2,
    runs=lambda scale: sweep(scale, "sweep", RULES),
    swept=("sweep", "lr"),
    draw=lambda rows: [panel(curves(rows, rule), title(rule)) for rule in RULES],
    claim=claim,
)
