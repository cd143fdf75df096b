"""Makes a Plan from rules, roles and densities. Nothing here changes a model, and both models may be on the meta device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from os import PathLike
from typing import TypedDict, Unpack

from torch import Tensor, nn

from smupar.plan.depth.branches import branch_factors, own_init, refuse_scaled_twice
from smupar.plan.depth.correspondence import Correspondence, correspond
from smupar.plan.forward.run_copy import Example
from smupar.plan.globs import layer_glob
from smupar.plan.initial_values import InitialValues, InitStdSetting
from smupar.plan.masks.allocations import Allocation, as_density, uniform
from smupar.plan.masks.patterns import parse_pattern, read_masks
from smupar.plan.masks.sparsity import DensitySetting, Sparsity, decide_sparsity
from smupar.plan.notes import Note
from smupar.plan.plan import Plan, PlanRow, PlanWarning
from smupar.plan.reminders import make_reminders
from smupar.plan.roles.evidence import NORMED_OUTPUT, Evidence, without_scores
from smupar.plan.roles.infer import GUESSED, ParamRole, infer_roles
from smupar.plan.roles.neighbours import RoleSetting
from smupar.plan.scales.find_attention import named_like_attention
from smupar.plan.scales.multipliers import Multiplier, chosen, find_multipliers, in_sums
from smupar.refusals import finite, refuse, whole
from smupar.rules import SP, DepthRule, Rule, depth_factor, get_depth_rule, get_rule, two_terms

MaskSetting = Mapping[str, Tensor] | str | PathLike[str] | None

# The rules rely on sums over many weights. With fewer than about 16 kept weights per neuron they are inaccurate.
MIN_WEIGHTS_PER_NEURON = 16


class Settings(TypedDict, total=False):
    """Keyword arguments of ``make_plan`` and ``parameterize``. The docstring of ``parameterize`` explains them."""

    rule: str
    density: DensitySetting | None
    base_density: float | Allocation
    pattern: str
    seed: int
    init_std: InitStdSetting
    alpha_input: float
    alpha_output: float
    masks: MaskSetting
    roles: Mapping[str, RoleSetting] | None
    delta: nn.Module | None
    example: Example | None
    branches: Sequence[str] | None
    depth: str | None
    multipliers: str
    kappa: float | None


# None means that the value follows from the models or from other settings, or that there is none.
DEFAULTS: Settings = {
    "rule": "smupar",
    "density": None,
    "base_density": 1.0,
    "pattern": "random",
    "seed": 0,
    "init_std": "fan_in",
    "alpha_input": 1.0,
    "alpha_output": 1.0,
    "masks": None,
    "roles": None,
    "delta": None,
    "example": None,
    "branches": None,
    "depth": None,
    "multipliers": "ask",
    "kappa": None,
}


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
    _refuse_unknown(settings)
    settings = {**DEFAULTS, **settings}
    checked = _CheckedSettings.read(settings)
    pattern = parse_pattern(settings["pattern"])
    roles, evidence = infer_roles(model, base, delta=settings["delta"], roles=settings["roles"], example=settings["example"])
    density = settings["density"]
    masks = settings["masks"] or {}
    assert isinstance(masks, Mapping)
    density = pattern.default_density if density is None else density
    sparsity = decide_sparsity(model, roles, pattern, density, checked.base_spread, masks)
    depth = correspond(model, base)
    branches = branch_factors(model, base, depth, checked.depth, settings["branches"], settings["example"])
    initial_values = InitialValues.of(model, base, roles, depth, checked.rule, settings["init_std"], has_values=has_values)
    choice = settings["multipliers"]
    has_factors = checked.rule is not SP or bool(branches)  # SP leaves the model's own numbers alone
    multipliers, summed = _multipliers(model, base, depth, evidence, choice) if has_factors else (chosen([], choice), [])
    unscored = without_scores(model, evidence, depth.modules, {role.name for role in roles if role.scaling})
    refuse_scaled_twice(multipliers, depth, branches, choice)
    rows = tuple(_row(role, sparsity, checked, initial_values, depth.m_depth(role.name)) for role in roles)
    output_factor = checked.forward("unembedding", _output_width(roles) * sparsity.live)
    return Plan(
        rule=checked.rule.name,
        rows=rows,
        pattern=pattern.name,
        seed=checked.seed,
        base_density=checked.base_density,
        alpha_input=checked.alphas["embedding"],
        alpha_output=checked.alphas["unembedding"],
        output_factor=output_factor,
        live_neurons=sparsity.live_neurons,
        depth=checked.depth.name if depth.lists else "none",
        branches=branches,
        notes=[
            *_notes(model, roles, sparsity, checked, depth),
            *initial_values.notes,
            *(own_init(model, depth, branches) if has_values else ()),
            *_about_set_numbers(multipliers),
            *_about_summed_numbers(summed),
            *_about_unscored(unscored),
            *evidence.notes,
        ],
        pending=make_reminders(
            model,
            roles,
            checked.rule,
            1.0 if NORMED_OUTPUT in evidence.notes else output_factor,
            checked.forward("embedding", Fraction(1)),
            () if choice == "own" else multipliers,
            unscored,
        ),
        multipliers=multipliers,
        unscored=unscored,
    )


def _refuse_unknown(settings: Settings) -> None:
    unknown = settings.keys() - Settings.__annotations__.keys()
    if unknown:
        known = ", ".join(Settings.__annotations__)
        raise TypeError(f"unknown setting {sorted(unknown)[0]!r}; settings are {known} (density is 1 - sparsity)")


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


@dataclass(frozen=True)
class _CheckedSettings:
    """The settings that can be checked without the model."""

    rule: Rule
    depth: DepthRule
    base_spread: Allocation
    base_density: Fraction
    alphas: Mapping[str, float]  # role -> tuned factor on the outputs of layers in this role
    seed: int
    kappa: float  # see ``rules.two_terms``; 0 for other rules

    @classmethod
    def read(cls, settings: Settings) -> _CheckedSettings:
        rule = get_rule(settings["rule"])
        base = settings["base_density"]
        spread = base if isinstance(base, Allocation) else uniform(base)
        alphas = {
            "embedding": finite(settings["alpha_input"], "alpha_input"),
            "unembedding": finite(settings["alpha_output"], "alpha_output"),
        }
        return cls(
            rule=rule,
            depth=get_depth_rule(settings["depth"] or rule.depth),
            base_spread=spread,
            base_density=as_density(spread.density, "base_density"),
            alphas=alphas,
            seed=whole(settings["seed"], "seed"),
            kappa=_kappa(rule, settings["kappa"]),
        )

    def forward(self, use: str, m_d: Fraction) -> float:
        """The forward factor of a layer, in its role ``use`` and with the width multiplier ``m_d``."""
        return (self.alphas[use] if self.rule.has_alphas else 1.0) * float(self.rule.forward[use].of(m_d, 1, 1))


def _kappa(rule: Rule, kappa: float | None) -> float:
    refuse(
        bool(rule.two_terms) == (kappa is None),
        f"rule {rule.name!r} needs kappa: observe a run of the proxy, and pass observation.kappa()"
        if rule.two_terms
        else f"rule {rule.name!r} has no kappa: leave kappa={kappa} out, or use rule='smupar-aligned'",
    )
    value = finite(0.0 if kappa is None else kappa, "kappa")
    refuse(value < 0, f"kappa must be a number, at least 0, got {kappa}")
    return value


# Rows


def _row(
    role: ParamRole, sparsity: Sparsity, checked: _CheckedSettings, initial_values: InitialValues, m_depth: Fraction
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


# Notes


def _notes(
    model: nn.Module, roles: list[ParamRole], sparsity: Sparsity, checked: _CheckedSettings, depth: Correspondence
) -> list[Note]:
    own_masks = Note(
        "given masks",
        "masks of your own: the rule assumes random masks, so run smupar.coord_check if yours come from magnitudes or "
        "gradients",
    )
    notes = [*([own_masks] if sparsity.given else []), *_about_thin(roles, sparsity)]
    noted: dict[Note, list[str]] = {}
    for role in roles:
        if role.note is not None and (role.note is not GUESSED or role.name in sparsity.densities):
            noted.setdefault(role.note, []).append(repr(role.name))
    for note, names in noted.items():
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        text = f"{', '.join(names[:4])}{more} {'is' if len(names) == 1 else 'are'} {note}"
        notes.append(Note(note.kind, text, note.is_caution))
    for path, multiplier in depth.lists.items():
        text = f"{path!r} has {float(multiplier):g} times as many layers as the base; depth rule {checked.depth.title}"
        notes.append(Note("depth", text, False))
    if not checked.rule.has_alphas and any(alpha != 1 for alpha in checked.alphas.values()):
        notes.append(Note("alphas", f"{checked.rule.title} does not use alpha_input and alpha_output", False))
    attention = any(named_like_attention(model))
    if attention and sparsity.live != 1:
        notes.append(
            Note(
                "neurons",
                "pattern 'neuron' also removes neurons inside attention heads: the scale of q.k must count live neurons only",
            )
        )
    has_custom_modules = any(not type(module).__module__.startswith("torch.nn") for module in model.modules())
    if not attention and has_custom_modules and checked.rule.attention_exponent == -1:
        text = "no attention was recognised; if the model has attention, scale its q.k by plan.attention_scale(head_dim)"
        notes.append(Note("attention", text, False))
    return notes


def _about_set_numbers(multipliers: tuple[Multiplier, ...]) -> list[Note]:
    """A note on the numbers that get the base's values."""
    shown = [f"{number.where} {number.value:g} -> {number.base_value:g}" for number in multipliers if number.is_set]
    text = f"set to the base's values, since Table 1 has every power of the width that is needed: {', '.join(shown)}"
    return [Note("multipliers", text, False)] if shown else []


