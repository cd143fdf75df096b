"""The backends of sparse layers, by name. They share one layer class, ``SparseLinear``, and differ in the kernel that
multiplies. A new backend needs a ``GpuKernel``, a line in ``_GPU_KERNELS``, and its name among the choices of
``Execution.storage`` in ``lm/config/run_config``."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from smupar.execute.sparse import cpu, gpu
from smupar.execute.sparse.block import Blocks
from smupar.execute.sparse.semi import SemiStructured
from smupar.execute.sparse.tiles import Tiles
from smupar.model.sparse_linear import Kernel

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
