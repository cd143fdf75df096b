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

Probes and phases of a step are the same as for measured updates.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smupar.model.sharding import local, num_ranks
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
from smupar.updates.probe import LayerProbe, Probe

_ITERATIONS = (8, 2)  # of the power method: at the first look, and at later ones, which start from the previous result
_RANDOM = "dY with random signs"
_SUMMED = (Y, GRAD_X, DY, _RANDOM, WEIGHTS, TOP, MOVED)  # sums and numbers of entries, added up over ranks


class _LayerLook:
    """Looks at one layer. Each quantity is a tensor of two numbers: the sum of squares and the number of entries."""

    def __init__(self, probe: LayerProbe) -> None:
        self.probe = probe
        self.signed = Probe(probe.weight, probe.in_dim)
        self.direction: Tensor | None = None  # right singular vector of the largest singular value
        self.mask_checksum: Tensor | None = None  # of the mask at the last look
        self.sums: dict[str, Tensor] = {}

    def before(self, step: int, output_grad: Tensor | None) -> None:
        probe, weight = self.probe, self.probe.weight
        x = probe.inputs
        signs = torch.randint(2, x.shape, generator=torch.Generator().manual_seed(step)).to(x.device, x.dtype)
        self.signed.inputs = x * (2 * signs - 1)
        probe.look()
        self.signed.look()
        assert probe.old_output is not None
        self.sums = {
            Y: _square_sum(probe.old_output),
            WEIGHTS: _square_sum(local(weight.parameter.detach()), weight.num_kept()),
            TOP: self._top_singular_value(),
            MOVED: self._mask_moved(),
        }
        if output_grad is not None:
            self.sums[GRAD_X] = _square_sum(weight.input_gradient(x, output_grad.to(x.dtype), in_dim=probe.in_dim))

    def after(self, decayed: float) -> dict[str, Tensor]:
        self.sums[DY] = _square_sum(self.probe.change(decayed))
        self.sums[_RANDOM] = _square_sum(self.signed.change(decayed))
        return self.sums

    def _top_singular_value(self) -> Tensor:
        matrix = self.probe.weight.full().detach().float().flatten(1)
        later = self.direction is not None and len(self.direction) == matrix.shape[1]
        if not later:
            start = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0))
            self.direction = start.to(matrix.device)
        assert self.direction is not None
        for _ in range(_ITERATIONS[later]):
            self.direction = nn.functional.normalize(matrix.T @ (matrix @ self.direction), dim=0)
        return _square_sum(matrix @ self.direction, 1)

    def _mask_moved(self) -> Tensor:
        """1 if the mask has changed since the last look, by a checksum over all entries."""
        mask = self.probe.weight.mask
        if mask is None:
            return torch.zeros(2, device=self.probe.inputs.device, dtype=torch.float64)
        flat = local(mask).flatten().double()
        checksum = flat @ torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float64).sqrt()
        moved = torch.zeros_like(checksum) if self.mask_checksum is None else (checksum != self.mask_checksum).double()
        self.mask_checksum = checksum
        return torch.stack([moved, torch.ones_like(moved)])


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
            rows.append(torch.stack([of_layer.get(quantity, torch.zeros_like(of_layer[Y])) for quantity in _SUMMED]))
        sums = torch.stack(rows)  # (layers, quantities, 2)
        if num_ranks() > 1:
            dist.all_reduce(sums)
        for (name, group), pairs in zip(groups.items(), sums.tolist(), strict=True):
            by_quantity = dict(zip(_SUMMED, pairs, strict=True))
            moved, _ = by_quantity.pop(MOVED)
            row = _rms_and_alignment(by_quantity)
            row |= {LR: float(group["lr"]), DECAY: float(group["lr"]) * group.get("weight_decay", 0.0)}
            row[MOVED] = float(moved > 0)
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


def _rms_and_alignment(pairs: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Root mean squares of a layer at one look, and its alignment, from sums of squares and numbers of entries."""
    sizes = {quantity: math.sqrt(total / count) if count else math.nan for quantity, (total, count) in pairs.items()}
    random = sizes.pop(_RANDOM)
    sizes[ALIGNMENT] = sizes[DY] / random if random else math.nan
    return sizes


def _per_neuron(plan: Plan, name: str) -> float:
    row = plan[name]
    return float(row.density) * math.prod(row.shape[dim] for dim in row.in_dims)


def _square_sum(values: Tensor, count: int | Tensor | None = None) -> Tensor:
    """The sum of squares, and the number of values, if ``count`` gives no other number."""
    square = values.double().square().sum()
    num = torch.as_tensor(values.numel() if count is None else count)
    return torch.stack([square, num.to(square)])
