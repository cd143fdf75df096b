"""Completion scripts for bash and zsh, made from the flags of all commands. They do not start Python."""

from __future__ import annotations

from collections.abc import Mapping

from smupar.cli.flags import Flag, flags_of
from smupar.cli.help import visible
from smupar.cli.parser import ALWAYS, Command

SHELLS = ("bash", "zsh")


def script(shell: str, commands: Mapping[str, Command]) -> str:
    """The script for a shell. ``commands`` maps words, such as "train" or "data prepare", to commands."""
    names = sorted({name.partition(" ")[0] for name in commands} | {"completion", "help"})
    lines = [
        f"# Completion of smupar for {shell}. Write it again after an update.",
        *(["#compdef smupar", "autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []),
        "_smupar() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words=""',
        '  local name="${COMP_WORDS[1]}" step="${COMP_WORDS[1]} ${COMP_WORDS[2]}"',
        "  COMPREPLY=()",
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(names)} --help --version" -- "$cur"))',
        "    return",
        "  fi",
        '  case "$step" in',
        *(f'    "{name}") name="$step" ;;' for name in commands if " " in name),
        "  esac",
        '  case "$name $prev" in',
        *_choices(commands),
        "  esac",
        '  if [ -z "$words" ]; then',
        '    case "$name" in',
        *(f'      "{name}") words="{_words(name, command, commands)}" ;;' for name, command in commands.items()),
        f'      completion) words="{" ".join(SHELLS)}" ;;',
        f'      help) words="{" ".join(names)}" ;;',
        "    esac",
        "  fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o default -F _smupar smupar",
    ]
    if shell == "zsh":  # zsh autoloads a file only if #compdef is in its first line
        lines.insert(0, lines.pop(1))
    return "\n".join(lines) + "\n"


def _options(name: str, command: Command) -> list[Flag]:
    return visible(name, flags_of(command))


def _words(name: str, command: Command, commands: Mapping[str, Command]) -> str:
    steps = [step.partition(" ")[2] for step in commands if step.startswith(f"{name} ")]
    flags = _options(name, command)
    positional = [choice for flag in flags if flag.is_positional for choice in flag.choices]
    options = [f"--no-{flag.word[2:]}" if flag.turns_off else flag.word for flag in flags if not flag.is_positional]
    return " ".join([*steps, *positional, *options, *ALWAYS])


def _choices(commands: Mapping[str, Command]) -> list[str]:
    """The values of flags that take one of a few values."""
    return [
        f'    "{name} {flag.word}") words="{" ".join(flag.choices)}" ;;'
        for name, command in commands.items()
        for flag in _options(name, command)
        if flag.choices and not flag.is_positional
    ]
