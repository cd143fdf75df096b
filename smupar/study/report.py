"""The page of a study: what it found, curves that show their numbers when hovered, the table, and the command. The page needs
no other file."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from smupar.output.files import write_atomic
from smupar.output.json_files import DamagedFileError
from smupar.plan.settings import refuse
from smupar.study.curves import draw_png, draw_svg, legend
from smupar.study.definition import Findings, StudyDefinition, cell, varied_columns
from smupar.study.store import Result, Study, printable, row_of
from smupar.study.sweep import sweep_from_json
from smupar.study.transfer import transfer_from_json
from smupar.study.tune import search_from_json

# Makes a study again from study.json, by the kind that it names. Any other kind is read as a sweep without axes.
FROM_JSON: dict[str, Callable[[dict[str, Any]], StudyDefinition]] = {
    "sweep": sweep_from_json,
    "transfer": transfer_from_json,
    "tune": search_from_json,
}


def write_report(study: Study, definition: StudyDefinition | None = None) -> str:
    """Writes report.html, picture.png, table.csv and table.json into the study's folder. Returns what the study found, and a
    line that says where it is. Pass the ``definition`` if all of the study has been run. Without it, study.json says what the
    study is, and the report says if runs are missing."""
    described = study.describe()
    refuse(not study.results(), f"{study.folder} has no finished run yet: start its command again")
    study.write_table()
    unfinished = ""
    if definition is None:
        definition = definition_of(study)
        unfinished = _unfinished(study, definition)
    findings = Findings("", (), study.results()) if unfinished and definition.needs_all_runs else definition.read(study)
    parts = (unfinished, _left_out(study), findings.sentence, _mixed_decay(findings.results))
    sentence = " ".join(filter(None, parts))
    write_atomic(study.folder / "report.html", _page(sentence, findings, described))
    if findings.panels:
        draw_png(findings.panels, study.folder / "picture.png")
    return f"{sentence}\n{study.folder}/report.html, {'picture.png, ' if findings.panels else ''}table.csv"


def definition_of(study: Study) -> StudyDefinition:
    """The study that its study.json describes."""
    stored = study.describe()["definition"]
    kind = stored.get("kind")
    try:
        return FROM_JSON.get(kind if isinstance(kind, str) else "", sweep_from_json)(stored)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise DamagedFileError(
            f"{study.folder / 'study.json'} is damaged, or of another version ({printable(str(error))}): restore it from a "
            "copy, or start the study's command again with another --out"
        ) from error


def _left_out(study: Study) -> str:
    """A sentence that names runs whose files are damaged."""
    if not study.damaged:
        return ""
    return (
        f"Left out, because their files are damaged: {', '.join(sorted(study.damaged))}; the study's command runs them again."
    )


def _unfinished(study: Study, definition: StudyDefinition) -> str:
    """A sentence if runs are missing. It counts those of the first stage that misses some, since later stages are not known
    yet."""
    for propose in definition.stages:
        configs = propose(study)
        num_runs = len({config.id for config in configs})
        if missing := len(study.missing(configs)):
            return (
                f"Not finished: {num_runs - missing} of {num_runs} runs are done, in {study.folder}; its command, which "
                "study.json holds, goes on."
            )
    return ""


def _mixed_decay(results: Sequence[Result]) -> str:
    """A sentence if runs have weight decay of different kinds. Their losses do not compare like with like."""
    kinds = Counter(result.config.decay for result in results if result.config.weight_decay)
    if len(kinds) < 2:
        return ""
    counts = ", ".join(f"{kind} in {count}" for kind, count in sorted(kinds.items()))
    return (
        f"This study mixes decay conventions (runs: {counts}). Coupled decay shrinks weights by more where a rule raises their "
        "learning rate, so compare runs of one kind."
    )


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
document.querySelectorAll('[data-text]').forEach(c=>{c.addEventListener('mousemove',e=>{tip.textContent=c.dataset.text;
tip.style.display='block';tip.style.left=(e.clientX+14)+'px';tip.style.top=(e.clientY+10)+'px'});
c.addEventListener('mouseleave',()=>tip.style.display='none')});
document.querySelectorAll('th').forEach((th,i)=>th.addEventListener('click',()=>{const b=th.closest('table').tBodies[0];
const k=r=>{const t=r.cells[i].textContent;const n=parseFloat(t);return isNaN(n)?t:n};
[...b.rows].sort((a,c)=>k(a)>k(c)?1:-1).forEach(r=>b.append(r))}));"""


def _page(sentence: str, findings: Findings, described: dict[str, Any]) -> str:
    lines = {line.label: line for panel in findings.panels for line in panel.lines}
    charts = legend(list(lines.values())) + draw_svg(findings.panels) if findings.panels else ""
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>smupar study</title>"
        f"<style>{_STYLE}</style><h1>Study</h1><p class='found'>{html.escape(sentence)}</p>{charts}<div id='tip'></div>"
        f"<h2>Runs</h2>{_table(findings.results)}<h2>Command</h2><pre>{html.escape(described['command'])}</pre>"
        f"<h2>Configuration</h2><pre>{html.escape(json.dumps(described['definition'], indent=1))}</pre>"
        f"<script>{_SCRIPT}</script></html>\n"
    )


def _table(results: Sequence[Result]) -> str:
    """The columns in which runs differ, and how they ended."""
    rows = [row_of(result) for result in results]
    ends = ("train_loss", "valid_loss", "status")
    columns = ["id", *varied_columns(rows, ("id", *ends)), *ends]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell(row[name]))}</td>" for name in columns) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
