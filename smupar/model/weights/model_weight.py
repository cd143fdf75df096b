"""A weight in a module of one model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smupar.model.gradients import DenseGradient, gradient_mask
from smupar.model.sharding import is_sharded, local, num_ranks, sharded_like, whole
from smupar.model.sparse_linear import MaskChange
from smupar.model.weights.weight import ONLY, Weight


class ModelWeight(Weight, ABC):
    """A weight in a module of one model."""

    stores_zeros: ClassVar[bool]  # whether entries off the mask exist in memory, so that other code can write to them

    def __init__(self, module: nn.Module, name: str, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self.module, self.name, self.leaf, self.optimizers = module, name, name.rpartition(".")[2], optimizers

    @property
    def parameter(self) -> nn.Parameter:
        return self.module.get_parameter(self.leaf)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the parameter and of its mask or index."""

    @abstractmethod
    def full(self) -> Tensor:
        """The whole matrix, on every rank."""

    @abstractmethod
    def laid_out(self, matrix: Tensor) -> Tensor:
        """Converts a whole matrix to the form in which the parameter keeps it."""

    # The mask

    @property
    @abstractmethod
    def mask(self) -> Tensor | None:
        """The mask, if there is one: the buffer itself, which may be sharded, or a new tensor if no buffer holds it."""

    @property
    @abstractmethod
    def mask_buffers(self) -> tuple[str, ...]:
        """Full names of the buffers that hold the mask or its index. They are the same on every rank."""

    @property
    def is_masked(self) -> bool:
        return bool(self.mask_buffers)

    def full_mask(self) -> Tensor:
        """The whole mask, on every rank; all ones if there is no mask."""
        mask = self.mask
        return local(self.parameter).new_ones(self.shape, dtype=torch.bool) if mask is None else whole(mask)

    @abstractmethod
    def install_mask(self, mask: Tensor | None = None) -> None:
        """Registers the mask, if one is given, and the hook that masks the gradient."""

    @abstractmethod
    def zero_off_mask(self) -> None:
        """Sets weights off the mask to 0, if they are stored."""

    def rows(self, models: Sequence[int] = ONLY) -> tuple[Tensor, Tensor]:
        return self.full().flatten()[None], self.full_mask().flatten()[None]

    def set_mask(self, new: Tensor, models: Sequence[int] = ONLY) -> MaskChange:
        new = new.view(self.shape)
        if num_ranks() > 1:
            # All ranks compute the same mask, but a rounding error could make them differ forever.
            dist.broadcast(sent := new.to(torch.uint8), 0)
            new = sent.bool()
        parameter, before = self.parameter, self.parameter.shape
        change = self._write_mask(new)
        for state in (optimizer.state.get(parameter, {}) for optimizer in self.optimizers):
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == before:
                    state[key] = change.remap(value)
        return change

    @abstractmethod
    def _write_mask(self, new: Tensor) -> MaskChange:
        """Changes the mask to ``new``, which is a whole mask, and makes the parameter and its gradient fit the new mask."""

    # The gradient and the product

    @property
    def masks_gradient(self) -> bool:
        """Whether the gradient is masked."""
        return not self.stores_zeros or gradient_mask(self.parameter) is not None

    @property
    @abstractmethod
    def dense_gradient(self) -> DenseGradient:
        """Holds the gradient without a mask, if that is requested. The hook that masks the gradient fills it; for compressed
        weights, the layer's backward pass does (``compressed.Product``). It stays empty if the hook is lost."""

    def dense_grad(self, models: Sequence[int] = ONLY) -> Tensor:
        shard, grad = local(self.parameter), self.dense_gradient.value
        if grad is None:  # this rank has no gradient, but others may
            grad = shard.new_zeros(shard.shape if self.stores_zeros else self.shape)
        if is_sharded(self.parameter):
            grad = whole(sharded_like(self.parameter, grad))
        elif num_ranks() > 1:
            dist.all_reduce(grad)
        return grad.flatten()[None]

    @abstractmethod
    def can_multiply(self, in_dims: Sequence[int]) -> bool:
        """Whether ``multiply`` supports the layer. Attention that holds several matrices, for example, is not supported."""

    @abstractmethod
    def input_gradient(self, x: Tensor, output_grad: Tensor, *, in_dim: int = 1) -> Tensor:
        """The gradient of the layer's input ``x`` through this layer alone, given the gradient of its whole output."""

    # Values

    def scale(self, factors: Tensor, models: Sequence[int] = ONLY) -> None:
        local(self.parameter).mul_(factors.squeeze())

    def restore(self, values: Tensor, models: Sequence[int] = ONLY) -> None:
        self.parameter.copy_(self.laid_out(values))
        self.zero_off_mask()

    @abstractmethod
    def make_room(self, num_values: int) -> None:
        """Prepares the model's tensors, so that ``num_values`` values can be read into them."""

    @torch.no_grad()
    def load(self, matrix: Tensor, mask: Tensor) -> None:
        """Sets values and mask, each given as a whole matrix."""
        device = local(self.parameter).device
        self._write_mask(mask.to(device))
        self.parameter.copy_(self.laid_out(matrix.to(device)))

    @abstractmethod
    def is_foreign(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape was saved from the other kind of weight: a matrix for a compressed weight, a vector of
        non-zeros for a dense one."""

    @abstractmethod
    def converted(self, foreign: Tensor) -> Tensor:
        """Converts such a tensor (``is_foreign``) to the layout of this parameter."""
