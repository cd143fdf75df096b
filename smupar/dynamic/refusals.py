"""Refuses models, optimizers and goals with which masks cannot move, before anything changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from smupar.dynamic.policies import MaskGoal, init_factor
from smupar.model.attached import check_parameterized, check_plan
from smupar.model.weights import ModelWeight, hidden_weights
from smupar.plan.facts.optimizers import facts_of
from smupar.plan.masks import UNSTRUCTURED
from smupar.plan.plan import Plan
from smupar.refusals import refuse

_MOVABLE = (*UNSTRUCTURED, "given", None)


def refuse_what_cannot_move(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], goal: MaskGoal, steps: int | None
) -> None:
    plan = goal.plan
    check_parameterized(model, "before masks move")
    check_plan(model, plan)
    refuse(
        steps is not None and goal.policy.stop > steps,
        f"masks would move until step {goal.policy.stop}, but the run ends at {steps}: choose an earlier stop",
    )
    structured = sorted({str(row.pattern) for row in plan if row.role == "hidden" and row.pattern not in _MOVABLE})
    if structured:
        raise ValueError(f"masks that move are unstructured, so pattern {structured[0]!r} would be lost: use pattern='random'")
    for reason in filter(None, (facts_of(optimizer).no_moves for optimizer in optimizers)):
        raise ValueError(reason)
    weights = trained_weights(model, plan, optimizers)
    _refuse_other_optimizers(weights, optimizers)
    refuse(
        goal.correction is None and not any(w.is_masked or plan[n].masked for n, w in weights.items()),
        "no hidden weight is sparse, so no mask can move: pass a density below 1 to parameterize",
    )
    if goal.correction == "fixed":
        _refuse_scaled(weights, goal)


def _refuse_other_optimizers(weights: Mapping[str, ModelWeight], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuses optimizers that lack a hidden weight of the model that is trained."""
    in_groups = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, weight in weights.items():
        refuse(
            id(weight.parameter) not in in_groups,
            f"{name!r} is in none of the optimizers: pass the optimizer that trains this model (or a list of several), "
            "made from its param_groups",
        )


def _refuse_scaled(weights: Mapping[str, ModelWeight], goal: MaskGoal) -> None:
    """Refuses weights whose std is not the plan's init std, since the weights of a checkpoint have been scaled already."""
    for name, weight in weights.items():
        planned, values = goal.plan[name].init_std, weight.full()
        if init_factor(goal.plan, goal.plan[name], goal.last[name]) == 1 or not planned or values.is_meta:
            continue
        kept = values[weight.full_mask()].double()
        std = float(kept.square().mean().sqrt())
        refuse(
            abs(std / planned - 1) > max(0.2, 5 / math.sqrt(2 * len(kept))),
            f"{name!r} has std {std:.4g}, the plan's init {planned:.4g}: correction='fixed' scales the init, so "
            "make the sparsifier before a checkpoint is loaded",
        )


def trained_weights(model: nn.Module, plan: Plan, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, ModelWeight]:
    """The hidden weights that are trained, with a mask or without."""
    hidden = hidden_weights(model, plan, optimizers)
    return {name: weight for name, weight in hidden.items() if weight.parameter.requires_grad}
