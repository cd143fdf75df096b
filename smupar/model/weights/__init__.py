"""One interface to a weight matrix, however it is kept.

Optimizer groups, learning rates and traces use only the parameter's name. Code that needs the matrix, the mask, the optimizer
state or the dense gradient calls ``weight_of(model, name)`` or ``hidden_weights(model, plan)``.

weight        ``Weight``: what one model and a stack of many have in common
model_weight  ``ModelWeight``: a weight in a module of one model
dense         ``DenseWeight``: a parameter of full shape, with or without a mask; it may be sharded over ranks
compressed    ``CompressedWeight``: a parameter of the non-zeros alone, in a ``SparseLinear``

The weights of a stack are ``StackedWeight`` in ``execute/stack``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from smupar.model.sparse_linear import SparseLinear
from smupar.model.weights.compressed import CompressedWeight
from smupar.model.weights.dense import DenseWeight
from smupar.model.weights.model_weight import ModelWeight
from smupar.model.weights.weight import ONLY, Weight
from smupar.plan.plan import Plan

__all__ = ["ONLY", "CompressedWeight", "DenseWeight", "ModelWeight", "Weight", "hidden_weights", "weight_of"]


def weight_of(model: nn.Module, name: str, optimizers: Sequence[torch.optim.Optimizer] = ()) -> ModelWeight:
    """A parameter of a model as a weight. Pass its optimizers if their state must change when the mask moves."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    kind = CompressedWeight if isinstance(module, SparseLinear) and leaf == "weight" else DenseWeight
    return kind(module, name, optimizers)


def hidden_weights(model: nn.Module, plan: Plan, optimizers: Sequence[torch.optim.Optimizer] = ()) -> dict[str, ModelWeight]:
    """Hidden weights by name, in the order of the plan."""
    return {row.name: weight_of(model, row.name, optimizers) for row in plan if row.role == "hidden"}
