"""Reads and writes JSON files. A damaged file is refused in one line that names the file, the field and what to do.

Files carry a *seal*, the sha256 of everything else in the file, so that damage is noticed. If the seal does not match, a file
that only smupar writes is refused, and a file that people edit is read with a warning. Text is UTF-8 in every locale.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from smupar.output.files import read_plain, write_atomic

SEAL = "seal"  # no field of our files has this name
# What Python may raise when a value from a file has an unexpected type.
WRONG_TYPES = (LookupError, TypeError, AttributeError, ArithmeticError)

Record = TypeVar("Record")


class DamagedFileError(ValueError):
    """A file is damaged. The message names the file, the damage and the remedy."""


class EditedWarning(UserWarning):
    """A file that people may edit is not as smupar wrote it. It may be damaged."""


def read_text(path: Path, *, remedy: str) -> str:
    try:
        return read_plain(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{path} is damaged (not UTF-8 text, at byte {error.start}): {remedy}") from error
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read ({error.strerror or error}): {remedy}") from error


def read_json(path: Path, *, remedy: str) -> Any:
    return parse_json(read_text(path, remedy=remedy), source=str(path), remedy=remedy)


def parse_json(text: str, *, source: str, remedy: str) -> Any:
    """The value that a JSON text holds. ``source`` names the text in errors."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise DamagedFileError(f"{source} is damaged (nested too deeply): {remedy}") from error
    except ValueError as error:  # malformed, or a number with thousands of digits
        raise DamagedFileError(f"{source} is damaged ({error}): {remedy}") from error


def parse_object(text: str, *, source: str, remedy: str, may_be_edited: bool = False) -> dict[str, Any]:
    """The JSON object that a text holds, without its seal. If the seal does not match, this raises an error, or warns if people
    may edit the file."""
    values = parse_json(text, source=source, remedy=remedy)
    if not isinstance(values, dict):
        raise DamagedFileError(f"{source} is damaged (expected fields, got {_shortened(values)}): {remedy}")
    seal = values.pop(SEAL, None)
    if seal is not None and seal != seal_of(values):
        if not may_be_edited:
            raise DamagedFileError(f"{source} is damaged (its content does not match its checksum): {remedy}")
        warnings.warn(
            f"{source} has changed since smupar wrote it, and is used as it is now. If you edited it, remove its field "
            f"{SEAL!r}; if nobody did, it is damaged: {remedy}",
            EditedWarning,
            stacklevel=3,
        )
    return values


def read_object(path: Path, *, remedy: str, may_be_edited: bool = False) -> dict[str, Any]:
    return parse_object(read_text(path, remedy=remedy), source=str(path), remedy=remedy, may_be_edited=may_be_edited)


def is_sealed(path: Path) -> bool:
    """Whether a file carries a seal. Files from older versions have none."""
    values = read_json(path, remedy="restore it from a copy")
    return isinstance(values, dict) and SEAL in values


def seal_of(values: Mapping[str, Any]) -> str:
    """The checksum of fields. It does not depend on their order or the layout of the text."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def sealed_json(values: Mapping[str, Any], *, indent: int | None = 1) -> str:
    """A JSON object with its seal, as text. No field may be called seal."""
    assert SEAL not in values, "the name 'seal' is taken"
    return json.dumps({**values, SEAL: seal_of(values)}, indent=indent)


def write_sealed(path: Path, values: Mapping[str, Any], *, indent: int | None = 1) -> None:
    write_atomic(path, sealed_json(values, indent=indent))


def as_record(kind: type[Record], values: Any, *, source: str, remedy: str) -> Record:
    """Turns JSON values into a dataclass of this kind. Raises if a field is missing, unknown or of another type."""
    wrong = _wrong(values, kind, "")
    if wrong:
        raise DamagedFileError(f"{source} is damaged, or of another version ({wrong}): {remedy}")
    return _converted(values, kind)


def read_record(kind: type[Record], path: Path, *, remedy: str) -> Record:
    return as_record(kind, read_object(path, remedy=remedy), source=str(path), remedy=remedy)


def printable(text: str) -> str:
    """Text from a file, made safe for a message: one line, without control codes for the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def printable_lines(text: str) -> str:
    """Text from a file, made safe for a message of several lines."""
    return "\n".join(map(printable, text.split("\n")))


