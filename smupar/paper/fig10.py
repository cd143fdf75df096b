"""Figure 10: Iso-Parameter scaling of deeper models with the hyperparameters of the dense model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from smupar.lm.config.run import RunConfig
from smupar.paper.figure import RULES, Claim, Figure, Rows, over_sparsity, runs_of, title
from smupar.paper.settings import Scale, iso_width
from smupar.study.comparison import as_rule
from smupar.study.curves import Panel

# SP has two learning rates: 6e-4 for widths 768 to 1088, and 2e-4 for wider models, up to 2176.
_WIDER, _SP_LR_WIDER = 1088 / 768, 2e-4


def runs(scale: Scale) -> list[RunConfig]:
    sp = scale.run("iso-pretraining", rule="sp")
    width = partial(iso_width, sp.model.width, head_dim=sp.model.head_dim)

    def has_lower_lr(run: RunConfig) -> bool:
        """Whether Table 4 gives this run of SP a lower learning rate. If the run's rate differs from the narrowest model's, it
        already follows the width."""
        return run.rule == "sp" and run.lr == sp.lr and run.model.width > _WIDER * sp.model.width

    runs = runs_of(scale, "iso-pretraining", width=width)
    return [replace(run, lr=_SP_LR_WIDER) if has_lower_lr(run) else run for run in runs]


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
    ours = by_rule["smupar"]
    words = [
        f"at {s:g}: " + ", ".join(f"{title(rule)} {by_rule[rule][s]:.3f}" for rule in RULES if s in by_rule[rule]) for s in ours
    ]
    holds = all(loss <= min(by_rule[rule][s] for rule in ("sp", "mup")) for s, loss in ours.items())
    return Claim(holds, f"SmuPar is no worse than SP and muP at every width; {'; '.join(words)}")


FIGURE = Figure(
    title="Iso-Parameter scaling with dense hyperparameters",
    shows="SP and muP detune as sparsity grows, and SmuPar ends with the best loss at every width.",
    finding=4,
    runs=runs,
    draw=draw,
    claim=claim,
)
