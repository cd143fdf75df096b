"""The report of a check over a whole run: from when to when sizes are wrong, smaller drifts, and remedies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from smupar.check.coordinates.diagnosis import diagnose
from smupar.check.coordinates.readings import Cell
from smupar.check.coordinates.report import Report
from smupar.check.coordinates.verdict import FAIL, PASS, slopes
from smupar.check.whole_run.causes import causes
from smupar.check.whole_run.drift import EVERY, Drift, drifts, growth, judged
from smupar.output.files import write_atomic
from smupar.rules import get_rule
from smupar.updates.observation import Observation


@dataclass
class RunReport(Report):
    """The result of ``coord_check`` with a horizon. ``drifts`` has the slopes of every quantity at every look, and
    ``observations`` what was observed in each run. The verdict is "pass" or "fail". It depends on the sizes of updates, and on
    faults such as divergence."""

    observations: Mapping[Cell, Observation] = field(default_factory=dict)
    drifts: list[Drift] = field(init=False)

    def __post_init__(self) -> None:
        self.slopes = [slope for slope in slopes(self.readings) if not slope.is_mean]
        self.drifts = drifts(self.slopes)
        self.diagnoses = []
        for rule in self.rules:
            audited = diagnose(rule, (), self.faults, self.plans)
            known = {diagnosis.cause for diagnosis in audited}
            seen = causes(rule, self.observations, is_wrong=bool(_wrong(self.of_rule(rule))))
            self.diagnoses += [diagnosis for diagnosis in audited if not diagnosis.is_caution]
            self.diagnoses += [diagnosis for diagnosis in seen if diagnosis.cause not in known]
            self.diagnoses += [diagnosis for diagnosis in audited if diagnosis.is_caution]

    def of_rule(self, rule: str, axis: str | None = None) -> list[Drift]:
        return [drift for drift in judged(self.drifts) if drift.rule == rule and axis in (None, drift.axis)]

    @property
    def verdicts(self) -> dict[str, str]:
        """Rule -> "pass" or "fail"."""
        return {rule: FAIL if self._has_fatal_cause(rule) or _wrong(self.of_rule(rule)) else PASS for rule in self.rules}

    def axis_verdict(self, rule: str, axis: str) -> str:
        return FAIL if _wrong(self.of_rule(rule, axis)) else PASS

    def _has_fatal_cause(self, rule: str) -> bool:
        return any(diagnosis.rule == rule and diagnosis.cause in _FATAL for diagnosis in self.diagnoses)

    # Words

    def explain_rule(self, rule: str) -> list[str]:
        of_rule, verdict = self.of_rule(rule), self.verdicts[rule]
        steps = {cell: observed.num_steps for cell, observed in self.observations.items() if cell.rule == rule}
        lines = [f"{get_rule(rule).title}: {verdict.upper()} over {max(steps.values(), default=0)} steps of {len(steps)} runs"]
        wrong = sorted(_wrong(of_rule), key=lambda drift: drift.wrong[0])
        if wrong:
            first = wrong[0].wrong[0]
            before = max((step for step in wrong[0].slopes if step < first), default=None)
            lines.append(f"  right until step {before}" if before else "  wrong from step 1 on")
        lines += [f"  {self._wrong_text(drift)}" for drift in wrong]
        remaining = sorted((drift for drift in of_rule if drift.remains), key=lambda drift: -abs(drift.worst[1]))
        lines += [f"  a drift remains, within the limits: {self._text(drift, drift.worst[0])}" for drift in remaining[:3]]
        if not wrong and not remaining and of_rule:
            largest = max(of_rule, key=lambda drift: abs(drift.worst[1]))
            lines.append(f"  largest slope of dY: {self._text(largest, largest.worst[0])}")
        diagnoses = [diagnosis for diagnosis in self.diagnoses if diagnosis.rule == rule]
        labels = ["likely cause", *["also seen"] * len(diagnoses)] if verdict == FAIL else ["note"] * len(diagnoses)
        return lines + [f"  {label}: {diagnosis}" for label, diagnosis in zip(labels, diagnoses, strict=False)]

    def _wrong_text(self, drift: Drift) -> str:
        """From when to when a drift is wrong, and how large it is where it is worst."""
        first, last = drift.wrong[0], list(drift.slopes)[-1]
        until = "to the end" if drift.wrong_from is not None else f"to step {drift.wrong[-1]} of {last}"
        return f"from step {first} {until} {self._text(drift, max(drift.wrong, key=lambda step: abs(drift.smooth[step])))}"

    def _text(self, drift: Drift, step: int) -> str:
        slope, times = drift.smooth[step], growth(self.readings, drift, step)
        cause = {"density": "lower density", "width": "width", "depth": "depth"}[drift.axis]
        rises = slope > 0 if drift.axis != "density" else slope < 0
        return (
            f"dY of {drift.kind} {'grows' if rises else 'shrinks'} with {cause}: {times:.3g}x at step {step} "
            f"(slope {slope:+.2f} at {drift.at})"
        )

    # Files

    def to_json(self, path: str | Path | None = None) -> str:
        values = {
            "format": "smupar-whole-run/1",
            "ok": self.ok,
            "verdicts": self.verdicts,
            "diagnoses": [asdict(diagnosis) for diagnosis in self.diagnoses],
            "drifts": [{**asdict(drift), "wrong": drift.wrong} for drift in self.drifts],
            "observations": [
                {**asdict(cell), "observed": json.loads(observed.to_json())} for cell, observed in self.observations.items()
            ],
        }
        text = json.dumps(values, allow_nan=False)
        if path is not None:
            write_atomic(Path(path), text)
        return text


# Causes with which the check fails, whatever the sizes are.
_FATAL = (
    "diverged",
    "LR",
    "scheduler",
    "no updates",
    "init",
    "mask missing",
    "off-mask weights",
    "mask density",
    "optimizer",
)


def _wrong(of_rule: list[Drift]) -> list[Drift]:
    """The drifts that leave their limits. The mean over all layers is listed only if no single kind of layer is."""
    wrong = [drift for drift in of_rule if drift.wrong]
    of_kinds = [drift for drift in wrong if drift.kind != EVERY]
    return of_kinds or wrong
