"""Figure 7: loss over the init std at each sparsity, at a constant learning rate. The loss is read early in training on
purpose."""

from __future__ import annotations

from smupar.paper.figure import Claim, Figure, Rows, all_of, is_stable, moves_more, panels, sweep_rules


def claim(rows: Rows) -> Claim:
    axis = "init_std"
    return all_of(is_stable(rows, axis=axis), moves_more(rows, "sp", axis), moves_more(rows, "mup", axis))


FIGURE = Figure(
    title="Transfer of the init over sparsity",
    claimed="SmuPar keeps its best init std over densities; SP and muP do not",
    shows="SmuPar's best init std is stable; SP's and muP's are not.",
    finding=2,
    runs=lambda scale: sweep_rules(scale, "init", axis="init_std"),
    swept=("init", "init_std"),
    draw=lambda rows: panels(rows, axis="init_std"),
    claim=claim,
)
