"""Files in which a running study tells watchers what it does:

planned.json        the runs of the current stage that had not ended when it began
live/HOST-PID.json  a sign of life of each process: what it does, its runs with their losses so far, speed, and time left

Threads write both, rarely enough that writing costs less than ``_SHARE`` of the time. Nothing in a study depends on them. A
killed process leaves its file. Readers see by the file's age, or by the process id on the same machine, that the process is
gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from smupar.lm.config.run_config import RunConfig
from smupar.output.files import changed_at, is_alive
from smupar.output.json_files import read_record, sealed_json, write_sealed
from smupar.output.page.document import Worker, finite
from smupar.output.progress import Clock
from smupar.study.store import Study, fields_of

if TYPE_CHECKING:
    from smupar.lm.run.metrics import Row

LIVE, PLANNED = "live", "planned.json"
_BEAT_SECONDS, _LOOK_SECONDS = 2.0, 0.25  # between signs of life; between looks whether the process does something else
_SHARE = 0.005  # largest share of the time that writing may take
_GONE_SECONDS = 30.0  # without a sign of life
_STALLED_SECONDS = 300.0  # without a step; the first step may have to be compiled


class ShownProgress(Protocol):
    """What a progress display shows."""

    running: Mapping[str, Sequence[Row]]  # rows of the runs that are trained now, by id
    doing: str  # what happens while no run is trained; "" while runs are trained
    device: str

    @property
    def share_done(self) -> float: ...


@contextlib.contextmanager
def repeated(function: Callable[[], None], *, every: float, at_once: bool = False) -> Iterator[None]:
    """Calls a function in a thread during a block, every ``every`` seconds, or less often if it is slow. With ``at_once`` it is
    also called when the block begins. Its errors are ignored, since it only informs readers."""
    ended = threading.Event()

    def repeat() -> None:
        wait = 0.0 if at_once else every
        while not ended.wait(wait):
            start = time.thread_time(), time.perf_counter()
            with contextlib.suppress(Exception):
                function()
            # Processor time is measured, since computing delays training, and waiting for a disk does not.
            wait = max(every, (time.thread_time() - start[0]) / _SHARE, 5 * (time.perf_counter() - start[1]))

    thread = threading.Thread(target=repeat, name="smupar-live", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def beating(study: Study, progress: ShownProgress) -> Iterator[None]:
    """Writes signs of life of this process during the block."""
    path = study.folder / LIVE / f"{socket.gethostname()}-{os.getpid()}.json"
    last, clock = {"share": 0.0, "at": time.time()}, Clock(time.monotonic())
    written: tuple[float, object] = (0.0, None)

    def beat() -> None:
        nonlocal written
        now, work = time.monotonic(), (progress.doing, list(progress.running))
        if written[1] == work and now < written[0] + _BEAT_SECONDS:
            return
        written = now, work
        clock.note(now, progress.share_done, is_working=not progress.doing)
        share = progress.share_done + 1e-9 * sum(len(rows) for rows in progress.running.values())
        if share != last["share"]:
            last.update(share=share, at=time.time())
        advanced = max([last["at"], *(changed_at(study.runs / run / "metrics.jsonl") for run in progress.running)])
        path.parent.mkdir(exist_ok=True)
        sign = _sign(progress, clock.left(now), advanced)
        temporary = path.with_suffix(".tmp")  # not synced to disk: in two seconds it is outdated
        temporary.write_text(sealed_json(asdict(sign), indent=None), encoding="utf-8")
        temporary.replace(path)

    try:
        with repeated(beat, every=_LOOK_SECONDS, at_once=True):
            yield
    finally:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # if no other process trains here


@dataclass(frozen=True)
class _Sign:
    """A sign of life: the content of a file in live/."""

    host: str
    pid: int
    device: str
    doing: str
    seconds_left: float | None
    tokens_per_second: float | None
    runs: dict[str, list[list[float | None]]]  # run -> step and loss
    advanced: float  # these two in seconds since the epoch
    time: float

    def state(self, now: float) -> Literal["running", "stalled", "stopped"]:
        if self.host == socket.gethostname() and not is_alive(self.pid):
            return "stopped"
        if now - self.time > _GONE_SECONDS + 10 * _BEAT_SECONDS:
            return "stopped"
        return "stalled" if now - self.advanced > _STALLED_SECONDS else "running"


def _sign(progress: ShownProgress, seconds_left: float | None, advanced: float) -> _Sign:
    running = {run: list(rows) for run, rows in progress.running.items()}
    speeds = [rows[-1]["tokens_per_second"] for rows in running.values() if rows and "tokens_per_second" in rows[-1]]
    return _Sign(
        socket.gethostname(),
        os.getpid(),
        progress.device,
        progress.doing,
        finite(seconds_left),
        finite(max(filter(None, speeds), default=None)),
        {run: [[row["step"], finite(row.get("loss"))] for row in rows] for run, rows in running.items()},
        advanced,
        time.time(),
    )


@dataclass(frozen=True)
class _Planned:
    """The content of planned.json: the values that all rows share, and the other values of each row by run id."""

    common: dict[str, Any]
    runs: dict[str, dict[str, Any]]


def forget_signs(study: Study) -> None:
    """Removes the signs of life of earlier processes."""
    shutil.rmtree(study.folder / LIVE, ignore_errors=True)


def write_planned(study: Study, missing: Sequence[RunConfig]) -> None:
    """Writes planned.json, or removes it if no run is missing."""
    path = study.folder / PLANNED
    if not missing:
        path.unlink(missing_ok=True)
        return
    rows = [fields_of(config) for config in missing]
    common = {name: value for name, value in rows[0].items() if all(row[name] == value for row in rows)}
    runs = {row["id"]: {name: value for name, value in row.items() if name not in common} for row in rows}
    write_sealed(path, {"common": common, "runs": runs}, indent=None)


def read_planned(folder: Path) -> dict[str, dict[str, Any]] | None:
    """The rows of planned runs by id; None without planned.json."""
    try:
        planned = read_record(_Planned, folder / PLANNED, remedy="")
    except ValueError:
        return None
    return {run: planned.common | own for run, own in planned.runs.items()}


@dataclass(frozen=True)
class Signs:
    """The current signs of life of all processes of a study."""

    workers: tuple[Worker, ...]
    losses: dict[str, list[list[float | None]]]  # run -> step and loss, of runs that are trained now
    states: dict[str, str]  # run -> running, stalled or stopped
    seconds_left: float | None

    @property
    def is_running(self) -> bool:
        return any(worker["state"] != "stopped" for worker in self.workers)


def read_signs(folder: Path) -> Signs:
    now = time.time()
    workers: list[Worker] = []
    losses: dict[str, list[list[float | None]]] = {}
    states: dict[str, str] = {}
    left: list[float] = []
    for path in sorted((folder / LIVE).glob("*.json")):
        try:
            sign = read_record(_Sign, path, remedy="")
        except ValueError:  # it was just removed, or is not ours
            continue
        state = sign.state(now)
        workers.append(
            {
                "name": f"{sign.host}, process {sign.pid}",
                "device": sign.device,
                "state": state,
                "doing": sign.doing,
                "seen": sign.time,
                "runs": len(sign.runs),
                "tokens_per_second": sign.tokens_per_second,
            }
        )
        losses |= sign.runs
        states |= dict.fromkeys(sign.runs, state)
        if state == "running" and sign.seconds_left is not None:
            left.append(max(1.0, sign.seconds_left - (now - sign.time)))
    return Signs(tuple(workers), losses, states, max(left, default=None))
