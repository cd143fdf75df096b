"""Runs of a study on a Ray cluster: stacked parts of it are tasks, one at a time on each GPU, or core where there are no GPUs.

Workers write results into the study's folder, which must be on a file system that all nodes share. What a lost worker had
not finished is done again by others.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from smupar.lm.config.run import RunConfig
from smupar.lm.model.cost import estimate
from smupar.lm.run.folder import Summary
from smupar.lm.run.signals import handled
from smupar.output.optional import first_line
from smupar.study.engines import Board, groups, run_group
from smupar.study.store import Study

# A task on a GPU compiles anew, so there it gets as much as possible; on a core, small parts even out and lose less.
_PARTS_PER_SLOT = {"GPU": 1, "CPU": 4}
_MOST = 64
_RETRIES = 3
"""Of one task whose worker is lost, by Ray."""
_ROUNDS = 3
"""Of submitting what is still missing."""
_SEEN_WITHIN = 90.0
"""Seconds until a network file system shows what another node wrote."""
_TELL_EVERY = 1.0
"""Seconds between reports of a worker."""


class State(NamedTuple):
    """How far a part is."""

    steps: int = 0
    done: int = 0
    diverged: int = 0


def execute_on_ray(study: Study, todo: Sequence[RunConfig], *, address: str = "auto") -> None:
    """``address``: of a cluster, ``auto`` for the one this machine belongs to, ``local`` to start one here and end it after."""
    if not todo:
        return
    with _connected(address) as ray:
        board = Board(len(todo), sum(config.steps for config in todo))
        try:
            _run_all(ray, study, list(todo), board)
        finally:
            board.bar.close()
    _wait_until_seen(study, todo)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the engine ray needs Ray: pip install 'smupar[ray]'") from error
    if ray.is_initialized():  # by the program that called us
        yield ray
        return
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with handled({signal.SIGTERM: on_sigterm} if callable(on_sigterm) else {}) as install:
        _start(ray, address)
        install()  # ray.init puts its own handler there, which ends with other codes
        try:
            yield ray
        finally:
            ray.shutdown()


def _start(ray: Any, address: str) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", include_dashboard=False, **quiet)
        return
    _refuse_nobody(address)
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        raise ValueError(_nobody(address)) from error


def _refuse_nobody(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if address != "auto":
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError) as error:
            raise ValueError(_nobody(address)) from error


def _nobody(address: str) -> str:
    where = "here" if address == "auto" else f"at {address}"
    return f"no Ray cluster answers {where}: start one with `ray start --head`, or pass --address local"


def _run_all(ray: Any, study: Study, todo: list[RunConfig], board: Board) -> None:
    resources = ray.cluster_resources()
    kind = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
    view = _View(ray, board)
    settings = {"num_gpus": 1} if kind == "GPU" else {"num_cpus": 1}
    task = ray.remote(max_retries=_RETRIES, **settings)(_train_part)
    # Paths of data may be relative to where the command was given.
    where = (str(study.folder.resolve()), str(Path.cwd()), "cuda" if kind == "GPU" else "cpu", study.keeps_weights)

    left, failure = todo, ""
    for _ in range(_ROUNDS):
        pending = {}
        for part in split(left, num_slots=max(1, int(resources.get(kind, 1))), kind=kind):
            number = view.add(part)
            pending[task.remote(*where, part, view.progress, number)] = number
        lost, failures = _collect(ray, pending, view)
        left = [config for config in todo if config.id not in view.finished]
        if not left:
            return
        failure = failures[0] if failures else "workers were lost"
        if not lost:  # what fails by itself fails again
            break
    raise ValueError(
        f"{len(left)} of {len(todo)} runs have no result ({failure}); the finished ones are kept, the same command goes on"
    )


def split(configs: Sequence[RunConfig], *, num_slots: int, kind: str) -> list[list[RunConfig]]:
    """Parts that can be stacked, the costliest first; of about the same cost, so that every slot has something to do."""
    grouped = [(estimate(group[0]).dense_flops, group) for group in groups(configs)]
    total = sum(each * len(group) for each, group in grouped)
    parts: list[tuple[float, list[RunConfig]]] = []
    for each, group in grouped:
        share = round(each * len(group) / total * num_slots * _PARTS_PER_SLOT[kind])
        num_parts = min(len(group), max(1, share, math.ceil(len(group) / _MOST)))
        bounds = [len(group) * number // num_parts for number in range(num_parts + 1)]
        parts += [(each * (end - start), group[start:end]) for start, end in itertools.pairwise(bounds)]
    return [part for _, part in sorted(parts, key=lambda item: -item[0])]


def _collect(ray: Any, pending: dict[Any, int], view: _View) -> tuple[int, list[str]]:
    """Waits for tasks; the number that were lost with their workers, and what others failed with."""
    lost, failures = 0, []
    try:
        while pending:
            ready, _ = ray.wait(list(pending), timeout=_TELL_EVERY)
            for reference in ready:
                number = pending.pop(reference)
                try:
                    view.end(number, ray.get(reference))
                except ray.exceptions.RayTaskError as error:
                    failures.append(first_line(error.cause))
                except ray.exceptions.RayError:
                    lost += 1
            view.refresh()
    except BaseException:  # Ctrl-C above all: nothing goes on that nobody waits for
        for reference in pending:
            ray.cancel(reference, force=True)
        raise
    return lost, failures


class _View:
    """What the driver knows of the parts, on the board."""

    def __init__(self, ray: Any, board: Board) -> None:
        self.ray, self.board = ray, board
        self.parts: dict[int, list[RunConfig]] = {}
        self.states: dict[int, State] = {}
        self.ended: set[int] = set()
        self.finished: set[str] = set()
        self.progress = _start_progress(ray)
        self._answer: Any = None

    def add(self, part: list[RunConfig]) -> int:
        number = len(self.parts)
        self.parts[number] = part
        return number

    def end(self, number: int, outcomes: list[tuple[str, bool]]) -> None:
        part = self.parts[number]
        self.finished |= {id_ for id_, _ in outcomes}
        self.ended.add(number)
        diverged = sum(diverged for _, diverged in outcomes)
        self.states[number] = State(sum(config.steps for config in part), len(outcomes), diverged)

    def refresh(self) -> None:
        self._ask()
        board, states = self.board, self.states.values()
        board.num_done = sum(state.done for state in states)
        board.num_diverged = sum(state.diverged for state in states)
        at_work = set(self.states) - self.ended
        running = sum(len(self.parts[number]) - self.states[number].done for number in at_work)
        board.steps(sum(state.steps for state in states) - int(board.bar.n), running)

    def _ask(self) -> None:
        """The workers' reports, without waiting for them; they are for the eye only."""
        if self._answer is None:
            self._answer = self.progress.get.remote()
        if self.ray.wait([self._answer], timeout=0)[0]:
            with contextlib.suppress(self.ray.exceptions.RayError):
                told = self.ray.get(self._answer)
                self.states |= {number: State(*state) for number, state in told.items() if number not in self.ended}
            self._answer = None


