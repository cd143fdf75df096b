"""What accompanies the optimizers of a run: measured updates, an observer, masks that move, and held sizes.

Most runs have none of these, so each may be None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from smupar.dynamic.policies import DropAndGrow, MaskGoal, MoveSchedule, Pruning, Rounds, pruning_goal
from smupar.dynamic.sparsifiers import Sparsifier
from smupar.dynamic.stacked import StackedSparsifier
from smupar.execute.stack.stack import Stack
from smupar.lm.config.run_config import RunConfig
from smupar.lm.model.gpt import GPT, allocated
from smupar.model.weights import hidden_weights
from smupar.optim.groups import HELD
from smupar.optim.held_sizes import HeldSizes
from smupar.plan.plan import Plan
from smupar.refusals import refuse
from smupar.updates.law import parse_law
from smupar.updates.meter import Follower, Recorder, follow_updates, record_updates
from smupar.updates.observer import observe
from smupar.updates.stacked import StackedUpdates
from smupar.updates.trace import Trace


class Companions:
    """The companions of one run. Making them gives each hidden weight its own group, and adds hooks and buffers to the model.
    Measured updates and the observer run by themselves, before and after ``optimizer.step()``."""

    def __init__(
        self,
        model: GPT,
        plan: Plan,
        optimizers: list[torch.optim.Optimizer],
        config: RunConfig,
        *,
        trace: Trace | None = None,
        observes: bool = False,
    ) -> None:
        """``trace`` is the trace to follow; by default it is read from the file ``config.follow``."""
        self.plan, goal = plan, _goal(config, plan)
        self.updates = _measured_updates(model, plan, optimizers, config, trace or _read_trace(config))
        self.observer = observe(model, plan, optimizers, steps=config.steps) if observes else None
        self.held_sizes = HeldSizes(hidden_weights(model, plan), {0: plan}) if config.decay == HELD else None
        self.sparsifier = None if goal is None else Sparsifier(model, optimizers, goal, steps=config.steps)

    def after_step(self) -> None:
        if self.sparsifier is not None:
            self.sparsifier.step()
        if self.held_sizes is not None:
            self.held_sizes.step()

    @property
    def sparsity(self) -> float:
        """The current share of zeros among all hidden weights."""
        moved = {} if self.sparsifier is None else self.sparsifier.densities
        return self.plan.hidden_sparsity_with(moved)

    @property
    def trace(self) -> Trace | None:
        return None if self.updates is None else self.updates.trace

    def state_dict(self) -> dict[str, Any]:
        """The state of sparsifier, measured updates and observer, as plain values for JSON. Masks are in the model. The
        weights that IMP rewinds to are not saved, since a new model starts with them."""
        parts = {"updates": self.updates, "sparsifier": self.sparsifier, "observer": self.observer}
        return {
            name: {key: value for key, value in part.state_dict().items() if key != "weights"}
            for name, part in parts.items()
            if part is not None
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in (("updates", self.updates), ("sparsifier", self.sparsifier)):
            if part is not None:
                part.load_state_dict(state[name])
        if self.observer is not None and "observer" in state:  # otherwise observing begins now
            self.observer.load_state_dict(state["observer"])


class StackCompanions:
    """The companions of a stack of runs. Call ``before`` and ``after`` around each step. Stacks are not observed."""

    def __init__(self, stack: Stack, plans: Sequence[Plan], configs: Sequence[RunConfig]) -> None:
        self.stack, self.plans, first = stack, plans, configs[0]
        traces, law = [_read_trace(config) for config in configs], parse_law(first.law)
        is_measured = first.record or any(trace is not None for trace in traces)
        self.updates = StackedUpdates(stack, plans, traces, first.steps, first.round_steps, law) if is_measured else None
        self.measures_held_out = is_measured and law.held_out
        held = {model: plan for model, (plan, config) in enumerate(zip(plans, configs, strict=True)) if config.decay == HELD}
        self.held_sizes = HeldSizes({name: stack.weights[name] for name in sorted(stack.hidden)}, held) if held else None
        goals = enumerate(_goal(config, plan) for config, plan in zip(configs, plans, strict=True))
        moving = {model: goal for model, goal in goals if goal is not None}
        self.sparsifier = StackedSparsifier(stack, moving) if moving else None

    def before(self, step: int, batch: Sequence[Tensor], measured: Sequence[Tensor]) -> None:
        """``measured`` is the batch on which updates are measured."""
        if self.updates is not None:
            self.updates.before(step, measured)
        if self.sparsifier is not None:
            self.sparsifier.before(step, batch)

    def after(self, step: int, lr_shares: Sequence[float]) -> None:
        if self.updates is not None:
            self.updates.after(step, lr_shares)
        if self.sparsifier is not None:
            self.sparsifier.after(step)
        if self.held_sizes is not None:
            self.held_sizes.step()

    @property
    def sparsities(self) -> list[float]:
        """The current share of zeros among each run's hidden weights."""
        if self.sparsifier is None:
            return [plan.hidden_sparsity for plan in self.plans]
        masks = [self.stack.tensors.masks[name].flatten(1) for name in self.stack.hidden]
        num_kept, total = sum(mask.sum(1) for mask in masks), sum(mask.shape[1] for mask in masks)
        return (1 - torch.as_tensor(num_kept).double() / total).tolist()

    def traces(self) -> list[Trace | None]:
        return [None] * len(self.plans) if self.updates is None else list(self.updates.traces())

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The state of the measured updates. Sparsifiers have none: the configurations determine when masks move and which
        weights a round rewinds to."""
        return {} if self.updates is None else {"updates": self.updates.state_dict()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        if self.updates is not None:
            self.updates.load_state_dict(state["updates"])


def _measured_updates(
    model: GPT, plan: Plan, optimizers: list[torch.optim.Optimizer], config: RunConfig, trace: Trace | None
) -> Recorder | Follower | None:
    refuse(
        config.law,
        f"law {config.law!r} is for sweeps and `smupar reproduce controls`, which stack runs: leave it out",
    )
    period = config.round_steps if config.mask_method.in_rounds else None
    if trace is not None:
        return follow_updates(model, plan, optimizers, trace=trace, steps=config.steps, period=period)
    return record_updates(model, plan, optimizers, period=period) if config.record else None


def _goal(config: RunConfig, plan: Plan) -> MaskGoal | None:
    """How the masks of a run move; None if they stay."""
    if config.dynamic == "none" or config.density == 1:  # a dense model has no masks
        return None
    schedule = MoveSchedule(config.mask_every, config.last_move)
    if grow := config.mask_method.grows_by:
        return MaskGoal(plan, DropAndGrow(schedule, grow, config.drop_fraction))
    density = allocated(config, config.density)
    assert density is not None
    if config.mask_method.in_rounds:
        return pruning_goal(plan, Rounds(config.round_steps, config.rounds), density, config.correction)
    return pruning_goal(plan, Pruning(schedule), density, config.correction)


def _read_trace(config: RunConfig) -> Trace | None:
    return Trace.load(config.follow) if config.follow else None
