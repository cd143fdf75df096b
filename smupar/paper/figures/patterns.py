"""Beyond the paper: does the best learning rate stay under SmuPar for masks that are not uniformly random?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from smupar.lm.config.run_config import RunConfig
from smupar.paper.figure import STABLE, Claim, Figure, Rows, all_of, curve, panel, swept
from smupar.paper.settings import Scale
from smupar.study.curves.optima import Curve, moved

# Sparsity, pattern and allocation of the masks.
MASKS = {
    "2:4": (0.5, "2:4", "uniform"),
    "constant fan-in": (0.9375, "fan_in", "uniform"),
    "ERK": (0.9375, "random", "erk"),
}


def runs(scale: Scale) -> list[RunConfig]:
    dense = scale.run("sweep", rule="mup", sparsity=0.0)
    sparse = [
        replace(scale.run("sweep", sparsity=sparsity), pattern=pattern, allocation=allocation)  # type: ignore[arg-type]
        for sparsity, pattern, allocation in MASKS.values()
    ]
    return swept(scale, "sweep", [dense, *sparse])


def _curves(rows: Rows) -> dict[str, tuple[Curve, Curve]]:
    """For each kind of masks, by name: the curves of the dense and of the sparse model."""
    dense = curve(rows, "smupar", 0.0)
    return {
        name: (dense, curve(rows, "smupar", sparsity, keep=partial(_has, pattern, allocation)))
        for name, (sparsity, pattern, allocation) in MASKS.items()
    }


def _has(pattern: str, allocation: str, run: RunConfig) -> bool:
    return (run.pattern, run.allocation) == (pattern, allocation)


def claim(rows: Rows) -> Claim:
    moves = {name: moved(*both) for name, both in _curves(rows).items()}
    text = "{}: the best learning rate moves by {:.2g}x (at most {:g}x is allowed)"
    return all_of(*(Claim(move <= STABLE, text.format(name, move, STABLE)) for name, move in moves.items()))


FIGURE = Figure(
    title="Learning-rate transfer for 2:4, constant fan-in and ERK masks",
    claimed="SmuPar keeps its best learning rate with 2:4, constant fan-in and ERK masks",
    shows="Not in the paper, whose masks are random and uniform.",
    runs=runs,
    swept=("sweep", "lr"),
    draw=lambda rows: [panel(both, name) for name, both in _curves(rows).items()],
    claim=claim,
)
