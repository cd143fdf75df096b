"""Gathers models of equal shapes, with their plans and hyperparameters, into tensors with a leading dimension of models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smupar.model.csr import MASK
from smupar.model.factors import add_missing_factors
from smupar.model.weights import weight_of
from smupar.optim.groups import groups_by_optimizer
from smupar.plan.facts.layers import draws_random_numbers, has_running_statistics
from smupar.plan.facts.optimizers import OptimizerFacts, family_of, names_with
from smupar.plan.plan import Plan
from smupar.refusals import refuse

SUPPORTED = names_with("stackable")


@dataclass(frozen=True)
class Hyperparameters:
    """One model's optimizer: the arguments of ``param_groups`` and of the optimizer, with torch's defaults."""

    lr: float
    # Learning rate of an AdamW that trains all parameters but hidden weights. If it is None, there is no such AdamW, except
    # beside Muon: there its learning rate is ``lr``.
    rest_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    eps_scaling: str = "constant"
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: str = "independent"
    decayed: str = "all"
    clip: float | None = None


@dataclass(frozen=True)
class StackTensors:
    """The tensors that a step reads and writes, with a leading dimension of models. Dictionary keys are parameter names."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    masks: dict[str, Tensor]
    state: dict[str, list[Tensor]]  # state of the optimizer
    constants: dict[str, tuple[Tensor, ...]]  # learning rate, decay and epsilon, from the plan
    rates: dict[str, Tensor]  # further factors on the learning rates of hidden weights: ``measured``, or else ``corrections``
    corrections: dict[str, Tensor]
    measured: dict[str, Tensor]  # NaN for models without a measurement
    independent: Tensor  # whether weight decay is independent of the learning rate
    alive: Tensor  # whether the model is still trained; its loss has been finite so far
    number: Tensor  # number of the step
    clip: Tensor | None  # largest allowed gradient norm; None if no model clips


@torch.no_grad()
def gathered(
    models: Sequence[nn.Module],
    plans: Sequence[Plan],
    hyperparameters: Sequence[Hyperparameters],
    optimizer: str,
    facts: Mapping[str, OptimizerFacts],
) -> StackTensors:
    """Copies of the tensors of parameterized models. ``facts`` are about the optimizer of each parameter."""
    _refuse(models, plans, hyperparameters, optimizer)
    hidden = {row.name for row in plans[0] if row.role == "hidden"}
    add_missing_factors(models, plans)
    masked = sorted(hidden | {row.name for plan in plans for row in plan if row.masked})
    mask_buffers = {f"{name}{MASK}" for name in masked}
    params = _stacked([dict(model.named_parameters()) for model in models])
    device = next(iter(params.values())).device
    clips = [math.inf if h.clip is None else h.clip for h in hyperparameters]
    return StackTensors(
        params=params,
        buffers=_stacked([{name: b for name, b in m.named_buffers() if name not in mask_buffers} for m in models]),
        masks={name: torch.stack([weight_of(model, name).full_mask() for model in models]) for name in masked},
        state={
            name: [torch.zeros_like(param) for _ in range(facts[name].num_states_with(hyperparameters[0].momentum))]
            for name, param in params.items()
        },
        constants=_constants(models, plans, hyperparameters, optimizer),
        rates={name: torch.ones(len(models), device=device) for name in hidden},
        corrections={name: torch.ones(len(models), device=device) for name in hidden},
        measured={name: torch.full((len(models),), math.nan, device=device) for name in hidden},
        independent=torch.tensor([h.decay != "coupled" for h in hyperparameters], device=device),
        alive=torch.ones(len(models), dtype=torch.bool, device=device),
        number=torch.zeros(len(models), device=device),
        clip=torch.tensor(clips, device=device) if min(clips) < math.inf else None,
    )


def _refuse(
    models: Sequence[nn.Module], plans: Sequence[Plan], hyperparameters: Sequence[Hyperparameters], optimizer: str
) -> None:
    family_of(optimizer)
    refuse(
        optimizer not in SUPPORTED,
        f"{optimizer} cannot be stacked: use one of {', '.join(SUPPORTED)}, or train the models one by one",
    )
    refuse(
        not models or not len(models) == len(plans) == len(hyperparameters),
        f"{len(models)} models, {len(plans)} plans, {len(hyperparameters)} hyperparameters: pass one of each for every model",
    )
    for reason in filter(None, map(_why_not_stackable, models)):
        raise ValueError(f"{reason}: train these models one by one")
    shapes = [{name: tuple(p.shape) for name, p in model.named_parameters()} for model in models]
    for index, other in enumerate(shapes):
        if other != shapes[0]:
            name = next(name for name in {**shapes[0], **other} if shapes[0].get(name) != other.get(name))
            raise ValueError(
                f"{name!r} has shape {other.get(name)} in model {index}, but {shapes[0].get(name)} in the first: only models "
                "of equal shapes can be stacked"
            )
    refuse(
        len({(h.betas, h.momentum, h.rest_lr is None) for h in hyperparameters}) > 1,
        "betas, momentum and whether there is a rest_lr must be the same for all models: make a stack for each",
    )


def _why_not_stackable(model: nn.Module) -> str | None:
    """The property of a model that prevents stacking; None if there is none. A stacked step is a function of weights and batch
    only."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            return f"{name!r} is frozen, but a stack trains every weight"
    for path, module in model.named_modules():
        if has_running_statistics(module) and module.training and module.track_running_stats:
            return f"{path!r} keeps running statistics, which a stack would lose"
        if draws_random_numbers(module):
            return f"{path!r} draws random numbers in the forward pass, which a stack cannot do"
    return None


def _stacked(tensors: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.stack([model[name].detach() for model in tensors]) for name in tensors[0]}


def _constants(
    models: Sequence[nn.Module], plans: Sequence[Plan], hyperparameters: Sequence[Hyperparameters], optimizer: str
) -> dict[str, tuple[Tensor, ...]]:
    """Learning rate, decay and epsilon of every model, from ``param_groups``, by parameter name."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for model, plan, h in zip(models, plans, hyperparameters, strict=True):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        named = groups_by_optimizer(
            model,
            plan,
            optimizer,
            lr=h.lr,
            rest_lr=h.rest_lr,
            eps=h.eps_scaling,
            eps_value=h.eps,
            weight_decay=h.weight_decay,
            decay=h.decay,
            decayed=h.decayed,
        )
        for group in (group for _, groups in named for group in groups):
            for parameter in group["params"]:
                values = (group["lr"], group["weight_decay"], group.get("eps", h.eps))
                rows.setdefault(names[id(parameter)], []).append(values)
    device = next(models[0].parameters()).device
    return {n: torch.tensor(values, dtype=torch.float64).float().to(device).unbind(1) for n, values in rows.items()}
