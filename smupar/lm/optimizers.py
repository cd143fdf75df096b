"""The optimizers that a run can name, made from its plan. Muon takes hidden matrices only, so it comes with an AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smupar.apply import attach
from smupar.lm.config import RunConfig
from smupar.lm.gpt import GPT
from smupar.optim import param_groups
from smupar.plan import Plan
from smupar.rules import family_of

_WITH_BETAS = {"adamw", "adam", "adamax", "nadam", "radam", "lion"}
_WITH_EPS = {"adamw", "adam", "adamax", "nadam", "radam", "rmsprop", "adagrad"}
_FUSED = {"adamw", "adam", "sgd", "adagrad"}
CAPTURABLE = ("adamw", "adam")
"""Those whose step torch can put into a CUDA graph."""


def make_optimizers(model: GPT, plan: Plan, config: RunConfig, *, capturable: bool = False) -> list[torch.optim.Optimizer]:
    """One optimizer, or Muon and the AdamW beside it. A capturable one has its learning rates on the GPU."""
    name = config.optimizer.lower()
    family_of(name)  # names an unknown one, with the remedy
    if capturable:
        lr = torch.tensor(config.lr, device=next(model.parameters()).device)
        return [_make(name, model, plan, config, lr=lr, capturable=True)]
    if name != "muon":
        return [_make(name, model, plan, config, lr=config.lr)]
    muon = _make("muon", model, plan, config, lr=config.lr, only="hidden")
    attach(model, plan, muon)  # its updates mix entries and have to be masked
    rest = config.lr if config.rest_lr is None else config.rest_lr
    return [muon, _make("adamw", model, plan, config, lr=rest, only="rest")]


def set_lr(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    """Every group's learning rate as a share of its own peak, so that ratios stay."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            peak = group.setdefault("peak_lr", float(group["lr"]))
            if isinstance(group["lr"], Tensor):  # the one that a captured step reads
                group["lr"].fill_(peak * share)
            else:
                group["lr"] = peak * share


def _make(
    name: str,
    model: GPT,
    plan: Plan,
    config: RunConfig,
    *,
    lr: float | Tensor,
    only: str | None = None,
    capturable: bool = False,
) -> torch.optim.Optimizer:
    groups = param_groups(
        model,
        plan,
        lr=lr,
        weight_decay=config.weight_decay,
        optimizer=name,
        decay=config.decay,
        eps=config.eps_scaling if name in _WITH_EPS else "constant",
        eps_value=config.eps if name in _WITH_EPS else None,
        only=only,
    )
    options: dict[str, Any] = {"capturable": True} if capturable else {}
    if name in _WITH_BETAS:
        options["betas"] = config.betas
    if name in ("sgd", "muon"):
        options["momentum"] = config.momentum
    if name in _FUSED and next(model.parameters()).device.type == "cuda":
        options["fused"] = True
    return _class(name)(groups, **options)


def _class(name: str) -> Any:
    if name == "lion":
        try:
            from lion_pytorch import Lion  # type: ignore[import-untyped]
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("torch has no Lion: pip install lion-pytorch") from error
        return Lion
    classes = {known.lower(): getattr(torch.optim, known) for known in dir(torch.optim) if known[0].isupper()}
    return classes[name]
