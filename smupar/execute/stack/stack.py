"""Trains many models of equal shapes as one batched model. Each model has its own rule, density, learning rate, seed and
schedule.

Parameters, masks and factors get a leading dimension of models, and one batched step replaces many small steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from smupar.execute.cuda_graphs import GraphedCall, Uploader, compile_static
from smupar.execute.stack.gather import Hyperparameters, gathered
from smupar.execute.stack.loss import BatchedLoss, LossFn
from smupar.execute.stack.optimizers import CHANGES, adam_in_place
from smupar.execute.stack.weight import StackedWeight
from smupar.model.weights import weight_of
from smupar.optim.layer_rates import measured_or_corrected
from smupar.plan.facts.optimizers import facts_for_role
from smupar.plan.plan import Plan
from smupar.refusals import refuse

# Outside of training steps only this many models run at a time, since a captured training step holds most of the memory.
_CHUNK = 4


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
        self.tensors = gathered(models, plans, hyperparameters, self.kind, self.facts)
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

    @property
    def is_captured(self) -> bool:
        """Whether a step only replays a CUDA graph: everything that happens once is over."""
        return isinstance(self._call, GraphedCall) and self._call.output is not None

    def refill(self, models: Sequence[nn.Module], plans: Sequence[Plan], hyperparameters: Sequence[Hyperparameters]) -> None:
        """Starts again with other models of the same number and shapes. Nothing is compiled again."""
        fresh = gathered(models, plans, hyperparameters, self.kind, self.facts)
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
        """Calls ``take`` with the inputs of each hidden weight's layer. Returns the results by name of the weight."""
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


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """Reshapes one number for each model, so that it multiplies a stacked tensor."""
    return values.view(-1, *[1] * (like.ndim - 1))
