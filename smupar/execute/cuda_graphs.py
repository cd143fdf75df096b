"""Steps that do not wait for the host. In small models, launching work on the GPU takes most of a step's time."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smupar.execute.compiler_cache import guard_compiler_cache

# Number of calls before the capture. By then everything that happens only once must be finished: compilation, the creation of
# optimizer state and library handles, and the search for the fastest 2:4 product (execute/sparse/semi).
WARM_UP = 3
# compile_static raises the number of compiled versions of a function in one process to this limit.
_VERSIONS = 1024


class Uploader:
    """Copies host tensors to a device. The host does not wait for work that the device still has to do.

    With a plain copy from pageable memory it would wait. So each shape has a few pinned buffers, which are used in turn. They
    live as long as this object, since allocating or freeing pinned memory would disturb a capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[tuple[torch.Size, torch.dtype], deque[tuple[Tensor, torch.cuda.Event]]] = {}

    def __call__(self, value: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return value.to(self.device)
        turns = self.buffers.setdefault((value.shape, value.dtype), deque())
        if len(turns) < 8:  # the host can be this many steps ahead of the GPU
            pinned, copied = torch.empty(value.shape, dtype=value.dtype, pin_memory=True), torch.cuda.Event()
        else:
            pinned, copied = turns.popleft()
            copied.synchronize()
        on_device = pinned.copy_(value).to(self.device, non_blocking=True)
        copied.record()
        turns.append((pinned, copied))
        return on_device


def compile_static(fn: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """``torch.compile`` for sizes that do not change. torch compiles no more than eight versions of a function, counted over
    all models of a process. That is too few for a study of many widths, so this function raises the limit."""
    import torch._dynamo

    guard_compiler_cache()
    inner = torch.compile(fn, dynamic=False, **options)

    def call(*args: Any) -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=_VERSIONS, accumulated_recompile_limit=_VERSIONS):
            return inner(*args)

    return call


class GraphedCall:
    """Calls ``fn(*inputs)``. The first few calls run as usual. The next call is captured in a CUDA graph, which is replayed
    from then on.

    ``fn`` must do the same work each time, on tensors that stay in place, and must never read a number back from the GPU. Each
    call overwrites the result of the call before.
    """

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        self.fn, self.num_calls = fn, 0
        self.graph = torch.cuda.CUDAGraph()
        self.inputs: tuple[Tensor, ...] = ()
        self.output: Tensor | None = None
        self.stream = torch.cuda.Stream()  # one stream for all calls, because gradients are tied to the stream that made them

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.num_calls += 1
        # Inputs are copied into the same tensors from the first call on. If their strides changed, a compiled function would be
        # compiled again in the middle of the capture.
        if not self.inputs:
            self.inputs = tuple(torch.empty_like(value, memory_format=torch.contiguous_format) for value in inputs)
        for held, value in zip(self.inputs, inputs, strict=True):
            held.copy_(value, non_blocking=True)
        if self.num_calls <= WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                output = self.fn(*self.inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return output
        if self.output is None:
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.output = self.fn(*self.inputs)
        self.graph.replay()
        return self.output


def captured_call(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Captures a call without a result in a CUDA graph. Returns a function that replays it, to be timed."""
    done = torch.zeros((), device=device)

    def captured() -> Tensor:
        call()
        return done

    graphed = GraphedCall(captured)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*capturable=True")  # the first steps are not captured yet
        for _ in range(WARM_UP + 1):
            graphed()
    torch.cuda.synchronize(device)
    return graphed.graph.replay
