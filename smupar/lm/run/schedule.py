"""Learning-rate schedules of the paper's Table 4, as a share of the peak: a pure function of the step."""

from __future__ import annotations

import math

from smupar.lm.config.run_config import RunConfig

# Share of the peak at the end: Table 4's "10x" decay.
_FINAL_SHARE = 0.1


def lr_share(step: int, config: RunConfig) -> float:
    """The share of the peak at a step: linear warm-up, then the configured schedule over the remaining steps."""
    warmup = config.warmup_steps
    if step < config.steps:
        step %= config.round_steps
    if step < warmup:
        return (step + 1) / warmup
    passed = (step - warmup) / max(1, config.round_steps - warmup)
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "linear-to-zero":
        return 1 - passed
    if config.schedule == "linear":
        return 1 - (1 - _FINAL_SHARE) * passed
    return _FINAL_SHARE + (1 - _FINAL_SHARE) * (1 + math.cos(math.pi * passed)) / 2
