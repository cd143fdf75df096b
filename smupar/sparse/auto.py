"""Which way of keeping a layer is fastest: a training step of a layer like it, measured for each of them in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smupar.sparse.backends import BACKENDS, DENSE, out_dim_of
from smupar.values import num_ranks

_ROUNDS = 3
_GPU_SECONDS = 0.02  # of steps between two looks at the clock: a GPU works while the host goes on
_GPU_MARGIN = 0.03  # a GPU's clock rate wanders: what gains less stays dense


@dataclass(frozen=True)
class Timing:
    seconds: dict[str, float]
    """Of a training step, by backend, "dense" among them."""
    failures: dict[str, str]
    """Backends that could not do it after all, with what they said."""

    def fastest(self, device: torch.device) -> str:
        best = min(self.seconds, key=lambda name: self.seconds[name])
        margin = _GPU_MARGIN if device.type == "cuda" else 0.0
        return best if self.seconds[best] <= (1 - margin) * self.seconds[DENSE] else DENSE


Measured = dict[tuple[object, ...], Timing]


def timing_of(
    layer: nn.Module, mask: Tensor, backends: list[str], *, tokens: int, dtype: torch.dtype, known: Measured
) -> Timing:
    """Of a training step with activations of a dtype; ``known`` has those of layers like it and is added to. On several ranks
    all take what the first measured: they must choose alike."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    density = float(f"{float(mask.sum()) / mask.numel():.2g}")
    key = (type(layer), tuple(weight.shape), density, weight.dtype, dtype, weight.device, tokens, *backends)
    if key not in known:
        measured = [_measured(layer, mask, backends, tokens, dtype)]
        if num_ranks() > 1:
            dist.broadcast_object_list(measured, 0)
        known[key] = measured[0]
    return known[key]


def _measured(layer: nn.Module, mask: Tensor, backends: list[str], tokens: int, dtype: torch.dtype) -> Timing:
    out_dim = out_dim_of(layer)
    assert out_dim is not None
    sizes = mask.shape[1 - out_dim], mask.shape[out_dim]
    steps, failures = {DENSE: training_step(_like(layer, mask), sizes, tokens, dtype)}, {}
    steps[DENSE]()
    for name in backends:
        copy = _like(layer, mask)
        try:
            BACKENDS[name].compress(copy, mask)
            step = training_step(copy, sizes, tokens, dtype)
            step()
        except Exception as error:  # whatever a compiler or a library of kernels raises; the layer can stay as it is
            failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            steps[name] = step
    seconds = dict.fromkeys(steps, float("inf"))
    for _ in range(_ROUNDS):
        for name, step in steps.items():
            seconds[name] = min(seconds[name], _seconds(step, mask.device))
    return Timing(seconds, failures)


def _like(layer: nn.Module, mask: Tensor) -> nn.Module:
    """A layer of the same kind and size without hooks."""
    weight, out_dim = layer.weight, out_dim_of(layer)
    assert isinstance(weight, Tensor)
    assert out_dim is not None
    sizes = weight.shape[1 - out_dim], weight.shape[out_dim]
    with torch.random.fork_rng(devices=[]):  # the user's random numbers stay what they were
        made = nn.Linear(*sizes, bias=layer.bias is not None) if type(layer) is nn.Linear else type(layer)(sizes[1], sizes[0])
    made.to(weight.device, weight.dtype).register_buffer("weight_mask", mask)
    return made


def training_step(layer: nn.Module, sizes: tuple[int, int], tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """Forward, backward to input and weights, AdamW; under autocast if the weights have another dtype than the activations.
    ``sizes`` are those of input and output."""
    like = next(layer.parameters())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.0, fused=like.is_cuda)  # the weights stay as they are
    rng = torch.Generator(like.device).manual_seed(0)
    # Random, since a GPU is faster at multiplying constants.
    x = torch.randn(tokens, sizes[0], generator=rng, dtype=dtype, device=like.device).requires_grad_()
    grad = torch.randn(tokens, sizes[1], generator=rng, dtype=dtype, device=like.device)

    def step() -> None:
        with torch.enable_grad(), torch.autocast(like.device.type, dtype, enabled=dtype != like.dtype):
            y = layer(x)
        y.backward(grad)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    return step


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        return _seconds_of(step, 1, device)
    once = _seconds_of(step, 3, device)
    return _seconds_of(step, min(50, max(3, round(_GPU_SECONDS / once))), device)


def _seconds_of(step: Callable[[], None], num_steps: int, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    _wait(device)
    return (time.perf_counter() - start) / num_steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
