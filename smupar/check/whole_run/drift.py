"""How the size of updates depends on width, density and depth over a run, and when that is too much.

As in the coordinate check, a slope is that of log2(size) against log2(width, density or depth). It is taken at each look, and
averaged over the layers of a kind (``blocks.*.mlp.down``). The median of three looks is judged, so that one step does not
decide.

Late in a run the weights of a neuron agree less and less on an update, and what is left adds up like the square root of their
number. The fewer weights a neuron keeps, the larger is its update, by up to a slope of -1/2. That cannot be called wrong. The
limits lie between runs whose outcome is known (docs/coordinate_check.md): runs whose best learning rate stays and whose loss is
ahead, and runs that end too high.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from smupar.check.coordinates.measure import DY, Reading
from smupar.check.coordinates.verdict import Slope
from smupar.plan.settings import layer_glob

EVERY = "all layers"
KIND_LIMITS, MEAN_LIMITS = (-1.1, 0.6), (-0.6, 0.35)  # of a kind of layers, and of the mean over all kinds
FLOOR = -0.6  # down to here the part of an update that does not agree explains a slope


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
        """The median of each look and its neighbours."""
        steps, values = list(self.slopes), list(self.slopes.values())
        return {step: median(values[max(0, index - 1) : index + 2]) for index, step in enumerate(steps)}

    @property
    def wrong_from(self) -> int | None:
        """The first step from which the slope lies outside its limits at all looks but a few; None if it ends inside, or
        never leaves."""
        low, high = self.limits
        return _lasting({step: not low <= value <= high for step, value in self.smooth.items()})

    @property
    def wrong(self) -> list[int]:
        """All looks at which the slope lies outside its limits."""
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
        """Whether more is left than what updates that do not agree explain, within the limits."""
        return not self.wrong and not FLOOR <= self.worst[1] <= -FLOOR


def drifts(slopes: Iterable[Slope]) -> list[Drift]:
    """The drifts of all quantities, from the slopes of single layers at single steps."""
    rows: dict[tuple[str, str, str, str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for slope in slopes:
        if not slope.is_mean and math.isfinite(slope.slope):
            key = slope.rule, slope.axis, place_of(slope), layer_glob(slope.place), slope.quantity
            rows[key][slope.step].append(slope.slope)
    found = [Drift(*key, {step: fmean(values) for step, values in sorted(looks.items())}) for key, looks in rows.items()]
    return found + _means(found)


def place_of(slope: Slope) -> str:
    return f"{'density' if slope.axis == 'width' else 'width'} {slope.at:g}"


def judged(found: Iterable[Drift]) -> list[Drift]:
    return [drift for drift in found if drift.quantity == DY]


def growth(readings: Iterable[Reading], drift: Drift, step: int) -> float:
    """How many times larger the size is at the end of the axis where it is largest by the slope."""
    values = {getattr(reading, drift.axis) for reading in readings}
    return 2 ** (abs(drift.smooth[step]) * math.log2(max(values) / min(values)))


def _means(found: list[Drift]) -> list[Drift]:
    """The mean over kinds of layers."""
    groups: dict[tuple[str, str, str, str], list[Drift]] = defaultdict(list)
    for drift in found:
        groups[drift.rule, drift.axis, drift.at, drift.quantity].append(drift)
    return [
        Drift(rule, axis, at, EVERY, quantity, {step: fmean(own.slopes[step] for own in group) for step in steps})
        for (rule, axis, at, quantity), group in groups.items()
        if (steps := sorted(set.intersection(*(set(own.slopes) for own in group)))) and len(group) > 1
    ]


def _lasting(wrong: dict[int, bool]) -> int | None:
    """The first step from which on at least two thirds of the looks are wrong, the last one among them."""
    steps = list(wrong)
    if not steps or not wrong[steps[-1]]:
        return None
    for index, step in enumerate(steps):
        if wrong[step] and sum(wrong[later] for later in steps[index:]) * 3 >= 2 * len(steps[index:]):
            return step
    return None
