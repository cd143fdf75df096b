"""Benchmarks of complete models. All variants are measured in one run and reported as ratios. Benchmarks assert nothing."""

from __future__ import annotations

import itertools
import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from smupar.bench.attention import bench_attention
from smupar.bench.generate import bench_generate
from smupar.bench.random_text import random_text
from smupar.bench.sparse.compare import bench_sparse
from smupar.bench.storage import bench_storage
from smupar.execute.compiler_cache import guard_compiler_cache
from smupar.execute.timing import Call, best_of, in_turns, seconds_of
from smupar.lm.config.presets import gpt_610m
from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.data.batches import read_batch
from smupar.lm.data.shard_writer import write_tokens
from smupar.lm.data.shards import TokenizerInfo
from smupar.lm.data.tokens import open_tokens
from smupar.lm.model.cost import peak_flops
from smupar.lm.model.gpt import GPT, on_meta, plan_on_meta, use_flex_attention
from smupar.lm.run.distributed import World, pick_device
from smupar.lm.run.stack import GPTStack
from smupar.lm.run.step import Stepper, next_token_loss
from smupar.model.attached import mask_of
from smupar.model.parameterize import parameterize
from smupar.refusals import refuse
from smupar.updates.trace import Trace

_610M = ModelConfig(width=2048, depth=10, head_dim=64, vocab_size=50257)
_70B = ModelConfig(width=8192, depth=87, head_dim=128, vocab_size=32000)
_BASE_WIDTH = 256


def bench_parameterize(*, repeats: int = 3, model: ModelConfig = _610M, planned: ModelConfig = _70B) -> str:
    """Times ``parameterize`` on a GPT of 610M parameters against ``normal_`` of the same tensors. Also times a plan for a GPT
    of 70B parameters."""
    about_plan = _bench_plan(planned)  # first, so that its memory shows in the peak of the process
    densities = (1.0, 0.5, 0.0625)
    plain, ours = math.inf, dict.fromkeys(densities, math.inf)
    extra_bytes = {}
    base = on_meta(replace(model, width=_BASE_WIDTH))
    for density in tqdm(densities * repeats, desc="bench", leave=False, disable=None):
        gpt = GPT(model)
        plain = min(plain, seconds_of(partial(_fill, gpt)))
        ours[density] = min(ours[density], seconds_of(partial(parameterize, gpt, base=base, density=density)))
        masks = [mask for name, _ in gpt.named_parameters() if (mask := mask_of(gpt, name)) is not None]
        extra_bytes[density] = sum(mask.nbytes for mask in masks) / max(1, sum(mask.numel() for mask in masks))
    return "\n".join(
        [
            about_plan,
            f"GPT of {_num_parameters(model):,} parameters, CPU, {torch.get_num_threads()} threads, fastest of {repeats}:",
            f"  normal_ of every parameter      {plain:6.2f} s  1.00x",
            *(
                f"  parameterize, density {density:<8g}  {seconds:6.2f} s  {seconds / plain:.2f}x, "
                f"{extra_bytes[density]:.2f} extra bytes per masked weight"
                for density, seconds in ours.items()
            ),
        ]
    )


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.normal_()


def _bench_plan(model: ModelConfig) -> str:
    before, start = _peak_mib(), time.perf_counter()
    plan = plan_on_meta(RunConfig(model=model, base_width=_BASE_WIDTH, sparsity=0.9375))
    seconds, total = time.perf_counter() - start, sum(math.prod(row.shape) for row in plan)
    return f"plan for {total / 1e9:.1f}B parameters on meta: {seconds:.2f} s, {_peak_mib() - before:.0f} MiB at the peak"


