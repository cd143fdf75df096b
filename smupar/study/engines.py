"""Executes the runs of a study, one after the other or stacked, with the same results. Which is faster depends on width and
tokens per step, so ``auto`` measures.

Both go through ``GPTStack``, which is compiled once for each shape and refilled with the next runs. Runs that cannot be stacked
go through the trainer.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from tqdm import tqdm

from smupar.execute.timing import seconds_of
from smupar.lm.config.run import Execution, RunConfig
from smupar.lm.data import batches as data
from smupar.lm.model.cost import estimate
from smupar.lm.model.gpt import plan_on_meta
from smupar.lm.run.distributed import device_name, pick_device
from smupar.lm.run.folder import Row, Summary
from smupar.lm.run.loop import Cadence, Loop, Progress
from smupar.lm.run.signals import Stop, end_if_stopped, ended_by_sigterm
from smupar.lm.run.stack import GPTStack, stack_key
from smupar.lm.run.train import train
from smupar.plan.optimizers import family_of
from smupar.plan.plan import PlanWarning
from smupar.study.config import EngineConfig, EngineName
from smupar.study.definition import Stage, StudyDefinition
from smupar.study.live import beating, write_planned
from smupar.study.space import grouped
from smupar.study.store import Study
from smupar.study.view import refreshed

_LOOK_EVERY = 50  # steps after which losses of a stack are fetched from a GPU, and runs that diverged are seen
_NUM_ROWS = 50  # rows of metrics that a run of a stack has
_USABLE = 0.8  # share of the free memory
_MOST = 64  # runs in a stack
_MEASURED_STEPS = 8
_LONG_SECONDS = 600.0


class StudyProgress:
    """A progress bar: how many runs are done, running or diverged, and the time left."""

    running: Mapping[str, Sequence[Row]] = MappingProxyType({})  # the rows of runs that are trained now, by id

    def __init__(self, configs: Sequence[RunConfig]) -> None:
        self.num_runs, self.num_done, self.num_diverged = len(configs), 0, 0
        self.bar = tqdm(
            total=sum(config.steps for config in configs),
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

    @property
    def share_done(self) -> float:
        """Share of the steps, or of the runs, where the trainer counts their steps."""
        return max(self.bar.n / (self.bar.total or 1), self.num_done / max(1, self.num_runs))

    def close(self) -> None:
        self.bar.close()


@contextlib.contextmanager
def run_study(
    folder: str | Path, definition: StudyDefinition, command: str, how: EngineConfig, *, keeps_weights: bool = False
) -> Iterator[tuple[Study, list[RunConfig]]]:
    """Runs what is missing of a study. Yields the study and its runs. Within the block no other process works in its folder."""
    with Study.open(folder, definition.stored, command, keeps_weights=keeps_weights) as study:
        with refreshed(study, definition):
            configs = [config for propose in definition.stages for config in settle(study, propose, how)]
        yield study, configs


def settle(study: Study, propose: Stage, how: EngineConfig) -> Sequence[RunConfig]:
    """Runs what a stage proposes, and then what it proposes with those results, until nothing is missing. Returns all of its
    runs."""
    while True:
        configs = propose(study)
        missing = study.missing(configs)
        _refuse_other_files(study, configs)
        _refuse_impossible(missing)
        if configs:
            print(f"{len(configs)} runs, {len(configs) - len(missing)} of them done, in {study.folder}", flush=True)
        write_planned(study, missing)
        if not missing:
            return configs
        try:
            with ended_by_sigterm():
                execute(study, missing, engine=how.engine, device=how.device, address=how.address)
        except (KeyboardInterrupt, SystemExit):
            print(
                f"\n{len(configs) - len(study.missing(configs))} of {len(configs)} runs are done and kept; stacked ones that "
                "were running begin again: the same command goes on",
                file=sys.stderr,
            )
            raise
        if left := study.missing(missing):
            raise ValueError(f"{len(left)} runs of {study.folder} have not ended: the same command goes on")


def _refuse_other_files(study: Study, configs: Sequence[RunConfig]) -> None:
    """Raises if earlier runs of the study read another text or trace of the same name, since configurations hold only names."""
    for config in {(config.data, config.valid_data): config for config in configs}.values():
        facts = data.open_text(config).facts
        study.remember("text", facts.name, facts.sha256)
    for trace in dict.fromkeys(Path(config.follow) for config in configs if config.follow):
        study.remember("trace", trace.name, hashlib.sha256(trace.read_bytes()).hexdigest())


def _refuse_impossible(configs: Sequence[RunConfig]) -> None:
    """Raises before the first run if any run names something that does not exist. Warns of masks that hardly move."""
    distinct = {(c.rule, c.pattern, c.allocation, c.optimizer.lower(), c.sparsity, c.model): c for c in configs}
    for config in distinct.values():
        family_of(config.optimizer)
        with warnings.catch_warnings(action="ignore"):  # the run itself will warn
            plan_on_meta(config)
    for warning in dict.fromkeys(config.few_moves_warning for config in configs):
        if warning:
            warnings.warn(warning, PlanWarning, stacklevel=2)


def execute(
    study: Study, configs: Sequence[RunConfig], *, engine: EngineName = "auto", device: str = "auto", address: str = "auto"
) -> None:
    """Runs those that have no result in the study yet."""
    missing = study.missing(configs)
    if engine == "ray":
        from smupar.study.ray_engine import execute_on_ray

        execute_on_ray(study, missing, address=address)
        return
    where = pick_device(device)
    with contextlib.closing(StudyProgress(missing)) as progress, beating(study, progress, device_name(where)):
        for group in groups(missing):
            run_group(study, group, engine, where, progress)
            if torch.cuda.is_initialized():  # frees what the group's captured steps held
                gc.collect()
                torch.cuda.empty_cache()


def groups(configs: Sequence[RunConfig]) -> list[list[RunConfig]]:
    """The runs in groups that can be stacked; a run that cannot be stacked is a group of its own."""
    return grouped(configs, lambda config: stack_key(config) or config.id)


def run_group(study: Study, group: list[RunConfig], engine: EngineName, device: torch.device, progress: StudyProgress) -> None:
    room = largest_stack(group[0], device)
    if stack_key(group[0]) is None or room < 1:  # the trainer takes a batch in parts
        for config in group:
            progress.running = {config.id: ()}  # the trainer writes its rows itself
            summary = train(config, Execution(out=str(study.runs / config.id), device=str(device)))
            end_if_stopped(summary.status)
            progress.done(summary)
        return
    text = data.open_text(group[0])
    # Parts of equal size, so that the last one is not mostly filled up.
    num_parts = len(group) if engine == "serial" else -(-len(group) // room)
    stack, size = _faster_stack(group, text, device, -(-len(group) // num_parts), measure=engine == "auto")
    for start in range(0, len(group), size):
        part = group[start : start + size]
        # A last part that is too short is filled up with copies, so that nothing has to be compiled for it.
        filled = part + [part[-1]] * (size - len(part))
        if start or stack.num_steps:
            stack.refill(filled)
        _train_stack(study, stack, part, progress)


def _train_stack(study: Study, stack: GPTStack, part: Sequence[RunConfig], progress: StudyProgress) -> None:
    """Trains a stack to its end. ``part`` has the runs whose results are kept; they are the first of the stack."""
    steps, keeper = part[0].steps, _StackKeeper(len(part), progress)
    progress.running = dict(zip((config.id for config in part), keeper.rows, strict=True))
    cadence = Cadence(steps, log_every=max(1, steps // _NUM_ROWS), valid_every=steps, look_every=_LOOK_EVERY)
    with Stop.on_signals() as stop:
        loop = Loop(stack, cadence, keeper, stop, [Progress() for _ in part])
        status = loop.run()
    end_if_stopped(status)
    keeper.show(steps)  # also if all diverged, and the loop ended early
    summaries = loop.summaries(status, [config.id for config in part])
    if study.keeps_weights:
        stack.save(study.runs, summaries)
    for config, summary, rows, trace in zip(part, summaries, keeper.rows, stack.traces(), strict=False):
        study.add(config, summary, rows, trace)
        progress.done(summary)
    if stop.requested:  # by a signal after the last step
        end_if_stopped(stop.status)


class _StackKeeper:
    """Holds the rows of a stack's runs until they have ended, and shows their progress."""

    def __init__(self, num_runs: int, progress: StudyProgress) -> None:
        self.rows: list[list[Row]] = [[] for _ in range(num_runs)]
        self.progress, self.shown = progress, 0

    def show(self, done: int, loss: float = math.nan, seconds: float = math.nan) -> None:
        self.progress.steps((done - self.shown) * len(self.rows), len(self.rows))
        self.shown = done

    def log(self, index: int, row: Row) -> None:
        self.rows[index].append(row)

    def save(self, progress: Sequence[Progress]) -> None:
        """Saves nothing, since a stack that is stopped begins again."""


