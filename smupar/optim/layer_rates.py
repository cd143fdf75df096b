"""Learning rates of single hidden weights, which may change at each step and work with any scheduler.

The factor is written into ``group["lr"]`` before the step, and the scheduled value is restored after it, so schedulers never
see the factor. Weight decay that is independent of the learning rate stays independent. Every hidden weight needs its own
group, so the groups of ``param_groups`` are split, which must happen before a scheduler is made.
"""

from __future__ import annotations

from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from smupar.model.attached import unwrapped
from smupar.model.seam import Step, optimizers, seam_of
from smupar.plan.plan import Plan

_WEIGHT = "hidden_weight"


class LayerRates:
    """Learning-rate factors of hidden weights, by name: ``corrections`` multiply the plan's factor, ``measured`` replaces
    it."""

    def __init__(self) -> None:
        self.corrections: dict[str, float] = {}
        self.measured: dict[str, float] = {}

    def set_rates(self, step: Step) -> None:
        groups = group_of_weight(step.optimizer)
        # (weights, 3): the plan's factor, its correction, and the measured factor
        rows = [(group["lr_factor"], self.corrections.get(n, 1.0), self.measured.get(n, nan)) for n, group in groups.items()]
        planned, corrections, measured = torch.tensor(rows, dtype=torch.float64, device="cpu").view(-1, 3).unbind(1)
        changes = measured_or_corrected(measured, planned * corrections) / planned
        for group, change in zip(groups.values(), changes.tolist(), strict=True):
            group["scheduled_lr"] = scheduled = group.pop("scheduled_lr", group["lr"])  # left there by a step that failed
            group["lr"] = scheduled * change
            if group.get("decay") == "independent":
                group["planned_decay"] = decay = group.pop("planned_decay", group["weight_decay"])
                group["weight_decay"] = decay / change

    def restore_rates(self, step: Step) -> None:
        for group in group_of_weight(step.optimizer).values():
            group["lr"] = group.pop("scheduled_lr")
            group["weight_decay"] = group.pop("planned_decay", group["weight_decay"])


def measured_or_corrected(measured: Tensor, corrected: Tensor) -> Tensor:
    """The measured factor, or the corrected factor where the measured factor is NaN."""
    return torch.where(measured.isnan(), corrected, measured)


def layer_rates(model: nn.Module, plan: Plan, optimizer: Any) -> LayerRates:
    """The layer rates of an optimizer, or of several optimizers on one model. The first call makes them."""

    def hidden_names() -> dict[int, str]:
        return {id(p): n for n, p in unwrapped(model).named_parameters() if n in plan and plan[n].role == "hidden"}

    names = hidden_names()
    present = {inner: seam_of(inner).owner(LayerRates) for inner in optimizers(optimizer)}
    for inner, known_rates in present.items():
        (_refuse_groups if known_rates is None else _refuse_other_model)(inner, names)
    rates = next(filter(None, present.values()), None) or LayerRates()
    for inner in (inner for inner, known_rates in present.items() if known_rates is None):
        _split(inner, names)
        seam_of(inner).add(rates, set_rates=rates.set_rates, restore_rates=rates.restore_rates)
        # A state dict may have been saved without group names.
        inner.register_load_state_dict_post_hook(lambda loaded: _name_groups(loaded, hidden_names()))
    return rates


def group_of_weight(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Name of a hidden weight -> its group, after ``layer_rates``."""
    return {group[_WEIGHT]: group for group in optimizer.param_groups if _WEIGHT in group}


def _refuse_groups(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    for group in optimizer.param_groups:
        hidden = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        if hidden and "lr_factor" not in group:
            raise ValueError(
                f"the optimizer's group with {hidden[0]!r} was not made by smupar.param_groups: "
                "build the optimizer from param_groups(model, plan, lr=...)"
            )
        if hidden and len(group["params"]) > 1 and (hasattr(optimizer.step, "_wrapped_by_lr_sched") or "initial_lr" in group):
            raise ValueError(
                "this optimizer already has a scheduler, which would miss the new groups of single hidden weights: make the "
                "scheduler afterwards"
            )


def _refuse_other_model(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    """Refuses an optimizer that was split for another model. Rates are found by name, and two models may share names."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names and group.get(_WEIGHT) != names[id(parameter)]:
                raise ValueError(
                    f"{names[id(parameter)]!r} has no group of its own in this optimizer, whose groups were already split for "
                    "another model: give each model its own optimizer"
                )


def _name_groups(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    for group in optimizer.param_groups:
        if len(group["params"]) == 1 and id(group["params"][0]) in names:
            group[_WEIGHT] = names[id(group["params"][0])]


def _split(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    groups = []
    for group in optimizer.param_groups:
        rest = [parameter for parameter in group["params"] if id(parameter) not in names]
        for parameter in group["params"]:
            if id(parameter) in names:
                name = names[id(parameter)]
                groups.append({**group, "params": [parameter], "name": f"{group['name']}: {name}", _WEIGHT: name})
        if rest:
            groups.append({**group, "params": rest})
    for group in groups:
        if isinstance(group["lr"], torch.Tensor):  # schedulers write into it
            group["lr"] = group["lr"].clone()
    optimizer.param_groups[:] = groups
