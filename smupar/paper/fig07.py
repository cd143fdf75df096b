"""Figure 7: loss over the init std at each sparsity, read early on purpose, at a constant learning rate."""

from __future__ import annotations

from smupar.paper.figure import Claim, Figure, Rows, all_of, curves, moves_more, panel, stable, sweep, title

RULES = ("sp", "mup", "smupar")


def claim(rows: Rows) -> Claim:
    sp, mup, smupar = (curves(rows, rule, "init_std") for rule in RULES)
    return all_of(
        stable(smupar, "SmuPar", "init std"),
        moves_more(sp, smupar, "SP", "SmuPar"),
        moves_more(mup, smupar, "muP", "SmuPar"),
    )


FIGURE = Figure(
    title="Transfer of the init over sparsity",
    shows="SmuPar's best init std is stable, SP's and muP's are not.",
    finding=2,
    runs=lambda scale: sweep(scale, "init", RULES, axis="init_std"),
    swept=("init", "init_std"),
    draw=lambda rows: [panel(curves(rows, rule, "init_std"), title(rule), "base init std") for rule in RULES],
    claim=claim,
)