def _faster_stack(
    group: list[RunConfig], text: data.Corpus, device: torch.device, size: int, *, measure: bool
) -> tuple[GPTStack, int]:
    """A stack of ``size`` runs, or of one run if that is faster; and the number of its runs."""
    if size == 1:
        return GPTStack(group[:1], text, device), 1
    stacked = GPTStack(group[:size], text, device, own_batches=len({config.seed for config in group}) > 1)
    if not measure:
        return stacked, size
    together = _seconds_of_warm_step(stacked, device) / size
    # Where steps are compiled, a single run is worth a look only if the group takes longer than compiling it.
    if device.type == "cuda" and sum(config.steps for config in group) * together < _LONG_SECONDS:
        return stacked, size
    single = GPTStack(group[:1], text, device)
    return (stacked, size) if together <= _seconds_of_warm_step(single, device) else (single, 1)


def _seconds_of_warm_step(stack: GPTStack, device: torch.device) -> float:
    steps = range(_MEASURED_STEPS if device.type == "cuda" else 3)
    return min(seconds_of(partial(stack.step, step), device=device) for step in steps)


def largest_stack(config: RunConfig, device: torch.device) -> int:
    """How many such runs to train at once, by the device's memory; 0 if not even one should fit."""
    cost, model = estimate(config), config.model
    # Attention by products keeps its scores, in fp32 and as weights, in every layer.
    scores = 8 * model.depth * model.num_heads * config.batch_size * config.seq_len**2
    each = cost.state_bytes + cost.activation_bytes + scores + cost.num_parameters * 8
    return min(_MOST, int(_USABLE * _free_bytes(device) / each))


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
