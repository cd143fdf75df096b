"""Moving the masks of a model: weights and optimizer state go along.

``sparsifier.step()`` is called after ``optimizer.step()`` and counts those steps: after the n-th one masks move if n is due.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smupar.dynamic.movers import Goal, Mover
from smupar.dynamic.moves import DropAndGrow, Times
from smupar.model.compressed import MaskChange
from smupar.model.parameterize import attach, is_parameterized, let_masks_move, unwrapped
from smupar.model.sharding import local, num_ranks
from smupar.model.stepping import Step, optimizers, seam_of
from smupar.model.weights import MaskedWeight, Weight, weight_of, weights
from smupar.plan.optimizers import facts_of, name_of
from smupar.plan.plan import Plan, PlanWarning

# Calls of step() before it says that it saw none of the optimizer's.
_MANY_IDLE = 1000
_MOVABLE = ("random", "bernoulli", "given", None)


class Sparsifier(Mover):
    """Moves the masks of one model; counts steps.

    A grown weight starts at 0 with optimizer state 0; a dropped one is 0 and has no state left. ``restart_bias_correction``
    gives grown weights Adam's bias correction from their own first step: else their first updates are too large. ``steps`` is
    the length of the run, if it is known: a schedule that ends behind it is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: Any,
        goal: Goal,
        *,
        stop: int,
        restart_bias_correction: bool = False,
        steps: int | None = None,
    ) -> None:
        super().__init__([goal])
        self.model, self.plan, self.optimizers = unwrapped(model), plan, optimizers(optimizer)
        if not is_parameterized(self.model):
            raise ValueError("this model is not parameterized: call smupar.parameterize before masks move")
        if steps is not None and stop > steps:
            raise ValueError(f"masks would move until step {stop}, but the run ends at {steps}: choose an earlier stop")
        structured = sorted({str(row.pattern) for row in plan if row.role == "hidden" and row.pattern not in _MOVABLE})
        if structured:
            raise ValueError(f"masks that move are unstructured, pattern {structured[0]!r} would be lost: use pattern='random'")
        attach(self.model, plan)
        for reason in filter(None, (facts_of(each).no_moves for each in self.optimizers)):
            raise ValueError(reason)
        self._refuse_strangers()
        let_masks_move(self.model)
        self.num_steps = 0
        self._stepped, self._num_idle = False, 0
        for each in self.optimizers:
            seam_of(each).add(self, count=self._count)
        self.restart = _Restart(self) if restart_bias_correction else None

    def _refuse_strangers(self) -> None:
        held = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        for name, weight in weights(self.model, self.plan).items():
            if weight.parameter.requires_grad and id(weight.parameter) not in held:
                raise ValueError(
                    f"{name!r} is in none of the optimizers: pass the one that trains this model (or several, as a list), "
                    "made of its param_groups"
                )

    def weights(self) -> dict[str, MaskedWeight]:
        """Hidden weights that have a mask and are trained."""
        hidden = weights(self.model, self.plan, self.optimizers)
        return {name: weight for name, weight in hidden.items() if weight.is_masked and weight.parameter.requires_grad}

    def every_weight(self) -> dict[str, Weight]:
        return {name: weight_of(self.model, name, self.optimizers) for name, _ in self.model.named_parameters()}

    @property
    def densities(self) -> dict[str, float]:
        masks = {name: weight.full_mask() for name, weight in self.weights().items()}
        return {name: int(mask.sum()) / mask.numel() for name, mask in masks.items()}

    @torch.no_grad()
    def step(self) -> bool:
        """After every ``optimizer.step()``. Says whether masks moved. Where the optimizer made no step, as while gradients are
        accumulated or when a scaler skips one, nothing happens."""
        if not self.has_stepped():
            self._num_idle += 1
            if self.num_steps == 0 and self._num_idle == _MANY_IDLE:
                warnings.warn(
                    f"called {_MANY_IDLE} times, but no step of the optimizer was seen: make the sparsifier with the one whose "
                    "step() is called",
                    PlanWarning,
                    stacklevel=3,
                )
            return False
        self._stepped = False
        self.num_steps += 1
        due = self.due(self.num_steps)
        if due:
            self.update(self.num_steps)
        if due or self.due(self.num_steps + 1):
            self._request_gradients()
        return due

    def has_stepped(self) -> bool:
        """Whether an optimizer has trained the model since the last call of ``step``."""
        for each in self.optimizers:
            seam_of(each).finish()  # this may be called by a hook of the optimizer, before the seam's own
        return self._stepped

    def _count(self, step: Step) -> None:
        self._stepped |= not step.was_noop

    def state_dict(self) -> dict[str, Any]:
        """Masks are in the model's own state dict."""
        return {"num_steps": self.num_steps, "born": dict(self.restart.born) if self.restart else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps = state["num_steps"]
        if self.restart:
            weights = self.weights()
            self.restart.born = {n: born.to(weights[n].parameter.device, copy=True) for n, born in state["born"].items()}
        self._request_gradients()

    def _request_gradients(self) -> None:
        """Asks for the dense gradient of the next step, if masks grow by it, and drops that of the last."""
        for weight in self.weights().values():
            weight.dense_gradient.request(self.needs_gradient(self.num_steps + 1))

    def _set_mask(self, weight: Weight, mask: Tensor, models: list[int]) -> None:
        assert isinstance(weight, MaskedWeight)
        own = weight.mask if weight.stores_zeros else None
        if own is not None and bool(local(weight.parameter)[~local(own)].count_nonzero()):
            warnings.warn(
                f"weights of {weight.name!r} off its mask are not 0: another optimizer than the one that was given here trains "
                "it, or something wrote to it. Make a sparsifier for the optimizer that is used",
                PlanWarning,
                stacklevel=6,
            )
        change = weight.set_mask(mask)
        if self.restart:
            self.restart.note(weight, change)

    def _correct(self, name: str, model: int, density: Fraction) -> None:
        """Masks that keep their density need none."""

    def _start_optimizers(self, models: list[int]) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()


class _Moving(Sparsifier):
    """RigL and SET: as many weights as at the start, others."""

    grow: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: Any,
        *,
        stop: int,
        drop_fraction: float = 0.3,
        every: int = 100,
        start: int = 0,
        decay: str = "cosine",
        restart_bias_correction: bool = False,
        steps: int | None = None,
    ) -> None:
        """
        stop            last step at which masks may move; 3/4 of the run is a good choice
        drop_fraction   share of a layer's active weights that is dropped, at first; ``decay`` takes it to 0: "cosine", "linear"
                        or "constant"
        """
        goal = Goal(plan, DropAndGrow(Times(every, stop, start), self.grow, drop_fraction, decay))
        self._idle_before: set[str] = set()
        super().__init__(model, plan, optimizer, goal, stop=stop, restart_bias_correction=restart_bias_correction, steps=steps)
        if not self.weights():
            raise ValueError("no hidden weight is sparse, so no mask can move: pass a density below 1 to parameterize")
        if not any(self.due(step) for step in range(start, stop + 1)):
            raise ValueError(f"masks would never move: no multiple of every={every} lies between {start} and stop={stop}")
        self._request_gradients()


