"""The folder of a run: its configuration, its results, and the checkpoints to continue from.

config.json      the RunConfig. A run with another configuration is refused
data.json        fingerprint of the text, and its tokenizer
trace.json       effects of updates on hidden layers, if measured
followed.json    the trace that was followed, if any
tokenizer.json   if the data has one
metrics.jsonl    one line for every few steps
checkpoints/     step-00000100, ...
observed.json    outputs, gradients, updates and weights of hidden layers over the run, if observed
sums.json        checksums of metrics.jsonl, tokenizer.json, trace.json and observed.json, once the run has ended
summary.json     once the run has ended, finished or diverged

The JSON files carry a seal (output/json_files.py), since only smupar writes them. Do not edit them: config.json describes the
weights that exist, and flags belong on the command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Literal

import torch
import xxhash

from smupar import __version__
from smupar.lm.config.fields import differences, flat
from smupar.lm.config.run_config import STANDARD_LIBRARY, RunConfig
from smupar.lm.data.batches import Corpus, CorpusInfo
from smupar.lm.data.tokenizer import TOKENIZER_FILE
from smupar.lm.run import checkpoint
from smupar.lm.run.distributed import ALONE
from smupar.lm.run.metrics import METRICS_FILE, Row, metrics_line, read_rows
from smupar.output.checksums import SUMS, refuse_lost_seal, write_sums
from smupar.output.files import locked, read_plain, refuse_other_files, write_atomic, writing
from smupar.output.json_files import read_record, read_text, write_sealed
from smupar.refusals import refuse
from smupar.updates.observation import OBSERVED_FILE, Observation
from smupar.updates.trace import Trace

Status = Literal["finished", "diverged", "interrupted", "terminated"]

TRACE_FILE, FOLLOWED_FILE, SUMMARY_FILE = "trace.json", "followed.json", "summary.json"
_NAMED = ("depth", "lr", "steps", "batch_size", "seed")  # fields that are in a folder's name if they differ from the default
_MEASURED = (METRICS_FILE, TOKENIZER_FILE, TRACE_FILE, OBSERVED_FILE)
_TEMPORARY = re.compile(r"[\w-]+\.jsonl?\.\d+\.tmp")  # files that write_atomic leaves if the process is killed


@dataclass(frozen=True)
class Summary:
    """The results of a run that has ended."""

    id: str
    status: Status
    folder: str
    steps: int  # steps done; if the run diverged, only those with a finite loss
    num_tokens: int
    num_parameters: int
    sparsity: float  # share of the hidden weights that is zero
    train_loss: float | None  # mean of the last 5 % of the steps, in nats per token; None if the run diverged
    valid_loss: float | None  # None if the run ended before its last validation
    best_valid_loss: float | None
    best_step: int | None
    seconds: float  # time in training steps, over all starts; a stacked run has its share of the stack's time
    tokens_per_second: float
    device: str
    num_ranks: int
    num_threads: int
    versions: dict[str, str]

    def write(self, folder: Path, trace: Trace | None, observation: Observation | None = None) -> None:
        """Completes a run's folder: writes measurements, if any, and the summary last. A run with a summary has ended."""
        if trace is not None:
            trace.save(folder / TRACE_FILE)
        if observation is not None:
            observation.save(folder / OBSERVED_FILE)
        write_sums(folder, [name for name in _MEASURED if (folder / name).exists()])
        write_sealed(folder / SUMMARY_FILE, asdict(self))


