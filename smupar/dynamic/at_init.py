"""Masks and scales from before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smupar.apply import mask_of, unwrapped, whole_weight
from smupar.dynamic.moves import (
    largest,
    num_kept,
)
from smupar.masks import Allocation, allocate
from smupar.optim import choice
from smupar.plan import Plan
from smupar.storage import compressed
from smupar.values import like, whole


def magnitude_masks(model: nn.Module, plan: Plan, *, density: float | Mapping[str, float] | Allocation) -> dict[str, Tensor]:
    """The largest hidden weights of a model, layer by layer, as masks for ``parameterize(fresh_model, masks=...)``."""
    own = unwrapped(model)
    return _best_masks(own, plan, density, lambda name, parameter: whole_weight(own, name, parameter).abs(), pool="layer")


def snip_masks(
    model: nn.Module,
    plan: Plan,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    density: float,
    pool: str = "global",
) -> dict[str, Tensor]:
    """SNIP (Lee et al.): the hidden weights without which the loss would change most, |weight x gradient| with the gradient
    summed over batches, as masks for ``parameterize(fresh_model, masks=...)``. ``model`` is dense and left as it is."""
    model = unwrapped(model)
    hidden = [row.name for row in plan if row.role == "hidden"]
    sparse = [name for name in hidden if compressed(model, name) is not None]
    if sparse:
        raise ValueError(f"{sparse[0]!r} keeps only its non-zeros: SNIP looks at a dense model")
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in hidden}
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ValueError(f"{frozen[0]!r} is frozen, and SNIP needs its gradient: freeze it after masks are found")
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    num, kept = 0, {name: buffer.clone() for name, buffer in model.named_buffers()}
    for batch in batches:
        num += 1
        grads = torch.autograd.grad(loss_fn(model, batch), list(parameters.values()), materialize_grads=True)
        for name, grad in zip(parameters, grads, strict=True):
            sums[name] += grad
    for name, buffer in model.named_buffers():  # running statistics
        buffer.copy_(kept[name])
    if num == 0:
        raise ValueError("SNIP needs at least one batch")
    return _best_masks(model, plan, density, lambda name, parameter: whole(parameter.detach() * sums[name]).abs(), pool=pool)


@torch.no_grad()
def _best_masks(
    model: nn.Module,
    plan: Plan,
    density: float | Mapping[str, float] | Allocation,
    score: Callable[[str, nn.Parameter], Tensor],
    *,
    pool: str,
) -> dict[str, Tensor]:
    choice("pool", pool, ("layer", "global"))
    hidden = {row.name: row for row in plan if row.role == "hidden"}
    shares = allocate(density, {name: row.shape for name, row in hidden.items()})
    nums = {name: num_kept(name, row.shape, shares[name]) for name, row in hidden.items()}
    every = dict(unwrapped(model).named_parameters())
    scores = {name: score(name, every[name]).flatten()[None] for name in hidden}
    if pool == "global":
        flat = torch.cat(list(scores.values()), dim=1)
        kept = _all_of(flat, sum(nums.values()))
        parts = zip(hidden, kept.split([part.shape[1] for part in scores.values()], dim=1), strict=True)
    else:
        parts = ((name, _all_of(one, nums[name])) for name, one in scores.items())  # type: ignore[assignment]
    masks = {name: part.view(hidden[name].shape) for name, part in parts}
    empty = [name for name, mask in masks.items() if not mask.any()]
    if empty:
        raise ValueError(f"every weight of {empty[0]!r} would be dropped: raise the density, or use pool='layer'")
    return masks


def _all_of(score: Tensor, num: int) -> Tensor:
    return largest(score, torch.ones_like(score, dtype=torch.bool), torch.tensor([num], device=score.device))


@torch.no_grad()
def fan_in_init(model: nn.Module, plan: Plan) -> None:
    """Evci et al.: scales the weights of every neuron to its own number of inputs instead of the layer's mean, in place. For
    masks that leave neurons with very different numbers; nothing to do where all have the same."""
    model = unwrapped(model)
    parameters = dict(model.named_parameters())
    for row in plan:
        mask = mask_of(model, row.name)
        if row.role != "hidden" or mask is None:
            continue
        fan_in = whole(mask).float().sum(row.in_dims, keepdim=True)
        scale = (fan_in.mean() / fan_in.clamp(min=1)).sqrt().expand(row.shape).contiguous()
        layer = compressed(model, row.name)
        parameters[row.name].mul_(like(scale, parameters[row.name]) if layer is None else layer.gather(scale))
