"""Makes a Plan from rules, roles and densities. Nothing here changes a model, and both models may be on the meta device."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from typing import Unpack

from torch import nn

from smupar.plan.depth.branches import branch_factors, own_init, refuse_scaled_twice
from smupar.plan.depth.correspondence import Correspondence, correspond
from smupar.plan.initial_values import InitialValues
from smupar.plan.masks.patterns import read_masks
from smupar.plan.masks.sparsity import Sparsity, decide_sparsity
from smupar.plan.plan import Plan, PlanRow, PlanWarning
from smupar.plan.remarks import about_set_numbers, about_summed_numbers, about_unscored, notes_on
from smupar.plan.reminders import make_reminders
from smupar.plan.roles.evidence import Evidence, without_scores
from smupar.plan.roles.infer import ParamRole, infer_roles
from smupar.plan.scales.multipliers import Multiplier, chosen, find_multipliers, in_sums
from smupar.plan.settings import DEFAULTS, CheckedSettings, Settings, refuse_unknown
from smupar.refusals import refuse
from smupar.rules import SP, depth_factor, two_terms


def make_plan(model: nn.Module, *, base: nn.Module, **settings: Unpack[Settings]) -> Plan:
    """Makes the plan that ``parameterize`` would carry out, without changing the model.

    The arguments are those of ``parameterize``, whose docstring explains them.
    """
    settings["masks"] = read_masks(settings.get("masks"))
    plan = planned(model, base, settings)
    warn(cautions(plan), stacklevel=3)
    return plan


def planned(model: nn.Module, base: nn.Module, settings: Settings, *, has_values: bool = True) -> Plan:
    """Makes the plan, as a pure function of models and settings. ``masks`` must hold tensors, not name a file.
    ``has_values`` is False if the model's tensors are uninitialised, as after ``to_empty``.

    The caller issues the plan's warnings, so that they point at the user's line.
    """
    refuse_unknown(settings)
    refuse(
        not isinstance(base, nn.Module), f"base must be a module, got {base!r}: pass the model at base width, make(base_width)"
    )
    settings = {**DEFAULTS, **settings}
    checked = CheckedSettings.read(settings)
    roles, evidence = infer_roles(model, base, delta=settings["delta"], roles=settings["roles"], example=settings["example"])
    sparsity = decide_sparsity(model, roles, checked.pattern, checked.density, checked.base_spread, checked.masks)
    depth = correspond(model, base)
    branches = branch_factors(model, base, depth, checked.depth, settings["branches"], settings["example"])
    initial_values = InitialValues.of(model, base, roles, depth, checked.rule, settings["init_std"], has_values=has_values)
    choice = settings["multipliers"]
    has_factors = checked.rule is not SP or bool(branches)  # SP leaves the model's own numbers alone
    multipliers, summed = _multipliers(model, base, depth, evidence, choice) if has_factors else (chosen([], choice), [])
    shows_none = evidence.usage is not None and not evidence.usage.attention
    unscored = without_scores(model, evidence, depth.modules, {role.name for role in roles if role.scaling})
    refuse_scaled_twice(multipliers, depth, branches, choice)
    rows = tuple(_row(role, sparsity, checked, initial_values, depth.m_depth(role.name)) for role in roles)
    output_factor = checked.forward("unembedding", _output_width(roles) * sparsity.live)
    return Plan(
        rule=checked.rule.name,
        rows=rows,
        pattern=checked.pattern.name,
        seed=checked.seed,
        base_density=checked.base_density,
        alpha_input=checked.alphas["embedding"],
        alpha_output=checked.alphas["unembedding"],
        output_factor=output_factor,
        live_neurons=sparsity.live_neurons,
        depth=checked.depth.name if depth.lists else "none",
        branches=branches,
        notes=[
            *notes_on(model, roles, sparsity, checked, depth, shows_no_attention=shows_none),
            *initial_values.notes,
            *(own_init(model, depth, branches) if has_values else ()),
            *about_set_numbers(multipliers),
            *about_summed_numbers(summed),
            *about_unscored(unscored),
            *evidence.notes,
        ],
        pending=make_reminders(
            model,
            roles,
            checked.rule,
            1.0 if evidence.has_normed_outputs else output_factor,
            checked.forward("embedding", Fraction(1)),
            () if choice == "own" else multipliers,
            unscored,
        ),
        multipliers=multipliers,
        unscored=unscored,
    )


def _multipliers(
    model: nn.Module, base: nn.Module, depth: Correspondence, evidence: Evidence, choice: str
) -> tuple[tuple[Multiplier, ...], list[Multiplier]]:
    """(numbers of the model that follow its width, with the user's choice; numbers that have to follow it, since they multiply
    sums over the width)."""
    following = find_multipliers(model, base, depth.modules)
    summed = in_sums(following, evidence.in_sums, depth.modules)
    return chosen([number for number in following if number not in summed], choice), summed


def cautions(plan: Plan) -> list[str]:
    """The texts of the notes that are also warnings."""
    return [note.text for note in plan.notes if note.is_caution]


def warn(cautions: list[str], *, stacklevel: int) -> None:
    for text in cautions:
        warnings.warn(text, PlanWarning, stacklevel=stacklevel)


def _row(
    role: ParamRole, sparsity: Sparsity, checked: CheckedSettings, initial_values: InitialValues, m_depth: Fraction
) -> PlanRow:
    rule, multipliers, base_std = checked.rule, sparsity.multipliers(role), initial_values.stds.get(role.name)
    width_in, width_out, density_mult = multipliers
    m_d = width_out if role.role == "embedding" else width_in
    return PlanRow(
        name=role.name,
        role=role.role,
        shape=role.shape,
        in_dims=role.in_dims,
        scaling=role.scaling,
        width_in=width_in,
        width_out=width_out,
        pattern=sparsity.pattern_of(role),
        density=sparsity.density(role),
        num_kept=sparsity.num_kept(role),
        density_mult=density_mult,
        init_std=None if base_std is None else base_std * math.sqrt(rule.init_var[role.role].of(*multipliers)),
        depth_mult=m_depth,
        lr_factors={
            family: float(powers[role.role].of(*multipliers))
            * depth_factor(m_depth, checked.depth.lr(family))
            * (_two_terms(role, sparsity, checked.kappa) if family in rule.two_terms else 1.0)
            for family, powers in rule.lr.items()
            if role.role in powers
        },
        eps_factor=float(rule.eps[role.role].of(*multipliers)) * depth_factor(m_depth, checked.depth.eps),
        forward=tuple((path, checked.forward(use, m_d)) for path, use in role.uses),
        note=str(role.note or ""),
        kept_factor=initial_values.factors.get(role.name, 1.0),
    )


def _two_terms(role: ParamRole, sparsity: Sparsity, kappa: float) -> float:
    if role.role != "hidden":
        return 1.0
    width_in, _, density_mult = sparsity.multipliers(role)
    m = float(width_in * density_mult)
    return two_terms(m, sparsity.weights_per_neuron(role) / m, kappa)


def _output_width(roles: list[ParamRole]) -> Fraction:
    """The width multiplier m_d of the logits. A model without an unembedding may compute its logits with the embedding, so then
    the embedding's m_d is taken."""
    readouts = [role.width_in for role in roles if role.role == "unembedding"]
    tables = [role.width_out for role in roles if role.role == "embedding"]
    return next(iter(readouts + tables), None) or max((role.width_out for role in roles), default=Fraction(1))
