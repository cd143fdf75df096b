"""Times hidden layers and a GPT on a CPU: dense, with torch's CSR, with other packages' sparse layers, and with ours."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smupar.bench.sparse.rows import HiddenLayers, Machine, Row, hidden_layers, state_bytes, step_floor
from smupar.execute.sparse.convert import sparsify_storage
from smupar.execute.sparse.cpu import Torch
from smupar.execute.timing import in_turns, seconds_of, training_step
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.model.gpt import build
from smupar.optim.groups import param_groups

DENSE, OURS = "dense fp32", "csr"
PEERS = ("sparselab", "sparseprop")


def bench_layers(width: int, density: float, tokens: int, depth: int, repeats: int, machine: Machine) -> list[Row]:
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    grad = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)) / tokens
    models: dict[str, nn.Module] = {
        DENSE: hidden_layers(width, depth, 1.0)[0],
        "dense bf16": hidden_layers(width, depth, 1.0)[0].bfloat16(),
        "torch csr": _sparse(width, depth, density, torch_kernel=True),
        **_peers(width, depth, density),
        OURS: _sparse(width, depth, density),
    }
    steps, optimizers = {}, {}
    for side, model in models.items():
        optimizers[side] = torch.optim.AdamW(model.get_submodule("hidden").parameters(), lr=1e-3)
        dtype = torch.bfloat16 if side == "dense bf16" else torch.float32
        steps[side] = training_step(model, optimizers[side], x.to(dtype), grad.to(dtype))
    seconds = _interleaved(steps, repeats)
    held = {side: state_bytes(model, optimizers[side]) for side, model in models.items()}
    floor = {side: step_floor(width, tokens, depth, density if "dense" not in side else 1.0, machine) for side in models}
    return _rows(("layers", width, tokens, density), seconds, held, floor)


def _sparse(width: int, depth: int, density: float, *, torch_kernel: bool = False) -> HiddenLayers:
    model, plan = hidden_layers(width, depth, density)
    sparsify_storage(model, plan, backend="csr")
    if torch_kernel:
        for layer in model.hidden:
            layer.kernel_of = lambda _: Torch()  # type: ignore[assignment]
    return model


def _peers(width: int, depth: int, density: float) -> dict[str, nn.Module]:
    """Sparse layers of the same density from other packages, as far as these are installed."""
    models: dict[str, nn.Module] = {}
    for name in PEERS:
        try:
            make: Any = import_module("sparseprop.modules" if name == "sparseprop" else name).SparseLinear
        except ImportError:
            continue
        model, _ = hidden_layers(width, depth, density)
        for number, layer in enumerate(model.hidden):
            with warnings.catch_warnings(action="ignore"):  # torch's CSR is in beta
                peer = make.from_dense(layer) if name == "sparseprop" else make(width, width, bias=False, sparsity=1 - density)
            model.hidden[number] = peer
        models[name] = model
    return models


def bench_gpt(config: ModelConfig, tokens: int, density: float, repeats: int) -> list[Row]:
    seq_len = min(256, tokens)
    text = torch.randint(config.vocab_size, (tokens // seq_len, seq_len + 1), generator=torch.Generator().manual_seed(0))
    run = RunConfig(model=config, base_width=256, sparsity=0.0, seq_len=seq_len, batch_size=len(text))
    models, optimizers = {}, {}
    for side, sparsity in ((DENSE, 0.0), ("masked dense", 1 - density), ("auto", 1 - density)):
        model, plan = build(replace(run, sparsity=sparsity))
        if side == "auto":
            sparsify_storage(model, plan, backend="auto", tokens=tokens)
        models[side], optimizers[side] = model, torch.optim.AdamW(param_groups(model, plan, lr=1e-3))

    def step(side: str) -> None:
        logits = models[side](text[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizers[side].step()
        optimizers[side].zero_grad()

    seconds = _interleaved({side: partial(step, side) for side in models}, repeats)
    held = {side: state_bytes(model.blocks, optimizers[side]) for side, model in models.items()}
    return _rows(("gpt", config.width, tokens, density), seconds, held, dict.fromkeys(models, math.nan))


def _rows(
    case: tuple[str, int, int, float], seconds: dict[str, float], held: dict[str, int], floor: dict[str, float]
) -> list[Row]:
    return [
        Row(*case, side, took, seconds[DENSE] / took, held[side], held[side] / held[DENSE], floor[side])
        for side, took in seconds.items()
    ]


def _interleaved(steps: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    for step in steps.values():
        step()
    return in_turns(steps, repeats, lambda _, step: seconds_of(step))
