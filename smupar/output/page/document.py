"""What a page shows, as JSON. Numbers that do not exist (the loss of a run that diverged or has not ended) are None."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict

# good: green; bad: red; unclear: amber; plain: no colour
Tone = Literal["good", "bad", "unclear", "plain"]


class ChartPoint(TypedDict):
    x: float
    y: float | None  # None if it is not known, or diverged
    runs: list[str]  # ids, which lead to the runs' rows; empty if the point is not made of runs
    spread: NotRequired[list[float]]  # the values of single seeds, if y is the mean of several
    text: NotRequired[str]


class Optimum(TypedDict):
    x: float
    y: float
    smooth: float  # x of the minimum between points; x itself at the edge
    low: float | None  # the optimum lies between low and high. None: it may lie beyond the grid
    high: float | None
    is_final: bool  # False while a run that may move it has not ended


class ChartLine(TypedDict):
    label: str
    points: list[ChartPoint]
    shade: float  # from 0 to 1: how much it is the subject. The last line of a family has its full colour
    is_reference: bool  # drawn in grey and dashed
    is_joined: bool
    best: Optimum | None
    rule: NotRequired[str]  # the title of a rule, if it differs from the chart's


class Chart(TypedDict):
    title: str
    rule: str  # the title of the rule whose colour it has; "" for none
    x_label: str
    y_label: str
    log_x: bool
    log_y: bool
    lines: list[ChartLine]
    marked: NotRequired[tuple[float, str]]  # x of a vertical line, and what it is
    falls: NotRequired[bool]  # whether x falls from left to right
    whole_y: NotRequired[bool]  # whether every value is shown, and not only those near the best
    group: NotRequired[str]  # charts of one group share their y axis


class Answer(TypedDict):
    """One card: what came out for one rule, or for the whole."""

    name: str
    value: str  # short: a factor, PASS, a loss
    text: str
    tone: Tone
    rule: str  # its title, for the colour; "" for none


class PageTable(TypedDict):
    title: str
    columns: list[str]
    rows: list[list[Any]]  # with "id" and "state" among the columns, rows are runs
    varied: list[str]  # the columns in which rows differ, most important first
    numeric: list[str]  # those of them that are numbers, to draw over


class Worker(TypedDict):
    """A process that trains runs."""

    name: str  # host and process
    device: str
    state: Literal["running", "stalled", "stopped"]
    seen: float  # seconds since the epoch: its last sign of life
    runs: int
    tokens_per_second: float | None


class PageProgress(TypedDict):
    done: int  # finished or diverged
    running: int
    waiting: int
    diverged: int
    stalled: int
    total: int | None  # None if it is not known how many there will be
    seconds_left: float | None
    tokens_per_second: float | None
    workers: list[Worker]


class Document(TypedDict):
    kind: Literal["study", "runs", "check", "reproduction", "trace"]
    title: str
    headline: str  # the answer in one line
    sentence: str  # the answer with its numbers and doubts
    answers: list[Answer]
    charts: list[Chart]
    table: PageTable | None
    progress: PageProgress | None
    curves: dict[str, list[list[float | None]]]  # run id -> rows of step, loss, and validation loss where it was measured
    command: str  # makes it, or goes on with it
    folder: str
    details: list[tuple[str, str]]  # titles and plain texts, folded away
    is_live: bool  # whether it may still change
    made: float  # seconds since the epoch


def finite(value: float | None) -> float | None:
    """A number that JSON can hold, with six digits, or None."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def thinned(rows: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` of the rows, evenly spaced, with the first and the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(number * (len(rows) - 1) / (most - 1))] for number in range(most)]
