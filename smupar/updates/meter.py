"""Measures updates at ``optimizer.step()``, to record them or to follow another run's."""

from __future__ import annotations

import math
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smupar.model.attached import check_not_compiled, check_parameterized, unwrapped
from smupar.model.factors import no_broadcast
from smupar.model.seam import Step, optimizers, seam_of
from smupar.model.sharding import num_ranks
from smupar.model.weights import hidden_weights
from smupar.optim.layer_rates import group_of_weight, layer_rates
from smupar.plan.facts.optimizers import decouples_decay, name_of
from smupar.plan.plan import Plan
from smupar.plan.roles.parameters import parent_path
from smupar.refusals import refuse
from smupar.rules import DEPTH_MUP
from smupar.updates.law import LAW, averages_after, clamped
from smupar.updates.probe import LayerProbe, exact, refuse_measured, remove_copied_probes
from smupar.updates.trace import Trace, TraceReader


class UpdatesWarning(UserWarning):
    """A trace is doubtful, or can be followed only in part."""


class Meter(ABC):
    """Looks at hidden layers before and after some steps of the optimizer. Subclasses choose the steps and the measurements."""

    what = "updates of this model are measured"  # for the error about a second meter: "the ... already"
    called = "record_updates and follow_updates"  # the functions that make this meter
    buffer = "smupar_input"  # suffix of the buffer for a layer's inputs, beside its weight

    def __init__(self, model: nn.Module, plan: Plan, optimizer: Any) -> None:
        """Refuses models that cannot be measured. Nothing is changed before ``install``."""
        self.model, self.plan = unwrapped(model), plan
        self.optimizers = optimizers(optimizer)
        check_parameterized(self.model, "first, and build the optimizer from param_groups")
        check_not_compiled(self.model, "and would ignore new hooks: compile afterwards")
        refuse_measured(self.model, self.buffer, self.what)
        refuse(not self.optimizers, "no optimizer was given")
        groups = ((optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups)
        optimizer_of = {id(parameter): optimizer for optimizer, group in groups for parameter in group["params"]}
        hidden = hidden_weights(self.model, plan)
        trained = {name: weight for name, weight in hidden.items() if id(weight.parameter) in optimizer_of}
        self.names = [name for name, weight in trained.items() if weight.can_multiply(plan[name].in_dims)]
        refuse(not self.names, "no hidden weight can be measured: the plan has none in linear layers or convolutions")
        self.unmeasured = [name for name in hidden if name not in self.names]
        used = {optimizer_of[id(weight.parameter)] for weight in trained.values()}
        self.optimizer_names = "+".join(name_of(optimizer).lower() for optimizer in self.optimizers if optimizer in used)
        self.cautions: list[str] = []
        self.step, self.num_missing = 0, len(self.optimizers)  # num_missing: optimizers that still have to make this step

    def install(self) -> None:
        remove_copied_probes(self.model)
        self.probes = {name: LayerProbe(name, self.model, self.plan, self.buffer) for name in self.names}
        for probe in self.probes.values():
            probe.reader = weakref.ref(self)
        buffers = (f"{parent_path(name)}.{probe.buffer}".lstrip(".") for name, probe in self.probes.items())
        no_broadcast(self.model, buffers)
        for optimizer in self.optimizers:
            seam_of(optimizer).add(self, look=self._look, measure=self._measure)

    def remove(self) -> None:
        for optimizer in self.optimizers:
            seam_of(optimizer).remove(self)
        for probe in self.probes.values():
            probe.remove()

    @property
    @abstractmethod
    def is_due(self) -> bool:
        """Whether the current or next step is looked at."""

    @abstractmethod
    def groups(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Name of a hidden weight -> its group."""

    @abstractmethod
    def look(self, name: str, group: Mapping[str, Any]) -> None:
        """Looks at a layer before the update."""

    @abstractmethod
    def measure(self, optimizer: torch.optim.Optimizer, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """After an optimizer's update, measures the layers that were looked at before it."""

    @abstractmethod
    def end_step(self) -> None:
        """Ends a step, when all optimizers have made their updates."""

    @torch.no_grad()
    def _look(self, step: Step) -> None:
        if self.is_due:
            with exact():
                for name, group in self.groups(step.optimizer).items():
                    if name in self.probes:
                        self.look(name, group)

    @torch.no_grad()
    def _measure(self, step: Step) -> None:
        """Measures after the update of an optimizer. The step ends when the last optimizer has made its update."""
        if step.was_noop:
            return
        if self.is_due:
            groups = self.groups(step.optimizer)
            looked_at = {n: group for n, group in groups.items() if n in self.probes and self.probes[n].old_output is not None}
            if looked_at:
                with exact():
                    self.measure(step.optimizer, looked_at)
        self.num_missing -= 1
        if self.num_missing == 0:
            self.end_step()
            self.num_missing = len(self.optimizers)

    def change(self, optimizer: torch.optim.Optimizer, name: str, group: Mapping[str, Any]) -> Tensor:
        """The change of a layer's output by the update, without decoupled weight decay."""
        return self.probes[name].change(decayed_share(optimizer, group))

    def refuse_unseen(self, name: str) -> None:
        refuse(self.probes[name].missed(), f"no input of {name!r} was seen: call {self.called} before torch.compile")


def decayed_share(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """The share of a weight that decoupled weight decay removes in one step; 0 if the optimizer does not decouple it."""
    return float(group["lr"]) * group["weight_decay"] if decouples_decay(optimizer, group) else 0.0


class _UpdateMeter(Meter):
    """Measures how each update changes the output of its hidden layer."""

    def __init__(self, model: nn.Module, plan: Plan, optimizer: Any, period: int | None) -> None:
        """``period`` is the number of steps after which the run starts again."""
        super().__init__(model, plan, optimizer)
        self.period = period
        if self.unmeasured:
            self.cautions.append(
                f"{len(self.unmeasured)} hidden weights cannot be measured ({', '.join(self.unmeasured[:3])}): their layers "
                "are neither linear nor convolutions, or they are in no optimizer. They keep the plan's factor."
            )
        self.trace = Trace(shapes={name: plan[name].shape for name in self.names}, optimizer=self.optimizer_names)
        # by layer, for a measured step
        self.gains: dict[str, float] = {}  # RMS of the change of the layer's output, over the layer's learning rate
        self.factors: dict[str, float] = {}  # the layer's learning rate over the base rate

    def install(self) -> None:
        # This call changes the optimizers' groups, and is the last that can refuse.
        self.rates = layer_rates(self.model, self.plan, self.optimizers)
        super().install()

    @property
    def period_step(self) -> int:
        """The number of the step in its period, from 0 on."""
        return self.step % self.period if self.period else self.step

    @property
    def is_due(self) -> bool:
        return LAW.is_measured(self.period_step)

    def groups(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        return group_of_weight(optimizer)

    def look(self, name: str, group: Mapping[str, Any]) -> None:
        if float(group["lr"]) > 0:
            self.probes[name].look()

    def measure(self, optimizer: torch.optim.Optimizer, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Records gains and factors."""
        # (layers, 2): sum of squares of an output's change, and number of entries
        sums = torch.stack([self._squares(optimizer, name, group) for name, group in groups.items()]).double()
        if num_ranks() > 1:
            dist.all_reduce(sums)
        for (name, group), (total, count) in zip(groups.items(), sums.tolist(), strict=True):
            lr, base = float(group["lr"]), float(group["scheduled_lr"]) / group["lr_factor"]
            self.gains[name] = math.sqrt(total / count) / lr if math.isfinite(total) else math.nan
            self.factors[name] = lr / base
            if total == 0:
                self.refuse_unseen(name)

    def _squares(self, optimizer: torch.optim.Optimizer, name: str, group: Mapping[str, Any]) -> Tensor:
        change = self.change(optimizer, name, group)
        return torch.stack([change.square().sum(), change.new_tensor(float(change.numel()))])

    def end_step(self) -> None:
        if self.is_due and self.gains.keys() == self.probes.keys():  # a layer with learning rate 0 has no gain
            self.trace.add(self.step, {name: gain * self.factors[name] for name, gain in self.gains.items()})
            self.follow()
        self.gains, self.factors = {}, {}
        self.step += 1
        self.trace.num_steps = self.step
        if self.period_step == 0:
            self.start_again()

    def follow(self) -> None:
        """Adjusts learning rates after a measured step. A recorder does nothing here."""

    def start_again(self) -> None:
        """Prepares for the next period."""

    def state_dict(self) -> dict[str, Any]:
        """The state; the trace in it is JSON with exact numbers."""
        return {"step": self.step, "trace": self.trace.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        vars(self.trace).update(vars(Trace.from_json(state["trace"])))  # in place, since the user holds this trace


class Recorder(_UpdateMeter):
    """The result of ``record_updates``. As a context manager it gives the trace, and removes its hooks at the end."""

    def __enter__(self) -> Trace:
        return self.trace

    def __exit__(self, *_: object) -> None:
        self.remove()


def record_updates(model: nn.Module, plan: Plan, optimizer: Any, *, period: int | None = None) -> Recorder:
    """Records the effect of each update on every hidden layer's output while the proxy trains.

    Use it as ``with record_updates(model, plan, optimizer) as trace: ...train...``, then ``trace.save("proxy.trace.json")``.
    Call it after ``param_groups`` and before a scheduler, DDP and torch.compile. Training is not changed. ``period`` is as in
    ``follow_updates``.
    """
    recorder = Recorder(model, plan, optimizer, period)
    _start(recorder)
    return recorder


class Follower(_UpdateMeter):
    """The result of ``follow_updates``: ``trace`` is the target's own trace, ``proxy`` the trace that it follows."""

    def __init__(
        self, model: nn.Module, plan: Plan, optimizer: Any, trace: Trace, steps: int | None, period: int | None
    ) -> None:
        super().__init__(model, plan, optimizer, period)
        self.proxy, self.reader = trace, TraceReader(trace, self.names, period or steps)
        self.has_warned = False
        self._forget_averages()
        self.cautions += self.reader.cautions
        if trace.optimizer != self.trace.optimizer:
            self.cautions.append(
                f"the trace was recorded with {trace.optimizer}, but this is {self.trace.optimizer}: over a run the updates of "
                "different optimizers develop differently"
            )

    def _forget_averages(self) -> None:
        self.averages = _vector([math.nan] * len(self.names)), _vector([math.nan] * len(self.names))

    def follow(self) -> None:
        wanted = _vector([self.reader.effect(name, self.period_step) for name in self.names])
        gains = _vector([self.gains[name] for name in self.names])
        self.averages, ratios = averages_after(self.averages, wanted, gains)
        for name, ratio, factor in zip(self.names, ratios.tolist(), clamped(ratios).tolist(), strict=True):
            if math.isnan(ratio):
                continue  # this measurement is unusable, so the factor stays
            self.rates.measured[name] = factor
            if factor != ratio and not self.has_warned:
                self.has_warned = True
                warnings.warn(
                    f"the factor on the learning rate of {name!r} would be {ratio:.3g}, and is held at {factor:g}: does the "
                    "trace belong to this model and optimizer?",
                    UpdatesWarning,
                    stacklevel=2,
                )

    def start_again(self) -> None:
        self._forget_averages()
        self.rates.measured.clear()

    def remove(self) -> None:
        super().remove()
        self.rates.measured.clear()

    def state_dict(self) -> dict[str, Any]:
        pairs = zip(self.names, *(average.tolist() for average in self.averages), strict=True)
        averages = {name: (wanted, gain) for name, wanted, gain in pairs if not math.isnan(gain)}
        return {**super().state_dict(), "averages": averages, "measured": dict(self.rates.measured)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        wanted, gains = zip(*(state["averages"].get(name, (math.nan, math.nan)) for name in self.names), strict=True)
        self.averages = _vector(wanted), _vector(gains)
        self.rates.measured.clear()
        self.rates.measured.update(state["measured"])


def follow_updates(
    model: nn.Module,
    plan: Plan,
    optimizer: Any,
    *,
    trace: Trace | str | PathLike[str],
    steps: int | None = None,
    period: int | None = None,
) -> Follower:
    """Sets each hidden layer's learning rate, step by step, so that updates have the same effect as in the proxy.

    trace   trace of the proxy, or the file that holds it
    steps   length of this run, by default the length of the proxy's run. If the lengths differ, first steps correspond by their
            number, and the last step to the last.
    period  number of steps after which the run starts again, as in the rounds of IMP. Reading the trace then starts again too.

    Call it after ``param_groups`` and before a scheduler, DDP and torch.compile, then train as usual. Use a plan of SmuPar: its
    init is kept, and so are its learning rates for parameters that are not hidden weights. With GMP the measured learning rates
    replace the density correction.
    """
    read = trace if isinstance(trace, Trace) else Trace.load(trace)
    num_deeper = sum(row.role == "hidden" and row.depth_mult != 1 for row in plan)
    refuse(
        plan.depth == DEPTH_MUP.name and num_deeper > len(read.effects),
        f"the model has {num_deeper} layers in lists that are deeper than the base's: under depth-muP an update should have "
        "less effect in each of them than in the proxy, but a trace does not say how much less. Use depth='completep', or "
        "record the trace at this depth",
    )
    follower = Follower(model, plan, optimizer, read, steps, period)
    _start(follower)
    return follower


def _start(meter: Meter) -> None:
    for caution in meter.cautions:
        warnings.warn(caution, UpdatesWarning, stacklevel=3)  # before anything changes, since warnings may be errors
    meter.install()


def _vector(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
