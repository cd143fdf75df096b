"""Measured updates: the learning rate of each hidden layer set so that one update changes its output as much as in the proxy.

For a hidden weight W with inputs X and one update dW, made at a base learning rate eta,

    effect = RMS(X dW) / eta

is what one update does to the layer's output, per unit of base learning rate. ``record_updates`` writes it down while the
small dense proxy trains: the trace. ``follow_updates`` measures gain = RMS(X dW) / (learning rate of the layer) in the target
and sets the layer's learning rate to eta * effect of the proxy / gain; before the first measurement the plan's factor is used.
Nothing about the optimizer or the masks has to be known: dW is what the weights show after ``optimizer.step()``. Decoupled
weight decay is kept out by comparing X W' with (1 - lr * decay) X W, which is what decay alone would leave.

Both sides are averaged over time (0.8 old, 0.2 new). A trace of another length or depth is read at the same share of the
run and of the depth.
"""

from __future__ import annotations

import json
import math
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from smupar.apply import is_parameterized, optimizers, unwrapped
from smupar.plan import Plan
from smupar.rates import LayerRates, group_of_weight, layer_rates
from smupar.roles import layer_glob
from smupar.rules import family_of
from smupar.stacked import Stack
from smupar.tensors import parent_path
from smupar.values import local, num_ranks, whole

FORMAT = "smupar-trace/1"
NUM_TOKENS = 128
_EVERY, _FIRST = 5, 20  # the first steps are all measured, then every fifth
_OLD = 0.8
_CLAMP = 1e4
_INPUT = "smupar_input"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_DECOUPLED = {"AdamW", "Lion", "Muon"}


class UpdatesWarning(UserWarning):
    """A trace is doubtful, or cannot be followed as it should."""


def due(step: int) -> bool:
    """Whether step number ``step``, from 0, is measured."""
    return step < _FIRST or step % _EVERY == 0


# Traces


@dataclass
class Trace:
    """Effects of updates, per hidden weight and measured step."""

    num_steps: int = 0
    at: list[int] = field(default_factory=list)
    """Steps that were measured, from 0."""
    effects: dict[str, list[float]] = field(default_factory=dict)
    """RMS of the change of a layer's output by one update, over the base learning rate. Not finite: the run diverged."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    optimizer: str = ""
    """Of the hidden weights."""
    note: str = ""

    @property
    def diverged(self) -> bool:
        return any(not math.isfinite(value) for values in self.effects.values() for value in values)

    def add(self, step: int, effects: Mapping[str, float]) -> None:
        self.at.append(step)
        for name, value in effects.items():
            self.effects.setdefault(name, []).append(value)

    def to_json(self) -> str:
        known = {name: [v if math.isfinite(v) else None for v in values] for name, values in self.effects.items()}
        return json.dumps({"format": FORMAT, **asdict(self), "effects": known})

    @classmethod
    def from_json(cls, text: str) -> Trace:
        try:
            values = json.loads(text)
            if values.pop("format") != FORMAT:
                raise KeyError("format")
            values["shapes"] = {name: tuple(shape) for name, shape in values["shapes"].items()}
            values["effects"] = {n: [math.nan if v is None else v for v in vs] for n, vs in values["effects"].items()}
            if any(len(effects) != len(values["at"]) for effects in values["effects"].values()):
                raise KeyError("effects of another number than steps")
            return cls(**values)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is no trace in format {FORMAT!r} ({error}): record one with record_updates") from error

    def save(self, path: str | PathLike[str]) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trace:
        try:
            return cls.from_json(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"the trace {path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def effect(self, name: str, step: float) -> float:
        """Of one of its own layers: between measured steps on a straight line over the logarithm."""
        values = self.effects[name]
        after = bisect_left(self.at, step)
        if after == 0 or after == len(self.at):
            return values[min(after, len(values) - 1)]
        low, high = values[after - 1], values[after]
        share = (step - self.at[after - 1]) / (self.at[after] - self.at[after - 1])
        if share == 1 or not 0 < low * high < math.inf:
            return high
        return math.exp((1 - share) * math.log(low) + share * math.log(high))

    def plot(self, path: str | PathLike[str], proxy: Trace | None = None) -> None:
        """Effects over the run, one panel for each kind of layer; the proxy's beside them."""
        _plot(self, proxy, path)


