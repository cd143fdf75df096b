"""All flags of the command line, with what they take and their defaults, as ``--help-all`` shows them:
tests/fixtures/flags.json.

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

from smupar.cli.flags import flags_of
from smupar.cli.help import HIDDEN, visible
from smupar.cli.main import COMMANDS, main

FILE = Path(__file__).parents[1] / "fixtures" / "flags.json"
TYPED = [
    "plan paper-iso --rule sp --width 2176",
    "train 610m",
    "train paper-610m",
    "train paper-610m --rule sp",
    "train paper-iso",
    "tune --base-width 96",
]
HELPS = ["", *COMMANDS, *TYPED]


def help_of(command: str, tier: str = "--help-all", columns: int = 1000) -> str:
    printed = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS=str(columns)), contextlib.redirect_stdout(printed):
        main([*command.split(), tier])
    return printed.getvalue()


def shown(command: str) -> dict[str, str]:
    """Each flag, argument or command in a command's help, as it is typed, and its default."""
    texts, name = {}, ""
    for line in help_of(command).splitlines():
        if entry := re.match(r"  (\S.*?)(?:  +(.*))?$", line):
            name = entry[1]
            texts[name] = entry[2] or ""
        elif name:
            texts[name] += f" {line.strip()}"  # a long sentence goes on in further lines
    defaults = {name: re.search(r"\(default: (.*?)\)\s*(?:$|  )", text) for name, text in texts.items()}
    return {name: f"default {default[1]}" if default else "" for name, default in defaults.items()}


@pytest.mark.parametrize("command", HELPS)
def test_flags_are_those_of_the_snapshot(command):
    assert shown(command) == json.loads(FILE.read_text())[command]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_has_a_sentence_and_says_what_it_takes(name):
    for flag in flags_of(COMMANDS[name]):
        assert flag.sentence.endswith((".", ")")), flag.usage
        assert flag.is_switch or flag.metavar not in ("", "CHOICE") or flag.choices, flag.usage


@pytest.mark.parametrize("name", COMMANDS)
def test_first_help_is_short_and_names_the_other(name):
    first = help_of(name, "--help", columns=80)
    assert max(map(len, first.splitlines())) <= 80
    assert len(re.findall(r"^  --", first, re.MULTILINE)) <= 19
    assert ("--help-all" in first) == (first != help_of(name, columns=80))


@pytest.mark.parametrize("width", [30, 40, 59, 60, 100])
def test_help_fits_any_terminal(width):
    lines = help_of("transfer", columns=width).splitlines()
    too_long = [line for line in lines if len(line) > width]
    assert [line for line in too_long if not line.startswith("  --")] == []  # a flag and what it takes stay in one line


@pytest.mark.parametrize("name", HIDDEN)
def test_no_flag_is_shown_that_is_refused(name, command):
    assert not {flag.name for flag in visible(name, flags_of(COMMANDS[name]))} & set(HIDDEN[name])
    for hidden in HIDDEN[name]:
        value = {"record": [], "correction": ["fixed"]}.get(hidden, ["1"])
        done = command(name, f"--{hidden.replace('_', '-')}", *value)
        assert done.returncode == 2
        assert f"{name} does not take --" in done.stderr


def test_swept_field_of_a_transfer_study_is_not_a_flag_of_it():
    assert "  --lr " not in help_of("transfer")
    other = help_of("transfer --axis init_std")
    assert "  --lr " in other
    assert "  --init-std " not in other


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({command: shown(command) for command in HELPS}, indent=1) + "\n")
