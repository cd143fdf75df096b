"""Which runs of a study are trained together. This is decided once and recorded, because rounding depends on the size of a
stack: an interrupted study continues in the same stacks, and so ends with the same numbers.

stacks/NAME.json    a division: runs of equal shapes, in order, and how many of them train at once
stacks/NAME-3/      the state of stack 3 (counted from 0), saved while the stack trains (state.py)
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from smupar.output.json_files import DamagedFileError, read_record, write_sealed
from smupar.study.config import EngineName
from smupar.study.store import Study


@dataclass(frozen=True)
class Division:
    """Runs that can be stacked, divided into stacks of equal size."""

    runs: tuple[str, ...]  # their ids
    size: int  # runs in a stack; the last stack is filled with copies. 1: stacks of one. 0: the trainer trains each run
    own_batches: bool  # whether each run of a stack has its own batches, because seeds differ
    device: str  # name of the device that the size was chosen for

    @property
    def name(self) -> str:
        return hashlib.sha256(" ".join(self.runs).encode()).hexdigest()[:10]

    @property
    def stacks(self) -> list[tuple[str, ...]]:
        """The ids of the runs of each stack."""
        size = self.size or 1
        return [self.runs[start : start + size] for start in range(0, len(self.runs), size)]

    def suits(self, engine: EngineName) -> bool:
        """Whether the engine would train these runs in this way."""
        if engine == "serial":
            return self.size <= 1
        return engine != "stacked" or self.size != 1 or len(self.runs) == 1

    def write(self, study: Study) -> None:
        """Records the division. Call this before any of its runs or stacks writes a file."""
        path = study.stacks / f"{self.name}.json"
        if not path.exists():
            study.stacks.mkdir(exist_ok=True)
            write_sealed(path, asdict(self))

    def state_folder(self, study: Study, number: int) -> Path:
        return study.stacks / f"{self.name}-{number}"

    def forget(self, study: Study) -> None:
        """Removes the record and the saved states."""
        (study.stacks / f"{self.name}.json").unlink(missing_ok=True)
        for number in range(len(self.stacks)):
            shutil.rmtree(self.state_folder(study, number), ignore_errors=True)


def recorded_divisions(study: Study, runs: Collection[str]) -> list[Division]:
    """The recorded divisions that contain any of these runs. A damaged record is named and removed."""
    found = []
    for path in sorted(study.stacks.glob("*.json")):
        try:
            division = read_division(path)
        except DamagedFileError as error:
            warnings.warn(str(error), stacklevel=2)
            path.unlink()
            continue
        if not set(runs).isdisjoint(division.runs):
            found.append(division)
    return found


def read_division(path: Path) -> Division:
    remedy = "runs in it that have not ended are put into new stacks"
    division = read_record(Division, path, remedy=remedy)
    if division.size < 0 or not division.runs or path.stem != division.name:
        raise DamagedFileError(f"{path} is damaged (its name does not match its runs, or it has no runs): {remedy}")
    return division


def remove_leftovers(study: Study) -> None:
    """Removes the states of stacks that nothing will continue: all runs have ended and the process was killed right after, or
    the record of the division is damaged."""
    running = set()
    for path in study.stacks.glob("*.json"):
        try:
            division = read_division(path)
        except DamagedFileError:
            continue  # damage is reported when the record is needed
        open_stacks = (number for number, runs in enumerate(division.stacks) if not study.has_ended(runs))
        running |= {division.state_folder(study, number) for number in open_stacks}
    for folder in study.stacks.glob("*/"):
        if folder not in running:
            shutil.rmtree(folder, ignore_errors=True)


def without(runs: Collection[str], divisions: Sequence[Division]) -> set[str]:
    """The runs that are in no division."""
    return set(runs).difference(*(division.runs for division in divisions))
