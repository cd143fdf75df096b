"""Finds the fastest backend for a layer, by timing training steps of a similar layer with each backend, in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smupar.execute.cuda_graphs import captured_call
from smupar.execute.sparse.backends import DENSE
from smupar.execute.sparse.compression import compress, out_dim_of
from smupar.execute.timing import Call, in_turns, seconds_of, training_step
from smupar.model.sharding import num_ranks

_ROUNDS = 3
_GPU_SECONDS = 0.02  # time between two readings of the clock, since a GPU works asynchronously
_GPU_MARGIN = 0.03  # a GPU's clock rate varies, so a layer that is faster by less than this stays dense


@dataclass(frozen=True)
class Timing:
    """The times of all backends for one kind of layer."""

    seconds: dict[str, float]  # time of a training step for each backend, including "dense"
    failures: dict[str, str]  # error messages of the backends that failed

    def fastest(self, device: torch.device) -> str:
        best = min(self.seconds, key=lambda name: self.seconds[name])
        margin = _GPU_MARGIN if device.type == "cuda" else 0.0
        return best if self.seconds[best] <= (1 - margin) * self.seconds[DENSE] else DENSE


Timings = dict[tuple[object, ...], Timing]  # kind of layer -> its timing


@dataclass(frozen=True)
class Work:
    """The work of a layer in a training step."""

    tokens: int  # rows of the activations in one pass
    passes: int = 1  # micro-batches in one step of the optimizer
    dtype: torch.dtype | None = None  # dtype of the activations; None for the weights' dtype
    captured: bool = False  # whether the step will be captured in a CUDA graph, so that the host's work does not count


def timing_of(layer: nn.Module, mask: Tensor, backends: list[str], work: Work, known: Timings) -> Timing:
    """The time of a training step of the layer with each backend. Similar layers are measured once, and then found in
    ``known``. All ranks use the first rank's timings, since they must choose the same backend."""
    weight: Any = layer.weight
    density = float(f"{float(mask.sum()) / mask.numel():.2g}")
    key = (type(layer), tuple(weight.shape), density, weight.dtype, weight.device, work, *backends)
    if key not in known:
        measured = [_measured(layer, mask, backends, work)]
        if num_ranks() > 1:
            dist.broadcast_object_list(measured, 0)
        known[key] = measured[0]
    return known[key]


def _measured(layer: nn.Module, mask: Tensor, backends: list[str], work: Work) -> Timing:
    out_dim = out_dim_of(layer)
    assert out_dim is not None
    sizes = mask.shape[1 - out_dim], mask.shape[out_dim]
    steps, failures = {DENSE: _step_of(_like(layer, mask), sizes, work)}, {}
    steps[DENSE]()
    for name in backends:
        copy = _like(layer, mask)
        try:
            step = _step_of(compress(copy, mask, name), sizes, work)
            step()
        except Exception as error:  # compilers and kernel libraries may raise anything; the layer can stay dense
            failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            steps[name] = step
    return Timing(in_turns(steps, _ROUNDS, lambda _, step: _seconds(step, mask.device), pick=min), failures)


def _like(layer: nn.Module, mask: Tensor) -> nn.Module:
    """A layer of the same class and size with other weights and without hooks."""
    similar = type(layer).__new__(type(layer))
    similar.__dict__.update(vars(layer))
    nn.Module.__init__(similar)  # it must not share the layer's hooks, parameters and buffers
    weight: Any = layer.weight
    bias: Any = getattr(layer, "bias", None)
    with torch.random.fork_rng(devices=[]):  # leaves the user's random state unchanged
        values = torch.randn(weight.shape).to(weight)
    similar.register_parameter("weight", nn.Parameter(values))
    similar.register_parameter("bias", None if bias is None else nn.Parameter(torch.zeros_like(bias)))
    similar.register_buffer("weight_mask", mask)
    return similar


def _step_of(layer: nn.Module, sizes: tuple[int, int], work: Work) -> Call:
    """A training step of the layer; ``sizes`` are the sizes of its input and output."""
    like = next(layer.parameters())
    rng = torch.Generator(like.device).manual_seed(0)
    # The values are random, since a GPU multiplies constants faster.
    x, grad = (
        torch.randn(work.tokens, size, generator=rng, dtype=work.dtype or like.dtype, device=like.device) for size in sizes
    )
    captured = work.captured and like.is_cuda
    # lr=0 leaves the weights unchanged
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.0, fused=like.is_cuda, capturable=captured)
    step = training_step(layer, optimizer, x, grad, work.passes)
    return captured_call(step, like.device) if captured else step


def _seconds(step: Call, device: torch.device) -> float:
    if device.type != "cuda":
        return seconds_of(step)
    once = seconds_of(step, 3, device)
    return seconds_of(step, min(50, max(3, round(_GPU_SECONDS / once))), device)
