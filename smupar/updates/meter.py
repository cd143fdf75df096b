"""Measures updates at ``optimizer.step()``, to record them or to follow those of another run."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smupar.model.compressed import SparseLinear
from smupar.model.parameterize import check_not_compiled, check_parameterized, no_broadcast, unwrapped
from smupar.model.seam import Step, optimizers, seam_of
from smupar.model.sharding import num_ranks
from smupar.optim.layer_rates import LayerRates, group_of_weight, layer_rates
from smupar.plan.layers import IMAGES, kind_of
from smupar.plan.optimizers import decouples_decay, name_of
from smupar.plan.parameters import parent_path
from smupar.plan.plan import Plan
from smupar.updates.probe import LayerProbe, exact, remove_copied_probes
from smupar.updates.trace import Guide, Trace, averages_after, due, held


class UpdatesWarning(UserWarning):
    """A trace is doubtful, or cannot be followed fully."""


class _Meter:
    """Measures what each step of the optimizer did to every hidden layer's output."""

    def __init__(self, model: nn.Module, plan: Plan, optimizer: Any, period: int | None) -> None:
        """``period``: steps after which the run starts again."""
        model, self.period = unwrapped(model), period
        check_parameterized(model, "first, and build the optimizer from param_groups")
        check_not_compiled(model, "and would ignore new hooks: compile afterwards")
        remove_copied_probes(model)
        self.optimizers = optimizers(optimizer)
        if not self.optimizers:
            raise ValueError("no optimizer was given")
        self.rates: LayerRates = layer_rates(model, plan, self.optimizers)
        trained = {name for each in self.optimizers for name in group_of_weight(each)}
        names = [name for name in self.rates.names if name in trained and _is_measurable(model, plan, name)]
        if not names:
            raise ValueError("no hidden weight can be measured: the plan has none in linear layers or convolutions")
        self.cautions: list[str] = []
        if unmeasured := [name for name in self.rates.names if name not in names]:
            self.cautions.append(
                f"{len(unmeasured)} hidden weights cannot be measured ({', '.join(unmeasured[:3])}): their layers are neither "
                "linear nor convolutions, or no optimizer has them. They keep the plan's factor."
            )
        self.probes = {name: LayerProbe(name, model, plan) for name in names}
        for probe in self.probes.values():
            probe.reader = weakref.ref(self)
        no_broadcast(model, (f"{parent_path(name)}.{probe.buffer}".lstrip(".") for name, probe in self.probes.items()))
        self.trace = Trace(
            shapes={name: plan[name].shape for name in self.probes},
            optimizer="+".join(name_of(each).lower() for each in self.optimizers if group_of_weight(each)),
        )
        self.step, self.num_missing = 0, len(self.optimizers)  # optimizers that have not made this step yet
        # Of a measured step: RMS of the change of a layer's output over the layer's learning rate, and that rate over the base.
        self.gains: dict[str, float] = {}
        self.factors: dict[str, float] = {}
        for each in self.optimizers:
            seam_of(each).add(self, look=self._look, measure=self._measure)

    def remove(self) -> None:
        for each in self.optimizers:
            seam_of(each).remove(self)
        for probe in self.probes.values():
            probe.remove()

    @property
    def place(self) -> int:
        """The number of the step, which starts again at 0 after each period."""
        return self.step % self.period if self.period else self.step

    @torch.no_grad()
    def _look(self, step: Step) -> None:
        if due(self.place):
            with exact():
                for name, group in group_of_weight(step.optimizer).items():
                    if name in self.probes and float(group["lr"]) > 0:
                        self.probes[name].look()

    @torch.no_grad()
    def _measure(self, step: Step) -> None:
        """Measures after the update of an optimizer. The step ends when the last optimizer has made its update."""
        if step.was_noop:
            return
        if due(self.place):
            self._read_probes(step.optimizer)
        self.num_missing -= 1
        if self.num_missing == 0:
            self._end_step()

    def _read_probes(self, optimizer: torch.optim.Optimizer) -> None:
        """Records gains and factors of the layers that were looked at before the update."""
        groups = {n: g for n, g in group_of_weight(optimizer).items() if n in self.probes and self.probes[n].before is not None}
        if not groups:
            return
        with exact():
            # (layers, 2): the sum of the squares of an output's change, and of how many numbers
            sums = torch.stack([self._squares(optimizer, name, group) for name, group in groups.items()]).double()
        if num_ranks() > 1:
            dist.all_reduce(sums)
        for (name, group), (total, count) in zip(groups.items(), sums.tolist(), strict=True):
            lr, base = float(group["lr"]), float(group["scheduled_lr"]) / group["lr_factor"]
            self.gains[name] = math.sqrt(total / count) / lr if math.isfinite(total) else math.nan
            self.factors[name] = lr / base
            if total == 0 and self.probes[name].missed():
                raise ValueError(f"no input of {name!r} was seen: call record_updates and follow_updates before torch.compile")

    def _squares(self, optimizer: torch.optim.Optimizer, name: str, group: Mapping[str, Any]) -> Tensor:
        decayed = float(group["lr"]) * group["weight_decay"] if decouples_decay(optimizer, group) else 0.0
        change = self.probes[name].change(decayed)
        return torch.stack([change.square().sum(), change.new_tensor(float(change.numel()))])

    def _end_step(self) -> None:
        if due(self.place) and self.gains.keys() == self.probes.keys():  # else the learning rate was 0
            self.trace.add(self.step, {name: gain * self.factors[name] for name, gain in self.gains.items()})
            self.follow()
        self.gains, self.factors, self.num_missing = {}, {}, len(self.optimizers)
        self.step += 1
        self.trace.num_steps = self.step
        if self.place == 0:
            self.start_again()

    def follow(self) -> None:
        """Called after a measured step of all optimizers. Subclasses use ``gains`` here."""

    def start_again(self) -> None:
        """Called after the last step of a period."""

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON, with exact numbers."""
        return {"step": self.step, "trace": self.trace.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        vars(self.trace).update(vars(Trace.from_json(state["trace"])))  # the one that was handed out goes on


def _is_measurable(model: nn.Module, plan: Plan, name: str) -> bool:
    module, row, leaf = model.get_submodule(parent_path(name)), plan[name], name.rpartition(".")[2]
    if isinstance(module, SparseLinear):
        return leaf == "weight"
    kind = kind_of(module)
    fits = kind.reads == IMAGES or (len(row.in_dims) == 1 and not kind.is_lookup)
    return kind.product is not None and fits and kind.owns(leaf)


class Recorder(_Meter):
    """What ``record_updates`` returns. As a context manager it returns the trace, and removes its hooks at the end."""

    def __enter__(self) -> Trace:
        return self.trace

    def __exit__(self, *_: object) -> None:
        self.remove()


def record_updates(model: nn.Module, plan: Plan, optimizer: Any, *, period: int | None = None) -> Recorder:
    """Records, while the proxy trains, what each update does to every hidden layer's output.

    ``with record_updates(model, plan, optimizer) as trace: ...train...`` and then ``trace.save("proxy.trace.json")``. Call it
    after ``param_groups`` and before a scheduler, DDP and torch.compile. The training itself is not changed. ``period`` is as
    in ``follow_updates``.
    """
    recorder = Recorder(model, plan, optimizer, period)
    _warn(recorder)
    return recorder


class Follower(_Meter):
    """What ``follow_updates`` returns: ``trace`` is the target's own trace, ``proxy`` is the trace that it follows."""

    def __init__(
        self, model: nn.Module, plan: Plan, optimizer: Any, trace: Trace, steps: int | None, period: int | None
    ) -> None:
        super().__init__(model, plan, optimizer, period)
        self.proxy = trace
        self.averages: dict[str, tuple[float, float]] = {}
        self.clamped = False
        try:
            self.guide = Guide(trace, list(self.probes), period or steps)
        except ValueError:
            self.remove()
            raise
        self.cautions += self.guide.cautions
        if trace.optimizer != self.trace.optimizer:
            self.cautions.append(
                f"the trace was recorded with {trace.optimizer}, this is {self.trace.optimizer}: updates of two optimizers "
                "grow differently over a run"
            )

    def follow(self) -> None:
        def vector(values: Iterable[float]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.float64, device="cpu")

        old = [self.averages.get(name, (math.nan, math.nan)) for name in self.gains]
        wanted = vector(self.guide.effect(name, self.place) for name in self.gains)
        averages, ratio = averages_after(
            (vector(pair[0] for pair in old), vector(pair[1] for pair in old)), wanted, vector(self.gains.values())
        )
        rows = zip(self.gains, *(part.tolist() for part in (*averages, ratio, held(ratio))), strict=True)
        for name, wanted_mean, gain_mean, asked, factor in rows:
            if math.isnan(asked):
                continue  # the factor stays
            self.averages[name], self.rates.measured[name] = (wanted_mean, gain_mean), factor
            if factor != asked and not self.clamped:
                self.clamped = True
                warnings.warn(
                    f"the factor on the learning rate of {name!r} would be {asked:.3g} and is held at {factor:g}: "
                    "is the trace of this model and optimizer?",
                    UpdatesWarning,
                    stacklevel=2,
                )

    def start_again(self) -> None:
        self.averages.clear()
        self.rates.measured.clear()

    def remove(self) -> None:
        super().remove()
        self.rates.measured.clear()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "averages": dict(self.averages), "measured": dict(self.rates.measured)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.averages = {name: (wanted, gain) for name, (wanted, gain) in state["averages"].items()}
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
    """Sets each hidden layer's learning rate, step by step, so that an update does as much as it did in the proxy.

    trace   trace of the proxy, or the file that holds it
    steps   length of this run; default the length of the proxy's run. If it differs, first steps are compared with first
            steps by their number, and the last step with the last.
    period  for runs that start again after so many steps, as in the rounds of IMP; the trace starts again with them

    Call it after ``param_groups`` and before a scheduler, DDP and torch.compile, then train as usual. Use a plan of SmuPar: its
    init stays, and so do its learning rates for everything that is not hidden. With GMP the measured learning rates replace its
    density correction.
    """
    follower = Follower(model, plan, optimizer, trace if isinstance(trace, Trace) else Trace.load(trace), steps, period)
    _warn(follower)
    return follower


def _warn(meter: _Meter) -> None:
    try:
        for caution in meter.cautions:
            warnings.warn(caution, UpdatesWarning, stacklevel=3)
    except UpdatesWarning:  # made an error: the model is left as it was
        meter.remove()
        raise
