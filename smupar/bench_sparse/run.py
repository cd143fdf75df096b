"""``bench_sparse``: everything for the device at hand, as a table, numbers and a picture."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from smupar.bench_sparse import cpu, gpu
from smupar.bench_sparse.rows import Row
from smupar.bench_sparse.show import draw, facts, table
from smupar.lm.config import ModelConfig

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
    and backward of a layer, its product alone, and steps of a stack. ``device``: default a GPU if there is one. ``out``: a
    folder for the numbers as JSON and the picture."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no NVIDIA GPU here: leave out --device, or pass cpu")
    machine = gpu.measure_machine() if device == "cuda" else cpu.measure_machine()
    rows: list[Row] = []
    if device == "cuda":
        rows = gpu.bench(
            repeats=repeats,
            widths=widths or gpu.WIDTHS,
            width=width,
            densities=densities or gpu.DENSITIES,
            tokens=tokens or 16384,
            depth=depth,
            machine=machine,
        )
    else:
        cases = [(width, density) for density in densities or _DENSITIES]
        cases += [(other, 1 / 32) for other in widths or _WIDTHS if (other, 1 / 32) not in cases]
        for at_width, density in tqdm(cases, desc="bench", leave=False):
            rows += cpu.bench_layers(at_width, density, tokens or 2048, depth, repeats, machine)
        if gpt is not None:
            rows += cpu.bench_gpt(gpt, tokens or 2048, 1 / 32, repeats)
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        numbers = {"machine": asdict(machine), **facts(repeats, device), "rows": [asdict(row) for row in rows]}
        (folder / "sparse.json").write_text(json.dumps(numbers, indent=1))
        try:
            draw(rows, width).savefig(folder / "sparse.png", dpi=120)
        except ModuleNotFoundError as error:  # the numbers do not need matplotlib
            print(f"smupar: only {folder / 'sparse.json'} was written, {error}", file=sys.stderr)
    return table(rows, machine, repeats, device)
