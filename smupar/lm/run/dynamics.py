"""What moves in a run, made from its configuration: masks, and learning rates that follow a trace."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

from smupar.dynamic.movers import Goal, StackedSparsifier
from smupar.dynamic.moves import DropAndGrow, Move, Pruning, Rounds, Times
from smupar.dynamic.pruning import GMP, IMP
from smupar.dynamic.sparsifiers import SET, RigL, Sparsifier
from smupar.execute.stacked import Stack
from smupar.lm.config.run import RunConfig
from smupar.lm.model.gpt import GPT, allocated
from smupar.plan.allocations import allocate
from smupar.plan.plan import Plan
from smupar.updates.trace import Trace


def make_sparsifier(model: GPT, plan: Plan, optimizers: list[torch.optim.Optimizer], config: RunConfig) -> Sparsifier | None:
    if not _moves(config):
        return None
    if config.prunes:
        density = allocated(config, config.density)
        assert density is not None
        if config.dynamic == "imp":
            return IMP(
                model,
                plan,
                optimizers,
                density=density,
                rounds=config.rounds,
                every=config.round_steps,
                correction=config.correction,
                steps=config.steps,
            )
        return GMP(
            model,
            plan,
            optimizers,
            density=density,
            stop=config.last_move,
            every=config.mask_every,
            correction=config.correction,
            steps=config.steps,
        )
    kind = {"rigl": RigL, "set": SET}[config.dynamic]
    return kind(
        model,
        plan,
        optimizers,
        stop=config.last_move,
        every=config.mask_every,
        drop_fraction=config.drop_fraction,
        steps=config.steps,
    )


def make_stacked_sparsifier(stack: Stack, plans: Sequence[Plan], configs: Sequence[RunConfig]) -> StackedSparsifier | None:
    goals = [_goal(config, plan) for config, plan in zip(configs, plans, strict=True)]
    return StackedSparsifier(stack, goals) if any(goal.move is not None for goal in goals) else None


def _goal(config: RunConfig, plan: Plan) -> Goal:
    # What is measured needs no correction, but for the first step of a round.
    measured = config.follow is not None and config.correction == "moment" and config.dynamic != "imp"
    return Goal(plan, _move(config), _last(config, plan), config.correction if config.prunes and not measured else None)


def read_trace(config: RunConfig) -> Trace | None:
    return Trace.load(config.follow) if config.follow else None


def _moves(config: RunConfig) -> bool:
    """A dense model has nothing that could move."""
    return config.dynamic != "none" and config.density != 1


def _move(config: RunConfig) -> Move | None:
    if not _moves(config):
        return None
    if config.dynamic == "imp":
        return Rounds(config.round_steps, config.rounds)
    times = Times(config.mask_every, config.last_move)
    if config.dynamic == "gmp":
        return Pruning(times)
    return DropAndGrow(times, {"rigl": "gradient", "set": "random"}[config.dynamic], config.drop_fraction)


def _last(config: RunConfig, plan: Plan) -> dict[str, Fraction]:
    density = allocated(config, config.density)
    if not config.prunes or density is None:
        return {}
    return allocate(density, {row.name: row.shape for row in plan if row.role == "hidden"})
