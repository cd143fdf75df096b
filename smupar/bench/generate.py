"""Measures how many tokens per second a GPT generates, dense and without its zeros.

All sides take turns in one process. Weights are random, and masks are smupar's. transformers' own ``generate`` runs a Llama
with the same width, depth, heads and zeros, since it has no model like the built-in GPT. The floor is the longer of two times.
One is the time to read weights, indices, keys and values once per token at the speed of memory. The other is the time for two
FLOPs per non-zero and text. A model that fits into the processor's last-level cache can be faster than the floor.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from smupar.bench.hardware import hardware
from smupar.bench.sparse.rows import Machine, measure_machine
from smupar.bench.stored import read_rows, write_rows
from smupar.execute.sparse.convert import sparsify_storage
from smupar.execute.sparse.packed import PACKED, PackedLinear, pack
from smupar.execute.timing import best_of
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.model.gpt import GPT, build
from smupar.lm.use.export import folded
from smupar.lm.use.generate import of_gpt
from smupar.output.tables import aligned
from smupar.refusals import refuse

_FILE = "generate.json"
_PROMPT = 64  # tokens
_BASELINE = "dense bf16"
Run = Callable[[int], "Took"]  # generates this many tokens of every text, after a first one


@dataclass(frozen=True)
class Speed:
    """One side at one density and batch size."""

    side: str
    width: int
    depth: int
    density: float
    batch: int
    threads: int
    median: float  # seconds per token of every text
    fastest: float
    speed: float  # median time of dense bf16 divided by this side's, in the same rounds
    fastest_speed: float
    cpu: float  # lowest time of all threads together, per token; 0 on a GPU
    num_bytes: int  # weights and indices of the whole model
    floor: float  # seconds


def bench_generate(
    *,
    repeats: int = 3,
    out: str | None = None,
    device: str | None = None,
    width: int | None = None,
    depth: int | None = None,
    densities: tuple[float, ...] | None = None,
    batches: tuple[int, ...] = (1, 32),
    tokens: int = 16,
) -> str:
    """Measures decoding. The default is a GPT of 8 layers and width 1024 on a CPU, and of 4 layers and width 4096 on a GPU.

    out   folder for generate.json, which gets each case when it is done; cases that it already has are not measured again
    """
    on_gpu = torch.cuda.is_available() if device is None else device == "cuda"
    refuse(on_gpu and not torch.cuda.is_available(), "there is no NVIDIA GPU here: leave out --device, or pass cpu")
    where = torch.device("cuda" if on_gpu else "cpu")
    width, depth = width or (4096 if on_gpu else 1024), depth or (4 if on_gpu else 8)
    config = ModelConfig(width=width, depth=depth, head_dim=min(64, width), vocab_size=256, context=2048)
    machine = _memory(measure_machine(where), where)
    rows = [] if out is None else read_rows(Speed, Path(out) / _FILE)
    cases = [(density, batch) for density in densities or (1 / 4, 1 / 8, 1 / 32) for batch in batches]
    for density, batch in tqdm(cases, desc="bench", leave=False):
        key = (width, depth, density, batch, torch.get_num_threads())
        if any((row.width, row.depth, row.density, row.batch, row.threads) == key for row in rows):
            continue
        rows += _case(config, density, batch, tokens, repeats, machine, where)
        if out is not None:
            write_rows(Path(out) / _FILE, _about_machine(where), rows)
    return _table(rows, machine, where, repeats, tokens)


def _case(
    config: ModelConfig, density: float, batch: int, tokens: int, repeats: int, machine: Machine, device: torch.device
) -> list[Speed]:
    sides = dict(_sides(config, density, batch, device))
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    cpu = dict.fromkeys(sides, math.inf)
    for _, run in sides.values():
        run(2)
    for _ in range(repeats):
        for side, (_, run) in sides.items():
            took = run(tokens)
            seconds[side].append(took.wall / tokens)
            cpu[side] = min(cpu[side], took.cpu / tokens)
    base, rows = seconds[_BASELINE], []
    cache = 2 * config.depth * config.width * batch * (_PROMPT + tokens / 2)  # keys and values that a step reads on average
    for side, (model, _) in sides.items():
        walls, size = seconds[side], _num_bytes(model)
        num_bytes = size + cache * (2 if "bf16" in side else 4)
        flops = 2 * batch * _num_kept(model)
        floor = max(num_bytes / machine.copy_bytes, flops / machine.product_flops)
        middle, least = statistics.median(walls), min(walls)
        speeds = statistics.median(base) / middle, min(base) / least
        threads = torch.get_num_threads()
        times = middle, least, *speeds, 0.0 if device.type == "cuda" else cpu[side]
        rows.append(Speed(side, config.width, config.depth, density, batch, threads, *times, size, floor))
    return rows


# Sides


def _sides(
    config: ModelConfig, density: float, batch: int, device: torch.device
) -> Iterator[tuple[str, tuple[nn.Module, Run]]]:
    """Name of each side -> its model, and the function that generates."""
    prompt = torch.randint(config.vocab_size, (batch, _PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
    run = RunConfig(model=config, base_width=min(256, config.width), sparsity=1 - density)
    with warnings.catch_warnings(action="ignore"):  # few weights per neuron are intended here
        model, plan = build(run)
    plain = GPT(replace(config, tied=False)).eval()
    plain.load_state_dict(folded(model), assign=True)
    llama = _llama(config, plain)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        side = copy.deepcopy(plain).to(device, dtype)
        yield f"dense {name}", (side, partial(_decode, side, prompt))
        if device.type == "cpu":
            side = copy.deepcopy(plain).to(dtype)
            pack(side, storage=PACKED, rows=batch)
            yield f"packed {name}", (side, partial(_decode, side, prompt))
        elif dtype == torch.bfloat16:
            side = model.to(device, dtype)
            sparsify_storage(side, plan, backend="csr", dtype=dtype)
            yield "csr bf16", (side, partial(_decode, side.eval(), prompt))
        if llama is None:
            continue
        for storage in ("dense", PACKED) if device.type == "cpu" else ("dense",):
            other = copy.deepcopy(llama).to(device, dtype)
            pack(other, storage=storage, rows=batch)
            yield f"transformers, {storage} {name}", (other, partial(_generate, other, prompt))


@dataclass(frozen=True)
class Took:
    """The time of some tokens after the first."""

    wall: float  # seconds
    cpu: float  # seconds of all threads together, which other jobs hardly change


@torch.no_grad()
def _decode(model: GPT, prompt: Tensor, num: int) -> Took:
    logits_of, clock = of_gpt(model)(None), _Clock(prompt)
    tokens = logits_of(prompt).argmax(1, keepdim=True)
    clock.put(tokens)
    for _ in range(num):
        tokens = logits_of(tokens).argmax(1, keepdim=True)
    clock.put(tokens)
    return clock.took


def _generate(model: Any, prompt: Tensor, num: int) -> Took:
    clock = _Clock(prompt)
    options = {"max_new_tokens": num + 1, "min_new_tokens": num + 1, "do_sample": False, "pad_token_id": 0}
    alone = len(prompt) == 1
    if not alone:  # transformers streams only single texts, so here the time includes the prompt
        clock.put(prompt)
    shown = _Streamer(clock) if alone else None
    model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=shown, **options)
    if not alone:
        clock.put(prompt)
    return clock.took


class _Clock:
    """Reads the clock whenever tokens arrive. Timing starts after the first tokens, which the pass over the prompt gives."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.times: list[tuple[float, float]] = []

    def put(self, tokens: Tensor) -> None:
        if self.like.is_cuda:
            torch.cuda.synchronize(self.like.device)
        self.times.append((time.perf_counter(), time.process_time()))

    @property
    def took(self) -> Took:
        first, last = self.times[0], self.times[-1]
        return Took(last[0] - first[0], last[1] - first[1])


