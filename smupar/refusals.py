"""Refuses what a user gave: wrong settings, words that are not among the choices, and values that are not numbers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Real
from operator import index


def refuse(is_wrong: object, message: str) -> None:
    """Raises ValueError with the message if something is wrong."""
    if is_wrong:
        raise ValueError(message)


def choice(setting: str, value: object, allowed: Iterable[object]) -> None:
    """Raises ValueError if the value is not one of the allowed ones."""
    refuse(value not in allowed, f"{setting} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def near(typed: str, known: Iterable[str]) -> str:
    """ "did you mean ...?", or "" if no known name is close."""
    found = difflib.get_close_matches(typed, list(known), n=2, cutoff=0.6)
    return f"did you mean {' or '.join(found)}?" if found else ""


def whole(value: int, setting: str) -> int:
    """The value, if it is a whole number."""
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"{setting} must be a whole number, got {value!r}") from None


def finite(value: float, setting: str) -> float:
    """The value, if it is a finite number."""
    refuse(
        isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value),
        f"{setting} must be a finite number, got {value!r}",
    )
    return float(value)
