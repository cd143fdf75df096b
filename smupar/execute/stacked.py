"""Trains many models of equal shapes as one batched model. Each model has its own rule, density, learning rate, seed and
schedule.

Parameters, masks and factors get a leading dimension of models, and one batched step (``stacked_step``) replaces many
small steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from smupar.execute.cuda_graphs import GraphedCall, Uploader, compile_static
from smupar.execute.stacked_step import CHANGES, BatchedLoss, LossFn, adam_in_place
from smupar.model.csr import MASK
from smupar.model.factors import add_missing_factors
from smupar.model.stacked_weight import StackedWeight
from smupar.model.weights import weight_of
from smupar.optim.groups import groups_by_optimizer
from smupar.optim.layer_rates import measured_or_corrected
from smupar.plan.facts.layers import draws_random_numbers, has_running_statistics
from smupar.plan.facts.optimizers import facts_for_role, family_of, names_with
from smupar.plan.plan import Plan
from smupar.refusals import refuse

# Outside of training steps only this many models run at a time, since a captured training step holds most of the memory.
_CHUNK = 4
SUPPORTED = names_with("stackable")


@dataclass(frozen=True)
class Hyperparameters:
    """One model's optimizer: the arguments of ``param_groups`` and of the optimizer, with torch's defaults."""

    lr: float
    # Learning rate of an AdamW that trains all parameters but hidden weights. With None there is no such AdamW, but beside Muon
    # there is one with the learning rate ``lr``.
    rest_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    eps_scaling: str = "constant"
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: str = "independent"
    decayed: str = "all"
    clip: float | None = None


@dataclass(frozen=True)
class StackTensors:
    """The tensors that a step reads and writes, with a leading dimension of models. Dictionary keys are parameter names."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    masks: dict[str, Tensor]
    state: dict[str, list[Tensor]]  # state of the optimizer
    constants: dict[str, tuple[Tensor, ...]]  # learning rate, decay and epsilon, from the plan
    rates: dict[str, Tensor]  # further factors on the learning rates of hidden weights: ``measured``, or else ``corrections``
    corrections: dict[str, Tensor]
    measured: dict[str, Tensor]  # NaN for models without a measurement
    independent: Tensor  # whether weight decay is independent of the learning rate
    alive: Tensor  # whether the model is still trained; its loss has been finite so far
    number: Tensor  # number of the step
    clip: Tensor | None  # largest allowed gradient norm; None if no model clips


