"""Optimizers of weights that switch between matrices and non-zeros: those that hold a replaced parameter refuse to step, and
state that was saved in the other layout is converted."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smupar.weights import weight_of

_REPLACED, _FITTED = "_smupar_replaced", "_smupar_fitted"
_MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch_optimizers(model: nn.Module, replaced: Iterable[nn.Parameter]) -> None:
    """For a model whose weights may be kept in another way from now on: optimizers that hold what was replaced refuse to step,
    and state that they load is laid out as the weights are now."""
    _MODELS.add(model)
    for parameter in replaced:
        setattr(parameter, _REPLACED, True)
    _register()


@cache
def _register() -> None:
    """Once, and from the first such model on."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if any(hasattr(parameter, _REPLACED) for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "this optimizer holds weights that sparsify_storage has replaced, and would train nothing: make param_groups and "
            "the optimizer again, after it"
        )
    if not hasattr(optimizer, _FITTED):
        _fit_state(optimizer)
        setattr(optimizer, _FITTED, True)
        if _forget not in optimizer._optimizer_load_state_dict_post_hooks.values():
            optimizer.register_load_state_dict_post_hook(_forget)


def _forget(optimizer: torch.optim.Optimizer) -> None:
    optimizer.__dict__.pop(_FITTED, None)


def _fit_state(optimizer: torch.optim.Optimizer) -> None:
    for model in _MODELS:
        for name, parameter in model.named_parameters():
            state, weight = optimizer.state.get(parameter, {}), weight_of(model, name)
            for what, value in state.items():
                if isinstance(value, Tensor) and weight.is_foreign(value.shape):
                    state[what] = weight.converted(value)
