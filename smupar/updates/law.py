"""The law by which learning rates follow a trace, on tensors: the layers of one model, or one layer of many models.

What an update should do, by the trace, and its gain, what it does per unit of learning rate, are both averaged over time. The
factor on the base learning rate is the ratio of the averages, held between 1 / CLAMP and CLAMP. A step whose measurement cannot
be used (nothing moved, not finite, or the trace has no number there) changes nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLAMP = 1e4
_OLD = 0.8


def averages_after(averages: tuple[Tensor, Tensor], wanted: Tensor, gain: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The averages of (wanted, gain) after a step, not a number before the first, and their ratio, not a number where this step
    cannot be used."""
    usable = wanted.isfinite() & gain.isfinite() & (gain > 0)

    def average(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(usable, torch.where(old.isnan(), new, _OLD * old + (1 - _OLD) * new), old)

    wanted, gain = average(averages[0], wanted), average(averages[1], gain)
    return (wanted, gain), torch.where(usable, wanted.to(gain.dtype) / gain, math.nan)


def held(ratio: Tensor) -> Tensor:
    """The factor on the base learning rate."""
    return ratio.clamp(1 / CLAMP, CLAMP)
