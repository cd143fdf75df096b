"""Pruning while a model trains: gradually, or in rounds from which the weights go back. The learning rate goes along."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from smupar.apply import add_masks, mask_of
from smupar.dynamic.moves import Pruning, Rounds, Times, density_factor, init_factor, num_kept, pruned
from smupar.dynamic.sparsifiers import Sparsifier
from smupar.masks import Allocation, allocate
from smupar.optim import choice
from smupar.plan import Plan, PlanRow
from smupar.rates import layer_rates
from smupar.storage import compressed
from smupar.values import whole, zero_off_mask


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
        *,
        density: float | Mapping[str, float] | Allocation,
        stop: int,
        pool: str = "layer",
        correction: str = "moment",
        steps: int | None = None,
    ) -> None:
        choice("correction", correction, ("moment", "fixed"))
        choice("pool", pool, ("layer", "global"))
        self.pool, self.correction = pool, correction
        hidden = {row.name: row for row in plan if row.role == "hidden"}
        self.last = allocate(density, {name: row.shape for name, row in hidden.items()})
        for name, row in hidden.items():
            num_kept(name, row.shape, self.last[name])
            if self.last[name] > row.density:
                raise ValueError(
                    f"{name!r} has density {float(row.density):g} already and would be pruned to {float(self.last[name]):g}: "
                    "parameterize with the density to start from, 1 as a rule"
                )
        super().__init__(model, plan, optimizer, stop=stop, steps=steps)
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
            self._correct(self.last)
            parameters = self.parameters
            factors = {name: init_factor(plan, plan[name], self.last[name]) for name in parameters}
            for name, factor in factors.items():
                if factor != 1:
                    self._refuse_trained(name, parameters[name])
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.mul_(factors[name])

    def _refuse_trained(self, name: str, parameter: nn.Parameter) -> None:
        """Weights of a checkpoint are scaled already."""
        planned = self.plan[name].init_std
        weight = self._weight(name, parameter).detach()
        kept = weight[whole(self._mask(name))].double()
        if not planned or weight.is_meta:
            return
        found = float(kept.square().mean().sqrt())
        if abs(found / planned - 1) > max(0.2, 5 / math.sqrt(2 * len(kept))):
            raise ValueError(
                f"{name!r} has std {found:.4g}, the plan's init {planned:.4g}: correction='fixed' scales the init, so make the "
                "sparsifier before a checkpoint is loaded"
            )

    def _prune(self, density_of: Callable[[PlanRow], Fraction]) -> None:
        parameters = self.parameters
        wanted = {name: density_of(self.plan[name]) for name in parameters}
        nums = {name: num_kept(name, self.plan[name].shape, density) for name, density in wanted.items()}
        masks = self._globally(sum(nums.values())) if self.pool == "global" else self._by_layer(nums)
        for name, mask in masks.items():
            self._replace(name, parameters[name], mask)
        if self.correction == "moment":
            shapes = {name: math.prod(self.plan[name].shape) for name in masks}
            self._correct({name: Fraction(int(mask.sum()), shapes[name]) for name, mask in masks.items()})

    def _by_layer(self, nums: dict[str, int]) -> dict[str, Tensor]:
        masks = {}
        for name, parameter in self.parameters.items():
            mask = whole(self._mask(name)).flatten()[None]
            wanted = torch.tensor([nums[name]], device=mask.device)
            masks[name] = pruned(self._weight(name, parameter).flatten()[None], mask, wanted)
        return masks

    def _globally(self, num: int) -> dict[str, Tensor]:
        sizes = {name: math.prod(self.plan[name].shape) for name in self.parameters}
        weights = torch.cat([self._weight(name, p).flatten() for name, p in self.parameters.items()])[None]
        masks = torch.cat([whole(self._mask(name)).flatten() for name in sizes])[None]
        kept = pruned(weights, masks, torch.tensor([num], device=masks.device))
        parts = dict(zip(sizes, kept.split(list(sizes.values()), dim=1), strict=True))
        empty = [name for name, part in parts.items() if not part.any()]
        if empty:
            raise ValueError(f"every weight of {empty[0]!r} would be dropped: prune less, or with pool='layer'")
        return parts

    def _correct(self, densities: Mapping[str, Fraction]) -> None:
        for name, parameter in self.parameters.items():
            family = self.families.get(id(parameter))
            if family is not None:
                self.rates.corrections[name] = density_factor(self.plan, self.plan[name], densities[name], family)

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
        **settings: Any,
    ) -> None:
        self.rule = Pruning(Times(every, stop, start), curve)
        super().__init__(model, plan, optimizer, density=density, stop=stop, **settings)

    def due(self, step: int) -> bool:
        return self.rule.due(step)

    def update(self, step: int) -> None:
        self._prune(lambda row: self.rule.density(row.density, self.last[row.name], step))


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
        **settings: Any,
    ) -> None:
        self.rule = Rounds(every, rounds)
        if not 0 <= rewind < every:
            raise ValueError(f"IMP goes back to a step of its first round, rewind must lie in [0, {every}), got {rewind}")
        self.rewind = rewind
        self.weights: dict[str, Tensor] = {}
        super().__init__(model, plan, optimizer, density=density, stop=rounds * every, **settings)
        if rewind == 0:
            self._remember()

    @property
    def round_step(self) -> int:
        """Steps that the weights have been trained for: behind a rewind it goes on from there."""
        rounds = min(self.num_steps // self.rule.every, self.rule.rounds)
        return self.num_steps - rounds * self.rule.every + (self.rewind if rounds else 0)

    def due(self, step: int) -> bool:
        return self.rule.due(step)

    def step(self) -> bool:
        before = self.num_steps
        moved = super().step()
        if before < self.num_steps == self.rewind:
            self._remember()
        return moved

    def update(self, step: int) -> None:
        self._prune(lambda row: self.rule.density(row.density, self.last[row.name], step))
        for name, statistics in self._statistics():
            if name in self.weights:  # checkpoints had none of them at first
                statistics.copy_(self.weights[name])
        for name, parameter in self.model.named_parameters():
            layer = compressed(self.model, name)
            parameter.copy_(self.weights[name] if layer is None else layer.gather(self.weights[name]))
            mask = mask_of(self.model, name)
            if mask is not None and layer is None:
                zero_off_mask(parameter, mask)
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def _remember(self) -> None:
        for name, parameter in self.model.named_parameters():
            layer = compressed(self.model, name)
            self.weights[name] = parameter.detach().clone() if layer is None else layer.expand(parameter.detach())
        self.weights |= {name: statistics.clone() for name, statistics in self._statistics()}

    def _statistics(self) -> Iterator[tuple[str, Tensor]]:
        """The running ones of norms over batches."""
        for path, module in self.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                yield from ((f"{path}.{name}".lstrip("."), buffer) for name, buffer in module.named_buffers(recurse=False))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if "weights" in state:  # else those that the model had when this was made
            self.weights = {name: weight.clone() for name, weight in state["weights"].items()}
