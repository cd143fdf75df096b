"""The parts of a step of many models, as functions of tensors with a leading dimension of models. ``torch.func`` computes the
losses and gradients. torch's own optimizers take no vector of learning rates, so the updates are written out here. They give
the same numbers as torch.optim."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from smupar.execute.cpu_products import fast_products
from smupar.plan.facts.optimizers import MUON_COEFFICIENTS, MUON_EPS, MUON_STEPS, OptimizerFacts
from smupar.plan.roles.parameters import parent_path

LossFn = Callable[[nn.Module, Any], Tensor]
Tensors = dict[str, Tensor]
State = list[Tensor]
Betas = tuple[float, float]


class _Loss(nn.Module):
    """A module whose output is the loss, so that a functional call with other parameters computes their loss."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self.loss_fn(self.model, batch)


class BatchedLoss:
    """Computes the losses of ``num_models`` models like ``model``. A single model is not batched, which is faster."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, num_models: int, dtype: torch.dtype | None, *, own_batches: bool
    ) -> None:
        self.template = _Loss(copy.deepcopy(model).to("meta"), loss_fn)
        # The copy on the meta device loses ties, so all names of tied parameters are stored here.
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        named = model.named_parameters(remove_duplicate=False)
        self.aliases = {name: first[id(parameter)] for name, parameter in named if first[id(parameter)] != name}
        self.device_type, self.dtype = next(model.parameters()).device.type, dtype
        self.single, self.own_batches = num_models == 1, own_batches

    def values(self, params: Tensors, buffers: Tensors, batch: tuple[Tensor, ...], chunk_size: int | None = None) -> Tensor:
        return self._apply(self._loss_of_one_model, params, buffers, batch, chunk_size)

    def gradients(
        self, params: Tensors, buffers: Tensors, batch: tuple[Tensor, ...], chunk_size: int | None = None
    ) -> tuple[Tensors, Tensor]:
        """Gradients by name, and the losses. ``chunk_size`` is the number of models that are computed at once; by default
        all."""
        num_models = len(next(iter(params.values())))
        size = chunk_size or num_models
        by_model, shared = ((params, buffers, batch), ()) if self.own_batches else ((params, buffers), (batch,))
        parts = [
            self._gradients(*_pytree.tree_map(itemgetter(slice(at, at + size)), by_model), *shared)
            for at in range(0, num_models, size)
        ]
        return parts[0] if len(parts) == 1 else _pytree.tree_map(lambda *chunks: torch.cat(chunks), *parts)

    def _gradients(self, params: Tensors, buffers: Tensors, batch: tuple[Tensor, ...]) -> tuple[Tensors, Tensor]:
        return gradients_of_sum(lambda leaves: self.values(leaves, buffers, batch), params)

    def inputs(
        self,
        params: Tensors,
        buffers: Tensors,
        batch: tuple[Tensor, ...],
        names: Iterable[str],
        take: Callable[[Tensor], Tensor],
    ) -> Tensors:
        """``take`` applied to the inputs of each weight's layer, by name of the weight."""
        seen: Tensors = {}

        def hook(name: str) -> Callable[[nn.Module, Any], None]:
            return lambda module, args: seen.__setitem__(name, take(args[0]))

        def run(params: Tensors, buffers: Tensors, batch: tuple[Tensor, ...]) -> Tensors:
            self._loss_of_one_model(params, buffers, batch)
            return dict(seen)

        layers = {name: self.template.model.get_submodule(parent_path(name)) for name in names}
        hooks = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
        try:
            return self._apply(run, params, buffers, batch)
        finally:
            for handle in hooks:
                handle.remove()

    def outputs(self, params: Tensors, buffers: Tensors, batch: tuple[Tensor, ...], chunk_size: int | None = None) -> Tensor:
        """What the models return, in full precision."""
        seen: list[Tensor] = []

        def run(params: Tensors, buffers: Tensors, batch: tuple[Tensor, ...]) -> Tensor:
            seen.clear()
            self._loss_of_one_model(params, buffers, batch)
            return seen[-1]

        dtype, self.dtype = self.dtype, None
        hook = self.template.model.register_forward_hook(lambda module, args, output: seen.append(output))
        try:
            return self._apply(run, params, buffers, batch, chunk_size)
        finally:
            hook.remove()
            self.dtype = dtype

    def _loss_of_one_model(self, params: Tensors, buffers: Tensors, batch: tuple[Tensor, ...]) -> Tensor:
        tensors = {f"model.{name}": value for name, value in {**params, **buffers}.items()}
        tensors |= {f"model.{alias}": params[name] for alias, name in self.aliases.items()}
        with nullcontext() if self.dtype is None else torch.autocast(self.device_type, self.dtype):
            return torch.func.functional_call(self.template, tensors, (batch,))

    def _apply(
        self,
        fn: Callable[..., Any],
        params: Any,
        buffers: Tensors,
        batch: tuple[Tensor, ...],
        chunk_size: int | None = None,
    ) -> Any:
        if not self.single:
            in_dims = (0, 0, 0 if self.own_batches else None)
            with fast_products():
                return torch.func.vmap(fn, in_dims=in_dims, chunk_size=chunk_size)(params, buffers, batch)

        def first(tree: Any) -> Any:
            return _pytree.tree_map(lambda t: t[0], tree)

        with fast_products():
            result = fn(first(params), first(buffers), first(batch) if self.own_batches else batch)
        return _pytree.tree_map(lambda t: t[None], result)