class Stack:
    """``step(batch, lr_share)`` trains all models by one step and returns their losses.

    models      parameterized models of one class and equal shapes. The stack trains copies of their tensors, which
                ``write_back`` copies back
    loss_fn     (model, batch) -> scalar, as for one model
    optimizer   one of ``SUPPORTED``, the same for all models
    compile     use torch.compile, and on a GPU a CUDA graph
    own_batches whether a batch has a leading dimension of models
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        plans: Sequence[Plan],
        loss_fn: LossFn,
        hyperparameters: Sequence[Hyperparameters],
        *,
        optimizer: str = "adamw",
        compile: bool = False,  # noqa: A002 (torch's word)
        dtype: torch.dtype | None = None,
        own_batches: bool = False,
    ) -> None:
        first = hyperparameters[0]
        self.kind, self.betas, self.momentum = optimizer.lower(), first.betas, first.momentum
        # parameter name -> facts about the optimizer that trains it
        self.facts = {row.name: facts_for_role(row.role, self.kind, first.rest_lr) for row in plans[0]}
        self.hidden = {row.name for row in plans[0] if row.role == "hidden"}
        # A compiled or captured step is bound to these tensors, so ``refill`` copies other models into them.
        self.tensors = self._gathered(models, plans, hyperparameters)
        t = self.tensors
        self.weights = {name: StackedWeight(name, param, t.masks.get(name), t.state[name]) for name, param in t.params.items()}
        self.models, self.num_steps = list(models), 0
        self.device = t.alive.device
        self.upload = Uploader(self.device)
        self._loss = BatchedLoss(models[0], loss_fn, len(models), dtype, own_batches=own_batches)
        step = compile_static(self._step) if compile else self._step
        self._call: Callable[..., Tensor] = GraphedCall(step) if compile and self.device.type == "cuda" else step

    def __len__(self) -> int:
        return len(self.models)

    def refill(self, models: Sequence[nn.Module], plans: Sequence[Plan], hyperparameters: Sequence[Hyperparameters]) -> None:
        """Starts again with other models of the same number and shapes. Nothing is compiled again."""
        fresh = self._gathered(models, plans, hyperparameters)
        _pytree.tree_map(lambda held, new: held if held is new else held.copy_(new), vars(self.tensors), vars(fresh))
        self.models, self.num_steps = list(models), 0

    def step(self, batch: Sequence[Tensor], lr_share: float | Sequence[float] = 1.0) -> Tensor:
        """Trains by one step and returns the losses of all models before the update. Once the loss of a model is not finite,
        the model is not trained any more."""
        self.num_steps += 1
        share = self.upload(torch.as_tensor(lr_share, dtype=torch.float32).expand(len(self)))
        return self._call(share, *batch).clone()

    @torch.no_grad()
    def evaluate(self, batch: Sequence[Tensor]) -> Tensor:
        """The losses of all models, without training them."""
        # Evaluation is rare, so it is not compiled.
        return self._loss.values(self.tensors.params, self.tensors.buffers, tuple(batch), _CHUNK)

    @torch.no_grad()
    def keep_gradients(self, batch: Sequence[Tensor]) -> None:
        """Computes the unmasked gradients of hidden weights and stores them for the sparsifier."""
        grads, _ = self._loss.gradients(self.tensors.params, self.tensors.buffers, tuple(batch), _CHUNK)
        for name in self.hidden:
            self.weights[name].gradient = grads[name]

    def drop_gradients(self) -> None:
        for weight in self.weights.values():
            weight.gradient = None

    @torch.no_grad()
    def inputs(self, batch: Sequence[Tensor], take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """``take`` applied to the inputs of each hidden weight's layer, by name of the weight."""
        return self._loss.inputs(self.tensors.params, self.tensors.buffers, tuple(batch), self.hidden, take)

    @torch.no_grad()
    def outputs(self, batch: Sequence[Tensor], params: dict[str, Tensor]) -> Tensor:
        """What the models return in full precision, with these parameters in place of their own."""
        return self._loss.outputs(params, self.tensors.buffers, tuple(batch), _CHUNK)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies trained weights, and masks that have moved, back into the models."""
        for index, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                parameter.copy_(self.tensors.params[name][index])
                mask = weight_of(model, name).mask
                if mask is not None:
                    mask.copy_(self.tensors.masks[name][index])

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that training changes, under flat names. All other tensors follow from the models, plans and
        hyperparameters."""
        t = self.tensors
        state = {"alive": t.alive, "number": t.number}
        for kind in ("params", "masks", "rates", "corrections", "measured"):
            state |= {f"{kind}.{name}": tensor for name, tensor in getattr(t, kind).items()}
        of_optimizer = {f"state.{name}.{k}": tensor for name, parts in t.state.items() for k, tensor in enumerate(parts)}
        return state | of_optimizer

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], *, num_steps: int) -> None:
        """Continues after ``num_steps`` steps of a stack of the same models. Values are copied into the tensors that a compiled
        or captured step is bound to, so nothing is compiled again."""
        held = self.state_dict()
        for name in {**held, **state}:
            expected, given = (tuple(tensors[name].shape) if name in tensors else "missing" for tensors in (held, state))
            refuse(
                expected != given,
                f"{name!r} is {given} in the state, but {expected} in the stack: load the state of the same models",
            )
        for name, tensor in held.items():
            tensor.copy_(state[name])
        self.num_steps = num_steps

    # One step, as a function of tensors

    @torch.no_grad()
    def _step(self, share: Tensor, *batch: Tensor) -> Tensor:
        t = self.tensors
        number = t.number.add_(1)
        grads, losses = self._loss.gradients(t.params, t.buffers, batch)
        for name, mask in t.masks.items():
            grads[name] = torch.where(mask, grads[name], 0.0)
        if t.clip is not None:
            norms = torch.stack([torch.linalg.vector_norm(grad.flatten(1), dim=1) for grad in grads.values()])
            norm = torch.linalg.vector_norm(norms, dim=0)
            factor = (t.clip / (norm + 1e-6)).clamp(max=1.0)
            grads = {name: grad * _wide(factor, grad) for name, grad in grads.items()}
        t.alive.logical_and_(losses.isfinite())
        for name, param in t.params.items():
            lr, decay, eps = t.constants[name]
            lr = lr * (share * t.rates[name] if name in t.rates else share)
            decay = decay * self.decay_change(name) if name in t.rates else decay
            if self._in_one_pass(name):
                adam_in_place(param, grads[name], t.state[name], lr, decay, eps, number, t.alive, self.betas, self.facts[name])
                continue
            wide = (_wide(values, param) for values in (lr, decay, eps, number))
            new = self._updated(name, param, grads[name], *wide)
            if name in t.masks and self.facts[name].mixes_entries:
                new = new.masked_fill(~t.masks[name], 0)
            param.copy_(torch.where(_wide(t.alive, param), new, param))
        return losses

    def _in_one_pass(self, name: str) -> bool:
        """Whether torch's fused kernel updates this weight, which it does for Adam on a CPU, in code that is not compiled."""
        return self.device.type == "cpu" and self.facts[name].name in ("Adam", "AdamW") and not torch.compiler.is_compiling()

    # Changes of learning rates. For one model, ``LayerRates`` does this.

    def correct(self, name: str, model: int, factor: float) -> None:
        self.tensors.corrections[name][model] = factor
        self._set_rate(name)

    def measure(self, name: str, factors: Tensor) -> None:
        """Replaces the corrections of a weight by measured factors, except where these are NaN."""
        measured = self.tensors.measured[name]
        measured.copy_(torch.where(factors.isnan(), measured, factors))
        self._set_rate(name)

    def forget_measured(self) -> None:
        for name, measured in self.tensors.measured.items():
            measured.fill_(math.nan)
            self._set_rate(name)

    def _set_rate(self, name: str) -> None:
        t = self.tensors
        t.rates[name].copy_(measured_or_corrected(t.measured[name], t.corrections[name]))

    def decay_change(self, name: str) -> Tensor:
        """The factor on the decay term. If decay is independent of the learning rate, this factor undoes the additional factors
        on the learning rate."""
        rates = self.tensors.rates[name]
        return torch.where(self.tensors.independent, 1 / rates, torch.ones_like(rates))

    def _updated(
        self, name: str, param: Tensor, grad: Tensor, lr: Tensor, decay: Tensor, eps: Tensor, number: Tensor
    ) -> Tensor:
        facts = self.facts[name]
        if facts.decoupled:
            param = param * (1 - lr * decay)
        else:
            grad = grad + decay * param
        return param - CHANGES[facts.name](self.tensors.state[name], grad, lr, eps, number, self.betas, self.momentum)

    # Gathering

    @torch.no_grad()
    def _gathered(
        self, models: Sequence[nn.Module], plans: Sequence[Plan], hyperparameters: Sequence[Hyperparameters]
    ) -> StackTensors:
        _refuse(models, plans, hyperparameters, self.kind)
        add_missing_factors(models, plans)
        masked = sorted(self.hidden | {row.name for plan in plans for row in plan if row.masked})
        mask_buffers = {f"{name}{MASK}" for name in masked}
        params = _stacked([dict(model.named_parameters()) for model in models])
        device = next(iter(params.values())).device
        clips = [math.inf if h.clip is None else h.clip for h in hyperparameters]
        return StackTensors(
            params=params,
            buffers=_stacked([{name: b for name, b in m.named_buffers() if name not in mask_buffers} for m in models]),
            masks={name: torch.stack([weight_of(model, name).full_mask() for model in models]) for name in masked},
            state={
                name: [torch.zeros_like(param) for _ in range(self.facts[name].num_states_with(self.momentum))]
                for name, param in params.items()
            },
            constants=_constants(models, plans, hyperparameters, self.kind),
            rates={name: torch.ones(len(models), device=device) for name in self.hidden},
            corrections={name: torch.ones(len(models), device=device) for name in self.hidden},
            measured={name: torch.full((len(models),), math.nan, device=device) for name in self.hidden},
            independent=torch.tensor([h.decay != "coupled" for h in hyperparameters], device=device),
            alive=torch.ones(len(models), dtype=torch.bool, device=device),
            number=torch.zeros(len(models), device=device),
            clip=torch.tensor(clips, device=device) if min(clips) < math.inf else None,
        )


