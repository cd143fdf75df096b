"""The saved state of a running stack: a folder with its tensors as safetensors, and ``state.json``, which names the tensors'
file. A save first writes the new tensors beside the old ones, and then replaces state.json. So there is always one complete
state.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from smupar.lm.run.loop import Progress
from smupar.lm.run.metrics import Row
from smupar.lm.run.stack import GPTStack
from smupar.output.files import sync_folder
from smupar.output.json_files import DamagedFileError, read_record, write_sealed
from smupar.refusals import refuse
from smupar.study.stacks.division import Division
from smupar.study.store import Study

FORMAT = "smupar-stack/1"
STATE = "state.json"


@dataclass(frozen=True)
class SavedStack:
    """The content of state.json."""

    format: str
    runs: list[str]  # their ids
    step: int
    progress: list[Progress]
    rows: list[list[dict[str, float | None]]]
    tensors: str  # the name of the file
    tensors_sha256: str


class StackState:
    """Saves and loads the state of one stack. Tensors are copied at once and written by a thread, so that training continues
    meanwhile. ``close`` waits for that."""

    def __init__(self, study: Study, division: Division, number: int) -> None:
        self.study, self.division = study, division
        self.folder, self.runs = division.state_folder(study, number), list(division.stacks[number])
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def save(self, stack: GPTStack, progress: Sequence[Progress], rows: Sequence[Sequence[Row]]) -> None:
        self._wait()
        self.division.write(self.study)
        file, copied = f"step-{stack.num_steps:08d}.safetensors", [[dict(row) for row in own] for own in rows]
        saved = SavedStack(FORMAT, self.runs, stack.num_steps, list(progress), copied, file, "")
        self._writing = self._pool.submit(self._write, stack.state_dict(), asdict(saved))

    def _write(self, tensors: dict[str, Tensor], values: dict[str, object]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / str(values["tensors"])
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            save_file(tensors, temporary)
            with temporary.open("rb+") as file:
                values["tensors_sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(self.folder)
        write_sealed(self.folder / STATE, values, indent=None)
        for other in self.folder.glob("step-*"):
            if other != path:
                other.unlink()

    def _wait(self) -> None:
        """Waits for the thread. If the state could not be written, says so, and training continues."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except (OSError, SafetensorError) as error:
            warnings.warn(
                f"the state of a stack cannot be written to {self.folder} ({error}): make room there. Until then, an "
                "interruption of the study loses the progress of this stack",
                stacklevel=3,
            )

    def load(self, stack: GPTStack) -> SavedStack | None:
        """Puts the saved state into a stack that holds the same runs and has made no step. Returns None if there is no state. A
        damaged state is named and removed, and counts as none."""
        if not (self.folder / STATE).exists():
            return None
        remedy = f"the {len(self.runs)} runs of this stack begin again"
        try:
            saved = read_state(self.folder, self.runs, remedy=remedy)
            stack.load_state_dict(load_file(self.folder / saved.tensors), num_steps=saved.step)
        except DamagedFileError as error:
            problem = str(error)
        except (ValueError, OSError, SafetensorError) as error:
            problem = f"{self.folder} is damaged ({error}): {remedy}"
        else:
            return saved
        warnings.warn(problem, stacklevel=2)
        self.remove()
        return None

    def remove(self) -> None:
        self._wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        self._wait()
        self._pool.shutdown()


def read_state(folder: Path, runs: Sequence[str], *, remedy: str) -> SavedStack:
    """The saved state of these runs' stack. Raises if it or its tensors are damaged."""
    saved = read_record(SavedStack, folder / STATE, remedy=remedy)
    fits = saved.format == FORMAT and saved.runs == list(runs) and len(saved.progress) == len(saved.rows) == len(runs)
    refuse(not fits or Path(saved.tensors).name != saved.tensors, f"{STATE} is not the state of these runs")
    path = folder / saved.tensors
    refuse(not path.is_file(), f"{saved.tensors} is missing")
    with path.open("rb") as tensors:
        found = hashlib.file_digest(tensors, "sha256").hexdigest()
    refuse(found != saved.tensors_sha256, f"{saved.tensors} does not match its checksum")
    return saved
