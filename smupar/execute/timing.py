"""Measures the time of calls, for benchmarks, and to choose the fastest of several backends.

All times are seconds per call. ``in_turns`` compares several calls, ``best_of`` measures one, and ``training_step`` makes a
call that runs a training step of a layer or a model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Call = Callable[[], object]
_CPU = torch.device("cpu")


def seconds_of(call: Call, num: int = 1, device: torch.device = _CPU) -> float:
    """The mean time of ``num`` consecutive calls by the host's clock, including the device's work."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(num):
        call()
    _wait(device)
    return (time.perf_counter() - start) / num


def gpu_seconds_of(call: Call, num: int = 1) -> float:
    """The mean time of ``num`` consecutive calls, by the GPU's own clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / num


def best_of(call: Call, rounds: int, num: int = 1, *, clock: Callable[[Call, int], float] = seconds_of) -> float:
    """The mean time in the fastest of several rounds of ``num`` calls. Slower rounds do not count, so there is no separate
    warm-up."""
    return min(clock(call, num) for _ in range(rounds))


def in_turns(
    calls: Mapping[str, Call],
    rounds: int,
    measure: Callable[[str, Call], float],
    pick: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Measures each call once in every round, so that changes of the machine's speed affect all of them. ``pick`` turns the
    times of a call into one number."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(measure(name, call))
    return {name: pick(rounds_of) for name, rounds_of in seconds.items()}


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, grad: Tensor, passes: int = 1) -> Call:
    """A function that runs a training step: the forward pass, the backward pass to input and weights, and the optimizer's step.
    It uses autocast if the dtypes of activations and weights differ."""
    x = x.detach().requires_grad_()
    mixed = next(model.parameters()).dtype != x.dtype

    def step() -> None:
        for _ in range(passes):
            with torch.enable_grad(), torch.autocast(x.device.type, x.dtype if mixed else torch.bfloat16, enabled=mixed):
                y = model(x)
            y.backward(grad)
            x.grad = None
        optimizer.step()
        optimizer.zero_grad()

    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
