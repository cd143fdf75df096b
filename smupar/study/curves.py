"""Draws the curves of a study twice: as a picture, and as SVG for a page, where points show their numbers when hovered."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smupar.output.pictures import new_figure, save_figure
from smupar.study.optima import Curve

LOSS = "loss (mean of the last 5 % of steps)"


@dataclass(frozen=True)
class Point:
    x: float
    y: float  # infinite if the run diverged. Values above the plotted range are drawn as triangles at the top
    text: str = ""


@dataclass(frozen=True)
class Line:
    label: str
    points: tuple[Point, ...]
    colour: float | str = 0.0  # from 0, dark, to 1, or #rrggbb
    dashed: bool = False
    best: float | None = None  # x of the optimum, drawn as a star; the star is hollow at the edge of the grid
    joined: bool = True  # whether the points are joined


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    marked_x: float | None = None  # x of a dotted vertical line
    marked_label: str = ""
    log_x: bool = True
    whole_y: bool = False  # whether every value is shown, and not only those near the best


def line_of(curve: Curve, label: str, colour: float) -> Line:
    points = tuple(Point(x, y) for x, y in zip(curve.values, curve.losses, strict=True))
    return Line(label, points, colour, dashed=curve.is_proxy, best=None if curve.diverged else curve.best_value)


def y_range(panels: Sequence[Panel]) -> tuple[float, float]:
    """The range of losses that all panels show: from the best to a bit above those that are still of interest."""
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
    many = max(len(panel.lines) for panel in panels) > 4  # a legend would cover them, so one goes beside the panels
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
        figure.legend(keys.values(), keys.keys(), fontsize=8, loc="outside right center")
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, path, dpi=150)


def _draw_panel(panel: Panel, axis: Any, low: float, high: float) -> None:
    for line in panel.lines:
        points, colour = sorted(line.points, key=lambda point: point.x), _colour(line)
        style = ("--" if line.dashed else "-") if line.joined else "none"
        ys = [p.y if math.isfinite(p.y) else math.nan for p in points]
        axis.plot([p.x for p in points], ys, linestyle=style, marker="o", markersize=3, label=line.label, color=colour)
        above = [p.x for p in points if p.y > high]
        for artist in axis.plot(above, [high] * len(above), "^", markersize=5, color=colour, clip_on=False):
            artist.set_in_layout(False)
        if line.best is not None and points:
            best = min(points, key=lambda point: abs(_x(point.x, panel) - _x(line.best, panel)))  # type: ignore[arg-type]
            fill, edge = ("white", colour) if best in (points[0], points[-1]) else (colour, "white")
            axis.plot(best.x, best.y, marker="*", markersize=13, markerfacecolor=fill, markeredgecolor=edge)
    if any(line.best is not None for line in panel.lines):
        axis.plot([], [], "*", color="0.3", markersize=9, label="best (hollow: at the edge)")
    if panel.marked_x is not None:
        axis.axvline(panel.marked_x, color="0.6", linewidth=1, linestyle=":", label=panel.marked_label)
    if panel.log_x:
        axis.set_xscale("log", base=2)
    axis.set_ylim(low, high)
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel(panel.x_label)
    axis.grid(True, alpha=0.25)


# A page

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 380, 300, 52, 40, 26


def draw_svg(panels: Sequence[Panel]) -> str:
    ranges = {panel.y_label: y_range([other for other in panels if other.y_label == panel.y_label]) for panel in panels}
    return "".join(_svg(panel, *ranges[panel.y_label]) for panel in panels)


def _svg(panel: Panel, low: float, high: float) -> str:
    xs = [_x(point.x, panel) for line in panel.lines for point in line.points] or [0.0, 1.0]
    left, right = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1

    def px(x: float) -> float:
        return _LEFT + (_x(x, panel) - left) / (right - left) * (_WIDTH - _LEFT - 14)

    def py(y: float) -> float:
        return _HEIGHT - _BOTTOM - (min(y, 3 * high - 2 * low) - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    parts = [
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' height='{_HEIGHT}' role='img'>",
        f"<clipPath id='plot'><rect x='0' y='{_TOP}' width='{_WIDTH}' height='{_HEIGHT - _TOP}'/></clipPath>",
        f"<text x='{_WIDTH / 2}' y='16' class='title'>{html.escape(panel.title)}</text>",
    ]
    for tick in _ticks(low, high):
        parts += [
            f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - 14}' y1='{py(tick):.1f}' y2='{py(tick):.1f}'/>",
            f"<text class='tick' x='{_LEFT - 6}' y='{py(tick) + 4:.1f}' text-anchor='end'>{tick:.3g}</text>",
        ]
    for x in sorted({point.x for line in panel.lines for point in line.points}):
        is_power = panel.log_x and math.log2(x).is_integer()
        label = f"2<tspan dy='-4' font-size='8'>{math.log2(x):g}</tspan>" if is_power else f"{x:.3g}"
        parts.append(f"<text class='tick' x='{px(x):.1f}' y='{_HEIGHT - _BOTTOM + 16}' text-anchor='middle'>{label}</text>")
    parts.append(f"<text class='label' x='{_WIDTH / 2}' y='{_HEIGHT - 6}'>{html.escape(panel.x_label)}</text>")
    if panel.marked_x is not None:
        parts.append(
            f"<line class='mark' x1='{px(panel.marked_x):.1f}' x2='{px(panel.marked_x):.1f}' y1='{_TOP}' "
            f"y2='{_HEIGHT - _BOTTOM}'><title>{html.escape(panel.marked_label)}</title></line>"
        )
    return "".join([*parts, *(_svg_line(line, px, py) for line in panel.lines), "</svg>"])


def _svg_line(line: Line, px: Any, py: Any) -> str:
    colour = _colour(line)
    points = sorted(line.points, key=lambda point: point.x)
    path = " ".join(f"{px(point.x):.1f},{py(point.y):.1f}" for point in points)
    dash = " stroke-dasharray='5 4'" if line.dashed else ""
    parts = [f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.6'{dash} clip-path='url(#plot)'/>"]
    parts = parts if line.joined else []
    for point in points:
        value = "diverged" if math.isinf(point.y) else f"{point.y:.4f}"
        text = html.escape(f"{line.label}: {value} at {point.x:.4g}. {point.text}")
        x, y = px(point.x), py(point.y)
        triangle = f"<path d='M{x - 5:.1f} {_TOP + 8} L{x + 5:.1f} {_TOP + 8} L{x:.1f} {_TOP} Z'"
        shape = triangle if y < _TOP else f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4'"
        parts.append(f"{shape} fill='{colour}' data-text='{text}'><title>{text}</title></{'path' if y < _TOP else 'circle'}>")
    return "".join(parts)


def legend(lines: Sequence[Line]) -> str:
    keys = (f"<span class='key'><i style='background:{_colour(line)}'></i>{html.escape(line.label)}</span>" for line in lines)
    return f"<p class='legend'>{''.join(keys)}</p>"


def _x(x: float, panel: Panel) -> float:
    return math.log2(x) if panel.log_x else x


def _ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(step * times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= 6)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _colour(line: Line) -> str:
    """Grey for dashed lines; otherwise the given colour, or that of viridis at the given position."""
    if line.dashed:
        return "#777777"
    if isinstance(line.colour, str):
        return line.colour
    stops = [(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (203, 220, 40)]
    place = 0.9 * min(max(line.colour, 0.0), 1.0) * (len(stops) - 1)
    index = min(int(place), len(stops) - 2)
    mixed = (a + (b - a) * (place - index) for a, b in zip(stops[index], stops[index + 1], strict=True))
    return "#" + "".join(f"{round(value):02x}" for value in mixed)
