"""The rows of metrics.jsonl, one for every few steps of a run. This file does not import torch, so pages open quickly."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smupar.output.files import read_plain
from smupar.output.json_files import parse_json

METRICS_FILE = "metrics.jsonl"
Row = Mapping[str, float | None]  # metric -> value, at a step of a run


def metrics_line(row: Row) -> str:
    """A row as a line of metrics.jsonl. None is left out, and NaN is written as null, since JSON has no NaN."""
    values = {name: value for name, value in row.items() if value is not None}
    return json.dumps({name: value if math.isfinite(value) else None for name, value in values.items()}) + "\n"


def read_rows(path: Path) -> list[dict[str, Any] | None]:
    """The rows of a metrics.jsonl, with None for each damaged line. Without a file there are no rows. A last line that is
    incomplete, because it was cut off or is being written, is left out."""
    lines = read_plain(path).split(b"\n") if path.exists() else [b""]
    return [_row(line) for line in lines[:-1]]


def damaged_rows(path: Path) -> list[int]:
    """The numbers of the damaged lines of a metrics.jsonl."""
    rows = enumerate(read_rows(path), start=1)
    return [number for number, row in rows if row is None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line.decode("utf-8"), source="", remedy="")
    except ValueError:
        return None
    is_row = isinstance(row, dict) and all(value is None or _is_number(value) for value in row.values())
    return row if is_row and isinstance(row.get("step"), int) else None


def _is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
