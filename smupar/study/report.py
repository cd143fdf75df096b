"""The page of a study: what it found, curves that say their numbers when hovered, the table, the command. Self-contained."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from typing import Any

from smupar.output.files import write_atomic
from smupar.study.curves import draw_png, draw_svg, legend
from smupar.study.kind import Found, Kind, cell, varied_columns
from smupar.study.store import Result, Study, row_of
from smupar.study.sweep import read_sweep
from smupar.study.transfer import read_transfer
from smupar.study.tune import read_search

# What a folder holds, by the kind that its definition names. Anything else is read as a sweep without axes.
READERS: dict[str, Callable[[dict[str, Any]], Kind]] = {
    "sweep": read_sweep,
    "transfer": read_transfer,
    "tune": read_search,
}


def write_report(study: Study, kind: Kind | None = None) -> str:
    """Writes report.html, picture.png, table.csv and table.json into the study's folder; returns what the study found, and a
    line that says where it is. ``kind``: from whoever has run all of it; default as in the folder, whatever it holds by now."""
    described = study.describe()
    definition = described["definition"]
    if not study.results():
        raise ValueError(f"{study.folder} has no finished run yet: start its command again")
    study.write_table()
    unfinished = ""
    if kind is None:
        kind = READERS.get(definition.get("kind"), read_sweep)(definition)
        unfinished = _unfinished(study, kind)
    found = Found("", (), study.results()) if unfinished and kind.needs_all_runs else kind.read(study)
    sentence = f"{unfinished} {found.sentence}".strip()
    page = _page(sentence, found, described["command"], json.dumps(definition, indent=1))
    write_atomic(study.folder / "report.html", page)
    if found.panels:
        draw_png(found.panels, study.folder / "picture.png")
    return f"{sentence}\n{study.folder}/report.html, {'picture.png, ' if found.panels else ''}table.csv"


def _unfinished(study: Study, kind: Kind) -> str:
    """A sentence, if runs are missing. The first stage of which some are hides what would follow."""
    for propose in kind.stages:
        configs = propose(study)
        missing, num_runs = len(study.missing(configs)), len({config.id for config in configs})
        if missing:
            done = f"{num_runs - missing} of {num_runs} runs are done"
            return f"Not finished: {done}, in {study.folder}; its command, which study.json holds, goes on."
    return ""


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


def _page(sentence: str, found: Found, command: str, definition: str) -> str:
    names = {series.label: series for panel in found.panels for series in panel.series}
    charts = legend(list(names.values())) + draw_svg(found.panels) if found.panels else ""
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>smupar study</title>"
        f"<style>{_STYLE}</style><h1>Study</h1><p class='found'>{html.escape(sentence)}</p>{charts}<div id='tip'></div>"
        f"<h2>Runs</h2>{_table(found.results)}<h2>Command</h2><pre>{html.escape(command)}</pre>"
        f"<h2>Configuration</h2><pre>{html.escape(definition)}</pre><script>{_SCRIPT}</script></html>\n"
    )


def _table(results: Sequence[Result]) -> str:
    """The columns in which runs differ, and how they ended."""
    rows = [row_of(result) for result in results]
    ends = ("train_loss", "valid_loss", "status")
    columns = ["id", *varied_columns(rows, ("id", *ends)), *ends]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell(row[name]))}</td>" for name in columns) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
