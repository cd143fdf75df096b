"""The report of a coordinate check: verdict, explanation, table, picture, page and JSON."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smupar.check.audit import Finding
from smupar.check.coordinates.diagnosis import Diagnosis, diagnose, folded
from smupar.check.coordinates.measure import JUDGED, Cell, Reading
from smupar.check.coordinates.verdict import FAIL, LATER, PASS, UNCLEAR, Slope, decides, overall, slopes, thresholds
from smupar.plan.plan import Plan
from smupar.rules import get_rule

BASELINES = ("sp", "mup")


@dataclass
class Report:
    """Everything that was measured, with verdicts. ``ok`` is about the rules under test. These are all rules but the baselines
    SP and muP, or all rules if only baselines were run."""

    readings: list[Reading]
    faults: Mapping[Cell, list[Finding]]
    plans: Mapping[tuple[str, int, float], Plan]
    slopes: list[Slope] = field(init=False)
    diagnoses: list[Diagnosis] = field(init=False)

    def __post_init__(self) -> None:
        self.slopes = slopes(self.readings)
        self.diagnoses = [cause for rule in self.rules for cause in diagnose(rule, self.slopes, self.faults, self.plans)]

    @property
    def rules(self) -> list[str]:
        return list(dict.fromkeys(rule for rule, _, _ in self.plans))

    @property
    def verdicts(self) -> dict[str, str]:
        """Rule -> "pass", "fail" or "more seeds"."""
        faulty = {diagnosis.rule for diagnosis in self.diagnoses if not diagnosis.is_caution}
        measured = {rule: overall(slope for slope in self.slopes if slope.rule == rule) for rule in self.rules}
        return {rule: FAIL if rule in faulty else measured[rule] for rule in self.rules}

    def axis_verdict(self, rule: str, axis: str) -> str:
        """The verdict over one axis, from sizes alone."""
        return overall(slope for slope in self.slopes if slope.rule == rule and slope.axis == axis)

    @property
    def ok(self) -> bool:
        under_test = [rule for rule in self.rules if rule not in BASELINES] or self.rules
        return all(self.verdicts[rule] == PASS for rule in under_test)

    # Words

    def explain(self) -> str:
        """The verdict of each rule, the reason, and what to do."""
        return "\n".join(line for rule in self.rules for line in self._explain(rule))

    def _explain(self, rule: str) -> list[str]:
        judged = [slope for slope in self.slopes if slope.rule == rule and slope.quantity in JUDGED]
        verdict, title = self.verdicts[rule], get_rule(rule).title
        steps, seeds = max(slope.step for slope in judged), max(slope.num_seeds for slope in judged)
        deciding = [slope for slope in judged if decides(slope)]
        places = len({slope.place for slope in deciding})
        lines = [
            f"{title}: {verdict.upper()} over {_axes(deciding)} ({places} layers and blocks, {steps} steps, {seeds} seeds)"
        ]
        passing = [slope for slope in deciding if slope.verdict == PASS]
        if verdict == PASS and passing:
            lines.append(f"  largest slope: {_told(max(passing, key=_excess))}")
        if verdict == UNCLEAR:
            lines.append(_unclear([slope for slope in deciding if slope.verdict == UNCLEAR], seeds))
        for quantity in JUDGED:
            failing = [slope for slope in deciding if slope.quantity == quantity and slope.verdict == FAIL]
            lines += [_failing(quantity, failing)] if failing else []
        diagnoses = [diagnosis for diagnosis in self.diagnoses if diagnosis.rule == rule]
        return lines + [f"  {'note' if diagnosis.is_caution else 'likely cause'}: {diagnosis}" for diagnosis in diagnoses]

    # Files

    def to_json(self, path: str | Path | None = None) -> str:
        text = json.dumps(
            {
                "format": "smupar-coordinates/1",
                "ok": self.ok,
                "verdicts": self.verdicts,
                "diagnoses": [asdict(diagnosis) for diagnosis in self.diagnoses],
                "slopes": [_finite(asdict(slope)) for slope in self.slopes],
                "readings": [_finite(asdict(reading)) for reading in self.readings],
            },
            allow_nan=False,
        )
        if path is not None:
            Path(path).write_text(text)
        return text

    def plot(self, path: str | Path | None = None, *, quantities: tuple[str, ...] = JUDGED) -> Any:
        """Draws a row for each quantity, a column for each rule, and a line for each step, as PNG or any other matplotlib
        format."""
        from smupar.check.coordinates.plot import draw

        figure = draw(self, quantities)
        if path is not None:
            figure.savefig(path, dpi=110)
        return figure

    def to_html(self, path: str | Path) -> None:
        """Writes one page that needs no other file, with verdicts, picture and table of slopes."""
        picture = io.BytesIO()
        self.plot().savefig(picture, dpi=130, format="png")
        Path(path).write_text(_page(self, base64.b64encode(picture.getvalue()).decode()))


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON knows neither nan nor infinity."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()}


def _unclear(unclear: list[Slope], seeds: int) -> str:
    worst = max(unclear, key=_excess)
    certain = worst.ci == worst.ci and abs(worst.slope) - worst.ci > thresholds(worst)[0]
    remedy = (
        "a drift that more seeds will not change; a longer axis, larger batches or more weights per neuron would"
        if certain
        else f"run more seeds (now {seeds})"
    )
    return f"  {len(unclear)} slopes are neither small nor large, such as {_told(worst)}: {remedy}"


def _failing(quantity: str, failing: list[Slope]) -> str:
    first = 1 if any(slope.step == 1 for slope in failing) else 2
    places = folded(failing)
    shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    return f"  {quantity} from step {first} in {shown}; worst {_told(max(failing, key=_excess))}"


def _axes(deciding: list[Slope]) -> str:
    parts = []
    for axis in ("width", "density"):
        at = sorted({slope.at for slope in deciding if slope.axis == axis}, reverse=True)
        if at:
            parts.append(f"{axis} (at {'density' if axis == 'width' else 'width'} {', '.join(f'{value:g}' for value in at)})")
    return " and ".join(parts)


def _excess(slope: Slope) -> float:
    return abs(slope.slope) / thresholds(slope)[1]


def _told(slope: Slope) -> str:
    spread = f" +- {slope.ci:.2f}" if slope.ci == slope.ci else ""
    other = "density" if slope.axis == "width" else "width"
    what = f"{slope.quantity} of {slope.place or 'logits'} over {slope.axis} at {other} {slope.at:g}"
    when = "later steps" if slope.step == LATER else f"step {slope.step}"
    return f"{slope.slope:+.2f}{spread} ({what}, {when})"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c1c1c; }
h1 { font-size: 1.5rem; } pre { background: #f5f5f5; padding: 1rem; overflow-x: auto; white-space: pre-wrap; }
img { max-width: 100%; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left; }
th { position: sticky; top: 0; background: #fff; }
.pass { color: #00695c; } .fail { color: #b03000; font-weight: 600; } .more { color: #8a6d00; }
"""


