"""Evaluation with EleutherAI's harness (lm-eval). The harness writes the requests, our code scores them, and the harness's own
metrics turn scores into numbers.

There are three steps, so that the second (``smupar.lm.use.score``) can run without the harness:

    write_requests -> requests.jsonl -> score_file -> scores.jsonl -> tabulate -> results.json, table.md, table.csv
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from smupar.integrations.eval_table import Number, Results, TaskResults
from smupar.lm.config.commands import EvalConfig, TasksConfig
from smupar.lm.use import score, score_files
from smupar.output.files import resolved
from smupar.output.json_files import as_record
from smupar.output.optional import first_line, optional
from smupar.refusals import refuse


@dataclass(frozen=True)
class _Questions:
    """The header of a file of requests: where they come from."""

    tasks: list[str]
    data_dir: str | None
    limit: int | None
    sha256: str  # of the requests, and of the documents with the right answers
    lm_eval: str  # version


def _read_requests(path: str | Path) -> tuple[_Questions, list[score_files.ScoreRequest]]:
    header, asked = score_files.read_requests(path)
    ours = {item.name: header[item.name] for item in fields(_Questions) if item.name in header}
    return as_record(_Questions, ours, source=str(path), remedy="make it with smupar eval requests"), asked


def evaluate(config: EvalConfig) -> Results:
    """Runs all three steps in one process. Their files stay in ``config.out``, from which the same command can resume."""
    out = Path(config.out)
    requests = out / "requests.jsonl"
    for folder in config.folders:
        score.refuse_without_model(folder)
    if requests.exists():
        there, asked = _read_requests(requests)[0], config.questions
        old, new = (tuple(there.tasks), there.limit), (tuple(asked.tasks), asked.limit)
        if old != new:
            scopes = "; ".join(f"{', '.join(tasks)}, limit {limit}" for tasks, limit in (old, new))
            raise ValueError(f"{out} holds results of other questions (there and here: {scopes}): choose another --out")
    write_requests(config.questions, requests)
    scores = []
    for folder in config.folders:
        path = resolved(Path(folder))
        scores.append(out / "scores" / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}.jsonl")
        score.score_file(folder, requests, scores[-1], config.scoring)
    return tabulate(requests, scores, out)


def write_requests(config: TasksConfig, out: str | Path) -> str:
    """Writes all requests to a file. Returns a line about its content."""
    requests, digest = _requests(load_tasks(config), config)
    data_dir = None if config.data_dir is None else str(Path(config.data_dir).resolve())
    questions = _Questions(list(config.tasks), data_dir, config.limit, digest, _module("lm_eval").__version__)
    score_files.write_requests(Path(out), asdict(questions), requests)
    counts = Counter(request.task for request in requests)
    return f"{len(requests):,} requests ({', '.join(f'{task} {count:,}' for task, count in counts.items())}) in {out}"


def tabulate(requests: str | Path, scores: Sequence[str | Path], out: str | Path, *, data_dir: str | None = None) -> Results:
    """Turns the scores of several models into the harness's numbers, and writes them to the folder ``out``."""
    questions, asked = _read_requests(requests)
    config = TasksConfig(tuple(questions.tasks), data_dir or questions.data_dir, questions.limit)
    models = []
    for file in scores:  # read before the slow steps, to raise errors early
        identity, answers = score_files.read_scores(file)
        missing = [request for request in asked if request.key not in answers]
        if missing:
            raise ValueError(
                f"{file} lacks {len(missing):,} of the {len(asked):,} scores that {requests} asks for, the first is "
                f"{missing[0].where}: smupar eval score {identity.get('folder')} --requests {requests} --out {file}"
            )
        models.append(({name: value for name, value in identity.items() if name != "format"}, answers))
    tasks = load_tasks(config)
    _, digest = _requests(tasks, config)
    refuse(
        digest != questions.sha256,
        f"{requests} was made from other documents than those of {config.data_dir or 'the harness now'}: make and score it "
        "again",
    )
    results = Results(
        lm_eval=_module("lm_eval").__version__,
        limit=config.limit,
        data_dir=config.data_dir,
        documents={name: len({r.doc for r in asked if r.task == name}) for name in tasks},
        random={name: _by_chance(task, [r for r in asked if r.task == name]) for name, task in tasks.items()},
        models=tuple((identity, _metrics(tasks, answers, config.limit)) for identity, answers in models),
    )
    results.write(Path(out))
    return results


def _by_chance(task: Any, requests: list[score_files.ScoreRequest]) -> float:
    """The accuracy of random guessing; 0 for tasks without choices, where any word is possible."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return 0.0
    num_choices = Counter(request.doc for request in requests)
    return sum(1 / number for number in num_choices.values()) / len(num_choices)


# The harness


_module = partial(optional, purpose="smupar eval", extra="eval")


def load_tasks(config: TasksConfig) -> dict[str, Any]:
    """The harness's task objects, from its own definitions or from local copies."""
    if config.data_dir is not None:
        return {name: _local_task(name, read_documents(name, config.data_dir)) for name in config.tasks}
    tasks = _module("lm_eval.tasks")
    try:
        loaded = tasks.get_task_dict(list(config.tasks), tasks.TaskManager())
    except Exception as error:  # a missing network or a moved dataset may raise any type
        raise ValueError(
            f"the harness cannot load its tasks ({first_line(error)}): pass --data-dir with local copies"
        ) from error
    return {name: loaded[name] for name in config.tasks}


