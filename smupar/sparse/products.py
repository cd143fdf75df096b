"""Products with a matrix of which only the non-zeros are kept, and their gradients, at a cost in proportion to them.

torch's own CSR product would do for the forward pass, but its gradient with respect to the matrix is dense: hence a function of
our own, over one of two kernels. ``Compiled`` is ours, ``Torch`` calls torch's products (MKL).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from smupar.sparse.compiled import NoKernel, library
from smupar.storage import Compressed


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


class Kernel(Protocol):
    """Products in float32 or float64; all tensors contiguous, values in the order of the side."""

    name: str

    def forward(self, x: Tensor, by_output: Side, values: Tensor, bias: Tensor | None) -> Tensor: ...

    def backward(
        self, grad: Tensor, x: Tensor, by_input: Side, values: Tensor, *, for_input: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]: ...


class Compiled:
    name = "compiled"

    def forward(self, x: Tensor, by_output: Side, values: Tensor, bias: Tensor | None) -> Tensor:
        num_outputs = len(by_output.starts) - 1
        y = x.new_empty(len(x), num_outputs)
        _function("forward", x)(
            x.data_ptr(),
            len(x),
            x.shape[1],
            num_outputs,
            by_output.starts.data_ptr(),
            by_output.others.data_ptr(),
            values.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def backward(
        self, grad: Tensor, x: Tensor, by_input: Side, values: Tensor, *, for_input: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_x = torch.empty_like(x) if for_input else None
        grad_values = torch.empty_like(values) if for_values else None
        _function("backward", x)(
            grad.data_ptr(),
            x.data_ptr(),
            len(x),
            x.shape[1],
            grad.shape[1],
            by_input.starts.data_ptr(),
            by_input.others.data_ptr(),
            values.data_ptr(),
            None if grad_x is None else grad_x.data_ptr(),
            None if grad_values is None else grad_values.data_ptr(),
            torch.get_num_threads(),
        )
        return grad_x, grad_values


def _function(name: str, x: Tensor) -> Any:
    return getattr(library(), f"smupar_{name}_{'f64' if x.dtype == torch.float64 else 'f32'}")


class Torch:
    name = "torch"

    def forward(self, x: Tensor, by_output: Side, values: Tensor, bias: Tensor | None) -> Tensor:
        y = (_csr(by_output, values, x.shape[1]) @ x.T).T
        return y.contiguous() if bias is None else y + bias

    def backward(
        self, grad: Tensor, x: Tensor, by_input: Side, values: Tensor, *, for_input: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        matrix = _csr(by_input, values, grad.shape[1])
        grad_x = (matrix @ grad.T).T.contiguous() if for_input else None
        if not for_values:
            return grad_x, None
        return grad_x, torch.sparse.sampled_addmm(matrix, x.T.contiguous(), grad, beta=0).values()


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


class Product(torch.autograd.Function):
    """y = x W' + bias for the rows of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, layer: Compressed, sides: tuple[Side, Side], kernel: Kernel
    ) -> Tensor:
        by_output, by_input = sides
        rows = _rows(x, values)
        own = None if bias is None else bias.to(rows.dtype).contiguous()
        y = kernel.forward(rows, by_output, by_output.values(values.to(rows.dtype)).contiguous(), own)
        # With the index of this pass, whatever becomes of the layer's own before the next.
        order = () if by_input.order is None else (by_input.order,)
        ctx.save_for_backward(x, values, by_input.starts, by_input.others, *order)
        ctx.layer, ctx.kernel = layer, kernel
        return y.view(*x.shape[:-1], y.shape[1]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, values, starts, others, *order = ctx.saved_tensors
        side, layer = Side(starts, others, *(order or [None])), ctx.layer
        rows, out = _rows(x, values), _rows(grad, values)
        for_input, for_values, for_bias = ctx.needs_input_grad[:3]
        own = side.values(values.to(rows.dtype)).contiguous()
        grad_x, grad_values = ctx.kernel.backward(out, rows, side, own, for_input=for_input, for_values=for_values)
        if for_values and layer.keeps_dense:
            layer.keep(out, rows)
        return (
            None if grad_x is None else grad_x.view(x.shape).to(x.dtype),
            None if grad_values is None else side.back(grad_values).to(values.dtype),
            out.sum(0).to(values.dtype) if for_bias else None,
            *[None] * 3,
        )


def _rows(x: Tensor, values: Tensor) -> Tensor:
    """As a matrix, in the dtype that is calculated in."""
    return x.reshape(-1, x.shape[-1]).to(torch.float64 if values.dtype == torch.float64 else torch.float32).contiguous()
