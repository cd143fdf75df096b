"""The ways of keeping a sparse layer, by name, and which layers each can hold. They share one kind of layer and differ in the
kernel that multiplies: a new one is a kernel, an entry in ``kernels`` and its name here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smupar.execute.sparse import gpu, linear
from smupar.execute.sparse.kernels import kernel_of, missing
from smupar.model.sharding import is_sharded
from smupar.plan.layers import kind_of

DENSE, AUTO = "dense", "auto"
_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def out_dim_of(layer: nn.Module) -> int | None:
    """Which dimension of its weight a plain linear layer writes; None for any other layer."""
    kind = kind_of(layer)
    return kind.out_dim if kind.is_plain else None


@dataclass(frozen=True)
class Backend:
    name: str

    def missing(self, device: torch.device) -> str | None:
        """What it would need to run on a device, or None."""
        return missing(self.name, device)

    def refusal(self, layer: nn.Module, mask: Tensor, dtype: torch.dtype) -> str | None:
        """Why it cannot hold a linear layer that gets activations of this dtype, or None."""
        weight: Any = layer.weight
        on_gpu = weight.device.type == "cuda"
        dtypes = gpu.VALUE_DTYPES if on_gpu else _CPU_DTYPES
        if weight.dtype not in dtypes:
            names = ", ".join(str(one).removeprefix("torch.") for one in dtypes)
            where = " on a GPU" if on_gpu else ""
            return f"its weight is {weight.dtype}, and backend {self.name!r} multiplies {names}{where}: convert it first"
        kernel = kernel_of(self.name, weight.device)
        if kernel.dtype not in (None, dtype):
            return (
                f"its activations are {dtype}, and backend {self.name!r} multiplies {kernel.dtype} on a GPU: pass "
                f"dtype={kernel.dtype} and train under torch.autocast('cuda', {kernel.dtype}) (smupar train: --dtype bf16)"
            )
        return kernel.refusal(mask)

    def compress(self, layer: nn.Module, mask: Tensor) -> None:
        """Makes a sparse layer of it, in place."""
        out_dim = out_dim_of(layer)
        assert out_dim is not None
        if not hasattr(layer, "bias"):  # a layer of the user's own
            layer.register_parameter("bias", None)
        linear.compress(layer, mask, out_dim=out_dim, backend=self.name)


BACKENDS = {name: Backend(name) for name in ("csr", "2:4", "block")}


def layer_refusal(layer: nn.Module, leaf: str, parent: nn.Module, num_users: int) -> str | None:
    """Why no backend can hold a layer, or None."""
    weight = getattr(layer, leaf)
    if leaf != "weight" or out_dim_of(layer) is None:
        return f"a {type(layer).__name__} is not a plain linear layer (nn.Linear, transformers' Conv1D)"
    extra = {name for name, _ in layer.named_parameters(recurse=False)} - {"weight", "bias"}
    if extra:
        return f"it has parameters beside weight and bias: {', '.join(sorted(extra))}"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "nn.TransformerEncoderLayer reads its weight without calling it when it evaluates"
    if num_users > 1:
        return "its weight is tied to another layer's"
    if is_sharded(weight):
        return "its weight is sharded over ranks"
    if weight.is_meta:
        return "its weight is on the meta device: call to_empty and parameterize first"
    return None