def _about_summed_numbers(summed: list[Multiplier]) -> list[Note]:
    """A note on the numbers that have to follow the width, since they multiply sums over it."""
    text = f"left to follow the width, since they multiply only sums over the width: {', '.join(map(str, summed))}"
    return [Note("multipliers", text, False)] if summed else []


def _about_unscored(paths: tuple[str, ...]) -> list[Note]:
    """A note on modules that are named like attention but need no scale."""
    globs = dict.fromkeys(map(layer_glob, paths))
    text = (
        f"no attention scale is needed in {', '.join(globs)}: the example multiplies no queries and keys there, or only "
        "vectors of length 1, or vectors of fixed size without a softmax"
    )
    return [Note("attention", text, False)] if paths else []


def _about_thin(roles: list[ParamRole], sparsity: Sparsity) -> list[Note]:
    """A note on hidden weights that keep too few weights per neuron."""
    per_neuron = {
        role.name: sparsity.weights_per_neuron(role)
        for role in roles
        if role.role == "hidden" and role.name in sparsity.densities
    }
    thin = [name for name, kept in per_neuron.items() if kept < MIN_WEIGHTS_PER_NEURON]
    if not thin:
        return []
    fewest = min(thin, key=per_neuron.__getitem__)
    return [
        Note(
            "thin",
            f"{len(thin)} hidden weights keep fewer than {MIN_WEIGHTS_PER_NEURON} weights per neuron ({fewest!r}: "
            f"{per_neuron[fewest]:.3g}); the rule relies on sums over many weights and is inaccurate there",
        )
    ]
