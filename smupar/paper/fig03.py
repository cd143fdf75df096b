"""Figure 3: pretraining over sparsity with the hyperparameters of the dense model, validation loss."""

from __future__ import annotations

from smupar.lm.config.run import RunConfig
from smupar.paper.figure import RULES, Claim, Figure, Rows, all_of, over_sparsity, runs_of, title
from smupar.paper.settings import Scale
from smupar.study.comparison import as_rule
from smupar.study.curves import Panel

_CORRELATION = 0.8


def runs(scale: Scale) -> list[RunConfig]:
    return runs_of(scale, "pretraining")


def losses(rows: Rows) -> dict[str, dict[float, float]]:
    """Validation loss of every rule and sparsity."""
    by_rule: dict[str, dict[float, float]] = {rule: {} for rule in RULES}
    for row in rows:
        sparsity, loss = row.config.sparsity, row.summary.valid_loss
        assert sparsity is not None
        for rule in RULES:
            if row.config.rule in (rule, as_rule(rule, sparsity)):
                by_rule[rule][sparsity] = float("inf") if loss is None else loss
    return by_rule


def draw(rows: Rows) -> list[Panel]:
    return [over_sparsity({title(rule): values for rule, values in losses(rows).items()}, "", "validation loss")]


def claim(rows: Rows) -> Claim:
    by_rule = losses(rows)
    return all_of(*(_falls_behind(by_rule[rule], by_rule["smupar"], title(rule)) for rule in ("sp", "mup")))


def _falls_behind(theirs: dict[float, float], ours: dict[float, float], name: str) -> Claim:
    levels = sorted(sparsity for sparsity in ours if sparsity > 0)
    gaps = [theirs[sparsity] / ours[sparsity] - 1 for sparsity in levels]
    correlation = _rank_correlation(gaps)
    text = f"{name}'s gap to SmuPar is {gaps[0]:+.1%} at {levels[0]:g} and {gaps[-1]:+.1%} at {levels[-1]:.4g}, "
    return Claim(gaps[-1] > gaps[0] and correlation > _CORRELATION, text + f"rank correlation with sparsity {correlation:.2f}")


def _rank_correlation(values: list[float]) -> float:
    """Spearman's correlation of values with their order."""
    ranks = [sorted(values).index(value) for value in values]
    n = len(values)
    return 1 - 6 * sum((rank - index) ** 2 for index, rank in enumerate(ranks)) / (n * (n**2 - 1)) if n > 1 else 0.0


FIGURE = Figure(
    title="Language models over sparsity, no tuning",
    shows="SmuPar has the best loss at every sparsity, and SP and muP fall behind further as sparsity grows.",
    finding=4,
    runs=runs,
    keeps_weights=True,  # for Table 2
    draw=draw,
    claim=claim,
)
