"""Carrying moves out on weights: of one model, or of a stack of models that each move in their own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from smupar.dynamic.moves import DropAndGrow, Move, Rounds, density_factor, init_factor, key_of, num_kept, random_scores, ranked
from smupar.execute.stacked import Stack
from smupar.model.weights import Weight
from smupar.plan.optimizers import family_of
from smupar.plan.plan import Plan


@dataclass(frozen=True)
class Goal:
    """How the masks of one model move.

    last        densities that a pruned model ends with
    correction  of its learning rates, by Table 1. "moment": that of the density it has at the moment; "fixed": that of the last
                density from the start, and the init of that density; None: none, as where they are measured
    """

    plan: Plan
    move: Move | None
    last: Mapping[str, Fraction] = field(default_factory=dict)
    correction: str | None = None


class Mover(ABC):
    """Moves masks, each model's by its own goal and at its own steps, with all that this entails."""

    def __init__(self, goals: Sequence[Goal]) -> None:
        self.goals = goals
        self.groups: dict[Move, list[int]] = {}
        for model, goal in enumerate(goals):
            if goal.move is not None:
                self.groups.setdefault(goal.move, []).append(model)
        self.first: dict[str, Tensor] = {}
        """What a rewinding model goes back to, by parameter name."""

    @abstractmethod
    def weights(self) -> Mapping[str, Weight]:
        """The hidden weights whose masks move."""

    @abstractmethod
    def every_weight(self) -> Mapping[str, Weight]:
        """All parameters."""

    @abstractmethod
    def _correct(self, name: str, model: int, density: Fraction) -> None:
        """Sets the learning rate of a weight to that of a density."""

    @abstractmethod
    def _start_optimizers(self, models: list[int]) -> None:
        """Makes optimizers forget the steps that they made."""

    def due(self, step: int) -> bool:
        return any(move.due(step) for move in self.groups)

    def needs_gradient(self, step: int) -> bool:
        """Whether masks grow by the dense gradient of a step."""
        return any(isinstance(move, DropAndGrow) and move.grow == "gradient" and move.due(step) for move in self.groups)

    @torch.no_grad()
    def start_fixed(self) -> None:
        """Gives models with a fixed correction the learning rates and the init of their last density."""
        for model, goal in enumerate(self.goals):
            if goal.move is not None and goal.correction == "fixed" and goal.last:
                for name, weight in self.weights().items():
                    self._correct(name, model, goal.last[name])
                    weight.scale(init_factor(goal.plan, goal.plan[name], goal.last[name]), model)

    @torch.no_grad()
    def update(self, step: int) -> None:
        for move, models in self.groups.items():
            if move.due(step):
                self._carry_out(move, models, step)

    def _carry_out(self, move: Move, models: list[int], step: int) -> None:
        weights = self.weights()
        for name, mask in self._next_masks(move, models, step, weights):
            self._set_mask(weights[name], mask, models)
            for row, model in enumerate(models):
                if self.goals[model].correction == "moment":
                    self._correct(name, model, Fraction(int(mask[row].sum()), mask.shape[1]))
        if isinstance(move, Rounds):
            self.rewind(models)

    def _next_masks(
        self, move: Move, models: list[int], step: int, weights: Mapping[str, Weight]
    ) -> Iterator[tuple[str, Tensor]]:
        """Name and new mask, (models, entries), of weights that move."""
        goals = [self.goals[model] for model in models]
        if isinstance(move, DropAndGrow):
            for name, weight in weights.items():
                values, mask = weight.rows(models)
                keys = torch.tensor([key_of(goal.plan.seed, step, name) for goal in goals], device=mask.device)
                score = self._gradient(weight, models) if move.grow == "gradient" else random_scores(mask.shape[1], keys)
                if score is not None:
                    yield name, move.moved(values, mask, score, step)
            return

        def nums(name: str) -> list[int]:
            rows = [(goal.plan[name], goal.last[name]) for goal in goals]
            return [num_kept(name, row.shape, move.density(row.density, last, step)) for row, last in rows]

        layers = ((name, *weight.rows(models), nums(name)) for name, weight in weights.items())
        yield from ranked(layers, move.pool, "prune less, or with pool='layer'")

    def _gradient(self, weight: Weight, models: list[int]) -> Tensor | None:
        """Sizes of the dense gradient, (models, entries); None where the mask should stay."""
        return weight.dense_grad(models).abs()

    def _set_mask(self, weight: Weight, mask: Tensor, models: list[int]) -> None:
        weight.set_mask(mask, models)

    def remember(self) -> None:
        """Keeps the weights to go back to."""
        self.first = {name: weight.snapshot() for name, weight in self.every_weight().items()}

    def rewind(self, models: list[int]) -> None:
        for name, weight in self.every_weight().items():
            weight.restore(self.first[name], models)
        self._start_optimizers(models)
        for model in models:  # where rates were measured, those are of the round before
            if self.goals[model].correction == "fixed":
                for name, density in self.goals[model].last.items():
                    self._correct(name, model, density)


class StackedSparsifier(Mover):
    """Moves the masks of a stack. ``before`` a step and ``after`` it, both with its number from 1 on, do what
    ``Sparsifier.step`` does for one model."""

    def __init__(self, stack: Stack, goals: Sequence[Goal]) -> None:
        super().__init__(goals)
        self.stack, self.family = stack, family_of(stack.kind)
        self.start_fixed()
        if any(isinstance(move, Rounds) for move in self.groups):
            self.remember()

    def weights(self) -> Mapping[str, Weight]:
        return {name: self.stack.weights[name] for name in self.stack.hidden}

    def every_weight(self) -> Mapping[str, Weight]:
        return self.stack.weights

    def before(self, step: int, batch: Sequence[Tensor]) -> None:
        if self.needs_gradient(step):
            self.stack.keep_gradients(batch)

    def after(self, step: int) -> None:
        self.update(step)
        self.stack.drop_gradients()

    def _correct(self, name: str, model: int, density: Fraction) -> None:
        plan = self.goals[model].plan
        self.stack.tensors["rates"][name][model] = density_factor(plan, plan[name], density, self.family)

    def _start_optimizers(self, models: list[int]) -> None:
        self.stack.tensors["number"][models] = 0
