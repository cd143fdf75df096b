"""Checks of configurations, by topic. Each function raises an error with the remedy, and changes nothing. The constructors in
``config`` call them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from smupar.plan.masks import UNSTRUCTURED
from smupar.refusals import refuse
from smupar.rules import get_rule
from smupar.updates.law import parse_law

if TYPE_CHECKING:
    from smupar.lm.config.run_config import ModelConfig, RunConfig

_LARGEST = 1e30  # beyond it fp32 overflows
_ROUNDING = 1e-3  # allowed difference between a typed sparsity and the one that a pattern fixes

# The largest counts, far beyond what anyone has trained. They catch typing mistakes before a list or loop of that length
# starts.
_AT_MOST = {
    "width": 2**20,  # the widest models have 2^15
    "base_width": 2**20,
    "head_dim": 2**20,
    "ff_multiple": 2**20,
    "depth": 10_000,  # ResNets and Transformers were trained with a thousand layers
    "vocab_size": 2**24,  # the largest vocabularies have a million tokens
    "context": 2**30,  # the longest contexts have 10^7 tokens
    "seq_len": 2**30,
    "batch_size": 2**30,  # the largest batches have 10^5 sequences
    "steps": 10**12,  # at a millisecond a step, this takes 30 years
    "valid_batches": 10**6,  # they run without a checkpoint in between
    "rounds": 10_000,
    "seeds": 10_000,  # every seed is a run
    "num_samples": 10**6,  # every sample is a run
    "round_size": 10**6,
    "tokens": 10**9,
}
_LARGEST_COUNT = 2**63 - 1  # for all other counts: what fits into 64 bits


@lru_cache
def _choices(kind: Any) -> dict[str, tuple[Any, ...]]:
    return {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}


def check_choices(config: Any) -> None:
    """Refuses a value that the field's annotation does not list."""
    for name, choices in _choices(config.__class__).items():
        value = getattr(config, name)
        refuse(value not in choices, f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def check_sparsities(*values: float) -> None:
    for value in values:
        meant = f"write {value / 100:g} for {value:g} %" if 1 < value < 100 else "0.75 keeps a quarter of the hidden weights"
        refuse(not 0 <= value < 1, f"sparsity must lie in [0, 1), got {value}: {meant}")


def check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        refuse(value < 1, f"{name} must be a positive whole number, got {_short(value)}")
        check_not_too_large(name, value)


def check_not_too_large(name: str, *values: int) -> None:
    """Refuses counts that no machine could work through."""
    largest = _AT_MOST.get(name, _LARGEST_COUNT)
    for value in values:
        refuse(value > largest, f"{name} must be at most {largest:,}, got {_short(value)}")


def _short(value: float) -> str:
    """A number as text, cut if it has hundreds of digits."""
    text = str(value)
    return text if len(text) <= 24 else f"{text[:20]}... ({len(text)} digits)"


def check_not_negative(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        refuse(not 0 <= value < math.inf, f"{name} must be a number, at least 0, got {_short(value)}")
        if isinstance(value, int):
            check_not_too_large(name, value)


def check_model(model: ModelConfig) -> None:
    """Refuses sizes with which no GPT can be built."""
    check_choices(model)
    check_positive(model, "width", "depth", "head_dim", "vocab_size", "context")
    check_positive(model, *(() if model.ff_multiple is None else ("ff_multiple",)))
    width, head_dim, ratio = model.width, model.head_dim, model.ff_ratio
    refuse(
        width % head_dim,
        f"width {width} is not a multiple of head_dim {head_dim}: {max(1, round(width / head_dim)) * head_dim} "
        "would be, or choose another --head-dim",
    )
    refuse(ratio is not None and not 0 < ratio < 1000, f"ff_ratio must lie in (0, 1000), got {ratio}")
    refuse(
        model.positions == "rotary" and head_dim % 2,
        f"rotary positions rotate pairs of entries, but head_dim {head_dim} is odd: choose an even --head-dim",
    )


def check_run(run: RunConfig) -> None:
    """Refuses mistakes in a run that show before its text and device are known."""
    check_sparsities(run.sparsity or 0.0)
    check_choices(run)
    check_not_negative(run, *(() if run.kappa is None else ("kappa",)))
    refuse(
        bool(get_rule(run.rule).two_terms) and run.kappa is None,
        f"rule {run.rule} needs --kappa: train the proxy with --observe, and take kappa() of its observed.json",
    )
    _check_sizes(run)
    _check_optimizer(run)
    _check_moving_masks(run)
    _check_pattern(run)


def _check_sizes(run: RunConfig) -> None:
    """Checks the sizes of steps, batches, model and base."""
    check_positive(run, "steps", "batch_size", "seq_len", "base_width", "valid_batches")
    check_not_too_large("rounds", run.rounds)
    refuse(
        run.mask_method.in_rounds and (run.rounds < 1 or run.steps % (run.rounds + 1)),
        f"{run.steps} steps are not {run.rounds + 1} equal rounds: choose --steps as a multiple of --rounds plus one",
    )
    refuse(not 0 <= run.warmup_steps <= run.round_steps, f"warmup must lie in [0, steps = {run.round_steps}], got {run.warmup}")
    refuse(
        run.base_width % run.model.head_dim,
        f"base width {run.base_width} is not a multiple of head_dim {run.model.head_dim}, which is the same in both models: "
        "choose another --base-width or --head-dim",
    )
    refuse(
        run.base_depth is not None and not 1 <= run.base_depth <= run.model.depth,
        f"base_depth must lie between 1 and depth {run.model.depth}, got {run.base_depth}: tune on a model that is not deeper",
    )
    base = replace(run.model, width=run.base_width)
    refuse(
        base.width != run.model.width and base.inner_width == run.model.inner_width,
        f"the MLP is {base.inner_width} wide at width {base.width} and at {run.model.width}: choose a smaller --ff-multiple",
    )
    refuse(
        run.model.positions == "learned" and run.seq_len > run.model.context,
        f"seq_len {run.seq_len} is longer than the model's context: pass --context {run.seq_len}",
    )


def _check_optimizer(run: RunConfig) -> None:
    check_not_negative(run, "lr", "weight_decay", "eps", "momentum", "init_std", "alpha_input", "alpha_output")
    check_not_negative(run, *(() if run.rest_lr is None else ("rest_lr",)))
    refuse(
        run.lr > _LARGEST or run.momentum >= 1,
        f"lr {run.lr:g} or momentum {run.momentum:g} is too large: momentum lies below 1",
    )
    refuse(not all(0 <= beta < 1 for beta in run.betas), f"betas must lie in [0, 1), got {run.betas}")
    refuse(
        run.decay == "held" and run.prunes,
        "a weight that is pruned has no initial size to be held at: choose another --decay, or masks that keep their density",
    )
    refuse(
        run.clip is not None and not 0 < run.clip < math.inf,
        f"clip must be a number above 0, got {run.clip}: leave it out for no clipping",
    )


def _check_moving_masks(run: RunConfig) -> None:
    parse_law(run.law)
    refuse(run.law and not (run.follow or run.record), f"law {run.law!r} is for runs that record or follow a trace")
    refuse(
        run.dynamic != "none" and run.pattern not in UNSTRUCTURED,
        f"masks that move are unstructured: --dynamic {run.dynamic} needs --pattern random",
    )
    refuse(not 0 < run.drop_fraction < 1, f"drop_fraction must lie in (0, 1), got {run.drop_fraction}")
    refuse(
        not 0 < run.mask_stop <= 1 or run.mask_every < 1,
        f"mask_stop must lie in (0, 1] and mask_every must be at least 1, got {run.mask_stop} and {run.mask_every}: "
        "masks must not move after the run",
    )
    refuse(
        run.dynamic != "none" and run.mask_stop * run.steps < 1,
        f"the masks of a run of {run.steps} steps would stop moving before the first step: raise --mask-stop",
    )
    refuse(
        run.mask_method.grows_by and run.density != 1 and run.mask_every > run.last_move,
        f"masks would never move: every {run.mask_every} steps, not after step {run.last_move}: choose a smaller --mask-every",
    )


def n_of_m(pattern: str) -> tuple[int, int] | None:
    """(2, 4) for the patterns 2:4 and 2:4-transposable; None for patterns of another kind."""
    kept, _, of = pattern.partition("-")[0].partition(":")
    return (int(kept), int(of)) if kept.isdigit() and of.isdigit() else None


def check_pattern_fits(pattern: str, width: int, head_dim: int, sparsity: float) -> None:
    """Refuses a sparsity that a pattern does not have, and a width that cannot be divided into its groups or blocks. With
    sparsity 0 the model is dense, or the pattern itself fixes the sparsity."""
    fixed, (kind, _, size) = n_of_m(pattern), pattern.partition("-")
    if fixed:
        kept, of = fixed
        refuse(not 0 < kept < of, f"pattern {pattern!r}: N:M needs 0 < N < M")
        refuse(
            sparsity and abs(sparsity - (1 - kept / of)) > _ROUNDING,
            f"the pattern {pattern} keeps {kept} of {of} weights, so the sparsity is {1 - kept / of:g} (or 0 for a dense "
            f"model), not {sparsity:g}",
        )
    tile = fixed[1] if fixed else int(size) if kind == "block" and size.isdigit() else 1
    step = math.lcm(max(1, tile), head_dim)
    refuse(
        tile > 1 and width % tile > 0,
        f"the pattern {pattern} needs a width that is a multiple of {tile}, not {width}: "
        f"{max(1, round(width / step)) * step} would be, or choose another --pattern",
    )


def _check_pattern(run: RunConfig) -> None:
    if run.sparsity != 0:  # None: the pattern fixes it
        check_pattern_fits(run.pattern, run.model.width, run.model.head_dim, run.sparsity or 0.0)
    refuse(
        run.allocation != "uniform" and ":" in run.pattern,
        f"the pattern {run.pattern} fixes the density of every layer: leave --allocation uniform",
    )
