"""The check before the first step, which the callbacks of all trainers share."""

from __future__ import annotations

from typing import Any

from torch import nn

from smupar.check.audit.audit import audit
from smupar.plan.plan import Plan
from smupar.refusals import refuse


def check_start(model: nn.Module, plan: Plan, optimizer: Any, *, trained: bool, where: str) -> None:
    """Audits model and optimizer, and refuses to train while a reminder of the plan is open. ``where`` says where to settle
    it."""
    left = audit(model, plan, optimizer, trained=trained)
    names = [line.partition(":")[0] for line in left]
    refuse(
        left,
        f"the plan still asks for {', '.join(names)}, but training would start without it: {'; '.join(left)} "
        f"If nothing is to be set, say so {where}: {'; '.join(f'plan.settle({name!r})' for name in names)}",
    )
