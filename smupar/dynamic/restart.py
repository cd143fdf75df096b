"""Starts Adam's bias correction again for grown weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smupar.model.seam import Step, seam_of
from smupar.model.sparse_linear import MaskChange
from smupar.model.weights import ModelWeight, hidden_weights
from smupar.plan.facts.optimizers import facts_of, name_of
from smupar.plan.plan import Plan
from smupar.refusals import refuse


class Restart:
    """Gives grown weights Adam's updates with the right bias correction.

    Adam divides its averages by a correction for their start at 0, which depends on the number of the optimizer's steps. The
    averages of a grown weight started later, so this correction is wrong for it. After each step, this class adds to the weight
    the difference that the right correction makes. ``born`` has the step after which each weight grew; it is 0 for weights of
    the first mask.
    """

    def __init__(self, model: nn.Module, plan: Plan, optimizers: Sequence[Optimizer]) -> None:
        """Refuses optimizers without such a correction. Nothing is changed before ``install``."""
        self.model, self.plan, self.optimizers = model, plan, optimizers
        self.born: dict[str, Tensor] = {}
        hidden = {id(weight.parameter) for weight in hidden_weights(model, plan).values()}
        for optimizer in optimizers:
            facts = facts_of(optimizer)
            groups = [group for group in optimizer.param_groups if any(id(p) in hidden for p in group["params"])]
            refuse(
                groups and (not facts.restartable or any(group.get("amsgrad") for group in groups)),
                f"restart_bias_correction is for Adam and AdamW without amsgrad, not {name_of(optimizer)}: leave it out",
            )

    def install(self) -> None:
        for optimizer in self.optimizers:
            # The model owns the phase, so that it replaces the phase of an earlier sparsifier. Two phases would correct twice.
            seam_of(optimizer).add(self.model, correct=self._correct)

    def note(self, weight: ModelWeight, change: MaskChange) -> None:
        """Records the current step for the weights that are new in a mask."""
        parameter = weight.parameter
        state: dict[str, Any] = next((o.state[parameter] for o in weight.optimizers if parameter in o.state), {})
        before = self.born.get(weight.name)
        born = torch.zeros_like(parameter, dtype=torch.float32) if before is None else change.remap(before)
        self.born[weight.name] = born.masked_fill_(change.new_entries, float(state.get("step", 0)))

    @torch.no_grad()
    def _correct(self, step: Step) -> None:
        if step.was_noop:
            return
        optimizer = step.optimizer
        names = {id(weight.parameter): name for name, weight in hidden_weights(self.model, self.plan).items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name in self.born and parameter.grad is not None and parameter in optimizer.state:
                    parameter.add_(self._difference(optimizer.state[parameter], group, self.born[name]))

    @staticmethod
    def _difference(state: Mapping[str, Any], group: dict[str, Any], born: Tensor) -> Tensor:
        """What the optimizer subtracted from grown weights, minus what it should have subtracted."""
        beta1, beta2 = group["betas"]
        count = torch.as_tensor(state["step"], dtype=torch.float32, device=born.device)
        mean, square = state["exp_avg"], state["exp_avg_sq"]

        def update(age: Any) -> Tensor:
            started1, started2 = (-torch.expm1(age * math.log(beta)) for beta in (beta1, beta2))  # 1 - beta^age
            return mean / started1 / ((square / started2).sqrt() + group["eps"])

        difference: Tensor = group["lr"] * (update(count) - update(count - born))
        return difference.masked_fill_(born == 0, 0)
