"""Table 2: downstream accuracy of the models of Figure 3, measured with EleutherAI's harness."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from smupar.integrations.eval_table import Results
from smupar.integrations.lm_eval import evaluate, load_tasks
from smupar.lm.config.commands import EvalConfig, ScoringConfig, TasksConfig
from smupar.lm.config.run_config import RunConfig
from smupar.output.files import write_atomic
from smupar.paper.figure import Claim, Figure, Place, Rows, runs_of, title

# The tasks for a --data-dir without race.jsonl: copies of RACE may not be redistributed.
_LOCAL_TASKS = ("arc_easy", "lambada_openai", "piqa", "boolq")
_ALMOST_ALL = 0.9


def tasks(data_dir: str | None) -> TasksConfig:
    local = data_dir is not None and not (Path(data_dir) / "race.jsonl").exists()
    return TasksConfig(tasks=_LOCAL_TASKS, data_dir=data_dir) if local else TasksConfig(data_dir=data_dir)


def prepare(data_dir: str | None) -> None:
    """Raises before anything is trained if the tasks cannot be read."""
    load_tasks(tasks(data_dir))


def measure(place: Place, rows: Rows) -> str:
    """Evaluates the finished runs. Prints, writes and returns the table."""
    finished = {row.config.id: row.config for row in rows if row.summary.status == "finished"}
    folders = tuple(str(place.runs / id_) for id_ in finished)
    scoring = ScoringConfig(device=place.device)
    results = evaluate(EvalConfig(folders, tasks(place.data_dir), scoring, str(place.folder)))
    table = f"{labelled(results, finished)}\n\n{_about(results)}\n"
    print(table, end="")
    write_atomic(place.folder / "table.txt", table)
    return table


def labelled(results: Results, runs_by_id: dict[str, RunConfig]) -> Results:
    """The results, with models named by rule and sparsity instead of their folders."""
    models = []
    for about, numbers in results.models:
        run = runs_by_id[about["config_id"]]
        models.append(({**about, "folder": f"{title(run.rule)} {run.sparsity:.4g}"}, numbers))
    return replace(results, models=tuple(models))


def _about(results: Results) -> str:
    num_documents = sum(results.documents.values())
    return (
        f"{len(results.models)} models, {len(results.documents)} tasks, {num_documents:,} documents, lm-eval {results.lm_eval}"
    )


# Reading


class Compared(NamedTuple):
    """Accuracies of the rules on one task at one sparsity, in percent."""

    values: dict[str, float]  # by the title of the rule
    errors: dict[str, float]  # standard errors; 0 for a single document

    @property
    def tells_apart(self) -> bool:
        """Whether the best and the worst rule differ by more than two standard errors of their difference."""
        best, worst = max(self.values, key=self.values.__getitem__), min(self.values, key=self.values.__getitem__)
        return self.values[best] - self.values[worst] > 2 * math.hypot(self.errors[best], self.errors[worst])

    def is_good(self, rule: str) -> bool:
        """Whether the rule is the best, or at most one percentage point below it. The paper writes this point as 0.01."""
        return self.values[rule] >= max(self.values.values()) - 1


def cells(table: str) -> list[Compared]:
    """A cell for each task at each sparsity above 0, read from the text of the table."""
    lines = [re.split(r" {2,}", line) for line in table.partition("\n\n")[0].splitlines()]
    found: dict[tuple[str, int], Compared] = {}
    for name, *numbers in lines[2:]:  # after the titles and random guessing
        rule, _, sparsity = name.rpartition(" ")
        for task, number in enumerate(numbers[:-1]):  # the last is the average
            value, _, error = number.partition(" ± ")
            cell = found.setdefault((sparsity, task), Compared({}, {}))
            cell.values[rule], cell.errors[rule] = float(value), float(error or 0)
    return [cell for (sparsity, _), cell in found.items() if float(sparsity) > 0]


def claim(table: str) -> Claim:
    """Whether SmuPar is best or within 0.01 of the best almost everywhere, and at least as often as every other rule. The
    answer is
    unknown unless rules differ significantly in most pairs of task and sparsity."""
    compared = cells(table)
    telling = [cell for cell in compared if cell.tells_apart]
    counts = {rule: sum(cell.is_good(rule) for cell in compared) for rule in compared[0].values}
    ours = counts[title("smupar")]
    is_best = ours >= _ALMOST_ALL * len(compared) and ours == max(counts.values())
    words = ", ".join(f"{rule} {count}" for rule, count in counts.items())
    text = (
        f"how often a rule is best or within 0.01 of the best, in {len(compared)} pairs of task and sparsity: {words}; in "
        f"{len(telling)} pairs rules differ by more than two standard errors"
    )
    return Claim(is_best if len(telling) > len(compared) / 2 else None, f"{text}. {table.strip().splitlines()[-1]}")


FIGURE = Figure(
    title="Downstream accuracy",
    claimed="Sparse models are better at downstream tasks under SmuPar",
    shows="SmuPar is best or within 0.01 of the best at almost every sparsity and task; at 99.2 % SP is close to chance.",
    runs=lambda scale: runs_of(scale, "pretraining"),
    keeps_weights=True,
    prepare=prepare,
    measure=measure,
    from_published=lambda published: published["table"],
    claim=claim,
)
