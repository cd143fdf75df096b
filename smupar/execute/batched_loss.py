"""The loss of many models, and its gradient, as functions of tensors with a leading dimension of models, by ``torch.func``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from smupar.plan.parameters import parent_path

LossFn = Callable[[nn.Module, Any], Tensor]
Tensors = dict[str, Tensor]


class _Loss(nn.Module):
    """A module whose parameters can be swapped for one call, and whose output is the loss."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self.loss_fn(self.model, batch)


class BatchedLoss:
    """The losses of ``num_models`` models like ``model``. A single one is not batched at all, which is faster."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, num_models: int, dtype: torch.dtype | None, *, own_batches: bool
    ) -> None:
        self.template = _Loss(copy.deepcopy(model).to("meta"), loss_fn)
        # Further names of tied parameters: the copy on the meta device has lost the tie.
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        self.aliases = {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}
        self.device_type, self.dtype = next(model.parameters()).device.type, dtype
        self.single, self.own_batches = num_models == 1, own_batches

    def values(self, params: Tensors, buffers: Tensors, batch: tuple[Tensor, ...], chunk_size: int | None = None) -> Tensor:
        return self._apply(self._of_one, params, buffers, batch, chunk_size)

    def gradients(
        self, params: Tensors, buffers: Tensors, batch: tuple[Tensor, ...], chunk_size: int | None = None
    ) -> tuple[Tensors, Tensor]:
        """Gradients by name, and the losses."""
        return self._apply(torch.func.grad_and_value(self._of_one), params, buffers, batch, chunk_size)

    def inputs(
        self,
        params: Tensors,
        buffers: Tensors,
        batch: tuple[Tensor, ...],
        names: Iterable[str],
        take: Callable[[Tensor], Tensor],
    ) -> Tensors:
        """What ``take`` makes of the inputs of each weight's layer."""
        seen: Tensors = {}

        def hook(name: str) -> Callable[[nn.Module, Any], None]:
            return lambda module, args: seen.__setitem__(name, take(args[0]))

        def run(params: Tensors, buffers: Tensors, batch: tuple[Tensor, ...]) -> Tensors:
            self._of_one(params, buffers, batch)
            return dict(seen)

        layers = {name: self.template.model.get_submodule(parent_path(name)) for name in names}
        hooks = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
        try:
            return self._apply(run, params, buffers, batch)
        finally:
            for handle in hooks:
                handle.remove()

    def _of_one(self, params: Tensors, buffers: Tensors, batch: tuple[Tensor, ...]) -> Tensor:
        tensors = {f"model.{name}": value for name, value in {**params, **buffers}.items()}
        tensors |= {f"model.{alias}": params[name] for alias, name in self.aliases.items()}
        with nullcontext() if self.dtype is None else torch.autocast(self.device_type, self.dtype):
            return torch.func.functional_call(self.template, tensors, (batch,))

    def _apply(
        self,
        fn: Callable[..., Any],
        params: Tensors,
        buffers: Tensors,
        batch: tuple[Tensor, ...],
        chunk_size: int | None = None,
    ) -> Any:
        if not self.single:
            in_dims = (0, 0, 0 if self.own_batches else None)
            return torch.func.vmap(fn, in_dims=in_dims, chunk_size=chunk_size)(params, buffers, batch)
        first: Callable[[Any], Any] = lambda tree: _pytree.tree_map(lambda t: t[0], tree)  # noqa: E731
        result = fn(first(params), first(buffers), first(batch) if self.own_batches else batch)
        return _pytree.tree_map(lambda t: t[None], result)
