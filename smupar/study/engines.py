"""Executes the runs of a study, one by one or stacked, with the same results up to rounding. Which is faster depends on width
and tokens per step, so ``auto`` measures.

Both ways use ``GPTStack``, which is compiled once for each shape and then refilled with the next runs. The trainer trains runs
that cannot be stacked or do not fit into memory.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from smupar.execute.timing import seconds_of
from smupar.lm.config.run_config import Execution, RunConfig
from smupar.lm.data.batches import Corpus, open_text
from smupar.lm.model.cost import estimate
from smupar.lm.run.distributed import device_name, pick_device
from smupar.lm.run.signals import end_if_stopped
from smupar.lm.run.stack import GPTStack, fastest_attention, stack_key
from smupar.lm.run.train import train
from smupar.output.progress import Display
from smupar.plan.plan import PlanWarning
from smupar.study.config import EngineName
from smupar.study.progress import StudyProgress
from smupar.study.run_configs import grouped, unique
from smupar.study.stacks.ahead import BuiltAhead
from smupar.study.stacks.division import Division, recorded_divisions, without
from smupar.study.stacks.training import train_stack
from smupar.study.store import Study

_USABLE = 0.8  # share of the free memory
MOST_STACKED = 64  # runs in a stack
_MEASURED_STEPS = 8
_LONG_SECONDS = 600.0


def execute(
    study: Study,
    configs: Sequence[RunConfig],
    *,
    engine: EngineName = "auto",
    device: str = "auto",
    address: str = "auto",
    progress: StudyProgress | None = None,
) -> None:
    """Executes the runs that have no result in the study yet. Keeps ``progress`` up to date."""
    missing = study.missing(configs)
    study.set_aside_damaged(missing)
    if engine == "ray":
        from smupar.study.ray_engine import execute_on_ray

        execute_on_ray(study, configs, address=address, progress=progress)
        return
    where = pick_device(device)
    progress = StudyProgress() if progress is None else progress
    progress.plan(missing, device_name(where))
    with Display(progress.status):
        for group in groups(configs):
            run_group(study, group, engine, where, progress)
            if torch.cuda.is_initialized():  # frees the memory of the group's captured steps
                gc.collect()
                torch.cuda.empty_cache()


def groups(configs: Sequence[RunConfig]) -> list[list[RunConfig]]:
    """The runs in groups that can be stacked; a run that cannot be stacked is a group of its own."""
    return grouped(unique(configs), lambda config: stack_key(config) or config.id)


def run_group(
    study: Study, group: Sequence[RunConfig], engine: EngineName, device: torch.device, progress: StudyProgress
) -> None:
    """Trains the missing runs of a group. Interrupted runs continue in their old stacks; all others are divided into stacks
    now."""
    missing = [config.id for config in study.missing(group)]
    if not missing:
        return
    if stack_key(group[0]) is None:
        _train_one_by_one(study, group, device, progress)
        return
    begun = [each for each in recorded_divisions(study, missing) if _goes_on(study, each, group[0], engine, device)]
    for division in begun:
        _train_division(study, division, group, None, device, progress)
    fresh = without(missing, begun)
    if fresh:
        _say_if_forgotten(study, group)
        progress.doing = "timing how to train the next runs" if engine == "auto" else "building models"
        division, stack = divide([config for config in group if config.id in fresh], engine, device)
        _train_division(study, division, group, stack, device, progress)


def _say_if_forgotten(study: Study, group: Sequence[RunConfig]) -> None:
    """Says that runs have ended, and nothing records how they were divided into stacks: other runs may be divided otherwise.
    Results from published rows have no folder. They were trained elsewhere, and nothing is lost."""
    ended = {result.config.id for result in study.results(group) if result.summary.folder}
    lost = without(ended, recorded_divisions(study, ended))
    if lost:
        warnings.warn(
            f"{study.stacks} does not say in which stacks {len(lost)} runs were trained, so it is damaged, or of an older "
            "version: runs that are missing may differ in the last digits from those of a study that was not interrupted",
            stacklevel=3,
        )


def _goes_on(study: Study, division: Division, config: RunConfig, engine: EngineName, device: torch.device) -> bool:
    """Whether interrupted runs can continue in their old stacks. If they cannot, the record of these stacks is removed."""
    here = device_name(device)
    how = f"in stacks of {division.size}" if division.size else "one by one"
    begun = f"runs of {study.folder} were begun {how} on {division.device}"
    if not division.suits(engine):
        reason = f"--engine {engine} trains them differently"
    elif division.size > largest_stack(config, device, share=1.0):
        reason = f"too few fit into the memory of {here}"
    else:
        if division.device != here:
            warnings.warn(
                f"{begun}: they continue in the same way on {here}, and results may differ in the last digits", stacklevel=2
            )
        return True
    warnings.warn(f"{begun}, and {reason}: runs that have not ended begin again", stacklevel=2)
    division.forget(study)
    return False


def _train_one_by_one(study: Study, configs: Sequence[RunConfig], device: torch.device, progress: StudyProgress) -> None:
    """Trains runs with the trainer, which splits batches if memory is short."""
    for config in study.missing(configs):
        progress.begin(config)
        progress.running = {config.id: ()}  # the trainer writes its rows itself
        summary = train(config, Execution(out=str(study.runs / config.id), device=str(device)), shows=False)
        end_if_stopped(summary.status)
        progress.done(summary)


def _train_division(
    study: Study,
    division: Division,
    group: Sequence[RunConfig],
    stack: GPTStack | None,
    device: torch.device,
    progress: StudyProgress,
) -> None:
    """Trains the unfinished stacks of a division. ``stack`` holds the runs of the first stack, if that has been built
    already."""
    by_id = {config.id: config for config in group}
    if division.size == 0:
        division.write(study)
        _train_one_by_one(study, [by_id[run] for run in division.runs if run in by_id], device, progress)
        return
    waiting = [(number, part) for number in range(len(division.stacks)) if (part := _stack(study, division, number, by_id))]
    filled = [part + [part[-1]] * (division.size - len(part)) for _, part in waiting]
    # On a CPU, building would slow down training. A large stack trains for so long that the time to build the next one hardly
    # counts, and a second one would need memory.
    builds_ahead = device.type == "cuda" and division.size == 1
    with (
        contextlib.closing(BuiltAhead()) as ahead,
        warnings.catch_warnings(action="ignore", category=PlanWarning),  # the study has already shown these warnings
    ):
        for turn, (number, part) in enumerate(waiting):
            if stack is None:
                stack = GPTStack(filled[turn], open_text(part[0]), device, own_batches=division.own_batches)
            elif stack.num_steps or stack.configs != filled[turn]:
                stack.refill(filled[turn], ahead.take(filled[turn]))
            if builds_ahead and 0 < turn < len(waiting) - 1:  # not while the first stack is compiled
                ahead.start(filled[turn + 1])
            train_stack(study, stack, part, division, number, progress)


def _stack(study: Study, division: Division, number: int, by_id: Mapping[str, RunConfig]) -> list[RunConfig]:
    """The runs of a stack; none if all have ended. Copies of a run fill the places of runs that are no longer wanted, so that
    all stacks have the same size: nothing has to be compiled again, and the other runs are rounded as before. For the same
    reason the caller fills up the last stack."""
    runs = division.stacks[number]
    wanted = study.missing([by_id[run] for run in runs if run in by_id])
    return [by_id.get(run, wanted[0]) for run in runs] if wanted else []


def divide(group: Sequence[RunConfig], engine: EngineName, device: torch.device) -> tuple[Division, GPTStack | None]:
    """Decides how runs are stacked. Also returns the stack of the first runs, if measuring has built it."""
    runs, room = tuple(config.id for config in group), largest_stack(group[0], device)
    if room < 1:
        return Division(runs, 0, own_batches=False, device=device_name(device)), None
    # Stacks of equal size, so that the last one does not consist mostly of copies.
    num_stacks = len(group) if engine == "serial" else -(-len(group) // room)
    stack, size = _faster_stack(group, open_text(group[0]), device, -(-len(group) // num_stacks), measure=engine == "auto")
    return Division(runs, size, stack.own_batches, device_name(device)), stack


def _faster_stack(
    group: Sequence[RunConfig], text: Corpus, device: torch.device, size: int, *, measure: bool
) -> tuple[GPTStack, int]:
    """A stack of ``size`` runs, or of one run if that is faster, and its number of runs."""
    if size == 1:
        return GPTStack(group[:1], text, device), 1
    stacked = GPTStack(group[:size], text, device, own_batches=len({config.seed for config in group}) > 1)
    if not measure:
        return stacked, size
    together = seconds_of_warm_step(stacked, device) / size
    # If steps are compiled, measuring a single run pays off only if the group takes longer than compiling.
    if device.type == "cuda" and sum(config.steps for config in group) * together < _LONG_SECONDS:
        return stacked, size
    single = GPTStack(group[:1], text, device)
    return (stacked, size) if together <= seconds_of_warm_step(single, device) else (single, 1)


def seconds_of_warm_step(stack: GPTStack, device: torch.device) -> float:
    steps = range(_MEASURED_STEPS if device.type == "cuda" else 3)
    return min(seconds_of(partial(stack.step, step), device=device) for step in steps)


def largest_stack(config: RunConfig, device: torch.device, *, share: float = _USABLE) -> int:
    """How many such runs fit into a share of the device's free memory; 0 if not even one does."""
    cost, model = estimate(config), config.model
    # Attention by products keeps its scores in every layer, in fp32 and as weights. On a CPU these scores are counted as well,
    # although fused attention does not keep them, so that stacks are as large as in older studies.
    keeps_scores = device.type == "cpu" or fastest_attention(config, device) == "products"
    scores = 8 * model.depth * model.num_heads * config.batch_size * config.seq_len**2 if keeps_scores else 0
    # Saving copies a stack's state twice in the host's memory.
    copies = 2 * cost.state_bytes if device.type == "cpu" else 0.0
    each = cost.state_bytes + cost.activation_bytes + scores + cost.num_parameters * 8 + copies
    return min(MOST_STACKED, int(share * _free_bytes(device) / each))


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
