"""Makes a run's sparsifier and held sizes, which act after each step, and reads the trace that the run follows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
from smupar.updates.trace import Trace


def make_sparsifier(model: GPT, plan: Plan, optimizers: list[torch.optim.Optimizer], config: RunConfig) -> Sparsifier | None:
    goal = _goal(config, plan)
    return None if goal is None else Sparsifier(model, optimizers, goal, steps=config.steps)


def make_stacked_sparsifier(stack: Stack, plans: Sequence[Plan], configs: Sequence[RunConfig]) -> StackedSparsifier | None:
    goals = enumerate(_goal(config, plan) for config, plan in zip(configs, plans, strict=True))
    moving = {model: goal for model, goal in goals if goal is not None}
    return StackedSparsifier(stack, moving) if moving else None


def make_held_sizes(model: GPT, plan: Plan, config: RunConfig) -> HeldSizes | None:
    return HeldSizes(hidden_weights(model, plan), {0: plan}) if config.decay == HELD else None


def make_stacked_held_sizes(stack: Stack, plans: Sequence[Plan], configs: Sequence[RunConfig]) -> HeldSizes | None:
    held = {k: plan for k, (plan, config) in enumerate(zip(plans, configs, strict=True)) if config.decay == HELD}
    return HeldSizes({name: stack.weights[name] for name in sorted(stack.hidden)}, held) if held else None


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


def read_trace(config: RunConfig) -> Trace | None:
    return Trace.load(config.follow) if config.follow else None
