"""The models that a check compares, at all widths and depths. Their shapes are checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from smupar.check.coordinates.readings import Cell
from smupar.plan.depth.correspondence import correspond
from smupar.refusals import refuse

MakeModel = Callable[..., nn.Module]  # takes (width), or (width, depth) if the check varies the depth


def listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, Iterable) else (value,)


class Grid:
    """The models to compare. ``depths`` is (None,) if the check does not vary the depth."""

    def __init__(
        self,
        make_model: MakeModel,
        base_width: int,
        width: int | Sequence[int],
        density: float | Sequence[float],
        depth: int | Sequence[int] = (),
        base_depth: int | None = None,
    ) -> None:
        widths = tuple(int(width) for width in listed(width)) or (base_width,)
        densities = tuple(float(density) for density in listed(density))
        depths = tuple(int(depth) for depth in listed(depth))
        refuse(
            max(len(set(axis)) for axis in (widths, densities, depths)) < 2,
            f"nothing to compare: widths={list(widths)} and densities={list(densities)} have one point each; pass at least two "
            "widths, two densities or two depths",
        )
        refuse(
            base_depth is not None and not depths, f"base_depth={base_depth} is for depths: pass depths=[{base_depth}, ...] too"
        )
        self.base_depth = min(depths) if depths and base_depth is None else base_depth
        refuse(
            depths and min(depths) < (self.base_depth or 0),
            f"depths={list(depths)} must not be smaller than base_depth={self.base_depth}: tune on a model that is not deeper",
        )
        self.make_model, self.base_width = make_model, base_width
        self.widths, self.densities = tuple(dict.fromkeys(widths)), tuple(dict.fromkeys(densities))
        self.depths: tuple[int | None, ...] = tuple(dict.fromkeys(depths)) or (None,)
        self.base = self._on_meta(base_width)
        other = next((width for width in widths if width != base_width), 2 * base_width)
        # All plans of the grid share one ``delta`` (see ``make_plan``), so that the forward pass of an example runs only once.
        self.delta = self._on_meta(other)
        self.growth = _growth(self.base, self.delta)
        self._refuse_equal_shapes((*widths, other))

    def cells(self, rules: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
        """The runs of the grid."""
        axes = product(rules, self.widths, self.densities, self.depths, seeds)
        return [Cell(rule, width, density, seed, depth=depth) for rule, width, density, depth, seed in axes]

    def make(self, width: int, depth: int | None) -> nn.Module:
        return self.make_model(width) if depth is None else self.make_model(width, depth)

    def growth_in(self, model: nn.Module) -> dict[str, list[float]]:
        """Parameter name -> how many times larger each dimension is at another width."""
        if self.base_depth is None:
            return self.growth
        names = correspond(model, self.base).names
        return {name: self.growth[other] for name, other in names.items() if other in self.growth}

    def _on_meta(self, width: int) -> nn.Module:
        return self._built(width, self.base_depth)

    def _built(self, width: int, depth: int | None) -> nn.Module:
        try:
            with torch.device("meta"):
                return self.make(width, depth)
        except Exception:  # the constructor may need values; if it is broken, the next line raises the error
            return self.make(width, depth)

    def _refuse_equal_shapes(self, widths: Sequence[int]) -> None:
        """Refuses a ``make_model`` that ignores its arguments."""
        first_width = {str(_shapes(self.base)): self.base_width}
        for width in dict.fromkeys(widths):
            first = first_width.setdefault(str(_shapes(self._on_meta(width))), width)
            refuse(
                first != width,
                f"make_model({width}) and make_model({first}) have the same shapes: make_model must use its width",
            )
        first_depth: dict[str, int | None] = {}
        for depth in self.depths if self.base_depth is not None else ():
            same = first_depth.setdefault(str(_shapes(self._built(self.base_width, depth))), depth)
            refuse(
                same != depth,
                f"make_model({self.base_width}, {depth}) and make_model({self.base_width}, {same}) have the same shapes: "
                "make_model must use its depth",
            )


def _growth(base: nn.Module, other: nn.Module) -> dict[str, list[float]]:
    """Parameter name -> how many times larger each dimension is in ``other``."""
    sizes = {name: parameter.shape for name, parameter in base.named_parameters()}
    pairs = {name: (sizes.get(name, ()), parameter.shape) for name, parameter in other.named_parameters()}
    return {
        name: [after / before for before, after in zip(*shapes, strict=True)]
        for name, shapes in pairs.items()
        if len(shapes[0]) == len(shapes[1])
    }


def _shapes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in model.parameters()]
