"""Grids of runs: any field of a run's configuration, by name, with the values it takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from smupar.lm.config import ModelConfig, RunConfig

_MODEL = {field.name for field in dataclasses.fields(ModelConfig)}
_RUN = {field.name for field in dataclasses.fields(RunConfig)} - {"model"}


def with_fields(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The run with some fields changed; those of the model go by their own names."""
    unknown = [name for name in values if name not in _MODEL | _RUN]
    if unknown:
        raise ValueError(f"a run has no field called {unknown[0]!r}: choose among {', '.join(sorted(_MODEL | _RUN))}")
    model = dataclasses.replace(config.model, **{name: value for name, value in values.items() if name in _MODEL})
    return dataclasses.replace(config, model=model, **{name: value for name, value in values.items() if name in _RUN})


def grid(config: RunConfig, axes: Mapping[str, Sequence[Any]]) -> Iterator[RunConfig]:
    """Every combination of the axes' values."""
    for name, values in axes.items():
        if not values:
            raise ValueError(f"the axis {name} has no values")
    for combination in itertools.product(*axes.values()):
        yield with_fields(config, dict(zip(axes, combination, strict=True)))


def parse_axes(texts: Iterable[str]) -> dict[str, list[Any]]:
    parsed: dict[str, list[Any]] = {}
    for name, values in map(parse_axis, texts):
        if name in parsed:
            raise ValueError(f"the axis {name} is given twice: write {name}=first,second,...")
        parsed[name] = values
    return parsed


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """``lr=0.01,0.02``, ``lr=2^-10..2^-4`` (all powers between) or ``rule=sp,smupar`` into a field's name and its values."""
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in _MODEL | _RUN:
        raise ValueError(f"a run has no field called {name!r}: choose among {', '.join(sorted(_MODEL | _RUN))}")
    words = [word.strip() for word in values.split(",") if word.strip()]
    if not words:
        raise ValueError(
            f"the axis {name} has no values: write {name}=first,second,... or, for powers of two, {name}=2^-8..2^-4"
        )
    return name, [value for word in words for value in _values(name, word)]


def _values(name: str, word: str) -> list[Any]:
    first, dots, last = word.partition("..")
    if dots:
        low, high = _exponent(name, first), _exponent(name, last)
        return [2.0**exponent for exponent in range(low, high + 1)]
    if word.startswith("2^"):
        return [2.0 ** float(word[2:])]
    return [_typed(name, word)]


def _exponent(name: str, word: str) -> int:
    try:
        if not word.startswith("2^"):
            raise ValueError
        return int(word[2:])
    except ValueError as error:
        raise ValueError(f"{name}: a range is written 2^-8..2^-4, got {word!r}") from error


def _typed(name: str, word: str) -> Any:
    hint = get_type_hints(ModelConfig if name in _MODEL else RunConfig)[name]
    kinds = [kind for kind in (get_args(hint) or (hint,)) if isinstance(kind, type)]
    if bool in kinds:
        if word.lower() not in ("true", "false"):
            raise ValueError(f"{name} is true or false, got {word!r}")
        return word.lower() == "true"
    if type(None) in kinds and word.lower() == "none":
        return None
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(word)
            except ValueError as error:
                raise ValueError(f"{name} takes numbers, got {word!r}") from error
    return word
