"""Draws the curves of a study as a picture.

Above the curves of a panel, each curve has a row. The row shows the curve's optimum, the interval that contains the optimum,
and its distance in octaves from the reference's optimum. If the hyperparameter transfers, the optima stand in one column. These
rows are also the legend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smupar.output.colours import mixed, rule_colour
from smupar.output.pictures import new_figure, save_figure
from smupar.study.conventions import density_in_words
from smupar.study.curves.curves import Line, Panel, interval, octaves, rule_in, y_range

_WIDTH, _HEIGHT, _ROW = 3.15, 2.6, 0.2  # inches: of a panel, of its curves, of each row above them
_MOST_ROWS = 12
_MOST_LETTERS = 32  # of a title on one line
_GREY, _TEXT = "#6b7280", "#1f2430"
_SEEDS: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 3.2, "alpha": 0.5, "markeredgewidth": 0}


def draw_png(panels: Sequence[Panel], path: Path, title: str = "", *, columns: int | None = None) -> None:
    """Draws the panels in rows of ``columns``, by default of at most three, so that they stay readable on a page."""
    columns = min(columns or _columns(len(panels)), len(panels))
    num_rows = -(-len(panels) // columns)
    above = max(_num_optima(panel) for panel in panels)
    many = not above and max(_num_keys(panel, panels) for panel in panels) > 4  # the legend is beside, to cover no lines
    height = _HEIGHT + 0.75 + _ROW * above
    beside = 2.6 if many or (above and columns == 1) else 0.9  # one panel is narrower than its title and the legend below it
    figure = new_figure(figsize=(_WIDTH * columns + beside, height * num_rows), layout="constrained")
    places = _places(figure, len(panels), num_rows, columns, above)
    labels = [_labels(panel) for panel in panels]
    for number, (panel, (top, axis)) in enumerate(zip(panels, places, strict=True)):
        first = number % columns == 0 or panel.y_label != panels[number - 1].y_label
        _draw_panel(panel, axis, *_y_range_beside(panel, panels))
        _draw_title(panel, top)
        if above:
            _draw_optima(panel, top, axis, with_names=first or labels[number] != labels[number - 1])
        elif not many and (panel is panels[-1] or labels[number] != labels[-1]):  # panels with equal lines share a legend
            axis.legend(fontsize=8, loc="best", framealpha=0.9, edgecolor="none")
        _label_y(panel, axis, panels, with_name=first)
    _share_x(panels, [axis for _, axis in places])
    _draw_legend(figure, panels, [axis for place in places for axis in place], above=bool(above), many=many)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, path, dpi=180)


def _columns(num: int) -> int:
    """Panels in a row. Four panels are a square."""
    return 2 if num == 4 else 3


def _label_y(panel: Panel, axis: Any, panels: Sequence[Panel], *, with_name: bool) -> None:
    axis.set_ylabel(panel.y_label if with_name else "", color=_TEXT, fontsize=8.5)
    axis.tick_params(labelleft=with_name or any(other.y_label != panel.y_label for other in panels))


def _places(figure: Any, num: int, num_rows: int, columns: int, above: int) -> list[tuple[Any, Any]]:
    """(axis for the rows above the curves, axis for the curves) of each panel; one axis is both if there are no such rows."""
    figure.get_layout_engine().set(hspace=0.03, h_pad=0.05)
    ratios = [_ROW * above, _HEIGHT] if above else [1]
    axes = figure.subplots(len(ratios) * num_rows, columns, squeeze=False, height_ratios=ratios * num_rows)
    tops, bottoms = axes[:: len(ratios)].flat, axes[len(ratios) - 1 :: len(ratios)].flat
    for unused in (*tops[num:], *bottoms[num:]):
        unused.set_visible(False)
    return list(zip(tops[:num], bottoms[:num], strict=True))


def _share_x(panels: Sequence[Panel], axes: Sequence[Any]) -> None:
    """Gives panels over the same linear x one range."""
    xs = [point.x for panel in panels for line in panel.lines for point in line.points]
    if xs and not any(panel.log_x or panel.falling_x or panel.x_label != panels[0].x_label for panel in panels):
        room = 0.05 * (max(xs) - min(xs))
        for axis in axes:
            axis.set_xlim(min(xs) - room, max(xs) + room)


def _num_optima(panel: Panel) -> int:
    """The number of rows above the curves; 0 if the panel has no reference, or too many curves."""
    is_drawn = panel.marked_x is not None and panel.log_x and 1 < len(panel.lines) <= _MOST_ROWS
    return len(panel.lines) if is_drawn and _has_best(panel) else 0


def _labels(panel: Panel) -> list[str]:
    return [line.label for line in panel.lines]


def _num_keys(panel: Panel, panels: Sequence[Panel]) -> int:
    """Number of entries in the legend of one of the panels."""
    marks = [_has_best(panel), _has_seeds(panel), panel.marked_x is not None, panel.level is not None]
    return len(panel.lines) + sum(marks) + _exceeds(panel, _y_range_beside(panel, panels)[1])


def _y_range_beside(panel: Panel, panels: Sequence[Panel]) -> tuple[float, float]:
    """The range of y, which a panel shares with all panels that show the same quantity."""
    return y_range([other for other in panels if other.y_label == panel.y_label])


def _exceeds(panel: Panel, high: float) -> bool:
    return any(point.y > high for line in panel.lines for point in line.points)


def _has_best(panel: Panel) -> bool:
    return any(line.best is not None for line in panel.lines)


def _has_seeds(panel: Panel) -> bool:
    return any(len(point.seeds) > 1 for line in panel.lines for point in line.points)


def _draw_title(panel: Panel, axis: Any) -> None:
    text = f"{panel.title}: {panel.finding}" if panel.finding else panel.title
    by_size = any(not isinstance(line.colour, str) for line in panel.lines)  # these colours resemble the rules' colours
    colour = _TEXT if by_size else rule_colour(panel.rule or rule_in(text), _TEXT)
    if len(text) > _MOST_LETTERS:
        text = text.replace(": ", ":\n", 1)
    axis.set_title(text, fontsize=10.5, fontweight="bold", loc="left", color=colour)


def _draw_legend(figure: Any, panels: Sequence[Panel], axes: Any, *, above: bool, many: bool) -> None:
    """One legend for all panels. If the rows above the curves name the curves, the legend explains the other marks: stars,
    seeds, the dotted line."""
    if not (above or many):
        return
    keys = {label: key for axis in axes for key, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    lines = dict.fromkeys(line.label for panel in panels for line in panel.lines)
    if above:
        rest = [label for label in keys if label not in lines]
        ncols = 2 if len(axes) == 2 else 4  # a single panel, with the rows above it, is narrow
        figure.legend([keys[label] for label in rest], rest, fontsize=8, loc="outside lower center", ncols=ncols, frameon=False)
    else:
        labels = dict.fromkeys([*lines, *keys])  # lines come first
        figure.legend([keys[label] for label in labels], labels, fontsize=8, loc="outside right center", frameon=False)


def _draw_panel(panel: Panel, axis: Any, low: float, high: float) -> None:
    for line in panel.lines:
        _draw_line(line, panel, axis, high)
    if _has_best(panel):
        axis.plot([], [], "*", color="0.3", markersize=9, label="best run (hollow: at the edge)")
    if _has_seeds(panel):
        axis.plot([], [], color="0.3", label="single seeds; lines are means", **_SEEDS)
    if _exceeds(panel, high):
        axis.plot([], [], "^", color="0.3", markersize=5, linestyle="none", label="above the range")
    if panel.marked_x is not None:
        axis.axvline(panel.marked_x, color=_GREY, linewidth=1, linestyle=":", label=panel.marked_label)
    if panel.level is not None:
        axis.axhline(panel.level[0], color=_GREY, linewidth=1, linestyle="--", label=panel.level[1])
    if panel.log_x:
        axis.set_xscale("log", base=2)
    if panel.falling_x:
        axis.invert_xaxis()
    if panel.x_label.startswith("density"):
        xs = sorted({point.x for line in panel.lines for point in line.points})
        axis.set_xticks(xs, [density_in_words(1 - x) for x in xs])
        axis.minorticks_off()
    axis.set_ylim(low, high)
    axis.set_xlabel(panel.x_label, color=_TEXT)
    axis.grid(True, color="0.92")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("0.6")
    axis.tick_params(color="0.6", labelcolor=_TEXT, labelsize=9)


def _draw_line(line: Line, panel: Panel, axis: Any, high: float) -> None:
    points, colour = sorted(line.points, key=lambda point: point.x), line_colour(line)
    style = ("--" if line.dashed else "-") if line.joined else "none"
    size = 3.5 if line.marker == "o" else 8
    ys = [p.y if math.isfinite(p.y) else math.nan for p in points]
    curve = {"linestyle": style, "linewidth": 1.8, "marker": line.marker, "markersize": size, "color": colour}
    axis.plot([p.x for p in points], ys, label=line.label, **curve)
    dots = [(p.x, seed) for p in points for seed in p.seeds if len(p.seeds) > 1]
    axis.plot([x for x, _ in dots], [y for _, y in dots], color=colour, **_SEEDS)
    above = [p.x for p in points if p.y > high]
    for artist in axis.plot(above, [high] * len(above), "^", markersize=5, color=colour, clip_on=False):
        artist.set_in_layout(False)
    if line.best is not None and points:
        best = min(points, key=lambda point: abs(_x(point.x, panel) - _x(line.best, panel)))  # type: ignore[arg-type]
        fill, edge = ("white", colour) if best in (points[0], points[-1]) else (colour, "white")
        axis.plot(best.x, best.y, marker="*", markersize=14, markerfacecolor=fill, markeredgecolor=edge, zorder=4)


def _draw_optima(panel: Panel, top: Any, axis: Any, *, with_names: bool) -> None:
    """Draws a row for each curve: its optimum, the runs on both sides of it, and its octaves from the reference."""
    reference = panel.marked_x
    assert reference is not None
    top.set_xscale("log", base=2)
    top.set_xlim(axis.get_xlim())
    top.set_ylim(len(panel.lines) - 0.4, -0.6)
    top.axvline(reference, color=_GREY, linewidth=1, linestyle=":")
    for row, line in enumerate(panel.lines):
        _draw_optimum(line, row, reference, top)
    top.set_yticks(range(len(panel.lines)), [line.label for line in panel.lines] if with_names else [""] * len(panel.lines))
    for label, line in zip(top.get_yticklabels(), panel.lines, strict=True):
        label.set(color=line_colour(line), fontsize=9)
    top.tick_params(length=0, labelbottom=False)
    top.tick_params(which="minor", length=0)
    top.spines[:].set_visible(False)


def _draw_optimum(line: Line, row: int, reference: float, top: Any) -> None:
    found = interval(line)
    if found is None:
        return
    x, low, high, side = found
    colour = line_colour(line)
    top.plot([low, high], [row, row], color=colour, linewidth=1.6, alpha=0.45, solid_capstyle="butt")
    marker = {-1: "<", 0: "o", 1: ">"}[side]
    top.plot(x, row, marker, color=colour, markersize=6, markerfacecolor="white" if side else colour, clip_on=False, zorder=3)
    left, right = (math.log2(end) for end in top.get_xlim())
    if (math.log2(high) - left) / (right - left) > 0.7:  # no room on the right
        place, away, alignment = low, -6, "right"
    else:
        place, away, alignment = high, 6, "left"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the dotted line
    style = {"color": colour, "fontsize": 8.5, "va": "center", "ha": alignment, "bbox": box}
    top.annotate(octaves(reference, x, side), (place, row), xytext=(away, -0.5), textcoords="offset points", **style)


def _x(x: float, panel: Panel) -> float:
    return math.log2(x) if panel.log_x else x


def line_colour(line: Line) -> str:
    """Grey for dashed lines; otherwise the given colour, or a colour between violet and amber for a number. Each has a contrast
    of at least 3:1 with white."""
    if line.dashed:
        return "#777777"
    if isinstance(line.colour, str):
        return line.colour
    stops = ["#440154", "#34549e", "#148880", "#469632", "#cd7300"]
    place = min(max(line.colour, 0.0), 1.0) * (len(stops) - 1)
    index = min(int(place), len(stops) - 2)
    return mixed(stops[index], stops[index + 1], place - index)
