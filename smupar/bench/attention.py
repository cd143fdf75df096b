"""Measures time and memory of stacked steps on a GPU, for different ways to compute attention."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from functools import partial

import torch
from tqdm import tqdm

from smupar.bench.hardware import hardware
from smupar.bench.random_text import random_text
from smupar.execute.timing import Call, in_turns, seconds_of
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.model.gpt import AttentionKernel
from smupar.lm.run.distributed import pick_device
from smupar.lm.run.stack import GPTStack, fastest_attention
from smupar.output.optional import first_line
from smupar.output.tables import aligned

_KERNELS: tuple[AttentionKernel, ...] = ("products", "fused")
_WARM_UP = 6  # steps: with them a step is compiled and captured


def bench_attention(
    *,
    repeats: int = 3,
    lengths: tuple[int, ...] = (512, 2048, 256, 128),
    model: ModelConfig | None = None,
    tokens: int = 32768,
    num_models: int = 3,
    num_steps: int = 10,
) -> str:
    """Compares products and a softmax with fused kernels: milliseconds for a step of each model of a stack, and the peak of
    memory, by the length of the sequences. The default models have width 512, 8 layers and 32,768 tokens for a step."""
    device, model = pick_device("auto"), model or ModelConfig(width=512, depth=8, head_dim=64, vocab_size=8192)
    on_gpu = device.type == "cuda"
    lines: list[tuple[str, ...]] = [("length", "kernel", "ms a model", "speed", "peak MiB", "studies take")]
    for length in tqdm(lengths, desc="bench", leave=False, disable=None):
        run = RunConfig(
            model=model,
            base_width=min(256, model.width),
            sparsity=0.75,
            dtype="bf16",
            seq_len=length,
            batch_size=max(1, tokens // length),
        )
        runs = [replace(run, lr=run.lr * 2 ** (-number / num_models)) for number in range(num_models)]
        text = random_text(run)
        steps: dict[str, Call] = {}
        peaks: dict[str, int] = {}
        missed: dict[str, str] = {}
        for kernel in _KERNELS:
            try:
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated() if on_gpu else 0
                step = partial(GPTStack(runs, text, device, attention=kernel).step, 0)
                seconds_of(step, _WARM_UP, device)
            except torch.cuda.OutOfMemoryError as error:  # running out of memory is one of the results
                missed[kernel] = first_line(error)
                continue
            steps[kernel] = step
            peaks[kernel] = (torch.cuda.max_memory_allocated() if on_gpu else 0) - before
        seconds = in_turns(steps, repeats, lambda _, step: seconds_of(step, num_steps, device))
        taken = fastest_attention(run, device)
        for side, took in seconds.items():
            milliseconds, speed = took / num_models * 1e3, seconds.get("products", math.nan) / took
            lines.append((str(length), side, f"{milliseconds:.3f}", f"{speed:.2f}", f"{peaks[side] / 2**20:.0f}", taken))
        lines += [(str(length), side, why, "", "", taken) for side, why in missed.items()]
        del steps, step
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    head = (
        f"{hardware(device)}, torch {torch.__version__}; stacks of {num_models} GPTs, width {model.width}, {model.depth} "
        f"layers, {tokens} tokens a step, bf16; median of {repeats} x {num_steps} steps in turns"
    )
    return f"{head}\n{aligned(lines)}"
