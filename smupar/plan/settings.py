"""The settings of ``make_plan`` and ``parameterize``: their types, defaults and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from os import PathLike
from typing import TypedDict

from torch import Tensor, nn

from smupar.plan.forward.run_copy import Example
from smupar.plan.initial_values import InitStdSetting
from smupar.plan.masks.allocations import Allocation, as_density, uniform
from smupar.plan.masks.patterns import Pattern, parse_pattern
from smupar.plan.masks.sparsity import DensitySetting
from smupar.plan.roles.neighbours import RoleSetting
from smupar.refusals import finite, near, refuse, whole
from smupar.rules import DepthRule, Rule, get_depth_rule, get_rule

MaskSetting = Mapping[str, Tensor] | str | PathLike[str] | None


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


def refuse_unknown(settings: Settings) -> None:
    unknown = settings.keys() - Settings.__annotations__.keys()
    if unknown:
        known = ", ".join(Settings.__annotations__)
        first = min(unknown)
        meant = near(first, Settings.__annotations__)
        raise TypeError(f"unknown setting {first!r}{meant and ': '}{meant}; settings are {known} (density is 1 - sparsity)")


@dataclass(frozen=True)
class CheckedSettings:
    """The settings that can be checked without the model."""

    rule: Rule
    depth: DepthRule
    base_spread: Allocation
    base_density: Fraction
    alphas: Mapping[str, float]  # role -> tuned factor on the outputs of layers in this role
    seed: int
    kappa: float  # see ``rules.two_terms``; 0 for other rules
    pattern: Pattern
    density: DensitySetting
    masks: Mapping[str, Tensor]  # the user's own masks

    @classmethod
    def read(cls, settings: Settings) -> CheckedSettings:
        rule = get_rule(settings["rule"])
        base = settings["base_density"]
        spread = base if isinstance(base, Allocation) else uniform(base)
        alphas = {
            "embedding": finite(settings["alpha_input"], "alpha_input"),
            "unembedding": finite(settings["alpha_output"], "alpha_output"),
        }
        kappa, pattern = _kappa(rule, settings["kappa"]), parse_pattern(settings["pattern"])
        density, masks = settings["density"], settings["masks"] or {}
        assert isinstance(masks, Mapping), "masks must be read from their file first"
        return cls(
            rule=rule,
            depth=get_depth_rule(settings["depth"] or rule.depth),
            base_spread=spread,
            base_density=as_density(spread.density, "base_density"),
            alphas=alphas,
            seed=whole(settings["seed"], "seed"),
            kappa=kappa,
            pattern=pattern,
            density=pattern.default_density if density is None else density,
            masks=masks,
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
