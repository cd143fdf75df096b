"""``observe`` measures outputs, gradients, updates and weights of hidden layers at log-spaced steps of a run, without changing
the run.

Here X are some inputs of a layer, W is its weight before the step, and dW is the update. Outputs, gradients and updates are
measured by their root mean square (RMS). Each look measures:

    Y = X W                         the layer's output
    grad X                          the gradient of X through this layer alone
    dY = X dW                       the change of the output by the update, without decoupled weight decay
    alignment                       RMS(X dW) divided by RMS((X s) dW), where s are random signs. A neuron adds up the
                                    contributions of its n weights. The alignment is 1 if their signs are random, and sqrt(n) if
                                    all contributions are equal.
    weights                         RMS of the kept weights
    top singular value              the largest singular value of W, estimated by a few power iterations
    attention entropy               mean entropy of attention, in nats
    LR, LR times decay              the layer's learning rate, and how much its weights decay in the step
    moved                           1 if the mask has moved since the last look

Probes and phases of a step are the same as for measured updates. ``StackedObserver`` observes a stack of models.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smupar.execute.stacked import Stack
from smupar.model.sharding import local, num_ranks
from smupar.model.weights import ModelWeight, Weight
from smupar.plan.facts.optimizers import decouples_decay
from smupar.plan.plan import Plan
from smupar.updates.entropy import AttentionWatch
from smupar.updates.meter import Meter, UpdatesWarning, decayed_share
from smupar.updates.observation import (
    ALIGNMENT,
    DECAY,
    DY,
    ENTROPY,
    GRAD_X,
    LR,
    MOVED,
    TOP,
    WEIGHTS,
    Observation,
    Y,
    is_looked_at,
)
from smupar.updates.probe import Probe, exact, some_rows

_ITERATIONS = (8, 2)  # of the power method: at the first look, and at later ones, which start from the previous result
_RANDOM = "dY with random signs"
_SUMMED = (Y, GRAD_X, DY, _RANDOM, WEIGHTS, TOP)  # quantities that are measured as sums of squares


class _LayerLook:
    """Looks at one layer, of one model or of all models of a stack.

    Each quantity is a tensor of shape (models, 2): for each model the sum of squares and the number of entries. A single model
    counts as a stack of one.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.signed = Probe(probe.weight, probe.in_dim)
        self.direction: Tensor | None = None  # right singular vector of the largest singular value
        self.mask_checksum: Tensor | None = None  # of the mask at the last look
        self.sums: dict[str, Tensor] = {}

    def before(self, step: int, output_grad: Tensor | None) -> None:
        probe, weight = self.probe, self.probe.weight
        x = probe.inputs
        shape = x.shape[1:] if self._is_stack else x.shape
        signs = torch.randint(2, shape, generator=torch.Generator().manual_seed(step)).to(x.device, x.dtype)
        self.signed.inputs = x * (2 * signs - 1)
        probe.look()
        self.signed.look()
        assert probe.old_output is not None
        values, kept = _values(weight), weight.num_kept().to(torch.float64).reshape(-1)
        self.sums = {
            Y: self._total(probe.old_output),
            WEIGHTS: torch.stack([_flat(values, self._is_stack).double().square().sum(1), kept], dim=-1),
            TOP: self._top_singular_value(),
        }
        if output_grad is not None:
            self.sums[GRAD_X] = self._total(weight.input_gradient(x, output_grad.to(x.dtype), in_dim=probe.in_dim))
        self.moved = self._mask_moved()

    def after(self, decayed: float | Tensor) -> dict[str, Tensor]:
        self.sums[DY] = self._total(self.probe.change(decayed))
        self.sums[_RANDOM] = self._total(self.signed.change(decayed))
        return self.sums

    @property
    def _is_stack(self) -> bool:
        return not isinstance(self.probe.weight, ModelWeight)

    def _total(self, values: Tensor) -> Tensor:
        flat = _flat(values, self._is_stack).double()
        return torch.stack([flat.square().sum(1), flat.new_full((len(flat),), flat.shape[1])], dim=-1)

    def _top_singular_value(self) -> Tensor:
        weight = self.probe.weight
        matrix = weight.full() if isinstance(weight, ModelWeight) else weight.values
        matrix = matrix.detach().float()
        matrix = matrix.flatten(2) if self._is_stack else matrix.flatten(1)[None]
        later = self.direction is not None and self.direction.shape == (len(matrix), matrix.shape[2], 1)
        if not later:
            start = torch.randn(matrix.shape[2], 1, generator=torch.Generator().manual_seed(0))
            self.direction = start.to(matrix.device).expand(len(matrix), -1, -1)
        assert self.direction is not None
        for _ in range(_ITERATIONS[later]):
            self.direction = nn.functional.normalize(matrix.mT @ (matrix @ self.direction), dim=1)
        square = (matrix @ self.direction).double().square().sum((1, 2))
        return torch.stack([square, torch.ones_like(square)], dim=-1)

    def _mask_moved(self) -> Tensor:
        """1 for each model whose mask has changed since the last look, by a checksum over all entries."""
        weight = self.probe.weight
        mask = weight.mask if weight.mask is None else local(weight.mask)
        if mask is None:
            return torch.zeros(1, device=self.probe.inputs.device, dtype=torch.float64)
        flat = _flat(mask, self._is_stack).double()
        checksum = flat @ torch.arange(1, flat.shape[1] + 1, device=flat.device, dtype=torch.float64).sqrt()
        moved = torch.zeros_like(checksum) if self.mask_checksum is None else (checksum != self.mask_checksum).double()
        self.mask_checksum = checksum
        return moved


