"""The page of a study: what it found, curves that say their numbers when hovered, the table, the command. Self-contained."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from smupar.lm.config import RunConfig
from smupar.lm.files import write_atomic
from smupar.study.config import TUNED, TransferConfig
from smupar.study.curves import LOSS, Panel, Point, Series, draw_png, draw_svg, legend
from smupar.study.space import grid
from smupar.study.store import Result, Stage, Study, row_of
from smupar.study.transfer import analyse, followed_trace, panels, sentence, stages

# Columns that are not of the configuration.
_OF_RESULTS = ("id", "status", "steps_done", "train_loss", "valid_loss", "num_parameters", "hidden_sparsity")


def write_report(study: Study) -> str:
    """Writes report.html, picture.png, table.csv and table.json into the study's folder; returns what the study found, and a
    line that says where it is."""
    described = study.describe()
    results = study.results()
    if not results:
        raise ValueError(f"{study.folder} has no finished run yet: start its command again")
    study.write_table()
    definition = described["definition"]
    drawn: list[Panel] = []
    if definition.get("kind") == "transfer":
        config = transfer_from(definition)
        found = _unfinished(study, stages(config))
        if not found:
            verdicts = analyse(config, results, followed_trace(config, study))
            drawn, found = panels(config, verdicts), sentence(config, verdicts)
    elif definition.get("kind") == "tune":
        drawn, found = tune_panels(results), best_of(results)
    else:
        unfinished = ""
        if definition.get("kind") == "sweep" and "run" in definition:
            every = grid(RunConfig.from_json(json.dumps(definition["run"])), definition["axes"])
            wanted = list({config.id: config for config in every}.values())  # 0.01,0.02,0.01 names a run twice
            unfinished = _unfinished(study, [lambda study: wanted])
            results = study.results(wanted) or results  # in the grid's order
        drawn, found = sweep_panels(results, definition.get("axes", {})), f"{unfinished} {best_of(results)}".strip()
    page = _page(found, drawn, results, described["command"], json.dumps(definition, indent=1))
    write_atomic(study.folder / "report.html", page)
    if drawn:
        draw_png(drawn, study.folder / "picture.png")
    return f"{found}\n{study.folder}/report.html, {'picture.png, ' if drawn else ''}table.csv"


def _unfinished(study: Study, stages: Sequence[Stage]) -> str:
    """A sentence, if runs are missing. The first stage of which some are hides what would follow."""
    for propose in stages:
        configs = propose(study)
        missing = len(study.missing(configs))
        if missing:
            done = f"{len(configs) - missing} of {len(configs)} runs are done"
            return f"Not finished: {done}, in {study.folder}; its command, which study.json holds, goes on."
    return ""


def transfer_from(definition: dict[str, object]) -> TransferConfig:
    values = {name: value for name, value in definition.items() if name != "kind"}
    run = RunConfig.from_json(json.dumps(values.pop("run")))
    lists = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return TransferConfig(run=run, **lists)  # type: ignore[arg-type]


def best_of(results: Sequence[Result]) -> str:
    """In one sentence; runs that differ in their seed alone count by their mean."""
    best = min(_by_seeds(results), key=_mean)
    diverged = sum(result.summary.status == "diverged" for result in results)
    row, several = row_of(best[0]), len(best) > 1
    varied = _varied([row_of(one) for one in results], (*_OF_RESULTS, "seed") if several else _OF_RESULTS)
    where = ", ".join(f"{name} {_cell(row[name])}" for name in varied)
    runs = f"run{'s' if several else ''} {', '.join(one.config.id for one in best)}"
    losses = [one.loss for one in best]
    spread = f", the mean of {len(best)} seeds ({min(losses):.4f} to {max(losses):.4f})" if several else ""
    return (
        f"Of {len(results)} runs, {diverged} diverged; the best ends at a loss of {_mean(best):.4f}{spread}: "
        f"{where + ', ' if where else ''}{runs}."
    )


def _by_seeds(results: Sequence[Result]) -> list[list[Result]]:
    """Those that differ in their seed alone, together."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(replace(result.config, seed=0).id, []).append(result)
    return list(groups.values())


def _mean(results: Sequence[Result]) -> float:
    return sum(result.loss for result in results) / len(results)


def tune_panels(results: Sequence[Result]) -> list[Panel]:
    """Loss over each hyperparameter, a point for each sample."""
    made = []
    for name in TUNED:
        points = tuple(Point(getattr(result.config, name), result.loss, result.config.id) for result in results)
        best = getattr(min(results, key=lambda result: result.loss).config, name)
        made.append(Panel(name, name, LOSS, (Series("samples", points, 0.3, best=best, joined=False),)))
    return made


