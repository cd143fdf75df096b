"""Turns a plain linear layer into one that keeps only its non-zeros, and back."""

from __future__ import annotations

from functools import partial
from typing import cast

from torch import Tensor, nn

from smupar.execute.sparse.backends import kernel_of
from smupar.model.csr import row_index
from smupar.model.gradients import PassGradient
from smupar.model.sharding import is_sharded
from smupar.model.sparse_linear import SparseLinear
from smupar.plan.facts.layers import kind_of, reads_weights_of_its_layers


def out_dim_of(layer: nn.Module) -> int | None:
    """The output dimension of a plain linear layer's weight; None for any other layer."""
    kind = kind_of(layer)
    return kind.out_dim if kind.is_plain else None


def layer_refusal(layer: nn.Module, leaf: str, parent: nn.Module, num_users: int) -> str | None:
    """The reason why no backend can hold a layer; None if one can."""
    weight = getattr(layer, leaf)
    extra = {name for name, _ in layer.named_parameters(recurse=False)} - {"weight", "bias"}
    is_plain = leaf == "weight" and out_dim_of(layer) is not None
    reasons = (
        (not is_plain, f"a {type(layer).__name__} is not a plain linear layer (nn.Linear, transformers' Conv1D)"),
        (extra, f"it has parameters besides weight and bias: {', '.join(sorted(extra))}"),
        (
            reads_weights_of_its_layers(parent),
            "nn.TransformerEncoderLayer uses the layer's weight without calling the layer in evaluation",
        ),
        (num_users > 1, "its weight is tied to another layer's"),
        (is_sharded(weight), "its weight is sharded over ranks"),
        (weight.is_meta, "its weight is on the meta device: call to_empty and parameterize first"),
    )
    return next((why for holds, why in reasons if holds), None)


def compress(layer: nn.Module, mask: Tensor, backend: str = "csr", *, out_dim: int | None = None) -> SparseLinear:
    """Turns a plain linear layer into a SparseLinear, in place. ``out_dim`` is needed for classes that are not in the table of
    layers (``plan.facts.layers``)."""
    weight, original = layer.get_parameter("weight"), type(layer)
    out_dim = out_dim_of(layer) if out_dim is None else out_dim
    assert out_dim is not None
    num_rows, num_columns = weight.shape
    starts, columns = row_index(mask)
    values = nn.Parameter(weight.detach()[mask], requires_grad=weight.requires_grad)
    del layer.weight_mask
    layer.__class__ = SparseLinear
    sparse = cast(SparseLinear, layer)
    sparse.original = original
    sparse.matrix_shape = (num_rows, num_columns)
    sparse.out_dim = out_dim
    sparse.backend = backend
    sparse.kernel_of = partial(kernel_of, backend)
    sparse.dense = PassGradient()
    sparse.weight = values
    sparse.register_buffer("weight_columns", columns)
    sparse.register_buffer("weight_row_starts", starts)
    return sparse


def expand(layer: SparseLinear) -> None:
    """Undoes ``compress``. The layer keeps its current values and mask."""
    mask, original = layer.weight_mask, layer.original
    weight = nn.Parameter(layer.expand(layer.weight.detach()), requires_grad=layer.weight.requires_grad)
    del layer.weight_columns, layer.weight_row_starts
    for name in ("original", "matrix_shape", "out_dim", "backend", "kernel_of", "dense", "_index", "_made_of"):
        layer.__dict__.pop(name, None)
    layer.__class__ = original  # type: ignore[assignment]
    layer.weight = weight
    layer.register_buffer("weight_mask", mask)
