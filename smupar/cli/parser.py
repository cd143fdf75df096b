"""Parses argv into the call of a command, without making the call. So a mistake in argv is reported before any work, in one
line that names the flag, what was expected, and the nearest known name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from smupar.cli.flags import Flag, Typed, flags_of
from smupar.refusals import near, refuse

Command = Callable[..., Any]
ALWAYS = ("--json", "--quiet", "--help", "--help-all")  # flags of every command
_LEFT_OUT = object()  # the value of a flag that was not typed


@dataclass(frozen=True)
class Call:
    """A command with its arguments, and the form of its answer."""

    name: str
    run: partial[Any]
    json: bool = False
    quiet: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("the following arguments are required:", "missing:")
        message = message.replace(": takes", " takes").replace(": expected one argument", " needs a value")
        raise ValueError(f"{message}: see {self.prog} --help")


def parse_flags(name: str, command: Command, argv: Sequence[str], *, hidden: Iterable[str] = ()) -> Call:
    """Parses argv, which lacks the name of the command, into a call. ``hidden`` flags are parsed but never suggested."""
    flags = flags_of(command)
    words = [_dashed(word) for word in argv]
    _refuse_unknown(name, words, flags, hidden)
    parser = _Parser(prog=f"smupar {name}", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-q", "--quiet", action="store_true")
    for number, flag in enumerate(flags):
        _add(parser, flag, f"{number}")
    typed = vars(parser.parse_intermixed_args(words))
    return _call(name, command, flags, typed)


def _add(parser: argparse.ArgumentParser, flag: Flag, dest: str) -> None:
    def value_of(word: str) -> Any:
        try:
            return flag.value_of(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    if flag.is_positional:
        parser.add_argument(dest, type=value_of, nargs=flag.num_values, metavar=flag.metavar)
    elif flag.is_switch:
        parser.add_argument(flag.word, dest=dest, action="store_const", const=True)
        parser.add_argument(f"--no-{flag.word[2:]}", dest=dest, action="store_const", const=False)
    else:
        parser.add_argument(flag.word, dest=dest, type=value_of, nargs=flag.num_values, metavar=flag.metavar)


def _call(name: str, command: Command, flags: Sequence[Flag], typed: Mapping[str, Any]) -> Call:
    """The call of the command with the typed values. Positional arguments that were left out get their defaults."""
    positional: list[Any] = []
    options: dict[str, Any] = {}
    for number, flag in enumerate(flags):
        is_field = flag.parameter != flag.name
        if is_field:
            options.setdefault(flag.parameter, Typed())
        value = typed.get(str(number), _LEFT_OUT)
        if value is _LEFT_OUT or (flag.is_positional and value in ([], None)):
            continue
        value = tuple(value) if isinstance(value, list) else value
        if is_field:
            options[flag.parameter][flag.name] = value
        elif flag.is_positional and flag.num_values == "?":
            positional.append(value)
        else:
            options[flag.name] = value
    return Call(name, partial(command, *positional, **options), typed.get("json", False), typed.get("quiet", False))


def _dashed(word: str) -> str:
    """Turns underscores in a typed flag, as in --no_tied, into dashes."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _refuse_unknown(name: str, words: Sequence[str], flags: Sequence[Flag], hidden: Iterable[str]) -> None:
    options = [flag for flag in flags if not flag.is_positional]
    known = {flag.word for flag in options} | {f"--no-{flag.word[2:]}" for flag in options if flag.is_switch} | set(ALWAYS)
    for word in words:
        if word == "--":
            return
        typed = word.partition("=")[0]
        refuse(
            typed.startswith("--") and typed not in known,
            f"{name} has no flag {typed}{did_you_mean(typed, known - set(hidden))} smupar {name} --help-all lists all flags",
        )


def did_you_mean(typed: str, known: Iterable[str]) -> str:
    """ ": did you mean ...?", or ":" if no known name is close."""
    return f": {near(typed, known)}".rstrip()
