"""The table of a study's runs as a page shows it: a row for each run, and how many are done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from smupar.lm.config.fields import flat
from smupar.lm.config.run_config import LATER_FIELDS, ModelConfig, RunConfig
from smupar.lm.run.metrics import METRICS_FILE, read_rows
from smupar.output.checksums import refuse_lost_seal
from smupar.output.json_files import as_record, read_object
from smupar.output.page.document import PageProgress, PageTable, finite
from smupar.refusals import refuse
from smupar.rules import get_rule
from smupar.study.definition import USUAL, varied_columns
from smupar.study.live import Signs
from smupar.study.store import Result, fields_of

if TYPE_CHECKING:
    from smupar.lm.run.folder import Summary

# Columns of the table with a run's results. They follow the columns of its configuration.
_ENDS = ("loss", "valid_loss", "steps_done", "tokens_per_second", "seconds", "device")


def result_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The rows of results, as a page shows them."""
    rows = [_row(fields_of(result.config), asdict(result.summary)) for result in results]
    shared = rules_of_dense_runs({}, rows)
    return [row | {"rule": shown_rule(row, shared)} for row in rows]


def unfinished_row(run: str, fields: Mapping[str, Any], signs: Signs) -> dict[str, Any]:
    """The row of a run that waits or is being trained, with its loss so far."""
    losses = signs.losses.get(run) or ([[0, None]] if run in signs.states else [])
    last = {"loss": losses[-1][1], "steps_done": losses[-1][0]} if losses else {}
    return dict(fields) | dict.fromkeys(_ENDS) | last | {"state": signs.states.get(run, "waiting")}


def _row(fields: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a run: its configuration, then its results."""
    return {
        **fields,
        "loss": finite(summary["train_loss"]),
        "valid_loss": finite(summary["valid_loss"]),
        "steps_done": summary["steps"],
        "tokens_per_second": finite(summary["tokens_per_second"]),
        "seconds": finite(summary["seconds"]),
        "device": summary["device"],
        "state": summary["status"],
    }


@dataclass(frozen=True)
class ShownSummary:
    """The fields of a ``Summary`` that a page shows."""

    id: str
    status: str
    steps: int
    num_parameters: int
    sparsity: float
    train_loss: float | None
    valid_loss: float | None
    seconds: float
    tokens_per_second: float
    device: str


def read_run(folder: Path) -> tuple[Result, dict[str, Any]]:
    """A finished run and its row. Its summary is read as plain values, because the module of ``Summary`` imports torch, which
    takes seconds, and a page has to open at once."""
    remedy = "start the study's command again"
    values, summary = (read_object(folder / name, remedy=remedy) for name in ("config.json", "summary.json"))
    refuse_lost_seal(folder / "summary.json", folder, remedy=remedy)
    shown = {name: summary[name] for name in ShownSummary.__annotations__ if name in summary}
    as_record(ShownSummary, shown, source=str(folder / "summary.json"), remedy=remedy)
    # Unlike from_json this does not check the types of fields: the id, which is compared next, covers every field.
    model, betas = ModelConfig(**values["model"]), tuple(values["betas"])
    config = RunConfig(**{**values, "model": model, "betas": betas}).normalised
    for name, run in (("config.json", config.id), ("summary.json", summary["id"])):
        refuse(run != folder.name, f"{folder / name} is damaged (it belongs to run {run})")
    described = LATER_FIELDS | flat(values) | {"id": folder.name, "betas": " ".join(map(str, config.betas))}
    row = _row(described | {"follow": config.portable.follow}, summary)
    return Result(config, cast("Summary", SimpleNamespace(**summary))), row


def read_metrics(folder: Path) -> list[list[float | None]]:
    """Step, loss and validation loss from the lines of metrics.jsonl, without lines that are damaged or half written."""
    try:
        rows = read_rows(folder / METRICS_FILE)
    except OSError:
        return []
    return [[row["step"], finite(row.get("loss")), finite(row.get("valid_loss"))] for row in rows if row is not None]


def table_of(rows: Sequence[Mapping[str, Any]]) -> PageTable | None:
    """The table of runs: the columns in which they differ, and their results; None without rows."""
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row))  # runs of other versions may lack some columns
    found = varied_columns([{name: row.get(name) for name in names} for row in rows], ("id", "state", *_ENDS))
    varied = sorted(found, key=lambda name: (USUAL.index(name) if name in USUAL else len(USUAL), name == "seed"))
    columns = ["id", "state", *varied, *(name for name in _ENDS if name != "device" or _num(rows, "device") > 1)]
    rows = sorted(rows, key=lambda row: [_sortable(row.get(name)) for name in varied])
    return {
        "title": "Runs",
        "columns": columns,
        "rows": [[row.get(name) for name in columns] for row in rows],
        "varied": varied,
        "numeric": [name for name in varied if all(_is_number(row.get(name)) for row in rows)],
    }


def _num(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return len({row.get(name) for row in rows} - {None})


def _sortable(value: Any) -> tuple[bool, Any]:
    return (False, value) if _is_number(value) else (True, str(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def rules_of_dense_runs(definition: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The titles of all rules whose dense models are the same as muP's, and so share muP's runs."""
    asked = definition.get("rules") or sorted({row["rule"] for row in rows if row.get("sparsity")}, reverse=True)
    titles = [get_rule(rule).title for rule in asked if rule not in ("sp", "measured", "moment")]
    return ", ".join(dict.fromkeys(titles)) or get_rule("smupar" if "measured" in asked else "mup").title


def shown_rule(row: Mapping[str, Any], of_dense_runs: str) -> str:
    if row["rule"] == "mup" and row.get("sparsity") == 0:
        return of_dense_runs
    return "measured updates" if row.get("follow") else get_rule(row["rule"]).title


def progress_of(rows: Sequence[Mapping[str, Any]], signs: Signs) -> PageProgress:
    states = [row["state"] for row in rows]
    working = [worker for worker in signs.workers if worker["state"] == "running"]
    speeds = [worker["tokens_per_second"] for worker in working]
    is_between = bool(working) and not {"running", "stalled"} & set(states)
    return {
        "done": states.count("finished") + states.count("diverged"),
        "running": states.count("running"),
        "waiting": states.count("waiting") + states.count("stopped"),
        "diverged": states.count("diverged"),
        "stalled": states.count("stalled"),
        "total": len(rows),
        "doing": next((worker["doing"] for worker in working if worker["doing"]), "starting the next run")
        if is_between
        else "",
        "seconds_left": signs.seconds_left if signs.seconds_left is None else math.ceil(signs.seconds_left),
        "tokens_per_second": sum(speed or 0.0 for speed in speeds) or None,
        "workers": list(signs.workers),
    }
