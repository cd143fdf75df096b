"""The command line. Each command imports what it needs when it runs, so that ``smupar --help`` is there at once.

Exit codes: 0 done, 1 a check that does not pass, 2 bad input (one line says what and the remedy), 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import tyro

from smupar import __version__
from smupar import rules as table_1
from smupar.lm.config import CheckConfig, RunConfig

Run = Annotated[RunConfig, tyro.conf.OmitArgPrefixes]


def rules(markdown: bool = False) -> None:
    """Print Table 1: init, learning rate and forward factor of every kind of tensor under every rule.

    Args:
        markdown: Print the page docs/rules.md.
    """
    if markdown:
        print(table_1.markdown(), end="")
        return
    rows = table_1.table()
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def plan(config: Run, json: bool = False) -> None:
    """Print the plan of a GPT without building it: every number of every parameter, in seconds at any size.

    Args:
        json: Print it as JSON, for smupar.Plan.from_json.
    """
    from smupar.lm.gpt import plan_on_meta

    made = plan_on_meta(config)
    print(made.to_json() if json else made)


def train(config: Run) -> None:
    """Train a sparse GPT on the text of Python's standard library; the defaults take about a minute on two cores."""
    from smupar.lm.train import train as run

    summary = run(config)
    print(
        f"train loss {summary.train_loss:.3f}, validation loss {summary.valid_loss:.3f} nats per byte "
        f"at {summary.sparsity:.1%} sparsity, rule {config.rule}, base LR {config.lr:g}; {summary.seconds:.0f} s"
    )


def check(config: Annotated[CheckConfig, tyro.conf.OmitArgPrefixes]) -> None:
    """Measure whether activations, gradients and updates of the GPT keep their size over width and sparsity.

    Prints a verdict with a diagnosis, writes a picture, a page and JSON; exits with 1 if the check does not pass.
    """
    from smupar.lm.check import check_gpt

    report = check_gpt(config)
    print(report.explain())
    if not report.ok:
        sys.exit(1)


def bench(what: tyro.conf.Positional[Literal["parameterize"]], repeats: int = 3) -> None:
    """Measure, side by side in one run. parameterize: its cost against a plain normal_ of the same tensors.

    Args:
        what: The benchmark.
        repeats: Runs of each side; the fastest counts.
    """
    from smupar.bench import bench_parameterize

    print(bench_parameterize(repeats=repeats))


COMMANDS: dict[str, Any] = {"rules": rules, "plan": plan, "check": check, "train": train, "bench": bench}


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        print(f"smupar {__version__}, Python {sys.version.split()[0]}")
        return
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="smupar",
            description="Tune a small dense model, train wide sparse ones with the same hyperparameters.",
            args=argv or ["--help"],
        )
    except (ValueError, FloatingPointError, FileNotFoundError) as error:
        print(f"smupar: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nsmupar: interrupted", file=sys.stderr)
        sys.exit(130)
