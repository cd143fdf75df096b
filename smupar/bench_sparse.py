"""What sparse execution buys: training steps of hidden layers and of a GPT, dense and sparse side by side in one run.

The floor is what the machine cannot beat: activations cross memory once into and once out of every layer, weights, indices and
optimizer state once, at the speed of a copy; every non-zero takes six FLOPs for a token, at the speed of a dense product. Both
speeds are measured in the same run.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from smupar.apply import parameterize
from smupar.lm.config import ModelConfig, RunConfig
from smupar.lm.gpt import build
from smupar.optim import param_groups
from smupar.plan import Plan
from smupar.sparse.compiled import NoKernel, library
from smupar.sparse.convert import sparsify_storage
from smupar.sparse.csr import CsrLinear
from smupar.sparse.products import Torch

DENSE, OURS = "dense fp32", "csr"
_DENSITIES = (1 / 2, 1 / 8, 1 / 32, 1 / 128)
_WIDTHS = (512, 1024, 2048, 4096)
_PEERS = ("sparselab", "sparseprop")
_GPT = ModelConfig(width=1024, depth=8, head_dim=64, vocab_size=256)


@dataclass(frozen=True)
class Row:
    what: str  # "layers" or "gpt"
    width: int
    tokens: int
    density: float
    side: str
    seconds: float  # of a step, median
    speed: float  # against dense fp32 in the same rounds
    state_bytes: int  # weights, indices and AdamW's state of the hidden layers
    state_share: float  # of what dense fp32 takes
    floor_seconds: float


@dataclass(frozen=True)
class Machine:
    copy_bytes: float  # per second, read and written
    product_flops: float  # per second


class Stack(nn.Module):
    """Hidden layers of one width, as they follow each other in a network."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, width, bias=False)  # tells the plan that what follows is hidden; not called
        self.hidden = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.last = nn.Linear(width, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = F.relu(layer(x))
        return x


def bench_sparse(
    *,
    repeats: int = 3,
    out: str | None = None,
    densities: tuple[float, ...] = _DENSITIES,
    widths: tuple[int, ...] = _WIDTHS,
    width: int = 2048,
    tokens: int = 2048,
    depth: int = 2,
    gpt: ModelConfig | None = _GPT,
) -> str:
    """Steps of a stack of hidden layers over density and over width, and of a GPT: forward, backward, AdamW. ``out``: a folder
    for the numbers as JSON and the picture."""
    machine = _measure_machine()
    cases = [(width, density) for density in densities]
    cases += [(other, 1 / 32) for other in widths if (other, 1 / 32) not in cases]
    rows: list[Row] = []
    for at_width, density in tqdm(cases, desc="bench", leave=False):
        rows += _bench_layers(at_width, density, tokens, depth, repeats, machine)
    if gpt is not None:
        rows += _bench_gpt(gpt, tokens, 1 / 32, repeats)
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"machine": asdict(machine), **_facts(repeats), "rows": [asdict(row) for row in rows]}
        (folder / "sparse.json").write_text(json.dumps(facts, indent=1))
        draw(rows, width).savefig(folder / "sparse.png", dpi=120)
    return _table(rows, machine, repeats)


# Sides


def _bench_layers(width: int, density: float, tokens: int, depth: int, repeats: int, machine: Machine) -> list[Row]:
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    grad = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)) / tokens
    models: dict[str, nn.Module] = {DENSE: _stack(width, depth, 1.0)[0], "dense bf16": _stack(width, depth, 1.0)[0].bfloat16()}
    models["torch csr"] = _sparse_stack(width, depth, density, torch_kernel=True)
    models |= _peers(width, depth, density)
    models[OURS] = _sparse_stack(width, depth, density)
    steps, optimizers = {}, {}
    for side, model in models.items():
        optimizers[side] = torch.optim.AdamW(model.get_submodule("hidden").parameters(), lr=1e-3)
        dtype = torch.bfloat16 if side == "dense bf16" else torch.float32
        steps[side] = _step(model, optimizers[side], x.to(dtype), grad.to(dtype))
    seconds = _interleaved(steps, repeats)
    held = {side: _state_bytes(model, optimizers[side]) for side, model in models.items()}
    floor = {side: _floor(width, tokens, depth, density if "dense" not in side else 1.0, machine) for side in models}
    return [Row("layers", width, tokens, density, side, *_against_dense(seconds, held, side), floor[side]) for side in models]