def _peak_mib() -> float:
    """Peak resident memory of this process; Linux counts it in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


# Training


def bench_train(*, repeats: int = 3, run: RunConfig | None = None, micro_batch: int = 16, num_steps: int = 4) -> str:
    """Times steps of the 610M model with smupar's masks against the same model without smupar, in turn. Both are measured with
    plain causal attention and with ALiBi."""
    device, run, how = _large_run(run, micro_batch)
    peak = peak_flops(device, run.dtype)
    tokens = run.batch_size * run.seq_len
    lines = [
        f"{_device_name(device)}, torch {torch.__version__}, {run.dtype}, {run.batch_size} x {run.seq_len} tokens a step in "
        f"micro-batches of {micro_batch}, median of {repeats} x {num_steps} steps; peak {peak / 1e12:.0f} TFLOP/s, 6 N tokens"
    ]
    for positions, title in (("learned", "causal attention, learned positions"), ("alibi", "ALiBi")):
        config = replace(run, model=replace(run.model, positions=positions, context=run.seq_len))  # type: ignore[arg-type]
        sides = {"without smupar": _plain_step(config, how, device), "sparsity 0.75": _smupar_step(config, how, device)}
        seconds, _ = _compare(sides, repeats, num_steps, device, warm_up=3)
        num_parameters = _num_parameters(config.model)
        lines.append(f"{title}, {num_parameters:,} parameters:")
        lines += [
            f"  {side:<15} {median * 1e3:7.1f} ms a step  {tokens / median:9.0f} tokens/s  "
            f"{6 * num_parameters * tokens / median / peak:.1%} of peak  speed {seconds['without smupar'] / median:.3f}"
            for side, median in seconds.items()
        ]
    return "\n".join(lines)


def _large_run(run: RunConfig | None, micro_batch: int) -> tuple[torch.device, RunConfig, Execution]:
    """The device, the run at sparsity 0.75 (by default the 610M model), and its execution with two micro-batches."""
    device = pick_device("auto")
    refuse(
        run is None and device.type != "cuda",
        "the 610M model needs a GPU, and torch sees none: try bench parameterize, data or sparse",
    )
    run = replace(run or gpt_610m(), sparsity=0.75, batch_size=2 * micro_batch)
    return device, run, Execution(device=str(device), micro_batch=micro_batch)


def _smupar_step(config: RunConfig, how: Execution, device: torch.device) -> Call:
    return partial(Stepper(config, how, World(0, 1, device, "ddp"), random_text(config)).step, 0)


def _plain_step(config: RunConfig, how: Execution, device: torch.device) -> Call:
    """The step that a user would write without smupar: the same GPT, AdamW, autocast and compile, but no masks, groups or
    factors."""
    model = on_meta(config.model).to_empty(device=device)
    model.tie()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    for name, scale in model.named_buffers():
        assert name.endswith("attention.scale")
        nn.init.constant_(scale, config.model.head_dim**-0.5)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=config.betas, fused=on_gpu)
    guard_compiler_cache()
    loss_fn = torch.compile(next_token_loss, dynamic=False) if on_gpu else next_token_loss
    if on_gpu and config.model.positions == "alibi":
        use_flex_attention(model, config.seq_len)
    text = random_text(config).train

    def step() -> None:
        both = read_batch(text, seed=0, step=0, batch_size=config.batch_size, seq_len=config.seq_len, to=lambda t: t.to(device))
        inputs, targets = (part.split(how.micro_batch) for part in both)
        for x, y in zip(inputs, targets, strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
                loss = loss_fn(model, (x, y)) / len(inputs)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _compare(
    sides: Mapping[str, Call], repeats: int, num_steps: int, device: torch.device, *, warm_up: int
) -> tuple[dict[str, float], int]:
    """The median seconds of a step of each side, measured after steps that compile and warm up. Also the bytes by which the
    GPU's peak memory grew during the measurement."""
    for step in sides.values():
        seconds_of(step, warm_up, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    seconds = in_turns(sides, repeats, lambda _, step: seconds_of(step, num_steps, device))
    return seconds, torch.cuda.max_memory_allocated(device) - peak if device.type == "cuda" else 0


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _num_parameters(config: ModelConfig) -> int:
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


# Measured updates


def bench_updates(*, repeats: int = 3, run: RunConfig | None = None, micro_batch: int = 16, num_steps: int = 10) -> str:
    """Times steps of the 610M model that follow a trace against the same steps without a trace, in turn. Every fifth step
    measures its update."""
    device, run, how = _large_run(run, micro_batch)
    hidden = [row for row in plan_on_meta(run) if row.role == "hidden"]
    trace = Trace(run.steps, [0], {row.name: [1.0] for row in hidden}, {row.name: row.shape for row in hidden}, run.optimizer)
    with tempfile.TemporaryDirectory() as folder:
        trace.save(f"{folder}/trace.json")
        sides = {"plain": _smupar_step(run, how, device)}
        sides["following"] = _smupar_step(replace(run, follow=f"{folder}/trace.json"), how, device)
    seconds, grown = _compare(sides, repeats, num_steps, device, warm_up=21)  # each of the first steps measures its update
    plain, following = seconds["plain"], seconds["following"]
    return (
        f"{_device_name(device)}, torch {torch.__version__}, {run.dtype}, {_num_parameters(run.model):,} parameters, "
        f"{run.batch_size} x {run.seq_len} tokens a step, median of {repeats} x {num_steps} steps: plain {plain * 1e3:.1f} ms, "
        f"following {following * 1e3:.1f} ms, {following / plain - 1:+.2%}; memory at the peak grew by "
        f"{grown / 2**20:.0f} MiB over {repeats * num_steps} further steps"
    )


# Sweeps


_CASES = ((256, 512), (256, 8192), (512, 8192), (1024, 8192), (2048, 8192))


def bench_sweep(*, repeats: int = 3, cases: Sequence[tuple[int, int]] = _CASES, num_steps: int = 20) -> str:
    """Milliseconds per step and model of a 2-layer GPT with a vocabulary of 8192, for several (width, tokens per step). It
    compares four ways: the compiled loop that people write, a captured step for one model at a time (as in ``train --graph``),
    the serial engine, and many models stacked."""
    device = pick_device("auto")
    how = Execution(device=str(device))
    peak = peak_flops(device, "bf16")
    lines = [
        f"{_device_name(device)}, torch {torch.__version__}, 2-layer GPT, vocabulary 8192, T = 256, bf16, median of "
        f"{repeats} x {num_steps} steps, ms per step and model; share of {peak / 1e12:.3g} TFLOP/s counts 6 N tokens",
        "width  tokens  plain loop   captured     serial    stacked    K  gain on plain  on best single  share of peak",
    ]
    for width, tokens in cases:
        run = RunConfig(
            model=ModelConfig(width=width, depth=2, head_dim=64, vocab_size=8192),
            base_width=256,
            sparsity=0.75,
            dtype="bf16",
            seq_len=256,
            batch_size=tokens // 256,
        )
        text, count = random_text(run), {256: 64, 512: 32, 1024: 16}.get(width, 8)
        runs = [replace(run, lr=run.lr * 2 ** (-number / count)) for number in range(count)]
        sides: dict[str, Call] = {
            "plain": _plain_step(run, replace(how, micro_batch=run.batch_size), device),
            "captured": _smupar_step(run, replace(how, graph=device.type == "cuda"), device),
            "serial": partial(GPTStack(runs[:1], text, device).step, 0),
            "stacked": partial(GPTStack(runs, text, device).step, 0),
        }
        seconds, _ = _compare(sides, repeats, num_steps, device, warm_up=6)
        seconds_of_run = {side: median / (count if side == "stacked" else 1) for side, median in seconds.items()}
        single, stacked = min(seconds_of_run["captured"], seconds_of_run["serial"]), seconds_of_run["stacked"]
        share = 6 * _num_parameters(run.model) * tokens / min(single, stacked) / peak
        lines.append(
            f"{width:5}  {tokens:6}  {'  '.join(f'{value * 1e3:9.3f}' for value in seconds_of_run.values())}  {count:3}  "
            f"{seconds_of_run['plain'] / stacked:13.2f}  {single / stacked:14.2f}  {share:13.1%}"
        )
    return "\n".join(lines)


# Data


def bench_data(*, repeats: int = 3, num_tokens: int = 200_000_000, batch_size: int = 504, seq_len: int = 2048) -> str:
    """Times batches of the paper's size from shards of 16-bit tokens on disk, with a warm page cache. Reports the fastest of
    ``repeats`` rounds of ten batches."""
    with tempfile.TemporaryDirectory() as folder:
        random_tokens = np.random.default_rng(0).integers(50257, size=num_tokens, dtype=np.uint16)
        write_tokens(folder, random_tokens, TokenizerInfo("random", 50257, None, ""), shard_tokens=num_tokens // 4)
        del random_tokens
        tokens = open_tokens(folder)
        steps = itertools.count()
        best = best_of(
            lambda: read_batch(tokens, seed=0, step=next(steps), batch_size=batch_size, seq_len=seq_len), repeats, 10
        )
    speed = batch_size * seq_len / best / 1e6
    return f"batches of {batch_size} x {seq_len} from {num_tokens:,} tokens on disk: {speed:.0f} million tokens/s"


BENCHES: dict[str, Callable[..., str]] = {
    "parameterize": bench_parameterize,
    "train": bench_train,
    "updates": bench_updates,
    "sweep": bench_sweep,
    "data": bench_data,
    "sparse": bench_sparse,
    "generate": bench_generate,
    "attention": bench_attention,
    "storage": bench_storage,  # of `bench train --storage`
}
