"""Products with a matrix of which only the non-zeros are kept, and their gradients, at a cost in proportion to them.

torch's own CSR product would do for the forward pass, but its gradient with respect to the matrix is dense: hence a function of
our own, over a kernel. On a CPU there are two of them here: ``Compiled`` is ours, ``Torch`` calls torch's products (MKL).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smupar.execute.sparse.compiled import NoKernel, library
from smupar.model.compressed import Compressed


class SparseWarning(UserWarning):
    """Sparse execution works, but not as fast as it could."""


@dataclass(frozen=True)
class Side:
    """The non-zeros in the order of one dimension of the matrix: for each line of it where its non-zeros start, and for each of
    them its place in the other dimension, and, unless they are in this order already, in the parameter of values."""

    starts: Tensor  # int64
    others: Tensor  # int32
    order: Tensor | None

    def values(self, values: Tensor) -> Tensor:
        return values if self.order is None else values.index_select(0, self.order)

    def back(self, values: Tensor) -> Tensor:
        """From this order to that of the parameter."""
        return values if self.order is None else torch.empty_like(values).index_copy_(0, self.order.long(), values)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.starts, self.others) if self.order is None else (self.starts, self.others, self.order)


def turned(row_starts: Tensor, columns: Tensor, num_columns: int) -> Side:
    """Non-zeros that are kept row by row, column by column."""
    order = torch.argsort(columns, stable=True)
    rows = torch.arange(len(row_starts) - 1, dtype=torch.int32, device=columns.device).repeat_interleave(row_starts.diff())
    starts = torch.zeros(num_columns + 1, dtype=torch.int64, device=columns.device)
    torch.cumsum(torch.bincount(columns, minlength=num_columns), 0, out=starts[1:])
    return Side(starts, rows[order], order.to(torch.int32) if len(columns) < 2**31 else order)


class Index(Protocol):
    """What a kernel made of the places of the non-zeros to multiply by them."""

    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""

    def watched(self) -> tuple[Tensor, ...]:
        """What backward reads of tensors that others may write to, such as the layer's own buffers."""


