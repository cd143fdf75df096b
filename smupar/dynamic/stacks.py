"""Moving the masks of a stack of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from smupar.dynamic.moves import (
    DropAndGrow,
    Move,
    Pruning,
    Rounds,
    density_factor,
    init_factor,
    key_of,
    num_kept,
    pruned,
    random_scores,
)
from smupar.optimizers import family_of
from smupar.plan import Plan
from smupar.stacked import Stack


class StackedSparsifier:
    """Moves the masks of a stack of models: each by its own ``move``, which may be None, and at its own steps.

    ``before`` a step and ``after`` it, both with its number from 1 on, do what ``Sparsifier.step`` does for one model. A pruned
    model goes to its entry of ``last``; its learning rate follows by Table 1, unless ``corrections`` says None for it.
    """

    def __init__(
        self,
        stack: Stack,
        plans: Sequence[Plan],
        moves: Sequence[Move | None],
        last: Sequence[Mapping[str, Fraction]],
        corrections: Sequence[str | None],
    ) -> None:
        self.stack, self.plans, self.last, self.corrections = stack, plans, last, corrections
        self.groups: dict[Move, list[int]] = {}
        for index, move in enumerate(moves):
            if move is not None:
                self.groups.setdefault(move, []).append(index)
        self.gradients: dict[str, Tensor] = {}
        self.family = family_of(stack.kind)
        for index, correction in enumerate(corrections):
            if isinstance(moves[index], (Pruning, Rounds)) and correction == "fixed":
                for name, density in last[index].items():
                    self._correct(name, index, density)
                    stack.tensors["params"][name][index] *= init_factor(plans[index], plans[index][name], density)
        starts_anew = any(isinstance(move, Rounds) for move in moves)
        self.first = {name: param.clone() for name, param in stack.tensors["params"].items()} if starts_anew else {}

    def before(self, step: int, batch: Sequence[Tensor]) -> None:
        moves = [move for move in self.groups if move.due(step)]
        if any(isinstance(move, DropAndGrow) and move.grow == "gradient" for move in moves):
            self.gradients = self.stack.gradients(batch)

    @torch.no_grad()
    def after(self, step: int) -> None:
        for move, indices in self.groups.items():
            if move.due(step):
                for name in self.stack.hidden:
                    self._move(move, indices, name, step)
                if isinstance(move, Rounds):
                    self._start_anew(indices)
        self.gradients = {}

    def _start_anew(self, indices: list[int]) -> None:
        tensors = self.stack.tensors
        for name, param in tensors["params"].items():
            first = self.first[name][indices]
            param[indices] = first * tensors["masks"][name][indices] if name in tensors["masks"] else first
            for state in tensors["state"][name]:
                state[indices] = 0
        tensors["number"][indices] = 0
        for index in indices:  # what was measured is of the round before
            if self.corrections[index] == "fixed":
                for name, density in self.last[index].items():
                    self._correct(name, index, density)

    def _move(self, move: Move, indices: list[int], name: str, step: int) -> None:
        tensors = self.stack.tensors
        masks, weights = tensors["masks"][name], tensors["params"][name]
        old, weight = masks[indices].flatten(1), weights[indices].flatten(1)
        if isinstance(move, DropAndGrow):
            if move.grow == "gradient":
                score = self.gradients[name][indices].flatten(1).abs()
            else:
                keys = [key_of(self.plans[index].seed, step, name) for index in indices]
                score = random_scores(old.shape[1], torch.tensor(keys, device=old.device))
            new = move.moved(weight, old, score, step)
        else:
            rows = [self.plans[index][name] for index in indices]
            wanted = [move.density(row.density, self.last[index][name], step) for index, row in zip(indices, rows, strict=True)]
            nums = [num_kept(name, row.shape, density) for row, density in zip(rows, wanted, strict=True)]
            new = pruned(weight, old, torch.tensor(nums, device=old.device))
            for index, num in zip(indices, nums, strict=True):
                if self.corrections[index] == "moment":
                    self._correct(name, index, Fraction(num, old.shape[1]))
        changed = torch.zeros_like(masks)
        changed[indices] = (old ^ new).view(-1, *masks.shape[1:])
        masks ^= changed
        for tensor in (weights, *tensors["state"][name]):
            tensor.masked_fill_(changed, 0)

    def _correct(self, name: str, index: int, density: Fraction) -> None:
        plan = self.plans[index]
        self.stack.tensors["rates"][name][index] = density_factor(plan, plan[name], density, self.family)
