"""Masks and initial scales that are made before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smupar.dynamic.policies import POOLS, largest_masks, num_kept
from smupar.model.attached import unwrapped
from smupar.model.sharding import whole
from smupar.model.weights import ModelWeight, hidden_weights
from smupar.plan.masks.allocations import Allocation, allocate
from smupar.plan.plan import Plan
from smupar.refusals import choice, refuse


def magnitude_masks(model: nn.Module, plan: Plan, *, density: float | Mapping[str, float] | Allocation) -> dict[str, Tensor]:
    """Masks that keep the largest hidden weights of each layer, for ``parameterize(fresh_model, masks=...)``."""
    return _best_masks(model, plan, density, lambda weight: weight.full().abs(), pool="layer")


def snip_masks(
    model: nn.Module,
    plan: Plan,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    density: float,
    pool: str = "global",
) -> dict[str, Tensor]:
    """SNIP masks (Lee et al.), for ``parameterize(fresh_model, masks=...)``. They keep the hidden weights with the largest
    |weight x gradient|, where the gradient is summed over batches. Removing these weights would change the loss most. ``model``
    must be dense, and is not changed."""
    model = unwrapped(model)
    hidden = hidden_weights(model, plan)
    sparse = [name for name, weight in hidden.items() if not weight.stores_zeros]
    if sparse:
        raise ValueError(f"{sparse[0]!r} keeps only its non-zeros: SNIP needs a dense model")
    parameters = {name: weight.parameter for name, weight in hidden.items()}
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ValueError(f"{frozen[0]!r} is frozen, but SNIP needs its gradient: freeze it after the masks are made")
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    num_batches, buffers = 0, {name: buffer.clone() for name, buffer in model.named_buffers()}
    for batch in batches:
        num_batches += 1
        grads = torch.autograd.grad(loss_fn(model, batch), list(parameters.values()), materialize_grads=True)
        for name, grad in zip(parameters, grads, strict=True):
            sums[name] += grad
    for name, buffer in model.named_buffers():  # running statistics
        buffer.copy_(buffers[name])
    refuse(num_batches == 0, "SNIP needs at least one batch")
    return _best_masks(model, plan, density, lambda w: whole(w.parameter.detach() * sums[w.name]).abs(), pool=pool)


@torch.no_grad()
def _best_masks(
    model: nn.Module,
    plan: Plan,
    density: float | Mapping[str, float] | Allocation,
    score: Callable[[ModelWeight], Tensor],
    *,
    pool: str,
) -> dict[str, Tensor]:
    choice("pool", pool, POOLS)
    hidden = hidden_weights(unwrapped(model), plan)
    shares = allocate(density, {name: plan[name].shape for name in hidden})
    num_to_keep = {name: num_kept(name, plan[name].shape, shares[name]) for name in hidden}
    scores = ((name, score(weight).flatten()[None]) for name, weight in hidden.items())
    layers = ((name, size, torch.ones_like(size, dtype=torch.bool), [num_to_keep[name]]) for name, size in scores)
    masks = largest_masks(layers, pool, "raise the density, or use pool='layer'")
    return {name: mask.view(plan[name].shape) for name, mask in masks}


@torch.no_grad()
def fan_in_init(model: nn.Module, plan: Plan) -> None:
    """Rescales the weights of each neuron in place, so that their std fits the number of inputs that the neuron keeps (Evci et
    al.). The plan's std fits the mean number of kept inputs in the layer. Use this for masks that leave neurons with very
    different numbers of inputs. If all neurons keep the same number, nothing changes."""
    for name, weight in hidden_weights(unwrapped(model), plan).items():
        if weight.is_masked:
            fan_in = weight.full_mask().float().sum(plan[name].in_dims, keepdim=True)
            scale = (fan_in.mean() / fan_in.clamp(min=1)).sqrt().expand(weight.shape).contiguous()
            weight.parameter.mul_(weight.laid_out(scale))
