"""The picture of a coordinate check: sizes over width, density and depth."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from smupar.check.coordinates.readings import AXES, Reading
from smupar.output.colours import mixed, rule_colour
from smupar.output.pictures import new_figure
from smupar.rules import get_rule

if TYPE_CHECKING:
    from smupar.check.coordinates.report import Report

_DARK = "#1f2430"  # of texts, and of lines at the first step


def draw(report: Report, quantities: tuple[str, ...]) -> Any:
    """Draws the picture of ``Report.plot``. Columns of one axis are next to each other; lines go from dark, at the first step,
    to the colour of their rule."""
    panels = [(axis, rule) for axis in dict.fromkeys(slope.axis for slope in report.slopes) for rule in report.rules]
    figure = new_figure(figsize=(3.1 * len(panels) + 0.6, 2.4 * len(quantities) + 0.8), layout="constrained")
    grid = figure.subplots(len(quantities), len(panels), sharey="row", squeeze=False)
    steps = sorted({reading.step for reading in report.readings if reading.step > 0})
    for row, quantity in enumerate(quantities):
        for column, (axis, rule) in enumerate(panels):
            panel, colour = grid[row][column], rule_colour(get_rule(rule).title)
            sizes = [mean_sizes(report.readings, axis, rule, quantity, step) for step in steps]
            _draw_lines(panel, sizes, colour)
            ticks = sorted({getattr(reading, axis) for reading in report.readings})
            panel.set_xticks(ticks, [_tick(x, axis) for x in ticks])
            panel.minorticks_off()
            if axis == "density":
                panel.invert_xaxis()  # sparser to the right
            if row == 0:
                title = f"{get_rule(rule).title}: {report.axis_verdict(rule, axis)}"
                panel.set_title(title, fontsize=10.5, fontweight="bold", loc="left", color=colour)
            if row == len(quantities) - 1:
                panel.set_xlabel(axis)
            if column == 0:
                panel.set_ylabel(f"{quantity} (RMS, hidden layers)", fontsize=9)
    last = grid[0][-1].lines
    keys = {f"step {step}": line for step, line in ((steps[0], last[0]), (steps[-1], last[len(steps) - 1]))}
    figure.legend(list(keys.values()), list(keys), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _draw_lines(panel: Any, sizes: Sequence[Mapping[float, float]], colour: str) -> None:
    """Draws a line for each step, from its sizes by x."""
    for number, points in enumerate(sizes):
        xs = sorted(points)
        shade = mixed(_DARK, colour, number / max(1, len(sizes) - 1))
        panel.plot(xs, [points[x] for x in xs], color=shade, marker="o", markersize=3, linewidth=1.3)
    panel.set_xscale("log", base=2)
    if any(sizes):
        panel.set_yscale("log", base=2)
    else:
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center")
    panel.grid(True, color="0.92")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("0.6")
    panel.tick_params(color="0.6", labelcolor=_DARK, labelsize=9)


def _tick(value: float, axis: str) -> str:
    whole = abs(1 / value - round(1 / value)) < 1e-6
    return f"1/{round(1 / value)}" if axis == "density" and whole and value < 1 else f"{value:.3g}"


def mean_sizes(readings: Sequence[Reading], axis: str, rule: str, quantity: str, step: int) -> dict[float, float]:
    """Point on an axis -> geometric mean of a size over hidden layers and seeds. On the other axes, only the largest width and
    density and the smallest depth count."""
    others = {name: {getattr(reading, name) for reading in readings} for name in AXES if name != axis}
    at = {name: min(points) if name == "depth" else max(points) for name, points in others.items()}
    hidden = any(reading.role == "hidden" and reading.quantity == quantity for reading in readings)
    roles = {"hidden"} if hidden else {reading.role for reading in readings}  # e.g. all layers are recurrent
    sizes: dict[float, list[float]] = defaultdict(list)
    for reading in readings:
        counts = reading.rule == rule and reading.quantity == quantity and reading.step == step and reading.role in roles
        if counts and all(getattr(reading, name) == value for name, value in at.items()) and reading.rms > 0:
            sizes[getattr(reading, axis)].append(math.log2(reading.rms))
    return {x: 2 ** (sum(logs) / len(logs)) for x, logs in sizes.items()}
