"""Executing runs: one after the other or stacked, with the same results. Which is faster depends on width and tokens per
step, so ``auto`` measures.

Both go through ``GPTStack``, compiled once for each shape and refilled with the next runs; what cannot be stacked goes through
the trainer.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from smupar.execute.timing import seconds_of
from smupar.lm.config.run import Execution, RunConfig
from smupar.lm.data import batches as data
from smupar.lm.data.batches import Corpus
from smupar.lm.model.cost import estimate
from smupar.lm.model.gpt import plan_on_meta
from smupar.lm.run.distributed import pick_device
from smupar.lm.run.folder import Row, Summary
from smupar.lm.run.loop import Cadence, Loop, Progress
from smupar.lm.run.signals import Stop, end, ended_by_sigterm
from smupar.lm.run.stack import GPTStack, stack_key
from smupar.lm.run.train import train
from smupar.plan.optimizers import family_of
from smupar.plan.plan import PlanWarning
from smupar.study.config import EngineConfig
from smupar.study.kind import Stage
from smupar.study.store import Study

EngineName = Literal["auto", "serial", "stacked", "ray"]

# How often losses of a stack are fetched from a GPU, and looked at for runs that diverged.
_LOOK_EVERY = 50
_NUM_ROWS = 50  # of metrics, in a run of a stack
_USABLE = 0.8
_MOST = 64
_MEASURED_STEPS = 8
_LONG_SECONDS = 600.0


@dataclass
class Board:
    """Live progress: runs done, running, diverged, time left."""

    num_runs: int
    num_steps: int
    num_done: int = 0
    num_diverged: int = 0
    bar: Any = field(init=False)

    def __post_init__(self) -> None:
        self.bar = tqdm(
            total=self.num_steps,
            desc="study",
            unit="step",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 10,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed} gone, {remaining} left, {postfix}",
        )

    def steps(self, num: int, running: int) -> None:
        self.bar.set_postfix_str(
            f"{self.num_done} of {self.num_runs} runs done, {running} running, {self.num_diverged} diverged", refresh=False
        )
        self.bar.update(num)

    def done(self, summary: Summary) -> None:
        self.num_done += 1
        self.num_diverged += summary.status == "diverged"


def settle(study: Study, propose: Stage, how: EngineConfig) -> Sequence[RunConfig]:
    """Runs what a stage proposes, and then what it proposes with those results, until nothing is missing; returns all of it."""
    while True:
        configs = propose(study)
        missing = study.missing(configs)
        _refuse_other_files(study, configs)
        _refuse_impossible(missing)
        if configs:
            print(f"{len(configs)} runs, {len(configs) - len(missing)} of them done, in {study.folder}", flush=True)
        if not missing:
            return configs
        try:
            with ended_by_sigterm():
                execute(study, missing, engine=how.engine, device=how.device, address=how.address)
        except (KeyboardInterrupt, SystemExit):
            done = len(configs) - len(study.missing(configs))
            kept = f"{done} of {len(configs)} runs are done and kept; stacked ones that were running begin again"
            print(f"\n{kept}: the same command goes on", file=sys.stderr)
            raise
        if left := study.missing(missing):
            raise ValueError(f"{len(left)} runs of {study.folder} have not ended: the same command goes on")


def _refuse_other_files(study: Study, configs: Sequence[RunConfig]) -> None:
    """Raises if runs of the study read another text, or another trace, of the same name: it is the name that they go by."""
    for config in {(config.data, config.valid_data): config for config in configs}.values():
        facts = data.open_text(config).facts
        study.remember("text", facts.name, facts.sha256)
    for trace in dict.fromkeys(Path(config.follow) for config in configs if config.follow):
        study.remember("trace", trace.name, hashlib.sha256(trace.read_bytes()).hexdigest())


def _refuse_impossible(configs: Sequence[RunConfig]) -> None:
    """Raises before the first run, not when its turn comes, if one names what there is not; and says what is doubtful."""
    kinds = {(c.rule, c.pattern, c.allocation, c.optimizer.lower(), c.sparsity, c.model): c for c in configs}
    for kind in kinds.values():
        family_of(kind.optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which the run itself will say
            plan_on_meta(kind)
    for said in dict.fromkeys(config.few_moves_warning for config in configs):
        if said:
            warnings.warn(said, PlanWarning, stacklevel=2)


def execute(
    study: Study, configs: Sequence[RunConfig], *, engine: EngineName = "auto", device: str = "auto", address: str = "auto"
) -> None:
    """Runs those whose id has no finished result in the study."""
    todo = study.missing(configs)
    if engine == "ray":
        from smupar.study.ray_engine import execute_on_ray

        execute_on_ray(study, todo, address=address)
        return
    board = Board(len(todo), sum(config.steps for config in todo))
    try:
        for group in groups(todo):
            run_group(study, group, engine, pick_device(device), board)
            if torch.cuda.is_initialized():  # what the last group's captured steps held, to whoever needs it
                gc.collect()
                torch.cuda.empty_cache()
    finally:
        board.bar.close()


def groups(configs: Sequence[RunConfig]) -> Iterator[list[RunConfig]]:
    """Runs that can be stacked together; others alone."""
    by_key: dict[str, list[RunConfig]] = {}
    for config in configs:
        key = stack_key(config)
        by_key.setdefault(config.id if key is None else key, []).append(config)
    yield from by_key.values()


def run_group(study: Study, group: list[RunConfig], engine: EngineName, device: torch.device, board: Board) -> None:
    if stack_key(group[0]) is None or fitting(group[0], device) < 1:  # the trainer takes a batch in parts
        for config in group:
            summary = train(config, Execution(out=str(study.runs / config.id), device=str(device)))
            if summary.status in ("interrupted", "terminated"):
                end(summary.status)
            board.done(summary)
        return
    text = data.open_text(group[0])
    most = 1 if engine == "serial" else largest_stack(group[0], device)
    # Parts of equal size, so that the last one is not mostly filled up.
    size = -(-len(group) // -(-len(group) // most))
    stack, size = _pick(group, text, device, size, measure=engine == "auto")
    for start in range(0, len(group), size):
        part = group[start : start + size]
        # A last part that is too short is filled up with copies, so that nothing has to be compiled for it.
        filled = part + [part[-1]] * (size - len(part))
        if start or stack.stack.num_steps:
            stack.refill(filled)
        _train_stack(study, stack, part, board)


def _train_stack(study: Study, stack: GPTStack, part: Sequence[RunConfig], board: Board) -> None:
    """Trains a stack to its end; ``part``: the first of its runs, which count."""
    steps, keeper = part[0].steps, _StackKeeper(len(part), board)
    cadence = Cadence(steps, log_every=max(1, steps // _NUM_ROWS), valid_every=steps, look_every=_LOOK_EVERY)
    with Stop.on_signals() as stop:
        loop = Loop(stack, cadence, keeper, stop, [Progress() for _ in part])
        status = loop.run()
    if status in ("interrupted", "terminated"):
        end(status)
    keeper.show(steps)  # where all diverged, nothing is left to train
    summaries = loop.summaries(status, [config.id for config in part])
    if study.keeps_weights:
        stack.save(study.runs, summaries)
    for config, summary, rows, trace in zip(part, summaries, keeper.rows, stack.traces(), strict=False):
        study.add(config, summary, rows, trace)
        board.done(summary)
    if stop.asked:  # after the last step
        end(stop.status)


class _StackKeeper:
    """Holds the rows of a stack's runs until they have ended, and shows progress on the board."""

    def __init__(self, num_runs: int, board: Board) -> None:
        self.rows: list[list[Row]] = [[] for _ in range(num_runs)]
        self.board, self.shown = board, 0

    def show(self, done: int, loss: float = math.nan, seconds: float = math.nan) -> None:
        self.board.steps((done - self.shown) * len(self.rows), len(self.rows))
        self.shown = done

    def log(self, index: int, row: Row) -> None:
        self.rows[index].append(row)

    def save(self, progress: Sequence[Progress]) -> None:
        """Nothing yet: a stack that is stopped begins again."""


