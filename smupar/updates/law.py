"""The law by which updates are measured and followed, and alternatives for control experiments.

A law is written as the measured quantity, followed by changed settings: ``"rms"``, ``"effect,every=25"``,
``"function,held-out"``. This file does not import torch, so that ``smupar --help`` stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from smupar.plan.settings import refuse

EFFECT, RMS, TRUST, SPECTRAL, FUNCTION = "effect", "rms", "trust", "spectral", "function"
SIZES = (EFFECT, RMS, TRUST, SPECTRAL, FUNCTION)
FIRST_STEPS = 20  # these are all measured


@dataclass(frozen=True)
class Law:
    """How updates are measured, and how learning rates follow them.

    size      the measured quantity of an update dW of a hidden weight, see below
    old       the share of the average that stays at a measured step
    every     steps between measurements, after the first 20
    tokens    number of tokens that are measured; for function in whole sequences
    held_out  whether they come from the validation text instead of the batch that made the update

    effect    RMS(X dW): the change of the layer's output by the update
    rms       RMS of dW over kept weights: updates of equal size
    trust     norm of dW over that of W: LAMB
    spectral  spectral norm of dW times sqrt(in / out)
    function  RMS of the change of the model's output if this layer alone is updated: function-space learning rates
    """

    size: str = EFFECT
    old: float = 0.8
    every: int = 5
    tokens: int = 128
    held_out: bool = False

    def is_measured(self, step: int) -> bool:
        """Whether a step is measured; steps are counted from 0."""
        return step < FIRST_STEPS or step % self.every == 0


@cache
def parse_law(text: str) -> Law:
    """Parses a law; "" is the usual one."""
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
        f"law {text!r}: old must lie in [0, 1), every and tokens from 1 on",
    )
    return law
