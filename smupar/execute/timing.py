"""How long calls take: the one stopwatch of benchmarks, and of whatever chooses the faster of several ways.

Everything here is in seconds of one call. Several rounds count by their median, or by the best where the caller says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]
_CPU = torch.device("cpu")


def seconds_of(call: Call, num: int = 1, device: torch.device = _CPU) -> float:
    """The mean of ``num`` calls in a row, by the host's clock, until the device has done all of their work."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(num):
        call()
    _wait(device)
    return (time.perf_counter() - start) / num


def gpu_seconds_of(call: Call, num: int = 1) -> float:
    """The mean of ``num`` calls in a row, by the GPU's own clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / num


def in_turns(
    calls: Mapping[str, Call],
    rounds: int,
    measure: Callable[[str, Call], float],
    pick: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Measures each call once in every round, so that a machine that slows down or speeds up does so for all of them; what
    ``pick`` makes of the rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(measure(name, call))
    return {name: pick(rounds_of) for name, rounds_of in seconds.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
