"""A sweep: every combination of some fields' values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from smupar.lm.config.run import RunConfig
from smupar.output.json_files import as_record
from smupar.study.curves import LOSS, Line, Panel, Point
from smupar.study.definition import Findings, StudyDefinition, best_in_words, by_seeds, mean_loss
from smupar.study.space import grid, refuse_unknown_field, unique
from smupar.study.store import Result, row_of


def define_sweep(run: RunConfig, axes: Mapping[str, Sequence[Any]]) -> StudyDefinition:
    configs = list(grid(run, axes))
    once = unique(configs)  # lr=0.01,0.02,0.01 names a run twice
    return StudyDefinition(
        stored={"kind": "sweep", "axes": axes, "run": asdict(run)},
        stages=[lambda study: configs],
        read=lambda study: _read(study.results(once) or study.results(), axes),
    )


def sweep_from_json(stored: dict[str, Any]) -> StudyDefinition:
    """A sweep as study.json describes it. If a user's script proposed the runs, only those that exist are known."""
    axes = as_record(dict[str, list[Any]], stored.get("axes", {}), source="axes", remedy="each has a list of values")
    for name in axes:
        refuse_unknown_field(name)
    if {"run", "axes"} <= stored.keys():
        return define_sweep(RunConfig.from_json(json.dumps(stored["run"])), axes)
    return StudyDefinition(stored, (), lambda study: _read(study.results(), axes))


def _read(results: Sequence[Result], axes: Mapping[str, Sequence[Any]]) -> Findings:
    return Findings(best_in_words(results), sweep_panels(results, axes), results)


def sweep_panels(results: Sequence[Result], axes: Mapping[str, Sequence[Any]]) -> list[Panel]:
    """Mean loss over seeds, over the numeric axis with the most values. There is one curve for each combination of the other
    axes."""
    axes = {name: values for name, values in axes.items() if name != "seed"}
    numeric = {name: values for name, values in axes.items() if all(type(value) in (int, float) for value in values)}
    if not numeric:
        return []
    axis = max(numeric, key=lambda name: len(numeric[name]))
    curves: dict[str, list[Point]] = {}
    for same in by_seeds(results):
        row, ids = row_of(same[0]), ", ".join(result.config.id for result in same)
        others = ", ".join(f"{name} {row[name]}" for name in axes if name != axis)
        curves.setdefault(others or "loss", []).append(Point(row[axis], mean_loss(same), ids))
    last = max(1, len(curves) - 1)
    lines = tuple(Line(label, tuple(points), n / last) for n, (label, points) in enumerate(curves.items()))
    is_positive = all(point.x > 0 for line in lines for point in line.points)
    return [Panel("loss at the end", axis, LOSS, lines, log_x=is_positive)]
