"""Finds numbers in a model that follow its width but are not sizes, such as sqrt(d) after an embedding or 1 / sqrt(d) before a
head.

A rule holds if these factors are the same at every width, since Table 1 already has every power of the width that is needed.
The factors are found by comparing the model with its base: floating-point attributes, buffers of one element and fields of
configs that differ. A whole number that differs is usually a size. It counts only if the source of the forward pass takes a
root or a power of it, or divides by it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from smupar.plan.scales.find_attention import find_attentions, numbers
from smupar.plan.scales.source import evaluated, may_read, powers_in_source
from smupar.refusals import refuse

CHOICES = ("ask", "base", "own")


@dataclass(frozen=True)
class Multiplier:
    """A number that the forward pass may multiply by, and that follows the width."""

    path: str  # path of the module
    name: str  # attribute, with a dot for a field of a config
    value: float
    base_value: float
    can_be_set: bool = True  # False if the model also uses the number as a size, or computes it from a size
    is_set: bool = False  # whether ``parameterize`` sets it to the base's value

    @property
    def where(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")

    def may_enter_as(self, number: float) -> bool:
        """Whether ``number``, by which the base's forward pass multiplies, may come from this multiplier. It may be the
        multiplier's value in the base, the root of this value, the inverse of the value, or the inverse of the root."""
        powers = (self.base_value**exponent for exponent in (1, -1, 0.5, -0.5)) if self.base_value > 0 else [self.base_value]
        return any(math.isclose(number, power, rel_tol=1e-5) for power in powers)

    def __str__(self) -> str:
        return f"{self.where} = {self.value:g} (base: {self.base_value:g})"


def find_multipliers(model: nn.Module, base: nn.Module, paths: Mapping[str, str] | None = None) -> list[Multiplier]:
    """All numbers of the model that differ from the base's and are not just sizes. Attention scales are left out, since they
    have a rule of their own. ``paths`` maps module paths of the model to those of a base of another depth."""
    attentions = find_attentions(model)
    scales = {(attention.holder, attention.field) for attention in attentions}
    sizes = {attention.path: attention.head_dim for attention in attentions}
    others = dict(base.named_modules(remove_duplicate=False))
    configs: set[int] = set()
    kinds = {type(module): module for module in model.modules()}.values()
    multipliers = []
    for path, module in model.named_modules():
        other = others.get(path if paths is None else paths.get(path, path))
        if other is None:
            continue
        pairs = {pair[0]: pair for pair in _powers(module, other)}
        fields = (pair for pair in _fields(module, other, configs) if _may_be_read(pair[0], kinds))
        pairs |= {pair[0]: pair for pair in (*_attributes(module, other), *fields)}
        multipliers += [
            Multiplier(path, name, value, base_value, can_be_set)
            for name, value, base_value, can_be_set in pairs.values()
            if (path, name) not in scales and not (path in sizes and value == sizes[path])
        ]
    return multipliers


# name, value, value in the base, whether it can be set
_Pair = tuple[str, float, float, bool]


def _attributes(module: nn.Module, other: nn.Module) -> Iterator[_Pair]:
    numbers_here, base_numbers = numbers(module), numbers(other)
    for name, value in numbers_here.items():
        base_value = base_numbers.get(name)
        if base_value is None and getattr(getattr(other, name, None), "is_meta", False):
            base_value = _as_power_of_size(value, module, other)
        if base_value is not None and _differ(value, base_value):
            yield name, value, base_value, True


def _as_power_of_size(value: float, module: nn.Module, other: nn.Module) -> float | None:
    """The value that a number has in the base, if it is a power of one of the module's scaling sizes; otherwise None. This
    serves bases on the meta device, whose buffers have no values."""
    pairs = zip(module.parameters(), other.parameters(), strict=False)
    sizes = {sizes for ours, base in pairs for sizes in zip(ours.shape, base.shape, strict=False) if sizes[0] != sizes[1]}
    for size, base_size in sizes:
        for exponent in (0.5, -0.5, 1.0, -1.0):
            if math.isclose(value, size**exponent, rel_tol=1e-5):
                return float(base_size**exponent)
    return None


def _fields(module: nn.Module, other: nn.Module, seen: set[int]) -> Iterator[_Pair]:
    """Floating-point fields of configs, which models keep as attributes. A config that many modules share is read once."""
    for name, value in vars(module).items():
        config, base = as_config(value), as_config(getattr(other, name, None))
        if name.startswith("_") or config is None or base is None or id(value) in seen:
            continue
        seen.add(id(value))
        for field, number in config.items():
            other_number = base.get(field)
            if not isinstance(number, (int, float)) or not isinstance(other_number, (int, float)):
                continue
            if float in (type(number), type(other_number)) and "init" not in field and _differ(number, other_number):
                yield f"{name}.{field}", float(number), float(other_number), True


def _may_be_read(name: str, modules: Collection[nn.Module]) -> bool:
    """Whether the forward pass of some module may read a field. Others, such as a factor of all sizes, only decide sizes."""
    return any(may_read(module, name.rpartition(".")[2]) for module in modules)


def as_config(value: Any) -> Mapping[str, Any] | None:
    """The fields of a plain object that only holds settings; None for everything else."""
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value) or not hasattr(value, "__dict__"):
        return None
    return {name: field for name, field in vars(value).items() if not name.startswith("_")}


def _powers(module: nn.Module, other: nn.Module) -> Iterator[_Pair]:
    for power in powers_in_source(module):
        value, base_value = evaluated(power.expression, module), evaluated(power.expression, other)
        if type(value) in (int, float) and type(base_value) in (int, float) and _differ(value, base_value):
            yield power.source, value, base_value, power.can_be_set


def _differ(value: float, other: float) -> bool:
    return not math.isclose(value, other, rel_tol=1e-5) and math.isfinite(value) and math.isfinite(other)


# The user's choice


def in_sums(multipliers: list[Multiplier], seen: Collection[tuple[str, float]], paths: Mapping[str, str]) -> list[Multiplier]:
    """The multipliers that, as an example shows, multiply only sums over the width, such as 1 / sqrt(d) in a dot product of two
    layers' outputs.

    seen   (module path in the base, number) for each number that multiplies only such sums
    paths  module path of the model -> of the base
    """
    fitting = [
        {
            (path, number)
            for path, number in seen
            if path == paths.get(multiplier.path, multiplier.path) and multiplier.may_enter_as(number)
        }
        for multiplier in multipliers
    ]
    counts = Counter(pair for pairs in fitting for pair in pairs)  # two multipliers that fit one number cannot be told apart
    return [
        multiplier
        for multiplier, pairs in zip(multipliers, fitting, strict=True)
        if pairs and all(counts[pair] == 1 for pair in pairs)
    ]


def chosen(multipliers: list[Multiplier], choice: str) -> tuple[Multiplier, ...]:
    """The multipliers as the plan records them, given the user's choice."""
    refuse(choice not in CHOICES, f"multipliers must be one of {', '.join(CHOICES)}, got {choice!r}")
    return tuple(replace(number, is_set=choice == "base" and number.can_be_set) for number in multipliers)


@torch.no_grad()
def set_multiplier(model: nn.Module, path: str, name: str, value: float) -> None:
    """Writes a number into an attribute, a buffer or a field of a config. An int stays an int if the number is whole."""
    *outer, leaf = name.split(".")
    owner: Any = model.get_submodule(path)
    for part in outer:
        owner = getattr(owner, part)
    old = getattr(owner, leaf)
    if isinstance(old, Tensor):
        old.fill_(value)
    else:
        setattr(owner, leaf, type(old)(value) if float(value).is_integer() or type(old) is float else value)
