"""The command line: argv is parsed once, into a call of one of ``commands``, which is then made.

Exit codes, as in docs/command-line.md: 0 done, 1 a check or a claim that does not hold, 2 bad input or a full disk (one line
says what and the remedy), 3 a run that diverged, 130 interrupted, 141 nobody reads on, 143 ended by SIGTERM; a training run
saves before it ends by a signal.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import tyro

from smupar import commands
from smupar.flags import Call, parser_of
from smupar.lm.config import RunConfig
from smupar.resolve import start
from smupar.study.config import TransferConfig, TuneConfig

_COMMANDS: dict[str, Callable[..., None]] = {
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
    "report": commands.report,
    "bench": commands.bench,
    "data": commands.data,
    "eval": commands.evaluate,
}
_EVAL_STEPS: dict[str, Callable[..., None]] = {
    "requests": commands.requests,
    "score": commands.score,
    "table": commands.table,
}
_KINDS: dict[Callable[..., None], type[Any]] = {
    commands.plan: RunConfig,
    commands.train: RunConfig,
    commands.sweep: RunConfig,
    commands.transfer: TransferConfig,
    commands.tune: TuneConfig,
}
"""Commands whose flags have defaults that depend on what else is typed."""
_HELP = ("-h", "--help")


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        from smupar.environment import describe

        print(describe())
        return
    # Threads that wait must not spin for long: beside another job on the same cores a step took up to 30 times as long.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch is loaded
    warnings.showwarning = lambda message, *_, **__: print(f"smupar: note: {message}", file=sys.stderr)
    try:
        _run([*argv, "--help"] if argv in ([], ["data"], ["eval"]) else argv)
    except BrokenPipeError:  # `smupar ... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"smupar: {_told(error)}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if not _is_of_the_machine(error):
            raise
        print(f"smupar: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nsmupar: interrupted", file=sys.stderr)
        sys.exit(130)


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:  # the system's, not one of ours
        return f"{error.filename}: {error.strerror}. Name another path, or make this one usable"
    return str(error)


def _is_of_the_machine(error: Exception) -> bool:
    """Out of memory or disk, told by libraries in their own words."""
    return type(error).__name__ in ("SafetensorError", "OutOfMemoryError", "MemoryError") or "not enough memory" in str(error)


def _run(argv: list[str]) -> None:
    shown = _defaults([word for word in argv if word not in _HELP]) if set(argv) & set(_HELP) else {}
    parse(argv, shown)()


def parse(argv: list[str], shown: Mapping[type, Any], *, prints: bool = True) -> Call:
    """The call that argv asks for. Help and mistakes end the program; help names the fields of ``shown`` as defaults."""
    if argv[:1] == ["eval"] and len(argv) > 1 and (step := _EVAL_STEPS.get(argv[1])):  # else a folder
        prog = f"smupar eval {argv[1]}"
        return tyro.cli(parser_of(step, shown), prog=prog, args=argv[2:], console_outputs=prints)
    call: Call = tyro.extras.subcommand_cli_from_dict(
        {name: parser_of(command, shown) for name, command in _COMMANDS.items()},
        prog="smupar",
        description="Tune a small dense model, train wide sparse ones with the same hyperparameters. "
        "--version says what is installed; --tyro-print-completion bash (or zsh) prints what completes these commands.",
        args=argv,
        console_outputs=prints,
    )
    return call


def _defaults(argv: list[str]) -> Mapping[type, Any]:
    """What the flags of a command start from: its preset under the rule that is typed, tuned values, the text's vocabulary."""
    with suppress(SystemExit):  # a mistake beside the wish for help
        call = parse(argv, {}, prints=False)
        if kind := _KINDS.get(call.func):
            (preset,) = call.args or ("demo",)
            return {kind: start(kind, commands.request_of(call.keywords["config"], preset, call.keywords.get("hps")))}
    return {}
