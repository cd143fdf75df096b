"""Rows of a benchmark in a file, which grows with each row, so that the same command measures only what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from smupar.output.json_files import DamagedFileError, as_record, read_object, write_sealed

_REMEDY = "remove it to measure again"
Row = TypeVar("Row")


def read_rows(kind: type[Row], file: Path) -> list[Row]:
    """The rows in the file, as instances of this dataclass. Without a file there are none."""
    if not file.exists():
        return []
    rows = read_object(file, remedy=_REMEDY).get("rows")
    if not isinstance(rows, list):
        raise DamagedFileError(f"{file} is damaged (it has no list of rows): {_REMEDY}")
    return [as_record(kind, row, source=f"{file}, row {number},", remedy=_REMEDY) for number, row in enumerate(rows)]


def write_rows(file: Path, about: Mapping[str, Any], rows: Sequence[Any]) -> None:
    """Writes the rows, and what is known about the machine that measured them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(file, {**about, "rows": [asdict(row) for row in rows]})
