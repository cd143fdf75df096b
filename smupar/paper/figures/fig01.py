"""Figure 1: SP against SmuPar, from the runs of Figure 6."""

from __future__ import annotations

from smupar.paper.figure import Figure, all_of, curves, is_stable, moves_more, panel, sweep_rules

FIGURE = Figure(
    title="Standard practice against SmuPar",
    shows="The best learning rate of standard practice shifts with sparsity; SmuPar's is stable.",
    finding=2,
    runs=lambda scale: sweep_rules(scale, "sweep", ("sp", "smupar")),
    swept=("sweep", "lr"),
    draw=lambda rows: [panel(curves(rows, "sp"), "standard practice"), panel(curves(rows, "smupar"), "SmuPar")],
    claim=lambda rows: all_of(is_stable(rows), moves_more(rows, "sp")),
)
