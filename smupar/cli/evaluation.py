"""``smupar eval`` and its three steps."""

from __future__ import annotations

from typing import Annotated

import tyro

from smupar.cli.flags import Typed
from smupar.lm.config.commands import EvalConfig, ScoringConfig, TasksConfig
from smupar.lm.config.run import changed


def evaluate(config: Annotated[Typed, EvalConfig]) -> None:
    """Evaluate models on ARC-easy, LAMBADA, RACE, PIQA and BoolQ by EleutherAI's harness: the paper's Table 2.

    The same in three steps: `smupar eval requests` and `smupar eval table` need the harness, `smupar eval score` needs the
    model and no harness.
    """
    from smupar.integrations.lm_eval import evaluate as run

    asked = changed(EvalConfig(config.get("folders", ())), config)
    print(f"{run(asked)}\n{asked.out}/results.json, table.md, table.csv")


def requests(config: Annotated[Typed, TasksConfig], out: str = "requests.jsonl") -> None:
    """Write all that the tasks ask, for `smupar eval score`. Needs the harness.

    Args:
        out: File to write.
    """
    from smupar.integrations.lm_eval import write_requests

    print(write_requests(TasksConfig(**config), out))


def score(
    folder: tyro.conf.Positional[str],
    config: Annotated[Typed, ScoringConfig],
    requests: str = "requests.jsonl",
    out: str = "scores.jsonl",
) -> None:
    """Compute the loglikelihoods that a file asks for. Needs no harness; interrupted, the same command goes on.

    Args:
        folder: Folder of a run, a checkpoint, an export, or a model that transformers reads.
        requests: Made by `smupar eval requests`.
        out: File to append to; what it holds is not computed again.
    """
    from smupar.lm.use.score import score_file

    print(score_file(folder, requests, out, ScoringConfig(**config)))


def table(
    requests: str = "requests.jsonl",
    scores: tuple[str, ...] = ("scores.jsonl",),
    out: str = "runs/eval",
    data_dir: str | None = None,
) -> None:
    """Turn scores into the table, one row for each file of scores. Needs the harness.

    Args:
        requests: Made by `smupar eval requests`.
        scores: Made by `smupar eval score`, a file for each model.
        out: Folder for results.json, table.md, table.csv.
        data_dir: Where the tasks' local copies are now; default where they were.
    """
    from smupar.integrations.lm_eval import tabulate

    print(f"{tabulate(requests, list(scores), out, data_dir=data_dir)}\n{out}/results.json, table.md, table.csv")