def _requests(tasks: dict[str, Any], config: TasksConfig) -> tuple[list[score_files.ScoreRequest], str]:
    """The requests of the tasks, and a hash of the requests and of the documents with the right answers."""
    requests, digest = [], hashlib.sha256()
    for name, task in tasks.items():
        with _quiet():
            task.build_all_requests(limit=config.limit, rank=0, world_size=1)
        for instance in task.instances:
            context, continuation = instance.args
            requests.append(score_files.ScoreRequest(name, instance.doc_id, instance.idx, context, continuation))
            digest.update(json.dumps([name, context, continuation, instance.doc], default=str, sort_keys=True).encode())
    return requests, digest.hexdigest()


def _metrics(tasks: dict[str, Any], scores: dict[str, score_files.Score], limit: int | None) -> dict[str, TaskResults]:
    """The numbers of each task, from the harness's evaluation of a model that returns the stored scores."""
    harness, base = _module("lm_eval.evaluator"), _module("lm_eval.api.model").LM

    class Stored(base):  # type: ignore[misc, valid-type]
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            answers = [scores[score_files.ScoreRequest("", 0, 0, *request.args).key] for request in requests]
            return [(answer.loglikelihood, answer.is_greedy) for answer in answers]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError

        def generate_until(self, requests: list[Any]) -> list[str]:
            raise NotImplementedError

    with _quiet():
        # The standard error of perplexity needs resampling, and the harness's default number of resamples takes minutes.
        given = harness.evaluate(lm=Stored(), task_dict=tasks, limit=limit, bootstrap_iters=1000, log_samples=False)
    metrics: dict[str, TaskResults] = defaultdict(dict)
    for name, numbers in given["results"].items():
        for key, value in numbers.items():
            metric, comma, filtered = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                error = numbers.get(f"{metric}_stderr,{filtered}")
                metrics[name][metric] = Number(float(value), float(error) if isinstance(error, int | float) else None)
    return dict(metrics)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the harness from printing while it resamples, and from forking a process per core, which is unsafe with torch's
    threads."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        del os.environ["DISABLE_MULTIPROC"]
        if before is not None:
            os.environ["DISABLE_MULTIPROC"] = before


# Local copies

# Functions from a query to the harness's own prompt. RACE's prompt ends with its question.
_PROMPTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "arc_easy": lambda doc: doc["query"].removesuffix("\n") + "\nAnswer:",
    "piqa": lambda doc: doc["query"].removesuffix("\n") + "\nAnswer:",
    "boolq": lambda doc: doc["query"].removeprefix("Passage: ").removesuffix("\n") + "\nAnswer:",
    "race": lambda doc: doc["query"],
}


def read_documents(task: str, folder: str) -> list[dict[str, Any]]:
    """The documents in TASK.jsonl of a folder, checked line by line."""
    path, has_choices = Path(folder) / f"{task}.jsonl", task != "lambada_openai"
    form = (
        '{"query": "Question: ...", "choices": ["...", "..."], "gold": 0}'
        if has_choices
        else '{"context": "...", "continuation": "word"}'
    )
    remedy = f"every line should be like {form}"
    refuse(not path.is_file(), f"no file {path}: {remedy}")
    documents = []
    for number, row in score_files.read_lines(path, remedy):
        refuse(not (_is_choice if has_choices else _is_last_word)(row), f"{path}, line {number}: {remedy}")
        documents.append({name: row[name] for name in json.loads(form)})
    refuse(not documents, f"{path} is empty: {remedy}")
    return documents


def _is_choice(row: dict[str, Any]) -> bool:
    choices, gold = row.get("choices"), row.get("gold")
    return (
        isinstance(row.get("query"), str)
        and isinstance(choices, list)
        and len(choices) > 1
        and all(isinstance(choice, str) and choice for choice in choices)
        and type(gold) is int
        and 0 <= gold < len(choices)
    )


def _is_last_word(row: dict[str, Any]) -> bool:
    return isinstance(row.get("context"), str) and isinstance(row.get("continuation"), str) and row["continuation"] != ""


def _local_task(name: str, documents: list[dict[str, Any]]) -> Any:
    """A task with the harness's own prompts and metrics, on local documents instead of a download."""
    base, datasets = _module("lm_eval.api.task").ConfigurableTask, _module("datasets")

    class Local(base):  # type: ignore[misc, valid-type]
        def download(self, *args: Any, **kwargs: Any) -> None:
            self.dataset = {"test": datasets.Dataset.from_list(documents)}

    metrics = ("perplexity", "acc") if name == "lambada_openai" else ("acc", "acc_norm")
    config: dict[str, Any] = {
        "task": name,
        "test_split": "test",
        "num_fewshot": 0,
        "metric_list": [
            {
                "metric": metric,
                "aggregation": "perplexity" if metric == "perplexity" else "mean",
                "higher_is_better": metric != "perplexity",
            }
            for metric in metrics
        ],
    }
    if name == "lambada_openai":
        config |= {
            "output_type": "loglikelihood",
            "doc_to_text": lambda doc: doc["context"],
            "doc_to_target": lambda doc: " " + doc["continuation"].lstrip(" "),
        }
    else:
        config |= {
            "output_type": "multiple_choice",
            "doc_to_text": _PROMPTS[name],
            "doc_to_target": lambda doc: doc["gold"],
            "doc_to_choice": lambda doc: doc["choices"],
        }
    return Local(config=config)
