"""The report of a coordinate check: verdict, explanation, table, picture, page and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smupar.check.audit.findings import Finding
from smupar.check.coordinates.diagnosis import Diagnosis, diagnose, folded
from smupar.check.coordinates.page import check_document
from smupar.check.coordinates.picture import draw
from smupar.check.coordinates.readings import AXES, JUDGED, Cell, GridPoint, Reading
from smupar.check.coordinates.verdict import (
    DRIFT,
    FAIL,
    PASS,
    UNCLEAR,
    Slope,
    decides,
    deviation,
    overall,
    slopes,
    thresholds,
)
from smupar.output.files import write_atomic
from smupar.output.page import write_page
from smupar.output.page.document import Tone
from smupar.output.pictures import save_figure
from smupar.plan.plan import Plan
from smupar.rules import get_rule


@dataclass
class Report:
    """All measurements, with verdicts. ``ok`` says whether every rule under test passes. SP and muP are baselines, which are
    not under test unless only they were run."""

    readings: list[Reading]
    faults: Mapping[Cell, list[Finding]]
    plans: Mapping[GridPoint, Plan]
    slopes: list[Slope] = field(init=False)
    diagnoses: list[Diagnosis] = field(init=False)

    def __post_init__(self) -> None:
        self.slopes = slopes(self.readings)
        self.diagnoses = [cause for rule in self.rules for cause in diagnose(rule, self.slopes, self.faults, self.plans)]

    @property
    def rules(self) -> list[str]:
        return list(dict.fromkeys(point.rule for point in self.plans))

    @property
    def verdicts(self) -> dict[str, str]:
        """Rule -> "pass", "fail", "drift" or "more seeds"."""
        faulty = {diagnosis.rule for diagnosis in self.diagnoses if not diagnosis.is_caution}
        measured = {rule: overall(slope for slope in self.slopes if slope.rule == rule) for rule in self.rules}
        return {rule: FAIL if rule in faulty else measured[rule] for rule in self.rules}

    def axis_verdict(self, rule: str, axis: str) -> str:
        """The verdict over one axis, based on sizes only."""
        return overall(slope for slope in self.slopes if slope.rule == rule and slope.axis == axis)

    @property
    def ok(self) -> bool:
        return self._overall == {PASS}

    @property
    def _overall(self) -> set[str]:
        """The verdicts of the rules under test."""
        verdicts = self.verdicts
        return {verdicts[rule] for rule in [rule for rule in self.rules if rule not in ("sp", "mup")] or self.rules}

    # Words

    @property
    def headline(self) -> str:
        if self.ok:
            return "The check passes."
        if self._overall <= {PASS, UNCLEAR}:
            return "The check cannot tell yet: run it with more seeds."
        return "The check does not pass."

    @property
    def tone(self) -> Tone:
        return "good" if self.ok else "unclear" if self._overall <= {PASS, UNCLEAR} else "bad"

    def explain(self) -> str:
        """The verdict of each rule, the reason, and what to do."""
        return "\n".join(line for rule in self.rules for line in self.explain_rule(rule))

    def explain_rule(self, rule: str) -> list[str]:
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
            lines.append(f"  largest slope: {_slope_text(max(passing, key=_excess))}")
        for undecided in (DRIFT, UNCLEAR) if verdict in (DRIFT, UNCLEAR) else ():
            between = [slope for slope in deciding if slope.verdict == undecided]
            lines += [_undecided(undecided, between, seeds)] if between else []
        for quantity in JUDGED:
            failing = [slope for slope in deciding if slope.quantity == quantity and slope.verdict == FAIL]
            lines += [_failing(quantity, failing)] if failing else []
        return lines + self._causes(rule)

    def _causes(self, rule: str) -> list[str]:
        found = [diagnosis for diagnosis in self.diagnoses if diagnosis.rule == rule]
        lines = [f"  {'note' if diagnosis.is_caution else 'likely cause'}: {diagnosis}" for diagnosis in found]
        # A baseline is there to fail beside SmuPar, so nobody has to be told to use SmuPar.
        return [line.replace(": use rule='smupar'", "") for line in lines] if "smupar" in self.rules else lines

    # Files

    def to_json(self, path: str | Path | None = None) -> str:
        text = json.dumps(
            {
                "format": "smupar-coordinates/2",
                "ok": self.ok,
                "verdicts": self.verdicts,
                "diagnoses": [asdict(diagnosis) for diagnosis in self.diagnoses],
                "slopes": [_slope_fields(slope) for slope in self.slopes],
                "readings": [_finite(asdict(reading)) for reading in self.readings],
            },
            allow_nan=False,
        )
        if path is not None:
            write_atomic(Path(path), text)
        return text

    def plot(self, path: str | Path | None = None, *, quantities: tuple[str, ...] = JUDGED) -> Any:
        """Draws a row of panels for each quantity, columns for each axis and rule, and a line for each step. ``path`` may end
        in .png or any other format of matplotlib."""
        figure = draw(self, quantities)
        if path is not None:
            save_figure(figure, path, dpi=110)
        return figure

    def to_html(self, path: str | Path) -> None:
        """Writes a page, in one file, with verdicts, charts and the table of slopes."""
        write_page(Path(path), check_document(self, folder=str(Path(path).parent)))


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with None in place of NaN and infinity, which JSON does not have."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()}


def _slope_fields(slope: Slope) -> dict[str, Any]:
    """The fields of a slope for JSON. The mean over later steps gets step 0."""
    fields = _finite(asdict(slope))
    return {**fields, "step": 0} if fields.pop("is_mean") else fields


def _undecided(verdict: str, slopes: list[Slope], seeds: int) -> str:
    # Smaller batches help, because an update sums the gradients of all tokens. A token's own
    # gradient changes its output in proportion to n, the number of inputs; the gradients of other tokens change it only in
    # proportion to sqrt(n). With fewer other tokens, this second part is smaller.
    remedy = (
        f"run more seeds (now {seeds})"
        if verdict == UNCLEAR
        else "the whole interval lies between passing and failing, so more seeds will not change the verdict. Often the "
        "gradients of other tokens are still a large part of the update at these widths: use smaller batches (about 16 "
        "tokens), larger widths or more weights per neuron, and see whether the drift shrinks"
    )
    count = "1 slope is" if len(slopes) == 1 else f"{len(slopes)} slopes are"
    return f"  {count} neither small nor large, such as {_slope_text(max(slopes, key=_excess))}: {remedy}"


def _failing(quantity: str, failing: list[Slope]) -> str:
    first = 1 if any(slope.step == 1 for slope in failing) else 2
    places = folded(failing)
    shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    return f"  {quantity} from step {first} in {shown}; worst {_slope_text(max(failing, key=_excess))}"


def _axes(deciding: list[Slope]) -> str:
    parts = []
    for axis in AXES:
        over = [slope for slope in deciding if slope.axis == axis]
        values = {name: sorted({getattr(slope, name) for slope in over} - {None}, reverse=True) for name in AXES}
        at = "; ".join(f"{name} {', '.join(f'{value:g}' for value in points)}" for name, points in values.items() if points)
        parts += [f"{axis} (at {at})"] if over else []
    return " and ".join(parts)


def _excess(slope: Slope) -> float:
    return deviation(slope) / thresholds(slope)[1]


def _slope_text(slope: Slope) -> str:
    spread = "" if math.isnan(slope.ci) else f" +- {slope.ci:.2f}"
    what = f"{slope.quantity} of {slope.place or 'logits'} over {slope.axis} at {slope.where}"
    return f"{slope.slope:+.2f}{spread} ({what}, {slope.when})"
