"""Table 4: the settings of every figure, and their reduction to smaller scales."""

from __future__ import annotations

from smupar.lm.model.cost import estimate
from smupar.paper.figure import Claim, Figure, Rows
from smupar.paper.settings import Scale, table_4


def claim(rows: Rows = ()) -> Claim:
    """Whether the printed numbers of tokens follow from steps, batch and T = 2048, and the largest model has 610M
    parameters."""
    paper = Scale("paper", "data/slimpajama", 50257)
    printed = {"sweep": 306e6, "init": 1.6e6, "pretraining": 12.13e9, "coordinates": 82e3, "iso-pretraining": 1e9}
    off = [name for name, tokens in printed.items() if abs(paper.run(name).num_tokens / tokens - 1) > 0.03]
    size = estimate(paper.run("pretraining")).num_parameters
    return Claim(
        not off and size == 606_519_972,
        f"tokens are steps x batch x 2048{' except for ' + ', '.join(off) if off else ''}; the largest model has {size:,} "
        "parameters",
    )


FIGURE = Figure(
    title="Settings",
    shows="Widths, depths, batches, learning rates, init, schedules, steps and tokens of every figure.",
    text=table_4,
    claim=claim,
)
