"""Adapts optimizers when weights change their layout, from matrices to non-zeros or back.

An optimizer that holds a replaced parameter refuses to step. Optimizer state in the old layout is converted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from smupar.model.seam import Step, on_every_step
from smupar.model.weights import weight_of
from smupar.refusals import refuse

_REPLACED = "_smupar_replaced"
_MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Optimizer -> its ``state`` when it was last converted. Loading a state dict replaces the ``state`` object.
_FITTED: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()


def watch_optimizers(model: nn.Module, replaced: Iterable[nn.Parameter]) -> None:
    """Watches the optimizers of a model whose weights have a new layout. ``replaced`` are the parameters that are no longer in
    the model."""
    _MODELS.add(model)
    for parameter in replaced:
        setattr(parameter, _REPLACED, True)
    on_every_step("refuse_replaced", _refuse_replaced)
    on_every_step("fit_state", _fit_state)


def _refuse_replaced(step: Step) -> None:
    refuse(
        any(hasattr(parameter, _REPLACED) for group in step.optimizer.param_groups for parameter in group["params"]),
        "this optimizer holds weights that sparsify_storage has replaced, and would train nothing: make param_groups and the "
        "optimizer after sparsify_storage",
    )


def _fit_state(step: Step) -> None:
    """Converts optimizer state at the first step, and at the first step after state was loaded."""
    states = step.optimizer.state
    if _FITTED.get(step.optimizer) is states:
        return
    _FITTED[step.optimizer] = states
    for model in _MODELS:
        for name, parameter in model.named_parameters():
            state, weight = states.get(parameter, {}), weight_of(model, name)
            for key, value in state.items():
                if isinstance(value, Tensor) and weight.is_foreign(value.shape):
                    state[key] = weight.converted(value)