class RigL(_Moving):
    """Evci et al.: grows where the gradient of the dense network is largest."""

    grow = "gradient"

    def update(self, step: int) -> None:
        self._idle = self._without_gradient()
        super().update(step)

    def _without_gradient(self) -> list[str]:
        """Layers that had no part in the last step on any rank, such as experts without tokens: their masks stay."""
        weights = self.weights()
        device = local(next(iter(weights.values())).parameter).device
        has = torch.tensor([int(weight.dense_gradient.value is not None) for weight in weights.values()], device=device)
        if num_ranks() > 1:
            dist.all_reduce(has, dist.ReduceOp.MAX)
        idle = [name for name, there in zip(weights, has.tolist(), strict=True) if not there]
        if len(idle) == len(weights):
            raise ValueError(
                f"{idle[0]!r} got no gradient that RigL could look at: call sparsifier.step() after every "
                "optimizer.step(), and smupar.attach(model, plan) after a copy, a conversion or sharding"
            )
        if not self._idle_before.issuperset(idle):
            names = ", ".join(idle[:4])
            warnings.warn(f"no gradient in this step, so their masks stay: {names}", PlanWarning, stacklevel=5)
            self._idle_before.update(idle)
        return idle

    def _gradient(self, weight: Weight, models: list[int]) -> Tensor | None:
        sizes = None if weight.name in self._idle else super()._gradient(weight, models)
        if sizes is not None and not bool(sizes.isfinite().all()):
            warnings.warn(f"the gradient of {weight.name!r} is not finite, so its mask stays", PlanWarning, stacklevel=7)
            return None
        return sizes


class SET(_Moving):
    """Mocanu et al.: grows at random."""

    grow = "random"


class _Restart:
    """Adam corrects its averages for having started at 0, by the optimizer's step, but a grown weight starts later: this takes
    the difference out of the weight, after each step. ``born``: the optimizer's step at which a weight grew, 0 at first."""

    def __init__(self, sparsifier: Sparsifier) -> None:
        self.sparsifier = sparsifier
        self.born: dict[str, Tensor] = {}
        hidden = {id(weight.parameter) for weight in weights(sparsifier.model, sparsifier.plan).values()}
        for optimizer in sparsifier.optimizers:
            facts = facts_of(optimizer)
            groups = [group for group in optimizer.param_groups if any(id(p) in hidden for p in group["params"])]
            if groups and (not facts.restartable or any(group.get("amsgrad") for group in groups)):
                kind = name_of(optimizer)
                raise ValueError(f"restart_bias_correction is for Adam and AdamW without amsgrad, not {kind}: leave it out")
            seam_of(optimizer).add(sparsifier.model, correct=self._correct)  # in place of an earlier sparsifier's

    def note(self, weight: MaskedWeight, change: MaskChange) -> None:
        parameter = weight.parameter
        state: dict[str, Any] = next((o.state[parameter] for o in weight.optimizers if parameter in o.state), {})
        known = self.born.get(weight.name)
        born = torch.zeros_like(parameter, dtype=torch.float32) if known is None else change.remap(known)
        self.born[weight.name] = born.masked_fill_(change.new_entries, float(state.get("step", 0)))

    @torch.no_grad()
    def _correct(self, step: Step) -> None:
        if step.was_noop:
            return
        optimizer = step.optimizer
        names = {id(weight.parameter): name for name, weight in self.sparsifier.weights().items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name in self.born and parameter.grad is not None and parameter in optimizer.state:
                    parameter.add_(self._difference(optimizer.state[parameter], group, self.born[name]))

    @staticmethod
    def _difference(state: Mapping[str, Any], group: dict[str, Any], born: Tensor) -> Tensor:
        """What the step took too much of young weights."""
        beta1, beta2 = group["betas"]
        count = torch.as_tensor(state["step"], dtype=torch.float32, device=born.device)
        mean, square = state["exp_avg"], state["exp_avg_sq"]

        def update(age: Any) -> Tensor:
            started1, started2 = (-torch.expm1(age * math.log(beta)) for beta in (beta1, beta2))  # 1 - beta^age
            return mean / started1 / ((square / started2).sqrt() + group["eps"])

        difference: Tensor = group["lr"] * (update(count) - update(count - born))
        return difference.masked_fill_(born == 0, 0)
