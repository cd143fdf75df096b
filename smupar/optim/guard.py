"""Guards against schedulers that erase the ratios between the groups' learning rates."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from smupar.model.seam import Step, optimizers, seam_of

# Rounding may change ratios of learning rates by this much.
_SAME = 1e-4


class LRRatioWarning(UserWarning):
    """The learning rates of two groups no longer have the ratio that the plan gave them."""


def guard(optimizer: Any) -> None:
    """Watches the ratios between the groups' learning rates, and warns at the first step at which they differ from the plan.

    Schedulers that set absolute values erase the factors: OneCycleLR with one max_lr, CosineAnnealingLR with eta_min.
    ``audit`` calls this function. It costs a comparison of a few numbers at each step. Groups that ``param_groups`` did not
    make are ignored.
    """
    for inner in optimizers(optimizer):
        if seam_of(inner).owner(_Guard) is None:
            watch = _Guard()
            seam_of(inner).add(watch, check_ratios=watch.check, count=watch.count)


def num_steps(optimizer: torch.optim.Optimizer) -> int:
    """Steps since the guard was added; at least 1 if the optimizer has state."""
    watch = seam_of(optimizer).owner(_Guard)
    return max(0 if watch is None else watch.num_steps, int(bool(optimizer.state)))


class _Guard:
    def __init__(self) -> None:
        self.has_warned = False
        self.num_steps = 0

    def check(self, step: Step) -> None:
        if not self.has_warned:
            problem = ratio_problem(step.optimizer)
            if problem:
                self.has_warned = True
                warnings.warn(problem, LRRatioWarning, stacklevel=5)  # the line that called optimizer.step()

    def count(self, step: Step) -> None:
        self.num_steps += 1


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_SAME, abs_tol=1e-30)


def wrong_groups(optimizer: torch.optim.Optimizer) -> tuple[float, list[dict[str, Any]]]:
    """The base learning rate that most groups of ``param_groups`` imply, and the groups that imply another. In a tie the first
    group decides."""
    groups = [group for group in optimizer.param_groups if "lr_factor" in group]
    on_gpu = any(isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu" for group in groups)
    if len(groups) < 2 or on_gpu:  # reading a GPU tensor at each step would stall the GPU
        return 0.0, []
    # During a step, ``layer_rates`` may have replaced the scheduled learning rate.
    bases = [float(group.get("scheduled_lr", group["lr"])) / group["lr_factor"] for group in groups]
    # the usual case, and fast: this runs at each step, for up to one group per hidden weight
    if all(_same(bases[0], other) for other in bases):
        return bases[0], []
    usual = max(bases, key=lambda base: sum(_same(base, other) for other in bases))
    return usual, [group for group, base in zip(groups, bases, strict=True) if not _same(base, usual)]


def ratio_problem(optimizer: torch.optim.Optimizer) -> str | None:
    """Says how the ratios between the groups of ``param_groups`` differ from the plan; None if they do not."""
    base, wrong = wrong_groups(optimizer)
    if not wrong:
        return None
    shown = "; ".join(
        f"{group['name']!r}: lr {float(group['lr']):.4g} instead of base {base:.4g} x {group['lr_factor']:.4g}"
        for group in wrong
    )
    return (
        f"the learning rates of the optimizer's groups lost their ratios ({shown}). A scheduler that sets absolute values does "
        "this: give OneCycleLR max_lr=[g['lr'] for g in optimizer.param_groups], a list made before the scheduler. Or use "
        "CosineAnnealingLR with eta_min=0, or LambdaLR, which multiplies."
    )
