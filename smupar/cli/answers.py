"""The answers of commands. A command returns a ``Reply``, and ``main`` prints it: as lines for people, with the verdict first
and in colour, or as JSON for programs. Progress and notes go to standard error.

So every command with an answer has --json and --quiet without implementing them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from smupar.output.json_files import printable_lines
from smupar.output.page.document import Answer, Tone
from smupar.output.terminal import columns, is_terminal, painted, wrapped

_INDENT = "  "


class TextLine(NamedTuple):
    """A line for people. ``lead`` comes first, in the colour of the tone. Long lines are wrapped to the terminal."""

    text: str
    lead: str = ""
    tone: Tone = "plain"
    is_table: bool = False  # aligned by columns, so never wrapped
    indent: str = ""


@dataclass(frozen=True)
class Reply:
    lines: Sequence[TextLine]
    values: Mapping[str, Any] | None = None  # for --json; None if this process has no answer, like a rank above 0
    code: int = 0  # the exit code
    pieces: Iterable[str] = ()  # text that is printed while it is made, instead of lines; in JSON it is "text"


def table(text: str) -> list[TextLine]:
    """The lines of an aligned table."""
    return [TextLine(line, is_table=True) for line in text.splitlines()]


def cards(answers: Iterable[Answer]) -> list[TextLine]:
    """A line for each card of a page: the result in the colour of its tone, then the reason."""
    return [
        TextLine("; ".join(card["text"].splitlines()), f"{card['name']} {card['value']}:".strip(), card["tone"])
        for card in answers
    ]


def show(answer: Reply, *, as_json: bool) -> None:
    if as_json:
        show_json(answer)
    elif answer.pieces:
        for piece in answer.pieces:
            print(piece, end="", flush=True)
        print()
    else:
        for line in answer.lines:
            print("\n".join(_printed(line)))
    sys.stdout.flush()


def show_json(answer: Reply) -> None:
    if answer.values is None:
        return
    values = dict(answer.values) | ({"text": "".join(answer.pieces)} if answer.pieces else {})
    print(json.dumps(plain(values), indent=1, allow_nan=False))


def _printed(line: TextLine) -> list[str]:
    out, text = sys.stdout, printable_lines(line.text)
    first = line.indent + line.lead + (" " if line.lead and text else "")
    if line.is_table or not is_terminal(out):
        lines = [f"{first}{text}"]
    else:
        lines = wrapped(text, columns(out), first=first, indent=line.indent + (_INDENT if line.lead else ""))
    if line.lead:
        start = len(line.indent) + len(line.lead)
        lines[0] = line.indent + painted(line.lead, "bold", line.tone, on=out) + lines[0][start:]
    return lines


def plain(value: Any) -> Any:
    """The value in a form that JSON can hold: NaN and infinity become null, exact fractions become numbers."""
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, (list, tuple, set)):
        return [plain(entry) for entry in value]
    if isinstance(value, (Path, Fraction)):
        return str(value) if isinstance(value, Path) else float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
