"""The kernels for CPUs, whose cost is proportional to the number of non-zeros.

``Compiled`` is our own. If it cannot be compiled, a warning says so, and ``Torch`` calls torch's kernels (MKL) instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smupar.execute.sparse.library import NoKernel, SparseWarning, library
from smupar.model.sparse_linear import Kernel, KernelIndex


@dataclass(frozen=True)
class CsrView(KernelIndex):
    """The non-zeros, line by line. Lines are the rows of the matrix (CSR) or its columns (CSC)."""

    starts: Tensor  # [lines + 1] int64: index of the first non-zero of each line
    indices: Tensor  # [non-zeros] int32: position of each non-zero in its line
    order: Tensor | None  # [non-zeros]: index of each non-zero in the parameter; None if the order is the same

    def values(self, values: Tensor) -> Tensor:
        """The parameter's values in the order of this view."""
        return values if self.order is None else values.index_select(0, self.order)

    def back(self, values: Tensor) -> Tensor:
        """Undoes ``values``: puts values back into the parameter's order."""
        return values if self.order is None else torch.empty_like(values).index_copy_(0, self.order.long(), values)


def to_csc(row_starts: Tensor, columns: Tensor, num_columns: int) -> CsrView:
    """The column-by-column view of a matrix that is stored row by row."""
    order = torch.argsort(columns, stable=True)
    rows = torch.arange(len(row_starts) - 1, dtype=torch.int32, device=columns.device).repeat_interleave(row_starts.diff())
    starts = torch.zeros(num_columns + 1, dtype=torch.int64, device=columns.device)
    torch.cumsum(torch.bincount(columns, minlength=num_columns), 0, out=starts[1:])
    return CsrView(starts, rows[order], order.to(torch.int32) if len(columns) < 2**31 else order)


@dataclass(frozen=True)
class CpuIndex(KernelIndex):
    """Two views of the non-zeros: a line for each output, for the forward pass, and one for each input, for the backward
    pass."""

    by_output: CsrView
    by_input: CsrView

    @classmethod
    def of(cls, row_starts: Tensor, columns: Tensor, shape: tuple[int, int], out_dim: int) -> CpuIndex:
        csr, csc = CsrView(row_starts, columns, None), to_csc(row_starts, columns, shape[1])
        return cls(csr, csc) if out_dim == 0 else cls(csc, csr)

    def watched(self) -> Iterator[Tensor]:
        return self.by_input.tensors()


class CpuKernel(Kernel):
    def refusal(self, mask: Tensor) -> str | None:
        return None if max(mask.shape) < 2**31 else f"its shape {tuple(mask.shape)} does not fit 32-bit column indices"

    def index(self, row_starts: Tensor, columns: Tensor, shape: tuple[int, int], out_dim: int) -> CpuIndex:
        return CpuIndex.of(row_starts, columns, shape, out_dim)


class Compiled(CpuKernel):
    name = "compiled"

    def forward(self, x: Tensor, index: CpuIndex, values: Tensor, bias: Tensor | None) -> Tensor:
        view, num_outputs = index.by_output, len(index.by_output.starts) - 1
        ordered, y = view.values(values.to(x.dtype)).contiguous(), x.new_empty(len(x), num_outputs)
        _function("forward", x)(
            x.data_ptr(),
            len(x),
            x.shape[1],
            num_outputs,
            view.starts.data_ptr(),
            view.indices.data_ptr(),
            ordered.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def backward(
        self, grad: Tensor, x: Tensor, index: CpuIndex, values: Tensor, *, for_input: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        view = index.by_input
        ordered = view.values(values.to(x.dtype)).contiguous()
        grad_x = torch.empty_like(x) if for_input else None
        grad_values = torch.empty_like(ordered) if for_values else None
        _function("backward", x)(
            grad.data_ptr(),
            x.data_ptr(),
            len(x),
            x.shape[1],
            grad.shape[1],
            view.starts.data_ptr(),
            view.indices.data_ptr(),
            ordered.data_ptr(),
            None if grad_x is None else grad_x.data_ptr(),
            None if grad_values is None else grad_values.data_ptr(),
            torch.get_num_threads(),
        )
        return grad_x, None if grad_values is None else view.back(grad_values)


def _function(name: str, x: Tensor) -> Any:
    return getattr(library(), f"smupar_{name}_{'f64' if x.dtype == torch.float64 else 'f32'}")


class Torch(CpuKernel):
    name = "torch"

    def forward(self, x: Tensor, index: CpuIndex, values: Tensor, bias: Tensor | None) -> Tensor:
        y = (_csr(index.by_output, index.by_output.values(values.to(x.dtype)), x.shape[1]) @ x.T).T
        return y.contiguous() if bias is None else y + bias

    def backward(
        self, grad: Tensor, x: Tensor, index: CpuIndex, values: Tensor, *, for_input: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        view = index.by_input
        matrix = _csr(view, view.values(values.to(x.dtype)), grad.shape[1])
        grad_x = (matrix @ grad.T).T.contiguous() if for_input else None
        if not for_values:
            return grad_x, None
        return grad_x, view.back(torch.sparse.sampled_addmm(matrix, x.T.contiguous(), grad, beta=0).values())


def _csr(view: CsrView, values: Tensor, num_columns: int) -> Tensor:
    # torch needs row pointers and columns in one dtype, and MKL needs 32 bits. 64 bits are used only if 32 are too few.
    kind = torch.int32 if len(values) < 2**31 else torch.int64
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(
            view.starts.to(kind),
            view.indices.to(kind),
            values,
            (len(view.starts) - 1, num_columns),
            check_invariants=False,
        )


@cache
def best_kernel() -> Kernel:
    """Our own kernel, or torch's if ours cannot be compiled."""
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
