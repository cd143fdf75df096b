"""What an update does to the output of a layer, measured: of one model (``meter``), or here of a whole stack at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from smupar.execute.stacked import Stack
from smupar.model.weights import Weight
from smupar.plan.optimizers import facts_of, family_of
from smupar.plan.plan import Plan
from smupar.updates.trace import Guide, Trace, due

NUM_TOKENS = 128
# Factors are held between its inverse and it.
CLAMP = 1e4
_OLD = 0.8
_Number = TypeVar("_Number", float, Tensor)


def averaged(old: _Number, new: _Number) -> _Number:
    """The average over time after a new value."""
    return _OLD * old + (1 - _OLD) * new


def some_rows(x: Tensor) -> Tensor:
    """The first tokens of a batch; repeated where there are fewer, so that a mean is over them alone."""
    rows = x.reshape(-1, x.shape[-1])[:NUM_TOKENS]
    return rows if len(rows) == NUM_TOKENS else rows.repeat(-(-NUM_TOKENS // max(1, len(rows))), 1)[:NUM_TOKENS]


@contextmanager
def exact() -> Iterator[None]:
    """Two products of which the small difference counts: no TF32, no autocast."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        matmul.fp32_precision = before


class Probe:
    """The layer of one hidden weight: some of its inputs, and what an update does to its output for them."""

    inputs: Tensor
    before: Tensor | None = None
    """The output before the update, where it was looked at."""

    def __init__(self, weight: Weight, in_dim: int = 1) -> None:
        self.weight, self.in_dim = weight, in_dim

    def look(self) -> None:
        self.before = self.weight.multiply(self.inputs, in_dim=self.in_dim)

    def change(self, left: float | Tensor) -> Tensor:
        """The change of the output, without what weight decay does, which leaves ``left`` of the weight."""
        before, self.before = self.before, None
        assert before is not None
        return self.weight.multiply(self.inputs, in_dim=self.in_dim) - left * before


class StackedUpdates:
    """Measures the updates of all models of a stack, and sets the learning rates of those that have a trace to follow.

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
        self.probes = {name: Probe(stack.weights[name]) for name in names}
        places = [step for step in range(self.period) if due(step)]
        self.index = {place: index for index, place in enumerate(places)}
        family = family_of(stack.kind)
        self.planned = {name: torch.tensor([plan[name].lr_factor(family) for plan in plans], device=device) for name in names}
        wanted = [_wanted(trace, names, places, self.period) for trace in traces]
        self.wanted = {name: torch.tensor([each[name] for each in wanted], device=device) for name in names}
        self.gains: dict[str, Tensor] = {}
        self.effects: list[Tensor] = []
        self.decoupled = facts_of(stack.kind).decoupled

    @torch.no_grad()
    def before(self, step: int, batch: Sequence[Tensor]) -> None:
        if step % self.period == 0:
            self.gains = {}
        if due(step % self.period):
            inputs = self.stack.inputs(batch, some_rows)
            with exact():
                for name, probe in self.probes.items():
                    probe.inputs = inputs[name].float()
                    probe.look()

    @torch.no_grad()
    def after(self, step: int, lr_share: Sequence[float]) -> None:
        if not due(step % self.period):
            return
        index = self.index[step % self.period]
        share = self.stack.upload(torch.tensor(lr_share, dtype=torch.float32))
        effects = []
        for name, probe in self.probes.items():
            lr, decay, _ = self.stack.tensors["constants"][name]
            rate = self.stack.tensors["rates"][name]
            used = lr * share * rate
            left = 1 - used * decay * self.stack.decay_change(name) if self.decoupled else torch.ones_like(used)
            with exact():
                gain = probe.change(left.view(-1, 1, 1)).square().mean((1, 2)).sqrt() / used
            effects.append(gain * self.planned[name] * rate)
            self._follow(name, index, gain, rate)
            del probe.inputs
        self.effects.append(torch.stack(effects, dim=1))

    def _follow(self, name: str, index: int, gain: Tensor, rate: Tensor) -> None:
        """Writes the rates of a layer, in all models that follow a trace."""
        usable = gain.isfinite() & (gain > 0)
        old = self.gains.get(name, torch.full_like(gain, math.nan))
        self.gains[name] = mean = torch.where(usable, torch.where(old.isfinite(), averaged(old, gain), gain), old)
        factor = (self.wanted[name][:, index] / mean).clamp(1 / CLAMP, CLAMP)
        rate.copy_(torch.where(factor.isfinite() & usable, factor / self.planned[name], rate))

    def traces(self) -> list[Trace]:
        """The trace of every model."""
        every = torch.stack(self.effects).cpu().tolist()  # (steps, models, layers)
        shapes = {name: probe.weight.shape for name, probe in self.probes.items()}
        at = [step for step in range(self.num_steps) if due(step % self.period)][: len(every)]
        return [
            Trace(self.num_steps, at, {n: [e[k][i] for e in every] for i, n in enumerate(shapes)}, shapes, self.stack.kind)
            for k in range(len(self.stack))
        ]


def _wanted(trace: Trace | None, names: Sequence[str], steps: Sequence[int], num_steps: int) -> dict[str, list[float]]:
    """What a model should do at each measured step, averaged as its own gains are; not a number where it follows nothing."""
    if trace is None:
        return {name: [math.nan] * len(steps) for name in names}
    guide = Guide(trace, names, num_steps)

    def mean(old: float, new: float) -> float:
        return old if math.isnan(new) else new if math.isnan(old) else averaged(old, new)

    return {name: list(accumulate((guide.effect(name, step) for step in steps), mean)) for name in names}