class Guide:
    """A trace as one target reads it: its own layers and its own number of steps."""

    def __init__(self, trace: Trace, names: Sequence[str], num_steps: int | None = None) -> None:
        """``num_steps`` of the target; default as many as the trace has."""
        if not trace.at or not trace.effects:
            raise ValueError("the trace has no measured step: record it over a whole run of the proxy")
        self.cautions = ["the run that this trace was recorded on diverged: record one at a smaller learning rate"]
        self.cautions = self.cautions if trace.diverged else []
        self.trace, self.num_steps = trace, num_steps or trace.num_steps
        self.sources = {name: _sources(name, names, list(trace.effects)) for name in names}
        own, theirs = (Counter(layer_glob(name) for name in some) for some in (names, trace.effects))
        for kind in own:
            most = max(theirs[other] for other in own if own[other] == own[kind])
            if theirs[kind] < most:
                raise ValueError(f"the trace misses layers: it has {theirs[kind]} like {kind!r} and {most} of other kinds")

    def effect(self, name: str, step: int) -> float:
        """What an update should do at this step of the target."""
        same = self.num_steps == self.trace.num_steps
        there = step if same else step * self.trace.num_steps / self.num_steps
        parts = [(share, self.trace.effect(source, there)) for source, share in self.sources[name]]
        if any(value <= 0 or not math.isfinite(value) for _, value in parts):
            return math.nan
        return math.exp(sum(share * math.log(value) for share, value in parts))


def _sources(name: str, names: Sequence[str], recorded: Sequence[str]) -> list[tuple[str, float]]:
    """The proxy's layers that a layer of the target looks at, with their shares: the one of its name, or where the depth
    differs those at the same share of the depth."""
    kind = layer_glob(name)
    own = [other for other in names if layer_glob(other) == kind]
    theirs = [other for other in recorded if layer_glob(other) == kind]
    if not theirs:
        raise ValueError(
            f"the trace is of another architecture: it has no layer like {name!r} (it has {', '.join(list(recorded)[:3])}, ...)"
        )
    if len(own) == len(theirs):
        return [(theirs[own.index(name)], 1.0)]
    place = own.index(name) / max(1, len(own) - 1) * (len(theirs) - 1)
    low = int(place)
    share = place - low
    parts = [(theirs[low], 1 - share), (theirs[min(low + 1, len(theirs) - 1)], share)]
    return [(source, part) for source, part in parts if part > 0]


# Measuring


