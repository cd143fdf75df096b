"""What code that moves masks or measures updates asks of a weight, in one model or in a stack of many.

Its tensors have one row for each model, so the same code serves both. ``models`` are the numbers of the models that are meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from smupar.model.sparse_linear import MaskChange

ONLY = (0,)  # the number of the only model, for a weight that is not stacked


class Weight(Protocol):
    """The same weight matrix in one or many models."""

    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one model's matrix."""

    def rows(self, models: Sequence[int] = ONLY) -> tuple[Tensor, Tensor]:
        """Values and mask, each (models, entries), whole on every rank. Do not write to them, since they may be views."""

    def set_mask(self, new: Tensor, models: Sequence[int] = ONLY) -> MaskChange:
        """Changes the mask to ``new``, (models, entries). Weights that stay keep their value, gradient and optimizer state.
        Weights that are dropped or new get 0 for all three."""

    def dense_grad(self, models: Sequence[int] = ONLY) -> Tensor:
        """The requested gradient without a mask, (models, entries), summed over ranks."""

    def multiply(self, x: Tensor, *, in_dim: int = 1) -> Tensor:
        """The layer's output for ``x`` without bias, in the dtype of ``x``; under FSDP2 this rank's part of the output."""

    def num_kept(self) -> Tensor:
        """The number of weights on the mask, for each model; under FSDP2, in this rank's part."""

    def scale(self, factors: Tensor, models: Sequence[int] = ONLY) -> None:
        """Multiplies the weight by a factor for each model. The factors may be in the host's memory."""

    def snapshot(self) -> Tensor:
        """A copy of the values for ``restore``. It is valid for any later mask."""

    def restore(self, values: Tensor, models: Sequence[int] = ONLY) -> None:
        """Restores the values of a snapshot, for the weights that the current mask keeps."""
