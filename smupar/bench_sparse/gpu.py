"""A layer, its product and hidden layers on a GPU: dense bf16, our backends, cuSPARSE. Timed by the GPU's own clock.

A layer is timed as torch runs it, and captured in a CUDA graph where cuSPARSELt is in it: its set-up on the host takes about
0.34 ms for each product, during which a GPU that is fast enough waits.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor, nn
from tqdm import tqdm

from smupar.bench_sparse.rows import (
    Machine,
    Row,
    against_dense,
    layer_floor,
    product_floor,
    stack,
    state_bytes,
    step_floor,
    training_step,
)
from smupar.masks import generator, parse_pattern
from smupar.sparse.backends import BACKENDS
from smupar.sparse.convert import sparsify_storage
from smupar.sparse.linear import SparseLinear
from smupar.sparse.products import Sides
from smupar.sparse.tiles import multiply, pack, slices, tile_tokens

DENSE = "dense bf16"
DENSITIES = (1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128)
WIDTHS = (1024, 2048, 4096, 8192)
_BLOCK_DENSITIES = (1 / 4, 1 / 8, 1 / 32)
_GPU = torch.device("cuda")
_ROUND_MS = 8.0  # of calls between two looks at the clock

Call = Callable[[], object]


def bench(
    *,
    repeats: int,
    widths: tuple[int, ...],
    width: int,
    densities: tuple[float, ...],
    tokens: int,
    depth: int,
    machine: Machine,
) -> list[Row]:
    patterns: list[tuple[str, str, int, float]] = [("2:4", "2:4-transposable", one, 1 / 2) for one in widths]
    patterns += [("csr", "random", width, density) for density in densities]
    patterns += [("csr", "random", one, 1 / 128) for one in widths if (one, 1 / 128) not in {(width, d) for d in densities}]
    patterns += [("block", f"block-{size}", 2 * width, density) for size in (64, 128) for density in _BLOCK_DENSITIES]
    rows: list[Row] = []
    for backend, pattern, at_width, density in tqdm(patterns, desc="bench layers", leave=False):
        rows += _layer(backend, pattern, at_width, density, tokens, repeats, machine)
    for at_width in widths:
        rows += _product(at_width, 1 / 128, tokens, repeats, machine)
    stacks = (
        ("csr", "random", width, 1 / 128),
        ("2:4", "2:4-transposable", 2 * width, 1 / 2),
        ("block", "block-64", width, 1 / 8),
    )
    for backend, pattern, at_width, density in tqdm(stacks, desc="bench steps", leave=False):
        rows += _steps(backend, pattern, at_width, density, tokens, depth, repeats, machine)
    return rows


# A layer: forward, and backward to input and weights


def _layer(backend: str, pattern: str, width: int, density: float, tokens: int, repeats: int, machine: Machine) -> list[Row]:
    mask = _mask(pattern, width, density)
    layers = {DENSE: _linear(width), pattern if backend == "block" else backend: _linear(width)}
    for side, layer in layers.items():
        if side != DENSE:
            layer.register_buffer("weight_mask", mask)
            BACKENDS[backend].compress(layer, mask)
    x, grad = (torch.randn(tokens, width, device=_GPU, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    calls = {side: _passes(layer, x, grad) for side, layer in layers.items()}
    if backend == "2:4":
        calls |= {f"{side} captured": graph for side, call in calls.items() if (graph := _captured(call))}
    seconds = _timed(calls, repeats)
    num = sum(value.numel() for value in layers[DENSE].parameters())
    dense_bytes = 2 * num
    rows = []
    for side in calls:
        layer = layers[side.removesuffix(" captured")]
        against = f"{DENSE} captured" if side.endswith(" captured") and f"{DENSE} captured" in seconds else DENSE
        held = dense_bytes
        if isinstance(layer, SparseLinear):
            held = layer.weight.numel() * layer.weight.element_size() + layer.num_index_bytes
        floor = layer_floor(width, tokens, 1.0 if side.startswith(DENSE) else density, machine)
        speed = seconds[against] / seconds[side]
        rows.append(Row("layer", width, tokens, density, side, seconds[side], speed, held, held / dense_bytes, floor))
    return rows


def _linear(width: int) -> nn.Module:
    return nn.Linear(width, width, bias=False, device=_GPU, dtype=torch.bfloat16)


def _mask(pattern: str, width: int, density: float) -> Tensor:
    """Drawn small and repeated: a large 2:4 mask takes the host seconds, and the kernels do not see the difference."""
    if pattern == "random":
        return torch.rand(width, width, device=_GPU) < density
    size = min(width, 1024)
    drawn = parse_pattern(pattern).draw((size, size), (1,), Fraction(density), generator(0, "bench", pattern))
    return drawn.to(_GPU).repeat(width // size, width // size)


def _passes(layer: nn.Module, x: Tensor, grad: Tensor) -> Call:
    def call() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(grad)

    return call


def _captured(call: Call) -> Call | None:
    """The same as a CUDA graph, or None where it cannot be captured."""
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    except RuntimeError as error:
        warnings.warn(f"not captured: {str(error).splitlines()[0]}", stacklevel=2)
        return None
    return graph.replay


# A product


def _product(width: int, density: float, tokens: int, repeats: int, machine: Machine) -> list[Row]:
    mask = _mask("random", width, density)
    values = torch.randn(int(mask.sum()), device=_GPU, dtype=torch.bfloat16)
    matrix = torch.zeros(width, width, device=_GPU, dtype=torch.bfloat16).masked_scatter_(mask, values)
    x = torch.randn(tokens, width, device=_GPU, dtype=torch.bfloat16)
    calls: dict[str, Call] = {DENSE: lambda: x @ matrix.T}
    tile = tile_tokens(width)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64, device=_GPU), mask.sum(1).cumsum(0)])
    columns = mask.nonzero()[:, 1].int()
    if tile is not None:
        side = slices(Sides.of(starts, columns, (width, width), 0).by_output, width, tile)
        entries = pack(values, side)
        calls["csr"] = lambda: multiply(x, side, entries)
        calls["csr with packing"] = lambda: multiply(x, side, pack(values, side))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's CSR is in beta
        peer = torch.sparse_csr_tensor(starts.int(), columns, values, (width, width), check_invariants=False)
    turned = x.T.contiguous()
    calls["cuSPARSE"] = lambda: peer @ turned  # with activations as it likes them, feature by feature
    seconds = _timed(calls, repeats)
    rows = []
    for name in calls:
        floor = product_floor(width, tokens, 1.0 if name == DENSE else density, machine)
        rows.append(
            Row("product", width, tokens, density, name, seconds[name], seconds[DENSE] / seconds[name], 0, math.nan, floor)
        )
    return rows


# Training steps of hidden layers: weights and AdamW in fp32, activations in bf16


def _steps(
    backend: str, pattern: str, width: int, density: float, tokens: int, depth: int, repeats: int, machine: Machine
) -> list[Row]:
    x, grad = (torch.randn(tokens, width, device=_GPU, dtype=torch.bfloat16) for _ in range(2))
    calls: dict[str, Call] = {}
    models, optimizers, chosen = {}, {}, ""
    for side in (DENSE, "masked dense", backend, "auto"):
        model, plan = stack(width, depth, 1.0 if side == DENSE else density, pattern="random" if side == DENSE else pattern)
        model.to(_GPU)
        if side in (backend, "auto"):
            report = sparsify_storage(model, plan, backend=side, tokens=tokens, dtype=torch.bfloat16)
            chosen = report.layers[0].backend
        side = f"auto: {chosen}" if side == "auto" else side
        optimizers[side] = torch.optim.AdamW(model.hidden.parameters(), lr=1e-3, fused=True)
        models[side], calls[side] = model, training_step(model, optimizers[side], x, grad / tokens)
    seconds = _timed(calls, repeats)
    held = {side: state_bytes(model, optimizers[side]) for side, model in models.items()}
    rows = []
    for side in models:
        share = 1.0 if side.endswith("dense") or side == DENSE else density
        floor = step_floor(width, tokens, depth, share, machine, activation_bytes=2)
        rows.append(Row("layers", width, tokens, density, side, *against_dense(seconds, held, side, DENSE), floor))
    return rows


# Measuring


def _timed(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Median seconds of a call; sides in turns, each several times between two looks at the clock."""
    nums = {}
    for side, call in calls.items():
        for _ in range(3):
            call()
        nums[side] = min(50, max(2, round(_ROUND_MS / max(1e-3, _milliseconds(call, 2)))))
    times: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range(repeats):
        for side, call in calls.items():
            times[side].append(_milliseconds(call, nums[side]) / 1e3)
    return {side: statistics.median(own) for side, own in times.items()}


def _milliseconds(call: Call, num: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(num):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / num


def measure_machine() -> Machine:
    big = torch.ones(2**28, device=_GPU)
    to, square = torch.empty_like(big), torch.randn(8192, 8192, device=_GPU, dtype=torch.bfloat16)

    def best(call: Call) -> float:
        call()
        return min(_milliseconds(call, 5) for _ in range(3)) / 1e3

    return Machine(2 * 4 * 2**28 / best(lambda: to.copy_(big)), 2 * 8192**3 / best(lambda: square @ square))
