"""The ways in which the masks of a run move, by the value of ``RunConfig.dynamic``."""

from __future__ import annotations

from typing import NamedTuple


class MaskMethod(NamedTuple):
    """How one method moves masks, and the fields of a run that only such methods read."""

    fields: tuple[str, ...] = ()
    grows_by: str | None = None  # for methods that drop and grow weights: "gradient" or "random"
    prunes: bool = False  # starts dense
    in_rounds: bool = False  # trains in rounds: after each pruning, weights and schedule start again


MASK_METHODS = {
    "none": MaskMethod(),
    "rigl": MaskMethod(("mask_every", "mask_stop", "drop_fraction"), grows_by="gradient"),
    "set": MaskMethod(("mask_every", "mask_stop", "drop_fraction"), grows_by="random"),
    "gmp": MaskMethod(("mask_every", "mask_stop", "correction"), prunes=True),
    "imp": MaskMethod(("rounds", "correction"), prunes=True, in_rounds=True),
}
