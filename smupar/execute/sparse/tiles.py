"""Products with matrices of any mask, on a GPU. A tile of the activations is loaded into shared memory, and all non-zeros read
it there.

The forward product and the gradient of the input are our kernels (``tiles.cu``). The gradient of the weights is a dense
product, from which the entries at the non-zeros are picked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smupar.execute.sparse.cpu import CpuIndex, CsrView
from smupar.execute.sparse.gpu import GpuIndex, GpuKernel, compiled, dense_grad
from smupar.model.csr import flat_places
from smupar.model.sparse_linear import KernelIndex

_BLOCK = 32  # lines that a warp processes at a time
_RUN = 4  # entries of a line that a thread reads at once
_STAGE = 72  # bytes for each token in a warp's staging buffer, called STRIDE in tiles.cu
_SOURCE = "tiles.cu"
_WARPS = 32
# (largest number of features, tokens in a tile), the fastest measured on an H200 with this number of warps.
_TILES = ((2048, 32), (4096, 16), (8192, 8))
_TOKENS_OF_A_LANE = 8  # tokens that one thread handles; no tile has fewer


def tile_tokens(num_features: int, device: torch.device) -> int | None:
    """The number of tokens in a tile on this device; None if no tile fits."""
    tokens = next((tokens for most, tokens in _TILES if num_features <= most), 0)
    while tokens >= _TOKENS_OF_A_LANE:
        if shared_bytes(num_features, tokens) <= shared_limit(device):
            return tokens
        tokens //= 2
    return None


@cache
def shared_limit(device: torch.device) -> int:
    """The bytes of shared memory that a block of threads can have. Without a GPU these are the bytes of a Hopper GPU, so that
    an index can be made anywhere."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def shared_bytes(num_features: int, tokens: int) -> int:
    return num_features * tokens * 2 + _WARPS * tokens * _STAGE


@dataclass(frozen=True)
class SlicedEll(KernelIndex):
    """The non-zeros, line by line, in the sliced ELLPACK format. Lines are the rows or the columns of the matrix.

    Lines are grouped into blocks of 32. In a block they are sorted by number of non-zeros, the longest first, and then cut into
    slices. A slice has as many lines as a warp works on at once. The lines of a slice are padded to the same number of entries,
    a multiple of four; four entries are a run. The runs of the lines are interleaved, so that the warp reads contiguous memory.

    Two lines in one slice. The first has non-zeros at columns 1 3 4 6 7, the second at columns 0 5. A dot is padding:

        entries    1 3 4 6 | 0 5 . . | 7 . . . | . . . .
        run, line    0, 0      0, 1      1, 0      1, 1

    After the last slice there is padding for one more run of each line, since the kernel reads ahead.
    """

    source: Tensor  # [entries] int32: index of the value in the parameter; -1 for padding
    columns: Tensor  # [entries] int16: position in the line
    starts: Tensor  # [slices + 1] int32: first run of each slice
    places: Tensor  # [lines] uint8: for each line in sorted order, its number in the block
    num_inputs: int
    tokens: int  # tokens in a tile, for which the format is laid out


