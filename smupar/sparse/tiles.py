"""Non-zeros anywhere in the matrix, on a GPU: a tile of the activations in shared memory, which every non-zero reads.

The forward product and the gradient of the input are ours (``tiles.cu``), the gradient of the weights is a dense product of
which the entries at the non-zeros are taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smupar.sparse.gpu import GpuIndex, OnGpu, compiled, dense_grad
from smupar.sparse.products import Side, Sides
from smupar.storage import flat_places

_BLOCK = 32  # lines that a warp takes at a time
_STAGE = 72  # bytes of a token in a warp's stage; STRIDE in tiles.cu
_SOURCE = "tiles.cu"
_WARPS = 32
_TILES = ((2048, 32), (4096, 16), (8192, 8))
"""Up to how many features, and tokens that a tile then has: the fastest of those measured on an H200, with so many warps."""
_TOKENS_OF_A_LANE = 8  # the fewest that a tile can have
_HOPPER_SHARED = 227 * 1024


def tile_tokens(num_features: int, device: torch.device) -> int | None:
    """How many tokens a tile has on a device, or None where no tile fits."""
    tokens = next((tokens for most, tokens in _TILES if num_features <= most), 0)
    while tokens >= _TOKENS_OF_A_LANE:
        if shared_bytes(num_features, tokens) <= shared_limit(device):
            return tokens
        tokens //= 2
    return None


@cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads can have; off a GPU those of a Hopper, for which an index can be made
    anywhere."""
    if device.type != "cuda":
        return _HOPPER_SHARED
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def shared_bytes(num_features: int, tokens: int) -> int:
    return num_features * tokens * 2 + _WARPS * tokens * _STAGE


@dataclass(frozen=True)
class Slices:
    """One dimension of the matrix, line by line, as ``multiply`` reads it.

    Lines come in blocks of 32, in a block by falling number of non-zeros, and then in groups, of as many as a warp works on at
    once. A group's lines are padded to the same number of entries, a multiple of four, and interleaved by fours. Behind the
    last group there is room to read ahead.
    """

    source: Tensor  # [entries] int32: which value of the parameter; -1 where it is padding
    columns: Tensor  # [entries] int16: the place in the line
    starts: Tensor  # [groups + 1] int32, in fours of entries
    places: Tensor  # [lines] uint8: which line of its block
    num_inputs: int
    tokens: int  # of the tile that it is laid out for

    @property
    def num_outputs(self) -> int:
        return len(self.places)


def slices(side: Side, num_inputs: int, tokens: int) -> Slices:
    starts, others = side.starts, side.others.long()
    lines, group = len(starts) - 1, 32 // (tokens // _TOKENS_OF_A_LANE)
    counts, number = starts.diff(), torch.arange(lines, device=starts.device)
    most = int(counts.max())
    by_count = torch.argsort(number // _BLOCK * (most + 1) + most - counts, stable=True)
    widths = (counts[by_count].view(-1, group).amax(1) + 3) // 4  # in fours
    begin = torch.cat([widths.new_zeros(1), (widths * group).cumsum(0)])
    position = torch.empty_like(by_count)
    position[by_count] = number
    line = number.repeat_interleave(counts)
    sub = position[line] % group
    # Lines that are read at once should not all want the same banks: each begins with features of other banks.
    classes = 64 // tokens
    order = torch.argsort(line * classes + (others - sub) % classes, stable=True)
    rank = torch.arange(len(others), device=starts.device) - starts[line]  # within the line, which the order does not leave
    at = begin[position[line] // group] * 4 + rank // 4 * (4 * group) + sub * 4 + rank % 4
    total = 4 * (int(begin[-1]) + group)  # the kernel reads one run ahead
    source = torch.full((total,), -1, dtype=torch.int32, device=starts.device)
    columns = torch.zeros(total, dtype=torch.int16, device=starts.device)
    values = order if side.order is None else side.order.long()[order]
    source[at], columns[at] = values.int(), others[order].to(torch.int16)
    return Slices(source, columns, begin.int(), (by_count % _BLOCK).to(torch.uint8), num_inputs, tokens)


@dataclass(frozen=True)
class TilesIndex(GpuIndex):
    forward: Slices
    back: Slices
    places: Tensor  # of the non-zeros in the flattened matrix

    def tensors(self) -> tuple[Tensor, ...]:
        own = [(side.source, side.columns, side.starts, side.places) for side in (self.forward, self.back)]
        return *own[0], *own[1], self.places


class Tiles(OnGpu):
    name = "tiles"

    def refusal(self, mask: Tensor) -> str | None:
        return _size_refusal(tuple(mask.shape), mask.device)

    def index(self, row_starts: Tensor, columns: Tensor, shape: tuple[int, int], out_dim: int) -> TilesIndex:
        if why := _size_refusal(shape, columns.device):
            raise ValueError(f"backend 'csr' cannot multiply a layer on {columns.device}: {why}")
        sides = Sides.of(row_starts, columns, shape, out_dim)
        made = []
        for side, num_inputs in ((sides.by_output, shape[1 - out_dim]), (sides.by_input, shape[out_dim])):
            tokens = tile_tokens(num_inputs, columns.device)
            assert tokens is not None
            made.append(slices(side, num_inputs, tokens))
        return TilesIndex(shape, out_dim, made[0], made[1], flat_places(row_starts, columns, shape[1]).int())

    def product(self, rows: Tensor, index: TilesIndex, values: Tensor, *, back: bool) -> Tensor:
        side = index.back if back else index.forward
        return multiply(rows, side, pack(values, side))

    def values_grad(self, grad: Tensor, x: Tensor, index: TilesIndex, values: Tensor) -> Tensor:
        return dense_grad(grad, x, index.out_dim).view(-1).index_select(0, index.places).to(values.dtype)


def _size_refusal(shape: tuple[int, ...], device: torch.device) -> str | None:
    """All that there is to refuse: the places do not matter."""
    if any(size % _BLOCK for size in shape):
        return f"its sizes {shape} are no multiples of {_BLOCK}: choose such a width, or leave it dense"
    most = _TILES[-1][0]
    if max(shape) > most:
        return f"its shape {shape} is beyond {most} features, of which a tile must fit into shared memory: leave it dense"
    if any(tile_tokens(size, device) is None for size in shape):
        need = shared_bytes(max(shape), _TOKENS_OF_A_LANE)
        return f"a tile takes {need} bytes of shared memory, this GPU has {shared_limit(device)}: leave it dense"
    return None


def pack(values: Tensor, side: Slices) -> Tensor:
    """Entries of the matrix as ``multiply`` reads them: bfloat16 value and place in one word."""
    num = len(side.source)
    entries = torch.empty(num, dtype=torch.int32, device=values.device)
    kernel = compiled(_SOURCE, "pack", values.device, F32=int(values.dtype == torch.float32))
    kernel((-(-num // 256), 1, 1), (256, 1, 1), [values, side.source, side.columns, entries, num])
    return entries


def multiply(x: Tensor, side: Slices, entries: Tensor) -> Tensor:
    tokens, shared = side.tokens, shared_bytes(side.num_inputs, side.tokens)
    kernel = compiled(_SOURCE, "multiply", x.device, shared=shared, TOK=tokens, WARPS=_WARPS)
    y = x.new_empty(len(x), side.num_outputs)
    arguments: list[Tensor | int] = [x, entries, side.starts, side.places, y, len(x), side.num_inputs, side.num_outputs]
    kernel((-(-len(x) // tokens), 1, 1), (_WARPS * 32, 1, 1), arguments)
    return y