def train_stacked(
    models: Sequence[nn.Module],
    plans: Sequence[Plan],
    loss_fn: LossFn,
    batches: Iterable[Sequence[Tensor]],
    *,
    lr: float | Sequence[float],
    optimizer: str = "adamw",
    schedule: Callable[[int], float] | None = None,
    compile: bool = False,  # noqa: A002 (torch's word)
    **shared: Any,
) -> Tensor:
    """Trains models of equal shapes at once, in place. Returns their losses, one row for each batch.

    lr          base learning rate of each model, or one for all, as for ``param_groups``
    schedule    step number -> factor on the learning rate
    compile     use torch.compile, and on a GPU a CUDA graph
    shared      other fields of ``Hyperparameters``, the same for all models: betas, eps, weight_decay, momentum, clip, ...
    """
    rates = [lr] * len(models) if isinstance(lr, (int, float)) else list(lr)
    stack = Stack(
        models, plans, loss_fn, [Hyperparameters(rate, **shared) for rate in rates], optimizer=optimizer, compile=compile
    )
    losses = [stack.step(batch, schedule(number) if schedule else 1.0) for number, batch in enumerate(batches)]
    stack.write_back()
    return torch.stack(losses)


# Checking the models and stacking their numbers


def _refuse(
    models: Sequence[nn.Module], plans: Sequence[Plan], hyperparameters: Sequence[Hyperparameters], optimizer: str
) -> None:
    family_of(optimizer)
    refuse(
        optimizer not in SUPPORTED,
        f"{optimizer} cannot be stacked: use one of {', '.join(SUPPORTED)}, or train the models one by one",
    )
    refuse(
        not models or not len(models) == len(plans) == len(hyperparameters),
        f"{len(models)} models, {len(plans)} plans, {len(hyperparameters)} hyperparameters: pass one of each for every model",
    )
    for reason in filter(None, map(_why_not_stackable, models)):
        raise ValueError(f"{reason}: train these models one by one")
    shapes = [{name: tuple(p.shape) for name, p in model.named_parameters()} for model in models]
    for index, other in enumerate(shapes):
        if other != shapes[0]:
            name = next(name for name in {**shapes[0], **other} if shapes[0].get(name) != other.get(name))
            raise ValueError(
                f"{name!r} has shape {other.get(name)} in model {index}, but {shapes[0].get(name)} in the first: only models "
                "of equal shapes can be stacked"
            )
    refuse(
        len({(h.betas, h.momentum, h.rest_lr is None) for h in hyperparameters}) > 1,
        "betas, momentum and whether there is a rest_lr must be the same for all models: make a stack for each",
    )


