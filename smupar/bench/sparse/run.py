"""``bench_sparse``: everything for the device at hand, as a table, numbers and a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from smupar.bench.sparse import cpu, gpu
from smupar.bench.sparse.rows import Machine, Part, measure_machine
from smupar.bench.sparse.show import draw, facts, table
from smupar.lm.config.run import ModelConfig
from smupar.lm.config.validation import refuse
from smupar.output.files import write_atomic

_DENSITIES = (1 / 2, 1 / 8, 1 / 32, 1 / 128)
_WIDTHS = (512, 1024, 2048, 4096)
_GPT = ModelConfig(width=1024, depth=8, head_dim=64, vocab_size=256)


def bench_sparse(
    *,
    repeats: int = 3,
    out: str | None = None,
    device: str | None = None,
    densities: tuple[float, ...] | None = None,
    widths: tuple[int, ...] | None = None,
    width: int = 2048,
    tokens: int | None = None,
    depth: int = 2,
    gpt: ModelConfig | None = _GPT,
) -> str:
    """Dense and sparse over density and over width. On a CPU: steps of a stack of hidden layers and of a GPT. On a GPU: forward
    and backward of a layer, steps of a stack, and a product alone. ``device``: default a GPU if there is one. ``out``: a folder
    for the numbers as JSON, written after each case, and the picture."""
    has_gpu = torch.cuda.is_available()
    device = device or ("cuda" if has_gpu else "cpu")
    refuse(device not in ("cpu", "cuda"), f"device must be cpu or cuda, got {device!r}")
    refuse(device == "cuda" and not has_gpu, "there is no NVIDIA GPU here: leave out --device, or pass cpu")
    folder = None if out is None else Path(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    machine = measure_machine(torch.device(device))
    if device == "cuda":
        sizes = (widths or gpu.WIDTHS, densities or gpu.DENSITIES, tokens or 16384)
        parts = gpu.bench(*sizes, width=width, depth=depth, repeats=repeats, machine=machine)
    else:
        sizes = (widths or _WIDTHS, densities or _DENSITIES, tokens or 2048)
        parts = _on_cpu(*sizes, width=width, depth=depth, repeats=repeats, machine=machine, gpt=gpt)
    total = Part([], [])
    for part in parts:
        total.rows.extend(part.rows)
        total.missed.extend(part.missed)
        if folder is not None:  # each time, so that an interrupted run keeps what it has
            numbers = {"machine": asdict(machine), **facts(repeats, device), **asdict(total)}
            write_atomic(folder / "sparse.json", json.dumps(numbers, indent=1))
    if folder is not None and total.rows:
        try:
            draw(total.rows, width).savefig(folder / "sparse.png", dpi=120)
        except ModuleNotFoundError as error:  # the numbers do not need matplotlib
            print(f"smupar: only {folder / 'sparse.json'} was written, {error}", file=sys.stderr)
    return table(total, machine, repeats, device)


def _on_cpu(
    widths: tuple[int, ...],
    densities: tuple[float, ...],
    tokens: int,
    *,
    width: int,
    depth: int,
    repeats: int,
    machine: Machine,
    gpt: ModelConfig | None,
) -> Iterator[Part]:
    cases = [(width, density) for density in densities]
    cases += [(other, 1 / 32) for other in widths if (other, 1 / 32) not in cases]
    for at_width, density in tqdm(cases, desc="bench", leave=False):
        yield Part(cpu.bench_layers(at_width, density, tokens, depth, repeats, machine), [])
    if gpt is not None:
        yield Part(cpu.bench_gpt(gpt, tokens, 1 / 32, repeats), [])
