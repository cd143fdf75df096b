"""The rows of a run: a line of metrics.jsonl for every few steps. This file does not import torch, so pages open at once."""

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
Row = Mapping[str, float | None]  # metrics of a run at a step


def metrics_line(row: Row) -> str:
    """A line of metrics.jsonl. Values that are None are left out, and nan is written as null, since JSON has no nan."""
    values = {name: value for name, value in row.items() if value is not None}
    return json.dumps({name: value if math.isfinite(value) else None for name, value in values.items()}) + "\n"


def read_rows(path: Path) -> list[dict[str, Any] | None]:
    """The rows of a metrics.jsonl; None in place of a line that is damaged. There are none before a run has written some. A
    line that was cut off by a kill, or is being written, is left out."""
    lines = read_plain(path).split(b"\n") if path.exists() else [b""]
    return [_row(line) for line in lines[:-1]]


def damaged_rows(path: Path) -> list[int]:
    """The numbers of the lines of a metrics.jsonl that are damaged."""
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
    """Whether a value is a number that a float can hold; nan compares as False."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
