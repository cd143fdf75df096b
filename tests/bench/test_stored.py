"""Rows that a benchmark has stored: read again, and damage is named."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from smupar.bench.stored import read_rows, write_rows


@dataclass(frozen=True)
class Case:
    width: int


@dataclass(frozen=True)
class Timed:
    case: Case
    seconds: float


ROWS = [Timed(Case(64), 0.5), Timed(Case(128), 0.25)]


def test_rows_read_back_as_written(tmp_path: Path) -> None:
    assert read_rows(Timed, tmp_path / "none.json") == []
    write_rows(tmp_path / "new" / "rows.json", {"hardware": "CPU"}, ROWS)
    assert read_rows(Timed, tmp_path / "new" / "rows.json") == ROWS


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, r"rows\.json is damaged \(it has no list of rows\): remove it to measure again"),
        ({"rows": {}}, "it has no list of rows"),
        ({"rows": [{"case": {"width": 64}, "seconds": 1, "speed": 2}]}, r"row 0, is damaged.*unknown field 'speed'"),
        ({"rows": [{"case": {}, "seconds": 1}]}, r"the field 'case\.width' is missing"),
        ({"rows": [{"case": {"width": 64}, "seconds": "fast"}]}, 'seconds should be a number, is "fast"'),
        ({"rows": [], "seal": "0"}, "its content does not match its checksum"),
    ],
)
def test_damaged_rows_are_named(tmp_path: Path, content: object, said: str) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=said):
        read_rows(Timed, tmp_path / "rows.json")
