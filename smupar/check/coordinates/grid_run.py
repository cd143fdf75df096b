"""One run of the grid: its model, its training and its sizes.

The check has its own loop, not the trainer's (lm/run/loop.py), for three reasons. It trains the user's model, with the user's
loss and batches. It measures inside each step, before and after the update, so the host cannot run ahead of the device. And it
produces sizes, not a model, losses or a checkpoint.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from smupar.check.audit.audit import differences, unsettled
from smupar.check.audit.findings import Finding
from smupar.check.coordinates.depth import SAME_DEPTH, ComparedLayers, compared_layers
from smupar.check.coordinates.grid import Grid, listed
from smupar.check.coordinates.measure import SizeRecorder
from smupar.check.coordinates.readings import Cell, GridPoint, Reading
from smupar.check.coordinates.report import Report
from smupar.model.parameterize import parameterize
from smupar.model.seam import optimizers
from smupar.optim.groups import param_groups
from smupar.optim.guard import LRRatioWarning, ratio_problem, wrong_groups
from smupar.plan.facts.layers import has_running_statistics, kind_of
from smupar.plan.masks.patterns import parse_pattern
from smupar.plan.plan import Plan, PlanWarning
from smupar.plan.roles.parameters import parent_path
from smupar.plan.settings import Settings
from smupar.refusals import refuse
from smupar.rules import get_rule

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizer = type[torch.optim.Optimizer] | Callable[[nn.Module, Plan], Optimizers]


@dataclass(frozen=True)
class Training:
    """The settings with which every model of the grid is made and trained."""

    loss_fn: Callable[[nn.Module, Any], Tensor]
    optimizer: MakeOptimizer
    lr: float | Mapping[str, float] | None
    weight_decay: float | None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    prepare: Callable[[nn.Module, Plan], None] | None
    allocation: Callable[[float], Any] | None
    settings: Settings
    sparsifier: Callable[[nn.Module, Plan, Any], Any] | None = None

    def check(self, rules: tuple[str, ...], densities: float | Sequence[float]) -> None:
        has_own = not isinstance(self.optimizer, type) and (self.lr, self.weight_decay) != (None, None)
        refuse(has_own, "optimizer is a function, which sets the learning rate and the decay: leave out lr= and weight_decay=")
        refuse(not rules, "rules is empty: name at least one, such as rules=['smupar']")
        for rule in rules:
            get_rule(rule)
            if isinstance(self.lr, Mapping) and rule not in self.lr:
                raise ValueError(f"lr has no learning rate for the rule {rule!r}: it has {', '.join(self.lr)}")
        taken_by_grid = self.settings.keys() & {"rule", "density", "seed", "delta"}
        if taken_by_grid:
            raise TypeError(f"{sorted(taken_by_grid)[0]!r} is set by the grid: use rules=, densities=, seeds= and widths=")
        refuse(
            parse_pattern(self.settings.get("pattern", "random")).whole_neurons and len(set(listed(densities))) > 1,
            "pattern 'neuron' is not compared over densities: the zero outputs of dead neurons would count. The live neurons "
            "are a narrower dense network: pass widths instead, at one density",
        )

    def optimizers(self, model: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
        if isinstance(self.optimizer, type):
            lr = self.lr[plan.rule] if isinstance(self.lr, Mapping) else 2**-6 if self.lr is None else self.lr
            decay = self.weight_decay or 0.0
            return [self.optimizer(param_groups(model, plan, lr=lr, weight_decay=decay, optimizer=self.optimizer))]
        returned = optimizers(self.optimizer(model, plan))
        refuse(not returned, "the optimizer function returned no optimizer: it must return one, or a list of them")
        return returned


class GridRun:
    """One run of the grid: makes its model, trains it, and measures sizes at every step."""

    def __init__(self, cell: Cell, grid: Grid, training: Training) -> None:
        self.cell, self.grid, self.training = cell, grid, training
        self.faults: list[Finding] = []

    def carry_out(self, batches: list[Any]) -> None:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanWarning)  # the report says the same, and only once
            warnings.simplefilter("ignore", LRRatioWarning)
            torch.manual_seed(self.cell.seed)
            self.build()
            self.train(batches)
        self.readings = self.read()
        # Models and optimizers are dropped: the report does not need them, and all models of a large grid would not fit into
        # memory.
        del self.model, self.optimizers, self.schedulers
        self.__dict__.pop("recorder", None)

    def read(self) -> list[Reading]:
        return self.recorder.readings(self.cell)

    @classmethod
    def report(cls, runs: Sequence[Self], readings: list[Reading]) -> Report:
        return Report(readings, *faults_and_plans(runs))

    def build(self) -> None:
        cell, grid, training = self.cell, self.grid, self.training
        self.model = grid.make(cell.width, cell.depth)
        density = training.allocation(cell.density) if training.allocation is not None and cell.density < 1 else cell.density
        settings: Settings = {
            **training.settings,
            "rule": cell.rule,
            "density": density,
            "seed": cell.seed,
            "delta": grid.delta,
        }
        self.plan = parameterize(self.model, base=grid.base, reset=False, **settings)
        if training.prepare is not None:
            training.prepare(self.model, self.plan)
        self.optimizers = training.optimizers(self.model, self.plan)
        make_scheduler = training.scheduler
        self.schedulers = [] if make_scheduler is None else [make_scheduler(optimizer) for optimizer in self.optimizers]
        self.faults += differences(self.model, self.plan, self.optimizers)
        self.faults += [Finding(text, name.replace("_", " ")) for name, text in unsettled(self.model, self.plan).items()]
        self.faults += [
            Finding(f"{row.name!r} is a lookup table with the role hidden", "embedding as hidden", row.name)
            for row in self.plan
            if row.role == "hidden" and kind_of(self.model.get_submodule(parent_path(row.name))).is_lookup
        ]
        self.faults += _decay_faults(self.optimizers)

    def train(self, batches: list[Any]) -> None:
        self.recorder = SizeRecorder(self.model, self.plan, self.grid.growth_in(self.model), self.layers(batches[0]))
        self._probe(batches[0])
        for step, batch in enumerate(batches, 1):
            self.recorder.step = step
            self._note_erased_ratios(step)
            loss = self._loss(batch, step)
            if loss is None:
                break
            loss.backward()
            weights = self.recorder.before_update()
            self.update()
            self.recorder.after_update(weights)
            self._probe(batches[0])
        self.recorder.close()
        known_faults = {(finding.cause, finding.name) for finding in self.faults}
        after = differences(self.model, self.plan, self.optimizers, trained=True)
        if not self.recorder.saw_updates():
            after.append(Finding("no update changed the output of any layer: is the learning rate 0?", "no updates"))
        self.faults += [
            Finding("its update was not measured; use register_layer, or put it into a module of its own", "unmeasured", name)
            for name in self.recorder.unmeasured()
        ]
        self.faults += [
            Finding(f"{path!r} has a factor, but was never called", "uncalled", path) for path in self.recorder.uncalled()
        ]
        self.faults += [
            finding for finding in after if (finding.cause, finding.name) not in known_faults and finding.cause != "LR"
        ]

    def update(self) -> None:
        """Makes a step of all optimizers and schedulers."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()

    def layers(self, batch: Any) -> ComparedLayers:
        """The layers to measure. If the check varies the depth, there is one such layer for each layer of the base."""
        if self.cell.depth is None:
            return SAME_DEPTH
        layers = compared_layers(self.model, self.grid.base, self.plan, partial(self.training.loss_fn, self.model, copy(batch)))
        self.faults += [
            Finding(f"the output of {path!r} passes no branch that a depth factor divides", "branch missing", path)
            for path in layers.undivided
        ]
        return layers

    def _probe(self, batch: Any) -> None:
        """Runs the first batch without side effects: dropout is the same each time, and running statistics are restored."""
        norms = filter(has_running_statistics, self.model.modules())
        statistics = [(norm, name, buffer.clone()) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
        with self.recorder.probe(), torch.random.fork_rng():
            torch.manual_seed(0)
            self.training.loss_fn(self.model, copy(batch))
        for norm, name, before in statistics:
            getattr(norm, name).copy_(before)

    def _loss(self, batch: Any, step: int) -> Tensor | None:
        loss = self.training.loss_fn(self.model, copy(batch))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a scalar tensor, got {shape}; reduce it, e.g. with .mean()")
        refuse(
            not loss.requires_grad,
            "the loss does not depend on the model's parameters: loss_fn must not detach it or run under no_grad",
        )
        if math.isfinite(loss.item()):
            return loss
        refuse(
            step == 1,
            f"the loss is {loss.item()} before any step (rule {self.cell.rule}, {self.cell}): check the batch, init_std and "
            "the alphas",
        )
        self.faults.append(Finding(f"the loss is {loss.item()} at step {step}: lower lr", "diverged"))
        return None

    def _note_erased_ratios(self, step: int) -> None:
        if any(finding.cause in ("LR", "scheduler") for finding in self.faults):
            return
        for optimizer in self.optimizers:
            if problem := ratio_problem(optimizer):
                names = " | ".join(group["name"] for group in wrong_groups(optimizer)[1])
                self.faults.append(Finding(f"from step {step}: {problem}", "scheduler", names))


def faults_and_plans(runs: Sequence[GridRun]) -> tuple[dict[Cell, list[Finding]], dict[GridPoint, Plan]]:
    """The faults of each run that has some, and a plan for each point of the grid."""
    plans: dict[GridPoint, Plan] = {}
    for run in runs:
        plans.setdefault(run.cell.point, run.plan)
    return {run.cell: run.faults for run in runs if run.faults}, plans


def _decay_faults(all_optimizers: list[torch.optim.Optimizer]) -> Iterator[Finding]:
    """Finds groups whose weights decay faster or slower than the embedding, because decay is coupled to the learning rate."""
    for optimizer in all_optimizers:
        groups = [group for group in optimizer.param_groups if "lr_factor" in group and group.get("weight_decay")]
        usual = next((group["weight_decay"] for group in groups if group["lr_factor"] == 1), None)
        for group in groups:
            share = group["lr_factor"] * group["weight_decay"] / usual if usual else 1.0
            if not math.isclose(share, 1, rel_tol=1e-4):
                yield Finding(
                    f"group {group['name']!r} decays {share:.4g} times as fast as the embedding: weight decay is coupled to "
                    "the learning rate; use param_groups(..., decay='independent')",
                    "decay",
                    group["name"],
                    share,
                )
