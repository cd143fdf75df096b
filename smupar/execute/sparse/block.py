"""Masks that keep or drop entire square blocks (pattern "block-64"), on a GPU. Triton multiplies the kept blocks as dense
matrices.

Values stay in the parameter's order, row by row. To read a block or its transpose, a kernel needs only the block's start and
the distance between its rows. So the forward pass, both gradients and any optimizer use the same tensor, without repacking.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from smupar.execute.sparse.gpu import DTYPE, GpuIndex, GpuKernel
from smupar.model.csr import mask_of_index
from smupar.model.sparse_linear import KernelIndex

_SIZES = (128, 64, 32, 16)
# Launch settings by block size, the fastest on an H200. Size 16 was not measured.
_LAUNCH = {size: {"num_warps": 4, "num_stages": 4} for size in _SIZES} | {128: {"num_warps": 8, "num_stages": 3}}
_TOKENS, _TOKENS_BACK = 128, 64  # rows that a program reads at a time: in a product, and in the weights' gradient
# CUDA's limit for the second dimension of a grid, which counts tiles of rows. The first dimension counts lines of the matrix,
# so programs that run at the same time read the same rows.
_MOST_PROGRAMS = 65535


def block_size(mask: Tensor) -> int | None:
    """The largest block size for which the mask keeps or drops every block entirely; None if there is none."""
    for size in _SIZES:
        if mask.shape[0] % size == 0 and mask.shape[1] % size == 0:
            counts = _counts(mask, size)
            if bool(((counts == 0) | (counts == size * size)).all()):
                return size
    return None


def _counts(mask: Tensor, size: int) -> Tensor:
    return mask.reshape(mask.shape[0] // size, size, mask.shape[1] // size, size).sum((1, 3))


@dataclass(frozen=True)
class BlockCsr(KernelIndex):
    """The kept blocks, line by line. A line is a row of blocks, or a column of blocks."""

    starts: Tensor  # [lines + 1]: index of the first block of each line
    indices: Tensor  # [blocks]: position of each block in its line
    origins: Tensor  # [blocks]: start of each block among the values, in units of the block size
    strides: Tensor  # [blocks]: distance between two rows of a block, in units of the block size


@dataclass(frozen=True)
class BlocksIndex(GpuIndex):
    rows: BlockCsr
    columns: BlockCsr
    row_of: Tensor  # row of each kept block, in the order of ``rows``
    size: int


def blocks_index(mask: Tensor, size: int, out_dim: int) -> BlocksIndex:
    keep = _counts(mask, size) > 0
    row_of, column_of = keep.nonzero(as_tuple=True)
    in_row = keep.sum(1)
    starts = _starts(in_row)
    # Values are stored row by row: all blocks of the rows above come first, then the blocks to the left in the same row.
    origins = starts[row_of] * size + torch.arange(len(row_of), device=mask.device) - starts[row_of]
    strides = in_row[row_of]
    order = torch.argsort(column_of, stable=True)
    by_row = BlockCsr(*(part.int() for part in (starts, column_of, origins, strides)))
    by_column = BlockCsr(*(part.int() for part in (_starts(keep.sum(0)), row_of[order], origins[order], strides[order])))
    return BlocksIndex((mask.shape[0], mask.shape[1]), out_dim, by_row, by_column, row_of.int(), size)


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


class Blocks(GpuKernel):
    name = "block"

    def missing(self, device: torch.device) -> str | None:
        return super().missing(device) or (None if find_spec("triton") else "Triton: pip install triton")

    def refusal(self, mask: Tensor) -> str | None:
        if block_size(mask) is None:
            return f'its mask is not made of square blocks of {_SIZES[-1]} to {_SIZES[0]}: parameterize with pattern="block-64"'
        return None

    def index(self, row_starts: Tensor, columns: Tensor, shape: tuple[int, int], out_dim: int) -> BlocksIndex:
        mask = mask_of_index(row_starts, columns, shape[1])
        size = block_size(mask)
        if size is None:
            raise ValueError(f"backend 'block' cannot multiply a layer: {self.refusal(mask)}, or use backend='dense'")
        return blocks_index(mask, size, out_dim)

    def product(self, rows: Tensor, index: BlocksIndex, values: Tensor, *, back: bool) -> Tensor:
        by_row = index.out_dim == int(back)  # whether output lines are rows of blocks
        lines, num_lines = (index.rows, index.shape[0]) if by_row else (index.columns, index.shape[1])
        y, in_bf16, most = rows.new_empty(len(rows), num_lines), values.to(DTYPE), _MOST_PROGRAMS * _TOKENS
        for part, result in zip(rows.split(most), y.split(most), strict=True):
            _kernels().gathered[(num_lines // index.size, -(-len(part) // _TOKENS))](
                part,
                in_bf16,
                result,
                *lines.tensors(),
                len(part),
                rows.shape[1],
                num_lines,
                TRANSPOSED=by_row,
                SIZE=index.size,
                TOKENS=_TOKENS,
                **_LAUNCH[index.size],
            )
        return y

    def values_grad(self, grad: Tensor, x: Tensor, index: BlocksIndex, values: Tensor) -> Tensor:
        values_grad = torch.empty_like(values)
        by_row, by_column = (grad, x) if index.out_dim == 0 else (x, grad)
        if len(index.row_of):
            _kernels().sampled[(len(index.row_of),)](
                by_row,
                by_column,
                values_grad,
                index.row_of,
                index.rows.indices,
                index.rows.origins,
                index.rows.strides,
                len(grad),
                by_row.shape[1],
                by_column.shape[1],
                SIZE=index.size,
                TOKENS=_TOKENS_BACK,
                **_LAUNCH[index.size],
            )
        return values_grad


def _kernels() -> Any:
    """The module with the Triton kernels. It is imported on first use, since only GPU builds of torch come with Triton."""
    return import_module("smupar.execute.sparse.block_kernels")
