"""A sweep: every combination of some fields' values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from smupar.lm.config.run_config import RunConfig
from smupar.output.json_files import as_record
from smupar.study.axes import grid
from smupar.study.config import TUNED
from smupar.study.curves.curves import LOSS, Line, Panel, Point
from smupar.study.definition import Findings, StudyDefinition, best_in_short, best_in_words, by_seeds, cell, mean_loss
from smupar.study.run_configs import refuse_unknown_field, unique
from smupar.study.store import Result, fields_of, row_of


def define_sweep(run: RunConfig, axes: Mapping[str, Sequence[Any]]) -> StudyDefinition:
    configs = list(grid(run, axes))
    once = unique(configs)  # lr=0.01,0.02,0.01 names a run twice
    return StudyDefinition(
        stored={"kind": "sweep", "axes": axes, "run": asdict(run)},
        stages=[lambda study: configs],
        read=lambda study: _read(study.results(once) or study.results(), axes, once),
        title="Sweep over " + ", ".join(axes) if axes else "Runs",
    )


def sweep_from_json(stored: dict[str, Any]) -> StudyDefinition:
    """Reads a sweep from study.json. If a user's script proposed the runs, only finished runs are known."""
    axes = as_record(dict[str, list[Any]], stored.get("axes", {}), source="axes", remedy="each has a list of values")
    for name in axes:
        refuse_unknown_field(name)
    if {"run", "axes"} <= stored.keys():
        return define_sweep(RunConfig.from_json(json.dumps(stored["run"])), axes)
    return StudyDefinition(stored, (), lambda study: _read(study.results(), axes))


def _read(results: Sequence[Result], axes: Mapping[str, Sequence[Any]], proposed: Sequence[RunConfig] = ()) -> Findings:
    sentences = (best_in_words(results), *_at_an_edge(results, axes)) if results else ()
    headline = best_in_short(results) if results else ""
    return Findings(" ".join(sentences), sweep_panels(results, axes, proposed), results, headline)


def _at_an_edge(results: Sequence[Result], axes: Mapping[str, Sequence[Any]]) -> list[str]:
    """A sentence for each tuned hyperparameter whose best value is the smallest or largest that was run."""
    best = row_of(min(by_seeds(results), key=mean_loss)[0])
    sentences = []
    for name in (name for name in axes if name in TUNED):
        values = {row_of(result)[name] for result in results}
        for end, which, beyond in ((min(values), "smallest", "below"), (max(values), "largest", "above")):
            if len(values) > 2 and best[name] == end:
                sentences.append(f"{name} {cell(end)} is the {which} that was run: the best may lie {beyond} it.")
    return sentences


def sweep_panels(
    results: Sequence[Result], axes: Mapping[str, Sequence[Any]], proposed: Sequence[RunConfig] = ()
) -> list[Panel]:
    """The mean loss over seeds, drawn over the numeric axis with the most values, with one curve for each combination of the
    other axes. ``proposed`` are all runs of the sweep; unfinished ones become waiting points."""
    axes = {name: values for name, values in axes.items() if name != "seed"}
    numeric = {name: values for name, values in axes.items() if all(type(value) in (int, float) for value in values)}
    if not numeric:
        return []
    axis = max(numeric, key=lambda name: len(numeric[name]))
    curves: dict[str, list[Point]] = {}
    for same in by_seeds(results):
        row, ids = row_of(same[0]), tuple(result.config.id for result in same)
        curves.setdefault(_others(row, axes, axis), []).append(Point(row[axis], mean_loss(same), runs=ids))
    ended = {id_ for points in curves.values() for point in points for id_ in point.runs}
    waiting: dict[str, list[Point]] = {}
    for config in proposed:
        if config.id not in ended:
            row = fields_of(config)
            waiting.setdefault(_others(row, axes, axis), []).append(Point(row[axis], math.nan, runs=(config.id,)))
    labels = list(dict.fromkeys([*curves, *waiting]))
    last = max(1, len(labels) - 1)
    lines = tuple(
        Line(
            label,
            tuple(curves.get(label, ())),
            n / last,
            best=_best(curves.get(label, ())),
            waiting=tuple(waiting.get(label, ())),
        )
        for n, label in enumerate(labels)
    )
    is_positive = all(point.x > 0 for line in lines for point in (*line.points, *line.waiting))
    return [Panel("loss at the end", axis, LOSS, lines, log_x=is_positive)]


def _others(row: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], axis: str) -> str:
    """The values of all axes but one, as the label of a curve."""
    return ", ".join(f"{name} {cell(row[name])}" for name in axes if name != axis) or "loss"


def _best(points: Sequence[Point]) -> float | None:
    ended = [point for point in points if math.isfinite(point.y)]
    return min(ended, key=lambda point: point.y).x if ended else None
