"""Divides one density among layers: equally, or by their shapes (ER, ERK)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real

from smupar.plan.globs import match_globs
from smupar.plan.roles.parameters import Shape
from smupar.refusals import refuse


def as_density(value: float | Fraction, setting: str = "density") -> Fraction:
    """The exact fraction that a user means by a float such as 1 / 3. Raises if it does not lie in (0, 1]."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    percent = f"; for {value:g} % write {value / 100:g}" if is_number and 1 < value <= 100 else ""
    refuse(
        not is_number or not 0 < value <= 1,
        f"{setting} must lie in (0, 1], got {value!r}: it is the share of kept weights, 1 - sparsity{percent}",
    )
    exact = value if isinstance(value, Fraction) else Fraction(float(value))
    return exact.limit_denominator(10**9) or exact


def round_half_up(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))


# Allocations


@dataclass(frozen=True)
class Allocation:
    """Divides one overall density among tensors. Each tensor's density is min(1, scale * share), with one scale for all."""

    density: float
    name: str

    def densities(self, shapes: Mapping[str, Shape]) -> dict[str, Fraction]:
        overall = as_density(self.density)
        if self.name == "uniform":
            return dict.fromkeys(shapes, overall)
        share = {name: self._share(shape) for name, shape in shapes.items()}
        size = {name: math.prod(shape) for name, shape in shapes.items()}
        budget = sum(round_half_up(overall * n) for n in size.values())  # as many weights as a uniform allocation keeps
        dense: set[str] = set()
        while True:  # tensors whose density would exceed 1 become dense; the others share the rest
            sparse = [name for name in shapes if name not in dense]
            left = budget - sum(size[name] for name in dense)
            weight = sum((share[name] * size[name] for name in sparse), Fraction(0))
            scale = left / weight if sparse else Fraction(0)
            full = {name for name in sparse if scale * share[name] > 1}
            if not full:
                return {name: Fraction(1) if name in dense else scale * share[name] for name in shapes}
            dense |= full

    def _share(self, shape: Shape) -> Fraction:
        dims = shape if self.name == "erk" else shape[:2]
        return Fraction(sum(dims), math.prod(dims))


def uniform(density: float) -> Allocation:
    """The same density in every hidden weight."""
    return Allocation(density, "uniform")


def er(density: float) -> Allocation:
    """Erdos-Renyi: density proportional to (in + out) / (in * out), so that larger layers are sparser."""
    return Allocation(density, "er")


def erk(density: float) -> Allocation:
    """Erdos-Renyi-Kernel: like :func:`er`, but with all dimensions of a convolution's weight in both sum and product."""
    return Allocation(density, "erk")


def allocate(density: float | Mapping[str, float] | Allocation, shapes: Mapping[str, Shape]) -> dict[str, Fraction]:
    """The density of each hidden weight. A weight that no glob matches stays dense."""
    if isinstance(density, Allocation):
        return density.densities(shapes)
    if isinstance(density, Mapping):
        exact = {glob: as_density(value, f"density[{glob!r}]") for glob, value in density.items()}
        named = match_globs(
            exact,
            shapes,
            setting="density",
            among="hidden weights (and routers, if a glob names them)",
        )
        return {name: named.get(name, Fraction(1)) for name in shapes}
    return uniform(density).densities(shapes)
