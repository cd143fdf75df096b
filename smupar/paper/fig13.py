"""Figure 13: the ablations of SmuPar, loss over the init std: init alone, learning rate alone."""

from __future__ import annotations

from smupar.lm.config import RunConfig
from smupar.paper.fig07 import curves
from smupar.paper.fig14 import ABLATIONS, RULES, worse
from smupar.paper.figure import Claim, Figure, Rows, all_of, panel, sweep, title
from smupar.paper.settings import Scale
from smupar.study.curves import Panel


def runs(scale: Scale) -> list[RunConfig]:
    return sweep(scale, "init", RULES, axis="init_std")


def draw(rows: Rows) -> list[Panel]:
    return [panel(curves(rows, rule), title(rule), "base init std") for rule in RULES]


def claim(rows: Rows) -> Claim:
    return all_of(*(worse(curves(rows, rule), curves(rows, "smupar"), title(rule)) for rule in ABLATIONS))


FIGURE = Figure(
    title="Both corrections are needed: init",
    shows="muP with SmuPar's init alone, or its learning rate alone, does not keep the best init std.",
    finding=3,
    runs=runs,
    swept=("init", "init_std"),
    draw=draw,
    claim=claim,
)
