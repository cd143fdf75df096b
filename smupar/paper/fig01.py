"""Figure 1: SP against SmuPar, out of Figure 6's runs."""

from __future__ import annotations

from smupar.lm.config import RunConfig
from smupar.paper.fig06 import curves
from smupar.paper.figure import Claim, Figure, Rows, all_of, moves_more, panel, stable, sweep
from smupar.paper.settings import Scale
from smupar.study.curves import Panel


def runs(scale: Scale) -> list[RunConfig]:
    return sweep(scale, "sweep", ("sp", "smupar"))


def draw(rows: Rows) -> list[Panel]:
    return [panel(curves(rows, "sp"), "standard practice"), panel(curves(rows, "smupar"), "SmuPar")]


def claim(rows: Rows) -> Claim:
    sp, smupar = curves(rows, "sp"), curves(rows, "smupar")
    return all_of(stable(smupar, "SmuPar"), moves_more(sp, smupar, "SP", "SmuPar"))


FIGURE = Figure(
    title="Standard practice against SmuPar",
    shows="The best learning rate of standard practice shifts with sparsity, SmuPar's is stable.",
    finding=2,
    runs=runs,
    swept=("sweep", "lr"),
    draw=draw,
    claim=claim,
)
