"""``smupar eval`` and its three steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from smupar.cli.answers import Reply, TextLine
from smupar.cli.answers import table as aligned_lines
from smupar.cli.commands import Folder
from smupar.cli.flags import Arg, Typed
from smupar.cli.loading import loading
from smupar.lm.config.commands import EvalConfig, ScoringConfig, TasksConfig
from smupar.lm.config.fields import changed

if TYPE_CHECKING:
    from smupar.integrations.eval_table import Results


def evaluate(config: Annotated[Typed, EvalConfig]) -> Reply:
    """Evaluate models on ARC-easy, LAMBADA, RACE, PIQA and BoolQ with EleutherAI's harness, as in Table 2.

    You can also do this in three steps: `smupar eval requests` and `smupar eval table` need the harness, and
    `smupar eval score` needs only the model.
    """
    chosen = changed(EvalConfig(config.get("folders", ())), config)
    with loading():
        from smupar.integrations.lm_eval import evaluate as run

    return _tabulated(run(chosen), chosen.out)


def _tabulated(results: Results, out: str) -> Reply:
    where = TextLine(f"{out}/results.json, table.md, table.csv")
    return Reply([*aligned_lines(str(results)), where], {"folder": out, "results": results})


def requests(config: Annotated[Typed, TasksConfig], out: Annotated[str, Arg("FILE")] = "requests.jsonl") -> Reply:
    """Write the questions of the tasks to a file, for `smupar eval score`. Needs the harness.

    Args:
        out: File to write.
    """
    with loading():
        from smupar.integrations.lm_eval import write_requests

    chosen = TasksConfig(**config)
    return Reply([TextLine(write_requests(chosen, out))], {"out": out, "tasks": chosen.tasks})


def score(
    folder: Folder,
    config: Annotated[Typed, ScoringConfig],
    requests: str = "requests.jsonl",
    out: Annotated[str, Arg("FILE")] = "scores.jsonl",
) -> Reply:
    """Compute the loglikelihoods for a file of requests, without the harness. If interrupted, run the same command to resume.

    Args:
        folder: Folder of a run, a checkpoint, an export, or a model that transformers reads.
        requests: File made by `smupar eval requests`.
        out: File to append scores to. Scores that it already has are not computed again.
    """
    with loading():
        from smupar.lm.use.score import score_file

    return Reply([TextLine(score_file(folder, requests, out, ScoringConfig(**config)))], {"folder": folder, "out": out})


def table(
    requests: str = "requests.jsonl",
    scores: tuple[str, ...] = ("scores.jsonl",),
    out: str = "runs/eval",
    data_dir: str | None = None,
) -> Reply:
    """Turn scores into a table with one row for each file of scores. Needs the harness.

    Args:
        requests: File made by `smupar eval requests`.
        scores: Files made by `smupar eval score`, one for each model.
        out: Folder for results.json, table.md and table.csv.
        data_dir: Folder with the local copies of the tasks, if it has moved since the requests were written.
    """
    with loading():
        from smupar.integrations.lm_eval import tabulate

    return _tabulated(tabulate(requests, list(scores), out, data_dir=data_dir), out)
