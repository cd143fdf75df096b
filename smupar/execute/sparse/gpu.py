"""Code that the kernels for NVIDIA GPUs share. They multiply bfloat16, and torch compiles their CUDA source on first use.

Each pass packs the values again, which costs one kernel launch. Packed values are not kept: optimizers of other libraries, and
CUDA graphs, write to weights without torch noticing, so kept values could be stale.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smupar.model.sparse_linear import Kernel, KernelIndex

DTYPE = torch.bfloat16
VALUE_DTYPES = (torch.float32, torch.bfloat16)  # dtypes of parameters that the CUDA sources read and write


def missing(device: torch.device) -> str | None:
    """What the GPU or torch lacks to run any of the kernels; None if nothing is missing."""
    if torch.version.hip is not None:
        return "an NVIDIA GPU"
    if sys.platform != "linux":
        return "Linux"  # the names of libraries are those on Linux
    if not hasattr(torch.cuda, "_compile_kernel"):
        return f"torch.cuda._compile_kernel, which torch {torch.__version__} does not have (2.9 and later do)"
    major, minor = torch.cuda.get_device_capability(device)
    return (
        None
        if major >= 8
        else f"a GPU that multiplies bfloat16 (compute capability 8.0 or later; this one has {major}.{minor})"
    )


@cache
def compiled(file: str, name: str, device: torch.device, *, shared: int = 0, **defines: int) -> Launcher:
    """Compiles a function of a CUDA source file in this folder. ``shared`` is the number of bytes of shared memory that it
    needs, and ``defines`` are macros."""
    source = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    source += "".join(Path(__file__).with_name(part).read_text(encoding="utf-8") for part in ("bf16.cuh", file))
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(source, name)
        kernel.set_shared_memory_config(shared)
    return Launcher(kernel, shared, device)


def current_stream(device: torch.device) -> ctypes.c_void_p:
    """The address of the current stream. ``torch.cuda.current_stream`` would create an object, which takes longer than
    launching a kernel."""
    return ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device.index))


class Launcher:
    """Launches a kernel that torch compiled. torch's own function looks up the driver's library on each call, which takes
    longer than the kernel."""

    def __init__(self, kernel: Any, shared: int, device: torch.device) -> None:
        self.kernel, self.shared, self.device = kernel, shared, device
        self.driver = ctypes.CDLL("libcuda.so.1")

    def __call__(self, grid: tuple[int, int, int], block: tuple[int, int, int], args: list[Tensor | int]) -> None:
        """Launches the kernel. Tensors are passed by address, integers by value."""
        values = [ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, Tensor) else ctypes.c_int(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        launch = self.kernel.func, *grid, *block, self.shared, current_stream(self.device), pointers, None
        code = self.driver.cuLaunchKernel(*launch)
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA error {code}: {(text.value or b'unknown').decode()}")


@dataclass(frozen=True)
class GpuIndex(KernelIndex):
    """The base class of the GPU kernels' indices. Subclasses add tensors that no other code writes to."""

    shape: tuple[int, int]
    out_dim: int


class GpuKernel(Kernel):
    """The base class of the kernels for GPUs. Each kernel implements two products:

    product(rows, index, values, back=...)  from rows of the input to rows of the output; with ``back`` from rows of the
                                            output's gradient to rows of the input's gradient
    values_grad(grad, x, index, values)     the gradient of the values, in the values' order and dtype
    """

    dtype = DTYPE
    product: Callable[..., Tensor]
    values_grad: Callable[..., Tensor]

    def missing(self, device: torch.device) -> str | None:
        return missing(device)

    def forward(self, x: Tensor, index: Any, values: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) == 0:
            return x.new_empty(0, index.shape[index.out_dim])
        with _entered(x.device):
            y = self.product(_aligned(x), index, _aligned(values.contiguous()), back=False)
        return y if bias is None else y.add_(bias)

    def backward(
        self, grad: Tensor, x: Tensor, index: Any, values: Tensor, *, for_input: bool, for_values: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        if len(x) == 0:
            return torch.empty_like(x) if for_input else None, torch.zeros_like(values) if for_values else None
        grad, x, values = _aligned(grad), _aligned(x), _aligned(values.contiguous())
        with _entered(x.device):
            return (
                self.product(grad, index, values, back=True) if for_input else None,
                self.values_grad(grad, x, index, values) if for_values else None,
            )


_threads = threading.local()


def _entered(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which kernels can be launched through the driver. In a new thread, such as one of autograd's, the driver has
    no current device until torch has run something there."""
    context = contextlib.nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)
    seen = _threads.__dict__.setdefault("devices", set())
    if device not in seen:
        torch.zeros(1, device=device)
        seen.add(device)
    return context


def dense_grad(grad: Tensor, x: Tensor, out_dim: int) -> Tensor:
    """The gradient of the full matrix. Computing it and picking entries is faster than computing only these entries: 167 us
    against 247 us at width 2048, 16384 tokens and density 1/128 on an H200."""
    return grad.T @ x if out_dim == 0 else x.T @ grad


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or an aligned copy. The kernels load 16 bytes at a time, but a view may start at any address."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