class _Streamer:
    """Receives tokens from transformers. The prompt comes first and does not count."""

    def __init__(self, clock: _Clock) -> None:
        self.clock, self.is_prompt = clock, True

    def put(self, tokens: Tensor) -> None:
        if not self.is_prompt:
            self.clock.put(tokens)
        self.is_prompt = False

    def end(self) -> None:
        pass


def _llama(config: ModelConfig, gpt: Any) -> nn.Module | None:
    """A Llama with the sizes and the non-zeros of this GPT; None without transformers."""
    try:
        import transformers
    except ImportError:
        return None
    sizes: dict[str, Any] = {
        "hidden_size": config.width,
        "intermediate_size": config.inner_width,
        "num_hidden_layers": config.depth,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
    }
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=2048))
    model = model.to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        half = buffer.numel()  # the only buffers are the rotary frequencies
        assert "inv_freq" in name
        buffer.copy_(10000.0 ** (-torch.arange(half) / half))
    with torch.no_grad():
        for layer, block in zip(model.model.layers, gpt.blocks, strict=True):
            q, k, v = block.attention.qkv.weight.chunk(3)
            mine = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": block.attention.out.weight}
            for name, weight in mine.items():
                getattr(layer.self_attn, name).weight.copy_(weight)
            for name in ("gate", "up", "down"):
                getattr(layer.mlp, f"{name}_proj").weight.copy_(getattr(block.mlp, name).weight)
            nn.init.ones_(layer.input_layernorm.weight)
            nn.init.ones_(layer.post_attention_layernorm.weight)
        nn.init.ones_(model.model.norm.weight)
        model.model.embed_tokens.weight.copy_(gpt.embedding.weight)
        model.lm_head.weight.copy_(gpt.unembedding.weight)
    model.generation_config.eos_token_id = None
    return model.eval()


