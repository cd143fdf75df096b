"""Figure 7: loss over the init std at each sparsity, read early on purpose, at a constant learning rate."""

from __future__ import annotations

from smupar.lm.config import RunConfig
from smupar.paper.figure import Claim, Figure, Rows, all_of, curve, moves_more, panel, sparsities, stable, sweep, title
from smupar.paper.settings import Scale
from smupar.study.curves import Panel
from smupar.study.optima import Curve

RULES = ("sp", "mup", "smupar")


def runs(scale: Scale) -> list[RunConfig]:
    return sweep(scale, "init", RULES, axis="init_std")


def curves(rows: Rows, rule: str) -> list[Curve]:
    return [curve(rows, rule, sparsity, axis="init_std") for sparsity in sparsities(rows)]


def draw(rows: Rows) -> list[Panel]:
    return [panel(curves(rows, rule), title(rule), "base init std") for rule in RULES]


def claim(rows: Rows) -> Claim:
    sp, mup, smupar = (curves(rows, rule) for rule in RULES)
    return all_of(
        stable(smupar, "SmuPar", "init std"),
        moves_more(sp, smupar, "SP", "SmuPar"),
        moves_more(mup, smupar, "muP", "SmuPar"),
    )


FIGURE = Figure(
    title="Transfer of the init over sparsity",
    shows="SmuPar's best init std is stable, SP's and muP's are not.",
    finding=2,
    runs=runs,
    swept=("init", "init_std"),
    draw=draw,
    claim=claim,
)
