"""Holds the size of hidden weights at its initial value, as an alternative to weight decay.

Without decay, training makes hidden weights larger, and in sparse models they grow most. Decay slows this down. Scaling each
weight back after every step prevents it, and leaves the learning rate as the only thing that decides how fast weights turn.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from smupar.model.weights import Weight
from smupar.plan.plan import Plan


class HeldSizes:
    """``step``, called after each step of the optimizers, gives every hidden weight the RMS with which its plan draws it.

    weights  hidden weights by name, of one model or of a stack
    plans    the plans of the models whose weights are held, by the model's number in the stack; 0 for a model alone
    """

    def __init__(self, weights: Mapping[str, Weight], plans: Mapping[int, Plan]) -> None:
        self.weights, self.models = weights, list(plans)
        self.stds = {name: torch.tensor([plan[name].init_std for plan in plans.values()]) for name in weights}

    @torch.no_grad()
    def step(self) -> None:
        for name, weight in self.weights.items():
            values, mask = weight.rows(self.models)
            size = (values.float().square().sum(1) / mask.sum(1)).sqrt()
            self.stds[name] = std = self.stds[name].to(size.device)
            weight.scale(std / size, self.models)
