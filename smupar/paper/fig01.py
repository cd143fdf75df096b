"""Figure 1: SP against SmuPar, out of Figure 6's runs."""

from __future__ import annotations

from smupar.paper.figure import Claim, Figure, Rows, all_of, curves, moves_more, panel, stable, sweep


def claim(rows: Rows) -> Claim:
    sp, smupar = curves(rows, "sp"), curves(rows, "smupar")
    return all_of(stable(smupar, "SmuPar"), moves_more(sp, smupar, "SP", "SmuPar"))


FIGURE = Figure(
    title="Standard practice against SmuPar",
    shows="The best learning rate of standard practice shifts with sparsity, SmuPar's is stable.",
    finding=2,
    runs=lambda scale: sweep(scale, "sweep", ("sp", "smupar")),
    swept=("sweep", "lr"),
    draw=lambda rows: [panel(curves(rows, "sp"), "standard practice"), panel(curves(rows, "smupar"), "SmuPar")],
    claim=claim,
)
