"""Figure 11: Iso-WPN scaling: wider and sparser with as many kept weights per neuron, under SP."""

from __future__ import annotations

from functools import partial

from smupar.paper.figure import Figure, curves, panel, stable, sweep
from smupar.paper.settings import wpn_width

FIGURE = Figure(
    title="Learning-rate transfer under SP in Iso-WPN scaling",
    shows="With width times density constant SP's best learning rate stays between 2^-7 and 2^-6.",
    finding=3,
    runs=lambda scale: sweep(scale, "wpn", ("sp",), width=partial(wpn_width, scale.size("wpn").width)),
    swept=("wpn", "lr"),
    draw=lambda rows: [panel(curves(rows, "sp"), "SP, Iso-WPN")],
    claim=lambda rows: stable(curves(rows, "sp"), "SP"),
)
