"""All flags of the command line, with what they take and their defaults, as ``--help`` shows them: tests/fixtures/flags.json.

A change of flags is meant: write the file again with ``python tests/cli/test_flags.py`` and read its diff.
"""

import contextlib
import io
import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest

from smupar.cli.main import main

FILE = Path(__file__).parents[1] / "fixtures" / "flags.json"
COMMANDS = [
    "",
    "rules",
    "plan",
    "plan paper-iso --rule sp --width 2176",
    "check",
    "train",
    "train 610m",
    "train paper-610m",
    "train paper-610m --rule sp",
    "train paper-iso",
    "generate",
    "export",
    "sweep",
    "tune",
    "tune --base-width 96",
    "transfer",
    "reproduce",
    "watch",
    "report",
    "verify",
    "bench",
    "data",
    "data prepare",
    "data verify",
    "eval",
    "eval requests",
    "eval score",
    "eval table",
]


def shown(command: str) -> dict[str, str]:
    """Each flag, positional or command in the boxes of a command's help, as it is invoked, and its default."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # an encoding with boxes
    with mock.patch.dict(os.environ, COLUMNS="100"), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    printed.seek(0)
    found: dict[str, list[str]] = {}
    texts: list[str] = []
    for line in printed:
        if title := re.match(r"╭─ (.*?) ─", line):
            begins = {"positional arguments": r"\S", "subcommands": " +•"}.get(title[1], "-")
            texts = []
        elif inside := re.match(r"│ (.*?) *│$", line):
            invocation, _, text = inside[1].strip(" •").partition("  ")
            if re.match(begins, inside[1]):
                found[invocation] = texts = [text]
            else:
                texts.append(inside[1])
    return {name: _default(" ".join(" ".join(words).split())) for name, words in found.items() if name != "-h, --help"}


def _default(text: str) -> str:
    hint = re.search(r"\((?:default: (?P<value>.*)|(?P<required>required))\)$", text.strip())
    return (hint["required"] or f"default {hint['value']}") if hint else ""


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_are_those_of_the_snapshot(command):
    assert shown(command) == json.loads(FILE.read_text())[command]


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({command: shown(command) for command in COMMANDS}, indent=1) + "\n")
