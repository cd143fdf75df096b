"""``coord_check``: trains the same few steps at every width, density and depth under every rule, and compares sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, SupportsIndex, Unpack

import torch
from torch import Tensor, nn

from smupar.check.coordinates.grid import Grid, MakeModel
from smupar.check.coordinates.grid_run import GridRun, MakeOptimizer, Training
from smupar.check.coordinates.readings import JUDGED, Reading
from smupar.check.coordinates.report import Report
from smupar.check.whole_run.long_run import LongRun
from smupar.output.progress import Display, Status
from smupar.plan.plan import Plan
from smupar.plan.settings import Settings
from smupar.refusals import refuse


def coord_check(
    make_model: MakeModel,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    # the grid
    base_width: int,
    base_depth: int | None = None,
    rules: str | Sequence[str] = ("smupar",),
    widths: int | Sequence[int] = (),
    densities: float | Sequence[float] = (1.0,),
    depths: int | Sequence[int] = (),
    seeds: int | Sequence[int] = 3,
    # how each model is made and trained
    optimizer: MakeOptimizer = torch.optim.AdamW,
    lr: float | Mapping[str, float] | None = None,
    weight_decay: float | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    prepare: Callable[[nn.Module, Plan], None] | None = None,
    allocation: Callable[[float], Any] | None = None,
    # for how long
    steps: int | None = None,
    horizon: int | None = None,
    sparsifier: Callable[[nn.Module, Plan, Any], Any] | None = None,
    progress: bool = True,
    **settings: Unpack[Settings],
) -> Report:
    """Trains a few steps at every width, density and depth, and judges whether activations, gradients and updates keep their
    size.

    make_model    width -> model; models may differ only in their width. With depths: (width, depth) -> model
    loss_fn       (model, batch) -> scalar loss
    batches       at least ``steps`` batches; every run gets the same ones

    rules         rules to compare. With another rule beside them, SP and muP are baselines and do not count for ``report.ok``
    widths        default: the base width alone. At least two widths, two densities or two depths are needed
    depths        numbers of residual blocks; base_depth is the smallest of them by default. Blocks are compared at the same
                  relative depth, after the plan's factors for the depth are divided out

    optimizer     a class that takes ``param_groups``, or a function (model, plan) -> optimizer or list of optimizers
    lr            a number (default 2^-6), or {rule: number}. Pass lr and weight_decay only if optimizer is a class; a function
                  sets them itself
    scheduler     optimizer -> scheduler; its step() is called after each step
    prepare       function (model, plan) that sets what smupar cannot set, such as an attention scale that it does not find
    allocation    density -> what ``parameterize`` takes as density, such as smupar.erk

    steps         10 by default
    horizon       trains this many steps instead, and reports from which step on updates drift
    sparsifier    with horizon: (model, plan, optimizers) -> sparsifier for the sparse models, such as RigL
    settings      settings of ``parameterize``
    """
    training = Training(loss_fn, optimizer, lr, weight_decay, scheduler, prepare, allocation, settings, sparsifier)
    run_class, steps = _length(steps, horizon, training)
    rule_list = (rules,) if isinstance(rules, str) else tuple(rules)
    training.check(rule_list, densities)
    seed_list, batch_list = _seeds_and_batches(seeds, steps, batches)
    with torch.random.fork_rng():
        grid = Grid(make_model, int(base_width), widths, densities, depths, base_depth)
    runs = [run_class(cell, grid, training) for cell in grid.cells(rule_list, seed_list)]
    return run_class.report(runs, _carried_out(runs, batch_list, shows=progress))


def _length(steps: int | None, horizon: int | None, training: Training) -> tuple[type[GridRun], int]:
    """The kind of run, and its number of steps."""
    if horizon is not None:
        refuse(steps is not None, "steps and horizon are both numbers of steps: pass one of them")
        return LongRun, horizon
    refuse(training.sparsifier, "sparsifier= is for a check over a whole run: pass horizon= too")
    return GridRun, 10 if steps is None else steps


def _seeds_and_batches(seeds: int | Sequence[int], steps: int, batches: Iterable[Any]) -> tuple[tuple[int, ...], list[Any]]:
    """The seeds as numbers, and a batch for each step."""
    seed_list = tuple(range(int(seeds))) if isinstance(seeds, SupportsIndex) else tuple(int(seed) for seed in seeds)
    refuse(not seed_list or steps < 1, f"steps and seeds must be at least 1, got steps={steps}, seeds={seeds!r}")
    batch_list = list(islice(batches, steps))
    refuse(
        len(batch_list) < steps,
        f"batches ran out: {steps} steps need as many batches, but there are {len(batch_list)}; pass more batches, or fewer "
        "steps",
    )
    return seed_list, batch_list


def _carried_out(runs: Sequence[GridRun], batches: list[Any], *, shows: bool) -> list[Reading]:
    """Trains all models of the grid, and shows progress. Returns the sizes that were read."""
    done = 0

    def status() -> Status:
        return Status(done / len(runs), (f"{done} of {len(runs)} models trained",))

    with Display(status) if shows else nullcontext():
        for run in runs:
            run.carry_out(batches)
            done += 1
    readings = [reading for run in runs for reading in run.readings]
    refuse(
        not any(reading.quantity in JUDGED for reading in readings),
        "nothing could be measured: none of the model's layers is called as a module and returns a tensor",
    )
    return readings
