"""The page of a coordinate check: a card for each rule, sizes over width, density and depth, and the table of slopes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from smupar.check.coordinates.measure import JUDGED
from smupar.check.coordinates.report import mean_sizes
from smupar.check.coordinates.verdict import DRIFT, FAIL, PASS, Slope, decides
from smupar.output.page.document import Answer, Chart, ChartLine, Document, PageTable, Tone, finite, thinned
from smupar.rules import get_rule

if TYPE_CHECKING:
    from smupar.check.coordinates.report import Report

_NUM_STEPS = 4  # lines in a chart
_TONES: dict[str, Tone] = {PASS: "good", FAIL: "bad"}
_COLUMNS = ("verdict", "rule", "axis", "at", "place", "quantity", "when", "slope", "half_interval")


def check_document(report: Report, *, folder: str = "") -> Document:
    # Rules under test come first, then the baselines SP and muP.
    rules = sorted(report.rules, key=lambda rule: rule in ("sp", "mup"))
    return {
        "kind": "check",
        "title": "Coordinate check",
        "headline": _headline(report, rules),
        "sentence": "Activations, gradients and updates should keep their size over width, density and depth: lines should be "
        "flat. The verdict is about the slopes of log2(size) against log2(width, density or depth).",
        "answers": [_answer(report, rule) for rule in rules],
        "charts": [
            _chart(report, axis, rule, quantity)
            for axis in dict.fromkeys(slope.axis for slope in report.slopes)
            for quantity in JUDGED
            for rule in rules
        ],
        "table": _table(report),
        "progress": None,
        "curves": {},
        "command": "",
        "folder": folder,
        "details": [("All findings", report.explain())],
        "is_live": False,
        "made": time.time(),
    }


def _headline(report: Report, rules: list[str]) -> str:
    words = {PASS: "passes", FAIL: "does not pass", DRIFT: "drifts"}
    return "; ".join(f"{get_rule(rule).title} {words.get(report.verdicts[rule], 'needs more seeds')}" for rule in rules) + "."


def _answer(report: Report, rule: str) -> Answer:
    verdict, title = report.verdicts[rule], get_rule(rule).title
    first, *reasons = report.explain_rule(rule)
    over = first.partition(f"{verdict.upper()} ")[2]
    # The long part (layers, quantities) is in the findings below.
    told = [reason.strip().partition(" [")[0] for reason in reasons if not reason.strip().startswith(JUDGED)]
    return {
        "name": title,
        "value": verdict.upper(),
        "text": "\n".join(text[:1].upper() + text[1:] for text in (over, *told)),
        "tone": _TONES.get(verdict, "unclear"),
        "rule": title,
    }


def _chart(report: Report, axis: str, rule: str, quantity: str) -> Chart:
    """The sizes of one quantity in hidden layers, with one line for each of some steps."""
    title = get_rule(rule).title
    steps: list[int] = thinned(sorted({reading.step for reading in report.readings if reading.step > 0}), _NUM_STEPS)
    lines: list[ChartLine] = []
    for number, step in enumerate(steps):
        sizes = mean_sizes(report, axis, rule, quantity, step)
        lines.append(
            {
                "label": f"step {step}",
                "points": [{"x": x, "y": finite(y), "runs": []} for x, y in sorted(sizes.items())],
                "shade": number / max(1, len(steps) - 1),
                "is_reference": False,
                "is_joined": True,
                "best": None,
            }
        )
    return {
        "title": f"{title}: {quantity} over {axis}",
        "rule": title,
        "x_label": axis,
        "y_label": f"{quantity} (RMS, hidden layers)",
        "log_x": True,
        "log_y": True,
        "lines": lines,
        "falls": axis == "density",  # sparser models are on the right
        "whole_y": True,
        "group": f"{axis} {quantity}",
    }


def _table(report: Report) -> PageTable:
    """The table of deciding slopes, the worst first."""
    deciding = [slope for slope in report.slopes if slope.quantity in JUDGED and decides(slope)]
    ranked = sorted(deciding, key=lambda slope: (slope.verdict != FAIL, -abs(slope.slope)))
    varied = ["rule", "axis", "at", "quantity", "when", "verdict"]
    return {
        "title": "Slopes",
        "columns": list(_COLUMNS),
        "rows": [[_cells(slope)[name] for name in _COLUMNS] for slope in ranked],
        "varied": varied,
        "numeric": [],
    }


def _cells(slope: Slope) -> dict[str, Any]:
    return {
        "verdict": slope.verdict or "not judged",
        "rule": get_rule(slope.rule).title,
        "axis": slope.axis,
        "at": slope.where,
        "place": slope.place or "logits",
        "quantity": slope.quantity,
        "when": slope.when,
        "slope": finite(slope.slope),
        "half_interval": finite(slope.ci),
    }
