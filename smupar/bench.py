"""Benchmarks: both sides measured in one run, reported as ratios. They measure; the tests check."""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import replace

import torch
from tqdm import tqdm

from smupar.apply import mask_of, parameterize
from smupar.lm.config import ModelConfig, RunConfig
from smupar.lm.gpt import GPT, plan_on_meta

_610M = ModelConfig(width=2048, depth=10, head_dim=64, vocab_size=50257)
_70B = ModelConfig(width=8192, depth=87, head_dim=128, vocab_size=32000)
_BASE_WIDTH = 256


def bench_parameterize(*, repeats: int = 3, model: ModelConfig = _610M, planned: ModelConfig = _70B) -> str:
    """parameterize on a 610M-parameter GPT against ``normal_`` of the same tensors, and a plan for a 70B-parameter one."""
    lines = [_bench_plan(planned)]  # first, so that its memory shows in the peak
    sparsities = (0.0, 0.5, 0.9375)
    plain, ours = [], {sparsity: [] for sparsity in sparsities}  # type: tuple[list[float], dict[float, list[float]]]
    extra_bytes = {}
    with torch.device("meta"):
        base = GPT(replace(model, width=_BASE_WIDTH))
    for sparsity in tqdm([s for _ in range(repeats) for s in sparsities], desc="bench", leave=False):
        gpt = GPT(model)
        start = time.perf_counter()
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.normal_()
        plain.append(time.perf_counter() - start)
        start = time.perf_counter()
        plan = parameterize(gpt, base=base, density=1 - sparsity)
        ours[sparsity].append(time.perf_counter() - start)
        masks = [mask for row in plan if (mask := mask_of(gpt, row.name)) is not None]
        num_masked = sum(mask.numel() for mask in masks)
        extra_bytes[sparsity] = sum(mask.numel() * mask.element_size() for mask in masks) / max(1, num_masked)
    num_parameters = sum(parameter.numel() for parameter in gpt.parameters())
    lines.append(f"GPT of {num_parameters:,} parameters, CPU, {torch.get_num_threads()} threads, fastest of {repeats}:")
    lines.append(f"  normal_ of every parameter      {min(plain):6.2f} s  1.00x")
    for sparsity, seconds in ours.items():
        ratio = min(seconds) / min(plain)
        lines.append(
            f"  parameterize, density {1 - sparsity:<8g}  {min(seconds):6.2f} s  {ratio:.2f}x, "
            f"{extra_bytes[sparsity]:.2f} extra bytes per masked weight"
        )
    return "\n".join(lines)


def _bench_plan(model: ModelConfig) -> str:
    before, start = _peak_mib(), time.perf_counter()
    plan = plan_on_meta(RunConfig(model=model, base_width=_BASE_WIDTH, sparsity=0.9375))
    seconds, total = time.perf_counter() - start, sum(math.prod(row.shape) for row in plan)
    return f"plan for {total / 1e9:.1f}B parameters on meta: {seconds:.2f} s, {_peak_mib() - before:.0f} MiB at the peak"


def _peak_mib() -> float:
    """Peak resident memory of this process; Linux counts it in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
