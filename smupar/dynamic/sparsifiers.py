"""Sparsifiers move the masks of a model, together with weights and optimizer state.

Call ``sparsifier.step()`` after ``optimizer.step()``. It counts these steps, and moves the masks after each step that is due.
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

from smupar.dynamic.movers import Mover
from smupar.dynamic.moves import DropAndGrow, Goal, Rounds, Times, density_factor, init_factor
from smupar.dynamic.restart import Restart
from smupar.model.parameterize import add_masks, attach, check_parameterized, let_masks_move, unwrapped
from smupar.model.sharding import local, num_ranks
from smupar.model.stepping import Step, optimizers, seam_of
from smupar.model.weights import MaskedWeight, weight_of, weights
from smupar.optim.layer_rates import group_of_weight, layer_rates
from smupar.plan.optimizers import facts_of
from smupar.plan.plan import Plan, PlanWarning

# Calls of step() before it says that it saw none of the optimizer's.
_MANY_IDLE = 1000
_MOVABLE = ("random", "bernoulli", "given", None)
_ABSENT, _FINITE, _NOT_FINITE = 0, 1, 2  # what a rank saw of a weight's dense gradient; of several ranks the largest counts


class Sparsifier(Mover):
    """Moves the masks of one model towards a goal, and counts steps. Its subclasses are the methods of the literature.

    A grown weight starts at 0 with optimizer state 0. A dropped weight is 0 and loses its state. With
    ``restart_bias_correction`` Adam's bias correction starts at a grown weight's own first step; without it, its first updates
    have the wrong size. ``steps`` is the length of the run, if it is known. A schedule that ends later is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        goal: Goal,
        *,
        restart_bias_correction: bool = False,
        steps: int | None = None,
    ) -> None:
        super().__init__([goal])
        assert goal.move is not None
        self.model, self.plan, self.optimizers = unwrapped(model), goal.plan, optimizers(optimizer)
        self.move, self.num_steps = goal.move, 0
        self._stepped, self._num_idle = False, 0
        self._idle_before: set[str] = set()
        self._refuse(steps)
        attach(self.model, self.plan)
        self._refuse_strangers()
        let_masks_move(self.model)
        for each in self.optimizers:
            seam_of(each).add(self, count=self._see_step)
        if restart_bias_correction:
            self.restart = Restart(self.model, self.plan, self.optimizers)
        self.rates = layer_rates(self.model, self.plan, self.optimizers) if goal.correction else None
        if goal.correction is not None:
            add_masks(self.model, self.plan)
        if goal.correction is None and not self.weights():
            raise ValueError("no hidden weight is sparse, so no mask can move: pass a density below 1 to parameterize")
        if goal.correction == "fixed":
            self._refuse_trained(goal.last)
        self.start_fixed()
        if isinstance(self.move, Rounds) and self.move.rewind == 0:
            self.remember()
        self._request_gradients()

    # What cannot be moved

    def _refuse(self, steps: int | None) -> None:
        check_parameterized(self.model, "before masks move")
        if steps is not None and self.move.stop > steps:
            raise ValueError(
                f"masks would move until step {self.move.stop}, but the run ends at {steps}: choose an earlier stop"
            )
        structured = sorted({str(row.pattern) for row in self.plan if row.role == "hidden" and row.pattern not in _MOVABLE})
        if structured:
            raise ValueError(f"masks that move are unstructured, pattern {structured[0]!r} would be lost: use pattern='random'")
        for reason in filter(None, (facts_of(each).no_moves for each in self.optimizers)):
            raise ValueError(reason)

    def _refuse_strangers(self) -> None:
        held = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        for name, weight in weights(self.model, self.plan).items():
            if weight.parameter.requires_grad and id(weight.parameter) not in held:
                raise ValueError(
                    f"{name!r} is in none of the optimizers: pass the one that trains this model (or several, as a list), "
                    "made of its param_groups"
                )

    def _refuse_trained(self, last: Mapping[str, Fraction]) -> None:
        """Refuses weights that are not fresh from their init, since weights of a checkpoint have been scaled already."""
        for name, weight in self.weights().items():
            planned, values = self.plan[name].init_std, weight.full()
            if init_factor(self.plan, self.plan[name], last[name]) == 1 or not planned or values.is_meta:
                continue
            kept = values[weight.full_mask()].double()
            std = float(kept.square().mean().sqrt())
            if abs(std / planned - 1) > max(0.2, 5 / math.sqrt(2 * len(kept))):
                raise ValueError(
                    f"{name!r} has std {std:.4g}, the plan's init {planned:.4g}: correction='fixed' scales the init, so "
                    "make the sparsifier before a checkpoint is loaded"
                )

    # What is moved

    def weights(self) -> dict[str, MaskedWeight]:
        """Hidden weights that have a mask and are trained."""
        hidden = weights(self.model, self.plan, self.optimizers)
        return {name: weight for name, weight in hidden.items() if weight.is_masked and weight.parameter.requires_grad}

    def every_weight(self) -> dict[str, MaskedWeight]:
        return {name: weight_of(self.model, name, self.optimizers) for name, _ in self.model.named_parameters()}

    def statistics(self) -> dict[str, Tensor]:
        """Running statistics of norms over batches."""
        norms = ((p, m) for p, m in self.model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase))
        return {
            f"{path}.{name}".lstrip("."): buffer for path, norm in norms for name, buffer in norm.named_buffers(recurse=False)
        }

    @property
    def densities(self) -> dict[str, float]:
        masks = {name: weight.full_mask() for name, weight in self.weights().items()}
        return {name: int(mask.sum()) / mask.numel() for name, mask in masks.items()}

    def _correct(self, name: str, model: int, density: Fraction) -> None:
        for each in self.optimizers:
            family = group_of_weight(each).get(name, {}).get("family")
            if family is not None and self.rates is not None:
                self.rates.corrections[name] = density_factor(self.plan, self.plan[name], density, family)

    def _start_optimizers(self, models: list[int]) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()

    # Steps

    @torch.no_grad()
    def step(self) -> bool:
        """Call this after every ``optimizer.step()``. Returns whether masks moved. If the optimizer made no step, because
        gradients are being accumulated or a scaler skipped it, nothing happens."""
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
        due = self.move.due(self.num_steps)
        if due:
            self.update(self.num_steps, self._ready_weights())
        if isinstance(self.move, Rounds) and self.num_steps == self.move.rewind:
            self.remember()
        if due or self.move.due(self.num_steps + 1):
            self._request_gradients()
        return due

    def has_stepped(self) -> bool:
        """Whether an optimizer has trained the model since the last call of ``step``."""
        for each in self.optimizers:
            seam_of(each).finish()  # this may be called by a hook of the optimizer, before the seam's own
        return self._stepped

    def _see_step(self, step: Step) -> None:
        self._stepped |= not step.was_noop

    def _request_gradients(self) -> None:
        """Asks for the dense gradient of the next step, if masks grow by it, and drops that of the last step."""
        for weight in self.weights().values():
            weight.dense_gradient.request(self.needs_gradient(self.num_steps + 1))

    def _ready_weights(self) -> dict[str, MaskedWeight]:
        """The weights whose masks can move now. Warns if one is not 0 off its mask: another optimizer wrote to it."""
        hidden = self.weights()
        if self.move.needs_gradient:
            hidden = self._with_gradient(hidden)
        for name, weight in hidden.items():
            mask = weight.mask if weight.stores_zeros else None
            if mask is not None and bool(local(weight.parameter)[~local(mask)].count_nonzero()):
                warnings.warn(
                    f"weights of {name!r} off its mask are not 0: another optimizer than the one that was given here trains "
                    "it, or something wrote to it. Make a sparsifier for the optimizer that is used",
                    PlanWarning,
                    stacklevel=4,
                )
        return hidden

    def _with_gradient(self, hidden: dict[str, MaskedWeight]) -> dict[str, MaskedWeight]:
        """The weights that have a dense gradient. Layers that had no part in the last step on any rank, such as experts without
        tokens, keep their masks, and so do those whose gradient is not finite."""
        grads = [weight.dense_gradient.value for weight in hidden.values()]
        states = [_ABSENT if grad is None else _FINITE if bool(grad.isfinite().all()) else _NOT_FINITE for grad in grads]
        if num_ranks() > 1:
            device = local(next(iter(hidden.values())).parameter).device
            dist.all_reduce(shared := torch.tensor(states, device=device), dist.ReduceOp.MAX)
            states = shared.tolist()
        by_state: dict[int, list[str]] = {_ABSENT: [], _FINITE: [], _NOT_FINITE: []}
        for name, state in zip(hidden, states, strict=True):
            by_state[state].append(name)
        idle = by_state[_ABSENT]
        if len(idle) == len(hidden):
            raise ValueError(
                f"{idle[0]!r} got no gradient that RigL could look at: call sparsifier.step() after every "
                "optimizer.step(), and smupar.attach(model, plan) after a copy, a conversion or sharding"
            )
        if not self._idle_before.issuperset(idle):
            names = ", ".join(idle[:4])
            warnings.warn(f"no gradient in this step, so their masks stay: {names}", PlanWarning, stacklevel=5)
            self._idle_before.update(idle)
        for name in by_state[_NOT_FINITE]:
            warnings.warn(f"the gradient of {name!r} is not finite, so its mask stays", PlanWarning, stacklevel=5)
        return {name: hidden[name] for name in by_state[_FINITE]}

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Masks are in the model's own state dict."""
        state: dict[str, Any] = {"num_steps": self.num_steps, "born": dict(self.restart.born) if self.restart else {}}
        if self.rates is not None:
            state["corrections"] = dict(self.rates.corrections)
        if isinstance(self.move, Rounds):
            state["weights"] = self.first
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps = state["num_steps"]
        if self.restart:
            hidden = self.weights()
            self.restart.born = {n: born.to(hidden[n].parameter.device, copy=True) for n, born in state["born"].items()}
        if self.rates is not None:
            self.rates.corrections.update(state["corrections"])
        if (
            isinstance(self.move, Rounds) and "weights" in state
        ):  # without them the weights stay that were remembered when this was made
            self.first = {name: weight.clone() for name, weight in state["weights"].items()}
        self._request_gradients()


class _Moving(Sparsifier):
    """RigL and SET: the number of kept weights stays the same, but other weights are kept."""

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
        drop_fraction   share of a layer's active weights that the first move drops
        every           steps between two moves
        start           masks do not move before this step
        decay           how ``drop_fraction`` falls to 0 until ``stop``: "cosine", "linear", or "constant" (not at all)
        """
        goal = Goal(plan, DropAndGrow(Times(every, stop, start), self.grow, drop_fraction, decay))
        super().__init__(model, optimizer, goal, restart_bias_correction=restart_bias_correction, steps=steps)
        if start == 0 and every > stop:
            raise ValueError(f"masks would never move: no multiple of every={every} lies between {start} and stop={stop}")


class RigL(_Moving):
    """RigL (Evci et al.): drops the smallest weights, and grows as many where the gradient of the dense network is largest."""

    grow = "gradient"


class SET(_Moving):
    """SET (Mocanu et al.): drops the smallest weights, and grows as many at random."""

    grow = "random"
