"""The command line: parses argv into the call of a command, then makes the call. Some defaults depend on other flags, so
``--help`` shows the defaults for the flags that were typed with it.

Exit codes, as in docs/command-line.md: 0 success; 1 a check or claim does not hold, or a file is damaged; 2 bad input, or out
of memory or disk (one line names the problem and the remedy); 3 a run diverged; 130 interrupted; 141 the reader of the output
closed the pipe; 143 ended by SIGTERM. A training run saves a checkpoint before a signal ends it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import tyro

from smupar.cli import commands, data, evaluation
from smupar.cli.flags import Call, parser_of
from smupar.cli.resolve import Request, start
from smupar.lm.config.run import RunConfig
from smupar.output.files import sentence_of
from smupar.output.json_files import printable
from smupar.study.config import TransferConfig, TuneConfig

COMMANDS: dict[str, Callable[..., None]] = {
    "rules": commands.rules,
    "plan": commands.plan,
    "check": commands.check,
    "train": commands.train,
    "generate": commands.generate,
    "export": commands.export,
    "sweep": commands.sweep,
    "tune": commands.tune,
    "transfer": commands.transfer,
    "reproduce": commands.reproduce,
    "watch": commands.watch,
    "report": commands.report,
    "verify": commands.verify,
    "bench": commands.bench,
    "data": data.data,
    "eval": evaluation.evaluate,
}
_STEPS: dict[tuple[str, ...], Callable[..., None]] = {
    ("data", "prepare"): data.prepare,
    ("data", "verify"): data.verify,
    ("eval", "requests"): evaluation.requests,
    ("eval", "score"): evaluation.score,
    ("eval", "table"): evaluation.table,
}
# Commands whose defaults depend on other flags, with their configuration.
_STARTS: dict[str, type[Any]] = {
    "plan": RunConfig,
    "train": RunConfig,
    "sweep": RunConfig,
    "transfer": TransferConfig,
    "tune": TuneConfig,
}
_HELP = ("-h", "--help")
_OF_THE_MACHINE = ("SafetensorError", "OutOfMemoryError", "MemoryError")  # libraries raise these when memory or disk runs out


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        from smupar.cli.environment import describe

        print(describe())
        return
    # Idle threads must not spin for long: with another job on the same cores, a step took up to 30 times as long.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is loaded
    warnings.showwarning = lambda message, *_, **__: _say(f"note: {message}")
    try:
        _run([*argv, "--help"] if argv in ([], ["data"], ["eval"]) else argv)
    except BrokenPipeError:  # the reader closed the pipe, as in `smupar ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        _say(sentence_of(error) if isinstance(error, OSError) else str(error))
        sys.exit(2)
    except Exception as error:
        if type(error).__name__ not in _OF_THE_MACHINE:
            raise
        _say(str(error).strip().splitlines()[0])
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nsmupar: interrupted", file=sys.stderr)
        sys.exit(130)


def _say(text: str) -> None:
    """Prints a message for people. It may hold words of files that others wrote."""
    print("\n".join(map(printable, f"smupar: {text}".split("\n"))), file=sys.stderr)


def _run(argv: list[str]) -> None:
    shown: dict[type, Any] = {}
    if set(argv) & set(_HELP) and (kind := _STARTS.get(argv[0])):
        shown[kind] = start(kind, _request([word for word in argv if word not in _HELP]))
    parse(argv, shown)()


def _request(argv: list[str]) -> Request:
    """The request that was typed besides --help; an empty request if it has a mistake."""
    if len(argv) > 1:
        with suppress(SystemExit):
            call = parse(argv, {}, prints=False)
            (preset,) = call.args or ("demo",)
            return commands.request_of(call.keywords["config"], preset, call.keywords.get("hps"))
    return Request()


def parse(argv: list[str], shown: Mapping[type, Any], *, prints: bool = True) -> Call:
    """The call that argv asks for. Help and mistakes end the program. Help shows the values in ``shown`` as defaults."""
    if step := _STEPS.get(tuple(argv[:2])):
        prog = f"smupar {argv[0]} {argv[1]}"
        return tyro.cli(parser_of(step, shown), prog=prog, args=argv[2:], console_outputs=prints)
    return tyro.extras.subcommand_cli_from_dict(
        {name: parser_of(command, shown) for name, command in COMMANDS.items()},
        prog="smupar",
        description="Tune a small dense model, train wide sparse ones with the same hyperparameters. "
        "--version says what is installed; --tyro-print-completion bash (or zsh) prints a completion script.",
        args=argv,
        console_outputs=prints,
    )
