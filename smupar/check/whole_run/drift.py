"""How the size of updates depends on width, density and depth over a run, and when the dependence is too strong.

As in the coordinate check, a slope is the slope of log2(size) against log2(width, density or depth). It is fitted at each
observed step (a look) and averaged over the layers of one kind (``blocks.*.mlp.down``). The median of three looks is judged, so
that no single step decides.

Late in a run the updates of a neuron's weights agree less and less. What they contribute to the output then adds up like the
square root of their number, and no longer like the number. So the updates of neurons that keep fewer weights have a larger
effect. A slope over density as low as -1/2 is therefore not wrong. The limits separate runs with known outcomes
(docs/whole-run-check.md). Slopes leave the limits in runs without weight decay, and stay inside in runs with weight decay.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from smupar.check.coordinates.readings import DY, Reading
from smupar.check.coordinates.verdict import Slope
from smupar.plan.globs import layer_glob

EVERY = "all layers"
KIND_LIMITS, MEAN_LIMITS = (-1.1, 0.6), (-0.6, 0.35)  # limits for one kind of layers, and for the mean over all kinds
FLOOR = -0.6  # the lowest slope that updates can cause if they do not agree in sign


@dataclass(frozen=True)
class Drift:
    """The slopes of one quantity in one kind of layer, over the looks of a run."""

    rule: str
    axis: str
    at: str  # the values of the other axes
    kind: str
    quantity: str
    slopes: dict[int, float]  # step -> slope

    @property
    def limits(self) -> tuple[float, float]:
        return MEAN_LIMITS if self.kind == EVERY else KIND_LIMITS

    @property
    def smooth(self) -> dict[int, float]:
        """Step -> median of the slopes at this look and the looks before and after it."""
        steps, values = list(self.slopes), list(self.slopes.values())
        return {step: median(values[max(0, index - 1) : index + 2]) for index, step in enumerate(steps)}

    @property
    def wrong_from(self) -> int | None:
        """The first step from which on the slope is outside its limits at two thirds of the looks or more; None if it ends
        inside them."""
        low, high = self.limits
        return _lasting({step: not low <= value <= high for step, value in self.smooth.items()})

    @property
    def wrong(self) -> list[int]:
        """All steps at which the slope is outside its limits."""
        low, high = self.limits
        return [step for step, value in self.smooth.items() if not low <= value <= high]

    @property
    def worst(self) -> tuple[int, float]:
        """(step, slope) where the slope is farthest from 0."""
        return max(self.smooth.items(), key=lambda pair: abs(pair[1]))

    @property
    def last(self) -> float:
        return list(self.smooth.values())[-1]

    @property
    def remains(self) -> bool:
        """Whether the slope is within its limits, but farther from 0 than ``FLOOR``."""
        return not self.wrong and not FLOOR <= self.worst[1] <= -FLOOR


def drifts(slopes: Iterable[Slope]) -> list[Drift]:
    """The drift of each quantity in each kind of layer, from the slopes of single layers at single steps."""
    rows: dict[tuple[str, str, str, str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for slope in slopes:
        if not slope.is_mean and math.isfinite(slope.slope):
            key = slope.rule, slope.axis, slope.where, layer_glob(slope.place), slope.quantity
            rows[key][slope.step].append(slope.slope)
    of_kinds = [Drift(*key, {step: fmean(values) for step, values in sorted(looks.items())}) for key, looks in rows.items()]
    return of_kinds + _means(of_kinds)


def judged(all_drifts: Iterable[Drift]) -> list[Drift]:
    return [drift for drift in all_drifts if drift.quantity == DY]


def growth(readings: Iterable[Reading], drift: Drift, step: int) -> float:
    """How many times larger the size is at one end of the axis than at the other, by the slope."""
    values = {getattr(reading, drift.axis) for reading in readings}
    return 2 ** (abs(drift.smooth[step]) * math.log2(max(values) / min(values)))


def _means(of_kinds: list[Drift]) -> list[Drift]:
    """The means over kinds of layers."""
    groups: dict[tuple[str, str, str, str], list[Drift]] = defaultdict(list)
    for drift in of_kinds:
        groups[drift.rule, drift.axis, drift.at, drift.quantity].append(drift)
    return [
        Drift(rule, axis, at, EVERY, quantity, {step: fmean(drift.slopes[step] for drift in group) for step in steps})
        for (rule, axis, at, quantity), group in groups.items()
        if (steps := sorted(set.intersection(*(set(drift.slopes) for drift in group)))) and len(group) > 1
    ]


def _lasting(wrong: dict[int, bool]) -> int | None:
    """The first step from which on at least two thirds of the looks are wrong, including the last one."""
    steps = list(wrong)
    if not steps or not wrong[steps[-1]]:
        return None
    for index, step in enumerate(steps):
        if wrong[step] and sum(wrong[later] for later in steps[index:]) * 3 >= 2 * len(steps[index:]):
            return step
    return None
