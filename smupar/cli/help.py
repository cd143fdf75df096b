"""Help in two tiers: ``--help`` shows the flags that matter, ``--help-all`` all of them, in sections."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TextIO

from smupar.cli.flags import Flag, flags_of, summary_of
from smupar.cli.parser import Command
from smupar.cli.resolve import SET_BY_TRANSFER
from smupar.output.terminal import columns, painted, wrapped
from smupar.study.config import TUNED

_MOST_COLUMNS, _LEAST_FOR_TWO, _LEFT = 100, 60, 24
_FEW = 14  # a command with at most this many flags shows all of them

# The flags that --help shows for long commands. Names that a command lacks are ignored.
_MAIN = {
    "plan": "width depth base_width sparsity pattern allocation rule init_std optimizer data hps full",
    "train": "width depth sparsity pattern rule lr steps batch_size data hps out dry_run",
    "check": "rules widths sparsities base_width depth pattern optimizer lr steps seeds device out",
    "sweep": "width depth sparsity rule lr steps batch_size seq_len data engine out dry_run",
    "tune": "num_samples method base_width depth lr_range optimizer steps batch_size data engine out dry_run",
    "transfer": "axis values rules sparsities widths base_width seeds steps data engine out dry_run",
    "reproduce": "scale data weight_decay clip engine device out publish list settings dry_run",
}
# Flags that transfer and tune set themselves. If typed, they are refused, with the flag to use instead.
HIDDEN = {"transfer": tuple(SET_BY_TRANSFER), "tune": TUNED}
# The commands as `smupar --help` shows them.
_PARTS = {
    "Plan and check": ("rules", "plan", "check"),
    "Train and use": ("train", "generate", "export", "eval", "data"),
    "Studies": ("sweep", "tune", "transfer", "reproduce"),
    "Look": ("watch", "report", "verify", "bench"),
}
# What to type first.
_FIRST = {
    "smupar transfer": "Does a learning rate hold from a small dense model to wide sparse ones? Minutes to an hour on a CPU; "
    "--dry-run says how long.",
    "smupar watch runs": "Watch it in a browser, from another terminal.",
}
_ABOUT = "Tune a small dense model, then train wide sparse ones with the same hyperparameters."


def hidden_words(name: str) -> set[str]:
    """The flags of a command that help, suggestions and completion leave out."""
    return {"--" + flag.replace("_", "-") for flag in HIDDEN.get(name, ())}


def visible(name: str, flags: Iterable[Flag], more: Iterable[str] = ()) -> list[Flag]:
    """The flags of a command, except those that it sets itself and those in ``more``."""
    return [flag for flag in flags if flag.name not in (*HIDDEN.get(name, ()), *more)]


def show_commands(commands: Mapping[str, Command]) -> None:
    """Prints the help of ``smupar --help``."""
    page = _Page(sys.stdout)
    page.usage("smupar COMMAND [flags]")
    page.paragraphs(_ABOUT)
    page.title("Start here")
    for command, text in _FIRST.items():
        page.entry(command, text)
    for title, names in _PARTS.items():
        page.title(title)
        for name in names:
            page.entry(name, _in_short(commands[name]))
    page.title("More")
    page.entry("smupar COMMAND --help", "The flags of a command that matter; --help-all shows all of them.")
    page.entry("smupar completion SHELL", "Print a completion script for bash or zsh.")
    page.entry("smupar --version, -V", "What is installed.")
    page.print()


def show(
    name: str,
    command: Command,
    *,
    shown: Mapping[type, object],
    everything: bool = False,
    steps: Mapping[str, Command] | None = None,
    answers: bool = True,
    hides: Iterable[str] = (),
) -> None:
    """Prints the help of ``smupar NAME --help``. ``steps`` are subcommands; ``answers`` says whether it takes --json."""
    page, flags = _Page(sys.stdout), visible(name, flags_of(command, shown), hides)
    positional, options = [f for f in flags if f.is_positional], [f for f in flags if not f.is_positional]
    words = [flag.usage for flag in positional]
    page.usage(" ".join(["smupar", name, *words, *(["[flags]"] if options or answers else [])]))
    page.paragraphs(summary_of(command))
    if steps:
        page.title("Steps")
        for step, function in steps.items():
            page.entry(f"{name} {step}", _in_short(function))
    if positional:
        page.title("Arguments")
        for flag in positional:
            page.flag(flag)
    main = [flag for flag in options if flag.name in _MAIN.get(name, "").split()]
    few = everything or len(options) <= _FEW or not main
    for section, own in _sections(options if few else _in_order(main, _MAIN[name].split())):
        page.title(section)
        for flag in own:
            page.flag(flag)
    page.title("Always")
    if answers:
        page.entry("--json", "Print only the answer on standard output, as JSON.")
        page.entry("-q, --quiet", "Print only the answer and warnings: no progress, no notes.")
    page.entry("-h, --help", "Show this." if few else "Show the flags that matter.")
    if not few:
        page.entry("--help-all", f"Show all {len(options)} flags.")
    page.print()


def _in_order(flags: Sequence[Flag], names: Sequence[str]) -> list[Flag]:
    """The flags in the order of the names, in one section."""
    by_name = {flag.name: flag for flag in flags}
    return [replace(by_name[name], section="") for name in names if name in by_name]


def _sections(flags: Iterable[Flag]) -> list[tuple[str, list[Flag]]]:
    found: dict[str, list[Flag]] = {"Flags": []}
    for flag in flags:
        found.setdefault(flag.section or "Flags", []).append(flag)
    return [(section, own) for section, own in found.items() if own]


def _in_short(command: Command) -> str:
    """The description of a command up to its first colon or full stop."""
    return re.split(r"[:.](?:\s|$)", " ".join(summary_of(command).split()))[0] + "."


class _Page:
    """Lines of help, in two columns if the terminal is wide enough."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.width, self.lines = out, columns(out, most=_MOST_COLUMNS), list[str]()

    def usage(self, text: str) -> None:
        self.lines += wrapped(text, self.width, indent=" " * 11, first="usage: ")

    def title(self, text: str) -> None:
        self.lines += ["", painted(text, "bold", on=self.out)]

    def paragraphs(self, text: str) -> None:
        for paragraph in text.split("\n\n"):
            self.lines += ["", *wrapped(" ".join(paragraph.split()), self.width)]

    def flag(self, flag: Flag) -> None:
        shown = flag.default and not flag.is_switch
        self.entry(
            flag.usage.strip("[]") if flag.is_positional else flag.usage,
            flag.sentence + (f" (default: {flag.default})" if shown else ""),
        )

    def entry(self, name: str, text: str) -> None:
        painted_name = painted(name, "name", on=self.out)
        if self.width < _LEAST_FOR_TWO:
            self.lines += [f"  {painted_name}", *wrapped(text, self.width, indent="      ")]
            return
        indent = " " * (_LEFT + 2)
        if len(name) + 4 > _LEFT + 2:
            self.lines += [f"  {painted_name}", *wrapped(text, self.width, indent=indent)]
            return
        first, *others = wrapped(text, self.width, indent=indent)
        self.lines += [f"  {painted_name}{' ' * (_LEFT - len(name))}{first[len(indent) :]}", *others]

    def print(self) -> None:
        print("\n".join(self.lines), file=self.out)
