"""Figure 9: loss over the learning rate in Iso-Parameter scaling. Models become wider and sparser, with the same number of kept
weights."""

from __future__ import annotations

from functools import partial

from smupar.lm.config.run_config import RunConfig
from smupar.paper.figure import STABLE, Claim, Figure, Rows, all_of, curves, moves_more, panels, runs_of, swept
from smupar.paper.settings import Scale, iso_width
from smupar.study.curves.optima import farthest_move

_HOLDS = 0.005  # losses of two seeds differ by about this share


def runs(scale: Scale) -> list[RunConfig]:
    dense = scale.run("iso").model
    width = partial(iso_width, dense.width, head_dim=dense.head_dim)
    return swept(scale, "iso", runs_of(scale, "iso", width=width))


def claim(rows: Rows) -> Claim:
    smupar = curves(rows, "smupar")
    move, losses = farthest_move(smupar), [curve.best_loss for curve in smupar]
    text = ", ".join(f"{curve.best_loss:.3f} at width {curve.width}" for curve in smupar)
    return all_of(
        Claim(
            move <= STABLE,
            f"SmuPar's best learning rate moves by {move:.2g}x over widths and sparsities (at most {STABLE:g}x is allowed)",
        ),
        moves_more(rows, "sp"),
        moves_more(rows, "mup"),
        Claim(all(loss <= losses[0] * (1 + _HOLDS) for loss in losses), f"SmuPar's loss improves or stays: {text}"),
    )


FIGURE = Figure(
    title="Learning-rate transfer in Iso-Parameter scaling",
    claimed="SmuPar keeps its best learning rate where width grows as density falls; SP and muP do not",
    shows="SmuPar's best learning rate stays, SP's and muP's move more, and SmuPar's loss improves with width and sparsity.",
    finding=3,
    runs=runs,
    swept=("iso", "lr"),
    draw=panels,
    claim=claim,
)
