"""The picture of a coordinate check."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from smupar.output.pictures import new_figure
from smupar.rules import get_rule

if TYPE_CHECKING:
    from smupar.check.coordinates.report import Report


def draw(report: Report, quantities: tuple[str, ...]) -> Any:
    """Rows are quantities, columns rules (one block of columns for each axis); lines are steps, from dark to light."""
    panels = [(axis, rule) for axis in _axes(report) for rule in report.rules]
    figure = new_figure(figsize=(3.1 * len(panels) + 1.2, 2.4 * len(quantities) + 0.8), layout="constrained")
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    grid = figure.subplots(len(quantities), len(panels), sharey="row", squeeze=False)
    steps = sorted({reading.step for reading in report.readings if reading.step > 0})
    colours: Any = ScalarMappable(Normalize(steps[0], steps[-1] + 1), "cividis")  # also safe for the colour-blind
    for row, quantity in enumerate(quantities):
        for column, (axis, rule) in enumerate(panels):
            panel = grid[row][column]
            every = sorted({getattr(reading, axis) for reading in report.readings})
            for step in steps:
                points = _curve(report, axis, rule, quantity, step)
                xs = sorted(points)
                panel.plot(xs, [points[x] for x in xs], color=colours.to_rgba(step), marker="o", markersize=3, linewidth=1.2)
            panel.set_xscale("log", base=2)
            if panel.lines and any(len(line.get_xdata()) for line in panel.lines):
                panel.set_yscale("log", base=2)
            else:
                panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center")
            panel.set_xticks(every, [_tick(x, axis) for x in every])
            panel.minorticks_off()
            panel.grid(True, alpha=0.3)
            if axis == "density":
                panel.invert_xaxis()  # sparser to the right
            if row == 0:
                panel.set_title(f"{get_rule(rule).title}: {report.axis_verdict(rule, axis)}", fontsize=10)
            if row == len(quantities) - 1:
                panel.set_xlabel(axis)
            if column == 0:
                panel.set_ylabel(f"{quantity} (RMS, hidden layers)", fontsize=9)
    figure.colorbar(colours, ax=grid, label="step", shrink=0.5, ticks=sorted({steps[0], steps[-1]}))
    return figure


def _axes(report: Report) -> list[str]:
    return list(dict.fromkeys(slope.axis for slope in report.slopes))


def _tick(value: float, axis: str) -> str:
    whole = abs(1 / value - round(1 / value)) < 1e-6
    return f"1/{round(1 / value)}" if axis == "density" and whole and value < 1 else f"{value:.3g}"


def _curve(report: Report, axis: str, rule: str, quantity: str, step: int) -> dict[float, float]:
    """Geometric mean over hidden layers and seeds, at the largest value of the other axis."""
    other = "density" if axis == "width" else "width"
    at = max(getattr(reading, other) for reading in report.readings)
    hidden = any(reading.role == "hidden" and reading.quantity == quantity for reading in report.readings)
    roles = {"hidden"} if hidden else {reading.role for reading in report.readings}  # a model of recurrent layers, say
    sizes: dict[float, list[float]] = defaultdict(list)
    for reading in report.readings:
        mine = reading.rule == rule and reading.quantity == quantity and reading.step == step and reading.role in roles
        if mine and getattr(reading, other) == at and reading.rms > 0:
            sizes[getattr(reading, axis)].append(math.log2(reading.rms))
    return {x: 2 ** (sum(logs) / len(logs)) for x, logs in sizes.items()}
