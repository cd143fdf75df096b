"""The audit before step 0: compares a model and its optimizer with the plan, and names every difference with its remedy.

Everything is measured: init and density from the weights, forward factors by running the layer, and learning rates from the
optimizer's groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smupar.check.audit.findings import AuditError, Finding
from smupar.check.audit.forward import branch_findings, factor_findings
from smupar.check.audit.optimizers import optimizer_findings
from smupar.check.audit.weights import weight_findings
from smupar.model.attached import masks_move, unwrapped
from smupar.model.seam import optimizers
from smupar.model.weights import weight_of
from smupar.optim.guard import guard, num_steps
from smupar.plan.plan import Plan, PlanWarning
from smupar.plan.reminders import shows_scale


def audit(
    model: nn.Module, plan: Plan, optimizer: Any = None, *, lr: float | None = None, trained: bool | None = None
) -> list[str]:
    """Compares model and optimizer with the plan. Raises AuditError with every difference. Returns the reminders that are still
    open.

    Call it before the first step. Once training has begun, the std of weights is not checked. ``trained`` says whether training
    has begun; by default the optimizer's state, and the steps that ``guard`` has counted, show it. With ``lr``, the base
    learning rate is checked too; without ``lr``, only the ratios between learning rates are. ``optimizer`` may be a list.

    The audit also calls ``guard``, which watches schedulers that are made later.
    """
    findings = differences(model, plan, optimizer, lr=lr, trained=trained)
    if findings:
        raise AuditError(findings)
    guard(optimizer)
    left = [f"{name}: {text}" for name, text in unsettled(model, plan).items()]
    for line in left:
        warnings.warn(f"not set yet: {line}", PlanWarning, stacklevel=2)
    return left


def unsettled(model: nn.Module, plan: Plan) -> dict[str, str]:
    """The plan's open reminders, without the attention scale if the model shows that it is set."""
    seen = "attention_scale" in plan.pending and shows_scale(unwrapped(model), plan.attention_scale)
    return {name: text for name, text in plan.pending.items() if not (seen and name == "attention_scale")}


def differences(
    model: nn.Module, plan: Plan, optimizer: Any = None, *, lr: float | None = None, trained: bool | None = None
) -> list[Finding]:
    """The differences that ``audit`` would raise, as a list."""
    model, all_optimizers = unwrapped(model), optimizers(optimizer)
    parameters = dict(model.named_parameters())
    if trained is None:
        trained = any(num_steps(optimizer) for optimizer in all_optimizers)
    findings = list(_other_parameters(plan, parameters, all_optimizers))
    rows = [row for row in plan if row.name in parameters]
    for row in rows:
        findings += weight_findings(model, weight_of(model, row.name), row, check_std=not trained and not masks_move(model))
    for row in rows:
        for path, factor in row.forward:
            findings += factor_findings(model.get_submodule(path), path, factor, row, parameters[row.name].dtype)
    for path, factor in plan.branches:
        findings += branch_findings(model.get_submodule(path), path, factor)
    return [*findings, *optimizer_findings(model, plan, parameters, all_optimizers, lr)]


def _other_parameters(
    plan: Plan, parameters: dict[str, nn.Parameter], all_optimizers: list[torch.optim.Optimizer]
) -> Iterator[Finding]:
    """Findings about parameters that only the plan or only the model has. Parameters in the user's own groups are fine."""
    for row in plan:
        if row.name not in parameters:
            yield Finding(
                f"{row.name!r} is not in the model: the plan is for another model, make a new plan", "another model", row.name
            )
    own_groups = [group for optimizer in all_optimizers for group in optimizer.param_groups if "lr_factor" not in group]
    in_own_groups = {id(parameter) for group in own_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        if name not in plan and id(parameter) not in in_own_groups:
            yield Finding(
                f"{name!r} is not in the plan: add it before parameterize, or give it a group with param_groups(extra=[...])",
                "another model",
                name,
            )
