"""Products with matrices that keep two of every four weights along rows and along columns (pattern "2:4-transposable"), by
cuSPARSELt. Tensor cores multiply such a matrix in half the time.

A packed matrix of cuSPARSELt has the values row by row, followed by metadata that depends only on their positions. So the
metadata is made once, and each pass writes values in front of it. The forward pass writes the values of the matrix, and the
backward pass the values of its transpose. The gradient of the weights is a dense product, from which the kept entries are
picked.

cuSPARSELt has several algorithms for a product. When a size is used for the third time, the algorithms are timed, and the
fastest is used from then on. So two processes may use different algorithms, and so may the first and the later products of one
process. The last bits of a product then differ.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from smupar.execute.sparse import cslt
from smupar.execute.sparse.gpu import DTYPE, GpuIndex, GpuKernel, compiled, dense_grad
from smupar.execute.timing import best_of, gpu_seconds_of
from smupar.model.csr import mask_of_index

_SIZES = 64  # sizes must be multiples of 64: odd multiples of 32 failed the tests (torch 2.11 on an H200)
_TOKENS = 16  # the number of rows must be a multiple of 16
_SOURCE = "semi.cu"
SEARCH_AT = 3  # the use of a size at which algorithms are timed; this takes as long as many products
_MOST_KNOWN = 64
_choosing = threading.Lock()  # autograd has a thread for each device


def tile_codes(mask: Tensor) -> Tensor:
    """The mask of each 4 x 4 tile as 16 bits, with the first row in the lowest bits. The shape is [rows / 4, columns / 4]."""
    tiles = mask.reshape(mask.shape[0] // 4, 4, mask.shape[1] // 4, 4).transpose(1, 2).flatten(2).int()
    codes = (tiles << torch.arange(16, dtype=torch.int32, device=mask.device)).sum(-1)
    return codes.to(torch.int16)  # the kernel reads the codes as unsigned


@dataclass(frozen=True)
class SemiIndex(GpuIndex):
    metadata: Tensor  # metadata of the matrix as stored
    transposed_metadata: Tensor  # metadata of its transpose
    codes: Tensor


class SemiStructured(GpuKernel):
    name = "2:4"

    def __init__(self) -> None:
        # (sizes, device) -> (plan, number of uses up to its search), in the order of the last use
        self._plans: dict[tuple[object, ...], tuple[cslt.MatmulPlan, int]] = {}
        self._captured: set[cslt.MatmulPlan] = set()  # CUDA graphs may replay these plans, so they are never freed

    def missing(self, device: torch.device) -> str | None:
        return super().missing(device) or cslt.missing()

    def refusal(self, mask: Tensor) -> str | None:
        if any(size % _SIZES for size in mask.shape):
            return f"its sizes {tuple(mask.shape)} are not multiples of {_SIZES}: choose such a width, or leave it dense"
        tiles = mask.reshape(mask.shape[0] // 4, 4, mask.shape[1] // 4, 4)
        if not bool((tiles.sum(1) == 2).all() and (tiles.sum(3) == 2).all()):
            return (
                "its mask does not keep two of every four weights along rows and columns: parameterize with "
                'pattern="2:4-transposable"'
            )
        return None

    def index(self, row_starts: Tensor, columns: Tensor, shape: tuple[int, int], out_dim: int) -> SemiIndex:
        mask = mask_of_index(row_starts, columns, shape[1])
        if why := self.refusal(mask):
            raise ValueError(f"backend '2:4' cannot multiply a layer: {why}")
        return SemiIndex(shape, out_dim, _metadata(mask), _metadata(mask.T.contiguous()), tile_codes(mask))

    def product(self, rows: Tensor, index: SemiIndex, values: Tensor, *, back: bool) -> Tensor:
        matrix = packed(values, index) if index.out_dim == int(back) else packed_transpose(values, index)
        padding = -len(rows) % _TOKENS
        whole = F.pad(rows, (0, 0, 0, padding)) if padding else rows
        return self._plan(matrix, whole)(matrix, whole)[: len(rows)]

    def values_grad(self, grad: Tensor, x: Tensor, index: SemiIndex, values: Tensor) -> Tensor:
        return picked(dense_grad(grad, x, index.out_dim), index, values)

    def _plan(self, matrix: Tensor, rows: Tensor) -> cslt.MatmulPlan:
        shape = len(matrix), rows.shape[1]
        key = shape, len(rows), rows.device
        with _choosing:
            plan, seen = self._plans.pop(key, (None, 0))
            plan = plan or cslt.MatmulPlan(shape, len(rows), rows.device)
            if torch.cuda.is_current_stream_capturing():  # nothing can be timed during a capture
                self._captured.add(plan)
            elif seen < SEARCH_AT:
                seen += 1
                if seen == SEARCH_AT:
                    plan = _faster(plan, matrix, rows)
            self._plans[key] = plan, seen
            if len(self._plans) > _MOST_KNOWN:
                del self._plans[next(iter(self._plans))]
        return plan


def packed(values: Tensor, index: SemiIndex) -> Tensor:
    """The matrix in cuSPARSELt's packed format."""
    matrix = _packed_matrix(index.metadata, index.shape[0], len(values))
    matrix.view(-1)[: len(values)].copy_(values)
    return matrix


