"""Figure 13: loss over the init std for the ablations of SmuPar, which correct only the init or only the learning rate."""

from __future__ import annotations

from smupar.paper.figure import Figure, panels, sweep_rules
from smupar.paper.figures.fig14 import WITH_ABLATIONS, ablated

FIGURE = Figure(
    title="Both corrections are needed: init",
    claimed="Both of SmuPar's corrections are needed to keep the best init std",
    shows="muP with SmuPar's init alone, or its learning rate alone, does not keep the best init std.",
    finding=3,
    runs=lambda scale: sweep_rules(scale, "init", WITH_ABLATIONS, axis="init_std"),
    swept=("init", "init_std"),
    draw=lambda rows: panels(rows, WITH_ABLATIONS, "init_std"),
    claim=lambda rows: ablated(rows, "init_std"),
)