def _pick(group: list[RunConfig], text: Corpus, device: torch.device, most: int, *, measure: bool) -> tuple[GPTStack, int]:
    """A stack of the faster size: one, or as many as there are and fit."""
    if most == 1:
        return GPTStack(group[:1], text, device), 1
    several = len({config.seed for config in group}) > 1
    stacked = GPTStack(group[:most], text, device, own_batches=several)
    # Where steps are compiled, the other engine is worth a look only if the study takes longer than its compilation.
    if not measure or (
        device.type == "cuda" and sum(config.steps for config in group) * _seconds(stacked, device) / most < _LONG_SECONDS
    ):
        return stacked, most
    single = GPTStack(group[:1], text, device)
    together, alone = _seconds(stacked, device) / most, _seconds(single, device)
    return (stacked, most) if together <= alone else (single, 1)


def _seconds(stack: GPTStack, device: torch.device) -> float:
    """Of one step, warm."""
    num_steps = _MEASURED_STEPS if device.type == "cuda" else 3
    return min(seconds_of(partial(stack.step, number), device=device) for number in range(num_steps))


def largest_stack(config: RunConfig, device: torch.device) -> int:
    """How many such runs to train at once."""
    return max(1, min(_MOST, int(fitting(config, device))))


def fitting(config: RunConfig, device: torch.device) -> float:
    """How many such runs should fit into the device's memory at once."""
    cost = estimate(config)
    model = config.model
    # Attention by products keeps its scores, in fp32 and as weights, in every layer.
    scores = 8 * model.depth * model.num_heads * config.batch_size * config.seq_len**2
    each = cost.state_bytes + cost.activation_bytes + scores + cost.num_parameters * 8
    return _USABLE * _free_memory(device) / each


def _free_memory(device: torch.device) -> float:
    """What other processes leave to this one."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
