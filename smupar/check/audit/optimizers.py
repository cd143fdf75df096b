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
class _Held:
    optimizer: torch.optim.Optimizer
    family: str
    facts: OptimizerFacts  # facts about its family, which users may name for their own optimizer
    planned: list[tuple[PlanRow, dict[str, Any]]]  # (row of the plan, group) of each parameter
    is_masked: bool  # whether any parameter is masked
    lr: float | None


def optimizer_findings(
    model: nn.Module,
    plan: Plan,
    parameters: dict[str, nn.Parameter],
    all_: list[torch.optim.Optimizer],
    lr: float | None,
) -> Iterator[Finding]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    owners: Counter[str] = Counter()
    for optimizer in all_:
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
            yield from check(_Held(optimizer, family, facts, planned, masked, lr))
    if all_:
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


def _learning_rates(held: _Held) -> Iterator[Finding]:
    """The findings of the first check that has any. Later findings would only be its consequences."""
    yield from next(filter(None, (list(check(held)) for check in (_other_family, _not_hidden, _ratios, _rates))), [])


def _other_family(held: _Held) -> Iterator[Finding]:
    others = [group["family"] for group in held.optimizer.param_groups if group.get("family", held.family) != held.family]
    if others:
        name = name_of(held.optimizer)
        yield Finding(
            f"the groups were made for the {others[0]} family but given to {name}: "
            f"pass optimizer={name.lower()!r} to param_groups",
            "LR",
        )


def _not_hidden(held: _Held) -> Iterator[Finding]:
    if held.facts.hidden_only and any(row.role != "hidden" for row, _ in held.planned):
        yield Finding(
            f"{held.facts.name} was given parameters that are not hidden weights: use param_groups(..., "
            f"optimizer={held.facts.name.lower()!r}, only='hidden')",
            "optimizer",
        )


def _ratios(held: _Held) -> Iterator[Finding]:
    if problem := ratio_problem(held.optimizer):
        scheduled = any("initial_lr" in group for _, group in held.planned)
        base, wrong = wrong_groups(held.optimizer)
        ratio = float(wrong[0]["lr"]) / (base * wrong[0]["lr_factor"]) if base else math.nan
        names = " | ".join(group["name"] for group in wrong)
        members = tuple(row.name for row, group in held.planned if group is wrong[0])
        yield Finding(problem, "scheduler" if scheduled else "LR", names, ratio, members)


def _rates(held: _Held) -> Iterator[Finding]:
    ours = [(row, group) for row, group in held.planned if "lr_factor" in group]
    # If some groups come from param_groups, the rates of other groups are the user's choice. A scheduler stores its initial
    # rate as initial_lr, even while a warm-up holds lr at 0; OneCycleLR stores it as max_lr.
    started = [
        (row.name, row.lr_factor(held.family), float(group.get("max_lr", group.get("initial_lr", group["lr"]))))
        for row, group in ours or held.planned
    ]
    bases = Counter(float(f"{rate / factor:.5g}") for _, factor, rate in started if rate)
    if not bases:
        return
    flat = [rate for _, factor, rate in started if factor == 1 and rate]
    base = held.lr if held.lr is not None else flat[0] if flat else bases.most_common(1)[0][0]
    for name, factor, rate in started:
        if not math.isclose(rate, base * factor, rel_tol=1e-3):
            yield Finding(
                f"{name!r}: learning rate is {rate:.4g}, the plan says {base * factor:.4g} "
                f"(base {base:.4g} x {factor:.6g}, {held.family} family); "
                "build the optimizer from smupar.param_groups(model, plan, lr=...)",
                "LR",
                name,
                rate / (base * factor),
            )


def _unused_decay(held: _Held) -> Iterator[Finding]:
    """Finds weight decay that was passed to the optimizer itself. It has no effect, since every group has its own."""
    given = held.optimizer.defaults.get("weight_decay")
    default = inspect.signature(type(held.optimizer)).parameters.get("weight_decay")
    ours = [group for group in held.optimizer.param_groups if "lr_factor" in group]
    if given is None or default is None or given == default.default or not ours:
        return
    used = [decay for group in ours for decay in (group["weight_decay"], group["weight_decay"] * group["lr_factor"])]
    if not any(math.isclose(given, decay, rel_tol=1e-6) for decay in used):
        yield Finding(
            f"weight_decay={given:g} was given to {name_of(held.optimizer)}, where it has no effect because every group has "
            "its own: pass it to param_groups(..., weight_decay=...)",
            "optimizer",
        )


def _other_options(held: _Held) -> Iterator[Finding]:
    if held.is_masked and any(group.get("eps") == 0 for group in held.optimizer.param_groups):
        yield Finding(
            "with an epsilon of 0, the update of a weight off the mask is 0 / 0, which is NaN: leave epsilon at 1e-8",
            "optimizer",
        )
    if held.facts.hidden_only and any(group.get("adjust_lr_fn") == "match_rms_adamw" for group in held.optimizer.param_groups):
        yield Finding(
            f"{held.facts.name} with adjust_lr_fn='match_rms_adamw' scales its updates differently from the rule: use the "
            "default",
            "LR",
        )
