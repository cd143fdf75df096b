"""The backends of sparse layers, by name. They share one layer class, ``SparseLinear``, and differ in the kernel that
multiplies. A new backend needs a ``GpuKernel``, a line in ``_GPU_KERNELS``, and its name among the choices of
``Execution.storage`` in ``lm/config/run_config``."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from smupar.execute.sparse import cpu, gpu
from smupar.execute.sparse.block import Blocks
from smupar.execute.sparse.semi import SemiStructured
from smupar.execute.sparse.tiles import Tiles
from smupar.model.compressed import Kernel, SparseLinear
from smupar.model.csr import row_index
from smupar.model.gradients import PassGradient
from smupar.model.sharding import is_sharded
from smupar.plan.facts.layers import kind_of, reads_weights_of_its_layers

_GPU_KERNELS: dict[str, gpu.GpuKernel] = {"csr": Tiles(), "2:4": SemiStructured(), "block": Blocks()}
BACKENDS = tuple(_GPU_KERNELS)
DENSE, AUTO = "dense", "auto"


def missing(backend: str, device: torch.device) -> str | None:
    """An error message if a backend cannot run on a device; None if it can."""
    if device.type == "cpu" and backend == "csr":
        return None
    if device.type != "cuda":
        where = "runs on a CPU or an NVIDIA GPU" if backend == "csr" else "needs an NVIDIA GPU"
        return (
            f"backend {backend!r} {where}, but the model is on {device}: use {'dense' if backend == 'csr' else 'csr'!r} there"
        )
    return _missing_on_gpu(backend, device)


@cache
def _missing_on_gpu(backend: str, device: torch.device) -> str | None:
    why = _GPU_KERNELS[backend].missing(device)
    return why and f"backend {backend!r} on a GPU needs {why}: use 'dense', or 'csr' on a CPU"


def kernel_of(backend: str, device: torch.device) -> Kernel:
    if why := missing(backend, device):
        raise ValueError(why)
    return cpu.best_kernel() if device.type == "cpu" else _GPU_KERNELS[backend]


# Which layers


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


def refusal(backend: str, layer: nn.Module, mask: Tensor, dtype: torch.dtype) -> str | None:
    """The reason why a backend cannot hold a linear layer with activations of this dtype; None if it can."""
    weight: Any = layer.weight
    on_gpu = weight.device.type == "cuda"
    dtypes = gpu.VALUE_DTYPES if on_gpu else (torch.float32, torch.float64, torch.bfloat16)
    if weight.dtype not in dtypes:
        names = ", ".join(str(known).removeprefix("torch.") for known in dtypes)
        names += " on a GPU" if on_gpu else ""
        return f"its weight is {weight.dtype}, but backend {backend!r} multiplies {names}: convert it first"
    kernel = kernel_of(backend, weight.device)
    if kernel.dtype not in (None, dtype):
        return (
            f"its activations are {dtype}, but backend {backend!r} multiplies {kernel.dtype} on a GPU: pass "
            f"dtype={kernel.dtype} and train under torch.autocast('cuda', {kernel.dtype}) (smupar train: --dtype bf16)"
        )
    return kernel.refusal(mask)


# Compressing and expanding


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
