"""``bench_sparse`` runs all cases for a device. It returns a table, and writes numbers and a picture if it is asked to."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from smupar.bench.sparse import cpu, gpu
from smupar.bench.sparse.rows import Machine, Measured, Row, measure_machine
from smupar.execute.sparse.library import NoKernel, library
from smupar.lm.config.run_config import ModelConfig
from smupar.output.files import write_atomic
from smupar.output.pictures import new_figure, save_figure
from smupar.refusals import refuse

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
    """Compares dense and sparse execution over density and over width. On a CPU it times steps of a stack of hidden layers and
    of a GPT; on a GPU, forward and backward of a layer, steps of a stack, and a product.

    device  "cpu" or "cuda"; by default a GPU if there is one
    out     folder for the numbers as JSON, written after each case, and for the picture
    """
    has_gpu = torch.cuda.is_available()
    device = device or ("cuda" if has_gpu else "cpu")
    refuse(device not in ("cpu", "cuda"), f"device must be cpu or cuda, got {device!r}")
    refuse(device == "cuda" and not has_gpu, "there is no NVIDIA GPU here: leave out --device, or pass cpu")
    folder = None if out is None else Path(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    machine = measure_machine(torch.device(device))
    if device == "cuda":
        sizes = widths or (1024, 2048, 4096, 8192), densities or (1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128), tokens or 16384
        parts = gpu.bench(*sizes, width=width, depth=depth, repeats=repeats, machine=machine)
    else:
        sizes = widths or (512, 1024, 2048, 4096), densities or (1 / 2, 1 / 8, 1 / 32, 1 / 128), tokens or 2048
        parts = _on_cpu(*sizes, width=width, depth=depth, repeats=repeats, machine=machine, gpt=gpt)
    total = Measured([], [])
    for part in parts:
        total.rows.extend(part.rows)
        total.missed.extend(part.missed)
        if folder is not None:  # written after each case, so that an interrupted run keeps its results
            numbers = {"machine": asdict(machine), **about_machine(repeats, device), **asdict(total)}
            write_atomic(folder / "sparse.json", json.dumps(numbers, indent=1))
    if folder is not None and total.rows:
        try:
            save_figure(draw(total.rows, width), folder / "sparse.png", dpi=120)
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
) -> Iterator[Measured]:
    cases = [(width, density) for density in densities]
    cases += [(other, 1 / 32) for other in widths if (other, 1 / 32) not in cases]
    for at_width, density in tqdm(cases, desc="bench", leave=False, disable=None):
        yield Measured(cpu.bench_layers(at_width, density, tokens, depth, repeats, machine), [])
    if gpt is not None:
        yield Measured(cpu.bench_gpt(gpt, tokens, 1 / 32, repeats), [])


# Table and picture


def about_machine(repeats: int, device: str) -> dict[str, Any]:
    about: dict[str, Any] = {"torch": torch.__version__, "repeats": repeats, "device": device}
    if device == "cuda":
        return {**about, "name": torch.cuda.get_device_name()}
    try:
        library()
        kernel = "compiled"
    except NoKernel as why:
        kernel = f"torch: {why}"
    return {**about, "threads": torch.get_num_threads(), "kernel": kernel}


def table(measured: Measured, machine: Machine, repeats: int, device: str) -> str:
    rows, about, on_gpu = measured.rows, about_machine(repeats, device), device == "cuda"
    floor = (
        f"Floor: the least time that this machine's {machine.copy_bytes / 1e9:.1f} GB/s and "
        f"{machine.product_flops / 1e9:.0f} GFLOP/s, both measured, allow. "
    )
    if on_gpu:
        head = (
            f"{about['name']}, torch {about['torch']}; layer: forward and backward in bf16, product: forward, layers: a "
            "training step (weights and fused AdamW fp32, autocast bf16). What is called captured ran as a CUDA graph and "
            "is compared with dense captured, everything else with dense bf16. "
            f"Times are medians of {repeats} rounds in turns. {floor}"
            "State: weights and indices, and for layers also AdamW's averages. Peak: what a call allocates on top of that"
        )
    else:
        head = (
            f"CPU, {about['threads']} threads, torch {about['torch']}, kernel {about['kernel']}; forward, backward and AdamW, "
            f"median of {repeats} in turns. {floor}State: weights, indices and AdamW's averages of hidden layers"
        )
    long = max([14, *(len(row.side) for row in rows)])
    peak = "  peak MB" if on_gpu else ""
    lines = [head, f"what     width  density  {'side':<{long}}  ms a step   speed  floor ms{peak}  state MB  of dense"]
    lines += [*(_line(row, long, on_gpu) for row in rows), *measured.missed]
    absent = [name for name in cpu.PEERS if name not in {row.side for row in rows}]
    if absent and not on_gpu:
        lines.append(f"not installed here, so not compared: {', '.join(absent)}")
    return "\n".join(lines)


def _line(row: Row, long: int, on_gpu: bool) -> str:
    digits = 1 if row.seconds > 0.1 else 3
    floor = "" if math.isnan(row.floor_seconds) else f"{row.floor_seconds * 1e3:.{digits}f}"
    peak = f"{row.peak_bytes / 1e6:7.1f}  " if on_gpu else ""
    state = f"{row.state_bytes / 1e6:8.2f}  {row.state_share:8.2%}" if row.state_bytes else ""
    return (
        f"{row.what:<7}  {row.width:5}  {f'1/{round(1 / row.density)}':>7}  {row.side:<{long}}  "
        f"{row.seconds * 1e3:9.{digits}f}  {row.speed:6.2f}  {floor:>8}  {peak}{state}"
    ).rstrip()


def draw(rows: list[Row], width: int) -> Any:
    """Draws time against density at one width, and against width at one density, with the floor. Times are relative to dense at
    that width. On a CPU these are times of training steps, on a GPU of a layer's forward and backward passes."""
    figure = new_figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    on_gpu = any(row.what == "layer" for row in rows)
    what, dense, density = ("layer", gpu.DENSE, 1 / 128) if on_gpu else ("layers", cpu.DENSE, 1 / 32)
    shown = [row for row in rows if row.what == what]
    units = [row.seconds for row in shown if row.side == dense and row.width == width]
    unit = statistics.median(units) if units else 1.0  # dense was not measured: plot seconds
    at_width = [row for row in shown if row.width == width and not (on_gpu and row.density == 1 / 2)]
    at_density = [row for row in shown if row.density == density or row.side.startswith("2:4")]
    plain = dict.fromkeys(row.side.removesuffix(gpu.CAPTURED) for row in [*at_width, *at_density])
    colors = {side: f"C{number}" for number, side in enumerate(plain)}
    for panel, axis, chosen in ((left, "density", at_width), (right, "width", at_density)):
        _draw_sides(panel, axis, chosen, unit, colors, cpu.OURS if on_gpu else "smupar csr")
    left.invert_xaxis()  # sparser to the right
    what_ran = "forward and backward" if on_gpu else "time of a training step"
    left.set_ylabel(f"{what_ran}, {dense} at {width} = 1" if units else f"{what_ran}, seconds")
    left.set_title(f"width {width}", fontsize=10)
    right.set_title(f"density 1/{round(1 / density)}{', and 2:4' if on_gpu else ''}", fontsize=10)
    if at_density:
        figure.legend(*right.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return figure


def _draw_sides(panel: Any, axis: str, chosen: list[Row], unit: float, colors: dict[str, str], ours: str) -> None:
    """Draws a line for each side over one axis, and the floor. The side csr is called ``ours``."""
    for side in dict.fromkeys(row.side for row in chosen):
        points = sorted((getattr(row, axis), row.seconds / unit) for row in chosen if row.side == side)
        label, color = ours if side == cpu.OURS else side, colors[side.removesuffix(gpu.CAPTURED)]
        line = ":" if side.endswith(gpu.CAPTURED) else "-"
        panel.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, linestyle=line, label=label)
    floor = sorted((getattr(row, axis), row.floor_seconds / unit) for row in chosen if row.side == cpu.OURS)
    panel.plot(*zip(*floor, strict=True), color="black", linestyle="--", label="floor of csr")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}")
    panel.grid(True, alpha=0.3)
    ticks = [x for x, _ in floor]
    panel.set_xticks(ticks, [f"1/{round(1 / x)}" if axis == "density" else str(x) for x in ticks])
    panel.minorticks_off()
    panel.set_xlabel(axis)
