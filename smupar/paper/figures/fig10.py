"""Figure 10: Iso-Parameter scaling of deeper models with the hyperparameters of the dense model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean

from smupar.lm.config.run_config import RunConfig
from smupar.paper.figure import (
    NUM_SPREADS,
    RULES,
    USUAL_SPREAD,
    Claim,
    Figure,
    Rows,
    all_of,
    over,
    pooled_spread,
    runs_of,
    spread_in_words,
    title,
    valid_loss,
    widths,
)
from smupar.paper.settings import Scale, iso_width
from smupar.study.conventions import as_rule, density_in_words
from smupar.study.curves.curves import Panel
from smupar.study.definition import by_seeds

# SP has two learning rates: 6e-4 for widths 768 to 1088, and 2e-4 for wider models, up to 2176.
_WIDER, _SP_LR_WIDER = 1088 / 768, 2e-4


def runs(scale: Scale) -> list[RunConfig]:
    sp = scale.run("iso-pretraining", rule="sp")
    width = partial(iso_width, sp.model.width, head_dim=sp.model.head_dim)

    def has_lower_lr(run: RunConfig) -> bool:
        """Whether Table 4 gives this run of SP a lower learning rate. False at scales where SP's rate already falls with
        width."""
        return run.rule == "sp" and run.lr == sp.lr and run.model.width > _WIDER * sp.model.width

    runs = runs_of(scale, "iso-pretraining", width=width)
    return [replace(run, lr=_SP_LR_WIDER) if has_lower_lr(run) else run for run in runs]


def losses(rows: Rows) -> dict[str, dict[float, list[float]]]:
    """Validation losses of all seeds, by rule and sparsity."""
    by_rule: dict[str, dict[float, list[float]]] = {rule: {} for rule in RULES}
    for row in rows:
        sparsity = row.config.sparsity
        assert sparsity is not None
        for rule in RULES:
            if row.config.rule in (rule, as_rule(rule, sparsity)):
                by_rule[rule].setdefault(sparsity, []).append(valid_loss(row))
    return by_rule


def draw(rows: Rows) -> list[Panel]:
    """Loss over density, with the dense model on the left. The axis also names the widths."""
    lines, width = {title(rule): own for rule, own in losses(rows).items()}, widths(rows)
    of_widths = ", ".join(str(width[sparsity]) for sparsity in sorted(width))
    drawn = over({sparsity: 1 - sparsity for sparsity in width}, lines)
    return [Panel("", f"density, at width {of_widths}", "validation loss", drawn, falling_x=True)]


def claim(rows: Rows) -> Claim:
    by_rule = {rule: {sparsity: fmean(seeds) for sparsity, seeds in own.items()} for rule, own in losses(rows).items()}
    spread = pooled_spread([valid_loss(row) for row in group] for group in by_seeds(rows))
    return all_of(*(_is_behind(by_rule, rule, spread) for rule in ("sp", "mup")))


def _is_behind(by_rule: dict[str, dict[float, float]], rule: str, spread: float | None) -> Claim:
    """Whether the rule ends above SmuPar at every density below 1. Density 1 is left out, since SmuPar is muP there."""
    theirs, ours = by_rule[rule], by_rule["smupar"]
    gaps = {sparsity: theirs[sparsity] / loss - 1 for sparsity, loss in ours.items() if sparsity}
    words = ", ".join(
        f"{gap:+.2%} at {density_in_words(sparsity)} ({theirs[sparsity]:.3f}, SmuPar {ours[sparsity]:.3f})"
        for sparsity, gap in gaps.items()
    )
    asked = NUM_SPREADS * (spread or USUAL_SPREAD)
    text = (
        f"{title(rule)} ends above SmuPar at every density below 1, by more than {asked:.2%}, twice {spread_in_words(spread)}"
    )
    return Claim(min(gaps.values()) > asked, f"{text}: {words}")


FIGURE = Figure(
    title="Iso-Parameter scaling with dense hyperparameters",
    claimed="With the dense model's hyperparameters, SmuPar is ahead where width grows as density falls",
    shows="SP and muP detune as sparsity grows, and SmuPar ends with the best loss at every width.",
    finding=4,
    runs=runs,
    draw=draw,
    claim=claim,
)