def some_rows(x: Tensor) -> Tensor:
    """The first tokens of a batch; repeated where there are fewer, so that a mean is over them alone."""
    rows = x.flatten(0, -2)[:NUM_TOKENS]
    return rows if len(rows) == NUM_TOKENS else rows.repeat(-(-NUM_TOKENS // max(1, len(rows))), 1)[:NUM_TOKENS]


class _Probe:
    """One hidden weight: keeps some inputs of its layer, and says what the weight makes of them."""

    def __init__(self, name: str, model: nn.Module, plan: Plan) -> None:
        module, parameter, in_dim = model.get_submodule(parent_path(name)), model.get_parameter(name), plan[name].in_dims[0]
        self.name, self.module, self.parameter, self.in_dim = name, module, parameter, in_dim
        self.is_conv = isinstance(module, _CONVOLUTIONS)
        self.buffer = f"{name.rpartition('.')[2]}_{_INPUT}"
        self.before: Tensor | None = None
        if not self.is_conv:
            size = (NUM_TOKENS, parameter.shape[in_dim])
            self._make(torch.zeros(size, device=local(parameter).device))
        self.hook = module.register_forward_pre_hook(self._keep)

    @property
    def inputs(self) -> Tensor:
        return getattr(self.module, self.buffer)

    def _make(self, value: Tensor) -> None:
        self.module.register_buffer(self.buffer, value, persistent=False)

    def _keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not (args and torch.is_grad_enabled()):  # validation
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

    def outputs(self) -> Tensor:
        """What the weight makes of the inputs, without bias: under FSDP2 this rank's part of it."""
        if not self.is_conv:
            if self.in_dim == 1:
                return self.inputs @ local(self.parameter).detach().float().T
            return self.inputs @ whole(self.parameter).detach().float()  # (in, out): a rank's part would be of the inputs
        conv: Any = self.module
        weight = local(self.parameter).detach().float()
        function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.ndim]
        return function(self.inputs, weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)

    def missed(self) -> bool:
        """Whether the layer was used, as its gradient shows, and no input was seen."""
        grad = self.parameter.grad
        return grad is not None and bool(local(grad).any()) and not bool(self.inputs.any())

    def remove(self) -> None:
        self.hook.remove()
        if hasattr(self.module, self.buffer):
            delattr(self.module, self.buffer)


class _Meter:
    """Hooks around ``optimizer.step()`` that measure what it did to every hidden layer's output."""

    period: int | None = None
    """Steps after which the run starts anew."""

    def __init__(self, model: nn.Module, plan: Plan, optimizer: Any) -> None:
        model = unwrapped(model)
        if not is_parameterized(model):
            raise ValueError(
                "this model is not parameterized: call smupar.parameterize first, and build the optimizer from param_groups"
            )
        for path, module in model.named_modules():
            if module._compiled_call_impl is not None:
                raise ValueError(f"{path or 'the model'!r} is compiled already and would ignore new hooks: compile afterwards")
            if any(name.endswith(_INPUT) for name in module._buffers):
                raise ValueError("the updates of this model are measured already: call remove() on what measures them")
        self.optimizers = optimizers(optimizer)
        if not self.optimizers:
            raise ValueError("no optimizer was given")
        self.rates: LayerRates = layer_rates(model, plan, self.optimizers)
        trained = {name for one in self.optimizers for name in group_of_weight(one)}
        names = [name for name in self.rates.names if name in trained and _is_measurable(model, plan, name)]
        if not names:
            raise ValueError("no hidden weight can be measured: the plan has none in linear layers or convolutions")
        blind = [name for name in self.rates.names if name not in names]
        self.cautions = [
            f"{len(blind)} hidden weights cannot be measured ({', '.join(blind[:3])}): their layers are neither linear nor "
            "convolutions, or no optimizer has them. They keep the plan's factor."
        ][: len(blind)]
        self.probes = {name: _Probe(name, model, plan) for name in names}
        ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
        ignored |= {f"{parent_path(name)}.{probe.buffer}".lstrip(".") for name, probe in self.probes.items()}
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        self.trace = Trace(
            shapes={name: tuple(probe.parameter.shape) for name, probe in self.probes.items()},
            optimizer="+".join(type(one).__name__.lower() for one in self.optimizers if group_of_weight(one)),
        )
        self.step, self.waiting = 0, len(self.optimizers)
        self.gains: dict[str, float] = {}
        """RMS of the change of a layer's output in the last measured step, over the layer's learning rate."""
        self.factors: dict[str, float] = {}
        """That learning rate over the base one."""
        self.hooks = [one.register_step_pre_hook(self._before) for one in self.optimizers]
        self.hooks += [one.register_step_post_hook(self._after) for one in self.optimizers]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for probe in self.probes.values():
            probe.remove()

    @property
    def place(self) -> int:
        """The step, since the run started anew."""
        return self.step % self.period if self.period else self.step

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if due(self.place):
            with _exact():
                for name, group in group_of_weight(optimizer).items():
                    if name in self.probes and float(group["lr"]) > 0:
                        self.probes[name].before = self.probes[name].outputs()

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if due(self.place):
            self._measure(optimizer)
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
        with _exact():
            for name, group in group_of_weight(optimizer).items():
                probe = self.probes.get(name)
                if probe is None or probe.before is None:
                    continue
                lr, base = float(group["applied_lr"]), float(group.get("scheduled_lr", group["lr"])) / group["lr_factor"]
                left = 1 - lr * group["weight_decay"] if _is_decoupled(optimizer, group) else 1.0
                change = probe.outputs() - left * probe.before
                probe.before = None
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
                raise ValueError(
                    f"no input of {name!r} was seen. Call record_updates and follow_updates before torch.compile; where "
                    "another model of the class ran compiled, set torch._dynamo.config.skip_nnmodule_hook_guards = False."
                )

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
    module, row = model.get_submodule(parent_path(name)), plan[name]
    # transformers' Conv1D is a linear layer that stores (in, out); nn.MultiheadAttention never calls its out_proj.
    is_linear = isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
    called = not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    fits = isinstance(module, _CONVOLUTIONS) or (is_linear and called and len(row.in_dims) == 1)
    return fits and name.rpartition(".")[2] == "weight"


def _is_decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", type(optimizer).__name__ in _DECOUPLED))


@contextmanager
def _exact() -> Iterator[None]:
    """Two products of which the small difference counts: no TF32, no autocast."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        matmul.fp32_precision = before


# Recording and following


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
            wanted, gain = _OLD * old_wanted + (1 - _OLD) * wanted, _OLD * old_gain + (1 - _OLD) * gain
            self.averages[name] = (wanted, gain)
            factor = min(max(wanted / gain, 1 / _CLAMP), _CLAMP)
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
    steps   length of this run; default that of the proxy's. With another one the trace is read at the same share of the run.
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
        self.decoupled = stack.kind in ("adamw", "lion", "muon")
        self.outputs: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}

    @torch.no_grad()
    def before(self, step: int, batch: Sequence[Tensor]) -> None:
        if step % self.period == 0:
            self.gains = {}
        if due(step % self.period):
            self.inputs = self.stack.inputs(batch, some_rows)
            with _exact():
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
            left = 1 - used * decay if self.decoupled else torch.ones_like(used)
            with _exact():
                change = self._outputs(name) - left.view(-1, 1, 1) * self.outputs[name]
            gain = change.square().mean((1, 2)).sqrt() / used
            effects.append(gain * self.planned[name] * rate)
            usable = gain.isfinite() & (gain > 0)
            old = self.gains.get(name, torch.full_like(gain, math.nan))
            mean = torch.where(old.isfinite(), _OLD * old + (1 - _OLD) * gain, gain)
            self.gains[name] = torch.where(usable, mean, old)
            factor = (self.wanted[name][:, index] / self.gains[name]).clamp(1 / _CLAMP, _CLAMP)
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
                mean = wanted if math.isnan(mean) else _OLD * mean + (1 - _OLD) * wanted
            averages[name].append(mean)
    return averages


def _plot(target: Trace, proxy: Trace | None, path: str | PathLike[str]) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg", force=False)
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'smupar[plot]'") from error
    kinds = list(dict.fromkeys(layer_glob(name) for name in target.effects))
    columns = min(3, len(kinds))
    figure, axes = pyplot.subplots(
        -(-len(kinds) // columns), columns, figsize=(4.2 * columns, 3 * -(-len(kinds) // columns)), squeeze=False, sharex=True
    )
    for panel, kind in zip(axes.flat, kinds, strict=False):
        for trace, colour, label in ((proxy, "0.45", "proxy"), (target, "#c2410c", "target" if proxy else "effect")):
            names = [name for name in trace.effects if layer_glob(name) == kind] if trace else []
            for number, name in enumerate(names):
                assert trace is not None
                shares = [step / max(1, trace.num_steps) for step in trace.at]
                panel.plot(shares, trace.effects[name], color=colour, lw=1, alpha=0.8, label=None if number else label)
        panel.set_title(kind, fontsize=9)
        panel.set_yscale("log")
        panel.grid(alpha=0.25)
    for panel in axes.flat[len(kinds) :]:
        panel.set_visible(False)
    for panel in axes.flat[max(0, len(kinds) - columns) : len(kinds)]:  # the lowest of each column
        panel.set_xlabel("share of the run")
        panel.tick_params(labelbottom=True)
    for panel in axes[:, 0]:
        panel.set_ylabel("RMS(X dW) / base LR")
    axes.flat[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
