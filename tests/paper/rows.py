"""Figures by name, and rows of runs whose losses are made up."""

from __future__ import annotations

import math
from pathlib import Path

from smupar.lm.run.folder import Summary
from smupar.paper.catalogue import figure
from smupar.paper.settings import Scale
from smupar.study.store import Result

fig01, fig03, fig05, fig06, fig07 = map(figure, ("fig01", "fig03", "fig05", "fig06", "fig07"))
fig08, fig09, fig10, fig11, fig12 = map(figure, ("fig08", "fig09", "fig10", "fig11", "fig12"))
fig13, tab01, tab04, patterns, thin = map(figure, ("fig13", "tab01", "tab04", "patterns", "thin"))
depth = figure("depth")
PAPER = Scale("paper", "data/slimpajama", 50257)
CPU = Scale("cpu")
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def finished(config, loss, valid_loss=None):
    status = "finished" if math.isfinite(loss) else "diverged"
    ended = Summary(
        id=config.id,
        status=status,
        folder="",
        steps=config.steps,
        num_tokens=config.num_tokens,
        num_parameters=1,
        sparsity=config.sparsity,
        train_loss=loss if math.isfinite(loss) else None,
        valid_loss=(valid_loss or loss) if math.isfinite(loss) else None,
        best_valid_loss=None,
        best_step=None,
        seconds=1.0,
        tokens_per_second=1.0,
        device="cpu",
        num_ranks=1,
        num_threads=1,
        versions={"torch": "2"},
    )
    return Result(config, ended)


def parabolas(runs, best, floor=lambda config: 4.0, axis="lr"):
    """Losses with the optimum, log2, that ``best`` gives for a run."""
    return [finished(run, floor(run) + 0.05 * (math.log2(getattr(run, axis)) - best(run)) ** 2) for run in runs]
