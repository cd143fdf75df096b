"""Keeps the state of sparsifiers and measured updates in the optimizer's state dict.

Trainers save and load that state dict at the right time, so they need no change.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from smupar.plan.plan import PlanWarning

_KEY = "smupar"


def carry_state(optimizer: torch.optim.Optimizer, parts: Mapping[str, Any]) -> None:
    """Adds the state dicts of ``parts`` to the optimizer's state dict."""
    given = {name: part for name, part in parts.items() if part is not None}

    def add(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        # An earlier call of carry_state may have added other parts.
        state[_KEY] = state.get(_KEY, {}) | {name: part.state_dict() for name, part in given.items()}

    def take(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        stored = state.get(_KEY, {})
        for name, part in given.items():
            if name in stored:
                part.load_state_dict(stored[name])
            else:
                warnings.warn(
                    f"the optimizer's checkpoint holds no state of the {name}, which starts from the beginning: was "
                    "the checkpoint made without one?",
                    PlanWarning,
                    stacklevel=4,
                )

    if given:
        optimizer.register_state_dict_post_hook(add)
        optimizer.register_load_state_dict_pre_hook(take)
