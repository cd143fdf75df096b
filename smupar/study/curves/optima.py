"""Finds the best value of a hyperparameter on a curve of losses, and how far it moves from one curve to another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STABLE = 2.0  # an optimum that moves by no more than this factor is called stable


@dataclass(frozen=True)
class Curve:
    """Loss over the swept values, for one model under one rule; means over seeds."""

    rule: str
    width: int
    sparsity: float
    values: tuple[float, ...]
    losses: tuple[float, ...]  # infinite where a seed diverged
    is_proxy: bool = False
    seeds: tuple[tuple[float, ...], ...] = ()  # for each value the losses of its single seeds, if they are known
    depth: int | None = None  # where depths are compared

    @property
    def best_index(self) -> int:
        return min(range(len(self.losses)), key=lambda index: self.losses[index])

    @property
    def on_edge(self) -> bool:
        return self.best_index in (0, len(self.losses) - 1)

    @property
    def best(self) -> float:
        """The smooth minimum: the vertex of a parabola through the best value and its neighbours, over the logarithm of the
        value."""
        index = self.best_index
        if self.on_edge or not all(math.isfinite(self.losses[index + side]) for side in (-1, 1)):
            return self.best_value
        x0, x1, x2 = (math.log2(value) for value in self.values[index - 1 : index + 2])
        y0, y1, y2 = self.losses[index - 1 : index + 2]
        top = (x1 - x0) ** 2 * (y1 - y2) - (x1 - x2) ** 2 * (y1 - y0)
        bottom = (x1 - x0) * (y1 - y2) - (x1 - x2) * (y1 - y0)
        return 2 ** (x1 if bottom == 0 else x1 - top / (2 * bottom))

    @property
    def best_value(self) -> float:
        """The best of the values that were swept."""
        return self.values[self.best_index]

    @property
    def best_loss(self) -> float:
        return self.losses[self.best_index]

    @property
    def diverged(self) -> bool:
        """Whether every value diverged."""
        return math.isinf(self.best_loss)

    def excess(self, value: float) -> float:
        """The relative excess of a value's loss over the best loss. Between swept values it is interpolated, linearly in the
        value's logarithm."""
        return math.inf if self.diverged else self.at(value) / self.best_loss - 1

    def at(self, value: float) -> float:
        """The loss at a value, interpolated in the same way."""
        return _interpolated(self.values, self.losses, value)


def moved(proxy: Curve, curve: Curve) -> float:
    """The factor between the optima of two curves."""
    return math.inf if curve.diverged else 2 ** abs(math.log2(curve.best / proxy.best))


def farthest_move(curves: Sequence[Curve]) -> float:
    """The largest factor between the optimum of the first curve (the proxy or the dense model) and the optimum of another."""
    return max(moved(curves[0], other) for other in curves[1:])


def is_lower_bound(curves: Sequence[Curve]) -> bool:
    """Whether the optima may lie farther apart than the farthest move, since one of them lies on the edge of the grid."""
    return math.isfinite(farthest_move(curves)) and any(curve.on_edge for curve in curves)


def move_in_words(curves: Sequence[Curve]) -> str:
    """The farthest move, as text. If optima lie on the edge of the grid, the text says that the factor is unknown or a lower
    bound."""
    factor = farthest_move(curves)
    if not is_lower_bound(curves):
        return times(factor)
    unknown = all(curve.on_edge and curve.best_value == curves[0].best_value for curve in curves)
    return "?x (edge of the grid)" if unknown else f"{times(factor)} or further"


def times(factor: float) -> str:
    if math.isinf(factor):
        return "out of reach"
    return f"{factor:.2g}x" if factor < 10 else f"{factor:.0f}x"


def _interpolated(values: Sequence[float], losses: Sequence[float], value: float) -> float:
    if value <= values[0]:
        return losses[0]
    for (x0, y0), (x1, y1) in zip(zip(values, losses, strict=True), zip(values[1:], losses[1:], strict=True), strict=False):
        if value <= x1:
            share = math.log2(value / x0) / math.log2(x1 / x0)
            return y0 if share == 0 else y1 if share == 1 else y0 + share * (y1 - y0)
    return losses[-1]
