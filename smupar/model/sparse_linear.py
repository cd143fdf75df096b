"""A linear layer that keeps only the non-zeros of its weight, row by row (CSR), and follows masks that move.

The parameter ``weight`` holds the values, under the name that the plan knows. Two buffers hold their positions (``csr``). A
``Kernel`` multiplies by the matrix; ``execute.sparse`` has the kernels and chooses one for the weight's device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from smupar.model.csr import (
    COLUMNS,
    MASK,
    ROW_STARTS,
    compress_state,
    flat_places,
    is_compressed,
    mask_of_index,
    matrix_of,
    row_index,
)
from smupar.model.gradients import PassGradient


class KernelIndex:
    """The tables that a kernel derives from the positions of the non-zeros. Subclasses are dataclasses of tensors."""

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the index, including those of its parts."""
        for part in vars(self).values():
            if isinstance(part, Tensor):
                yield part
            elif isinstance(part, KernelIndex):
                yield from part.tensors()

    def watched(self) -> Iterator[Tensor]:
        """Tensors that the backward pass reads and that other code may write to, such as the layer's buffers; empty if the
        index owns all its tensors."""
        return iter(())


class Kernel(ABC):
    """Multiplies contiguous rows by a sparse matrix. The values are in the order of the parameter, row by row."""

    name: str
    # The dtype of activations and arithmetic. None means that the kernel takes any dtype and calculates in float32, or in
    # float64 if the values are float64.
    dtype: torch.dtype | None = None

    @abstractmethod
    def refusal(self, mask: Tensor) -> str | None:
        """The reason why the kernel cannot multiply by a matrix with this mask, and the remedy; None if it can."""

    @abstractmethod
    def index(self, row_starts: Tensor, columns: Tensor, shape: tuple[int, int], out_dim: int) -> KernelIndex:
        """The index that ``forward`` and ``backward`` take. Raises ValueError if ``refusal`` gives a reason."""

    @abstractmethod
    def forward(self, x: Tensor, index: Any, values: Tensor, bias: Tensor | None) -> Tensor:
        """The rows of the output."""

    @abstractmethod
    def backward(
        self, grad: Tensor, x: Tensor, index: Any, values: Tensor, *, for_input: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the input and of the values, each None unless it is requested."""


class Product(torch.autograd.Function):
    """y = x W' + bias for the rows of x. torch has a CSR product too, but its gradient would be a dense matrix."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, layer: SparseLinear, index: KernelIndex, kernel: Kernel
    ) -> Tensor:
        rows = _rows(x, values, kernel)
        y = kernel.forward(rows, index, values, None if bias is None else bias.to(rows.dtype).contiguous())
        # The index of this pass is saved, since the layer's index may change before the backward pass.
        ctx.save_for_backward(x, values, *index.watched())
        ctx.layer, ctx.index, ctx.kernel = layer, index, kernel
        return y.view(*x.shape[:-1], y.shape[1]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, values, *_ = ctx.saved_tensors  # raises if the index was written to
        layer, kernel = ctx.layer, ctx.kernel
        rows, out = _rows(x, values, kernel), _rows(grad, values, kernel)
        for_input, for_values, for_bias = ctx.needs_input_grad[:3]
        grad_x, grad_values = kernel.backward(out, rows, ctx.index, values, for_input=for_input, for_values=for_values)
        if for_values and layer.dense.wanted:
            layer.add_dense_grad(out, rows)
        return (
            None if grad_x is None else grad_x.view(x.shape).to(x.dtype),
            None if grad_values is None else grad_values.to(values.dtype),
            out.sum(0, dtype=torch.promote_types(out.dtype, values.dtype)).to(values.dtype) if for_bias else None,
            *[None] * 3,
        )


def _rows(x: Tensor, values: Tensor, kernel: Kernel) -> Tensor:
    """The activations as a matrix, in the dtype that the kernel calculates in."""
    dtype = kernel.dtype or (torch.float64 if values.dtype == torch.float64 else torch.float32)
    return x.reshape(-1, x.shape[-1]).to(dtype).contiguous()


@dataclass(frozen=True)
class MaskChange:
    """How a new mask changed a parameter. ``remap`` makes the same change to another tensor, such as optimizer state."""

    remap: Callable[[Tensor], Tensor]
    new_entries: Tensor  # where the parameter is new


@dataclass(frozen=True)
class _Remapping:
    """Moves values of the non-zeros from an old mask to a new one. New non-zeros get 0."""

    old_kept: Tensor  # which of the old non-zeros the new mask keeps
    new_kept: Tensor  # which of the new non-zeros the old mask kept

    def __call__(self, old: Tensor) -> Tensor:
        new = old.new_zeros(len(self.new_kept))
        new[self.new_kept] = old[self.old_kept]
        return new


class SparseLinear(nn.Module):
    """An nn.Linear, or transformers' Conv1D, that keeps only its non-zeros.

    ``compress`` in ``execute/sparse/compression`` changes the class of a layer to this one. The object, its name, its hooks and
    its bias stay.
    """

    weight: nn.Parameter
    weight_columns: Tensor
    weight_row_starts: Tensor
    index_names: ClassVar[tuple[str, ...]] = ("weight_columns", "weight_row_starts")  # buffers, the same on every rank

    original: type[nn.Module]  # the former class of the layer
    matrix_shape: tuple[int, int]
    out_dim: int  # which dimension of the matrix is the output
    backend: str
    kernel_of: Callable[[torch.device], Kernel]  # the backend's kernel for a device
    dense: PassGradient
    _index: KernelIndex | None = None
    _made_of: tuple[object, ...] | None = (
        None  # kernel, device and versions of the positions, at the time when ``_index`` was made
    )

    @property
    def kernel(self) -> Kernel:
        return self.kernel_of(self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        self._refuse_device(x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        elif x.dtype != self.weight.dtype:
            raise ValueError(f"the input is {x.dtype}, the weight {self.weight.dtype}: convert one of them")
        return self._product(x, getattr(self, "bias", None))  # a layer of the user's class may have no bias

    def product(self, x: Tensor) -> Tensor:
        """The layer's output for rows ``x``, without bias, in the dtype of ``x``."""
        self._refuse_device(x)
        if self.kernel.dtype is None:
            return self._product(x, None)
        # GPU kernels round to bfloat16, which would be too coarse here: callers take small differences of products.
        matrix = self.expand(self.weight.detach()).to(x.dtype)
        return x @ (matrix.T if self.out_dim == 0 else matrix)

    def _refuse_device(self, x: Tensor) -> None:
        if x.device != self.weight.device:
            raise ValueError(f"the input is on {x.device}, the weight on {self.weight.device}: move one of them")

    # torch.compile cannot trace our kernels, and compiles the code between such layers.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        num_inputs, kernel = self.matrix_shape[1 - self.out_dim], self.kernel
        if x.shape[-1] != num_inputs:
            raise ValueError(
                f"the layer reads {num_inputs} features, but the input of shape {tuple(x.shape)} has {x.shape[-1]}"
            )
        if kernel.dtype not in (None, x.dtype):
            raise ValueError(
                f"backend {self.backend!r} multiplies {kernel.dtype} on a GPU, the input is {x.dtype}: call the model under "
                f"torch.autocast('cuda', {kernel.dtype}), or convert model and input"
            )
        return Product.apply(x, self.weight, bias, self, self.index(), kernel)

    # The index

    def index(self) -> KernelIndex:
        """The kernel's index. It is made again if the positions have changed, because masks moved or a checkpoint was
        loaded."""
        kernel, starts, columns = self.kernel, self.weight_row_starts, self.weight_columns
        made_of = kernel.name, columns.device, starts._version, columns._version
        if self._index is None or self._made_of != made_of:
            self._check_index()
            with torch.inference_mode(False):  # an index that is made during evaluation must also work in training
                self._index = kernel.index(starts, columns, self.matrix_shape, self.out_dim)
            self._made_of = made_of
        return self._index

    def _check_index(self) -> None:
        """Refuses positions outside of the matrix, since kernels read wherever positions point. After to_empty the positions
        are raw memory."""
        starts, columns, num_columns = self.weight_row_starts, self.weight_columns, self.matrix_shape[1]
        ordered = int(starts[0]) == 0 and bool((starts.diff() >= 0).all()) and int(starts[-1]) == len(columns)
        inside = len(columns) == 0 or (int(columns.min()) >= 0 and int(columns.max()) < num_columns)
        if not (ordered and inside and len(columns) == len(self.weight)):
            raise ValueError(
                f"the index of a sparse layer of shape {self.matrix_shape} is damaged, as after to_empty: load a checkpoint "
                "into the model before you use it"
            )

    def forget_index(self) -> None:
        """Drops the kernel's index."""
        self._index = self._made_of = None

    @property
    def num_index_bytes(self) -> int:
        """Bytes of row starts, columns and the kernel's index."""
        tensors = self.weight_row_starts, self.weight_columns, *self.index().tensors()
        parts = {id(part): part for part in tensors}  # the kernel's index may share the layer's buffers
        return sum(part.numel() * part.element_size() for part in parts.values())

    # The matrix and its mask

    @property
    def weight_mask(self) -> Tensor:
        """The mask as a new tensor of shape (rows, columns)."""
        return mask_of_index(self.weight_row_starts, self.weight_columns, self.matrix_shape[1])

    def expand(self, values: Tensor) -> Tensor:
        """The matrix with these values at the non-zeros."""
        return matrix_of(values, self.weight_row_starts, self.weight_columns, self.matrix_shape[1])

    def gather(self, matrix: Tensor) -> Tensor:
        """The entries of a matrix at the non-zeros, in the order of ``weight``."""
        places = flat_places(self.weight_row_starts, self.weight_columns, self.matrix_shape[1])
        return matrix.reshape(-1)[places]

    @torch.no_grad()
    def move_nonzeros(self, mask: Tensor) -> MaskChange:
        """Changes the positions of the non-zeros to ``mask``. Weights that stay keep value and gradient; new weights start at
        0."""
        if reason := self.kernel.refusal(mask):
            raise ValueError(
                f"backend {self.backend!r} cannot hold the moved mask: {reason}. Or convert before "
                "masks move: sparsify_storage(model, plan, backend='csr'), or backend='dense'"
            )
        old_mask, (starts, columns) = self.weight_mask, row_index(mask)
        remap = _Remapping(old_kept=mask[old_mask], new_kept=old_mask[mask])
        values, grad = remap(self.weight), None if self.weight.grad is None else remap(self.weight.grad)
        if len(columns) == len(self.weight):  # in place, so that references to the tensors stay valid
            self.weight.copy_(values)
            self.weight_columns.copy_(columns)
            self.weight_row_starts.copy_(starts)
        else:
            self._resize(values)
            self.weight_columns, self.weight_row_starts = columns, starts
        self.weight.grad = grad
        self.forget_index()
        return MaskChange(remap, ~remap.new_kept)

    def add_dense_grad(self, grad: Tensor, x: Tensor) -> None:
        """Adds the contribution of these rows to the dense gradient, which the weight would have without a mask. ``grad`` is
        the gradient of the layer's output for the rows ``x`` of its input."""
        part = grad.T @ x if self.out_dim == 0 else x.T @ grad
        # Micro-batches are added in at least the weight's precision.
        self.dense.add(part.to(torch.promote_types(part.dtype, self.weight.dtype)), self.weight)

    def make_room(self, num_values: int) -> None:
        """Resizes the weight and its index, so that ``num_values`` non-zeros can be read into them."""
        if num_values != len(self.weight):
            self._resize(self.weight.detach().new_zeros(num_values))
            self.weight_columns = self.weight_columns.new_zeros(num_values)
        self.forget_index()

    def _resize(self, values: Tensor) -> None:
        """Gives the parameter another number of non-zeros. It stays the same object, so optimizers can keep it."""
        self.weight.grad = None
        # A loss that the user still holds may keep the graph of the last step alive. Its node for this parameter expects the
        # old size. torch makes a new node when a parameter's dtype changes, so the dtype is changed for a moment.
        self.weight.data = values.new_empty(0, dtype=torch.float16)
        self.weight.data = values

    # Copies, conversions, checkpoints

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.forget_index()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.forget_index()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads both forms of the weight: any number of non-zeros, or a matrix with its mask."""
        key = f"{prefix}weight"
        matrix, mask = state_dict.get(key), state_dict.get(f"{key}{MASK}")
        if matrix is not None and mask is not None and tuple(matrix.shape) == tuple(mask.shape) == self.matrix_shape:
            compress_state(state_dict, key)
        if is_compressed(state_dict, key):
            starts, columns = state_dict[f"{key}{ROW_STARTS}"], state_dict[f"{key}{COLUMNS}"]
            if starts.shape == self.weight_row_starts.shape:  # otherwise torch reports the mismatch
                self.make_room(len(columns))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        sizes = self.matrix_shape[1 - self.out_dim], self.matrix_shape[self.out_dim]
        about = f"in_features={sizes[0]}, out_features={sizes[1]}, bias={getattr(self, 'bias', None) is not None}"
        return f"{about}, non-zeros={len(self.weight)}, backend={self.backend!r}"
