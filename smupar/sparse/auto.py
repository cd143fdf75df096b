"""Which way of keeping a layer is fastest: a training step of a layer like it, measured for each of them in turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from smupar.sparse.backends import BACKENDS, DENSE, out_dim_of

_ROUNDS = 3

Measured = dict[tuple[object, ...], dict[str, float]]


def seconds_of(layer: nn.Module, mask: Tensor, backends: list[str], *, tokens: int, known: Measured) -> dict[str, float]:
    """Seconds of a training step by backend, "dense" among them; ``known`` has those of layers like it and is added to."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    density = float(f"{float(mask.sum()) / mask.numel():.2g}")
    key = (type(layer), tuple(weight.shape), density, weight.dtype, weight.device, tokens, *backends)
    if key not in known:
        known[key] = _measured(layer, mask, backends, tokens)
    return known[key]


def _measured(layer: nn.Module, mask: Tensor, backends: list[str], tokens: int) -> dict[str, float]:
    out_dim = out_dim_of(layer)
    assert out_dim is not None
    sizes = mask.shape[1 - out_dim], mask.shape[out_dim]
    steps = {DENSE: training_step(_like(layer, mask), sizes, tokens)}
    for name in backends:
        copy = _like(layer, mask)
        BACKENDS[name].compress(copy, mask)
        steps[name] = training_step(copy, sizes, tokens)
    for step in steps.values():
        step()
    seconds = dict.fromkeys(steps, float("inf"))
    for _ in range(_ROUNDS):
        for name, step in steps.items():
            seconds[name] = min(seconds[name], step())
    return seconds


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


def training_step(layer: nn.Module, sizes: tuple[int, int], tokens: int) -> Callable[[], float]:
    """Forward, backward to input and weights, AdamW; returns its seconds. ``sizes`` are those of input and output."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    like = next(layer.parameters())
    device = like.device
    x = torch.ones(tokens, sizes[0], dtype=like.dtype, device=device).requires_grad_()
    grad = torch.ones(tokens, sizes[1], dtype=like.dtype, device=device)

    def step() -> float:
        _wait(device)
        start = time.perf_counter()
        with torch.enable_grad():
            layer(x).backward(grad)
        optimizer.step()
        _wait(device)
        seconds = time.perf_counter() - start
        optimizer.zero_grad()
        x.grad = None
        return seconds

    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
