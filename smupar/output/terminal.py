"""Finds out what a stream can show: colours, width and characters. NO_COLOR and FORCE_COLOR are respected."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TextIO

_STYLES = {"good": "32", "bad": "31", "unclear": "33", "bold": "1", "faint": "2", "name": "36"}


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal on which lines can be drawn again."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colours(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return is_terminal(stream)


def painted(text: str, *styles: str, on: TextIO) -> str:
    """The text in these styles, if the stream has colours. An unknown style, such as "plain", changes nothing."""
    codes = [_STYLES[style] for style in styles if style in _STYLES]
    return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if codes and text and has_colours(on) else text


def columns(stream: TextIO, *, most: int = 1000) -> int:
    """The width of the terminal; ``most`` if the stream is not a terminal."""
    return max(20, min(most, shutil.get_terminal_size().columns)) if is_terminal(stream) or os.environ.get("COLUMNS") else most


def wrapped(text: str, width: int, *, indent: str = "", first: str | None = None) -> list[str]:
    """The words of a text in lines of at most this width. ``first`` begins the first line, ``indent`` the others."""
    begins = indent if first is None else first
    # Paths and flags are copied from the terminal, so words stay whole.
    lines = textwrap.wrap(
        text, width, initial_indent=begins, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines or [begins.rstrip()]


def can_show(text: str, stream: TextIO) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def make_streams_safe() -> None:
    """Lets standard output and error print a question mark for a character that their encoding lacks, where they would raise an
    error. If a stream was closed when the process began, its output is dropped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (open until the process ends)
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="replace")


def say(text: str) -> None:
    """Prints a message about what is going on. It goes to standard error, since standard output is for answers."""
    print(text, file=sys.stderr, flush=True)