def sweep_panels(results: Sequence[Result], axes: dict[str, list[object]]) -> list[Panel]:
    """Mean loss over seeds, over the numeric axis with most values, one curve for each combination of the others."""
    axes = {name: values for name, values in axes.items() if name != "seed"}
    numeric = {name: values for name, values in axes.items() if all(type(value) in (int, float) for value in values)}
    if not numeric:
        return []
    axis = max(numeric, key=lambda name: len(numeric[name]))
    curves: dict[str, list[Point]] = {}
    for same in _by_seeds(results):
        row, ids = row_of(same[0]), ", ".join(result.config.id for result in same)
        others = ", ".join(f"{name} {row[name]}" for name in axes if name != axis)
        curves.setdefault(others or "loss", []).append(Point(row[axis], _mean(same), ids))
    series = tuple(
        Series(label, tuple(points), number / max(1, len(curves) - 1)) for number, (label, points) in enumerate(curves.items())
    )
    positive = all(point.x > 0 for points in curves.values() for point in points)
    return [Panel("loss at the end", axis, LOSS, series, log_x=positive)]


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1250px;padding:0 1rem;color:#222}
h1{font-size:1.4rem}
p.found{font-size:1.1rem;max-width:60rem}
svg{margin:0 .5rem .5rem 0}
svg text{font:11px system-ui,sans-serif;fill:#333}
svg .title{font-size:13px;font-weight:600;text-anchor:middle}
svg .label{text-anchor:middle}
svg .grid{stroke:#e4e4e4}
svg .mark{stroke:#888;stroke-dasharray:2 3}
svg circle:hover{r:7;stroke:#000}
.legend .key{margin-right:1.2rem;white-space:nowrap}
.legend i{display:inline-block;width:1.1em;height:.28em;margin-right:.4em;vertical-align:middle}
#tip{position:fixed;display:none;max-width:24rem;padding:.25rem .5rem;border-radius:4px;background:#222;color:#fff;
font-size:13px;pointer-events:none}
table{border-collapse:collapse;font-size:13px}
th,td{padding:.15rem .6rem;border-bottom:1px solid #e4e4e4;text-align:right}
th{position:sticky;top:0;background:#fff;cursor:pointer}
pre{background:#f6f6f6;padding:.6rem;overflow:auto}
"""

_SCRIPT = """const tip=document.getElementById('tip');
document.querySelectorAll('circle').forEach(c=>{c.addEventListener('mousemove',e=>{tip.textContent=c.dataset.text;
tip.style.display='block';tip.style.left=(e.clientX+14)+'px';tip.style.top=(e.clientY+10)+'px'});
c.addEventListener('mouseleave',()=>tip.style.display='none')});
document.querySelectorAll('th').forEach((th,i)=>th.addEventListener('click',()=>{const b=th.closest('table').tBodies[0];
const k=r=>{const t=r.cells[i].textContent;const n=parseFloat(t);return isNaN(n)?t:n};
[...b.rows].sort((a,c)=>k(a)>k(c)?1:-1).forEach(r=>b.append(r))}));"""


def _page(found: str, drawn: Sequence[Panel], results: Sequence[Result], command: str, definition: str) -> str:
    names = {panel_series.label: panel_series for panel in drawn for panel_series in panel.series}
    charts = legend(list(names.values())) + draw_svg(drawn) if drawn else ""
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>smupar study</title>"
        f"<style>{_STYLE}</style><h1>Study</h1><p class='found'>{html.escape(found)}</p>{charts}<div id='tip'></div>"
        f"<h2>Runs</h2>{_table(results)}<h2>Command</h2><pre>{html.escape(command)}</pre>"
        f"<h2>Configuration</h2><pre>{html.escape(definition)}</pre><script>{_SCRIPT}</script></html>\n"
    )


def _table(results: Sequence[Result]) -> str:
    """The columns in which runs differ, and how they ended."""
    rows = [row_of(result) for result in results]
    ends = ("train_loss", "valid_loss", "status")
    columns = ["id", *_varied(rows, ("id", *ends)), *ends]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(_cell(row[name]))}</td>" for name in columns) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _varied(rows: Sequence[dict[str, object]], but: Sequence[str]) -> list[str]:
    """Columns in which rows differ."""
    return [name for name in rows[0] if name not in but and len({str(row[name]) for row in rows}) > 1]


def _cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else str(value)


def read_study(folder: str | Path) -> Study:
    study = Study(folder)
    study.describe()  # raises if there is none
    return study
