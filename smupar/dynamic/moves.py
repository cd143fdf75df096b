"""Carries a policy out on weights of any kind. The policy decides on new masks, ``Weight.set_mask`` moves them, and the mover
adjusts learning rates and init.

``Sparsifier`` does this for one model, ``StackedSparsifier`` for a stack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import Generic, TypeVar

import torch
from torch import Tensor

from smupar.dynamic.policies import MaskGoal, Policy, init_factor
from smupar.model.sparse_linear import MaskChange
from smupar.model.weights import Weight

W = TypeVar("W", bound=Weight)


class MaskMover(ABC, Generic[W]):
    """Moves the masks of one model or of a stack. The masks of each model move by its own goal and at its own steps."""

    def __init__(self, goals: Mapping[int, MaskGoal]) -> None:
        """``goals`` has the goals by the model's number. A model without a goal keeps its masks."""
        self.goals = goals
        self.policies: dict[Policy, dict[int, MaskGoal]] = {}  # policy -> the goals of the models that share it
        for model, goal in goals.items():
            self.policies.setdefault(goal.policy, {})[model] = goal
        self.remembered: dict[str, Tensor] = {}  # name of a parameter or buffer -> the values to rewind to

    @abstractmethod
    def weights(self) -> Mapping[str, W]:
        """The hidden weights whose masks move."""

    @abstractmethod
    def all_weights(self) -> Mapping[str, W]:
        """All parameters, as weights."""

    @abstractmethod
    def _correct(self, name: str, model: int, density: Fraction) -> None:
        """Sets the learning rate of a weight for a density."""

    def _see_move(self, weight: W, change: MaskChange) -> None:
        """What else follows from a move; by default nothing."""

    def needs_gradient(self, done: int) -> bool:
        return any(policy.needs_gradient and policy.due(done) for policy in self.policies)

    @torch.no_grad()
    def start_fixed(self) -> None:
        """Gives models with a fixed correction the learning rates and init of their last density."""
        for model, goal in self.goals.items():
            if goal.correction == "fixed":
                for name, weight in self.weights().items():
                    self._correct(name, model, goal.last[name])
                    weight.scale(torch.tensor([init_factor(goal.plan, goal.plan[name], goal.last[name])]), [model])

    @torch.no_grad()
    def update(self, done: int, weights: Mapping[str, W]) -> None:
        """Moves the masks of these weights in every model that is due after ``done`` steps."""
        for policy, goals in self.policies.items():
            if not policy.due(done):
                continue
            for name, mask in policy.next_masks(weights, goals, done):
                change = weights[name].set_mask(mask, list(goals))
                self._see_move(weights[name], change)
                for row, (model, goal) in enumerate(goals.items()):
                    if goal.correction == "moment":
                        self._correct(name, model, Fraction(int(mask[row].sum()), mask.shape[1]))
            if policy.rewinds_to is not None:
                self.rewind(list(goals))

    def remember(self) -> None:
        """Copies the values of this step, for ``rewind``."""
        self.remembered = {name: weight.snapshot() for name, weight in self.all_weights().items()}

    def rewind(self, models: list[int]) -> None:
        """Restores the remembered values of these models, and resets their optimizers."""
        for name, weight in self.all_weights().items():
            weight.restore(self.remembered[name], models)
