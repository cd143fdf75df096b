"""Draws the curves of a study as a picture, or turns them into charts of a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smupar.output.page.document import Chart, ChartLine, ChartPoint, Optimum, finite
from smupar.output.pictures import new_figure, save_figure
from smupar.rules import RULES
from smupar.study.optima import Curve

LOSS = "loss (mean of the last 5 % of steps)"
_LOSS_OF_PAGE = "loss (nats per token)"  # a page explains elsewhere that this is a mean


@dataclass(frozen=True)
class Point:
    x: float
    y: float  # infinite if the run diverged; values above the plotted range are triangles at its top
    text: str = ""
    runs: tuple[str, ...] = ()  # ids of its runs; a page links to them
    seeds: tuple[float, ...] = ()  # each seed's value, drawn as a small dot, if y is a mean over seeds


@dataclass(frozen=True)
class Line:
    label: str
    points: tuple[Point, ...]
    colour: float | str = 0.0  # from 0, dark, to 1, or #rrggbb
    dashed: bool = False
    best: float | None = None  # x of the optimum, drawn as a star, which is hollow at the edge of the grid
    joined: bool = True  # whether the points are joined
    waiting: tuple[Point, ...] = ()  # points of unfinished runs, for a page; their y is NaN
    marker: str = "o"  # matplotlib's name of the shape; pages draw circles


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    marked_x: float | None = None  # x of a dotted vertical line
    marked_label: str = ""
    log_x: bool = True
    whole_y: bool = False  # whether all values are shown, or only those near the best
    rule: str = ""  # title of the rule that gives the colour on a page
    shift: tuple[float, float] | None = None  # optimum of the first curve, and the one farthest from it
    falling_x: bool = False  # whether x falls from left to right. Sparser models are always on the right


def line_of(curve: Curve, label: str, colour: float) -> Line:
    seeds = curve.seeds or ((),) * len(curve.values)
    points = tuple(Point(x, y, seeds=own) for x, y, own in zip(curve.values, curve.losses, seeds, strict=True))
    return Line(label, points, colour, dashed=curve.is_proxy, best=None if curve.diverged else curve.best_value)


def y_range(panels: Sequence[Panel]) -> tuple[float, float]:
    """The range of losses that all panels show, from the best to somewhat above the losses of interest."""
    finite = [p.y for panel in panels for line in panel.lines for p in line.points if math.isfinite(p.y)]
    if not finite:
        return 0.0, 1.0
    low = min(finite)
    is_whole = len(finite) <= 24 or any(panel.whole_y for panel in panels)
    interesting = 1.0 if is_whole else 0.9
    high = max(sorted(finite)[int(interesting * (len(finite) - 1))], low * 1.05)
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


# A picture


def draw_png(panels: Sequence[Panel], path: Path, title: str = "", *, columns: int | None = None) -> None:
    """Draws all panels in one row, or in rows of ``columns``."""
    columns = min(columns or len(panels), len(panels))
    num_rows = -(-len(panels) // columns)
    many = max(map(_num_keys, panels)) > 4  # a legend inside would cover the lines, so it goes beside the panels
    figure = new_figure(figsize=(3.6 * columns + (2.8 if many else 0.6), 3.9 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, columns, sharey=len({panel.y_label for panel in panels}) == 1, squeeze=False)
    axes = grid.flat[: len(panels)]
    for unused in grid.flat[len(panels) :]:
        unused.set_visible(False)
    shared = [line.label for line in panels[-1].lines]  # one legend for all panels that have the same lines
    for number, (panel, axis) in enumerate(zip(panels, axes, strict=True)):
        _draw_panel(panel, axis, *y_range([other for other in panels if other.y_label == panel.y_label]))
        if not many and (panel is panels[-1] or [line.label for line in panel.lines] != shared):
            axis.legend(fontsize=8, loc="best")
        if number % columns == 0 or panel.y_label != panels[number - 1].y_label:
            axis.set_ylabel(panel.y_label)
    if many:
        keys = {label: key for axis in axes for key, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        labels = dict.fromkeys([*(line.label for panel in panels for line in panel.lines), *keys])  # lines come first
        figure.legend([keys[label] for label in labels], labels, fontsize=8, loc="outside right center")
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, path, dpi=150)


def _num_keys(panel: Panel) -> int:
    """Number of entries in the legend of a panel."""
    return len(panel.lines) + sum([_has_best(panel), _has_seeds(panel), panel.marked_x is not None])


def _has_best(panel: Panel) -> bool:
    return any(line.best is not None for line in panel.lines)


def _has_seeds(panel: Panel) -> bool:
    return any(len(point.seeds) > 1 for line in panel.lines for point in line.points)


def _draw_panel(panel: Panel, axis: Any, low: float, high: float) -> None:
    for line in panel.lines:
        _draw_line(line, panel, axis, high)
    if _has_best(panel):
        axis.plot([], [], "*", color="0.3", markersize=9, label="best (hollow: at the edge)")
    if _has_seeds(panel):
        axis.plot([], [], color="0.3", label="single seeds; lines are means", **_SEEDS)
    if panel.marked_x is not None:
        axis.axvline(panel.marked_x, color="0.6", linewidth=1, linestyle=":", label=panel.marked_label)
    if panel.log_x:
        axis.set_xscale("log", base=2)
    if panel.falling_x:
        axis.invert_xaxis()
    axis.set_ylim(low, high)
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel(panel.x_label)
    axis.grid(True, alpha=0.25)


_SEEDS: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 3.2, "alpha": 0.5, "markeredgewidth": 0}


def _draw_line(line: Line, panel: Panel, axis: Any, high: float) -> None:
    points, colour = sorted(line.points, key=lambda point: point.x), _colour(line)
    style = ("--" if line.dashed else "-") if line.joined else "none"
    size = 3 if line.marker == "o" else 8
    ys = [p.y if math.isfinite(p.y) else math.nan for p in points]
    axis.plot([p.x for p in points], ys, linestyle=style, marker=line.marker, markersize=size, label=line.label, color=colour)
    dots = [(p.x, seed) for p in points for seed in p.seeds if len(p.seeds) > 1]
    axis.plot([x for x, _ in dots], [y for _, y in dots], color=colour, **_SEEDS)
    above = [p.x for p in points if p.y > high]
    for artist in axis.plot(above, [high] * len(above), "^", markersize=5, color=colour, clip_on=False):
        artist.set_in_layout(False)
    if line.best is not None and points:
        best = min(points, key=lambda point: abs(_x(point.x, panel) - _x(line.best, panel)))  # type: ignore[arg-type]
        fill, edge = ("white", colour) if best in (points[0], points[-1]) else (colour, "white")
        axis.plot(best.x, best.y, marker="*", markersize=13, markerfacecolor=fill, markeredgecolor=edge)


# A page


def chart_of(panel: Panel) -> Chart:
    """The panel as a chart of a page. A panel's title may have several lines, a chart's has one."""
    chart: Chart = {
        "title": " ".join(panel.title.split()),
        "rule": panel.rule or _rule_in(panel.title),
        "x_label": panel.x_label,
        "y_label": _LOSS_OF_PAGE if panel.y_label == LOSS else panel.y_label,
        "log_x": panel.log_x,
        "log_y": False,
        "lines": [_chart_line(line) for line in panel.lines],
        "falls": panel.falling_x,
        "whole_y": panel.whole_y,
        "group": panel.y_label,
    }
    if panel.marked_x is not None:
        chart["marked"] = (panel.marked_x, panel.marked_label)
    if panel.shift is not None:
        chart["shift"] = panel.shift
    return chart


def _chart_line(line: Line) -> ChartLine:
    points = sorted((*line.points, *line.waiting), key=lambda point: point.x)
    drawn: ChartLine = {
        "label": line.label,
        "points": [_chart_point(point) for point in points],
        "shade": line.colour if isinstance(line.colour, float) else 1.0,
        "is_reference": line.dashed,
        "is_joined": line.joined,
        "best": _optimum(line),
    }
    if isinstance(line.colour, str):
        drawn["rule"] = _rule_in(line.label)
    return drawn


def _chart_point(point: Point) -> ChartPoint:
    drawn: ChartPoint = {"x": point.x, "y": finite(point.y), "runs": list(point.runs)}
    if len(point.seeds) > 1 and all(map(math.isfinite, point.seeds)):
        drawn["spread"] = [float(f"{seed:.6g}") for seed in point.seeds]
    return drawn


def _rule_in(text: str) -> str:
    """The title of the rule that a text starts with; "" if there is none."""
    titles = [rule.title for rule in RULES.values() if text.startswith(rule.title)]
    return max(titles, key=len, default="")


def _optimum(line: Line) -> Optimum | None:
    """The best point, with the finished points beside it. The optimum lies between these."""
    points = sorted((point for point in line.points if math.isfinite(point.y)), key=lambda point: point.x)
    if line.best is None or not points:
        return None
    index = min(range(len(points)), key=lambda number: abs(points[number].x - line.best))  # type: ignore[operator]
    inside = line.joined and 0 < index < len(points) - 1
    ends = (points[index - 1].x, points[index + 1].x) if inside else (None, None)
    return {
        "x": points[index].x,
        "y": points[index].y,
        "low": ends[0],
        "high": ends[1],
        "is_final": not line.waiting,
    }


def _x(x: float, panel: Panel) -> float:
    return math.log2(x) if panel.log_x else x


def _colour(line: Line) -> str:
    """Grey for dashed lines; otherwise the given colour, or a colour between violet and amber for a number. Each has a contrast
    of at least 3:1 with white."""
    if line.dashed:
        return "#777777"
    if isinstance(line.colour, str):
        return line.colour
    stops = [(68, 1, 84), (52, 84, 158), (20, 136, 128), (70, 150, 50), (205, 115, 0)]
    place = min(max(line.colour, 0.0), 1.0) * (len(stops) - 1)
    index = min(int(place), len(stops) - 2)
    mixed = (a + (b - a) * (place - index) for a, b in zip(stops[index], stops[index + 1], strict=True))
    return "#" + "".join(f"{round(value):02x}" for value in mixed)
