"""The command line: parses argv into the call of a command, makes the call, and prints the answer. Some defaults depend on
other flags, so ``--help`` shows the defaults that hold for the flags typed beside it.

Exit codes, as in docs/command-line.md: 0 success; 1 a check or claim does not hold, or a file is damaged; 2 bad input, or out
of memory or disk (one line names the problem and the remedy); 3 a run diverged; 130 interrupted; 141 the reader of the output
closed the pipe; 143 ended by SIGTERM. A training run saves a checkpoint before a signal ends it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from smupar.cli import commands, data, evaluation, reproduction, studies
from smupar.cli.answers import Reply, show
from smupar.cli.help import hidden_words, show_commands
from smupar.cli.help import show as show_help
from smupar.cli.parser import Call, Command, did_you_mean, parse_flags
from smupar.cli.resolve import Request, start
from smupar.lm.config.run_config import RunConfig
from smupar.output.files import sentence_of
from smupar.output.json_files import printable_lines
from smupar.output.terminal import columns, is_terminal, make_streams_safe, wrapped
from smupar.refusals import refuse
from smupar.study.config import TransferConfig, TuneConfig

COMMANDS: dict[str, Command] = {
    "rules": commands.rules,
    "plan": commands.plan,
    "check": commands.check,
    "train": commands.train,
    "generate": commands.generate,
    "export": commands.export,
    "sweep": studies.sweep,
    "tune": studies.tune,
    "transfer": studies.transfer,
    "reproduce": reproduction.reproduce,
    "watch": studies.watch,
    "report": studies.report,
    "verify": studies.verify,
    "bench": commands.bench,
    "data": data.data,
    "data prepare": data.prepare,
    "data verify": data.verify,
    "eval": evaluation.evaluate,
    "eval requests": evaluation.requests,
    "eval score": evaluation.score,
    "eval table": evaluation.table,
}
# Configurations of the commands whose defaults depend on other flags.
_STARTS: dict[str, type[Any]] = {
    "plan": RunConfig,
    "train": RunConfig,
    "sweep": RunConfig,
    "transfer": TransferConfig,
    "tune": TuneConfig,
}
_HELP = ("-h", "--help", "--help-all")
_OUT_OF_RESOURCES = ("SafetensorError", "OutOfMemoryError", "MemoryError")  # libraries raise these when memory or disk runs out


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    # Idle threads must not spin for long: with another job on the same cores, a step took up to 20 times as long.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is loaded
    warnings.showwarning = _once(lambda message: _note(message, sys.stderr))
    make_streams_safe()
    try:
        code = _run(argv)
        sys.stdout.flush()  # inside the try, so that a closed pipe is caught
    except BrokenPipeError:  # the reader closed the pipe, as in `smupar ... | head`
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(141)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        _say(sentence_of(error) if isinstance(error, OSError) else str(error), sys.stderr)
        sys.exit(2)
    except Exception as error:
        if type(error).__name__ not in _OUT_OF_RESOURCES:
            raise
        lines = str(error).strip().splitlines()
        _say(lines[0] if lines else "out of memory", sys.stderr)  # Python's own MemoryError has no text
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nsmupar: interrupted", file=sys.stderr)
        sys.exit(130)
    if code:
        sys.exit(code)


def _run(argv: list[str]) -> int:
    """Runs the command in argv. Returns the exit code."""
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if argv in (["--version"], ["-V"]):
        from smupar.cli.environment import describe

        print(describe())
    elif not argv or argv[0] in _HELP:
        show_commands(COMMANDS)
    elif argv[0] == "completion":
        _complete(argv[1:])
    elif set(argv) & set(_HELP) or argv == ["data"]:
        _help(argv)
    else:
        return _answer(parse(argv))
    return 0


def _answer(call: Call) -> int:
    """Makes the call and prints its answer. Returns the exit code."""
    if not answers(call.name):
        call.run()
        return 0
    with _quiet() if call.quiet else contextlib.redirect_stdout(sys.stderr):  # only answers go to standard output
        answer: Reply = call.run()
    show(answer, as_json=call.json)
    return answer.code


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops all output except warnings."""
    errors = sys.stderr
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        usual, warnings.showwarning = warnings.showwarning, _once(lambda message: _note(message, errors))
        try:
            yield
        finally:
            warnings.showwarning = usual


def _once(show: Callable[[Warning | str], None]) -> Callable[..., None]:
    """A handler of warnings that shows each message once. The models of a command often share their notes."""
    shown: set[str] = set()

    def handle(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in shown:
            shown.add(str(message))
            show(message)

    return handle


def _note(message: Warning | str, stream: TextIO) -> None:
    text = f"note: {message}"
    _say("\n".join(wrapped(text, columns(stream) - len("smupar: "))) if is_terminal(stream) else text, stream)


def _say(text: str, stream: TextIO) -> None:
    """Prints a message for people, made safe since it may quote files that others wrote."""
    print(printable_lines(f"smupar: {text}"), file=stream, flush=True)


def _complete(argv: Sequence[str]) -> None:
    from smupar.cli.completion import SHELLS, script

    if set(argv) & set(_HELP):
        print(f"smupar completion {{{','.join(SHELLS)}}} prints a script that completes smupar's commands and flags")
        return
    refuse(len(argv) != 1 or argv[0] not in SHELLS, f"completion needs a shell, {' or '.join(SHELLS)}: smupar completion bash")
    print(script(argv[0], COMMANDS), end="")


def _help(argv: list[str]) -> None:
    typed = [word for word in argv if word not in _HELP]
    name, rest = split(typed)
    shown: dict[type, Any] = {}
    request = _request(name, rest) if name in _STARTS else Request()
    if kind := _STARTS.get(name):
        shown[kind] = start(kind, request)
    # The swept field of a transfer study has no flag of its own.
    hides = [request.fields.get("axis", TransferConfig.axis)] if name == "transfer" else []
    steps = {step.partition(" ")[2]: command for step, command in COMMANDS.items() if step.startswith(f"{name} ")}
    show_help(
        name, COMMANDS[name], shown=shown, everything="--help-all" in argv, steps=steps, answers=answers(name), hides=hides
    )


def answers(name: str) -> bool:
    """Whether a command has an answer, and so takes --json and --quiet."""
    return COMMANDS[name].__annotations__["return"] == "Reply"


def _request(name: str, argv: list[str]) -> Request:
    """The request typed beside --help; an empty one if it has a mistake."""
    if argv:
        with suppress(ValueError, OSError):
            run = parse_flags(name, COMMANDS[name], argv).run
            (preset,) = run.args or ("demo",)
            return commands.request_of(run.keywords["config"], preset, run.keywords.get("hps"))
    return Request()


def split(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The name of the command at the start of argv, of one or two words, and the rest of argv."""
    for length in (2, 1):
        name = " ".join(argv[:length])
        if len(argv) >= length and name in COMMANDS:
            return name, list(argv[length:])
    known = {name.partition(" ")[0] for name in COMMANDS} | {"completion", "help", "--version"}
    raise ValueError(f"no command is called {argv[0]!r}{did_you_mean(argv[0], known)} smupar --help lists the commands")


def parse(argv: Sequence[str]) -> Call:
    """Parses argv into a call. Raises ValueError with one line if argv has a mistake."""
    name, rest = split(argv)
    return parse_flags(name, COMMANDS[name], rest, hidden=hidden_words(name))
