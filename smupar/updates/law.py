"""The law by which learning rates follow a trace. Its tensors have the layers of one model, or one layer of many models.

Two numbers are averaged over time: what an update should do, by the trace, and its gain, which is what it does per unit of
learning rate. The factor on the base learning rate is the ratio of the two averages, held between 1 / CLAMP and CLAMP. A step
whose measurement cannot be used (nothing moved, not finite, or the trace has no number there) changes nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLAMP = 1e4
_OLD = 0.8


def averages_after(averages: tuple[Tensor, Tensor], wanted: Tensor, gain: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The averages of (wanted, gain) after a step, and their ratio. Averages are nan before the first step that can be used,
    and the ratio is nan if this step cannot be used."""
    usable = wanted.isfinite() & gain.isfinite() & (gain > 0)

    def average(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(usable, torch.where(old.isnan(), new, _OLD * old + (1 - _OLD) * new), old)

    wanted, gain = average(averages[0], wanted), average(averages[1], gain)
    return (wanted, gain), torch.where(usable, wanted.to(gain.dtype) / gain, math.nan)


def held(ratio: Tensor) -> Tensor:
    """The factor on the base learning rate."""
    return ratio.clamp(1 / CLAMP, CLAMP)
