"""The same weight of many models, in tensors with a leading dimension of models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smupar.model.sparse_linear import MaskChange
from smupar.model.weights import ONLY, Weight


@dataclass
class StackedWeight(Weight):
    """The same weight in every model of a stack. ``values`` and ``state`` are the tensors that a step of the stack updates.
    The protocol ``Weight`` documents the methods."""

    name: str
    values: Tensor  # (models, *shape)
    mask: Tensor | None
    state: list[Tensor]
    gradient: Tensor | None = None  # the dense gradient, which the stack fills on request

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    def rows(self, models: Sequence[int] = ONLY) -> tuple[Tensor, Tensor]:
        assert self.mask is not None
        return self.values[list(models)].flatten(1), self.mask[list(models)].flatten(1)

    def set_mask(self, new: Tensor, models: Sequence[int] = ONLY) -> MaskChange:
        assert self.mask is not None
        changed = torch.zeros_like(self.mask)
        changed[list(models)] = self.mask[list(models)] ^ new.view(-1, *self.shape)
        self.mask ^= changed
        for tensor in (self.values, *self.state):
            tensor.masked_fill_(changed, 0)
        return MaskChange(lambda value: value.masked_fill_(changed, 0), changed & self.mask)

    def dense_grad(self, models: Sequence[int] = ONLY) -> Tensor:
        assert self.gradient is not None
        return self.gradient[list(models)].flatten(1)

    def multiply(self, x: Tensor, *, in_dim: int = 1) -> Tensor:
        return x @ (self.values.mT if in_dim == 1 else self.values)

    def num_kept(self) -> Tensor:
        entries = torch.full((len(self.values),), math.prod(self.shape), device=self.values.device)
        return entries if self.mask is None else self.mask.flatten(1).sum(1)

    def scale(self, factors: Tensor, models: Sequence[int] = ONLY) -> None:
        self.values[list(models)] *= factors.to(self.values.device).view(-1, *[1] * len(self.shape))

    def snapshot(self) -> Tensor:
        return self.values.clone()

    def restore(self, values: Tensor, models: Sequence[int] = ONLY) -> None:
        index = list(models)
        self.values[index] = values[index] if self.mask is None else values[index] * self.mask[index]
        for state in self.state:
            state[index] = 0
