"""Compares files with their checksums: prepared text, runs and their checkpoints, exports, traces.

Every file with a checksum is read, even if its time has not changed. An ``Inspection`` collects a line for each damaged part.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from smupar.lm.config.run_config import RunConfig
from smupar.lm.data.shard_hashes import BAR_BYTES, wrong_shards
from smupar.lm.data.shards import INDEX, PROGRESS, check_sizes, read_index
from smupar.lm.data.tokenizer import read_tokenizer
from smupar.lm.run import checkpoint
from smupar.lm.run.folder import (
    FOLLOWED_FILE,
    SUMMARY_FILE,
    TRACE_FILE,
    read_config,
    read_corpus_info,
    read_summary,
    rows_until,
    wrong_rows,
)
from smupar.lm.run.metrics import METRICS_FILE, damaged_rows
from smupar.lm.use.load import is_export, read_export
from smupar.output.checksums import SUMS, Parts, read_sums, wrong_parts
from smupar.output.json_files import is_sealed
from smupar.plan.plan import PLAN_FILE
from smupar.refusals import refuse
from smupar.updates.trace import Trace


@dataclass
class Inspection:
    """What was inspected, and the damage."""

    wrong: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # files without checksums
    counts: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    bar: tqdm[Any] | None = None

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """Notes the damage of one part, so that the other parts are inspected too."""
        try:
            yield
        except (ValueError, OSError) as error:
            self.wrong.append(str(error))

    def read(self, size: int) -> None:
        self.num_bytes += size
        if self.bar is not None:
            self.bar.update(size)

    def json_file(self, path: Path) -> None:
        """Counts a JSON file whose content was read without an error."""
        self.counts["file"] += 1
        self.read(path.stat().st_size)
        if not is_sealed(path):
            self.unchecked.append(str(path))

    def sums(self, folder: Path, sums: dict[str, Parts]) -> None:
        """Reads files and compares them with their checksums."""
        self.wrong += [f"{folder}: {wrong}" for wrong in wrong_parts(folder, sums, show=self.read)]
        self.counts["file"] += len(sums)
        self.counts["tensor"] += sum(len(parts) - 1 for parts in sums.values())

    def __str__(self) -> str:
        if self.wrong:
            return f"{_counted(len(self.wrong), 'part')} damaged or missing"
        looked = ", ".join(_counted(number, what) for what, number in self.counts.items() if number)
        text = f"intact: {looked}; {self.num_bytes / 2**20:,.1f} MiB read"
        if self.unchecked:
            more = f" and {len(self.unchecked) - 1} more" if len(self.unchecked) > 1 else ""
            text += f"; without checksums, as older versions and other tools write files: {self.unchecked[0]}{more}"
        return text


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@contextlib.contextmanager
def inspecting(path: Path) -> Iterator[Inspection]:
    """A new inspection, with a progress bar if there is much to read."""
    total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    with tqdm(
        total=total,
        desc="verify",
        unit="B",
        unit_scale=True,
        disable=True if total < BAR_BYTES else None,
        leave=False,
        file=sys.stderr,
    ) as bar:
        yield Inspection(bar=bar)


def inspect(path: Path, found: Inspection) -> None:
    """Inspects any kind of folder that this package writes, or the file of a trace."""
    if not path.exists():
        raise FileNotFoundError(f"no file or folder {path}")
    if path.is_file():
        _trace(path, found)
    elif (path / INDEX).exists() or (path / PROGRESS).exists():
        _text(path, found)
    elif (path / checkpoint.MODEL).is_dir():
        _checkpoint(path, found)
    elif is_export(path) or (path / PLAN_FILE).exists() or any(path.glob("model*.safetensors")):
        _export(path, found)
    elif (path / "config.json").exists() or (path / "checkpoints").exists():
        inspect_run(path, found)
    elif (path / SUMS).exists():
        with found.part():
            found.sums(path, read_sums(path, remedy="get another copy"))
    else:
        within = sorted({str(file.parent) for name in ("study.json", "config.json") for file in path.glob(f"*/{name}")})
        example = f", such as {within[0]}" if within else ""
        refuse(True, f"{path} is not a run, study, checkpoint, export, trace or prepared text: name the folder of one{example}")


def inspect_run(path: Path, found: Inspection) -> RunConfig | None:
    """Inspects the folder of a run, made by ``train`` or by a study. Returns its configuration if it can be read."""
    found.counts["run"] += 1
    config = None
    with found.part():
        config = read_config(path)
        found.json_file(path / "config.json")
    if (path / "data.json").exists() or (path / "checkpoints").exists():
        with found.part():
            tokenizer = read_corpus_info(path).tokenizer
            found.json_file(path / "data.json")
            read_tokenizer(path, str(tokenizer.get("name")), sha256=tokenizer.get("sha256"))
    for name in (TRACE_FILE, FOLLOWED_FILE):
        if (path / name).exists():
            _trace(path / name, found)
    _metrics(path, found)
    with found.part():
        summary = read_summary(path)
        if summary is None and (path / SUMS).exists():
            found.wrong.append(f"{path / SUMMARY_FILE} is missing")
        if summary is not None:
            found.json_file(path / SUMMARY_FILE)
            if config is not None and summary.id != config.id:
                found.wrong.append(
                    f"{path}: {SUMMARY_FILE} belongs to another run ({summary.id}) than config.json ({config.id})"
                )
            if (path / SUMS).exists():
                found.sums(path, read_sums(path, remedy="run it again"))
            elif is_sealed(path / SUMMARY_FILE):
                found.wrong.append(f"{path}: {SUMS} is missing")
    for step in checkpoint.steps_in(path / "checkpoints"):
        _checkpoint(path / "checkpoints" / checkpoint.folder_name(step), found)
    return config


def _metrics(path: Path, found: Inspection) -> None:
    """Inspects the rows of a run. If the run has ended, their checksum is in sums.json, otherwise in the last checkpoint."""
    file, last = path / METRICS_FILE, checkpoint.latest(path / "checkpoints")
    if file.exists():
        with found.part():
            found.wrong += [f"{file}: line {number} is damaged" for number in damaged_rows(file)]
    elif (path / SUMMARY_FILE).exists() or last:
        found.wrong.append(f"{file} is missing")
    if file.exists() and last and not (path / SUMMARY_FILE).exists():
        with contextlib.suppress(ValueError, OSError):  # a damaged checkpoint is named elsewhere
            state = checkpoint.read_state(last)
            step = state["step"] - bool(state.get("since_row"))
            kept, damaged = rows_until(file, step)
            if not damaged and (wrong := wrong_rows(kept, step, state.get("num_rows", 0), state.get("rows"))):
                found.wrong.append(f"{file}: {wrong}")


def _checkpoint(path: Path, found: Inspection) -> None:
    with found.part():
        sums = checkpoint.read_checksums(path)
        found.counts["checkpoint"] += 1
        if sums is None:
            found.unchecked.append(str(path))
            found.wrong += [f"{path}: {wrong}" for wrong in checkpoint.missing_files(path)]
        else:
            found.json_file(path / checkpoint.STATE)
            found.sums(path, sums)


def _export(path: Path, found: Inspection) -> None:
    found.counts["export"] += 1
    with found.part():
        if is_export(path):
            read_export(path)
        if (path / SUMS).exists():
            found.sums(path, read_sums(path, remedy="export it again, or restore it from a copy"))
        elif is_export(path) and is_sealed(path / "config.json"):
            found.wrong.append(f"{path}: {SUMS} is missing")
        else:
            for file in sorted(path.glob("*.safetensors")):
                _refuse_broken_header(file)
            found.unchecked.append(str(path))


def _refuse_broken_header(path: Path) -> None:
    """Raises if a file without checksums is no safetensors file, or is cut short."""
    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): export it again, or restore it from a copy") from error


def _text(path: Path, found: Inspection) -> None:
    with found.part():
        index = read_index(path)
        found.json_file(path / INDEX)
        found.counts.update({"token": index.num_tokens, "document": index.num_documents, "shard": len(index.shards)})
        if "sources" in index.source or index.tokenizer.name == "bytes":
            with found.part():
                read_tokenizer(path, index.tokenizer.name, sha256=index.tokenizer.sha256)
        present = []
        for shard in index.shards:
            with found.part():
                check_sizes(path, index, [shard])
                present.append(shard)
        found.wrong += wrong_shards(path, index, present, found.read)


def _trace(path: Path, found: Inspection) -> None:
    with found.part():
        Trace.load(path)
        found.counts["trace"] += 1
        found.json_file(path)
