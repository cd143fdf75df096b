"""Products of linear layers in fp32 on a CPU. They use oneDNN if torch's MKL is slow on this processor.

MKL uses AVX-512 only on Intel's processors. On AMD's it takes twice as long as oneDNN, which also comes with torch. The choice
depends only on the processor and is never measured, so that a run has the same bits each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LARGEST_BATCHED = 128 * 128  # up to this size of the weight, one batched product for many models is not slower


def fast_products() -> contextlib.AbstractContextManager[object]:
    """A context in which linear layers multiply by oneDNN if that is faster. The backward passes of these products use it too.
    Compiled code is not changed."""
    use = not torch.compiler.is_compiling() and _mkl_is_slow()  # in this order: dynamo warns of cached functions
    return OneDNNMode() if use else contextlib.nullcontext()


@cache
def _mkl_is_slow() -> bool:
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    info = Path("/proc/cpuinfo")
    return info.exists() and "AuthenticAMD" in info.read_text(encoding="utf-8", errors="replace")


class OneDNNMode(TorchFunctionMode):
    """While active, replaces ``F.linear``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and not kwargs and _fits(*args[:2]):
            y = (_StackProduct if _is_stacked(*args[:2]) else _Product).apply(*args[:2])
            return y if len(args) < 3 or args[2] is None else y + args[2]
        return func(*args, **(kwargs or {}))


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether to replace a product. It must be in fp32 on a CPU, and large if it is for a stack of models. Subclasses of
    tensors, such as shards, multiply in their own way."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and weight.ndim == 2
        and x.ndim > 1
        and (weight.numel() > _LARGEST_BATCHED or not _is_stacked(x, weight))
        and type(weight) in (Tensor, torch.nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
    )


def _is_stacked(x: Tensor, weight: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_batchedtensor(weight)


class _Product(torch.autograd.Function):
    """X W' for X of any number of dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        of_x = _times(flat, weight.t()).view(x.shape) if ctx.needs_input_grad[0] else None
        of_weight = _times(flat.t(), x.reshape(-1, x.shape[-1]).t()) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


class _StackProduct(torch.autograd.Function):
    """X W' for the models of a stack, one after the other. ``torch.func`` takes only functions with a ``setup_context``. A call
    of such a function takes 0.1 ms longer, so single models use ``_Product``, which has none."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return _product(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = _Product.backward

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        xs, weights = (
            [factor] * info.batch_size if dim is None else factor.unbind(dim)
            for factor, dim in zip((x, weight), in_dims, strict=True)
        )
        return torch.stack([_StackProduct.apply(*factors) for factors in zip(xs, weights, strict=True)]), 0


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return _times(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """X W' of two matrices, whatever their strides."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product