def _against_dense(seconds: dict[str, float], held: dict[str, int], side: str) -> tuple[float, float, int, float]:
    """Seconds, speed, bytes and share of the bytes of a side, as in a ``Row``."""
    return seconds[side], seconds[DENSE] / seconds[side], held[side], held[side] / held[DENSE]


def _stack(width: int, depth: int, density: float) -> tuple[Stack, Plan]:
    model = Stack(width, depth)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        base = Stack(width // 4, depth)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few weights per neuron are what is measured here
        return model, parameterize(model, base=base, density=density, reset=False)


def _sparse_stack(width: int, depth: int, density: float, *, torch_kernel: bool = False) -> Stack:
    model, plan = _stack(width, depth, density)
    sparsify_storage(model, plan, backend="csr")
    if torch_kernel:
        for layer in model.hidden:
            assert isinstance(layer, CsrLinear)
            layer.kernel = Torch()
    return model


def _peers(width: int, depth: int, density: float) -> dict[str, nn.Module]:
    """Those that are installed, with layers of the same density."""
    found: dict[str, nn.Module] = {}
    for name in _PEERS:
        try:
            make: Any = import_module("sparseprop.modules" if name == "sparseprop" else name).SparseLinear
        except ImportError:
            continue
        model, _ = _stack(width, depth, density)
        for number, layer in enumerate(model.hidden):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's CSR is in beta
                peer = make.from_dense(layer) if name == "sparseprop" else make(width, width, bias=False, sparsity=1 - density)
            model.hidden[number] = peer
        found[name] = model
    return found


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, grad: Tensor) -> Callable[[], object]:
    x = x.requires_grad_()

    def step() -> None:
        model(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    return step


def _bench_gpt(config: ModelConfig, tokens: int, density: float, repeats: int) -> list[Row]:
    seq_len = min(256, tokens)
    text = torch.randint(config.vocab_size, (tokens // seq_len, seq_len + 1), generator=torch.Generator().manual_seed(0))
    run = RunConfig(model=config, base_width=256, sparsity=0.0, seq_len=seq_len, batch_size=len(text))
    models, optimizers = {}, {}
    for side, sparsity in ((DENSE, 0.0), ("masked dense", 1 - density), ("auto", 1 - density)):
        model, plan = build(replace(run, sparsity=sparsity))
        if side == "auto":
            sparsify_storage(model, plan, backend="auto", tokens=tokens)
        models[side], optimizers[side] = model, torch.optim.AdamW(param_groups(model, plan, lr=1e-3))

    def step(side: str) -> Callable[[], object]:
        def one() -> None:
            logits = models[side](text[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizers[side].step()
            optimizers[side].zero_grad()

        return one

    seconds = _interleaved({side: step(side) for side in models}, repeats)
    held = {side: _state_bytes(model.blocks, optimizers[side]) for side, model in models.items()}
    return [Row("gpt", config.width, tokens, density, side, *_against_dense(seconds, held, side), math.nan) for side in models]


# Measuring


def _interleaved(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {side: [] for side in steps}
    for _ in range(repeats):
        for side, step in steps.items():
            start = time.perf_counter()
            step()
            times[side].append(time.perf_counter() - start)
    return {side: statistics.median(own) for side, own in times.items()}


def _state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of hidden weights, their indices and their optimizer state; a peer's index is not counted."""
    hidden = model.hidden if isinstance(model, Stack) else model
    weights = [parameter for parameter in hidden.parameters() if parameter in optimizer.state]
    tensors = [value for weight in weights for value in (weight, *optimizer.state[weight].values()) if value.ndim]
    index = sum(layer.num_index_bytes for layer in hidden.modules() if isinstance(layer, CsrLinear))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + index


def _measure_machine() -> Machine:
    big = torch.ones(2**26)
    to, square = torch.empty_like(big), torch.randn(2048, 2048)

    def best(call: Callable[[], object]) -> float:
        return min(_seconds(call) for _ in range(12))

    return Machine(2 * 4 * 2**26 / best(lambda: to.copy_(big)), 2 * 2048**3 / best(lambda: square @ square))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _floor(width: int, tokens: int, depth: int, density: float, machine: Machine) -> float:
    num = density * width * width
    # A layer reads its input twice and the gradient of its output, and writes its output and the gradient of its input; the
    # activation function behind it does the same. Of weight, gradient and both averages each is read and all but one written.
    activations = 10 * 4 * tokens * width
    state = num * (7 * 4 + (8 if density < 1 else 0))
    return depth * max((activations + state) / machine.copy_bytes, 6 * num * tokens / machine.product_flops)


# Showing


def _facts(repeats: int) -> dict[str, Any]:
    try:
        library()
        kernel = "compiled"
    except NoKernel as why:
        kernel = f"torch: {why}"
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "kernel": kernel, "repeats": repeats}


def _table(rows: list[Row], machine: Machine, repeats: int) -> str:
    facts = _facts(repeats)
    absent = [name for name in _PEERS if name not in {row.side for row in rows}]
    lines = [
        f"CPU, {facts['threads']} threads, torch {facts['torch']}, kernel {facts['kernel']}; forward, backward and AdamW, "
        f"median of {repeats} in turns. Floor: {machine.copy_bytes / 1e9:.1f} GB/s, {machine.product_flops / 1e9:.0f} GFLOP/s. "
        "State: weights, indices and AdamW's averages of hidden layers",
        "what    width  density  side            ms a step  speed  floor ms  state MB  of dense",
    ]
    for row in rows:
        floor = "" if math.isnan(row.floor_seconds) else f"{row.floor_seconds * 1e3:.1f}"
        density = f"1/{round(1 / row.density)}"
        lines.append(
            f"{row.what:<6}  {row.width:5}  {density:>7}  {row.side:<14}  {row.seconds * 1e3:9.1f}  {row.speed:5.2f}  "
            f"{floor:>8}  {row.state_bytes / 1e6:8.2f}  {row.state_share:8.2%}"
        )
    if absent:
        lines.append(f"not installed here, so not compared: {', '.join(absent)}")
    return "\n".join(lines)


def draw(rows: list[Row], width: int) -> Any:
    """Time of a step against density at one width, and against width at one density, with the floor; dense fp32 at that one
    width takes 1."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the picture needs matplotlib: pip install 'smupar[plot]'") from error
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    layers = [row for row in rows if row.what == "layers"]
    unit = statistics.median(row.seconds for row in layers if row.side == DENSE and row.width == width)
    for panel, axis, chosen in (
        (left, "density", [row for row in layers if row.width == width]),
        (right, "width", [row for row in layers if row.density == 1 / 32]),
    ):
        for side in dict.fromkeys(row.side for row in chosen):
            points = sorted((getattr(row, axis), row.seconds / unit) for row in chosen if row.side == side)
            panel.plot(*zip(*points, strict=True), marker="o", markersize=4, label="smupar csr" if side == OURS else side)
        floor = sorted((getattr(row, axis), row.floor_seconds / unit) for row in chosen if row.side == OURS)
        panel.plot(*zip(*floor, strict=True), color="black", linestyle="--", label="floor of csr")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.grid(True, alpha=0.3)
        ticks = [x for x, _ in floor]
        panel.set_xticks(ticks, [f"1/{round(1 / x)}" if axis == "density" else str(x) for x in ticks])
        panel.minorticks_off()
        panel.set_xlabel(axis)
    left.invert_xaxis()  # sparser to the right
    left.set_ylabel(f"time of a training step, dense fp32 at {width} = 1")
    left.set_title(f"width {width}", fontsize=10)
    right.set_title("density 1/32", fontsize=10)
    right.legend(fontsize=8)
    return figure