def _start_progress(ray: Any) -> Any:
    """An actor beside the driver, so that it lives as long; it holds what workers tell about their parts."""

    # Inside a function, so that Ray sends the class itself and the actor does not have to load torch.
    class Progress:
        def __init__(self) -> None:
            self.states: dict[int, tuple[int, int, int]] = {}

        def tell(self, number: int, state: tuple[int, int, int]) -> None:
            self.states[number] = state

        def get(self) -> dict[int, tuple[int, int, int]]:
            return self.states

    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(Progress).remote()


class _Teller(Board):
    """The board of a worker: passes on what happens, now and then."""

    def __init__(self, tell: Callable[[State], None], num_done: int) -> None:
        self._tell, self._state, self._last = tell, State(), -math.inf
        self._add(done=num_done)

    def steps(self, num: int, running: int) -> None:
        self._add(steps=num)

    def done(self, summary: Summary) -> None:
        self._add(done=1, diverged=int(summary.status == "diverged"))

    def _add(self, **more: int) -> None:
        self._state = State(*map(operator.add, self._state, State(**more)))
        if time.monotonic() - self._last >= _TELL_EVERY:
            self._tell(self._state)
            self._last = time.monotonic()


def _train_part(
    folder: str, cwd: str, device: str, keeps_weights: bool, configs: list[RunConfig], progress: Any, number: int
) -> list[tuple[str, bool]]:
    """In a worker: trains what is missing of a part; the ids of all that are finished, and whether they diverged."""
    if not (Path(folder) / "study.json").exists():
        raise ValueError(f"{folder} is not on node {socket.gethostname()}: choose an --out that all nodes share")
    if device == "cpu":
        torch.set_num_threads(1)
    study = Study(folder)
    study.keeps_weights = keeps_weights
    with contextlib.chdir(cwd) if Path(cwd).is_dir() else contextlib.nullcontext():
        todo = study.missing(configs)
        teller = _Teller(lambda state: progress.tell.remote(number, tuple(state)), len(configs) - len(todo))
        if todo:
            run_group(study, todo, "auto", torch.device(device), teller)
    return [(result.config.id, result.summary.status == "diverged") for result in study.results(configs)]


def _wait_until_seen(study: Study, configs: Sequence[RunConfig]) -> None:
    deadline = time.monotonic() + _SEEN_WITHIN
    while missing := study.missing(configs):
        if time.monotonic() > deadline:
            raise ValueError(
                f"workers finished {len(missing)} runs that are not in {study.folder}: choose an --out that all nodes share"
            )
        time.sleep(1)