# Values and the types that they should have


def _wrong(value: Any, expected: Any, where: str) -> str:
    """Says how a value differs from its expected type; "" if it does not differ. ``where`` is the path of fields to the
    value."""
    if isinstance(expected, type) and is_dataclass(expected):
        return _wrong_fields(value, expected, where)
    if get_origin(expected) in (Union, UnionType):
        complaints = [_wrong(value, choice, where) for choice in get_args(expected)]
        return "" if "" in complaints else complaints[0]
    if get_origin(expected) is Literal:
        fits = value in get_args(expected)
    elif get_origin(expected) in (list, tuple):
        if isinstance(value, (list, tuple)):
            return _first_wrong(_elements(value, expected), where)
        fits = False
    elif get_origin(expected) is dict:
        if isinstance(value, dict):
            return _first_wrong([(name, item, get_args(expected)[1]) for name, item in value.items()], where)
        fits = False
    else:
        fits = _fits(value, expected)
    return "" if fits else f"{where or 'it'} should be {_type_words(expected)}, is {_shortened(value)}"


@cache  # a study has thousands of configurations of the same class
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _wrong_fields(value: Any, kind: type, where: str) -> str:
    if not isinstance(value, dict):
        return f"{where or 'it'} should have fields, is {_shortened(value)}"
    known = {item.name: item for item in fields(kind)}
    if unknown := value.keys() - known.keys():
        return f"it has an unknown field {_field_path(where, min(unknown))!r}"
    needed = {name for name, item in known.items() if item.default is MISSING and item.default_factory is MISSING}
    if missing := needed - value.keys():
        return f"the field {_field_path(where, min(missing))!r} is missing"
    hints = _hints(kind)
    return _first_wrong([(name, item, hints[name]) for name, item in value.items()], where)


def _first_wrong(items: list[tuple[str, Any, Any]], where: str) -> str:
    return next(filter(None, (_wrong(value, hint, _field_path(where, name)) for name, value, hint in items)), "")


def _elements(values: list[Any] | tuple[Any, ...], expected: Any) -> list[tuple[str, Any, Any]]:
    hints = get_args(expected)
    by_value = hints if get_origin(expected) is tuple and hints[-1] is not ... else (hints[0],) * len(values)
    if len(by_value) != len(values):
        return [("length", len(values), Literal[len(by_value)])]
    return [(str(number), value, hint) for number, (value, hint) in enumerate(zip(values, by_value, strict=True))]


def _fits(value: Any, expected: Any) -> bool:
    if expected is Any:
        return True
    if expected in (None, NoneType):
        return value is None
    if isinstance(value, bool):
        return expected is bool
    if expected is float and isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, expected)


def _converted(value: Any, kind: Any) -> Any:
    """Turns the objects and lists of a value that has passed ``_wrong`` into dataclasses and tuples."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _converted(item, hints[name]) for name, item in value.items()})
    if get_origin(kind) in (Union, UnionType):
        return _converted(value, next(choice for choice in get_args(kind) if not _wrong(value, choice, "")))
    if get_origin(kind) in (list, tuple):
        return get_origin(kind)(_converted(item, hint) for _, item, hint in _elements(value, kind))
    if get_origin(kind) is dict:
        return {name: _converted(item, get_args(kind)[1]) for name, item in value.items()}
    return value


def _field_path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else str(name)


def _type_words(expected: Any) -> str:
    if get_origin(expected) is Literal:
        return " or ".join(map(repr, get_args(expected)))
    words = {float: "a number", int: "a whole number", str: "text", bool: "true or false", NoneType: "null", None: "null"}
    return words.get(expected) or {list: "a list", tuple: "a list", dict: "fields"}.get(get_origin(expected), str(expected))


def _shortened(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."
