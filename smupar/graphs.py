"""A step as a CUDA graph: for small models most of a step is the host telling the GPU what to do next."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Calls before the capture: compilation, lazily made optimizer state and library handles must be through by then.
_WARM_UP = 3


class Graphed:
    """Calls ``fn(*inputs)``, a few times as it is, then captured once and replayed.

    ``fn`` must do the same work each time, on tensors that stay where they are, and never ask the GPU for a number. What it
    returns is overwritten by the next call.
    """

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        self.fn, self.num_calls = fn, 0
        self.graph = torch.cuda.CUDAGraph()
        self.inputs: tuple[Tensor, ...] = ()
        self.output: Tensor | None = None
        self.stream = torch.cuda.Stream()  # one stream for all calls: gradients remember where they were made

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls <= _WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                output = self.fn(*inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return output
        if self.output is None:
            self.inputs = tuple(value.clone() for value in inputs)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.output = self.fn(*self.inputs)
        for mine, value in zip(self.inputs, inputs, strict=True):
            mine.copy_(value, non_blocking=True)
        self.graph.replay()
        return self.output
