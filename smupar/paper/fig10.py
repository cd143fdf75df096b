"""Figure 10: Iso-Parameter scaling of deeper models with the hyperparameters of the dense one."""

from __future__ import annotations

from dataclasses import replace

from smupar.lm.config.run import RunConfig
from smupar.paper.fig03 import draw, losses
from smupar.paper.figure import Claim, Figure, Rows, title
from smupar.paper.settings import Scale, iso_width

RULES = ("sp", "mup", "smupar")
# SP has another learning rate for the wider half of the models: 6e-4 up to 1088 of 768 .. 2176, then 2e-4.
_WIDER, _SP_LR_WIDER = 1088 / 768, 2e-4


def runs(scale: Scale) -> list[RunConfig]:
    size, made = scale.size("iso-pretraining"), []
    for rule in RULES:
        for sparsity in size.sparsities:
            shared = "mup" if sparsity == 0 and rule != "sp" else rule
            start = scale.run("iso-pretraining", rule=shared, sparsity=sparsity)
            width = iso_width(size.width, sparsity, start.model.head_dim)
            run = scale.run("iso-pretraining", rule=shared, width=width, sparsity=sparsity)
            if rule == "sp" and run.lr == start.lr and width > _WIDER * size.width:  # not where it follows the width anyway
                run = replace(run, lr=_SP_LR_WIDER)
            made.append(run)
    return list({run.id: run for run in made}.values())


def claim(rows: Rows) -> Claim:
    found = losses(rows)
    ours = found["smupar"]
    words = [
        f"at {s:g}: " + ", ".join(f"{title(rule)} {found[rule][s]:.3f}" for rule in RULES if s in found[rule]) for s in ours
    ]
    holds = all(loss <= min(found[rule][s] for rule in ("sp", "mup")) for s, loss in ours.items())
    return Claim(holds, f"SmuPar is no worse than SP and muP at every width; {'; '.join(words)}")


FIGURE = Figure(
    title="Iso-Parameter scaling with dense hyperparameters",
    shows="SP and muP detune as sparsity grows, and SmuPar ends with the best loss at every width.",
    finding=4,
    runs=runs,
    draw=draw,
    claim=claim,
)
