"""Pruning while a model trains: gradually, or in rounds from which the weights go back. The learning rate goes along."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from torch import Tensor, nn

from smupar.dynamic.movers import Goal
from smupar.dynamic.moves import Pruning, Rounds, Times, density_factor, init_factor, num_kept
from smupar.dynamic.sparsifiers import Sparsifier
from smupar.model.parameterize import add_masks
from smupar.model.weights import MaskedWeight
from smupar.optim.layer_rates import layer_rates
from smupar.plan.allocations import Allocation, allocate
from smupar.plan.plan import Plan
from smupar.plan.settings import choice


class _Pruned(Sparsifier):
    """GMP and IMP: from the density that the model starts with to another, with the learning rate that fits.

    correction  "moment": the learning rate follows the density of the moment, by Table 1; init stays that of the first density.
                "fixed": init and learning rate of the last density from the start, as in the paper.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: Any,
        move: Pruning | Rounds,
        *,
        density: float | Mapping[str, float] | Allocation,
        stop: int,
        correction: str = "moment",
        steps: int | None = None,
    ) -> None:
        choice("correction", correction, ("moment", "fixed"))
        choice("pool", move.pool, ("layer", "global"))
        hidden = {row.name: row for row in plan if row.role == "hidden"}
        last = allocate(density, {name: row.shape for name, row in hidden.items()})
        for name, row in hidden.items():
            num_kept(name, row.shape, last[name])
            if last[name] > row.density:
                raise ValueError(
                    f"{name!r} has density {float(row.density):g} already and would be pruned to {float(last[name]):g}: "
                    "parameterize with the density to start from, 1 as a rule"
                )
        super().__init__(model, plan, optimizer, Goal(plan, move, last, correction), stop=stop, steps=steps)
        self.rates = layer_rates(self.model, plan, self.optimizers)
        add_masks(self.model, plan)
        self.families = {
            id(parameter): group["family"]
            for one in self.optimizers
            for group in one.param_groups
            if "family" in group
            for parameter in group["params"]
        }
        if correction == "fixed":
            for name, weight in self.weights().items():
                if init_factor(plan, plan[name], last[name]) != 1:
                    self._refuse_trained(weight)
        self.start_fixed()

    def _refuse_trained(self, weight: MaskedWeight) -> None:
        """Weights of a checkpoint are scaled already."""
        planned, values = self.plan[weight.name].init_std, weight.full()
        if not planned or values.is_meta:
            return
        kept = values[weight.full_mask()].double()
        found = float(kept.square().mean().sqrt())
        if abs(found / planned - 1) > max(0.2, 5 / math.sqrt(2 * len(kept))):
            raise ValueError(
                f"{weight.name!r} has std {found:.4g}, the plan's init {planned:.4g}: correction='fixed' scales the init, so "
                "make the sparsifier before a checkpoint is loaded"
            )

    def _correct(self, name: str, model: int, density: Fraction) -> None:
        family = self.families.get(id(self.model.get_parameter(name)))
        if family is not None:
            self.rates.corrections[name] = density_factor(self.plan, self.plan[name], density, family)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "corrections": dict(self.rates.corrections)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.rates.corrections.update(state["corrections"])


class GMP(_Pruned):
    """Gradual magnitude pruning (Zhu and Gupta): the smallest weights go, along a curve, until ``density`` is reached.
    Made before a checkpoint is loaded: it adds the masks that are in it.

    density     at the end: a number, {"glob": number} or an allocation such as ``erk(1 / 16)``
    pool        "layer": each layer its own number; "global": one ranking of all hidden weights
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: Any,
        *,
        density: float | Mapping[str, float] | Allocation,
        stop: int,
        every: int = 100,
        start: int = 0,
        curve: str = "cubic",
        pool: str = "layer",
        **settings: Any,
    ) -> None:
        move = Pruning(Times(every, stop, start), curve, pool)
        super().__init__(model, plan, optimizer, move, density=density, stop=stop, **settings)


class IMP(_Pruned):
    """Iterative magnitude pruning with rewinding (Frankle et al.): train, prune, go back to the weights of step ``rewind``,
    train again. ``every`` steps are a round; after the last pruning comes one more.

    All parameters and running statistics go back, optimizers start anew; a schedule of yours should start again with
    ``round_step``.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: Any,
        *,
        density: float | Mapping[str, float] | Allocation,
        rounds: int,
        every: int,
        rewind: int = 0,
        pool: str = "layer",
        **settings: Any,
    ) -> None:
        self.rounds = Rounds(every, rounds, pool)
        if not 0 <= rewind < every:
            raise ValueError(f"IMP goes back to a step of its first round, rewind must lie in [0, {every}), got {rewind}")
        self.rewind_step = rewind
        super().__init__(model, plan, optimizer, self.rounds, density=density, stop=rounds * every, **settings)
        if rewind == 0:
            self.remember()

    @property
    def round_step(self) -> int:
        """Steps that the weights have been trained for: behind a rewind it goes on from there."""
        rounds = min(self.num_steps // self.rounds.every, self.rounds.rounds)
        return self.num_steps - rounds * self.rounds.every + (self.rewind_step if rounds else 0)

    def step(self) -> bool:
        before = self.num_steps
        moved = super().step()
        if before < self.num_steps == self.rewind_step:
            self.remember()
        return moved

    def remember(self) -> None:
        super().remember()
        self.first |= {name: statistics.clone() for name, statistics in self._statistics()}

    def rewind(self, models: list[int]) -> None:
        super().rewind(models)
        for name, statistics in self._statistics():
            if name in self.first:  # checkpoints had none of them at first
                statistics.copy_(self.first[name])

    def _statistics(self) -> Iterator[tuple[str, Tensor]]:
        """The running ones of norms over batches."""
        for path, module in self.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                yield from ((f"{path}.{name}".lstrip("."), buffer) for name, buffer in module.named_buffers(recurse=False))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weights": self.first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if "weights" in state:  # else those that the model had when this was made
            self.first = {name: weight.clone() for name, weight in state["weights"].items()}