def gradients_of_sum(losses: Callable[[Tensors], Tensor], leaves: Tensors) -> tuple[Tensors, Tensor]:
    """Gradients of the sum of the losses, by name, and the losses. No model's loss depends on another's weights, so these are
    the gradients of each model's own loss. Operations then have to be batched in the forward pass only."""
    if torch.compiler.is_compiling():

        def total(leaves: Tensors) -> tuple[Tensor, Tensor]:
            values = losses(leaves)
            return values.sum(), values

        grads, (_, values) = torch.func.grad_and_value(total, has_aux=True)(leaves)
        return grads, values
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    with torch.enable_grad():
        values = losses(leaves)
        found = torch.autograd.grad(values.sum(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True)), values.detach()


# These functions return what an optimizer subtracts from a weight, and change the optimizer's state in place.


def _adam(state: State, grad: Tensor, lr: Tensor, eps: Tensor, number: Tensor, betas: Betas, momentum: float) -> Tensor:
    (mean, square), (beta1, beta2) = state, betas
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    correction1, correction2 = 1 - beta1**number, 1 - beta2**number
    return lr / correction1 * mean / (square.sqrt() / correction2.sqrt() + eps)


def adam_in_place(
    param: Tensor,
    grad: Tensor,
    state: State,
    lr: Tensor,
    decay: Tensor,
    eps: Tensor,
    number: Tensor,
    alive: Tensor,
    betas: Betas,
    facts: OptimizerFacts,
) -> None:
    """Updates the weights of every model that is alive, decay included, by the kernel of torch's fused optimizers. This reads
    each tensor once, where ``_adam`` reads them a dozen times."""
    kernel: Callable[..., None] = torch._fused_adamw_ if facts.decoupled else torch._fused_adam_
    numbers = zip(lr.tolist(), decay.tolist(), eps.tolist(), alive.tolist(), strict=True)
    for model, (lr_of_model, decay_of_model, eps_of_model, is_alive) in enumerate(numbers):
        if is_alive:
            mean, square = (average[model] for average in state)
            kernel(
                [param[model]],
                [grad[model].contiguous()],
                [mean],
                [square],
                [],
                [number[model]],
                lr=lr_of_model,
                beta1=betas[0],
                beta2=betas[1],
                weight_decay=decay_of_model,
                eps=eps_of_model,
                amsgrad=False,
                maximize=False,
            )


def _sgd(state: State, grad: Tensor, lr: Tensor, eps: Tensor, number: Tensor, betas: Betas, momentum: float) -> Tensor:
    for mean in state:  # the state is empty without momentum
        grad = mean.mul_(momentum).add_(grad)
    return lr * grad


def _lion(state: State, grad: Tensor, lr: Tensor, eps: Tensor, number: Tensor, betas: Betas, momentum: float) -> Tensor:
    (mean,), (beta1, beta2) = state, betas
    update = (beta1 * mean + (1 - beta1) * grad).sign()
    mean.mul_(beta2).add_(grad, alpha=1 - beta2)
    return lr * update


def _muon(state: State, grad: Tensor, lr: Tensor, eps: Tensor, number: Tensor, betas: Betas, momentum: float) -> Tensor:
    (mean,) = state
    mean.lerp_(grad, 1 - momentum)
    return math.sqrt(max(1.0, grad.shape[-2] / grad.shape[-1])) * lr * _orthogonalised(grad.lerp(mean, momentum))


# Name of the optimizer -> function (state, gradient, LR, epsilon, step, betas, momentum) -> what to subtract from the weight
CHANGES: dict[str, Callable[[State, Tensor, Tensor, Tensor, Tensor, Betas, float], Tensor]] = {
    "AdamW": _adam,
    "Adam": _adam,
    "SGD": _sgd,
    "Lion": _lion,
    "Muon": _muon,
}


def _orthogonalised(update: Tensor) -> Tensor:
    """The quintic Newton-Schulz iteration of torch.optim.Muon, on a stack of matrices."""
    a, b, c = MUON_COEFFICIENTS
    x = update.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=MUON_EPS).view(-1, 1, 1)
    for _ in range(MUON_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(update.dtype)