@cache
def versions() -> dict[str, str]:
    """The versions of the software, for the record of a run. The commit is known in a checkout, or from SMUPAR_COMMIT."""
    packages = {"smupar": __version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    commit = os.environ.get("SMUPAR_COMMIT") or _commit(Path(__file__).parents[2])
    return packages | ({"commit": commit} if commit else {})


def _commit(checkout: Path) -> str | None:
    if not (checkout / ".git").exists():  # installed, perhaps inside another project's checkout
        return None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None


def default_folder(config: RunConfig) -> Path:
    """The folder of a run without --out. Its name describes the run in a few words and ends with its id. An existing folder
    with this id, which an older version may have named differently, stays the run's folder."""
    id_ = config.id
    for folder in sorted(Path("runs").glob(f"*-{id_}")):
        if (folder / "config.json").is_file():
            return folder
    return Path("runs") / f"{_name_of(config)}-{id_}"


def _name_of(config: RunConfig) -> str:
    """Rule, width and sparsity, and the first fields that differ from their defaults."""
    density = config.density
    zeros = config.pattern.replace(":", "of") if density is None else f"sparse{1 - density:.4g}" if density < 1 else "dense"
    usual, own = flat(asdict(RunConfig())), flat(asdict(config))
    others = [f"{name.replace('_', '')}{value:g}" for name, value in own.items() if name in _NAMED and value != usual[name]]
    return "-".join([config.rule, f"width{config.model.width}", zeros, *others[:3]])


class RunFolder:
    """The folder of a run, open for writing. Only the main rank writes, and only one process at a time."""

    def __init__(self, path: Path, config: RunConfig, corpus: Corpus) -> None:
        self.path = path
        self.config = config  # the configuration in the folder; the text may have been at another path
        self._metrics: IO[str] | None = None
        self._rows = xxhash.xxh3_64()
        with contextlib.ExitStack() as locks:
            locks.enter_context(locked(path))
            self._refuse_another(config, corpus)
            self._remove_temporaries()
            self._locks = locks.pop_all()

    def begin(self, config: RunConfig, corpus: Corpus) -> None:
        """Writes the run's configuration, and what is known about its text, into a new folder."""
        if not (self.path / "config.json").exists():
            write_corpus_info(self.path, corpus)
            if config.follow is not None:
                Trace.load(config.follow).save(self.path / FOLLOWED_FILE)
            write_atomic(self.path / "config.json", config.to_json())
        elif corpus.tokenizer is not None and not _holds(self.path / TOKENIZER_FILE, corpus.tokenizer):
            damaged = self.path / TOKENIZER_FILE
            warnings.warn(f"{damaged} is damaged: the text's tokenizer replaces it", UserWarning, stacklevel=2)
            write_atomic(self.path / TOKENIZER_FILE, corpus.tokenizer)

    def _refuse_another(self, config: RunConfig, corpus: Corpus) -> None:
        if (self.path / "config.json").exists():
            old = read_config(self.path)
            self.config = _with_texts_of(old, config)
            changes = differences(flat(asdict(old)), flat(asdict(config)))
            refuse(old.portable != self.config.portable, f"{self.path} holds another run ({changes}): choose another --out")
            refuse(
                read_corpus_info(self.path).sha256 != corpus.info.sha256,
                f"the text {config.data!r} is not the one that {self.path} was started with: restore that one, or choose "
                "another --out",
            )
            given = Path(config.follow or "")
            refuse(
                given.is_file() and Trace.load(given).to_json() != Trace.load(self.path / FOLLOWED_FILE).to_json(),
                f"the trace {config.follow} is not the one that {self.path} was started with, which is {FOLLOWED_FILE} in "
                "that folder: restore it, or choose another --out",
            )
        else:
            refuse_other_files(self.path, "run", _is_ours)

    def _remove_temporaries(self) -> None:
        for folder in (self.path, *(self.path / "checkpoints").glob("step-*")):
            for path in folder.glob("*.tmp"):
                if _TEMPORARY.fullmatch(path.name):
                    path.unlink()

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._locks.close()

    def go_back(self, step: int) -> None:
        """Makes the checkpoint of this step the last one, and removes the run's results. Step 0 is the start."""
        folder = self.path / "checkpoints"
        steps = checkpoint.steps_in(folder)
        refuse(
            step and step not in steps,
            f"{self.path} has no checkpoint of step {step}: pass --from-step {' or '.join(map(str, [0, *steps]))}",
        )
        if step:
            checkpoint.check(folder / checkpoint.folder_name(step), ALONE)
        for name in (SUMMARY_FILE, SUMS, TRACE_FILE, OBSERVED_FILE):
            (self.path / name).unlink(missing_ok=True)
        checkpoint.drop_after(folder, step)

    def resume_metrics(self, step: int, expected: int = 0, checksum: str | None = None) -> int:
        """Drops lines that are damaged, or were written after the checkpoint from which the run continues. Reports damaged
        lines, and whether the number or the checksum of the rows differs from the checkpoint's. Returns the number of lines
        left."""
        path = self.path / METRICS_FILE
        kept, damaged = rows_until(path, step)
        for number in damaged:
            warnings.warn(f"{path}: line {number} is damaged and left out", UserWarning, stacklevel=2)
        if wrong := wrong_rows(kept, step, expected - len(damaged), checksum if not damaged else None):
            warnings.warn(f"{path}: {wrong}", UserWarning, stacklevel=2)
        self._rows = xxhash.xxh3_64("".join(kept).encode())
        write_atomic(path, "".join(kept))
        self._metrics = path.open("a", buffering=1, encoding="utf-8")
        return len(kept)

    def log(self, row: Row) -> None:
        assert self._metrics is not None, "resume_metrics opens the file"
        line = metrics_line(row)
        with writing(self.path / METRICS_FILE):
            self._metrics.write(line)
        self._rows.update(line.encode())

    @property
    def rows_checksum(self) -> str:
        """The XXH3 of the rows so far."""
        return self._rows.hexdigest()


def _holds(path: Path, text: str) -> bool:
    """Whether a file holds this text."""
    try:
        return read_plain(path) == text.encode()
    except OSError:
        return False


def rows_until(path: Path, step: int) -> tuple[list[str], list[int]]:
    """The lines of a metrics.jsonl up to a step, and the numbers of those that are damaged."""
    rows = read_rows(path)
    kept = [f"{json.dumps(row)}\n" for row in rows if row is not None and row["step"] <= step]
    return kept, [number for number, row in enumerate(rows, start=1) if row is None]


def wrong_rows(kept: Sequence[str], step: int, expected: int, checksum: str | None) -> str:
    """What is wrong with the rows up to a step, given their number and their checksum; "" if nothing."""
    if len(kept) < expected:
        return f"{expected - len(kept)} of {expected} rows up to step {step} are missing"
    if checksum not in (None, xxhash.xxh3_64_hexdigest("".join(kept).encode())):
        return f"a row up to step {step} has changed since it was written"
    return ""


def read_followed(path: Path) -> Trace | None:
    """The trace that a run follows, if it has been started and follows one."""
    return Trace.load(path / FOLLOWED_FILE) if (path / FOLLOWED_FILE).exists() else None


def write_corpus_info(path: Path, corpus: Corpus) -> None:
    """Writes what is known about a run's text, and its tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    write_sealed(path / "data.json", asdict(corpus.info))
    if corpus.tokenizer is not None:
        write_atomic(path / TOKENIZER_FILE, corpus.tokenizer)


def _is_ours(name: str) -> bool:
    """Whether a process that was killed right after its start may have left a file of this name."""
    return name in ("data.json", TOKENIZER_FILE, FOLLOWED_FILE) or name.endswith(".tmp")


def read_summary(path: Path) -> Summary | None:
    """The summary of a run; None while it has not ended."""
    file = path / SUMMARY_FILE
    again = "delete it, and run the same command to write it again"
    if not file.exists():
        return None
    summary = read_record(Summary, file, remedy=again)
    refuse_lost_seal(file, path, remedy=again)
    return summary


def read_config(path: Path) -> RunConfig:
    file = path / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{path} is not the folder of a run: it has no config.json")
    remedy = "restore it from a copy, or choose another --out"
    return RunConfig.from_json(read_text(file, remedy=remedy), source=str(file), remedy=remedy)


def read_corpus_info(path: Path) -> CorpusInfo:
    return read_record(CorpusInfo, path / "data.json", remedy="restore it from a copy, or choose another --out")


def _with_texts_of(old: RunConfig, new: RunConfig) -> RunConfig:
    """The new configuration with the old paths of its texts. Texts may move, since they are identified by their content."""
    if STANDARD_LIBRARY not in (old.data, new.data):
        new = replace(new, data=old.data)
    both = old.valid_data is not None and new.valid_data is not None
    return replace(new, valid_data=old.valid_data) if both else new
