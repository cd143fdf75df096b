"""Fits slopes of log2(size) against log2(width, density or depth), and judges whether they are small enough.

A rule that works keeps sizes flat. Slopes are fitted for each seed and step; their mean over seeds has a 95 % confidence
interval. The spread between seeds is pooled over places of one kind. Since places of one run are not independent, at most three
of them count for the degrees of freedom. Step 1 and the mean of all later steps decide, because single later steps are
noisy, especially in gradients.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean, linear_regression

from smupar.check.coordinates.places import NARROWING, ROUTER, WIDENING
from smupar.check.coordinates.readings import AXES, GRAD_X, JUDGED, OF_LOSS, GridPoint, Reading, Y

PASS, FAIL, EXCEPTION = "pass", "fail", "known exception"
UNCLEAR = "more seeds"  # the seeds so far allow neither a pass nor a fail
DRIFT = "drift"  # the whole interval is between the thresholds, so more seeds will not change the verdict
# (pass below, fail above). At step 1 the size of a single layer is right up to sampling. At later steps, and in blocks,
# nonlinear dynamics change sizes a little under any rule. A rule without the right correction changes sizes by powers of the
# width or density.
LAYER_AT_STEP_1 = (0.2, 0.35)
OTHERWISE = (0.5, 0.8)
STEEPEST_EXCEPTION = -0.65  # initial logits fall like 1 / sqrt(width)
# Without a depth rule, sums over blocks grow like the square root of the depth if their terms are independent. The embedding's
# share of the stream hides a part of this growth. So the thresholds over depth are lower.
OVER_DEPTH = (0.2, 0.35)
_QUERY = re.compile(r"(^|[._])(w?[qk]|query|key)(_proj|_lin)?$", re.IGNORECASE)
# 97.5 % points of Student's t by degrees of freedom. For more degrees of freedom than the last row has, it is 1.96.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 15: 2.13, 20: 2.09, 30: 2.04}


@dataclass(frozen=True)
class Slope:
    """The change of one size along one axis: size ~ axis ** slope."""

    rule: str
    axis: str  # "width", "density" or "depth"
    place: str
    kind: str
    role: str
    quantity: str
    step: int  # for the mean over later steps, the last one
    # The values of the other axes. The slope's own axis is None, and so is the depth if the check does not vary it.
    width: float | None = None
    density: float | None = None
    depth: float | None = None
    slope: float = math.nan  # NaN until it is fitted
    ci: float = math.nan  # half-width of the confidence interval; NaN with one seed
    num_seeds: int = 0
    verdict: str = ""
    is_mean: bool = False  # whether this is the mean over all steps after the first

    @property
    def when(self) -> str:
        return "mean of later steps" if self.is_mean else f"step {self.step}"

    @property
    def at(self) -> tuple[float | None, ...]:
        return self.width, self.density, self.depth

    @property
    def where(self) -> str:
        """The values of the other axes, in words."""
        others = {name: getattr(self, name) for name in AXES}
        return ", ".join(f"{name} {value:g}" for name, value in others.items() if value is not None)

    @property
    def group(self) -> tuple[object, ...]:
        """The key by which the spread of slopes is pooled, since the seeds of a single place are too few."""
        return self.rule, self.axis, self.at, self.kind, self.quantity, self.step, self.is_mean


def slopes(readings: Iterable[Reading]) -> list[Slope]:
    """The slopes over every axis that has at least two points. A slope is judged if Table 1 says something about it."""
    readings = _expected_sizes(readings)
    axes = [axis for axis in AXES if len({getattr(reading, axis) for reading in readings}) > 1]
    return [slope for axis in axes for slope in _judged(_fitted(readings, axis))]


def _expected_sizes(readings: Iterable[Reading]) -> list[Reading]:
    """The readings, with gradients divided by what they are proportional to under any rule."""
    return _per_gradient_of_loss(_per_sum_over_width(list(readings)))


def _per_sum_over_width(readings: list[Reading]) -> list[Reading]:
    """Divides some gradients of blocks by their expected growth, sqrt(width). These are blocks whose input has a fixed size,
    such as a recurrent layer after a narrow embedding: their gradients are sums over the width."""
    entries: dict[str, dict[int, int]] = defaultdict(dict)  # place -> width -> number of entries
    for reading in readings:
        if reading.kind == "block" and reading.quantity == GRAD_X:
            entries[reading.place][reading.width] = reading.num_entries
    fixed = {place for place, by_width in entries.items() if len(by_width) > 1 and len(set(by_width.values())) == 1}
    return [
        replace(reading, role=WIDENING, rms=reading.rms / math.sqrt(reading.width))
        if reading.quantity == GRAD_X and reading.place in fixed
        else reading
        for reading in readings
    ]


def _per_gradient_of_loss(readings: list[Reading]) -> list[Reading]:
    """Divides gradients by the gradient that arrives at the model's outputs. In a squared error that gradient contains the
    outputs, which are random at first and shrink like 1 / sqrt(width). Layers next to a fixed size were divided by the gradient
    that arrives at themselves."""
    arriving: dict[tuple[GridPoint, int, int], list[float]] = defaultdict(list)
    for reading in readings:
        if reading.quantity == OF_LOSS and reading.rms > 0:
            arriving[reading.point, reading.seed, reading.step].append(reading.rms)
    readouts = {reading.place for reading in readings if reading.quantity == OF_LOSS}

    def divided(reading: Reading) -> Reading:
        sizes = arriving.get((reading.point, reading.seed, reading.step))
        is_inner = reading.role == "unembedding" and reading.place not in readouts
        is_divided = reading.kind == "layer" and (is_inner or reading.role in (WIDENING, NARROWING, ROUTER))
        if reading.quantity != GRAD_X or sizes is None or is_divided:
            return reading
        return replace(reading, rms=reading.rms / math.sqrt(fmean(size**2 for size in sizes)))

    return [divided(reading) for reading in readings]


def _fitted(readings: list[Reading], axis: str) -> list[tuple[Slope, list[float]]]:
    """(the mean slope over seeds, the slope of each seed), for single steps and for the mean of later steps."""
    by_seed = _slopes_by_seed(readings, axis)
    last = max(reading.step for reading in readings)
    later: dict[Slope, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for unfitted, slope_of in by_seed.items():
        for seed, slope in slope_of.items():
            if unfitted.step > 1:
                later[replace(unfitted, step=last, is_mean=True)][seed].append(slope)
    means = {unfitted: {seed: fmean(steps) for seed, steps in of_seed.items()} for unfitted, of_seed in later.items()}
    return [
        (replace(unfitted, slope=fmean(seed_slopes), num_seeds=len(seed_slopes)), seed_slopes)
        for unfitted, slope_of in {**by_seed, **means}.items()
        if (seed_slopes := list(slope_of.values()))
    ]


def _slopes_by_seed(readings: list[Reading], axis: str) -> dict[Slope, dict[int, float]]:
    """A ``Slope`` that is not fitted yet -> seed -> the fitted number."""
    others = [name for name in AXES if name != axis]
    points: dict[Slope, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for reading in readings:
        if reading.rms > 0 and math.isfinite(reading.rms):  # a zero-initialised readout has size 0 before its first step
            where = reading.place, reading.kind, reading.role, reading.quantity, reading.step
            unfitted = Slope(reading.rule, axis, *where, **{name: getattr(reading, name) for name in others})
            points[unfitted][reading.seed].append((math.log2(getattr(reading, axis)), math.log2(reading.rms)))
    return {
        unfitted: {
            seed: linear_regression(*zip(*pairs, strict=True)).slope
            for seed, pairs in of_seed.items()
            if len({x for x, _ in pairs}) > 1
        }
        for unfitted, of_seed in points.items()
    }


def _judged(fitted: list[tuple[Slope, list[float]]]) -> list[Slope]:
    """Adds intervals and verdicts to the mean slopes of ``_fitted``."""
    squares: dict[tuple[object, ...], float] = defaultdict(float)
    freedom: dict[tuple[object, ...], int] = defaultdict(int)
    for slope, seed_slopes in fitted:
        squares[slope.group] += sum((seed_slope - slope.slope) ** 2 for seed_slope in seed_slopes)
        freedom[slope.group] += len(seed_slopes) - 1
    judged = []
    for slope, seed_slopes in fitted:
        num_seeds = len(seed_slopes)
        if num_seeds > 1:
            spread = math.sqrt(squares[slope.group] / freedom[slope.group])
            places = min(3, freedom[slope.group] // (num_seeds - 1))
            slope = replace(slope, ci=_t(max(1, places) * (num_seeds - 1)) * spread / math.sqrt(num_seeds))
        judged.append(replace(slope, verdict=judge(slope)))
    return judged


def _t(freedom: int) -> float:
    return next((_T[df] for df in sorted(_T, reverse=True) if df <= freedom), 1.96) if freedom <= 30 else 1.96


def thresholds(slope: Slope) -> tuple[float, float]:
    if slope.axis == "depth":
        return OVER_DEPTH
    return LAYER_AT_STEP_1 if slope.kind == "layer" and slope.step == 1 else OTHERWISE


def judge(slope: Slope) -> str:
    """The verdict on a slope, or "" if Table 1 does not say what the slope should be."""
    if slope.quantity not in JUDGED or (slope.quantity == GRAD_X and slope.role == "embedding"):
        return ""  # no rule covers the gradient of the data
    ci = 0.0 if math.isnan(slope.ci) else slope.ci
    if _may_shrink(slope) and slope.slope < LAYER_AT_STEP_1[0]:
        if slope.slope > STEEPEST_EXCEPTION:
            return EXCEPTION
        if slope.slope + ci > STEEPEST_EXCEPTION:
            return UNCLEAR
    passes, fails = thresholds(slope)
    size = deviation(slope)
    if size < passes and size + ci < fails:
        return PASS
    if size > fails and size - ci > passes:
        return FAIL
    certain = not math.isnan(slope.ci) and size - ci > passes and size + ci < fails
    return DRIFT if certain else UNCLEAR


def deviation(slope: Slope) -> float:
    """The distance of a slope from the right values. Only 0 is right, with one exception.

    If the input of a layer has a fixed size and its output scales, the gradient of the input, grad X = W^T grad Y, is a sum
    over the n neurons of the output. At step 1 the terms are independent and add up like sqrt(n), which ``measure`` has divided
    out. Later, updates have aligned W with grad Y, and aligned terms add up like n. So from step 2 on every slope from 0 (all
    independent) to 1/2 (all aligned) is right.
    """
    aligned = 0.5 if slope.role == WIDENING and slope.quantity == GRAD_X and slope.axis == "width" and slope.step > 1 else 0.0
    return max(-slope.slope, slope.slope - aligned)


def _may_shrink(slope: Slope) -> bool:
    """Whether a size may fall with the width because logits start small.

    Under muP and SmuPar initial logits are a sum of d random terms divided by d, so they shrink like 1 / sqrt(width) until the
    readout has learned, for at most three steps. The mean over later steps may shrink too if it ends at step 5 or before, since
    steps 2 and 3 are then at least half of these steps. The same holds for attention logits if the head size grows, and for the
    gradients of queries and keys.
    """
    early = slope.step <= (5 if slope.is_mean else 3)
    logits = slope.role in ("unembedding", "router", "logits") and slope.quantity == Y and early
    queries = bool(_QUERY.search(slope.place)) and slope.quantity == GRAD_X and slope.step == 1
    return slope.axis == "width" and slope.rule != "sp" and (logits or queries)


def decides(slope: Slope) -> bool:
    """Whether a slope counts for the verdict. Slopes at single later steps do not."""
    return slope.step == 1 or slope.is_mean


def overall(judged: Iterable[Slope]) -> str:
    verdicts = {slope.verdict for slope in judged if decides(slope)}
    # More seeds cannot turn a drift into a pass, so it takes precedence over unclear slopes.
    return next((verdict for verdict in (FAIL, DRIFT, UNCLEAR) if verdict in verdicts), PASS)
