"""The paper's Table 2: a row for each model, a column for each task, in percent with standard errors."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smupar import __version__
from smupar.output.files import write_atomic
from smupar.output.tables import aligned

_TITLES = {"arc_easy": "ARC-easy", "lambada_openai": "LAMBADA", "race": "RACE", "piqa": "PIQA", "boolq": "BoolQ"}


@dataclass(frozen=True)
class Number:
    value: float
    stderr: float | None  # None for a single document, which has no standard error


TaskResults = dict[str, Number]  # metric -> number; metrics are acc, and acc_norm or perplexity


@dataclass(frozen=True)
class Results:
    """All numbers of an evaluation. ``str`` gives the table."""

    lm_eval: str  # the harness's version
    limit: int | None
    data_dir: str | None  # None if the harness's own datasets are used
    documents: dict[str, int]  # number of documents by task
    random: dict[str, float]  # accuracy of random guessing, by task
    # for each model: the header of its scores, and its numbers by task
    models: tuple[tuple[dict[str, Any], dict[str, TaskResults]], ...]

    def __str__(self) -> str:
        return aligned(self._cells("{}"))

    def _cells(self, model: str) -> list[list[str]]:
        """The table's cells, titles first. ``model`` is the format string for a model's folder."""
        rows = [["model", *(_TITLES[task] for task in self.documents), "average"], ["random", *map(_percent, self._chance())]]
        return rows + [[model.format(header["folder"]), *map(_percent, self._row(numbers))] for header, numbers in self.models]

    def markdown(self) -> str:
        titles, *rows = self._cells("`{}`")
        rows = [titles, ["---"] * len(titles), *rows]
        table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        counts = ", ".join(f"{_TITLES[task]} {number:,}" for task, number in self.documents.items())
        return f"{table}\n\nAccuracy in percent ± standard error, zero-shot, lm-eval {self.lm_eval}. Documents: {counts}.\n"

    def csv(self) -> str:
        """The table as CSV, with accuracies as shares of 1, not in percent."""
        names = [*self.documents, "average"]
        rows: list[tuple[list[str], list[Number]]] = [(["random", ""], self._chance())]
        rows += [([header["folder"], header["config_id"] or ""], self._row(numbers)) for header, numbers in self.models]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["model", "config_id", *(column for name in names for column in (name, f"{name}_stderr"))])
        writer.writerows(
            [*who, *(_cell(value) for number in row for value in (number.value, number.stderr))] for who, row in rows
        )
        return text.getvalue()

    def to_json(self) -> str:
        models = [
            header
            | {
                "results": {task: {m: asdict(number) for m, number in metrics.items()} for task, metrics in numbers.items()},
                "average": asdict(self._row(numbers)[-1]),
            }
            for header, numbers in self.models
        ]
        described = asdict(self) | {"models": models, "average_random": self._chance()[-1].value}
        versions = {"lm_eval": described.pop("lm_eval"), "smupar": __version__}
        return json.dumps({"format": "smupar-eval/1", "versions": versions} | described, indent=1)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("results.json", self.to_json()), ("table.md", self.markdown()), ("table.csv", self.csv())):
            write_atomic(folder / name, text)

    def _chance(self) -> list[Number]:
        return with_average([Number(self.random[task], None) for task in self.documents])

    def _row(self, numbers: dict[str, TaskResults]) -> list[Number]:
        return with_average([numbers[task]["acc"] for task in self.documents])


def with_average(row: list[Number]) -> list[Number]:
    """Adds the average. All tasks have the same weight, and their errors are assumed to be independent."""
    errors = [number.stderr for number in row if number.stderr is not None]
    stderr = math.hypot(*errors) / len(row) if len(errors) == len(row) else None
    return [*row, Number(sum(number.value for number in row) / len(row), stderr)]


def _percent(number: Number) -> str:
    return f"{100 * number.value:.1f}" + ("" if number.stderr is None else f" ± {100 * number.stderr:.1f}")


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
