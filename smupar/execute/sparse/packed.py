"""Linear layers for decoding, where a text grows by one token at a time.

For each token all weights are read once, so the time is proportional to their bytes. A packed layer keeps its non-zeros row by
row, with 2 bytes for a column and 2 or 4 for a value, and nothing that only training needs. Any linear layer with zeros can be
packed; no plan is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smupar.execute.sparse.backends import AUTO, DENSE
from smupar.execute.sparse.compression import out_dim_of
from smupar.execute.sparse.library import NoKernel, library
from smupar.execute.timing import in_turns, seconds_of
from smupar.model.csr import row_index
from smupar.refusals import refuse

PACKED = "packed"
STORAGES = (AUTO, DENSE, PACKED)
_FUNCTIONS = {torch.float32: "smupar_packed_f32", torch.bfloat16: "smupar_packed_bf16"}
_MAX_INPUTS = 2**16  # columns have 16 bits
_SLACK = 16  # unused entries at the end, since the kernel reads this many at a time
# With a larger share of non-zeros, a packed layer has about as many bytes as a dense one, and is not measured.
_MOST_KEPT = 0.75
_ROUNDS = 5


class PackedLinear(nn.Module):
    """A linear layer in fp32 or bf16 for generating text on a CPU."""

    row_starts: Tensor  # [outputs + 1] int64
    columns: Tensor  # [non-zeros + slack] uint16
    values: Tensor  # [non-zeros + slack]
    bias: Tensor | None  # fp32

    def __init__(self, matrix: Tensor, bias: Tensor | None) -> None:
        """``matrix`` has a row for each output."""
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        kept = matrix != 0
        starts, columns = row_index(kept)
        self.num_kept, pad = len(columns), (0, _SLACK)
        self.register_buffer("row_starts", starts)
        self.register_buffer("columns", nn.functional.pad(columns, pad).to(torch.uint16))
        self.register_buffer("values", nn.functional.pad(matrix[kept], pad))
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.run: Any = getattr(library(), _FUNCTIONS[matrix.dtype])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        if rows.dtype != self.values.dtype:
            raise ValueError(f"the layer was packed in {self.values.dtype}, but the input is {x.dtype}: convert the input")
        y = rows.new_empty(len(rows), self.out_features)
        self.run(
            rows.data_ptr(),
            len(rows),
            self.in_features,
            self.out_features,
            self.row_starts.data_ptr(),
            self.columns.data_ptr(),
            self.values.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y.view(*x.shape[:-1], self.out_features)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.row_starts, self.columns, self.values))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, non-zeros={self.num_kept}"


@dataclass(frozen=True)
class Packing:
    """What ``pack`` did to a model."""

    num_packed: int
    num_dense: int  # number of linear layers that stay dense
    num_bytes: int  # bytes of all weights of the model, with indices
    seconds: dict[str, dict[str, float]]  # measured kind of layer -> storage -> time of a product


@torch.no_grad()
def pack(model: nn.Module, *, storage: str = AUTO, rows: int = 1) -> Packing:
    """Packs linear layers of a model in place. After that the model can only generate.

    storage   "packed" packs every layer with enough zeros. "auto" measures each kind of layer once, and packs it if its product
              with ``rows`` tokens is then faster. "dense" packs none
    rows      number of texts that grow at the same time

    If no layer can be packed, "packed" raises a ValueError, and "auto" leaves all layers dense.
    """
    refuse(storage not in STORAGES, f"storage must be one of {', '.join(STORAGES)}, got {storage!r}")
    known: dict[tuple[object, ...], dict[str, float]] = {}
    linear = [(name, module) for name, module in model.named_modules() if out_dim_of(module) is not None]
    reasons = {name: _refusal(model, name, module) for name, module in linear}
    able = [(name, module) for name, module in linear if reasons[name] is None]
    if storage == PACKED and not able:
        raise ValueError(f"no layer can be packed ({next(iter(reasons.values()), 'there is no linear layer')}): use dense")
    num_packed = 0
    for name, module in able if storage != DENSE else ():
        matrix, bias = _matrix(module), module.bias
        packed = PackedLinear(matrix, bias if isinstance(bias, Tensor) else None)
        if storage == PACKED or _is_faster(packed, matrix, rows, known):
            parent, _, leaf = name.rpartition(".")
            packed.train(module.training)
            setattr(model.get_submodule(parent), leaf, packed)
            num_packed += 1
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return Packing(num_packed, len(linear) - num_packed, num_bytes, {str(key): times for key, times in known.items()})


def _refusal(model: nn.Module, name: str, layer: nn.Module) -> str | None:
    """The reason not to pack a linear layer; None if it can be packed."""
    weight = layer.get_parameter("weight")
    if weight.device.type != "cpu":
        return f"packed layers are for CPUs, but the model is on {weight.device}"
    if weight.dtype not in _FUNCTIONS:
        return f"{name} is {weight.dtype}, but packed layers are float32 or bfloat16"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return f"{name} has hooks: fold its factors into its weights first"
    if _matrix(layer).shape[1] > _MAX_INPUTS:
        return f"{name} has more than {_MAX_INPUTS:,} inputs"
    if sum(parameter is weight for module in model.modules() for parameter in module._parameters.values()) > 1:
        return f"{name} is tied to another layer"
    if int(torch.count_nonzero(weight)) > _MOST_KEPT * weight.numel():
        return f"{name} has hardly any zeros"
    try:
        library()
    except NoKernel as why:
        return f"its kernel could not be compiled: {why}"
    return None


def _matrix(layer: nn.Module) -> Tensor:
    """The weight with a row for each output."""
    weight = layer.get_parameter("weight").detach()
    return weight if out_dim_of(layer) == 0 else weight.T


def _is_faster(packed: PackedLinear, matrix: Tensor, rows: int, known: dict[tuple[object, ...], dict[str, float]]) -> bool:
    """Whether a product is faster packed than dense, measured for the first layer of its size and density."""
    density = float(f"{packed.num_kept / matrix.numel():.2g}")
    key = (tuple(matrix.shape), density)
    if key not in known:
        x = torch.randn(rows, packed.in_features, generator=torch.Generator().manual_seed(0)).to(matrix.dtype)
        products = {DENSE: lambda: nn.functional.linear(x, matrix), PACKED: lambda: packed(x)}
        known[key] = in_turns(products, _ROUNDS, lambda _, product: seconds_of(product, 2), pick=min)
    return known[key][PACKED] < known[key][DENSE]
