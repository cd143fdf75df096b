"""Measures and follows updates in all models of a stack at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from smupar.execute.stack.stack import Stack
from smupar.plan.facts.optimizers import decouples_decay, family_of
from smupar.plan.plan import Plan
from smupar.updates.law import EFFECT, LAW, Law, averages_after, clamped
from smupar.updates.sizes import sizes_of
from smupar.updates.trace import Trace, TraceReader


class StackedUpdates:
    """Measures the updates of all models of a stack, and sets the learning rates of models that follow a trace.

    Before each step call ``before``, with the batch on which updates are measured. After the step call ``after``, with the
    share of the peak learning rate that each model uses. Both take the number of the step, from 0 on. All numbers stay on the
    device until ``traces`` is called.
    """

    def __init__(
        self,
        stack: Stack,
        plans: Sequence[Plan],
        traces: Sequence[Trace | None],
        num_steps: int,
        period: int | None = None,
        law: Law = LAW,
    ) -> None:
        self.stack, self.num_steps, self.period, self.law = stack, num_steps, period or num_steps, law
        names, device = [row.name for row in plans[0] if row.role == "hidden"], stack.device
        self.names, self.sizes = names, sizes_of(stack, names, law)
        places = [step for step in range(self.period) if law.is_measured(step)]
        self.index = {place: index for index, place in enumerate(places)}
        family = family_of(stack.kind)
        self.planned = {name: torch.tensor([plan[name].lr_factor(family) for plan in plans], device=device) for name in names}
        wanted = [_wanted(trace, names, places, self.period) for trace in traces]
        # (models, measured steps)
        self.wanted = {
            name: torch.tensor([of_model[name] for of_model in wanted], dtype=torch.float64, device=device) for name in names
        }
        self.averages: dict[str, tuple[Tensor, Tensor]] = {}
        self.effects: list[Tensor] = []
        self.decouples = decouples_decay(stack.kind)

    @torch.no_grad()
    def before(self, step: int, batch: Sequence[Tensor]) -> None:
        if step % self.period == 0:
            self.averages = {}
            self.stack.forget_measured()
        if self.law.is_measured(step % self.period):
            self.sizes.look(batch)

    @torch.no_grad()
    def after(self, step: int, lr_share: Sequence[float]) -> None:
        if not self.law.is_measured(step % self.period):
            return
        index = self.index[step % self.period]
        share = self.stack.upload(torch.tensor(lr_share, dtype=torch.float32))
        effects = []
        for name in self.names:
            lr, decay, _ = self.stack.tensors.constants[name]
            rate = self.stack.tensors.rates[name]
            used = lr * share * rate
            decayed = used * decay * self.stack.decay_change(name) if self.decouples else torch.zeros_like(used)
            gain = self.sizes.size(name, decayed) / used
            effects.append(gain * self.planned[name] * rate)
            before = self.averages.get(
                name, (torch.full_like(gain, math.nan, dtype=torch.float64), torch.full_like(gain, math.nan))
            )
            self.averages[name], ratio = averages_after(before, self.wanted[name][:, index], gain, self.law.old)
            self.stack.measure(name, clamped(ratio) / self.planned[name])
        self.sizes.forget()
        self.effects.append(torch.stack(effects, dim=1))

    def state_dict(self) -> dict[str, Tensor]:
        """The measurements so far, under flat names."""
        state = {f"averages.{name}.{side}": mean for name, pair in self.averages.items() for side, mean in enumerate(pair)}
        return state | ({"effects": torch.stack(self.effects)} if self.effects else {})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        device = self.stack.device
        pairs = {name: (state.get(f"averages.{name}.0"), state.get(f"averages.{name}.1")) for name in self.names}
        self.averages = {n: (a.to(device), b.to(device)) for n, (a, b) in pairs.items() if a is not None and b is not None}
        self.effects = list(state["effects"].to(device).unbind()) if "effects" in state else []

    def traces(self) -> list[Trace]:
        effects = torch.stack(self.effects).cpu().permute(1, 2, 0).tolist()  # (models, layers, steps)
        shapes = {name: self.stack.weights[name].shape for name in self.names}
        at = [step for step in range(self.num_steps) if self.law.is_measured(step % self.period)][: len(self.effects)]
        note = "" if self.law.size == EFFECT else self.law.size
        return [
            Trace(self.num_steps, list(at), dict(zip(self.names, of_model, strict=True)), shapes, self.stack.kind, note)
            for of_model in effects
        ]


def _wanted(trace: Trace | None, names: Sequence[str], steps: Sequence[int], num_steps: int) -> dict[str, list[float]]:
    """The effects that a model's updates should have, by layer and measured step; NaN if it follows no trace."""
    if trace is None:
        return {name: [math.nan] * len(steps) for name in names}
    reader = TraceReader(trace, names, num_steps)
    return {name: [reader.effect(name, step) for step in steps] for name in names}
