"""Keeps calls of a module, to repeat them with other weights.

The rows of a plain or registered layer, or of a module with torch's own forward pass, are independent, so ``kept_call`` keeps
only some of them. For any other module, such as a subclass with its own forward pass, it keeps all arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smupar.model.factors import BRANCH, FACTOR
from smupar.plan.facts.layers import IMAGES, kind_of
from smupar.updates.probe import spread

MAX_ROWS = 256
MAX_IMAGES = 8  # images kept for a convolution, since each image has many rows (positions)


class SampledCall:
    """Some rows of a layer's input, and the gradient of the same rows of its output."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.module, self.kind = module, kind_of(module)
        self.x = self._rows(x.detach())
        self.num_items = _num_items(x)
        self.output_grad: Tensor | None = None

    def keep_gradient(self, grad: Tensor) -> None:
        self.output_grad = self._rows(grad, output=True)

    def _rows(self, values: Tensor, *, output: bool = False) -> Tensor:
        """Up to MAX_ROWS rows, or MAX_IMAGES images, of a layer's input or output. The same rows are taken from both."""
        if self.kind.reads == IMAGES:
            batched = values.ndim == self.module.weight.ndim  # a single image has no batch dimension
            return values[:MAX_IMAGES].clone() if batched else values.clone()
        rows = values.flatten() if self.kind.is_lookup and not output else values.reshape(-1, values.shape[-1])
        return rows[spread(len(rows), MAX_ROWS, rows.device)]

    def input_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of the layer's input through this layer alone."""
        if self.kind.is_lookup or self.output_grad is None:
            return None
        with torch.enable_grad():
            x = self.x.to(parameter.dtype).requires_grad_()  # autocast may have run the layer in another dtype
            (grad,) = torch.autograd.grad(self.kind.output(self.module, x), x, self.output_grad.to(parameter.dtype))
        return grad * _factor(self.module) * _branch(self.module)

    @torch.no_grad()
    def effect(self, parameter: nn.Parameter, before: Tensor) -> Tensor:
        """The change of the layer's output by the update of its weight."""
        x = self.x if self.kind.is_lookup else self.x.to(parameter.dtype)
        if self.output_grad is not None and self.kind.reads != IMAGES:
            # Only rows on which the loss depends contribute to an update. On other rows, such as padding, the update acts like
            # a random matrix, whose effect falls with the width under every rule.
            used = self.output_grad.ne(0).any(-1)
            x = x[used] if used.any() else x
            effect = self.kind.effect(self.module, parameter, parameter.detach() - before, x)
            effect = self._without_shifts(effect, used if used.any() else torch.ones_like(used))
        else:
            effect = self.kind.effect(self.module, parameter, parameter.detach() - before, x)
        return effect * _factor(self.module) if self.kind.is_lookup else effect

    def _without_shifts(self, effect: Tensor, used: Tensor) -> Tensor:
        """The effect, minus its mean over the rows of each item if the loss does not depend on this mean.

        For example, adding one vector to all keys of a sequence changes no attention, so the gradients of these rows sum to
        zero. The update then has no signal in their mean, only a random rest, which falls with the width. ``used`` marks the
        rows of the call that ``effect`` has.
        """
        assert self.output_grad is not None
        grad = self.output_grad.double()
        if len(effect) < 2 or len(effect) != int(used.sum()):
            return effect
        for num_items in dict.fromkeys((self.num_items, 1)):
            if len(grad) % num_items or len(grad) == num_items:
                continue
            item_of_row = torch.arange(num_items, device=grad.device).repeat_interleave(len(grad) // num_items)
            sums = grad.new_zeros(num_items, grad.shape[-1]).index_add(0, item_of_row, grad)
            if sums.norm() < 1e-4 * grad.norm():
                item_of_used = item_of_row[used]
                counts = torch.bincount(item_of_used, minlength=num_items).clamp(min=1).to(effect)
                means = effect.new_zeros(num_items, effect.shape[-1]).index_add(0, item_of_used, effect) / counts[:, None]
                return effect - means[item_of_used]
        return effect


def _num_items(x: Tensor) -> int:
    """The number of items, such as sequences, in a batch. The rows of an item are adjacent. The number is 1 if only some rows
    are kept, or if each row is an item."""
    rows = math.prod(x.shape[:-1])
    return x.shape[0] if x.ndim > 2 and rows <= MAX_ROWS else 1


class WholeCall:
    """All arguments of a call, and the gradient of its output. Tensors are copied, since later code may write into them."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.args, self.kwargs = module, _copied(args), _copied(kwargs)
        self.output_grad: Tensor | None = None

    def keep_gradient(self, grad: Tensor) -> None:
        self.output_grad = grad.detach()

    def input_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of the first tensor argument; None if nothing flows back to it, as for a mask."""
        x = first_tensor((*self.args, *self.kwargs.values()))
        if x is None or not x.is_floating_point() or self.output_grad is None:
            return None
        with torch.enable_grad():
            x.requires_grad_()
            output = self._output()
            (grad,) = torch.autograd.grad(output, x, self.output_grad.to(output.dtype), allow_unused=True)
        x.requires_grad_(False)
        return None if grad is None else grad * _factor(self.module) * _branch(self.module)

    @torch.no_grad()
    def effect(self, parameter: nn.Parameter, before: Tensor) -> Tensor | None:
        """The change of the module's output by the update of one parameter. None if the call cannot be repeated: it fails, or
        the same weights give another output, as when the module writes into a cache."""
        try:
            after, again = self._output(), self._output()
            updated, parameter.data = parameter.data, before
            try:
                output = self._output()
            finally:
                parameter.data = updated
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None
        if after.shape != again.shape or not torch.equal(after, again):
            return None
        effect = (after - output) * (_factor(self.module) if kind_of(self.module).is_lookup else 1.0)
        if self.output_grad is not None and effect.shape == self.output_grad.shape and effect.ndim > 1:
            used = self.output_grad.ne(0).any(-1)
            effect = effect[used] if used.any() else effect
        return effect

    def _output(self) -> Tensor:
        with undisturbed(self.module):
            output = first_tensor(self.module.forward(*self.args, **self.kwargs))
        if output is None:
            raise ValueError("the call returned no tensor")
        return output


def kept_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SampledCall | WholeCall | None:
    """Keeps the call of a layer; None if no tensor was passed."""
    x = first_tensor((*args, *kwargs.values()))
    if x is None:
        return None
    kind = kind_of(module)
    is_known = kind.is_registered or kind.is_plain or type(module).forward.__module__.startswith("torch.")
    return SampledCall(module, x) if is_known else WholeCall(module, args, kwargs)


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor among a module's arguments or outputs, without scalars such as the loss."""
    if isinstance(value, Tensor):
        return value if value.ndim else None
    if hasattr(value, "logits"):
        return first_tensor(value.logits)
    if isinstance(value, Mapping):
        return first_tensor(tuple(value.values()))
    if isinstance(value, (tuple, list)):
        return next((tensor for item in value if (tensor := first_tensor(item)) is not None), None)
    return None


def _factor(module: nn.Module) -> float:
    return float(getattr(module, FACTOR, 1.0))


def _branch(module: nn.Module) -> float:
    return float(getattr(module, BRANCH, 1.0))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """A context in which a module draws the same random numbers each time. Afterwards buffers, such as running statistics, are
    restored."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    for buffer, before in buffers:
        buffer.data.copy_(before)