def _page(report: Report, picture: str) -> str:
    steps = {slope.step for slope in report.slopes}
    shown = [step for step in dict.fromkeys((1, 2, max(steps), LATER)) if step in steps]
    rows: dict[tuple[str, ...], dict[int, Slope]] = {}
    for slope in report.slopes:
        if slope.quantity in JUDGED:
            key = (get_rule(slope.rule).title, slope.axis, f"{slope.at:g}", slope.place or "logits", slope.quantity)
            rows.setdefault(key, {})[slope.step] = slope
    body = []
    for parts, by_step in rows.items():
        labels = "".join(f"<td>{html.escape(part)}</td>" for part in parts)
        body.append(f"<tr>{labels}{''.join(_cell(by_step.get(step)) for step in shown)}</tr>")
    heads = [
        "rule",
        "axis",
        "at",
        "place",
        "quantity",
        *("later steps, mean" if step == LATER else f"step {step}" for step in shown),
    ]
    head = "".join(f"<th>{name}</th>" for name in heads)
    verdict = "passes" if report.ok else "does not pass"
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Coordinate check</title>"
        f"<style>{_STYLE}</style><h1>Coordinate check: {verdict}</h1><pre>{html.escape(report.explain())}</pre>"
        f"<p><img alt='sizes over width or density' src='data:image/png;base64,{picture}'></p>"
        "<p>Slopes of log2(size) against log2(width or density), mean over seeds with a 95 % interval; flat is right.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></html>\n"
    )


def _cell(slope: Slope | None) -> str:
    if slope is None:
        return "<td></td>"
    spread = f" &plusmn; {slope.ci:.2f}" if slope.ci == slope.ci else ""
    return f'<td class="{slope.verdict.partition(" ")[0]}">{slope.slope:+.2f}{spread} {slope.verdict}</td>'
