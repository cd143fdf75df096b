"""Measuring and following updates in a stack of models."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from smupar.optimizers import facts_of, family_of
from smupar.plan import Plan
from smupar.stacked import Stack
from smupar.updates.meter import CLAMP, OLD, exact, some_rows
from smupar.updates.trace import Guide, Trace, due


class StackedUpdates:
    """The same for a stack of models: measures all of them, and sets the learning rates of those that have a trace to follow.

    ``before`` a step with the start of its batch, ``after`` it with the shares of the learning rate that it used, both with its
    number from 0 on. All numbers stay on the device until the traces are asked for.
    """

    def __init__(
        self,
        stack: Stack,
        plans: Sequence[Plan],
        traces: Sequence[Trace | None],
        num_steps: int,
        period: int | None = None,
    ) -> None:
        self.stack, self.num_steps, self.period = stack, num_steps, period or num_steps
        names, device = [row.name for row in plans[0] if row.role == "hidden"], stack.device
        self.names, self.steps = names, [step for step in range(num_steps) if due(step % self.period)]
        places = [step for step in range(self.period) if due(step)]
        self.index = {place: index for index, place in enumerate(places)}
        family = family_of(stack.kind)
        self.planned = {name: torch.tensor([plan[name].lr_factor(family) for plan in plans], device=device) for name in names}
        wanted = [_averaged(trace, names, places, self.period) for trace in traces]
        self.wanted = {name: torch.tensor([one[name] for one in wanted], device=device) for name in names}
        self.gains: dict[str, Tensor] = {}
        self.effects: list[Tensor] = []
        self.decoupled = facts_of(stack.kind).decoupled
        self.outputs: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}

    @torch.no_grad()
    def before(self, step: int, batch: Sequence[Tensor]) -> None:
        if step % self.period == 0:
            self.gains = {}
        if due(step % self.period):
            self.inputs = self.stack.inputs(batch, some_rows)
            with exact():
                self.outputs = {name: self._outputs(name) for name in self.names}

    @torch.no_grad()
    def after(self, step: int, lr_share: Sequence[float]) -> None:
        if not due(step % self.period):
            return
        index = self.index[step % self.period]
        share = self.stack.upload(torch.tensor(lr_share, dtype=torch.float32))
        effects = []
        for name in self.names:
            lr, decay, _ = self.stack.tensors["constants"][name]
            rate = self.stack.tensors["rates"][name]
            used = lr * share * rate
            left = 1 - used * decay * self.stack.decay_change(name) if self.decoupled else torch.ones_like(used)
            with exact():
                change = self._outputs(name) - left.view(-1, 1, 1) * self.outputs[name]
            gain = change.square().mean((1, 2)).sqrt() / used
            effects.append(gain * self.planned[name] * rate)
            usable = gain.isfinite() & (gain > 0)
            old = self.gains.get(name, torch.full_like(gain, math.nan))
            mean = torch.where(old.isfinite(), OLD * old + (1 - OLD) * gain, gain)
            self.gains[name] = torch.where(usable, mean, old)
            factor = (self.wanted[name][:, index] / self.gains[name]).clamp(1 / CLAMP, CLAMP)
            rate.copy_(torch.where(factor.isfinite() & usable, factor / self.planned[name], rate))
        self.effects.append(torch.stack(effects, dim=1))
        self.inputs, self.outputs = {}, {}

    def _outputs(self, name: str) -> Tensor:
        return self.inputs[name].float() @ self.stack.tensors["params"][name].mT

    def traces(self) -> list[Trace]:
        """Of every model."""
        every = torch.stack(self.effects).cpu().tolist()  # (steps, models, layers)
        shapes = {name: tuple(self.stack.tensors["params"][name].shape[1:]) for name in self.names}
        at = self.steps[: len(every)]
        return [
            Trace(self.num_steps, at, {n: [e[k][i] for e in every] for i, n in enumerate(self.names)}, shapes, self.stack.kind)
            for k in range(len(self.stack))
        ]


def _averaged(trace: Trace | None, names: Sequence[str], steps: Sequence[int], num_steps: int) -> dict[str, list[float]]:
    """What a model should do at each measured step, averaged as its own gains are; not a number where it follows nothing."""
    if trace is None:
        return {name: [math.nan] * len(steps) for name in names}
    guide = Guide(trace, names, num_steps)
    averages: dict[str, list[float]] = {}
    for name in names:
        mean = math.nan
        averages[name] = []
        for step in steps:
            wanted = guide.effect(name, step)
            if math.isfinite(wanted):
                mean = wanted if math.isnan(mean) else OLD * mean + (1 - OLD) * wanted
            averages[name].append(mean)
    return averages