def sliced_ell(view: CsrView, num_inputs: int, tokens: int) -> SlicedEll:
    """The layout for tiles of ``tokens`` tokens. This number decides how many lines a warp works on at once."""
    height = 32 // (tokens // _TOKENS_OF_A_LANE)  # lines in a slice
    counts, columns, device = view.starts.diff(), view.indices.long(), view.starts.device
    lines = torch.arange(len(counts), device=device)
    most = int(counts.max())
    sorted_lines = torch.argsort(lines // _BLOCK * (most + 1) + most - counts, stable=True)
    num_runs = (counts[sorted_lines].view(-1, height).amax(1) + _RUN - 1) // _RUN  # runs of each line, for every slice
    slice_starts = torch.cat([num_runs.new_zeros(1), (num_runs * height).cumsum(0)])
    position = torch.empty_like(sorted_lines)
    position[sorted_lines] = lines
    # For each non-zero: its line, the line's slice, and the line's position in the slice.
    line = lines.repeat_interleave(counts)
    slice_of, in_slice = position[line] // height, position[line] % height
    # To avoid bank conflicts, lines that are read at the same time start at features in different banks.
    banks = 64 // tokens
    order = torch.argsort(line * banks + (columns - in_slice) % banks, stable=True)
    rank = torch.arange(len(columns), device=device) - view.starts[line]  # position in its line; ``order`` keeps lines together
    run = slice_starts[slice_of] + rank // _RUN * height + in_slice
    entry = run * _RUN + rank % _RUN
    num_entries = _RUN * (int(slice_starts[-1]) + height)
    source = torch.full((num_entries,), -1, dtype=torch.int32, device=device)
    placed = torch.zeros(num_entries, dtype=torch.int16, device=device)
    values = order if view.order is None else view.order.long()[order]
    source[entry], placed[entry] = values.int(), columns[order].to(torch.int16)
    return SlicedEll(source, placed, slice_starts.int(), (sorted_lines % _BLOCK).to(torch.uint8), num_inputs, tokens)


@dataclass(frozen=True)
class TilesIndex(GpuIndex):
    forward: SlicedEll
    back: SlicedEll
    places: Tensor  # positions of the non-zeros in the flattened matrix


class Tiles(GpuKernel):
    name = "tiles"

    def refusal(self, mask: Tensor) -> str | None:
        return _size_refusal(tuple(mask.shape), mask.device)

    def index(self, row_starts: Tensor, columns: Tensor, shape: tuple[int, int], out_dim: int) -> TilesIndex:
        if why := _size_refusal(shape, columns.device):
            raise ValueError(f"backend 'csr' cannot multiply a layer on {columns.device}: {why}")
        views = CpuIndex.of(row_starts, columns, shape, out_dim)
        layouts = []
        for view, num_inputs in ((views.by_output, shape[1 - out_dim]), (views.by_input, shape[out_dim])):
            tokens = tile_tokens(num_inputs, columns.device)
            assert tokens is not None
            layouts.append(sliced_ell(view, num_inputs, tokens))
        return TilesIndex(shape, out_dim, layouts[0], layouts[1], flat_places(row_starts, columns, shape[1]).int())

    def product(self, rows: Tensor, index: TilesIndex, values: Tensor, *, back: bool) -> Tensor:
        layout = index.back if back else index.forward
        return multiply(rows, layout, pack(values, layout))

    def values_grad(self, grad: Tensor, x: Tensor, index: TilesIndex, values: Tensor) -> Tensor:
        return dense_grad(grad, x, index.out_dim).view(-1).index_select(0, index.places).to(values.dtype)


def _size_refusal(shape: tuple[int, ...], device: torch.device) -> str | None:
    """The reason why no tile fits a matrix of this shape; None if one does."""
    if any(size % _BLOCK for size in shape):
        return f"its sizes {shape} are not multiples of {_BLOCK}: choose such a width, or leave it dense"
    most = _TILES[-1][0]
    if max(shape) > most:
        return f"its shape {shape} is beyond {most} features, and a tile of them must fit into shared memory: leave it dense"
    if any(tile_tokens(size, device) is None for size in shape):
        need = shared_bytes(max(shape), _TOKENS_OF_A_LANE)
        return f"a tile takes {need} bytes of shared memory, but this GPU has {shared_limit(device)}: leave it dense"
    return None


def pack(values: Tensor, layout: SlicedEll) -> Tensor:
    """The entries of the matrix for ``multiply``: a bfloat16 value and its column in one word."""
    num = len(layout.source)
    entries = torch.empty(num, dtype=torch.int32, device=values.device)
    kernel = compiled(_SOURCE, "pack", values.device, F32=int(values.dtype == torch.float32))
    kernel((-(-num // 256), 1, 1), (256, 1, 1), [values, layout.source, layout.columns, entries, num])
    return entries


def multiply(x: Tensor, layout: SlicedEll, entries: Tensor) -> Tensor:
    tokens, shared = layout.tokens, shared_bytes(layout.num_inputs, layout.tokens)
    kernel = compiled(_SOURCE, "multiply", x.device, shared=shared, TOK=tokens, WARPS=_WARPS)
    y = x.new_empty(len(x), len(layout.places))
    arguments: list[Tensor | int] = [x, entries, layout.starts, layout.places, y, len(x), layout.num_inputs, y.shape[1]]
    kernel((-(-len(x) // tokens), 1, 1), (_WARPS * 32, 1, 1), arguments)
    return y
