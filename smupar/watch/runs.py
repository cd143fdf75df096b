"""The document of runs that `smupar train` trained: their loss curves, progress and traces."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smupar.lm.config.fields import flat
from smupar.lm.config.run_config import LATER_FIELDS
from smupar.lm.run.metrics import METRICS_FILE, read_rows
from smupar.output.files import changed_at, is_locked
from smupar.output.json_files import WRONG_TYPES, DamagedFileError, read_object
from smupar.output.page.document import Chart, Document, PageProgress, finite
from smupar.rules import get_rule
from smupar.study.page.run_table import read_metrics, table_of
from smupar.updates.page import read_trace, trace_charts

TRACE_FILE = "trace.json"
_QUIET_SECONDS = 180.0  # a run that has written nothing for this long is not running


class Runs:
    """The runs in a folder that belong to no study."""

    def __init__(self, folder: Path, runs: Sequence[Path]) -> None:
        self.folder, self.runs = folder, {path.name: path for path in runs}

    @property
    def version(self) -> str:
        files = (path / name for path in self.runs.values() for name in ("metrics.jsonl", "summary.json"))
        is_running = (_is_running(path) for path in self.runs.values() if not (path / "summary.json").exists())
        return " ".join(map(str, (*(changed_at(file) for file in files), *is_running)))

    def document(self) -> Document:
        rows, damaged = [], []
        for path in self.runs.values():
            try:
                rows.append(_row(path))
            except ValueError as error:
                damaged.append(str(error))
        running = [row for row in rows if row["state"] == "running"]
        return {
            "kind": "runs",
            "title": "Run" if len(rows) == 1 else "Runs",
            "headline": _headline(rows),
            "sentence": f"Left out: {'; '.join(damaged)}." if damaged else "",
            "answers": [],
            "charts": self._trace_charts() if len(self.runs) == 1 else [],
            "table": table_of(rows),
            "progress": _progress(rows),
            "curves": {},
            "command": f"smupar generate {shlex.quote(str(self.folder))}" if _is_finished(rows) else "",
            "folder": str(self.folder),
            "details": [],
            "is_live": bool(running),
            "made": time.time(),
        }

    def curve(self, run: str) -> list[list[float | None]]:
        return read_metrics(self.runs[run]) if run in self.runs else []

    def folder_of(self, run: str) -> Path | None:
        return self.runs.get(run)

    def _trace_charts(self) -> list[Chart]:
        (path,) = self.runs.values()
        trace = read_trace(path / TRACE_FILE)
        return trace_charts(trace) if trace else []


def _row(path: Path) -> dict[str, Any]:
    """The row of a run: its configuration and its state. Raises ValueError if its files are damaged."""
    remedy = "restore it from a copy, or start the run's command again"
    config = LATER_FIELDS | flat(read_object(path / "config.json", remedy=remedy))
    summary = read_object(path / "summary.json", remedy=remedy) if (path / "summary.json").exists() else {}
    last = _last_row(path)
    state = summary.get("status") or ("running" if _is_running(path) else "stopped")
    words = {name: " ".join(map(str, value)) for name, value in config.items() if isinstance(value, list)}
    try:
        return {
            **config,
            **words,
            "id": path.name,
            "rule": get_rule(config["rule"]).title,
            "state": str(state),
            "steps": int(config["steps"]),
            "loss": finite(summary["train_loss"]) if summary else finite(last.get("loss")),
            "valid_loss": finite(summary["valid_loss"]) if summary else None,
            "steps_done": int(summary.get("steps", last.get("step", 0))),
            "tokens_per_second": finite(summary.get("tokens_per_second", last.get("tokens_per_second"))),
            "seconds": finite(summary.get("seconds")),
            "device": summary.get("device"),
            **{name: int(config[name]) for name in ("batch_size", "seq_len")},
        }
    except WRONG_TYPES as error:
        raise DamagedFileError(f"the files of {path} are damaged ({error!r}): {remedy}") from error


def _is_running(path: Path) -> bool:
    """Whether a run that has not ended is being trained. It is if a process of this machine has locked its folder. It is not if
    it was saved after its last step, as when it is interrupted, or has written nothing for long."""
    if is_locked(path):
        return True
    last_step = changed_at(path / METRICS_FILE)
    saved = max((changed_at(saved) for saved in (path / "checkpoints").glob("step-*")), default=0.0)
    return saved < last_step and time.time() - max(last_step, changed_at(path / "config.json")) < _QUIET_SECONDS


def _last_row(path: Path) -> Mapping[str, Any]:
    """The last complete row of metrics.jsonl."""
    try:
        rows = read_rows(path / METRICS_FILE)
    except OSError:
        return {}
    return next((row for row in reversed(rows) if row is not None), {})


def _is_finished(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether this is a single run that can be sampled from."""
    return [row["state"] for row in rows] == ["finished"]


def _headline(rows: Sequence[Mapping[str, Any]]) -> str:
    if len(rows) == 1:
        [row] = rows
        loss = "no loss yet" if row["loss"] is None else f"loss {row['loss']:.4f}"
        done = f"after {row['steps_done']} of {row['steps']} steps"
        goes_on = " Start its command again: it goes on from its last save." if row["state"] == "stopped" else ""
        return f"{row['state'].capitalize()}: {loss} {done}.{goes_on}" if row["state"] != "diverged" else f"Diverged {done}."
    best = min((row["loss"] for row in rows if row["loss"] is not None), default=None)
    return f"{len(rows)} runs" + (f", the lowest loss is {best:.4f}." if best is not None else ".")


def _progress(rows: Sequence[Mapping[str, Any]]) -> PageProgress:
    states = [row["state"] for row in rows]
    left = [_seconds_left(row) for row in rows if row["state"] == "running"]
    speeds = [row["tokens_per_second"] or 0.0 for row in rows if row["state"] == "running"]
    known = [seconds for seconds in left if seconds is not None]
    return {
        "done": states.count("finished") + states.count("diverged"),
        "running": states.count("running"),
        "waiting": states.count("stopped"),
        "diverged": states.count("diverged"),
        "stalled": 0,
        "total": len(rows),
        "doing": "",
        "seconds_left": max(known, default=None),
        "tokens_per_second": sum(speeds) or None,
        "workers": [],
    }


def _seconds_left(row: Mapping[str, Any]) -> float | None:
    speed = row["tokens_per_second"]
    return math.ceil((row["steps"] - row["steps_done"]) * row["batch_size"] * row["seq_len"] / speed) if speed else None