class Observer(Meter):
    """The result of ``observe``. As a context manager it gives the ``Observation``, and removes its hooks at the end."""

    what = "model is observed"
    called = "observe"
    buffer = "smupar_observed"

    def __init__(self, model: nn.Module, plan: Plan, optimizer: Any, steps: int | None) -> None:
        super().__init__(model, plan, optimizer)
        self.last = steps
        per_neuron = {name: _per_neuron(plan, name) for name in self.names}
        self.observation = Observation(per_neuron=per_neuron, unmeasured=self.unmeasured)
        if self.unmeasured:
            self.cautions.append(
                f"{len(self.unmeasured)} hidden weights are not observed ({', '.join(self.unmeasured[:3])}): their layers are "
                "neither linear nor convolutions, or they are in no optimizer"
            )
        self._looks: dict[str, dict[str, float]] = {}

    def install(self) -> None:
        super().install()
        self.layers = {name: _LayerLook(probe) for name, probe in self.probes.items()}
        for probe in self.probes.values():
            probe.watch_gradient()
        self.attention = AttentionWatch(self.model, lambda: self.is_due)

    def remove(self) -> None:
        super().remove()
        self.attention.remove()

    @property
    def is_due(self) -> bool:
        return is_looked_at(self.step + 1, self.last)

    def groups(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        names = {id(probe.weight.parameter): name for name, probe in self.probes.items()}
        return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"] if id(p) in names}

    def look(self, name: str, group: Mapping[str, Any]) -> None:
        self.layers[name].before(self.step, self.probes[name].output_grad)
        self.probes[name].output_grad = None

    def measure(self, optimizer: torch.optim.Optimizer, groups: Mapping[str, Mapping[str, Any]]) -> None:
        rows = []
        for name, group in groups.items():
            layer = self.layers[name]
            of_layer = layer.after(decayed_share(optimizer, group))
            pairs = [of_layer.get(quantity, of_layer[Y].new_zeros(1, 2)) for quantity in _SUMMED]
            moved = torch.stack([layer.moved, torch.ones_like(layer.moved)], dim=-1)
            rows.append(torch.cat([*pairs, moved.to(pairs[0])]))
        sums = torch.stack(rows)  # (layers, quantities, 2)
        if num_ranks() > 1:
            dist.all_reduce(sums)
        for (name, group), pairs in zip(groups.items(), sums.tolist(), strict=True):
            *means, moved = pairs
            row = _rms_and_alignment(dict(zip(_SUMMED, means, strict=True)))
            row |= {LR: float(group["lr"]), DECAY: float(group["lr"]) * group.get("weight_decay", 0.0)}
            row[MOVED] = float(moved[0] > 0)
            for quantity, value in row.items():
                self._looks.setdefault(quantity, {})[name] = value
            if row[DY] == 0:
                self.refuse_unseen(name)

    def end_step(self) -> None:
        self.step += 1
        self.observation.num_steps = self.step
        if self._looks:
            if entropies := self.attention.take():
                self._looks[ENTROPY] = entropies
            self.observation.add(self.step, self._looks)
        self._looks = {}

    def __enter__(self) -> Observation:
        return self.observation

    def __exit__(self, *_: object) -> None:
        self.remove()

    def state_dict(self) -> dict[str, Any]:
        """The state; the observation in it is JSON."""
        return {"step": self.step, "observation": self.observation.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        vars(self.observation).update(vars(Observation.from_json(state["observation"])))


def observe(model: nn.Module, plan: Plan, optimizer: Any, *, steps: int | None = None) -> Observer:
    """Measures outputs, gradients, updates, weights and their alignment in hidden layers while a model trains.

    Use it as ``with observe(model, plan, optimizer) as seen: ...train...``, then ``print(seen)`` or
    ``seen.save("observed.json")``. It looks at steps 1, 2, 3, 4, 6, 8, 11, 16, ... If ``steps`` gives the length of the run, it
    also looks after four fifths of it and at its end. Call it after ``param_groups``, and before DDP and torch.compile.
    Training is not changed.
    """
    observer = Observer(model, plan, optimizer, steps)
    for caution in observer.cautions:
        warnings.warn(caution, UpdatesWarning, stacklevel=2)
    observer.install()
    return observer


class StackedObserver:
    """Observes all models of a stack. Before each step call ``before``, with the step's batch. After the step call ``after``,
    with the share of the peak learning rate that each model uses. Both take the number of the step, from 0 on."""

    def __init__(self, stack: Stack, plans: Sequence[Plan], steps: int | None = None) -> None:
        self.stack, self.last = stack, steps
        names = [row.name for row in plans[0] if row.role == "hidden"]
        self.layers = {name: _LayerLook(Probe(stack.weights[name])) for name in names}
        self.observations = [Observation(per_neuron={name: _per_neuron(plan, name) for name in names}) for plan in plans]
        self.decouples = decouples_decay(stack.kind)

    @torch.no_grad()
    def before(self, step: int, batch: Sequence[Tensor]) -> None:
        if not is_looked_at(step + 1, self.last):
            return
        inputs, grads = self.stack.inputs(batch, some_rows), self.stack.output_gradients(batch, some_rows)
        with exact():
            for name, layer in self.layers.items():
                layer.probe.inputs = inputs[name].float()
                layer.before(step, grads[name].float())

    @torch.no_grad()
    def after(self, step: int, lr_share: Sequence[float]) -> None:
        for observation in self.observations:
            observation.num_steps = step + 1
        if not is_looked_at(step + 1, self.last):
            return
        share = self.stack.upload(torch.tensor(lr_share, dtype=torch.float32))
        looks: list[dict[str, dict[str, float]]] = [{} for _ in self.observations]
        for name, layer in self.layers.items():
            lr, decay, _ = self.stack.tensors.constants[name]
            used = lr * share * self.stack.tensors.rates[name]
            decayed = used * decay * self.stack.decay_change(name)
            sums = layer.after(decayed.view(-1, 1, 1) if self.decouples else 0.0)
            for model, look in enumerate(looks):
                row = _rms_and_alignment({quantity: sums[quantity][model].tolist() for quantity in _SUMMED})
                row |= {LR: float(used[model]), DECAY: float(decayed[model])}
                row[MOVED] = float(layer.moved[min(model, len(layer.moved) - 1)])
                for quantity, value in row.items():
                    look.setdefault(quantity, {})[name] = value
        for observation, look in zip(self.observations, looks, strict=True):
            observation.add(step + 1, look)


def _rms_and_alignment(pairs: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Root mean squares of a layer at one look, and its alignment, from sums of squares and numbers of entries."""
    sizes = {quantity: math.sqrt(total / count) if count else math.nan for quantity, (total, count) in pairs.items()}
    random = sizes.pop(_RANDOM)
    sizes[ALIGNMENT] = sizes[DY] / random if random else math.nan
    return sizes


def _per_neuron(plan: Plan, name: str) -> float:
    row = plan[name]
    return float(row.density) * math.prod(row.shape[dim] for dim in row.in_dims)


def _values(weight: Weight) -> Tensor:
    return local(weight.parameter.detach()) if isinstance(weight, ModelWeight) else weight.values


def _flat(values: Tensor, is_stack: bool) -> Tensor:
    return values.flatten(1) if is_stack else values.reshape(1, -1)
