"""The stored form of a trace, and its checks. This file does not import torch, so that pages open quickly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from smupar.output.json_files import DamagedFileError, as_record, parse_object

FORMAT = "smupar-trace/1"
REMEDY = "record one with record_updates"


@dataclass
class StoredTrace:
    """The content of a trace's file, where numbers that are not finite are null."""

    num_steps: int
    at: list[int]
    effects: dict[str, list[float | None]]
    shapes: dict[str, tuple[int, ...]]
    optimizer: str = ""
    note: str = ""


def parse_trace(text: str, *, source: str) -> StoredTrace:
    """The trace that a JSON text holds. ``source`` names the text in errors."""
    values = parse_object(text, source=source, remedy=REMEDY)
    stored = values.pop("format", None)
    if stored != FORMAT:
        raise DamagedFileError(f"{source} is not a trace in format {FORMAT!r} (it says {stored!r}): {REMEDY}")
    trace = as_record(StoredTrace, values, source=source, remedy=REMEDY)
    wrong = _wrong_numbers(trace)
    if wrong:
        raise DamagedFileError(f"{source} is a damaged trace ({wrong}): {REMEDY}")
    return trace


def _wrong_numbers(trace: StoredTrace) -> str:
    """Says which numbers of a trace are wrong; "" if none. The types of its fields have been checked."""
    steps = [-1, *trace.at, trace.num_steps]
    if any(after <= before for before, after in pairwise(steps)):
        return f"its steps must increase from 0 to below num_steps {trace.num_steps}"
    for name, values in trace.effects.items():
        if len(values) != len(trace.at):
            return f"{name} has {len(values)} effects for {len(trace.at)} steps"
        if not all(value is None or 0 <= value < math.inf for value in values):
            return f"{name} has an effect that is negative or not a number"
    return ""
