"""Times a layer, its product and hidden layers on a GPU by the GPU's own clock: dense bf16, our backends and cuSPARSE.

Each side is timed twice: as torch runs it, and captured in a CUDA graph. The host needs about a millisecond for one of our
layers, and a fast GPU waits for the host unless the work is captured.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from smupar.bench.sparse.rows import (
    HiddenLayers,
    Machine,
    Measured,
    Row,
    hidden_layers,
    layer_floor,
    product_floor,
    state_bytes,
    step_floor,
    synced_seconds_of,
)
from smupar.execute.cuda_graphs import captured_call
from smupar.execute.sparse import backends, compression
from smupar.execute.sparse.convert import sparsify_storage
from smupar.execute.sparse.tiles import SlicedEll, multiply, pack
from smupar.execute.timing import Call, in_turns, training_step
from smupar.model.sparse_linear import SparseLinear
from smupar.output.optional import first_line
from smupar.plan.masks.patterns import generator, parse_pattern

DENSE, CAPTURED = "dense bf16", " captured"
_GPU = torch.device("cuda")
_HALF = torch.bfloat16
_DRAWN = 1024  # size of the drawn 2:4 mask; larger masks repeat it

_T = TypeVar("_T")


def bench(
    widths: tuple[int, ...],
    densities: tuple[float, ...],
    tokens: int,
    *,
    width: int,
    depth: int,
    repeats: int,
    machine: Machine,
) -> Iterator[Measured]:
    """Measures case by case. A case that cannot be measured here is noted and skipped."""
    layers = [
        *(("2:4", "2:4-transposable", at_width, 1 / 2) for at_width in widths),
        *(("csr", "random", width, density) for density in densities),
        *(("csr", "random", at_width, 1 / 128) for at_width in widths if at_width != width or 1 / 128 not in densities),
        *(("block", f"block-{size}", 2 * width, density) for size in (64, 128) for density in (1 / 4, 1 / 8, 1 / 32)),
    ]
    stacks = [
        ("csr", "random", width, 1 / 128),
        ("2:4", "2:4-transposable", 2 * width, 1 / 2),
        ("block", "block-64", width, 1 / 8),
    ]
    cases: list[tuple[tuple[str, str, int, float], Callable[[str, Contestants, int, Machine], list[Row]]]] = [
        *((case, partial(_layer, case[1])) for case in layers),
        *((case, partial(_steps, case[1], depth)) for case in stacks),
        *((("csr", "", at_width, 1 / 128), _product) for at_width in widths),
    ]
    for (backend, _, at_width, density), measure in tqdm(cases, desc="bench", leave=False, disable=None):
        sides = Contestants(at_width, density, tokens)
        rows = sides.attempt(backend, partial(measure, backend, sides, repeats, machine))
        yield Measured(rows or [], sides.missed)
        del sides, rows
        gc.collect()  # graphs hold memory of their own
        torch.cuda.empty_cache()


class Contestants:
    """The calls to time in turns. Each side has a plain call and a captured call. A side that cannot be made or run is noted
    and left out."""

    def __init__(self, width: int, density: float, tokens: int) -> None:
        self.width, self.density, self.tokens = width, density, tokens
        self.calls: dict[str, Call] = {}
        self.peaks: dict[str, int] = {}
        self.missed: list[str] = []

    def attempt(self, side: str, what: Callable[[], _T]) -> _T | None:
        try:
            return what()
        except Exception as error:  # compilers and kernel libraries may raise anything
            kind = "" if isinstance(error, ValueError) or not str(error) else f"{type(error).__name__}: "
            where = f"{side} at {self.width}, 1/{round(1 / self.density)}"
            self.missed.append(f"not measured: {where}: {kind}{first_line(error)}")
            return None

    def add(self, side: str, call: Call) -> None:
        peak = self.attempt(side, lambda: _peak_bytes(call))
        if peak is None:
            return
        self.calls[side], self.peaks[side] = call, peak
        if graph := self.attempt(f"{side}{CAPTURED}", lambda: captured_call(call, _GPU)):
            self.calls[f"{side}{CAPTURED}"] = graph

    def rows(self, what: str, held: dict[str, int], floor: Callable[[float], float], repeats: int) -> list[Row]:
        """Times all calls. ``held`` maps a side to its bytes, and ``floor`` maps a density to seconds."""
        seconds, rows = _timed(self.calls, repeats), []
        for side, took in seconds.items():
            plain = side.removesuffix(CAPTURED)
            dense = seconds.get(DENSE + side[len(plain) :], math.nan)  # captured against captured
            share = held[plain] / held[DENSE] if plain in held and DENSE in held else math.nan
            least = floor(1.0 if plain == DENSE or plain.endswith(" dense") else self.density)
            numbers = took, dense / took, held.get(plain, 0), share, least, self.peaks[plain]
            rows.append(Row(what, self.width, self.tokens, self.density, side, *numbers))
        return rows


# A layer: forward, and backward to input and weights


def _layer(pattern: str, backend: str, sides: Contestants, repeats: int, machine: Machine) -> list[Row]:
    width, tokens = sides.width, sides.tokens
    x, grad = (torch.randn(tokens, width, device=_GPU, dtype=_HALF) for _ in range(2))
    x.requires_grad_()
    dense = _linear(width)
    sides.add(DENSE, _passes(dense, x, grad))
    held = {DENSE: dense.weight.numel() * dense.weight.element_size()}
    side = pattern if backend == "block" else backend
    layer = sides.attempt(side, lambda: _sparse_layer(backend, pattern, width, sides.density))
    if layer is not None:
        sides.add(side, _passes(layer, x, grad))
        held[side] = layer.weight.numel() * layer.weight.element_size() + layer.num_index_bytes
    return sides.rows("layer", held, lambda density: layer_floor(width, tokens, density, machine), repeats)


def _linear(width: int) -> nn.Linear:
    return nn.Linear(width, width, bias=False, device=_GPU, dtype=_HALF)


def _sparse_layer(backend: str, pattern: str, width: int, density: float) -> SparseLinear:
    layer, mask = _linear(width), _mask(pattern, width, density)
    if why := backends.refusal(backend, layer, mask, _HALF):
        raise ValueError(why)
    layer.register_buffer("weight_mask", mask)
    sparse = compression.compress(layer, mask, backend)
    sparse.index()
    return sparse


def _mask(pattern: str, width: int, density: float) -> Tensor:
    """Draws a mask. A 2:4 mask is drawn small and repeated: all its lines have the same number of weights, so this does not
    change the time. Block masks are not repeated, since repeating would leave entire lines of blocks empty."""
    if pattern == "random":
        return torch.rand(width, width, device=_GPU, generator=torch.Generator(_GPU).manual_seed(0)) < density
    size = _DRAWN if pattern.startswith("2:4") and width % _DRAWN == 0 else width
    drawn = parse_pattern(pattern).draw((size, size), (1,), Fraction(density), generator(0, "bench", pattern))
    return drawn.to(_GPU).repeat(width // size, width // size)


def _passes(layer: nn.Module, x: Tensor, grad: Tensor) -> Call:
    def call() -> None:
        layer(x).backward(grad)
        x.grad = layer.weight.grad = None  # so that the memory of a pass includes gradients

    return call


# A product


def _product(backend: str, sides: Contestants, repeats: int, machine: Machine) -> list[Row]:
    width, tokens = sides.width, sides.tokens
    mask = _mask("random", width, sides.density)
    values = torch.randn(int(mask.sum()), device=_GPU, dtype=_HALF)
    x = torch.randn(tokens, width, device=_GPU, dtype=_HALF)
    matrix = torch.randn(width, width, device=_GPU, dtype=_HALF)  # random, since a GPU multiplies zeros faster
    sides.add(DENSE, lambda: x @ matrix.T)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64, device=_GPU), mask.sum(1).cumsum(0)])
    columns = mask.nonzero()[:, 1].int()

    def packed() -> tuple[SlicedEll, Tensor]:
        index: Any = backends.kernel_of(backend, _GPU).index(starts, columns, (width, width), 0)
        return index.forward, pack(values, index.forward)

    layout_and_entries = sides.attempt(backend, packed)
    if layout_and_entries is not None:
        layout, entries = layout_and_entries
        sides.add(backend, lambda: multiply(x, layout, entries))
        sides.add(f"{backend} with packing", lambda: multiply(x, layout, pack(values, layout)))
    with warnings.catch_warnings(action="ignore"):  # torch's CSR is in beta
        peer = torch.sparse_csr_tensor(starts.int(), columns, values, (width, width), check_invariants=False)
    by_feature = x.T.contiguous()  # cuSPARSE is fastest with this layout of activations
    sides.add("cuSPARSE", lambda: peer @ by_feature)
    return sides.rows("product", {}, lambda density: product_floor(width, tokens, density, machine), repeats)


# Training steps of hidden layers: weights and AdamW in fp32, activations in bf16


def _steps(pattern: str, depth: int, backend: str, sides: Contestants, repeats: int, machine: Machine) -> list[Row]:
    width, tokens, density = sides.width, sides.tokens, sides.density
    x, grad = (torch.randn(tokens, width, device=_GPU, dtype=_HALF) for _ in range(2))
    held = {}

    def side_of(side: str) -> tuple[str, HiddenLayers]:
        dense = side == DENSE
        model, plan = hidden_layers(width, depth, 1.0 if dense else density, pattern="random" if dense else pattern)
        model.to(_GPU)
        if side not in (backend, "auto"):
            return side, model
        report = sparsify_storage(model, plan, backend=side, tokens=tokens, dtype=_HALF)
        return f"auto: {report.layers[0].backend}" if side == "auto" else side, model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*capturable=True")  # steps outside a graph are intended
        for name in (DENSE, "masked dense", backend, "auto"):
            found = sides.attempt(name, partial(side_of, name))
            if found is None:
                continue
            side, model = found
            # Steps of size 0 take the same time and leave the random weights unchanged.
            optimizer = torch.optim.AdamW(model.hidden.parameters(), lr=0.0, fused=True, capturable=True)
            sides.add(side, training_step(model, optimizer, x, grad / tokens))
            if side in sides.calls:
                held[side] = state_bytes(model, optimizer)

        return sides.rows(
            "layers", held, lambda share: step_floor(width, tokens, depth, share, machine, activation_bytes=2), repeats
        )


# Measuring


def _peak_bytes(call: Call) -> int:
    """The peak memory that a call allocates, without memory that stays allocated, such as AdamW's state."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _timed(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Median seconds of a call. Sides take turns, and each is called several times between two readings of the clock."""
    rough = {side: max(1e-6, synced_seconds_of(call, 2)) for side, call in calls.items()}
    num_calls = {side: min(50, max(2, round(8e-3 / seconds))) for side, seconds in rough.items()}  # calls in about 8 ms
    return in_turns(calls, repeats, lambda side, call: synced_seconds_of(call, num_calls[side]))
