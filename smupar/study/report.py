"""What a study leaves in its folder for readers: page, picture and table."""

from __future__ import annotations

from smupar.output.page import write_page
from smupar.plan.settings import refuse
from smupar.study.curves import draw_png
from smupar.study.definition import Findings, StudyDefinition
from smupar.study.store import Study
from smupar.study.view import StudyView, definition_of, left_out, mixed_decay


def write_report(study: Study, definition: StudyDefinition | None = None) -> str:
    """Writes report.html, picture.png, table.csv and table.json into the study's folder. Returns what the study found, and a
    line that says where it is. Pass the ``definition`` if all of the study has been run. Without it, study.json says what the
    study is, and the report says if runs are missing."""
    refuse(not study.results(), f"{study.folder} has no finished run yet: start its command again")
    study.write_table()
    unfinished = ""
    if definition is None:
        definition = definition_of(study)
        unfinished = _unfinished(study, definition)
    findings = _read(study, definition, is_finished=not unfinished)
    write_page(study.folder / "report.html", StudyView(study.folder, definition).document())
    if findings.panels:
        draw_png(findings.panels, study.folder / "picture.png")
    so_far = findings.headline if unfinished else ""
    parts = (unfinished, left_out(study), so_far, findings.sentence, mixed_decay(findings.results))
    sentence = " ".join(filter(None, parts))
    return f"{sentence}\n{study.folder}/report.html, {'picture.png, ' if findings.panels else ''}table.csv"


def _read(study: Study, definition: StudyDefinition, *, is_finished: bool) -> Findings:
    if is_finished or definition.read_so_far is None:
        return definition.read(study)
    return definition.read_so_far(study)


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
