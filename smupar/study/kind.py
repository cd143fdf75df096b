"""What a kind of study is: the runs that it asks for, and how it reads their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smupar.lm.config.run import RunConfig
from smupar.study.curves import Panel
from smupar.study.store import Result, Study, row_of

# Proposes runs of a study, which may depend on the results that it has.
Stage = Callable[[Study], Sequence[RunConfig]]

# Columns that are not of the configuration.
_OF_RESULTS = ("id", "status", "steps_done", "train_loss", "valid_loss", "num_parameters", "hidden_sparsity")


@dataclass(frozen=True)
class Found:
    """What a study found, for its page."""

    sentence: str
    panels: Sequence[Panel]
    results: Sequence[Result]


@dataclass(frozen=True)
class Kind:
    """A sweep, a transfer study or a search, as it is asked for in one command or described in a folder."""

    definition: dict[str, Any]
    """JSON, in study.json; its ``kind`` is the name under which report.py finds who reads it again. A study goes on with this
    definition, or one that asks for more."""
    stages: Sequence[Stage]
    """The runs; each stage may depend on the results of those before."""
    read: Callable[[Study], Found]
    needs_all_runs: bool = False
    """Whether nothing can be said before the last run has ended."""


def best_of(results: Sequence[Result]) -> str:
    """In one sentence; runs that differ in their seed alone count by their mean."""
    best = min(by_seeds(results), key=mean_loss)
    diverged = sum(result.summary.status == "diverged" for result in results)
    row, several = row_of(best[0]), len(best) > 1
    varied = varied_columns([row_of(result) for result in results], (*_OF_RESULTS, "seed") if several else _OF_RESULTS)
    where = ", ".join(f"{name} {cell(row[name])}" for name in varied)
    runs = f"run{'s' if several else ''} {', '.join(result.config.id for result in best)}"
    losses = [result.loss for result in best]
    spread = f", the mean of {len(best)} seeds ({min(losses):.4f} to {max(losses):.4f})" if several else ""
    return (
        f"Of {len(results)} runs, {diverged} diverged; the best ends at a loss of {mean_loss(best):.4f}{spread}: "
        f"{where + ', ' if where else ''}{runs}."
    )


def by_seeds(results: Sequence[Result]) -> list[list[Result]]:
    """Those that differ in their seed alone, together."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(replace(result.config, seed=0).id, []).append(result)
    return list(groups.values())


def mean_loss(results: Sequence[Result]) -> float:
    return sum(result.loss for result in results) / len(results)


def varied_columns(rows: Sequence[dict[str, Any]], but: Sequence[str]) -> list[str]:
    """Columns in which rows differ."""
    return [name for name in rows[0] if name not in but and len({str(row[name]) for row in rows}) > 1]


def cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else str(value)
