"""Executes the runs of a study, one by one or stacked, with the same results up to rounding. Which is faster depends on width
and tokens per step, so ``auto`` measures (``stacks/size``).

Both ways use ``GPTStack``, which is compiled once for each shape and then refilled with the next runs. The trainer trains runs
that cannot be stacked or do not fit into memory.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence

import torch

from smupar.lm.config.run_config import Execution, RunConfig
from smupar.lm.run.distributed import device_name, pick_device
from smupar.lm.run.signals import end_if_stopped
from smupar.lm.run.stack import GPTStack, stack_key
from smupar.lm.run.train import train
from smupar.output.progress import Display
from smupar.study.config import EngineName
from smupar.study.progress import StudyProgress
from smupar.study.run_configs import grouped, unique
from smupar.study.stacks.division import Division, recorded_divisions, without
from smupar.study.stacks.size import divide, largest_stack
from smupar.study.stacks.training import train_stacks
from smupar.study.store import Study


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
    begun = [division for division in recorded_divisions(study, missing) if _goes_on(study, division, group[0], engine, device)]
    for division in begun:
        _train_division(study, division, group, None, device, progress)
    fresh = without(missing, begun)
    if fresh:
        _say_if_forgotten(study, group)
        progress.doing = "timing how to train the next runs" if engine == "auto" else "building models"
        division, stack = divide([config for config in group if config.id in fresh], engine, device)
        _train_division(study, division, group, stack, device, progress)


def _say_if_forgotten(study: Study, group: Sequence[RunConfig]) -> None:
    """Warns if runs have ended whose division into stacks is not recorded. The missing runs may then be divided differently.
    Results from published rows have no folder, and need no record, since they were trained elsewhere."""
    ended = {result.config.id for result in study.results(group) if result.summary.folder}
    lost = without(ended, recorded_divisions(study, ended))
    if lost:
        warnings.warn(
            f"{study.stacks} does not say in which stacks {len(lost)} runs were trained, so it is damaged, or of an older "
            "version: the runs that are still missing may end with other last digits than without an interruption",
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
    """Trains the runs of a division that have not ended, as they were divided."""
    if division.size:
        train_stacks(study, division, group, stack, device, progress)
        return
    division.write(study)
    by_id = {config.id: config for config in group}
    _train_one_by_one(study, [by_id[run] for run in division.runs if run in by_id], device, progress)
