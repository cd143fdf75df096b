"""Moves the masks of all models of a stack at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from torch import Tensor

from smupar.dynamic.moves import MaskMover
from smupar.dynamic.policies import MaskGoal, density_factor
from smupar.execute.stack.stack import Stack
from smupar.execute.stack.weight import StackedWeight
from smupar.plan.facts.optimizers import family_of


class StackedSparsifier(MaskMover[StackedWeight]):
    """Moves the masks of a stack. Call ``before`` and then ``after`` around each step, with the step's number from 0 on.
    Together they do what ``Sparsifier.step`` does for one model."""

    def __init__(self, stack: Stack, goals: Mapping[int, MaskGoal]) -> None:
        super().__init__(goals)
        self.stack, self.family = stack, family_of(stack.kind)
        self.start_fixed()
        if any(policy.rewinds_to == 0 for policy in self.policies):
            self.remember()

    def weights(self) -> Mapping[str, StackedWeight]:
        return {name: self.stack.weights[name] for name in self.stack.hidden}

    def all_weights(self) -> Mapping[str, StackedWeight]:
        return self.stack.weights

    def before(self, step: int, batch: Sequence[Tensor]) -> None:
        if self.needs_gradient(step + 1):
            self.stack.keep_gradients(batch)

    def after(self, step: int) -> None:
        self.update(step + 1, self.weights())
        self.stack.drop_gradients()

    def rewind(self, models: list[int]) -> None:
        super().rewind(models)
        self.stack.tensors.number[models] = 0

    def _correct(self, name: str, model: int, density: Fraction) -> None:
        plan = self.goals[model].plan
        self.stack.correct(name, model, density_factor(plan, plan[name], density, self.family))
