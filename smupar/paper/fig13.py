"""Figure 13: the ablations of SmuPar, loss over the init std: init alone, learning rate alone."""

from __future__ import annotations

from smupar.paper.fig14 import RULES, ablated
from smupar.paper.figure import Figure, curves, panel, sweep, title

FIGURE = Figure(
    title="Both corrections are needed: init",
    shows="muP with SmuPar's init alone, or its learning rate alone, does not keep the best init std.",
    finding=3,
    runs=lambda scale: sweep(scale, "init", RULES, axis="init_std"),
    swept=("init", "init_std"),
    draw=lambda rows: [panel(curves(rows, rule, "init_std"), title(rule), "base init std") for rule in RULES],
    claim=lambda rows: ablated(rows, "init_std"),
)
