"""The runs of a grid, and the sizes that were read in them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

Y, GRAD_X, DY, CHANGE, GRAD_W = "Y", "grad X", "dY", "change of Y", "weight gradient"
OF_LOSS = "gradient of the outputs"  # which arrives at the readouts
JUDGED = (Y, GRAD_X, DY)
AXES = ("width", "density", "depth")


class GridPoint(NamedTuple):
    """A point of the grid. Its runs differ only in their seed."""

    rule: str
    width: int
    density: float
    depth: int | None


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    rule: str
    width: int
    density: float
    seed: int
    depth: int | None = field(default=None, kw_only=True)  # None if the check does not vary the depth

    @property
    def point(self) -> GridPoint:
        return GridPoint(self.rule, self.width, self.density, self.depth)

    def __str__(self) -> str:
        return f"width {self.width}, density {self.density:g}" + ("" if self.depth is None else f", depth {self.depth}")


@dataclass(frozen=True)
class Reading(Cell):
    """The size of one quantity of a layer or block, at one step of a run; the first forward pass is step 1."""

    step: int
    place: str  # module path
    kind: str  # "layer", "block", or "part": a matrix inside a module; its ``place`` is the parameter's name
    role: str  # role of the weight; "block" or "logits" for blocks
    quantity: str
    rms: float
    mean_abs: float
    num_entries: int = 1

    @property
    def norm(self) -> float:
        """The norm over all entries. For a weight's gradient it is called gradient flow."""
        return self.rms * math.sqrt(self.num_entries)
