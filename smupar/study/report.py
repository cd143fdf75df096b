"""The report of a study in its folder: page, picture and table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smupar.output.page import write_page
from smupar.output.pictures import missing_pictures
from smupar.refusals import refuse
from smupar.study.curves.picture import draw_png
from smupar.study.definition import Findings, StudyDefinition, best_row
from smupar.study.page.view import StudyView, definition_of, left_out, mixed_decay
from smupar.study.store import Study


@dataclass(frozen=True)
class Reported:
    """The findings of a study, and the files that hold them."""

    title: str
    folder: Path
    findings: Findings
    unfinished: str  # a sentence if runs are missing
    doubts: tuple[str, ...]  # sentences about damaged runs, and runs that cannot be compared
    files: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons to doubt the findings."""
        return tuple(filter(None, (self.unfinished, *self.doubts)))

    @property
    def where(self) -> str:
        first, *others = self.files
        return ", ".join([f"{self.folder}/{first}", *others])

    def with_file(self, name: str) -> Reported:
        return replace(self, files=(*self.files, name))

    @property
    def values(self) -> dict[str, Any]:
        """The findings as plain values, for programs."""
        results = self.findings.results
        return {
            "title": self.title,
            "folder": str(self.folder),
            "is_finished": not self.unfinished,
            "headline": self.findings.headline,
            "sentence": self.findings.sentence,
            "notes": self.notes,
            "answers": self.findings.answers,
            "runs": len(results),
            "diverged": sum(result.summary.status == "diverged" for result in results),
            "best": best_row(results),
            "files": self.files,
        }


def write_report(study: Study, definition: StudyDefinition | None = None) -> Reported:
    """Writes report.html, picture.png, table.csv and table.json into the study's folder. Pass the ``definition`` if the whole
    study has run. Otherwise it is read from study.json, and the report says whether runs are missing."""
    _refuse_other_folders(study.folder)
    refuse(not study.results(), f"{study.folder} has no finished run yet: start its command again")
    study.write_table()
    unfinished = ""
    if definition is None:
        definition = definition_of(study)
        unfinished = _unfinished(study, definition)
    findings = _read(study, definition, is_finished=not unfinished)
    write_page(study.folder / "report.html", StudyView(study.folder, definition).document())
    has_picture = bool(findings.panels) and not missing_pictures()
    if has_picture:
        draw_png(findings.panels, study.folder / "picture.png")
    files = ("report.html", *(["picture.png"] if has_picture else []), "table.csv")
    doubts = (left_out(study), mixed_decay(findings.results))
    return Reported(definition.title, study.folder, findings, unfinished, doubts, files)


def _refuse_other_folders(folder: Path) -> None:
    """Says why a folder that holds no study has no report, and which folder or command to use instead."""
    if (folder / "study.json").exists():
        return
    refuse(not folder.exists(), f"there is no folder {folder}: name the folder of a study")
    refuse((folder / "config.json").exists(), f"{folder} is a single run, which has no report: smupar watch {folder} shows it")
    within = sorted(str(file.parent) for pattern in ("*/study.json", "*/*/study.json") for file in folder.glob(pattern))
    refuse(bool(within), f"{folder} is not a study, but holds some: name one of {', '.join(within[:5])}")
    refuse(True, f"{folder} is not the folder of a study: it has no study.json")


def _read(study: Study, definition: StudyDefinition, *, is_finished: bool) -> Findings:
    if is_finished or definition.read_so_far is None:
        return definition.read(study)
    return definition.read_so_far(study)


def _unfinished(study: Study, definition: StudyDefinition) -> str:
    """A sentence if runs are missing. It counts the first stage with missing runs, since later stages are not known yet."""
    for propose in definition.stages:
        configs = propose(study)
        num_runs = len({config.id for config in configs})
        if missing := len(study.missing(configs)):
            return (
                f"Not finished: {num_runs - missing} of {num_runs} runs are done, in {study.folder}; rerun the command in its "
                "study.json to continue."
            )
    return ""
