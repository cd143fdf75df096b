"""Carries moves out on weights: for one model (in ``sparsifiers``), or here for a stack of models that each move in their own
way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from smupar.dynamic.moves import Goal, Move, Rounds, density_factor, init_factor
from smupar.dynamic.restart import Restart
from smupar.execute.stacked import Stack
from smupar.model.weights import Weight
from smupar.plan.optimizers import family_of


class Mover(ABC):
    """Carries moves out for models that each have their own goal and steps. The move decides on new masks, and the weight
    changes itself."""

    restart: Restart | None = None

    def __init__(self, goals: Sequence[Goal]) -> None:
        self.groups: dict[Move, dict[int, Goal]] = {}
        for model, goal in enumerate(goals):
            if goal.move is not None:
                self.groups.setdefault(goal.move, {})[model] = goal
        self.first: dict[str, Tensor] = {}  # what a rewinding model goes back to, by name

    @abstractmethod
    def weights(self) -> Mapping[str, Weight]:
        """The hidden weights whose masks move."""

    @abstractmethod
    def every_weight(self) -> Mapping[str, Weight]:
        """All parameters."""

    @abstractmethod
    def statistics(self) -> Mapping[str, Tensor]:
        """Buffers that training changes. They go back together with the parameters."""

    @abstractmethod
    def _correct(self, name: str, model: int, density: Fraction) -> None:
        """Sets the learning rate of a weight to that of a density."""

    @abstractmethod
    def _start_optimizers(self, models: list[int]) -> None:
        """Makes optimizers forget the steps that they made."""

    def needs_gradient(self, step: int) -> bool:
        """Whether masks will grow by the dense gradient of this step."""
        return any(move.needs_gradient and move.due(step) for move in self.groups)

    @torch.no_grad()
    def start_fixed(self) -> None:
        """Gives models with a fixed correction the learning rates and the init of their last density."""
        for model, goal in ((model, goal) for goals in self.groups.values() for model, goal in goals.items()):
            if goal.correction == "fixed":
                for name, weight in self.weights().items():
                    self._correct(name, model, goal.last[name])
                    weight.scale(init_factor(goal.plan, goal.plan[name], goal.last[name]), model)

    @torch.no_grad()
    def update(self, step: int, weights: Mapping[str, Weight]) -> None:
        """Moves the masks of these weights in every model that is due."""
        for move, goals in self.groups.items():
            if not move.due(step):
                continue
            for name, mask in move.next_masks(weights, goals, step):
                change = weights[name].set_mask(mask, list(goals))
                if self.restart is not None:
                    self.restart.note(weights[name], change)
                for row, (model, goal) in enumerate(goals.items()):
                    if goal.correction == "moment":
                        self._correct(name, model, Fraction(int(mask[row].sum()), mask.shape[1]))
            if isinstance(move, Rounds):
                self._rewind(list(goals))

    def remember(self) -> None:
        """Keeps the weights and statistics to go back to."""
        self.first = {name: weight.snapshot() for name, weight in self.every_weight().items()}
        self.first |= {name: statistic.clone() for name, statistic in self.statistics().items()}

    def _rewind(self, models: list[int]) -> None:
        for name, weight in self.every_weight().items():
            weight.restore(self.first[name], models)
        for name, statistic in self.statistics().items():
            if name in self.first:  # checkpoints had none of them at first
                statistic.copy_(self.first[name])
        self._start_optimizers(models)


class StackedSparsifier(Mover):
    """Moves the masks of a stack. Call ``before`` and ``after`` at each step, with its number from 1 on. Together they do what
    ``Sparsifier.step`` does for one model."""

    def __init__(self, stack: Stack, goals: Sequence[Goal]) -> None:
        super().__init__(goals)
        self.stack, self.family, self.plans = stack, family_of(stack.kind), [goal.plan for goal in goals]
        self.start_fixed()
        if any(isinstance(move, Rounds) for move in self.groups):
            self.remember()

    def weights(self) -> Mapping[str, Weight]:
        return {name: self.stack.weights[name] for name in self.stack.hidden}

    def every_weight(self) -> Mapping[str, Weight]:
        return self.stack.weights

    def statistics(self) -> Mapping[str, Tensor]:
        return {}  # models that have some are not stacked

    def before(self, step: int, batch: Sequence[Tensor]) -> None:
        if self.needs_gradient(step):
            self.stack.keep_gradients(batch)

    def after(self, step: int) -> None:
        self.update(step, self.weights())
        self.stack.drop_gradients()

    def _correct(self, name: str, model: int, density: Fraction) -> None:
        plan = self.plans[model]
        self.stack.correct(name, model, density_factor(plan, plan[name], density, self.family))

    def _start_optimizers(self, models: list[int]) -> None:
        self.stack.tensors["number"][models] = 0
