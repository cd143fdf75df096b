"""``coord_check``: trains the same few steps at every width and density under every rule, and compares sizes."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, SupportsIndex, Unpack

import torch
from torch import Tensor, nn
from tqdm import tqdm

from smupar.apply import parameterize
from smupar.auditing import Finding, differences
from smupar.coordinates.measure import JUDGED, Reading, Recorder
from smupar.coordinates.report import Report
from smupar.optim import LRRatioWarning, param_groups, ratio_problem, wrong_groups
from smupar.plan import Plan
from smupar.planner import PlanWarning, Settings
from smupar.rules import get_rule
from smupar.stepping import optimizers
from smupar.tensors import is_lookup, parent_path

MakeModel = Callable[[int], nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizer = type[torch.optim.Optimizer] | Callable[[nn.Module, Plan], Optimizers]


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    rule: str
    width: int
    density: float
    seed: int


def coord_check(
    make_model: MakeModel,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    base_width: int,
    rules: str | Sequence[str] = ("smupar",),
    widths: int | Sequence[int] = (),
    densities: float | Sequence[float] = (1.0,),
    optimizer: MakeOptimizer = torch.optim.AdamW,
    lr: float | Mapping[str, float] = 2**-6,
    weight_decay: float = 0.0,
    steps: int = 10,
    seeds: int | Sequence[int] = 3,
    prepare: Callable[[nn.Module, Plan], None] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    allocation: Callable[[float], Any] | None = None,
    progress: bool = True,
    **settings: Unpack[Settings],
) -> Report:
    """Trains a few steps at every width and density, and judges whether activations, gradients and updates keep their size.

    make_model    width -> model, with nothing but the width different
    loss_fn       (model, batch) -> scalar loss
    batches       at least ``steps`` of them; every run gets the same ones
    rules         side by side; SP and muP beside others are baselines: judged and shown, but ``report.ok`` is not about them
    widths        default: the base width; at least two widths or two densities make an axis
    lr            base learning rate, or one for each rule
    optimizer     a class, given ``param_groups``, or a function (model, plan) -> optimizer or list of them
    prepare       (model, plan): for what only you can set, such as the attention scale
    scheduler     optimizer -> scheduler, stepped after each step
    allocation    density -> what ``parameterize`` takes as density, such as smupar.erk
    settings      as for ``parameterize``
    """
    seed_list = tuple(range(int(seeds))) if isinstance(seeds, SupportsIndex) else tuple(int(seed) for seed in seeds)
    if not seed_list or steps < 1:
        raise ValueError(f"steps and seeds must be at least 1, got steps={steps}, seeds={seeds!r}")
    rules = (rules,) if isinstance(rules, str) else rules
    if not rules:
        raise ValueError("rules is empty: name at least one, such as rules=['smupar']")
    for rule in rules:
        get_rule(rule)
        if isinstance(lr, Mapping) and rule not in lr:
            raise ValueError(f"lr has no learning rate for the rule {rule!r}: it has {', '.join(lr)}")
    taken_by_grid = settings.keys() & {"rule", "density", "seed", "delta"}
    if taken_by_grid:
        raise TypeError(f"{sorted(taken_by_grid)[0]!r} is set by the grid: use rules=, densities=, seeds= and widths=")
    if settings.get("pattern") == "neuron" and len(set(_listed(densities))) > 1:
        raise ValueError(
            "pattern 'neuron' is not compared over densities: outputs of dead neurons are 0 and would count. What is left is "
            "the narrower dense network: pass widths instead, at one density"
        )
    taken = list(islice(batches, steps))
    if len(taken) < steps:
        raise ValueError(
            f"batches ran out: {steps} steps need as many batches, there are {len(taken)}; pass more, or fewer steps"
        )
    with torch.random.fork_rng():
        width_list = tuple(int(width) for width in _listed(widths)) or (int(base_width),)
        grid = _Grid(make_model, int(base_width), width_list, tuple(float(density) for density in _listed(densities)))
    cells = [Cell(*cell) for cell in product(rules, grid.widths, grid.densities, seed_list)]
    readings: list[Reading] = []
    faults: dict[Cell, list[Finding]] = {}
    plans: dict[tuple[str, int, float], Plan] = {}
    for cell in tqdm(cells, desc="coordinate check", unit="run", disable=not progress, file=sys.stderr, leave=False):
        run = _Run(cell, grid, loss_fn, prepare, dict(settings, seed=cell.seed), allocation)
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanWarning)  # the report says it once
            warnings.simplefilter("ignore", LRRatioWarning)
            torch.manual_seed(cell.seed)
            run.build(optimizer, lr[cell.rule] if isinstance(lr, Mapping) else lr, weight_decay, scheduler)
            run.train(taken)
        readings += run.recorder.readings(rule=cell.rule, width=cell.width, density=cell.density, seed=cell.seed)
        faults[cell] = run.faults
        plans.setdefault((cell.rule, cell.width, cell.density), run.plan)
    if not any(reading.quantity in JUDGED for reading in readings):
        raise ValueError("nothing could be measured: none of the model's layers is called as a module and returns a tensor")
    return Report(readings, faults={_label(cell): found for cell, found in faults.items() if found}, plans=plans)


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, Iterable) else (value,)


def _label(cell: Cell) -> tuple[str, int, float, int]:
    return cell.rule, cell.width, cell.density, cell.seed


class _Grid:
    """The models to compare, checked before anything runs."""

    def __init__(self, make_model: MakeModel, base_width: int, widths: tuple[int, ...], densities: tuple[float, ...]) -> None:
        if len(set(widths)) < 2 and len(set(densities)) < 2:
            raise ValueError(
                f"nothing to compare: widths={list(widths)} and densities={list(densities)} have one point each; "
                "pass at least two widths or two densities"
            )
        self.make_model, self.widths, self.densities = make_model, tuple(dict.fromkeys(widths)), tuple(dict.fromkeys(densities))
        self.base = self._on_meta(base_width)
        self.base_width = base_width
        other = next((width for width in widths if width != base_width), 2 * base_width)
        self.delta = self._on_meta(other) if base_width in widths else None
        seen = {str(_shapes(self.base)): base_width}
        for width in dict.fromkeys((*widths, other)):
            twin = seen.setdefault(str(_shapes(self._on_meta(width))), width)
            if twin != width:
                raise ValueError(
                    f"make_model({width}) and make_model({twin}) have the same shapes: make_model must use its width"
                )

    def _on_meta(self, width: int) -> nn.Module:
        try:
            with torch.device("meta"):
                return self.make_model(width)
        except Exception:  # a model that computes in its constructor; if it is broken, this raises again
            return self.make_model(width)


def _shapes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in model.parameters()]


class _Run:
    def __init__(
        self,
        cell: Cell,
        grid: _Grid,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        prepare: Callable[[nn.Module, Plan], None] | None,
        settings: dict[str, Any],
        allocation: Callable[[float], Any] | None,
    ) -> None:
        self.cell, self.grid, self.loss_fn, self.prepare = cell, grid, loss_fn, prepare
        density = allocation(cell.density) if allocation is not None and cell.density < 1 else cell.density
        self.settings = {**settings, "rule": cell.rule, "density": density}
        self.faults: list[Finding] = []

    def build(
        self, optimizer: MakeOptimizer, lr: float, weight_decay: float, scheduler: Callable[[torch.optim.Optimizer], Any] | None
    ) -> None:
        self.model = self.grid.make_model(self.cell.width)
        delta = self.grid.delta if self.cell.width == self.grid.base_width else None
        self.plan = parameterize(self.model, base=self.grid.base, delta=delta, reset=False, **self.settings)
        if self.prepare is not None:
            self.prepare(self.model, self.plan)
        if isinstance(optimizer, type):
            groups = param_groups(self.model, self.plan, lr=lr, weight_decay=weight_decay, optimizer=optimizer)
            self.optimizers = [optimizer(groups)]
        else:
            self.optimizers = optimizers(optimizer(self.model, self.plan))
        if not self.optimizers:
            raise ValueError("the optimizer function returned no optimizer: it must return one, or a list of them")
        self.schedulers = [scheduler(one) for one in self.optimizers] if scheduler is not None else []
        self.faults += differences(self.model, self.plan, self.optimizers)
        self.faults += [Finding(text, name.replace("_", " ")) for name, text in self.plan.pending.items()]
        self.faults += [
            Finding(f"{row.name!r} is a lookup table with the role hidden", "embedding as hidden", row.name)
            for row in self.plan
            if row.role == "hidden" and is_lookup(self.model.get_submodule(parent_path(row.name)))
        ]
        self.faults += _decay_faults(self.optimizers)
        self.recorder = Recorder(self.model, self.plan)

    def train(self, batches: list[Any]) -> None:
        self._probe(batches[0])
        for step, batch in enumerate(batches, 1):
            self.recorder.step = step
            self._note_erased_ratios(step)
            loss = self._loss(batch, step)
            if loss is None:
                break
            loss.backward()
            weights = self.recorder.before_update()
            for one in self.optimizers:
                one.step()
                one.zero_grad()
            for one in self.schedulers:
                one.step()
            self.recorder.after_update(weights)
            self._probe(batches[0])
        self.recorder.close()
        known = {(finding.cause, finding.name) for finding in self.faults}
        after = differences(self.model, self.plan, self.optimizers, trained=True)
        if not self.recorder.moved():
            after.append(Finding("no update changed the output of any layer: is the learning rate 0?", "no updates"))
        unmeasured = self.recorder.unmeasured()
        if unmeasured:
            text = "seen only through the block that holds them, if at all; their updates are not measured"
            self.faults += [Finding(text, "unmeasured", name) for name in unmeasured]
        self.faults += [
            Finding(f"{path!r} has a factor and was never called", "uncalled", path) for path in self.recorder.uncalled()
        ]
        self.faults += [finding for finding in after if (finding.cause, finding.name) not in known and finding.cause != "LR"]

    def _probe(self, batch: Any) -> None:
        """The first batch again, leaving no trace: the same dropout each time, running statistics put back."""
        norms = [module for module in self.model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        kept = [{name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)} for module in norms]
        with self.recorder.probe(), torch.random.fork_rng():
            torch.manual_seed(0)
            self.loss_fn(self.model, copy(batch))
        for module, buffers in zip(norms, kept, strict=True):
            for name, buffer in buffers.items():
                getattr(module, name).copy_(buffer)

    def _loss(self, batch: Any, step: int) -> Tensor | None:
        loss = self.loss_fn(self.model, copy(batch))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a scalar tensor, got {shape}; reduce it, e.g. with .mean()")
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on the model's parameters: loss_fn must not detach it or run under no_grad"
            )
        if math.isfinite(loss.item()):
            return loss
        if step == 1:
            raise ValueError(
                f"the loss is {loss.item()} before any step (rule {self.cell.rule}, width {self.cell.width}, density "
                f"{self.cell.density:g}): check the batch, init_std and the alphas"
            )
        self.faults.append(Finding(f"the loss is {loss.item()} at step {step}: lower lr", "diverged"))
        return None

    def _note_erased_ratios(self, step: int) -> None:
        if any(finding.cause in ("LR", "scheduler") for finding in self.faults):
            return
        for one in self.optimizers:
            problem = ratio_problem(one)
            if problem:
                names = " | ".join(group["name"] for group in wrong_groups(one)[1])
                self.faults.append(Finding(f"from step {step}: {problem}", "scheduler", names))


def _decay_faults(all_: list[torch.optim.Optimizer]) -> list[Finding]:
    """Groups whose decay per step differs: decay follows the learning rate's factor."""
    found = []
    for optimizer in all_:
        groups = [group for group in optimizer.param_groups if "lr_factor" in group and group.get("weight_decay")]
        usual = next((group["weight_decay"] for group in groups if group["lr_factor"] == 1), None)
        for group in groups:
            share = group["lr_factor"] * group["weight_decay"] / usual if usual else 1.0
            if not math.isclose(share, 1, rel_tol=1e-4):
                text = (
                    f"group {group['name']!r} decays {share:.4g} times as fast as the embedding: weight decay is coupled to "
                    "the learning rate; use param_groups(..., decay='independent')"
                )
                found.append(Finding(text, "decay", group["name"], share))
    return found
