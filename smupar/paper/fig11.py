"""Figure 11: Iso-WPN scaling: wider and sparser with as many kept weights per neuron, under SP."""

from __future__ import annotations

from functools import partial

from smupar.lm.config import RunConfig
from smupar.paper.fig06 import curves
from smupar.paper.figure import Claim, Figure, Rows, panel, stable, sweep
from smupar.paper.settings import Scale, wpn_width
from smupar.study.curves import Panel


def runs(scale: Scale) -> list[RunConfig]:
    return sweep(scale, "wpn", ("sp",), width=partial(wpn_width, scale.size("wpn").width))


def draw(rows: Rows) -> list[Panel]:
    return [panel(curves(rows, "sp"), "SP, Iso-WPN")]


def claim(rows: Rows) -> Claim:
    return stable(curves(rows, "sp"), "SP")


FIGURE = Figure(
    title="Learning-rate transfer under SP in Iso-WPN scaling",
    shows="With width times density constant SP's best learning rate stays between 2^-7 and 2^-6.",
    finding=3,
    runs=runs,
    swept=("wpn", "lr"),
    draw=draw,
    claim=claim,
)
