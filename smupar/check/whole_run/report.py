"""The report of a check over a whole run: a verdict for each phase, remaining drifts, and remedies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from smupar.check.coordinates.diagnosis import diagnose
from smupar.check.coordinates.measure import Cell
from smupar.check.coordinates.report import Report
from smupar.check.coordinates.verdict import FAIL, PASS, slopes
from smupar.check.whole_run.causes import causes
from smupar.check.whole_run.drift import EVERY, Drift, drifts, growth, judged
from smupar.output.files import write_atomic
from smupar.rules import get_rule
from smupar.updates.observation import Observation


@dataclass
class RunReport(Report):
    """The result of ``coord_check`` with a horizon. ``drifts`` has the slope of every quantity at every look, and
    ``observations`` the observation of every run. The verdict is about updates: pass or fail."""

    observations: Mapping[Cell, Observation] = field(default_factory=dict)
    drifts: list[Drift] = field(init=False)

    def __post_init__(self) -> None:
        self.slopes = [slope for slope in slopes(self.readings) if not slope.is_mean]
        self.drifts = drifts(self.slopes)
        self.diagnoses = []
        for rule in self.rules:
            found = diagnose(rule, (), self.faults, self.plans)
            known = {each.cause for each in found}
            seen = causes(rule, self.observations, is_wrong=bool(_wrong(self.of_rule(rule))))
            seen = [each for each in seen if each.cause not in known]
            self.diagnoses += [*(each for each in found if not each.is_caution), *seen, *(e for e in found if e.is_caution)]

    def of_rule(self, rule: str, axis: str | None = None) -> list[Drift]:
        return [each for each in judged(self.drifts) if each.rule == rule and axis in (None, each.axis)]

    @property
    def verdicts(self) -> dict[str, str]:
        """Rule -> "pass" or "fail"."""
        return {rule: FAIL if self._faults(rule) or _wrong(self.of_rule(rule)) else PASS for rule in self.rules}

    def axis_verdict(self, rule: str, axis: str) -> str:
        return FAIL if _wrong(self.of_rule(rule, axis)) else PASS

    def _faults(self, rule: str) -> bool:
        return any(each.rule == rule and each.cause in _DECIDES for each in self.diagnoses)

    # Words

    def explain_rule(self, rule: str) -> list[str]:
        own, verdict = self.of_rule(rule), self.verdicts[rule]
        steps = {cell: seen.num_steps for cell, seen in self.observations.items() if cell.rule == rule}
        lines = [f"{get_rule(rule).title}: {verdict.upper()} over {max(steps.values(), default=0)} steps of {len(steps)} runs"]
        wrong = sorted(_wrong(own), key=lambda each: each.wrong[0])
        if wrong:
            first = wrong[0].wrong[0]
            before = max((step for step in wrong[0].slopes if step < first), default=None)
            lines.append(f"  right until step {before}" if before else "  wrong from step 1 on")
        lines += [f"  {self._phase(each)}" for each in wrong]
        remaining = sorted((each for each in own if each.remains), key=lambda each: -abs(each.worst[1]))
        lines += [f"  a drift remains, within the limits: {self._told(each, each.worst[0])}" for each in remaining[:3]]
        if not wrong and not remaining and own:
            largest = max(own, key=lambda each: abs(each.worst[1]))
            lines.append(f"  largest slope of dY: {self._told(largest, largest.worst[0])}")
        found = [each for each in self.diagnoses if each.rule == rule]
        labels = ["likely cause", *["also seen"] * len(found)] if verdict == FAIL else ["note"] * len(found)
        return lines + [f"  {label}: {each}" for label, each in zip(labels, found, strict=False)]

    def _phase(self, drift: Drift) -> str:
        first, last = drift.wrong[0], list(drift.slopes)[-1]
        until = "to the end" if drift.wrong_from is not None else f"to step {drift.wrong[-1]} of {last}"
        return f"from step {first} {until} {self._told(drift, max(drift.wrong, key=lambda step: abs(drift.smooth[step])))}"

    def _told(self, drift: Drift, step: int) -> str:
        slope, times = drift.smooth[step], growth(self.readings, drift, step)
        sparser = {"density": "lower density", "width": "width", "depth": "depth"}[drift.axis]
        rises = slope > 0 if drift.axis != "density" else slope < 0
        return (
            f"dY of {drift.kind} {'grows' if rises else 'shrinks'} with {sparser}: {times:.3g}x at step {step} "
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
                {**asdict(cell), "observed": json.loads(seen.to_json())} for cell, seen in self.observations.items()
            ],
        }
        text = json.dumps(values, allow_nan=False)
        if path is not None:
            write_atomic(Path(path), text)
        return text


# Faults that fail the check whatever the sizes are.
_DECIDES = (
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


def _wrong(own: list[Drift]) -> list[Drift]:
    """The drifts that leave their limits. The mean over all layers is listed only if no single kind of layer is."""
    wrong = [each for each in own if each.wrong]
    kinds = [each for each in wrong if each.kind != EVERY]
    return kinds or wrong
