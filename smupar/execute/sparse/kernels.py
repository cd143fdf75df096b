"""Which kernel multiplies for a backend on a device, and what is missing there."""

from __future__ import annotations

from functools import cache

import torch

from smupar.execute.sparse import block, cslt, gpu
from smupar.execute.sparse.block import Blocks
from smupar.execute.sparse.products import Best, Kernel
from smupar.execute.sparse.semi import SemiStructured
from smupar.execute.sparse.tiles import Tiles


def missing(backend: str, device: torch.device) -> str | None:
    """What a backend would need to run on a device, or None."""
    if device.type == "cpu" and backend == "csr":
        return None
    if device.type != "cuda":
        where = "runs on a CPU or an NVIDIA GPU" if backend == "csr" else "needs an NVIDIA GPU"
        return f"backend {backend!r} {where}, the model is on {device}: use {'dense' if backend == 'csr' else 'csr'!r} there"
    return _missing_on_gpu(backend, device)


def kernel_of(backend: str, device: torch.device) -> Kernel:
    if why := missing(backend, device):
        raise ValueError(why)
    return Best() if device.type == "cpu" else _on_gpu(backend)


@cache
def _missing_on_gpu(backend: str, device: torch.device) -> str | None:
    why = gpu.missing(device)
    if why is None and backend == "2:4":
        why = cslt.missing()
    if why is None and backend == "block":
        why = block.missing()
    return why and f"backend {backend!r} on a GPU needs {why}: use 'dense', or 'csr' on a CPU"


@cache
def _on_gpu(backend: str) -> Kernel:
    kernels: dict[str, type[Kernel]] = {"csr": Tiles, "2:4": SemiStructured, "block": Blocks}
    return kernels[backend]()
