"""Makes the optimizers of a run from its plan. Muon takes hidden matrices only, so an AdamW trains the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smupar.lm.config.run_config import RunConfig
from smupar.lm.model.gpt import GPT
from smupar.optim.groups import groups_by_optimizer
from smupar.plan.facts.optimizers import facts_of
from smupar.plan.plan import Plan


def make_optimizers(model: GPT, plan: Plan, config: RunConfig, *, capturable: bool = False) -> list[torch.optim.Optimizer]:
    """One optimizer, or two, such as Muon and its AdamW. Capturable optimizers have their learning rates on the GPU."""
    name, device = config.optimizer.lower(), next(model.parameters()).device
    named = groups_by_optimizer(
        model,
        plan,
        name,
        lr=torch.tensor(config.lr, device=device) if capturable else config.lr,
        rest_lr=config.rest_lr,
        eps=config.eps_scaling,
        eps_value=config.eps,
        weight_decay=config.weight_decay,
        decay=config.decay,
        decayed=config.decayed,
    )
    optimizers: list[torch.optim.Optimizer] = []
    for kind, groups in named:
        options: dict[str, Any] = {"capturable": True} if capturable else {}
        facts = facts_of(kind)
        if facts.betas:
            options["betas"] = config.betas
        if facts.momentum:
            options["momentum"] = config.momentum
        if facts.fused:
            options["fused"] = True
        optimizers.append(_class_called(facts.name)(groups, **options))
    return optimizers


def set_lr(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    """Sets the learning rate of every group to a share of its own peak, which keeps the ratios."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            peak = group.setdefault("peak_lr", float(group["lr"]))
            if isinstance(group["lr"], Tensor):  # in place, since a captured step reads this tensor
                group["lr"].fill_(peak * share)
            else:
                group["lr"] = peak * share


def _class_called(name: str) -> Any:
    if name != "Lion":
        return getattr(torch.optim, name)
    try:
        from lion_pytorch import Lion  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("torch has no Lion: pip install lion-pytorch") from error
    return Lion