def packed_transpose(values: Tensor, index: SemiIndex) -> Tensor:
    """The transpose of the matrix in cuSPARSELt's packed format."""
    matrix = _packed_matrix(index.transposed_metadata, index.shape[1], len(values))
    row_tiles, column_tiles = index.codes.shape
    kernel = compiled(_SOURCE, "turn", values.device, F32=int(values.dtype == torch.float32))
    grid = -(-column_tiles // 32), -(-row_tiles // 32), 1
    kernel(grid, (256, 1, 1), [values, index.codes, matrix, row_tiles, column_tiles])
    return matrix


def picked(matrix: Tensor, index: SemiIndex, values: Tensor) -> Tensor:
    """The entries of a matrix at the positions of the non-zeros, in the dtype of ``values``."""
    entries = torch.empty_like(values)
    row_tiles, column_tiles = index.codes.shape
    kernel = compiled(_SOURCE, "pick", values.device, F32=int(values.dtype == torch.float32))
    grid = -(-column_tiles // 256), min(row_tiles, 65535), 1
    kernel(grid, (256, 1, 1), [matrix, index.codes, entries, row_tiles, column_tiles])
    return entries


def _packed_matrix(metadata: Tensor, num_rows: int, num_values: int) -> Tensor:
    """A packed matrix with its metadata, and with space for its values."""
    matrix = metadata.new_empty(num_rows, (num_values + len(metadata)) // num_rows)
    matrix.view(-1)[num_values:].copy_(metadata)
    return matrix


def _metadata(mask: Tensor) -> Tensor:
    """The metadata that cuSPARSELt writes after the values. Its layout is not documented, so it is checked here."""
    number = torch.arange(int(mask.sum()), device=mask.device)
    metadata = []
    for digits in (number % 251, number // 251 % 251):  # bfloat16 holds these numbers exactly
        values = (digits + 1).to(DTYPE)
        matrix = torch.zeros(mask.shape, dtype=DTYPE, device=mask.device).masked_scatter_(mask, values)
        packed_matrix = torch._cslt_compress(matrix)
        flat = packed_matrix.view(-1)
        if packed_matrix.dim() != 2 or len(packed_matrix) != len(mask) or not torch.equal(flat[: len(values)], values):
            raise RuntimeError(
                f"this version of cuSPARSELt packs a matrix of shape {tuple(mask.shape)} in an unexpected way, as "
                f"{tuple(packed_matrix.shape)}: use sparsify_storage with backend='dense', and tell us your version of torch"
            )
        metadata.append(flat[len(values) :].view(torch.int16).clone())
    if not torch.equal(*metadata):
        raise RuntimeError("this version of cuSPARSELt writes metadata that depends on the values: use backend='dense'")
    return metadata[0].view(DTYPE)


def _faster(plan: cslt.MatmulPlan, matrix: Tensor, rows: Tensor) -> cslt.MatmulPlan:
    """The faster of two plans: the given one, and one with the algorithm that cuSPARSELt's own search finds."""
    searched = cslt.MatmulPlan(plan.shape, plan.num_rows, rows.device)
    try:
        searched.search(matrix, rows)
        seconds = [best_of(partial(other, matrix, rows), 6, clock=gpu_seconds_of) for other in (searched, plan)]
    except RuntimeError:  # this shape or version does not have the algorithm
        return plan
    return searched if seconds[0] < seconds[1] else plan
