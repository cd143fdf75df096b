"""Audits the optimizers of a model: their groups, learning rates and options."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smupar.check.audit.findings import Finding
from smupar.model.weights import weight_of
from smupar.optim.guard import ratio_problem, wrong_groups
from smupar.plan.facts.optimizers import FAMILIES, OPTIMIZERS, OptimizerFacts, facts_of, family_of, name_of
from smupar.plan.plan import Plan, PlanRow


@dataclass(frozen=True)
class _Audited:
    """An optimizer, with the rows of the plan for the parameters that it trains."""

    optimizer: torch.optim.Optimizer
    family: str  # for an optimizer that smupar does not know, the family that the user named
    facts: OptimizerFacts  # of an optimizer of this family
    planned: list[tuple[PlanRow, dict[str, Any]]]  # (row of the plan, group) of each parameter
    is_masked: bool  # whether any parameter is masked
    lr: float | None


def optimizer_findings(
    model: nn.Module,
    plan: Plan,
    parameters: dict[str, nn.Parameter],
    all_optimizers: list[torch.optim.Optimizer],
    lr: float | None,
) -> Iterator[Finding]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    owners: Counter[str] = Counter()
    for optimizer in all_optimizers:
        owned = [(names[id(p)], group) for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        owners.update(name for name, _ in owned)
        try:
            family = _family(optimizer)
        except ValueError as error:
            yield Finding(str(error), "optimizer")
            continue
        facts = next(row for row in OPTIMIZERS.values() if row.family == family)
        planned = [(plan[name], group) for name, group in owned if name in plan]
        masked = any(weight_of(model, name).is_masked for name, _ in owned)
        for check in (_learning_rates, _unused_decay, _other_options):
            yield from check(_Audited(optimizer, family, facts, planned, masked, lr))
    if all_optimizers:
        yield from _ownership(parameters, owners)


def _family(optimizer: torch.optim.Optimizer) -> str:
    try:
        return family_of(optimizer)
    except ValueError:
        labels = {str(group["family"]) for group in optimizer.param_groups if "family" in group}
        if len(labels) != 1 or not labels <= set(FAMILIES.values()) or facts_of(optimizer).no_rule:
            raise
        return labels.pop()  # an unknown optimizer, whose family the user named in param_groups


def _ownership(parameters: dict[str, nn.Parameter], owners: Counter[str]) -> Iterator[Finding]:
    for name, parameter in parameters.items():
        if parameter.requires_grad and not owners[name]:
            yield Finding(
                f"{name!r} is trained but in no optimizer group: build the groups with smupar.param_groups, "
                "give it a group with extra=[...], or freeze it",
                "optimizer",
                name,
            )
        if owners[name] > 1:
            yield Finding(
                f"{name!r} is in {owners[name]} groups, so it would be updated {owners[name]} times per step: with two "
                "optimizers use param_groups(..., only='hidden') for one and only='rest' for the other",
                "optimizer",
                name,
            )


def _learning_rates(audited: _Audited) -> Iterator[Finding]:
    """Runs four checks in turn, until one has findings. Findings of the later checks would only be consequences."""
    yield from next(filter(None, (list(check(audited)) for check in (_other_family, _not_hidden, _ratios, _rates))), [])


def _other_family(audited: _Audited) -> Iterator[Finding]:
    others = [
        group["family"] for group in audited.optimizer.param_groups if group.get("family", audited.family) != audited.family
    ]
    if others:
        name = name_of(audited.optimizer)
        yield Finding(
            f"the groups were made for the {others[0]} family but given to {name}: "
            f"pass optimizer={name.lower()!r} to param_groups",
            "LR",
        )


def _not_hidden(audited: _Audited) -> Iterator[Finding]:
    if audited.facts.hidden_only and any(row.role != "hidden" for row, _ in audited.planned):
        yield Finding(
            f"{audited.facts.name} was given parameters that are not hidden weights: use param_groups(..., "
            f"optimizer={audited.facts.name.lower()!r}, only='hidden')",
            "optimizer",
        )


def _ratios(audited: _Audited) -> Iterator[Finding]:
    if problem := ratio_problem(audited.optimizer):
        scheduled = any("initial_lr" in group for _, group in audited.planned)
        base, wrong = wrong_groups(audited.optimizer)
        ratio = float(wrong[0]["lr"]) / (base * wrong[0]["lr_factor"]) if base else math.nan
        names = " | ".join(group["name"] for group in wrong)
        members = tuple(row.name for row, group in audited.planned if group is wrong[0])
        yield Finding(problem, "scheduler" if scheduled else "LR", names, ratio, members)


def _rates(audited: _Audited) -> Iterator[Finding]:
    ours = [(row, group) for row, group in audited.planned if "lr_factor" in group]
    # If some groups come from param_groups, the rates of other groups are the user's choice. Schedulers store the rate to
    # compare as initial_lr, even while a warm-up holds lr at 0; OneCycleLR stores it as max_lr.
    started = [
        (row.name, row.lr_factor(audited.family), float(group.get("max_lr", group.get("initial_lr", group["lr"]))))
        for row, group in ours or audited.planned
    ]
    bases = Counter(float(f"{rate / factor:.5g}") for _, factor, rate in started if rate)
    if not bases:
        return
    flat = [rate for _, factor, rate in started if factor == 1 and rate]
    base = audited.lr if audited.lr is not None else flat[0] if flat else bases.most_common(1)[0][0]
    for name, factor, rate in started:
        if not math.isclose(rate, base * factor, rel_tol=1e-3):
            yield Finding(
                f"{name!r}: learning rate is {rate:.4g}, the plan says {base * factor:.4g} "
                f"(base {base:.4g} x {factor:.6g}, {audited.family} family); "
                "build the optimizer from smupar.param_groups(model, plan, lr=...)",
                "LR",
                name,
                rate / (base * factor),
            )


def _unused_decay(audited: _Audited) -> Iterator[Finding]:
    """Finds weight decay that was passed to the optimizer itself, where it has no effect, since every group has its own."""
    given = audited.optimizer.defaults.get("weight_decay")
    default = inspect.signature(type(audited.optimizer)).parameters.get("weight_decay")
    ours = [group for group in audited.optimizer.param_groups if "lr_factor" in group]
    if given is None or default is None or given == default.default or not ours:
        return
    used = [decay for group in ours for decay in (group["weight_decay"], group["weight_decay"] * group["lr_factor"])]
    if not any(math.isclose(given, decay, rel_tol=1e-6) for decay in used):
        yield Finding(
            f"weight_decay={given:g} was given to {name_of(audited.optimizer)}, where it has no effect because every group has "
            "its own: pass it to param_groups(..., weight_decay=...)",
            "optimizer",
        )


def _other_options(audited: _Audited) -> Iterator[Finding]:
    if audited.is_masked and any(group.get("eps") == 0 for group in audited.optimizer.param_groups):
        yield Finding(
            "with an epsilon of 0, the update of a weight off the mask is 0 / 0, which is NaN: leave epsilon at 1e-8",
            "optimizer",
        )
    if audited.facts.hidden_only and any(
        group.get("adjust_lr_fn") == "match_rms_adamw" for group in audited.optimizer.param_groups
    ):
        yield Finding(
            f"{audited.facts.name} with adjust_lr_fn='match_rms_adamw' scales its updates differently from the rule: use the "
            "default",
            "LR",
        )
