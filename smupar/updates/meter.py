"""Measuring updates around ``optimizer.step()``: recording them, and following those of another run."""

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
from smupar.model.parameterize import is_parameterized, no_broadcast, unwrapped
from smupar.model.sharding import local, num_ranks
from smupar.model.stepping import Step, optimizers, seam_of
from smupar.model.weights import MaskedWeight, weight_of
from smupar.optim.layer_rates import LayerRates, group_of_weight, layer_rates
from smupar.plan.layers import IMAGES, kind_of
from smupar.plan.optimizers import facts_of, name_of
from smupar.plan.parameters import parent_path
from smupar.plan.plan import Plan
from smupar.updates.measuring import CLAMP, NUM_TOKENS, Probe, averaged, exact, some_rows
from smupar.updates.trace import Guide, Trace, due

_INPUT = "smupar_input"


class UpdatesWarning(UserWarning):
    """A trace is doubtful, or cannot be followed as it should."""


class _Probe(Probe):
    """Keeps some inputs of its layer, in a buffer beside the weight."""

    weight: MaskedWeight

    def __init__(self, name: str, model: nn.Module, plan: Plan) -> None:
        weight, in_dim = weight_of(model, name), plan[name].in_dims[0]
        super().__init__(weight, in_dim)
        self.name, self.module = name, weight.module
        self.is_conv = kind_of(self.module).reads == IMAGES
        self.buffer = f"{weight.leaf}_{_INPUT}"
        self.meter: weakref.ref[_Meter] | None = None
        if not self.is_conv:
            size = (NUM_TOKENS, plan[name].shape[in_dim])
            self._make(torch.zeros(size, device=local(weight.parameter).device))
        self.hook = self.module.register_forward_pre_hook(self._keep, with_kwargs=True)

    @property
    def inputs(self) -> Tensor:  # type: ignore[override]
        held: Tensor = getattr(self.module, self.buffer)
        if held.dtype != torch.float32:  # the model was converted, and its buffers with it
            self._make(held := held.float())
        return held

    def _make(self, value: Tensor) -> None:
        self.module.register_buffer(self.buffer, value, persistent=False)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args = args or tuple(kwargs.values())
        if not (args and torch.is_grad_enabled() and args[0].numel()):  # validation, or an expert without tokens
            return
        x = args[0].detach()
        if self.is_conv:
            places = math.prod(x.shape[2:])
            some = x[: -(-NUM_TOKENS // places)].float()
            if getattr(module, self.buffer, None) is None or self.inputs.shape != some.shape:
                self._make(torch.zeros_like(some))
            self.inputs.copy_(some)
            return
        self.inputs.copy_(some_rows(x))

    def missed(self) -> bool:
        """Whether the layer was used, as its gradient shows, and no input was seen."""
        grad = self.weight.parameter.grad
        return grad is not None and bool(local(grad).any()) and not bool(self.inputs.any())

    def remove(self) -> None:
        self.hook.remove()
        if hasattr(self.module, self.buffer):
            delattr(self.module, self.buffer)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or one that is loaded, is read by nobody."""
        return {**self.__dict__, "meter": None}

    @property
    def is_read(self) -> bool:
        return self.meter is not None and self.meter() is not None


def _take_over(module: nn.Module) -> None:
    """Removes probes that a deepcopy brought along; raises if a live meter still uses them."""
    for key, hook in list(module._forward_pre_hooks.items()):
        probe = getattr(hook, "__self__", None)
        if isinstance(probe, _Probe):
            if probe.is_read:
                raise ValueError("the updates of this model are measured already: call remove() on what measures them")
            del module._forward_pre_hooks[key]
            module._buffers.pop(probe.buffer, None)
            module._non_persistent_buffers_set.discard(probe.buffer)


def _refuse(model: nn.Module) -> None:
    if not is_parameterized(model):
        raise ValueError(
            "this model is not parameterized: call smupar.parameterize first, and build the optimizer from param_groups"
        )
    for path, module in model.named_modules():
        if module._compiled_call_impl is not None:
            raise ValueError(f"{path or 'the model'!r} is compiled already and would ignore new hooks: compile afterwards")
        _take_over(module)


def _blind(names: Iterable[str]) -> list[str]:
    """What to say about hidden weights that are not measured, if there are any."""
    names = list(names)
    if not names:
        return []
    return [
        f"{len(names)} hidden weights cannot be measured ({', '.join(names[:3])}): their layers are neither linear nor "
        "convolutions, or no optimizer has them. They keep the plan's factor."
    ]


class _Meter:
    """Measures what each step of the optimizer did to every hidden layer's output."""

    period: int | None = None
    """Steps after which the run starts anew."""

    def __init__(self, model: nn.Module, plan: Plan, optimizer: Any) -> None:
        model = unwrapped(model)
        _refuse(model)
        self.optimizers = optimizers(optimizer)
        if not self.optimizers:
            raise ValueError("no optimizer was given")
        self.rates: LayerRates = layer_rates(model, plan, self.optimizers)
        trained = {name for each in self.optimizers for name in group_of_weight(each)}
        names = [name for name in self.rates.names if name in trained and _is_measurable(model, plan, name)]
        if not names:
            raise ValueError("no hidden weight can be measured: the plan has none in linear layers or convolutions")
        self.cautions = _blind(name for name in self.rates.names if name not in names)
        self.probes = self._probes(model, plan, names)
        self.trace = Trace(
            shapes={name: plan[name].shape for name in self.probes},
            optimizer="+".join(name_of(each).lower() for each in self.optimizers if group_of_weight(each)),
        )
        self.step, self.waiting = 0, len(self.optimizers)
        self.gains: dict[str, float] = {}
        """RMS of the change of a layer's output in the last measured step, over the layer's learning rate."""
        self.factors: dict[str, float] = {}
        """That learning rate over the base one."""
        for each in self.optimizers:
            seam_of(each).add(self, look=self._look, measure=self._after)

    def _probes(self, model: nn.Module, plan: Plan, names: list[str]) -> dict[str, _Probe]:
        probes = {name: _Probe(name, model, plan) for name in names}
        for probe in probes.values():
            probe.meter = weakref.ref(self)
        no_broadcast(model, (f"{parent_path(name)}.{probe.buffer}".lstrip(".") for name, probe in probes.items()))
        return probes

    def remove(self) -> None:
        for each in self.optimizers:
            seam_of(each).remove(self)
        for probe in self.probes.values():
            probe.remove()

    @property
    def place(self) -> int:
        """The step, since the run started anew."""
        return self.step % self.period if self.period else self.step

    @torch.no_grad()
    def _look(self, step: Step) -> None:
        """Layer outputs on the inputs of this step, before the update."""
        if due(self.place):
            with exact():
                for name, group in group_of_weight(step.optimizer).items():
                    if name in self.probes and float(group["lr"]) > 0:
                        self.probes[name].look()

    @torch.no_grad()
    def _after(self, step: Step) -> None:
        if step.was_noop:
            return
        if due(self.place):
            self._measure(step.optimizer)
        self.waiting -= 1
        if self.waiting == 0:
            self.waiting = len(self.optimizers)
            if due(self.place) and self.gains.keys() == self.probes.keys():  # else the learning rate was 0
                self.trace.add(self.step, {name: gain * self.factors[name] for name, gain in self.gains.items()})
                self.took_measure()
            self.gains, self.factors = {}, {}
            self.step += 1
            self.trace.num_steps = self.step
            if self.place == 0:
                self.start_anew()

    def _measure(self, optimizer: torch.optim.Optimizer) -> None:
        found: dict[str, tuple[Tensor, float, float]] = {}
        with exact():
            for name, group in group_of_weight(optimizer).items():
                probe = self.probes.get(name)
                if probe is None or probe.before is None:
                    continue
                lr, base = float(group["lr"]), float(group["scheduled_lr"]) / group["lr_factor"]
                left = 1 - lr * group["weight_decay"] if _is_decoupled(optimizer, group) else 1.0
                change = probe.change(left)
                found[name] = (torch.stack([change.square().sum(), change.new_tensor(float(change.numel()))]), lr, lr / base)
        if not found:
            return
        sums = torch.stack([both for both, _, _ in found.values()]).double()
        if num_ranks() > 1:
            dist.all_reduce(sums)
        for (name, (_, lr, factor)), (total, count) in zip(found.items(), sums.tolist(), strict=True):
            self.gains[name] = math.sqrt(total / count) / lr if math.isfinite(total) else math.nan
            self.factors[name] = factor
            if total == 0 and self.probes[name].missed():
                raise ValueError(f"no input of {name!r} was seen: call record_updates and follow_updates before torch.compile")

    def took_measure(self) -> None:
        """Behind a measured step of all optimizers."""

    def start_anew(self) -> None:
        """Behind the last step of a period."""

    def state_dict(self) -> dict[str, Any]:
        """JSON, exact."""
        return {"step": self.step, "trace": self.trace.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.trace = state["step"], Trace.from_json(state["trace"])


def _is_measurable(model: nn.Module, plan: Plan, name: str) -> bool:
    module, row, leaf = model.get_submodule(parent_path(name)), plan[name], name.rpartition(".")[2]
    if isinstance(module, SparseLinear):
        return leaf == "weight"
    kind = kind_of(module)
    fits = kind.reads == IMAGES or (len(row.in_dims) == 1 and not kind.is_lookup)
    return kind.product is not None and fits and kind.owns(leaf)


def _is_decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", facts_of(optimizer).decoupled))


class Recorder(_Meter):
    """What ``record_updates`` returns; as a context it hands out the trace and takes its hooks away at the end."""

    def __enter__(self) -> Trace:
        return self.trace

    def __exit__(self, *_: object) -> None:
        self.remove()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trace = self.trace
        super().load_state_dict(state)
        trace.__dict__.update(self.trace.__dict__)  # the one that was handed out goes on
        self.trace = trace


def record_updates(model: nn.Module, plan: Plan, optimizer: Any, *, period: int | None = None) -> Recorder:
    """Writes down, while the proxy trains, what each update does to every hidden layer's output.

    ``with record_updates(model, plan, optimizer) as trace: ...train...`` and then ``trace.save("proxy.trace.json")``. Before a
    scheduler, DDP and torch.compile. The run itself is not changed. ``period`` as in ``follow_updates``.
    """
    recorder = Recorder(model, plan, optimizer)
    recorder.period = period
    _warn(recorder)
    return recorder


class Follower(_Meter):
    """What ``follow_updates`` returns: ``trace`` is the target's own, ``proxy`` the one it follows."""

    def __init__(
        self, model: nn.Module, plan: Plan, optimizer: Any, trace: Trace, steps: int | None, period: int | None
    ) -> None:
        super().__init__(model, plan, optimizer)
        self.proxy, self.period = trace, period
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

    def took_measure(self) -> None:
        for name, gain in self.gains.items():
            wanted = self.guide.effect(name, self.place)
            if not (math.isfinite(wanted) and math.isfinite(gain) and gain > 0):
                continue  # the factor stays
            old_wanted, old_gain = self.averages.get(name, (wanted, gain))
            wanted, gain = averaged(old_wanted, wanted), averaged(old_gain, gain)
            self.averages[name] = (wanted, gain)
            factor = min(max(wanted / gain, 1 / CLAMP), CLAMP)
            if factor != wanted / gain and not self.clamped:
                self.clamped = True
                warnings.warn(
                    f"the factor on the learning rate of {name!r} would be {wanted / gain:.3g} and is held at {factor:g}: "
                    "is the trace of this model and optimizer?",
                    UpdatesWarning,
                    stacklevel=2,
                )
            self.rates.measured[name] = factor

    def start_anew(self) -> None:
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

    trace   of the proxy, or its file
    steps   length of this run; default that of the proxy's. With another one, first steps are compared with
            first steps by their number, and the last with the last.
    period  steps after which the run starts anew and the trace is followed from its beginning, as in the rounds of IMP

    Call it after ``param_groups`` and before a scheduler, DDP and torch.compile, then train as usual. The plan should be
    SmuPar's, for its init and for everything that is not hidden. With GMP the density correction gives way to what is measured.
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
