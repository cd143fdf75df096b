"""Table 2: downstream accuracy of the models of Figure 3, measured with EleutherAI's harness."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from smupar.integrations.eval_table import Results
from smupar.integrations.lm_eval import evaluate, load_tasks
from smupar.lm.config.commands import EvalConfig, ScoringConfig, TasksConfig
from smupar.lm.config.run import RunConfig
from smupar.paper.figure import Claim, Figure, Place, Rows, runs_of, title

# The tasks for a --data-dir without race.jsonl: copies of RACE may not be redistributed.
_LOCAL_TASKS = ("arc_easy", "lambada_openai", "piqa", "boolq")


def tasks(data_dir: str | None) -> TasksConfig:
    local = data_dir is not None and not (Path(data_dir) / "race.jsonl").exists()
    return TasksConfig(tasks=_LOCAL_TASKS, data_dir=data_dir) if local else TasksConfig(data_dir=data_dir)


def prepare(data_dir: str | None) -> None:
    """Raises before anything is trained if the tasks cannot be read."""
    load_tasks(tasks(data_dir))


def measure(place: Place, rows: Rows) -> Results:
    """Evaluates the runs that finished, and prints the table."""
    finished = {row.config.id: row.config for row in rows if row.summary.status == "finished"}
    folders = tuple(str(place.runs / id_) for id_ in finished)
    scoring = ScoringConfig(device=place.device)
    results = evaluate(EvalConfig(folders, tasks(place.data_dir), scoring, str(place.folder)))
    print(labelled(results, finished))
    return results


def labelled(results: Results, runs_by_id: dict[str, RunConfig]) -> Results:
    """The results with rules and sparsities as names of the models, instead of folders."""
    models = []
    for about, numbers in results.models:
        run = runs_by_id[about["config_id"]]
        models.append(({**about, "folder": f"{title(run.rule)} {run.sparsity:.4g}"}, numbers))
    return replace(results, models=tuple(models))


def claim(results: Results) -> Claim:
    """Claims only that the table is complete. The reader judges its numbers."""
    is_complete = all(set(numbers) == set(results.documents) for _, numbers in results.models)
    text = f"{len(results.models)} models on {len(results.documents)} tasks, {sum(results.documents.values()):,} documents"
    return Claim(is_complete and bool(results.models), f"{text}, by lm-eval {results.lm_eval}")


FIGURE = Figure(
    title="Downstream accuracy",
    shows="SmuPar is best or within 0.01 of the best at almost every sparsity and task; at 99.2 % SP is close to chance.",
    runs=lambda scale: runs_of(scale, "pretraining"),
    keeps_weights=True,
    prepare=prepare,
    measure=measure,
    claim=claim,
)
