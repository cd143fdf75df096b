"""A layer that keeps only the non-zeros of its weight, and what becomes of them when the mask moves.

Its ``weight`` is one parameter of values under the name that the plan knows, and two buffers beside it say where the values
lie (``csr``). ``sparse`` has the kernels that multiply by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from smupar.model.csr import flat_places, mask_of_index, matrix_of, row_index
from smupar.model.gradients import PassGradient


@dataclass(frozen=True)
class MaskChange:
    """What a new mask did to a parameter: ``remap`` does it to a tensor that goes along, such as optimizer state."""

    remap: Callable[[Tensor], Tensor]
    new_entries: Tensor  # where the parameter is new


class Compressed(nn.Module):
    """A linear layer that keeps its non-zeros row by row."""

    weight: nn.Parameter
    weight_columns: Tensor
    weight_row_starts: Tensor
    matrix_shape: tuple[int, int]
    out_dim: int  # which dimension of the matrix is the output
    dense: PassGradient
    index_names: ClassVar[tuple[str, ...]] = ("weight_columns", "weight_row_starts")  # buffers, the same on every rank

    def product(self, x: Tensor) -> Tensor:
        """The layer's output for rows ``x`` without bias, in their dtype."""
        raise NotImplementedError

    @property
    def num_index_bytes(self) -> int:
        """Bytes of the index: row starts, columns and tables derived from them."""
        raise NotImplementedError

    def check_mask(self, mask: Tensor) -> None:
        """Raises a ValueError for a mask that the layer could not multiply by."""

    def forget_index(self) -> None:
        """Drops tables that were derived from row starts and columns."""

    @property
    def weight_mask(self) -> Tensor:
        """A new tensor, (rows, columns)."""
        return mask_of_index(self.weight_row_starts, self.weight_columns, self.matrix_shape[1])

    def expand(self, values: Tensor) -> Tensor:
        """The matrix with these values at the non-zeros."""
        return matrix_of(values, self.weight_row_starts, self.weight_columns, self.matrix_shape[1])

    def gather(self, matrix: Tensor) -> Tensor:
        """The entries of a matrix at the non-zeros, in the order of ``weight``."""
        return matrix.reshape(-1)[self._places()]

    def _places(self) -> Tensor:
        return flat_places(self.weight_row_starts, self.weight_columns, self.matrix_shape[1])

    @torch.no_grad()
    def set_mask(self, mask: Tensor) -> MaskChange:
        """Makes ``mask`` the places of the non-zeros: weights that stay keep value and gradient, new ones start at 0."""
        self.check_mask(mask)
        old_places, old_mask = self._places(), self.weight_mask
        starts, columns = row_index(mask)
        places = flat_places(starts, columns, self.matrix_shape[1])
        stays, stayed = mask.view(-1)[old_places], old_mask.view(-1)[places]  # both in the order of the flattened matrix

        def remap(old: Tensor) -> Tensor:
            new = old.new_zeros(len(places))
            new[stayed] = old[stays]
            return new

        values, grad = remap(self.weight), None if self.weight.grad is None else remap(self.weight.grad)
        if len(places) == len(old_places):  # in place: whoever holds the tensors goes on with them
            self.weight.copy_(values)
            self.weight_columns.copy_(columns)
            self.weight_row_starts.copy_(starts)
        else:
            self._resize(values)
            self.weight_columns, self.weight_row_starts = columns, starts
        self.weight.grad = grad
        self.forget_index()
        return MaskChange(remap, ~stayed)

    def add_dense_grad(self, grad: Tensor, x: Tensor) -> None:
        """Adds what rows of the output's gradient and of the input make of the weight's gradient without a mask."""
        part = grad.T @ x if self.out_dim == 0 else x.T @ grad
        # Micro-batches are added in no less than the weight's precision.
        self.dense.add(part.to(torch.promote_types(part.dtype, self.weight.dtype)), self.weight)

    def make_room(self, num_values: int) -> None:
        """Prepares for that many non-zeros, which are about to be read into the weight and its index."""
        if num_values != len(self.weight):
            self._resize(self.weight.detach().new_zeros(num_values))
            self.weight_columns = self.weight_columns.new_zeros(num_values)
        self.forget_index()

    def _resize(self, values: Tensor) -> None:
        """Gives the same parameter another number of non-zeros, so that optimizers go on with it."""
        self.weight.grad = None
        # A loss of the user's may hold the last step's graph, whose node for this parameter expects the old size. torch makes a
        # new node when a parameter's dtype changes, so it changes for a moment.
        self.weight.data = values.new_empty(0, dtype=torch.float16)
        self.weight.data = values
