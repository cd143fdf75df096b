"""JSON files: damage is named with file, field and remedy."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smupar.output.json_files import (
    DamagedFileError,
    EditedWarning,
    as_record,
    is_sealed,
    parse_object,
    read_json,
    read_object,
    read_record,
    sealed_json,
    write_sealed,
)


@dataclass(frozen=True)
class Size:
    width: int
    depth: int = 2


@dataclass(frozen=True)
class Thing:
    name: str
    kind: Literal["plain", "odd"]
    loss: float | None
    size: Size
    betas: tuple[float, float]
    steps: list[int] = field(default_factory=list)
    effects: dict[str, list[float | None]] = field(default_factory=dict)
    anything: Any = None


GOOD: dict[str, Any] = {
    "name": "größe",
    "kind": "odd",
    "loss": 3,
    "size": {"width": 64},
    "betas": [0.9, 0.95],
    "steps": [1, 2],
    "effects": {"fc": [0.5, None]},
}


def test_record_is_read_with_its_types() -> None:
    expected = Thing("größe", "odd", 3, Size(64), (0.9, 0.95), [1, 2], {"fc": [0.5, None]})
    assert as_record(Thing, GOOD, source="it", remedy="") == expected


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": 3}, "name should be text, is 3"),
        ({"kind": "new"}, "kind should be 'plain' or 'odd', is \"new\""),
        ({"loss": "low"}, 'loss should be a number, is "low"'),
        ({"loss": True}, "loss should be a number, is true"),
        ({"size": {"width": 1.5}}, "size.width should be a whole number, is 1.5"),
        ({"size": {}}, "the field 'size.width' is missing"),
        ({"size": [64]}, "size should have fields"),
        ({"betas": [0.9]}, "betas.length should be 2, is 1"),
        ({"steps": [1, "2"]}, "steps.1 should be a whole number"),
        ({"steps": {}}, "steps should be a list, is {}"),
        ({"effects": {"fc": [[]]}}, "effects.fc.0 should be a number"),
        ({"effects": []}, "effects should be fields, is []"),
        ({"extra": 1}, "it has an unknown field 'extra'"),
    ],
)
def test_record_names_the_field_that_is_wrong(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DamagedFileError, match=r"run\.json is damaged") as caught:
        as_record(Thing, GOOD | change, source="run.json", remedy="start again")
    assert complaint in str(caught.value)
    assert str(caught.value).endswith(": start again")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "Expecting"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe", "not UTF-8 text, at byte 0"),
        (b"[1]", "expected fields, got [1]"),
        (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
        (b'{"a": 1, "seal": "0"}', "does not match its checksum"),
    ],
)
def test_damaged_file_is_named_with_its_remedy(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError) as caught:
        read_object(path, remedy="delete it")
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)
    assert str(caught.value).endswith(": delete it")


def test_file_that_people_edit_is_used_as_it_is_with_a_note() -> None:
    text = sealed_json({"lr": 0.25})
    with warnings.catch_warnings(action="error"):
        assert parse_object(text, source="best.json", remedy="", may_be_edited=True) == {"lr": 0.25}
    with pytest.warns(EditedWarning, match=r"^best\.json has changed since smupar wrote it, .* it is damaged: make it again$"):
        edited = parse_object(text.replace("0.25", "0.5"), source="best.json", remedy="make it again", may_be_edited=True)
    assert edited == {"lr": 0.5}


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match=r"x\.json cannot be read \(No such file or directory\): delete it"):
        read_json(tmp_path / "x.json", remedy="delete it")


def test_sealed_file_reads_back_without_its_seal(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_sealed(path, GOOD)
    assert is_sealed(path)
    assert read_object(path, remedy="") == GOOD
    assert read_record(Thing, path, remedy="").name == "größe"
    path.write_text(json.dumps(GOOD))
    assert not is_sealed(path)
    assert read_object(path, remedy="") == GOOD


@given(st.data())
def test_any_changed_byte_of_a_sealed_file_is_noticed(data: st.DataObject) -> None:
    text = sealed_json(GOOD).encode()
    position = data.draw(st.integers(0, len(text) - 1))
    bit = data.draw(st.integers(0, 7))
    damaged = text[:position] + bytes([text[position] ^ 1 << bit]) + text[position + 1 :]
    try:
        values = parse_object(damaged.decode("utf-8", errors="replace"), source="it", remedy="")
    except DamagedFileError:
        return
    # White space and the case of a hexadecimal escape carry nothing; a changed name of the seal leaves a field too many.
    assert values == GOOD or values.keys() - GOOD.keys()
