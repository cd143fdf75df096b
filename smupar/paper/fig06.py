"""Figure 6: loss over the learning rate at each sparsity, under SP, muP and SmuPar."""

from __future__ import annotations

from smupar.paper.figure import (
    Claim,
    Figure,
    Rows,
    all_of,
    at_dense_optimum,
    curves,
    is_stable,
    moves_more,
    panels,
    sweep_rules,
    title,
)

_SPARSE = 0.75


def claim(rows: Rows) -> Claim:
    return all_of(is_stable(rows), moves_more(rows, "sp"), moves_more(rows, "mup"), _better(rows))


def _better(rows: Rows) -> Claim:
    """Whether SmuPar has the lowest loss if each rule uses the best learning rate of its dense model."""
    smupar, others = curves(rows, "smupar"), {title(rule): curves(rows, rule) for rule in ("sp", "mup")}
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
    runs=lambda scale: sweep_rules(scale, "sweep"),
    swept=("sweep", "lr"),
    draw=panels,
    claim=claim,
)
