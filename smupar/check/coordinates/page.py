"""The page of a coordinate check: a card for each rule, sizes over width, density and depth, and the table of slopes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from smupar.check.coordinates.picture import mean_sizes
from smupar.check.coordinates.readings import JUDGED
from smupar.check.coordinates.verdict import FAIL, PASS, Slope, decides
from smupar.output.page.document import Answer, Chart, ChartLine, Document, PageTable, Tone, finite, thinned
from smupar.rules import get_rule

if TYPE_CHECKING:
    from smupar.check.coordinates.report import Report

_NUM_STEPS = 4  # lines in a chart
_TONES: dict[str, Tone] = {PASS: "good", FAIL: "bad"}
_NAMES = {"Y": "outputs (Y)", "grad X": "gradients (grad X)", "dY": "change by one update (dY)"}
_BASELINES = {"sp", "mup"}
_COLUMNS = ("verdict", "rule", "axis", "at", "place", "quantity", "when", "slope", "half_interval")


def check_document(report: Report, *, folder: str = "") -> Document:
    # Rules under test come first, then the baselines SP and muP.
    rules = sorted(report.rules, key=lambda rule: rule in _BASELINES)
    reasons = {rule: _reasons(report, rule) for rule in rules}
    notes = dict.fromkeys(text for texts in reasons.values() for text in texts if text.startswith("note: "))
    reasons = {rule: [text for text in texts if text not in notes] for rule, texts in reasons.items()}
    shared = _shared_reasons(reasons)
    return {
        "kind": "check",
        "title": "Coordinate check",
        "headline": report.headline,
        "sentence": " ".join(_sentence(reasons, text) for text in shared),
        "answers": [_answer(report, rule, [text for text in reasons[rule] if text not in shared]) for rule in rules],
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
        "details": [
            *([("Notes", "\n".join(note.removeprefix("note: ") for note in notes))] if notes else []),
            ("All findings", _typeset(report.explain())),
        ],
        "is_live": False,
        "made": time.time(),
    }


def _reasons(report: Report, rule: str) -> list[str]:
    """The reasons for a rule's verdict, without lists of layers and quantities, which are in the section "All findings"."""
    first, *reasons = report.explain_rule(rule)
    over = first.partition(f"{report.verdicts[rule].upper()} ")[2]
    texts = [over] + [reason.strip().partition(" [")[0] for reason in reasons if not reason.strip().startswith(JUDGED)]
    return [_typeset(text) for text in texts]


def _typeset(text: str) -> str:
    """A text for a page. Terminals may lack the sign, so there it is spelled in ASCII."""
    return text.replace("+-", "±")


def _shared_reasons(reasons: dict[str, list[str]]) -> list[str]:
    """Reasons that all rules share, and causes that several rules share. The page gives them once, above the cards."""
    texts = dict.fromkeys(text for of_rule in reasons.values() for text in of_rule)
    counts = {text: sum(text in of_rule for of_rule in reasons.values()) for text in texts}
    return [text for text, count in counts.items() if count > 1 and (count == len(reasons) or text.startswith("likely cause"))]


def _sentence(reasons: dict[str, list[str]], text: str) -> str:
    """A reason as a sentence. The sentence names the rules with this reason, unless all rules have it."""
    rules = [get_rule(rule).title for rule, texts in reasons.items() if text in texts]
    return f"{text[:1].upper()}{text[1:]}." if len(rules) == len(reasons) else f"{' and '.join(rules)}: {text}."


def _answer(report: Report, rule: str, reasons: list[str]) -> Answer:
    verdict, title = report.verdicts[rule], get_rule(rule).title
    if rule in _BASELINES and not set(report.rules) <= _BASELINES:
        reasons = [*reasons, "a baseline, which is not under test"]
    return {
        "name": title,
        "value": verdict.upper(),
        "text": "\n".join(text[:1].upper() + text[1:] for text in reasons),
        "tone": _TONES.get(verdict, "unclear"),
        "rule": title,
    }


def _chart(report: Report, axis: str, rule: str, quantity: str) -> Chart:
    """A chart of one quantity's size in hidden layers, with lines for up to ``_NUM_STEPS`` steps."""
    title = get_rule(rule).title
    steps: list[int] = thinned(sorted({reading.step for reading in report.readings if reading.step > 0}), _NUM_STEPS)
    lines: list[ChartLine] = []
    for number, step in enumerate(steps):
        sizes = mean_sizes(report.readings, axis, rule, quantity, step)
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
    over = f" over {axis}" if len({slope.axis for slope in report.slopes}) > 1 else ""
    return {
        "title": f"{title}: {_NAMES[quantity]}{over}",
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
    """The table of the slopes that decide the verdict, the worst first."""
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
