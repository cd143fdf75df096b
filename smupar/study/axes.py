"""Grids of runs. An axis is a field of the run's configuration with the values that it takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.refusals import refuse
from smupar.study.run_configs import refuse_unknown_field, with_fields

_SMALLEST, _LARGEST = -1022, 1023  # exponents of normal floating-point numbers, far more than an axis needs
_MODEL = {field.name for field in dataclasses.fields(ModelConfig)}


def grid(config: RunConfig, axes: Mapping[str, Sequence[Any]]) -> Iterator[RunConfig]:
    """Every combination of the axes' values."""
    for name, values in axes.items():
        refuse(not values, f"the axis {name} has no values")
    for combination in itertools.product(*axes.values()):
        yield with_fields(config, dict(zip(axes, combination, strict=True)))


def parse_axes(texts: Iterable[str]) -> dict[str, list[Any]]:
    parsed: dict[str, list[Any]] = {}
    for name, values in map(parse_axis, texts):
        refuse(name in parsed, f"the axis {name} is given twice: write {name}=first,second,...")
        parsed[name] = values
    return parsed


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """``lr=0.01,0.02``, ``lr=2^-10..2^-4`` (all powers between) or ``rule=sp,smupar`` into a field's name and its values."""
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    refuse_unknown_field(name)
    words = [word.strip() for word in values.split(",") if word.strip()]
    refuse(not words, f"the axis {name} has no values: write {name}=first,second,... or, for powers of two, {name}=2^-8..2^-4")
    return name, [value for word in words for value in _values(name, word)]


def _values(name: str, word: str) -> list[Any]:
    first, dots, last = word.partition("..")
    if dots:
        low, high = _exponent(name, first), _exponent(name, last)
        refuse(
            not (low.is_integer() and high.is_integer()),
            f"{name}: a range goes from one whole power to another, as in 2^-8..2^-4, got {word!r}",
        )
        refuse(low > high, f"{name}: the smaller end of a range comes first, as in 2^-8..2^-4, got {word!r}")
        return [_power(name, exponent) for exponent in range(int(low), int(high) + 1)]
    return [_power(name, _exponent(name, word))] if word.startswith("2^") else [_typed(name, word)]


def _power(name: str, exponent: float) -> float:
    types, value = _types_of(name), 2.0**exponent
    if float in types:
        return value
    if int in types and value.is_integer():
        return int(value)
    raise ValueError(f"{name} cannot be 2^{exponent:g}")


def _exponent(name: str, word: str) -> float:
    try:
        if not word.startswith("2^"):
            raise ValueError
        exponent = float(word[2:])
    except ValueError as error:
        raise ValueError(f"{name}: a range is written 2^-8..2^-4, got {word!r}") from error
    refuse(
        not _SMALLEST <= exponent <= _LARGEST,
        f"{name}: {word[:20]} is not a number that floating point holds: powers go from 2^{_SMALLEST} to 2^{_LARGEST}",
    )
    return exponent


def _typed(name: str, word: str) -> Any:
    types = _types_of(name)
    if bool in types:
        refuse(word.lower() not in ("true", "false"), f"{name} is true or false, got {word!r}")
        return word.lower() == "true"
    if type(None) in types and word.lower() == "none":
        return None
    try:
        if name == "betas":
            first, second = map(float, word.split(":"))
            return first, second
        for number in (int, float):
            if number in types:
                return number(word)
    except ValueError as error:
        expected = "two numbers such as 0.9:0.95" if name == "betas" else "whole numbers" if int in types else "numbers"
        raise ValueError(f"{name} takes {expected}, got {word!r}") from error
    return word


def _types_of(name: str) -> list[type[Any]]:
    hint = get_type_hints(ModelConfig if name in _MODEL else RunConfig)[name]
    return [kind for kind in (get_args(hint) or (hint,)) if isinstance(kind, type)]
