"""A law says how updates are measured, and how learning rates follow them. Control experiments use other laws than the default.

A law is written as the measured quantity, followed by settings that differ from the default: ``"rms"``, ``"effect,every=25"``,
``"function,held-out"``. This file does not import torch, so that ``smupar --help`` stays fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from smupar.refusals import refuse

if TYPE_CHECKING:
    from torch import Tensor

EFFECT, RMS, TRUST, SPECTRAL, FUNCTION = "effect", "rms", "trust", "spectral", "function"
SIZES = (EFFECT, RMS, TRUST, SPECTRAL, FUNCTION)
FIRST_STEPS = 20  # number of steps at the start, which are all measured
CLAMP = 1e4  # the largest factor on the base learning rate


@dataclass(frozen=True)
class Law:
    """How updates are measured, and how learning rates follow them.

    size      the quantity to measure, for an update dW of a hidden weight W:
              effect    RMS(X dW), the change of the layer's output by the update
              rms       RMS of dW over the kept weights
              trust     norm of dW divided by the norm of W, as in LAMB
              spectral  spectral norm of dW times sqrt(in / out)
              function  RMS of the change of the model's output if this layer alone is updated, as in function-space learning
                        rates
    old       how much of the old average a measured step keeps, from 0 to 1
    every     steps between measurements, after the first 20
    tokens    number of tokens on which updates are measured; ``function`` uses whole sequences, at least one
    held_out  whether these tokens come from the validation text, and not from the batch that made the update
    """

    size: str = EFFECT
    old: float = 0.8
    every: int = 5
    tokens: int = 128
    held_out: bool = False

    def is_measured(self, step: int) -> bool:
        """Whether a step is measured; steps are counted from 0."""
        return step < FIRST_STEPS or step % self.every == 0


LAW = Law()  # the default


@cache
def parse_law(text: str) -> Law:
    """Parses a law; "" is the default."""
    law, kinds = Law(), {"old": float, "every": int, "tokens": int}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        known = part in (*SIZES, "held-out") or (name in kinds and value)
        refuse(not known, f"law {text!r}: {part!r} is none of {', '.join(SIZES)}, held-out, old=, every=, tokens=")
        if name in kinds:
            try:
                law = replace(law, **{name: kinds[name](value)})
            except ValueError:
                raise ValueError(f"law {text!r}: {name} must be a number, got {value!r}") from None
        else:
            law = replace(law, held_out=True) if part == "held-out" else replace(law, size=part)
    refuse(
        not (0 <= law.old < 1 and law.every >= 1 and law.tokens >= 1),
        f"law {text!r}: old must lie in [0, 1), and every and tokens must be at least 1",
    )
    return law


def averages_after(
    averages: tuple[Tensor, Tensor], wanted: Tensor, gain: Tensor, old_share: float = LAW.old
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """How learning rates follow a trace, for the layers of one model, or for one layer of many models.

    The trace says which effect an update should have: the wanted effect. The gain is the effect that was measured, per unit of
    learning rate. Both are averaged over time. The factor on the base learning rate is the ratio of the averages, ``clamped``
    between 1 / CLAMP and CLAMP. A step with an unusable measurement (nothing moved, not finite, or no number in the trace)
    changes nothing.

    Returns the new averages of (wanted, gain), and their ratio. The averages are NaN until a step is usable. The ratio is NaN
    if this step is unusable.
    """
    usable = wanted.isfinite() & gain.isfinite() & (gain > 0)

    def average(old: Tensor, new: Tensor) -> Tensor:
        return new.where(old.isnan(), old_share * old + (1 - old_share) * new).where(usable, old)

    wanted, gain = average(averages[0], wanted), average(averages[1], gain)
    return (wanted, gain), (wanted.to(gain.dtype) / gain).where(usable, math.nan)


def clamped(ratio: Tensor) -> Tensor:
    """The factor on the base learning rate: the ratio within its limits."""
    return ratio.clamp(1 / CLAMP, CLAMP)
