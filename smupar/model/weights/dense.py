"""A weight that is kept as a matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smupar.model.csr import MASK
from smupar.model.gradients import DenseGradient, gradient_mask, mask_gradient
from smupar.model.sharding import is_sharded, like, local, whole, zero_off_mask
from smupar.model.sparse_linear import MaskChange
from smupar.model.weights.model_weight import ModelWeight
from smupar.plan.facts.layers import IMAGES, kind_of


class DenseWeight(ModelWeight):
    """A weight that is kept as a matrix. Its mask, if it has one, is the buffer ``<name>_mask`` beside the parameter."""

    stores_zeros = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.parameter, self.mask) if part is not None)

    def full(self) -> Tensor:
        return whole(self.parameter.detach())

    def laid_out(self, matrix: Tensor) -> Tensor:
        return like(matrix, self.parameter)

    @property
    def mask(self) -> Tensor | None:
        mask = getattr(self.module, f"{self.leaf}{MASK}", None)
        return mask if isinstance(mask, Tensor) else None

    @property
    def mask_buffers(self) -> tuple[str, ...]:
        return () if self.mask is None else (f"{self.name}{MASK}",)

    def install_mask(self, mask: Tensor | None = None) -> None:
        present = self.mask
        if mask is None and present is not None and is_sharded(self.parameter) and not is_sharded(present):
            mask = present  # the weight was sharded after its mask was registered
        if mask is not None:
            self.module.register_buffer(f"{self.leaf}{MASK}", like(mask, self.parameter))
        if self.is_masked:
            mask_gradient(self.parameter, self.module, f"{self.leaf}{MASK}")

    def zero_off_mask(self) -> None:
        mask, parameter = self.mask, self.parameter
        if mask is not None and not (mask.is_meta or parameter.is_meta):
            zero_off_mask(parameter, mask)

    def _write_mask(self, new: Tensor) -> MaskChange:
        mask, parameter, new = self.mask, self.parameter, self.laid_out(new)
        assert mask is not None
        changed = mask ^ new
        parameter.masked_fill_(changed, 0)  # dropped and grown weights both become 0
        mask.copy_(new)
        if parameter.grad is not None:
            zero_off_mask(parameter.grad, new)
        return MaskChange(lambda value: value.masked_fill_(changed, 0), changed & new)

    @property
    def dense_gradient(self) -> DenseGradient:
        return gradient_mask(self.parameter) or DenseGradient()

    def can_multiply(self, in_dims: Sequence[int]) -> bool:
        kind = kind_of(self.module)
        fits = kind.reads == IMAGES or (len(in_dims) == 1 and not kind.is_lookup)
        return kind.product is not None and fits and kind.owns(self.leaf)

    def multiply(self, x: Tensor, *, in_dim: int = 1) -> Tensor:
        kind = kind_of(self.module)
        # If the matrix is (out, in), the rows of one rank are enough to compute some outputs completely. Rows of an (in, out)
        # matrix would cover only some inputs.
        part = local if in_dim == 1 and not kind.is_registered else whole
        return kind.multiply(self.module, part(self.parameter.detach()).to(x.dtype), x, in_dim)

    def input_gradient(self, x: Tensor, output_grad: Tensor, *, in_dim: int = 1) -> Tensor:
        matrix = self.full().to(x.dtype)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(kind_of(self.module).multiply(self.module, matrix, x, in_dim), x, output_grad)
        return grad

    def num_kept(self) -> Tensor:
        shard, mask = local(self.parameter), self.mask
        return shard.new_tensor(shard.numel()) if mask is None else local(mask).sum()

    def snapshot(self) -> Tensor:
        return self.parameter.detach().clone()

    def make_room(self, num_values: int) -> None:
        """Does nothing, since a matrix holds any mask."""

    def is_foreign(self, shape: Sequence[int]) -> bool:
        return self.is_masked and len(shape) == 1 < len(self.shape) and shape[0] == int(self.full_mask().sum())

    def converted(self, foreign: Tensor) -> Tensor:
        return self.laid_out(foreign.new_zeros(self.shape).masked_scatter_(self.full_mask().to(foreign.device), foreign))