@dataclass(frozen=True)
class Sides:
    """The index of the kernels for CPUs."""

    by_output: Side
    by_input: Side

    @classmethod
    def of(cls, row_starts: Tensor, columns: Tensor, shape: tuple[int, int], out_dim: int) -> Sides:
        rows, others = Side(row_starts, columns, None), turned(row_starts, columns, shape[1])
        return cls(rows, others) if out_dim == 0 else cls(others, rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return *self.by_output.tensors(), *self.by_input.tensors()

    def watched(self) -> tuple[Tensor, ...]:
        return self.by_input.tensors()


class Kernel(Protocol):
    """Products of contiguous rows with a sparse matrix, whose values are in the order of the parameter: row by row."""

    name: str
    dtype: torch.dtype | None
    """That it calculates in and wants activations in; None: any, in float32, or float64 if the values are."""

    def refusal(self, mask: Tensor) -> str | None:
        """Why it cannot multiply by a matrix with these places, and what to do, or None."""

    def index(self, row_starts: Tensor, columns: Tensor, shape: tuple[int, int], out_dim: int) -> Any:
        """An ``Index`` for the other methods; a ValueError where ``refusal`` has one."""

    def forward(self, x: Tensor, index: Any, values: Tensor, bias: Tensor | None) -> Tensor: ...

    def backward(
        self, grad: Tensor, x: Tensor, index: Any, values: Tensor, *, for_input: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]: ...


class OnCpu:
    """What the kernels for CPUs have in common."""

    dtype: torch.dtype | None = None

    def refusal(self, mask: Tensor) -> str | None:
        return None if max(mask.shape) < 2**31 else f"its shape {tuple(mask.shape)} is beyond columns of 32 bits"

    def index(self, row_starts: Tensor, columns: Tensor, shape: tuple[int, int], out_dim: int) -> Sides:
        return Sides.of(row_starts, columns, shape, out_dim)


class Compiled(OnCpu):
    name = "compiled"

    def forward(self, x: Tensor, index: Sides, values: Tensor, bias: Tensor | None) -> Tensor:
        side, num_outputs = index.by_output, len(index.by_output.starts) - 1
        own, y = side.values(values.to(x.dtype)).contiguous(), x.new_empty(len(x), num_outputs)
        _function("forward", x)(
            x.data_ptr(),
            len(x),
            x.shape[1],
            num_outputs,
            side.starts.data_ptr(),
            side.others.data_ptr(),
            own.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def backward(
        self, grad: Tensor, x: Tensor, index: Sides, values: Tensor, *, for_input: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        side = index.by_input
        own = side.values(values.to(x.dtype)).contiguous()
        grad_x = torch.empty_like(x) if for_input else None
        grad_values = torch.empty_like(own) if for_values else None
        _function("backward", x)(
            grad.data_ptr(),
            x.data_ptr(),
            len(x),
            x.shape[1],
            grad.shape[1],
            side.starts.data_ptr(),
            side.others.data_ptr(),
            own.data_ptr(),
            None if grad_x is None else grad_x.data_ptr(),
            None if grad_values is None else grad_values.data_ptr(),
            torch.get_num_threads(),
        )
        return grad_x, None if grad_values is None else side.back(grad_values)


def _function(name: str, x: Tensor) -> Any:
    return getattr(library(), f"smupar_{name}_{'f64' if x.dtype == torch.float64 else 'f32'}")


class Torch(OnCpu):
    name = "torch"

    def forward(self, x: Tensor, index: Sides, values: Tensor, bias: Tensor | None) -> Tensor:
        y = (_csr(index.by_output, index.by_output.values(values.to(x.dtype)), x.shape[1]) @ x.T).T
        return y.contiguous() if bias is None else y + bias

    def backward(
        self, grad: Tensor, x: Tensor, index: Sides, values: Tensor, *, for_input: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        side = index.by_input
        matrix = _csr(side, side.values(values.to(x.dtype)), grad.shape[1])
        grad_x = (matrix @ grad.T).T.contiguous() if for_input else None
        if not for_values:
            return grad_x, None
        return grad_x, side.back(torch.sparse.sampled_addmm(matrix, x.T.contiguous(), grad, beta=0).values())


def _csr(side: Side, values: Tensor, num_others: int) -> Tensor:
    # torch wants both of one kind, and MKL 32 bits; where those do not reach, 64.
    kind = torch.int32 if len(values) < 2**31 else torch.int64
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(
            side.starts.to(kind),
            side.others.to(kind),
            values,
            (len(side.starts) - 1, num_others),
            check_invariants=False,
        )


@cache
def best_kernel() -> Kernel:
    try:
        library()
        return Compiled()
    except NoKernel as why:
        warnings.warn(
            f"sparse products run on torch's CSR kernels, which are several times slower than ours: {why}",
            SparseWarning,
            stacklevel=2,
        )
        return Torch()


class Best(OnCpu):
    """Ours, or torch's where it cannot be compiled, which only a product finds out."""

    name = "best"

    def forward(self, x: Tensor, index: Sides, values: Tensor, bias: Tensor | None) -> Tensor:
        return best_kernel().forward(x, index, values, bias)

    def backward(
        self, grad: Tensor, x: Tensor, index: Sides, values: Tensor, *, for_input: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return best_kernel().backward(grad, x, index, values, for_input=for_input, for_values=for_values)


class Product(torch.autograd.Function):
    """y = x W' + bias for the rows of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, layer: Compressed, index: Index, kernel: Kernel
    ) -> Tensor:
        rows = _rows(x, values, kernel)
        own = None if bias is None else bias.to(rows.dtype).contiguous()
        y = kernel.forward(rows, index, values, own)
        # With the index of this pass, whatever becomes of the layer's own before the next.
        ctx.save_for_backward(x, values, *index.watched())
        ctx.layer, ctx.index, ctx.kernel = layer, index, kernel
        return y.view(*x.shape[:-1], y.shape[1]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, values, *_ = ctx.saved_tensors  # which raises if the index was written to
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
    """As a matrix, in the dtype that is calculated in."""
    dtype = kernel.dtype or (torch.float64 if values.dtype == torch.float64 else torch.float32)
    return x.reshape(-1, x.shape[-1]).to(dtype).contiguous()