# Counting


def _num_bytes(model: nn.Module) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def _num_kept(model: nn.Module) -> int:
    """The number of stored weights that a token is multiplied by, without the embedding. In dense layers zeros are included."""
    packed = sum(module.num_kept for module in model.modules() if isinstance(module, PackedLinear))
    embeddings = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding))
    return packed + sum(parameter.numel() for parameter in model.parameters()) - embeddings


def _memory(machine: Machine, device: torch.device) -> Machine:
    """The machine's speeds. Its speed of memory is that of reading, if reading is faster than copying."""
    if device.type == "cuda":
        return machine
    big = torch.ones(2**26)
    return replace(machine, copy_bytes=max(machine.copy_bytes, big.nbytes / best_of(big.sum, 12)))


def _about_machine(device: torch.device) -> dict[str, Any]:
    versions: dict[str, str] = {"torch": str(torch.__version__)}
    with suppress(ImportError):  # the other sides need no transformers
        import transformers

        versions["transformers"] = transformers.__version__
    return {"hardware": hardware(device), "threads": torch.get_num_threads(), **versions}


def _table(rows: list[Speed], machine: Machine, device: torch.device, repeats: int, tokens: int) -> str:
    about = ", ".join(f"{name} {value}" for name, value in _about_machine(device).items())
    head = (
        f"{about}; memory {machine.copy_bytes / 1e9:.1f} GB/s, products {machine.product_flops / 1e9:.0f} GFLOP/s; {tokens} "
        f"tokens after a prompt of {_PROMPT}, {repeats} rounds in turns; speed: against {_BASELINE}; CPU ms: all threads "
        "together, for a token of every text, in the fastest round"
    )
    titles = (
        "density",
        "batch",
        "threads",
        "side",
        "tokens/s median",
        "fastest",
        "speed median",
        "fastest",
        "CPU ms",
        "MB",
        "floor ms",
    )
    lines: list[tuple[str, ...]] = [titles]
    for row in rows:
        rates = (f"{row.batch / seconds:.1f}" for seconds in (row.median, row.fastest))
        cells = f"1/{round(1 / row.density)}", str(row.batch), str(row.threads), row.side, *rates
        speeds = f"{row.speed:.2f}", f"{row.fastest_speed:.2f}"
        lines.append((*cells, *speeds, f"{row.cpu * 1e3:.2f}", f"{row.num_bytes / 1e6:.1f}", f"{row.floor * 1e3:.2f}"))
    return f"{head}\n{aligned(lines)}"
