"""Fields of configurations, which may be nested: their defaults, changes to them, and differences between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any, TypeVar

_Config = TypeVar("_Config")


def changed(config: _Config, values: Mapping[str, Any]) -> _Config:
    """The configuration with some fields changed. Fields of nested configurations are named without a prefix."""
    assert is_dataclass(config)
    assert not isinstance(config, type)
    nested = {f.name: changed(old, values) for f in fields(config) if is_dataclass(old := getattr(config, f.name))}
    nested = {name: new for name, new in nested.items() if new is not getattr(config, name)}
    changes = {f.name: values[f.name] for f in fields(config) if f.name in values}
    return replace(config, **nested, **changes) if nested or changes else config


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested fields as one flat dictionary, in the same order, under the names of the innermost fields."""
    fields_of: dict[str, Any] = {}
    for name, value in values.items():
        fields_of |= flat(value) if isinstance(value, Mapping) else {name: value}
    return fields_of


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """A sentence on the fields that differ between stored and requested values; empty if none differs."""
    changes = [(name, old.get(name), new.get(name)) for name in {**old, **new}]
    phrases = [f"{name} {there} there, {here} here" for name, there, here in changes if there != here]
    return "; ".join(phrases[:4]) + (f"; and {len(phrases) - 4} more" if len(phrases) > 4 else "")


def default_of(item: Field[Any]) -> Any:
    """A field's default; ``MISSING`` if it has none."""
    return item.default if item.default_factory is MISSING else item.default_factory()
