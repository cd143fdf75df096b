"""Figure 6: loss over the learning rate at each density, under SP, muP and SmuPar."""

from __future__ import annotations

from smupar.paper.figure import (
    NUM_SPREADS,
    Claim,
    Figure,
    Rows,
    all_of,
    at_dense_optimum,
    curves,
    is_stable,
    moves_more,
    panels,
    spread_of_seeds,
    sweep_rules,
    title,
)
from smupar.study.conventions import density_in_words

_SPARSE = 0.75


def claim(rows: Rows) -> Claim:
    return all_of(is_stable(rows), moves_more(rows, "sp"), moves_more(rows, "mup"), _better(rows))


def _better(rows: Rows) -> Claim:
    """Whether SmuPar has the lowest loss if each rule uses the best learning rate of its dense model. The text also gives SP's
    gap when dense, which sparsity does not cause."""
    smupar, asked = curves(rows, "smupar"), NUM_SPREADS * spread_of_seeds(rows)
    gaps: dict[tuple[str, float], float] = {}
    for rule in ("sp", "mup"):
        others = curves(rows, rule)
        for index, curve in enumerate(smupar):
            gaps[title(rule), curve.sparsity] = at_dense_optimum(others, index) / at_dense_optimum(smupar, index) - 1
    sparse = {key: gap for key, gap in gaps.items() if key[1] >= _SPARSE}
    words = ", ".join(f"{name} {gap:+.1%} at {density_in_words(sparsity)}" for (name, sparsity), gap in sparse.items())
    text = f"at their dense-tuned learning rates the other rules end above SmuPar by more than {asked:.1%}: {words}"
    return Claim(min(sparse.values()) > asked, f"{text} ({title('sp')}'s gap when dense is {gaps[title('sp'), 0.0]:+.1%})")


FIGURE = Figure(
    title="Learning-rate transfer over density",
    claimed="SmuPar keeps its best learning rate over densities; SP and muP do not",
    shows="SmuPar's best learning rate is the dense model's at every density; SP's and muP's move.",
    finding=2,
    runs=lambda scale: sweep_rules(scale, "sweep"),
    swept=("sweep", "lr"),
    draw=panels,
    claim=claim,
)
