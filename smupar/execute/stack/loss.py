"""The losses and gradients of many models, by ``torch.func``, from tensors with a leading dimension of models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from smupar.execute.cpu_products import fast_products
from smupar.plan.roles.parameters import parent_path

LossFn = Callable[[nn.Module, Any], Tensor]
Tensors = dict[str, Tensor]


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
        """Calls ``take`` with the inputs of each weight's layer. Returns the results by name of the weight."""
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
