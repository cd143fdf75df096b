"""``smupar verify``: compares a folder of any kind with its checksums. A study is checked run by run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from smupar.lm.use.verify import Inspection, inspect, inspect_run, inspecting
from smupar.output.json_files import DamagedFileError, read_json, read_object
from smupar.study.stacks.division import read_division
from smupar.study.stacks.state import STATE, read_state
from smupar.study.store import Study
from smupar.updates.trace import Trace

_RESTORE = "restore it from a copy"


def verify(path: Path) -> Inspection:
    """Reads everything in a folder, or the file of a trace, and reports damage."""
    with inspecting(path) as found:
        if (path / "study.json").exists():
            _inspect_study(path, found)
        else:
            inspect(path, found)
    return found


def _inspect_study(path: Path, found: Inspection) -> None:
    study = Study(path)
    found.counts["study"] += 1
    with found.part():
        study.describe()
        found.json_file(path / "study.json")
    for run in sorted(study.runs.glob("*")):
        config = inspect_run(run, found)
        if config is not None and config.id != run.name:
            found.wrong.append(f"{run}: config.json belongs to another run ({config.id})")
    if (path / "data.json").exists() or any(study.runs.glob("*")):
        with found.part():
            _inspect_traces(study, found)
    _inspect_stacks(study, found)
    for file in sorted(path.glob("proxy-*.trace.json")):
        with found.part():
            content = hashlib.sha256(Trace.load(file).to_json().encode()).hexdigest()
            found.json_file(file)
            if file.name != f"proxy-{content[:8]}.trace.json":
                found.wrong.append(f"{file} does not hold the trace of its name")
    again = "run the study's command again, which writes it"
    with found.part():
        if (path / "table.json").exists():
            read_json(path / "table.json", remedy=again)
    with found.part():
        if (path / "best.json").exists():
            read_object(path / "best.json", remedy=again, may_be_edited=True)


def _inspect_stacks(study: Study, found: Inspection) -> None:
    """Checks the states from which an interrupted study continues."""
    states = {folder for folder in study.stacks.glob("*/") if (folder / STATE).exists()}
    for file in sorted(study.stacks.glob("*.json")):
        with found.part():
            division = read_division(file)
            found.json_file(file)
            for number, runs in enumerate(division.stacks):
                folder = division.state_folder(study, number)
                if folder in states:
                    states.remove(folder)
                    _inspect_state(folder, runs, found)
    found.wrong += [f"{folder} is the state of a stack that no file in {study.stacks} describes" for folder in sorted(states)]


def _inspect_state(folder: Path, runs: Sequence[str], found: Inspection) -> None:
    with found.part():
        try:
            saved = read_state(folder, runs, remedy="the runs of this stack begin again")
        except DamagedFileError:
            raise
        except (ValueError, OSError) as error:
            raise DamagedFileError(f"{folder} is damaged ({error}): the runs of this stack begin again") from error
        found.json_file(folder / STATE)
        found.read((folder / saved.tensors).stat().st_size)


def _inspect_traces(study: Study, found: Inspection) -> None:
    """Checks that the traces in the study's folder are those that its runs followed."""
    for name, sha256 in read_object(study.folder / "data.json", remedy=_RESTORE).items():
        what, _, file = name.partition(" ")
        path = study.folder / file
        if what == "trace" and path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            found.wrong.append(f"{path} is not the trace that the study's runs followed")
    found.json_file(study.folder / "data.json")
