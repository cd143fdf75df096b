"""Figure 11: Iso-WPN scaling under SP. Models become wider and sparser, with the same number of kept weights per neuron."""

from __future__ import annotations

from functools import partial

from smupar.lm.config.run_config import RunConfig
from smupar.paper.figure import Figure, curves, is_stable, panel, runs_of, swept
from smupar.paper.settings import Scale, wpn_width


def runs(scale: Scale) -> list[RunConfig]:
    width = partial(wpn_width, scale.size("wpn").width)
    return swept(scale, "wpn", runs_of(scale, "wpn", ("sp",), width=width))


FIGURE = Figure(
    title="Learning-rate transfer under SP in Iso-WPN scaling",
    shows="With width times density constant SP's best learning rate stays between 2^-7 and 2^-6.",
    finding=3,
    runs=runs,
    swept=("wpn", "lr"),
    draw=lambda rows: [panel(curves(rows, "sp"), "SP, Iso-WPN")],
    claim=lambda rows: is_stable(rows, "sp"),
)
