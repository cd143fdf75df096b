"""Moves the masks of one model while it trains.

Users call ``sparsifier.step()`` after every ``optimizer.step()``. It counts these steps, and moves the masks when they are due.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smupar.dynamic.moves import MaskMover
from smupar.dynamic.policies import MaskGoal, density_factor
from smupar.dynamic.refusals import refuse_what_cannot_move, trained_weights
from smupar.dynamic.restart import Restart
from smupar.model.attached import let_masks_move, unwrapped
from smupar.model.parameterize import add_masks, attach
from smupar.model.seam import Step, optimizers, seam_of
from smupar.model.sharding import local, num_ranks
from smupar.model.sparse_linear import MaskChange
from smupar.model.weights import ModelWeight, weight_of
from smupar.optim.layer_rates import group_of_weight, layer_rates
from smupar.plan.facts.layers import has_running_statistics
from smupar.plan.plan import PlanWarning

# After this many calls of step() without a step of the optimizer, there is a warning.
_MANY_IDLE = 1000
_ABSENT, _FINITE, _NOT_FINITE = 0, 1, 2  # a rank's dense gradient of a weight; the largest number over all ranks counts


class Sparsifier(MaskMover[ModelWeight]):
    """Moves the masks of one model towards a goal, and counts steps. Its subclasses (``methods``) make the goals.

    A grown weight starts at 0 with optimizer state 0. A dropped weight is 0 and loses its state. With
    ``restart_bias_correction`` Adam's bias correction starts again for grown weights; without it, their first updates have the
    wrong size. ``steps`` is the length of the run, if known; a schedule that ends later is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        goal: MaskGoal,
        *,
        restart_bias_correction: bool = False,
        steps: int | None = None,
    ) -> None:
        super().__init__({0: goal})
        self.model, self.plan, self.optimizers = unwrapped(model), goal.plan, optimizers(optimizer)
        self.policy, self.num_steps = goal.policy, 0
        self._stepped, self._num_idle = False, 0
        self._idle_before: set[str] = set()
        refuse_what_cannot_move(self.model, self.optimizers, goal, steps)
        # The next two lines may refuse, but the first changes nothing, and the second refuses before it splits a group.
        self.restart = Restart(self.model, self.plan, self.optimizers) if restart_bias_correction else None
        self.rates = layer_rates(self.model, self.plan, self.optimizers) if goal.correction else None
        self._install(goal)

    def _install(self, goal: MaskGoal) -> None:
        """Changes model and optimizers, after all checks."""
        attach(self.model, self.plan)
        if goal.correction is not None:
            add_masks(self.model, self.plan)
        let_masks_move(self.model)
        for optimizer in self.optimizers:
            seam_of(optimizer).add(self, count=self._see_step)
        if self.restart is not None:
            self.restart.install()
        self.start_fixed()
        if self.policy.rewinds_to == 0:
            self.remember()
        self._request_gradients()

    # Weights

    def weights(self) -> dict[str, ModelWeight]:
        """The hidden weights that have a mask and are trained."""
        trained = trained_weights(self.model, self.plan, self.optimizers)
        return {name: weight for name, weight in trained.items() if weight.is_masked}

    def all_weights(self) -> dict[str, ModelWeight]:
        return {name: weight_of(self.model, name, self.optimizers) for name, _ in self.model.named_parameters()}

    def _statistics(self) -> dict[str, Tensor]:
        norms = ((path, module) for path, module in self.model.named_modules() if has_running_statistics(module))
        return {
            f"{path}.{name}".lstrip("."): buffer for path, norm in norms for name, buffer in norm.named_buffers(recurse=False)
        }

    @property
    def densities(self) -> dict[str, float]:
        masks = {name: weight.full_mask() for name, weight in self.weights().items()}
        return {name: int(mask.sum()) / mask.numel() for name, mask in masks.items()}

    def _correct(self, name: str, model: int, density: Fraction) -> None:
        for optimizer in self.optimizers:
            family = group_of_weight(optimizer).get(name, {}).get("family")
            if family is not None and self.rates is not None:
                self.rates.corrections[name] = density_factor(self.plan, self.plan[name], density, family)

    def _see_move(self, weight: ModelWeight, change: MaskChange) -> None:
        if self.restart is not None:
            self.restart.note(weight, change)

    def remember(self) -> None:
        super().remember()
        self.remembered |= {name: statistic.clone() for name, statistic in self._statistics().items()}

    def rewind(self, models: list[int]) -> None:
        super().rewind(models)
        for name, statistic in self._statistics().items():
            if name in self.remembered:  # checkpoints of early versions lack some
                statistic.copy_(self.remembered[name])
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
                    f"step() of the sparsifier was called {_MANY_IDLE} times, but its optimizer made no step: make the "
                    "sparsifier with the optimizer whose step() is called",
                    PlanWarning,
                    stacklevel=3,
                )
            return False
        self._stepped = False
        self.num_steps += 1
        due = self.policy.due(self.num_steps)
        if due:
            self.update(self.num_steps, self._ready_weights())
        if self.num_steps == self.policy.rewinds_to:
            self.remember()
        if due or self.policy.due(self.num_steps + 1):
            self._request_gradients()
        return due

    def has_stepped(self) -> bool:
        """Whether an optimizer has made a step since the last call of ``step``."""
        for optimizer in self.optimizers:
            seam_of(optimizer).finish()  # a hook of the optimizer may call this before the seam's own hook runs
        return self._stepped

    def _see_step(self, step: Step) -> None:
        self._stepped |= not step.was_noop

    def _request_gradients(self) -> None:
        """Requests the dense gradient of the next step if it decides which weights grow, and drops the dense gradient of the
        last step."""
        for weight in self.weights().values():
            weight.dense_gradient.request(self.needs_gradient(self.num_steps + 1))

    def _ready_weights(self) -> dict[str, ModelWeight]:
        """The weights whose masks can move now. Warns if a weight is not 0 off its mask, which means that other code wrote to
        the weight."""
        hidden = self.weights()
        if self.policy.needs_gradient:
            hidden = self._with_gradient(hidden)
        for name, weight in hidden.items():
            mask = weight.mask if weight.stores_zeros else None
            if mask is not None and bool(local(weight.parameter)[~local(mask)].count_nonzero()):
                warnings.warn(
                    f"weights of {name!r} off its mask are not 0: it is trained by another optimizer than the sparsifier's, "
                    "or other code wrote to it. Make the sparsifier with the optimizer that trains it",
                    PlanWarning,
                    stacklevel=4,
                )
        return hidden

    def _with_gradient(self, hidden: dict[str, ModelWeight]) -> dict[str, ModelWeight]:
        """The weights that have a dense gradient. Layers that were not used in the last step on any rank, such as experts
        without tokens, keep their masks, and so do layers whose gradient is not finite."""
        grads = [weight.dense_gradient.value for weight in hidden.values()]
        states = [_ABSENT if grad is None else _FINITE if bool(grad.isfinite().all()) else _NOT_FINITE for grad in grads]
        if num_ranks() > 1:
            device = local(next(iter(hidden.values())).parameter).device
            dist.all_reduce(shared := torch.tensor(states, device=device), dist.ReduceOp.MAX)
            states = shared.tolist()
        seen = dict(zip(hidden, states, strict=True))
        idle = [name for name, state in seen.items() if state == _ABSENT]
        if len(idle) == len(hidden):
            raise ValueError(
                f"{idle[0]!r} got no dense gradient, which RigL needs: call sparsifier.step() after every "
                "optimizer.step(), and smupar.attach(model, plan) after a copy, a conversion or sharding"
            )
        if not self._idle_before.issuperset(idle):
            names = ", ".join(idle[:4])
            warnings.warn(f"weights without a gradient in this step keep their masks: {names}", PlanWarning, stacklevel=5)
            self._idle_before.update(idle)
        for name in (name for name, state in seen.items() if state == _NOT_FINITE):
            warnings.warn(f"the gradient of {name!r} is not finite, so its mask stays", PlanWarning, stacklevel=5)
        return {name: weight for name, weight in hidden.items() if seen[name] == _FINITE}

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state without the masks, which are in the model's own state dict."""
        state: dict[str, Any] = {"num_steps": self.num_steps, "born": dict(self.restart.born) if self.restart else {}}
        if self.rates is not None:
            state["corrections"] = dict(self.rates.corrections)
        if self.policy.rewinds_to is not None:
            state["weights"] = self.remembered
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps = state["num_steps"]
        if self.restart:
            hidden = self.weights()
            self.restart.born = {n: born.to(hidden[n].parameter.device, copy=True) for n, born in state["born"].items()}
        if self.rates is not None:
            self.rates.corrections.update(state["corrections"])
        if "weights" in state:  # if not, the values that were remembered at the start stay
            self.remembered = {name: weight.clone() for name, weight in state["weights"].items()}
        self._request_gradients()
