"""Table 2: downstream accuracy of Figure 3's models, by EleutherAI's harness."""

from __future__ import annotations

from pathlib import Path

from smupar.integrations.eval_table import Results
from smupar.integrations.lm_eval import evaluate, load_tasks
from smupar.lm.config.commands import EvalConfig, ScoringConfig, TasksConfig
from smupar.lm.config.run import RunConfig
from smupar.paper import fig03
from smupar.paper.figure import Claim, Figure, Place, Rows, title

# Without the user's own copy of RACE, which may not be handed on.
_LOCAL_TASKS = ("arc_easy", "lambada_openai", "piqa", "boolq")


def tasks(data_dir: str | None) -> TasksConfig:
    local = data_dir is not None and not (Path(data_dir) / "race.jsonl").exists()
    return TasksConfig(tasks=_LOCAL_TASKS, data_dir=data_dir) if local else TasksConfig(data_dir=data_dir)


def prepare(data_dir: str | None) -> None:
    """Raises before anything is trained if the tasks cannot be read."""
    load_tasks(tasks(data_dir))


def judge(folders: dict[str, RunConfig], out: Path, data_dir: str | None, device: str) -> Results:
    """Evaluates the runs in these folders."""
    return evaluate(EvalConfig(tuple(folders), tasks(data_dir), ScoringConfig(device=device), str(out)))


def measure(place: Place, rows: Rows) -> Results:
    """Evaluates the runs that finished, and prints the table."""
    finished = [row.config for row in rows if row.summary.status == "finished"]
    folders = {str(place.runs / config.id): config for config in finished}
    results = judge(folders, place.folder, place.data_dir, place.device)
    print(text(results, {config.id: config for config in finished}))
    return results


def text(results: Results, runs_by_id: dict[str, RunConfig]) -> str:
    """The table with rules and sparsities in the place of folders."""
    shown = str(results)
    for about, _ in results.models:
        run = runs_by_id[about["config_id"]]
        label = f"{title(run.rule)} {run.sparsity:.4g}"
        shown = shown.replace(about["folder"], label.ljust(len(about["folder"])))
    return shown


def claim(results: Results) -> Claim:
    """That the table is there; what it says is for the reader."""
    whole = all(set(numbers) == set(results.documents) for _, numbers in results.models)
    text = f"{len(results.models)} models on {len(results.documents)} tasks, {sum(results.documents.values()):,} documents"
    return Claim(whole and bool(results.models), f"{text}, by lm-eval {results.lm_eval}")


FIGURE = Figure(
    title="Downstream accuracy",
    shows="SmuPar is best or within 0.01 of the best at almost every sparsity and task; at 99.2 % SP is close to chance.",
    runs=fig03.runs,
    keeps_weights=True,
    prepare=prepare,
    measure=measure,
    claim=claim,
)