def _why_not_stackable(model: nn.Module) -> str | None:
    """The property of a model that prevents stacking; None if there is none. A stacked step is a function of weights and batch
    only."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            return f"{name!r} is frozen, but a stack trains every weight"
    for path, module in model.named_modules():
        if has_running_statistics(module) and module.training and module.track_running_stats:
            return f"{path!r} keeps running statistics, which a stack would lose"
        if draws_random_numbers(module):
            return f"{path!r} draws random numbers in the forward pass, which a stack cannot do"
    return None


def _stacked(tensors: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.stack([model[name].detach() for model in tensors]) for name in tensors[0]}


def _constants(
    models: Sequence[nn.Module], plans: Sequence[Plan], hyperparameters: Sequence[Hyperparameters], optimizer: str
) -> dict[str, tuple[Tensor, ...]]:
    """Learning rate, decay and epsilon of every model, from ``param_groups``, by parameter name."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for model, plan, h in zip(models, plans, hyperparameters, strict=True):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        named = groups_by_optimizer(
            model,
            plan,
            optimizer,
            lr=h.lr,
            rest_lr=h.rest_lr,
            eps=h.eps_scaling,
            eps_value=h.eps,
            weight_decay=h.weight_decay,
            decay=h.decay,
            decayed=h.decayed,
        )
        for group in (group for _, groups in named for group in groups):
            for parameter in group["params"]:
                values = (group["lr"], group["weight_decay"], group.get("eps", h.eps))
                rows.setdefault(names[id(parameter)], []).append(values)
    device = next(models[0].parameters()).device
    return {n: torch.tensor(values, dtype=torch.float64).float().to(device).unbind(1) for n, values in rows.items()}


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """Reshapes one number for each model, so that it multiplies a stacked tensor."""
    return values.view(-1, *[1] * (like.ndim - 1))
