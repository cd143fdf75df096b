"""The ways of keeping a sparse layer, by name. A new one is a class with these four methods and an entry in ``BACKENDS``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from smupar.sparse import csr
from smupar.storage import Compressed
from smupar.values import is_sharded

DENSE, AUTO = "dense", "auto"


class Backend(Protocol):
    def missing(self, device: torch.device) -> str | None:
        """What it would need to run on a device, or None."""

    def refusal(self, layer: nn.Module, mask: Tensor) -> str | None:
        """Why it cannot hold a layer of ``out_dim_of``, or None."""

    def compress(self, layer: nn.Module, mask: Tensor) -> None:
        """Makes a ``Compressed`` of it, in place."""

    def expand(self, layer: Compressed) -> bool:
        """Makes what it was of a layer of this backend, in place; says whether it is one."""


def out_dim_of(layer: nn.Module) -> int | None:
    """Which dimension of its weight a plain linear layer writes; None if it is none."""
    if type(layer) is nn.Linear:
        return 0
    # transformers' linear layer that stores (in, out)
    return 1 if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") else None


class Csr:
    """Non-zeros row by row, anywhere in the matrix, on a CPU."""

    def missing(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"backend 'csr' runs on a CPU, the model is on {device}: model.cpu() moves it"

    def refusal(self, layer: nn.Module, mask: Tensor) -> str | None:
        weight: Any = layer.weight
        if weight.dtype not in csr.DTYPES:
            return f"its weight is {weight.dtype}, and backend 'csr' multiplies float32, float64 and bfloat16: convert it first"
        if max(weight.shape) >= 2**31:
            return f"its shape {tuple(weight.shape)} is beyond columns of 32 bits"
        return None

    def compress(self, layer: nn.Module, mask: Tensor) -> None:
        out_dim = out_dim_of(layer)
        assert out_dim is not None
        csr.compress(layer, mask, out_dim=out_dim)

    def expand(self, layer: Compressed) -> bool:
        if not isinstance(layer, csr.CsrLinear):
            return False
        csr.expand(layer)
        return True


@dataclass(frozen=True)
class Absent:
    """A backend that this version does not have."""

    name: str

    def missing(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"backend {self.name!r} needs an NVIDIA GPU, the model is on {device}: use 'csr' there"
        return f"backend {self.name!r} is not in this version: use 'dense'"

    def refusal(self, layer: nn.Module, mask: Tensor) -> str | None:
        return f"backend {self.name!r} is not in this version"

    def compress(self, layer: nn.Module, mask: Tensor) -> None:
        raise NotImplementedError

    def expand(self, layer: Compressed) -> bool:
        return False


BACKENDS: dict[str, Backend] = {"csr": Csr(), "2:4": Absent("2:4"), "block": Absent("block")}


def layer_refusal(layer: nn.Module, leaf: str, parent: nn.Module, num_users: int) -> str | None:
    """Why no backend can hold a layer, or None."""
    weight = getattr(layer, leaf)
    if leaf != "weight" or out_dim_of(layer) is None:
        return f"a {type(layer).__name__} is not a plain linear layer (nn.Linear, transformers' Conv1D)"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "nn.TransformerEncoderLayer reads its weight without calling it when it evaluates"
    if num_users > 1:
        return "its weight is tied to another layer's"
    if is_sharded(weight):
        return "its weight is sharded over ranks"
    if weight.is_meta:
        return "its weight is on the meta device: call to_empty and parameterize first"
    return None
