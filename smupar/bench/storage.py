"""Times training steps of complete GPTs: dense, and with layers that keep only their non-zeros.

Each row compares one side, a named backend or the choice of ``auto``, with the dense model; both take turns in one process. The
dense model has no masks, since a GPU multiplies zeros faster than other numbers, and masks would make the dense side look too
fast. A row is written as soon as it is measured, and is not measured again. So you can stop the benchmark at any time.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from smupar.bench.hardware import hardware
from smupar.bench.random_text import random_text
from smupar.bench.sparse.rows import Machine, measure_machine
from smupar.bench.stored import read_rows, write_rows
from smupar.execute.timing import in_turns, seconds_of
from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig, StorageName
from smupar.lm.model.cost import estimate
from smupar.lm.run.distributed import World
from smupar.lm.run.step import Stepper
from smupar.output.optional import first_line
from smupar.output.tables import aligned
from smupar.refusals import refuse

_FILE = "storage.json"
_WARM_UP = 5  # steps: with them a step is compiled and captured
_CSR = tuple(("csr", "random", 1 / 2**power) for power in range(3, 8))
_ON_GPU = (("2:4", "2:4-transposable", 1 / 2), ("block", "block-64", 1 / 8), *reversed(_CSR))
_ON_CPU = tuple(reversed(_CSR))


@dataclass(frozen=True)
class StorageCase:
    """The case that a row measures. Equal cases are measured once."""

    width: int
    depth: int
    tokens: int  # of a step
    seq_len: int
    pattern: str
    density: float
    storage: StorageName
    captured: bool
    threads: int  # 0 on a GPU


@dataclass(frozen=True)
class StepTime:
    case: StorageCase
    stored: str  # number of layers in each backend
    seconds: float  # median of a step
    dense_seconds: float  # of the dense model, in the same rounds
    floor_seconds: float
    dense_floor_seconds: float

    @property
    def speed(self) -> float:
        return self.dense_seconds / self.seconds


def bench_storage(
    *,
    repeats: int = 3,
    out: str | None = None,
    device: str | None = None,
    widths: tuple[int, ...] | None = None,
    depth: int = 4,
    tokens: int | None = None,
    seq_len: int | None = None,
    num_steps: int | None = None,
) -> str:
    """Compares training steps of GPTs that keep only their non-zeros with dense ones: on a GPU in bf16, compiled, with and
    without a CUDA graph; on a CPU in fp32.

    out   folder for storage.json, which grows with each row
    """
    on_gpu = torch.cuda.is_available() if device is None else device == "cuda"
    refuse(on_gpu and not torch.cuda.is_available(), "there is no NVIDIA GPU here: leave out --device, or pass cpu")
    where = torch.device("cuda" if on_gpu else "cpu")
    tokens, seq_len = tokens or (16384 if on_gpu else 2048), seq_len or (2048 if on_gpu else 256)
    sizes = widths or ((4096, 2048, 1024) if on_gpu else (1024, 512))
    cases = [case for width in sizes for case in _cases(width, depth, tokens, seq_len, on_gpu=on_gpu)]
    rows, missed = [] if out is None else read_rows(StepTime, Path(out) / _FILE), list[str]()
    machine = measure_machine(where)
    measured = {row.case for row in rows}
    for case in tqdm([case for case in cases if case not in measured], desc="bench", leave=False, disable=None):
        try:
            rows.append(_row(case, where, machine, repeats, num_steps or (10 if on_gpu else 1)))
        except Exception as error:  # compilers and kernel libraries may raise anything; the next row may work
            missed.append(f"not measured: {case.storage} at {case.width}, {_share(case.density)}: {first_line(error)}")
        if out is not None:
            about = {"hardware": hardware(where), "torch": str(torch.__version__), **asdict(machine)}
            write_rows(Path(out) / _FILE, about, rows)
        _free(where)
    return "\n".join([_head(where, machine, repeats), aligned([*_lines([row for row in rows if row.case in cases])]), *missed])


def _cases(width: int, depth: int, tokens: int, seq_len: int, *, on_gpu: bool) -> Iterator[StorageCase]:
    threads = 0 if on_gpu else torch.get_num_threads()
    for backend, pattern, density in _ON_GPU if on_gpu else _ON_CPU:
        for captured in (True, False) if on_gpu else (False,):
            for storage in (backend, "auto"):
                yield StorageCase(width, depth, tokens, seq_len, pattern, density, storage, captured, threads)


def _row(case: StorageCase, device: torch.device, machine: Machine, repeats: int, num_steps: int) -> StepTime:
    ours, dense = _config(case, device), replace(_config(case, device), sparsity=0.0, pattern="random")
    how = Execution(device=str(device), graph=case.captured, micro_batch=ours.batch_size)
    text, world = random_text(ours), World(0, 1, device, "ddp")
    with warnings.catch_warnings(action="ignore"):  # few weights per neuron are intended here
        sparse = Stepper(ours, replace(how, storage=case.storage), world, text)
        steps = {"dense": partial(Stepper(dense, how, world, text).step, 0), "ours": partial(sparse.step, 0)}
        for step in steps.values():
            seconds_of(step, _WARM_UP, device)
        seconds = in_turns(steps, repeats, lambda _, step: seconds_of(step, num_steps, device))
    assert sparse.storage is not None
    stored = Counter(layer.backend for layer in sparse.storage.layers)
    words = ", ".join(f"{num} {backend}" for backend, num in stored.items())
    return StepTime(case, words, seconds["ours"], seconds["dense"], _floor(ours, machine), _floor(dense, machine))


def _config(case: StorageCase, device: torch.device) -> RunConfig:
    on_gpu = device.type == "cuda"
    head_dim = min(64, case.width)
    return RunConfig(
        model=ModelConfig(width=case.width, depth=case.depth, head_dim=head_dim, vocab_size=8192 if on_gpu else 256),
        base_width=min(256, case.width),
        # The pattern N:M has its density in its name.
        sparsity=None if ":" in case.pattern else 1 - case.density,
        pattern=case.pattern,
        batch_size=case.tokens // case.seq_len,
        seq_len=case.seq_len,
        dtype="bf16" if on_gpu else "fp32",
        steps=1000,
        clip=1.0,
    )


def _floor(config: RunConfig, machine: Machine) -> float:
    """The lower bound of a step's time: the time for its FLOPs without zeros, or the time for its bytes, whichever is longer.
    Activations are written and read once. Weight, gradient and both averages of each non-zero are read, and all but the
    gradient are written. Indices do not count."""
    cost = estimate(config)
    num_bytes = 2 * cost.activation_bytes + 7 * 4 * cost.num_nonzeros
    return max(cost.sparse_flops / config.steps / machine.product_flops, num_bytes / machine.copy_bytes)


def _free(device: torch.device) -> None:
    if device.type == "cuda":  # compiled and captured steps hold memory of their own
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


# The table


def _head(device: torch.device, machine: Machine, repeats: int) -> str:
    on_gpu = device.type == "cuda"
    versions = f"torch {torch.__version__}"
    with suppress(ImportError):  # a CPU needs no triton
        import triton

        versions += f", triton {triton.__version__}"
    what = "bf16, compiled" if on_gpu else f"fp32, {torch.get_num_threads()} threads"
    return (
        f"{hardware(device)}, {versions}; training step of a GPT, {what}; median of {repeats} rounds in turns; copy "
        f"{machine.copy_bytes / 1e9:.0f} GB/s, product {machine.product_flops / 1e12:.3g} TFLOP/s. "
        "Floor: bytes or FLOPs of a step without zeros, whichever takes longer"
    )


def _lines(rows: list[StepTime]) -> Iterator[tuple[str, ...]]:
    yield (
        *("width", "depth", "tokens", "pattern", "density", "storage", "captured", "dense ms", "sparse ms", "speed"),
        *("floor ms", "dense floor ms", "layers"),
    )
    for row in rows:
        case = row.case
        shape = str(case.width), str(case.depth), f"{case.tokens // case.seq_len} x {case.seq_len}", case.pattern
        times = f"{row.dense_seconds * 1e3:.2f}", f"{row.seconds * 1e3:.2f}", f"{row.speed:.3f}"
        floors = f"{row.floor_seconds * 1e3:.2f}", f"{row.dense_floor_seconds * 1e3:.2f}"
        yield (*shape, _share(case.density), case.storage, "yes" if case.captured else "no", *times, *floors, row.stored)


def _share(density: float) -> str:
    return f"1/{math.floor(1 / density + 0.5)}"
