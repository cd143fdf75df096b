"""The JSON that a page shows. Numbers that do not exist, such as the loss of a diverged run, are None."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict

# good: green; bad: red; unclear: amber; plain: no colour
Tone = Literal["good", "bad", "unclear", "plain"]


class ChartPoint(TypedDict):
    x: float
    y: float | None  # None if it is not known yet, or if the run diverged
    runs: list[str]  # ids of the runs of this point; the page links to their rows
    spread: NotRequired[list[float]]  # each seed's value, if y is a mean over seeds
    text: NotRequired[str]


class Optimum(TypedDict):
    x: float
    y: float
    smooth: float  # x of the vertex of a parabola through the best point and its neighbours; x itself at the edge
    low: float | None  # the optimum lies between low and high; None if it may lie beyond that end of the grid
    high: float | None
    is_final: bool  # False until all runs that may move it have ended


class ChartLine(TypedDict):
    label: str
    points: list[ChartPoint]
    shade: float  # 0 to 1: strength of the colour. The line that matters most has 1
    is_reference: bool  # drawn in grey and dashed
    is_joined: bool
    best: Optimum | None
    rule: NotRequired[str]  # title of its rule, if that differs from the chart's


class Chart(TypedDict):
    title: str
    rule: str  # title of the rule that gives the colour; "" for none
    x_label: str
    y_label: str
    log_x: bool
    log_y: bool
    lines: list[ChartLine]
    marked: NotRequired[tuple[float, str]]  # x of a vertical line, and its label
    falls: NotRequired[bool]  # whether x falls from left to right
    whole_y: NotRequired[bool]  # whether the y axis covers all values; if not, it covers those near the best
    group: NotRequired[str]  # charts of one group share their y axis


class Answer(TypedDict):
    """A card: the result for one rule, or for the whole study."""

    name: str
    value: str  # short: a factor, PASS, a loss
    text: str
    tone: Tone
    rule: str  # title of its rule, for the colour; "" for none
    link: NotRequired[str]  # the page that says more, relative to the document's folder


class PageTable(TypedDict):
    title: str
    columns: list[str]
    rows: list[list[Any]]  # if "id" and "state" are among the columns, rows are runs
    varied: list[str]  # the columns in which rows differ, most important first
    numeric: list[str]  # the columns in ``varied`` that hold numbers, for the x axis of a chart


class Worker(TypedDict):
    """A process that trains runs."""

    name: str  # host and process
    device: str
    state: Literal["running", "stalled", "stopped"]
    doing: str  # what it does while it trains no run; "" while it trains
    seen: float  # time of its last sign of life, in seconds since the epoch
    runs: int
    tokens_per_second: float | None


class PageProgress(TypedDict):
    done: int  # finished or diverged
    running: int
    waiting: int
    diverged: int
    stalled: int
    total: int | None  # None if the number is unknown
    doing: str  # what processes do while no run is trained; "" if runs are trained, or nothing happens
    seconds_left: float | None
    tokens_per_second: float | None
    workers: list[Worker]


class Document(TypedDict):
    kind: Literal["study", "runs", "check", "reproduction", "trace"]
    title: str
    headline: str  # the answer in one line
    sentence: str  # the answer with numbers and doubts
    answers: list[Answer]
    charts: list[Chart]
    table: PageTable | None
    progress: PageProgress | None
    curves: dict[str, list[list[float | None]]]  # run id -> rows of step, loss, and validation loss where it was measured
    command: str  # the command that makes or continues what is shown; "" for none
    folder: str
    details: list[tuple[str, str]]  # title and plain text of each folded section
    is_live: bool  # whether the document may still change
    made: float  # seconds since the epoch


def finite(value: float | None) -> float | None:
    """A number that JSON can hold, with six digits, or None."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def thinned(rows: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` of the rows, evenly spaced, with the first and the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(number * (len(rows) - 1) / (most - 1))] for number in range(most)]
