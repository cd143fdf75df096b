"""One interface to a weight matrix, which may be kept in three ways.

``DenseWeight``       a parameter of full shape, with or without a mask; it may be sharded over ranks
``CompressedWeight``  a parameter of the non-zeros alone, in a ``SparseLinear``
``StackedWeight``     the same weight of many models, in tensors with a leading dimension of models

Optimizer groups, learning rates and traces use only the parameter's name. Code that needs the matrix, the
mask, the optimizer state or the dense gradient calls ``weight_of(model, name)`` or ``hidden_weights(model, plan)``. Code that
moves masks or measures updates works on tensors with one row per model, so that it serves one model and a stack of many. For
this, all three classes have ``shape``, ``rows``, ``set_mask``, ``dense_grad``, ``multiply``, ``num_kept``, ``scale``,
``snapshot`` and ``restore``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smupar.model.compressed import MaskChange, SparseLinear
from smupar.model.csr import MASK
from smupar.model.gradients import DenseGradient, gradient_mask, mask_gradient
from smupar.model.sharding import is_sharded, like, local, num_ranks, sharded_like, whole, zero_off_mask
from smupar.model.stacked_weight import ONLY, StackedWeight
from smupar.plan.facts.layers import IMAGES, kind_of
from smupar.plan.plan import Plan
from smupar.plan.roles.parameters import parent_path
from smupar.refusals import refuse


class ModelWeight(ABC):
    """A weight in a module of one model."""

    stores_zeros: ClassVar[bool]  # whether entries off the mask exist in memory, so that other code can write to them

    def __init__(self, module: nn.Module, name: str, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self.module, self.name, self.leaf, self.optimizers = module, name, name.rpartition(".")[2], optimizers

    @property
    def parameter(self) -> nn.Parameter:
        return self.module.get_parameter(self.leaf)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one model's matrix."""

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
    def attach(self, mask: Tensor | None = None) -> None:
        """Registers the mask, if one is given, and the hook that masks the gradient."""

    @abstractmethod
    def zero_off_mask(self) -> None:
        """Sets weights off the mask to 0, if they are stored."""

    def rows(self, models: Sequence[int] = ONLY) -> tuple[Tensor, Tensor]:
        """Values and mask, each (models, entries), whole on every rank. Do not write to them, since they may be views."""
        return self.full().flatten()[None], self.full_mask().flatten()[None]

    def set_mask(self, new: Tensor, models: Sequence[int] = ONLY) -> MaskChange:
        """Changes the mask to ``new``, (models, entries). Weights that stay keep their value, gradient and optimizer state.
        Weights that are dropped or new get 0 for all three."""
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
        """The requested gradient without a mask, (models, entries), summed over ranks."""
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
    def multiply(self, x: Tensor, *, in_dim: int = 1) -> Tensor:
        """The layer's output for ``x`` without bias, in the dtype of ``x``; under FSDP2 this rank's part of the output."""

    @abstractmethod
    def input_gradient(self, x: Tensor, output_grad: Tensor, *, in_dim: int = 1) -> Tensor:
        """The gradient of the layer's input ``x`` through this layer alone, given the gradient of its whole output."""

    @abstractmethod
    def num_kept(self) -> Tensor:
        """The number of weights on the mask; under FSDP2, in this rank's part."""

    # Values

    def scale(self, factors: Tensor, models: Sequence[int] = ONLY) -> None:
        """Multiplies the weight by a factor; ``factors`` has one entry."""
        local(self.parameter).mul_(factors.squeeze())

    @abstractmethod
    def snapshot(self) -> Tensor:
        """A copy of the values for ``restore``. It is valid for any later mask."""

    def restore(self, values: Tensor, models: Sequence[int] = ONLY) -> None:
        """Restores the values of a snapshot, for the weights that the current mask keeps."""
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

    def attach(self, mask: Tensor | None = None) -> None:
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
        # A rank's rows of an (out, in) matrix give complete outputs. Rows of an (in, out) matrix would cover only some inputs.
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


class CompressedWeight(ModelWeight):
    """A weight that keeps only its non-zeros. Its layer has the index of their positions."""

    stores_zeros = False
    module: SparseLinear

    @property
    def shape(self) -> tuple[int, ...]:
        return self.module.matrix_shape

    @property
    def num_bytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size() + self.module.num_index_bytes

    def full(self) -> Tensor:
        return self.module.expand(self.parameter.detach())

    def laid_out(self, matrix: Tensor) -> Tensor:
        return self.module.gather(matrix)

    @property
    def mask(self) -> Tensor:
        return self.module.weight_mask

    @property
    def mask_buffers(self) -> tuple[str, ...]:
        return tuple(f"{parent_path(self.name)}.{leaf}".lstrip(".") for leaf in self.module.index_names)

    def attach(self, mask: Tensor | None = None) -> None:
        if mask is not None:
            self.module.set_mask(mask.to(self.parameter.device))

    def zero_off_mask(self) -> None:
        """Does nothing, since only weights on the mask are stored."""

    def _write_mask(self, new: Tensor) -> MaskChange:
        refuse(
            num_ranks() > 1 and int(new.sum()) != len(self.parameter),
            f"{self.name!r} keeps only its non-zeros, and their number cannot change on several ranks: keep it dense",
        )
        return self.module.set_mask(new)

    @property
    def dense_gradient(self) -> DenseGradient:
        return self.module.dense

    def can_multiply(self, in_dims: Sequence[int]) -> bool:
        return True

    def multiply(self, x: Tensor, *, in_dim: int = 1) -> Tensor:
        return self.module.product(x)

    def input_gradient(self, x: Tensor, output_grad: Tensor, *, in_dim: int = 1) -> Tensor:
        matrix = self.full().to(output_grad.dtype)
        return output_grad @ (matrix if in_dim == 1 else matrix.T)

    def num_kept(self) -> Tensor:
        return self.parameter.new_tensor(self.parameter.numel())

    def snapshot(self) -> Tensor:
        return self.full()

    def make_room(self, num_values: int) -> None:
        self.module.make_room(num_values)

    def is_foreign(self, shape: Sequence[int]) -> bool:
        return tuple(shape) == self.shape

    def converted(self, foreign: Tensor) -> Tensor:
        return self.laid_out(foreign)


Weight = ModelWeight | StackedWeight


def weight_of(model: nn.Module, name: str, optimizers: Sequence[torch.optim.Optimizer] = ()) -> ModelWeight:
    """A parameter of a model as a weight. Pass its optimizers if their state must change when the mask moves."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    kind = CompressedWeight if isinstance(module, SparseLinear) and leaf == "weight" else DenseWeight
    return kind(module, name, optimizers)


def hidden_weights(model: nn.Module, plan: Plan, optimizers: Sequence[torch.optim.Optimizer] = ()) -> dict[str, ModelWeight]:
    """Hidden weights by name, in the order of the plan."""
    return {row.name: weight_of(model, row.name, optimizers) for row in plan if row.role == "hidden"}
