"""The curves of a study, and how a page gets them as charts. `picture` draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from smupar.output.page.document import Chart, ChartLine, ChartPoint, Optimum, finite
from smupar.rules import RULES
from smupar.study.curves.optima import Curve

LOSS = "loss (mean of the last 5 % of steps)"
_LOSS_OF_PAGE = "loss (nats per token)"  # a page explains elsewhere that this is a mean


@dataclass(frozen=True)
class Point:
    x: float
    y: float  # infinite if the run diverged; values above the plotted range are drawn at its top
    text: str = ""
    runs: tuple[str, ...] = ()  # ids of its runs; a page links to them
    seeds: tuple[float, ...] = ()  # each seed's value, drawn as a small dot, if y is a mean over seeds


@dataclass(frozen=True)
class Line:
    label: str
    points: tuple[Point, ...]
    colour: float | str = 0.0  # from 0, dark, to 1, or #rrggbb
    dashed: bool = False
    best: float | None = None  # x of the best point, drawn as a star; the star is hollow at the edge of the grid
    optimum: float | None = None  # x of the smooth minimum, which is drawn above the curves; by default ``best``
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
    level: tuple[float, str] | None = None  # y of a dashed horizontal line, and its label
    log_x: bool = True
    whole_y: bool = False  # True: y ranges over all values; False: only over those near the best
    rule: str = ""  # title of the rule that gives the colour on a page
    finding: str = ""  # what the curves show in a few words. A picture has it in the title, a page in its cards
    falling_x: bool = False  # whether x falls from left to right. Sparser models are always on the right


def line_of(curve: Curve, label: str, colour: float) -> Line:
    seeds = curve.seeds or ((),) * len(curve.values)
    points = tuple(Point(x, y, seeds=own) for x, y, own in zip(curve.values, curve.losses, seeds, strict=True))
    best, optimum = (None, None) if curve.diverged else (curve.best_value, curve.best)
    return Line(label, points, colour, dashed=curve.is_proxy, best=best, optimum=optimum)


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


def chart_of(panel: Panel) -> Chart:
    """The panel as a chart of a page."""
    chart: Chart = {
        "title": panel.title,
        "rule": panel.rule or rule_in(panel.title),
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
        drawn["rule"] = rule_in(line.label)
    return drawn


def _chart_point(point: Point) -> ChartPoint:
    drawn: ChartPoint = {"x": point.x, "y": finite(point.y), "runs": list(point.runs)}
    if len(point.seeds) > 1 and all(map(math.isfinite, point.seeds)):
        drawn["spread"] = [float(f"{seed:.6g}") for seed in point.seeds]
    return drawn


def rule_in(text: str) -> str:
    """The rule's title with which the text starts; "" if it starts with none."""
    titles = [rule.title for rule in RULES.values() if text.startswith(rule.title)]
    return max(titles, key=len, default="")


def _optimum(line: Line) -> Optimum | None:
    found, best = interval(line), _best_point(line)
    if found is None or best is None:
        return None
    smooth, low, high, side = found
    is_inside = line.joined and not side
    return {
        "x": best.x,
        "y": best.y,
        "smooth": smooth,
        "low": low if is_inside else None,
        "high": high if is_inside else None,
        "is_final": not line.waiting,
    }


def _finite_points(line: Line) -> list[Point]:
    return sorted((point for point in line.points if math.isfinite(point.y)), key=lambda point: point.x)


def _best_point(line: Line) -> Point | None:
    best = line.best
    return None if best is None else min(_finite_points(line), key=lambda point: abs(point.x - best), default=None)


def interval(line: Line) -> tuple[float, float, float, int] | None:
    """The optimum of a line, the two points between which it lies, and a side: -1 or 1 if the best point is the leftmost or the
    rightmost, 0 otherwise. If the best point is at an end, the optimum may lie beyond it, and is taken to be that end."""
    points, best = _finite_points(line), _best_point(line)
    if best is None:
        return None
    index = points.index(best)
    side = -1 if index == 0 else 1 if index == len(points) - 1 else 0
    low, high = points[max(0, index - 1)].x, points[min(len(points) - 1, index + 1)].x
    return line.optimum or best.x if not side else best.x, low, high, side


def octaves(reference: float, x: float, side: int) -> str:
    """How far an optimum is from the reference, in words; "" for the reference itself. ``side`` is as in ``interval``."""
    if x == reference:
        return ""
    move = math.log2(x / reference)
    text = "0.0" if abs(move) < 0.05 else f"{move:+.1f}".replace("-", "\N{MINUS SIGN}")
    return f"{text} octaves" + (" or more" if side * move > 0 else "")
