"""Configurations as command-line flags, whose own checks speak in one line.

tyro puts a box around the message of a ``ValueError`` that a dataclass raises. So it is given a twin of the dataclass that
checks nothing, and the command turns the twin into the real thing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

_TWINS: dict[type[Any], type[Any]] = {}


def twin(config: Any) -> type[Any]:
    """The same fields, documentation and defaults, without ``__post_init__``; always the same class for a class."""
    if config not in _TWINS:
        _TWINS[config] = _make_twin(config)
    return _TWINS[config]


def _make_twin(config: type[Any]) -> type[Any]:
    nested = {name: twin(kind) for name, kind in get_type_hints(config).items() if dataclasses.is_dataclass(kind)}
    body: dict[str, Any] = {"__post_init__": lambda self: None, "__doc__": config.__doc__, "__annotations__": nested}
    body |= {name: dataclasses.field(default_factory=kind) for name, kind in nested.items()}
    made: type[Any] = dataclasses.dataclass(frozen=True)(type(config.__name__, (config,), body))
    return made


def unchecked(value: Any) -> Any:
    """A configuration as its twin."""
    return twin(type(value))(**{name: _convert(item, unchecked) for name, item in _items(value)})


def checked(value: Any) -> Any:
    """The twin as the configuration it stands for, which may raise."""
    real = type(value).__mro__[1]
    return real(**{name: _convert(item, checked) for name, item in _items(value)})


def _items(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]


def _convert(value: Any, how: Any) -> Any:
    return how(value) if dataclasses.is_dataclass(value) else value
