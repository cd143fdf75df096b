"""``smupar eval`` and its three steps."""

from __future__ import annotations

from typing import Annotated

import tyro

from smupar.cli.flags import Typed
from smupar.lm.config.commands import EvalConfig, ScoringConfig, TasksConfig
from smupar.lm.config.run import changed


def evaluate(config: Annotated[Typed, EvalConfig]) -> None:
    """Evaluate models on ARC-easy, LAMBADA, RACE, PIQA and BoolQ with EleutherAI's harness, as in Table 2.

    You can also do this in three steps: `smupar eval requests` and `smupar eval table` need the harness, and
    `smupar eval score` needs only the model.
    """
    from smupar.integrations.lm_eval import evaluate as run

    chosen = changed(EvalConfig(config.get("folders", ())), config)
    print(f"{run(chosen)}\n{chosen.out}/results.json, table.md, table.csv")


def requests(config: Annotated[Typed, TasksConfig], out: str = "requests.jsonl") -> None:
    """Write the questions of the tasks to a file, for `smupar eval score`. Needs the harness.

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
    """Compute the loglikelihoods that a file asks for, without the harness. If interrupted, run the same command to resume.

    Args:
        folder: Folder of a run, a checkpoint, an export, or a model that transformers reads.
        requests: File made by `smupar eval requests`.
        out: File to append to. Scores that it already has are not computed again.
    """
    from smupar.lm.use.score import score_file

    print(score_file(folder, requests, out, ScoringConfig(**config)))


def table(
    requests: str = "requests.jsonl",
    scores: tuple[str, ...] = ("scores.jsonl",),
    out: str = "runs/eval",
    data_dir: str | None = None,
) -> None:
    """Turn scores into a table with one row for each file of scores. Needs the harness.

    Args:
        requests: File made by `smupar eval requests`.
        scores: Files made by `smupar eval score`, one for each model.
        out: Folder for results.json, table.md and table.csv.
        data_dir: Folder with the local copies of the tasks, if it has moved since the requests were written.
    """
    from smupar.integrations.lm_eval import tabulate

    print(f"{tabulate(requests, list(scores), out, data_dir=data_dir)}\n{out}/results.json, table.md, table.csv")
