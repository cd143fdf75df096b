"""Estimates the cost of a run before it starts: parameters, FLOPs, memory and hours. The model is planned on the meta device,
so this needs no memory.

Conventions: a multiplication and an addition are two FLOPs. Backward costs twice as much as forward. Attention counts all T
keys of a query, masked or not, as in the paper's figures. Hours follow from an assumed share of the peak speed. By the usual
convention this share counts 6 FLOPs per parameter and token, and nothing else. Dense layers multiply zeros as well; "sparse"
counts FLOPs without zeros.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from smupar.execute.timing import seconds_of
from smupar.lm.config.run_config import Execution, RunConfig
from smupar.lm.model.gpt import plan_on_meta
from smupar.plan.facts.optimizers import facts_for_role, family_of
from smupar.plan.plan import Plan, PlanRow
from smupar.refusals import refuse

# Dense bf16 TFLOP/s from the datasheets. Keys are parts of device names.
_PEAK_TFLOPS = {"H200": 990, "H100": 990, "B200": 2250, "A100": 312, "L40S": 362, "4090": 165, "V100": 125}
_H200_GIB = 139.0
_GIB = 2**30
# Usable share of a GPU's memory: estimates are rough, and torch reserves some memory.
_USABLE = 0.8


@dataclass(frozen=True)
class Cost:
    num_parameters: int
    num_nonzeros: int
    num_tokens: int
    dense_flops: float  # FLOPs of the complete run
    sparse_flops: float
    usual_flops: float  # 6 FLOPs per parameter and token
    state_bytes: float  # weights, gradients, optimizer state and masks, on each GPU
    activation_bytes: float  # on each GPU, for one micro-batch; approximate

    def hours(self, *, num_gpus: int = 1, peak_tflops: float = 990, share: float = 0.45) -> float:
        return self.usual_flops / (num_gpus * peak_tflops * 1e12 * share) / 3600


def estimate(config: RunConfig, *, num_ranks: int = 1, micro_batch: int = 0, sharded: bool = False) -> Cost:
    """The cost of a run. With ``micro_batch`` 0 a rank processes all its sequences at once."""
    plan = plan_on_meta(config)
    model, tokens = config.model, config.num_tokens
    rows = [row for row in plan if _is_multiplied(row, config)]
    attention = 12 * model.depth * config.seq_len * model.width
    num_parameters = sum(math.prod(row.shape) for row in plan)
    return Cost(
        num_parameters=num_parameters,
        num_nonzeros=round(sum(_kept(row) for row in plan)),
        num_tokens=tokens,
        dense_flops=tokens * (6 * sum(math.prod(row.shape) for row in rows) + attention),
        sparse_flops=tokens * (6 * sum(_kept(row) for row in rows) + attention),
        usual_flops=6.0 * num_parameters * tokens,
        state_bytes=_state_bytes(plan, config) / (num_ranks if sharded else 1),
        activation_bytes=(micro_batch or -(-config.batch_size // num_ranks)) * config.seq_len * _activation_bytes(config),
    )


def fitting_micro_batch(config: RunConfig, *, num_ranks: int, sharded: bool, memory: float) -> int:
    """The largest micro-batch that divides a rank's sequences and should fit into this many bytes; at least one sequence."""
    num_rows = config.batch_size // num_ranks
    single = estimate(config, num_ranks=num_ranks, micro_batch=1, sharded=sharded)
    num_fitting = int((_USABLE * memory - single.state_bytes) / single.activation_bytes)
    small = [size for size in range(1, math.isqrt(num_rows) + 1) if num_rows % size == 0]
    return max((size for size in (*small, *(num_rows // size for size in small)) if size <= num_fitting), default=1)


@dataclass(frozen=True)
class Forecast:
    """The predicted cost of a run on some GPUs."""

    config: RunConfig
    cost: Cost
    gpus: int
    gpu_gib: float
    peak_share: float
    peak_tflops: float
    micro_batch: int
    is_sharded: bool
    seconds_here: float | None = None  # on this machine, if it has no GPU

    @property
    def hours(self) -> float:
        return self.cost.hours(num_gpus=self.gpus, peak_tflops=self.peak_tflops, share=self.peak_share)

    @property
    def memory_gib(self) -> float:
        return (self.cost.state_bytes + self.cost.activation_bytes) / _GIB

    @property
    def values(self) -> dict[str, Any]:
        """The forecast as plain values, for programs."""
        about = ("gpus", "gpu_gib", "peak_share", "peak_tflops", "micro_batch", "hours", "memory_gib", "seconds_here")
        return {**{name: getattr(self, name) for name in about}, "cost": asdict(self.cost), "config": asdict(self.config)}

    def __str__(self) -> str:
        config, cost, model = self.config, self.cost, self.config.model
        sparsity = plan_on_meta(config).hidden_sparsity
        is_h200 = (self.gpu_gib, self.peak_tflops) == (_H200_GIB, _PEAK_TFLOPS["H200"])
        plural = "s" if self.gpus > 1 else ""
        gpu = f"H200{plural}" if is_h200 else f"GPU{plural} of {self.gpu_gib:g} GiB and {self.peak_tflops:g} TFLOP/s"
        lines = {
            "machine": f"{self.gpus} {gpu}, not this computer: --gpus, --gpu-gib and --peak-tflops describe others",
            "model": f"GPT, width {model.width}, depth {model.depth}, {model.num_heads} heads of {model.head_dim}, MLP of "
            f"{model.inner_width}, vocabulary {model.vocab_size:,}",
            "rule": f"{config.rule}, base width {config.base_width}; {sparsity:.4g} of the hidden weights are zero "
            f"({config.pattern})",
            "parameters": f"{cost.num_parameters:,}",
            "non-zeros": f"{cost.num_nonzeros:,} ({cost.num_nonzeros / cost.num_parameters:.1%})",
            "tokens": f"{cost.num_tokens:,} = {config.steps:,} steps of {config.batch_size} x {config.seq_len}; "
            f"{cost.num_tokens / cost.num_parameters:.3g} for each parameter",
            "FLOPs": f"{cost.dense_flops:.3g} as run, {cost.sparse_flops:.3g} without multiplying zeros "
            f"({cost.sparse_flops / cost.dense_flops:.1%}); the usual 6 x parameters x tokens: {cost.usual_flops:.3g}",
            "memory": f"about {self.memory_gib:.1f} GiB of {self.gpu_gib:g} on each GPU: {cost.state_bytes / _GIB:.1f} for "
            f"weights, gradients, optimizer and masks{' (a shard of them)' if self.is_sharded else ''}, "
            f"{cost.activation_bytes / _GIB:.1f} for the activations of {self.micro_batch} sequences (--micro-batch)"
            + ("" if self.memory_gib <= self.gpu_gib else ": TOO MUCH"),
            "time": f"{in_words(3600 * self.hours)} on {self.gpus} GPU{plural} at {self.peak_share:.0%} "
            f"of {self.peak_tflops:g} TFLOP/s",
        }
        if self.seconds_here is not None:
            lines["here"] = f"about {in_words(self.seconds_here)} on this CPU, from the measured speed of a large product"
        return "\n".join(f"{name:<12}{text}" for name, text in lines.items())


def forecast(config: RunConfig, how: Execution, *, gpus: int, gpu_gib: float, peak_share: float) -> Forecast:
    """Makes the forecast that ``smupar train --dry-run`` prints."""
    refuse(
        gpus < 1 or not gpu_gib > 0 or not 0 < peak_share <= 1,
        f"--gpus {gpus}, --gpu-gib {gpu_gib:g} and --peak-share {peak_share:g} must be above 0, a share at most 1",
    )
    refuse(
        config.batch_size % gpus or config.batch_size // gpus % (how.micro_batch or 1),
        f"batch_size {config.batch_size} does not divide among {gpus} GPUs in parts of {how.micro_batch or 1}: "
        "choose another --batch-size or --micro-batch",
    )
    sharded, peak_tflops = how.parallel == "fsdp" and gpus > 1, how.peak_tflops or _PEAK_TFLOPS["H200"]
    micro_batch = how.micro_batch or fitting_micro_batch(config, num_ranks=gpus, sharded=sharded, memory=gpu_gib * _GIB)
    cost = estimate(config, num_ranks=gpus, micro_batch=micro_batch, sharded=sharded)
    here = None
    if not torch.cuda.is_available():
        here = cost.usual_flops / (peak_share * peak_flops(torch.device("cpu"), config.dtype))
    return Forecast(config, cost, gpus, gpu_gib, peak_share, peak_tflops, micro_batch, sharded, here)


def _is_multiplied(row: PlanRow, config: RunConfig) -> bool:
    """Whether a parameter is used in a product. A lookup table is not, unless it is tied and so used as the unembedding."""
    unembedding = "embedding.weight" if config.model.tied else "unembedding.weight"
    return row.role == "hidden" or row.name == unembedding


def _kept(row: PlanRow) -> float:
    return float(math.prod(row.shape) * row.density)


def _state_bytes(plan: Plan, config: RunConfig) -> float:
    family_of(config.optimizer)  # raises if the optimizer is unknown
    total = 0.0
    for row in plan:
        moments = facts_for_role(row.role, config.optimizer, config.rest_lr).num_states_with(config.momentum)
        copy = 2 if config.dtype == "bf16" and len(row.shape) == 2 else 0  # products read a bf16 copy
        total += math.prod(row.shape) * (4 + 4 + 4 * moments + copy + row.masked)
    return total


def _activation_bytes(config: RunConfig) -> float:
    """The bytes per token that are stored for the backward pass, with fused attention. On an H200 the measured memory was
    within 15 % of this."""
    model, size = config.model, 2 if config.dtype == "bf16" else 4
    inner = (3 if model.activation == "swiglu" else 2) * model.inner_width
    block = 2 * 4 * model.width + size * (6 * model.width + inner)  # the inputs of both norms are fp32
    return model.depth * block + 2 * size * model.vocab_size  # logits and their gradient


def in_words(seconds: float) -> str:
    """An approximate duration in words."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 3600 else f"{seconds / 3600:,.1f} hours"


def peak_flops(device: torch.device, dtype: str, given_tflops: float | None = None) -> float:
    """The peak FLOP/s of one device: the given number, else the datasheet's, else the measured speed of a large product."""
    if given_tflops:
        return given_tflops * 1e12
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        tflops = next((tflops for part, tflops in _PEAK_TFLOPS.items() if part in name), None)
        if tflops and dtype == "bf16":
            return tflops * 1e12
    return _measured_flops(device, torch.bfloat16 if dtype == "bf16" else torch.float32)


def _measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    a = torch.full((1024, 1024), 0.5, dtype=dtype, device=device)
    # The first of six rounds warms up.
    return 2 * 1024**3 / min(seconds_of(lambda: (a @ a).sum().item(), device=device) for _ in range(6))
