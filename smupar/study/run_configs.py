"""Configurations of runs, as lists: without repetitions, in groups, and with some fields changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from smupar.lm.config.fields import changed
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.refusals import refuse

_Item = TypeVar("_Item")
_FIELDS = {field.name for kind in (ModelConfig, RunConfig) for field in dataclasses.fields(kind)} - {"model"}


def unique(configs: Iterable[RunConfig]) -> list[RunConfig]:
    """Each run once, in order of first appearance."""
    return list({config.id: config for config in configs}.values())


def grouped(items: Iterable[_Item], key: Callable[[_Item], str]) -> list[list[_Item]]:
    """The items grouped by key. Groups are in the order of their first items."""
    groups: dict[str, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def with_fields(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The run with some fields changed. Fields of the model are named without a prefix."""
    for name in values:
        refuse_unknown_field(name)
    return changed(config, values).normalised


def refuse_unknown_field(name: str) -> None:
    refuse(name not in _FIELDS, f"a run has no field called {name!r}: choose among {', '.join(sorted(_FIELDS))}")
