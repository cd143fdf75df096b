"""Executes runs of a study on a Ray cluster. A task trains a part of the study that can be stacked. Each GPU, or each core if
there are no GPUs, runs one task at a time.

Workers write results into the study's folder, which must be on a file system that all nodes share. If a worker is lost, other
workers do its unfinished runs.
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

from smupar.lm.config.run_config import RunConfig
from smupar.lm.model.cost import estimate
from smupar.lm.run.distributed import device_name
from smupar.lm.run.folder import Summary
from smupar.lm.run.signals import handled
from smupar.output.optional import first_line, optional
from smupar.output.progress import Display
from smupar.refusals import refuse
from smupar.study.engines import groups, run_group
from smupar.study.live import beating
from smupar.study.progress import StudyProgress
from smupar.study.run_configs import unique
from smupar.study.stacks.division import recorded_divisions, without
from smupar.study.store import Study

# Each task on a GPU compiles its step, so it gets as many runs as possible. On cores, small tasks spread the work more evenly,
# and less work is lost if a task is.
_PARTS_PER_SLOT = {"GPU": 1, "CPU": 4}
_MOST = 64  # runs in a part
NUM_RETRIES = 3  # how often Ray repeats a task whose worker is lost
_ROUNDS = 3  # how often missing runs are submitted
_SEEN_WITHIN = 90.0  # seconds until a network file system shows files of another node
_TELL_EVERY = 1.0  # seconds between reports of a worker


class _PartState(NamedTuple):
    """The progress of a part: steps trained, runs done, runs diverged."""

    steps: int = 0
    done: int = 0
    diverged: int = 0


def execute_on_ray(
    study: Study, configs: Sequence[RunConfig], *, address: str = "auto", progress: StudyProgress | None = None
) -> None:
    """Executes the runs that have no result yet. ``address`` is the address of a cluster, ``auto`` for the cluster that this
    machine belongs to, or ``local`` for a cluster that starts here and ends with the study."""
    todo = study.missing(configs)
    if not todo:
        return
    progress = StudyProgress() if progress is None else progress
    progress.plan(todo, "Ray")
    progress.doing = "starting Ray"
    with _connected(address) as ray, Display(progress.status):
        progress.doing = ""
        _run_all(ray, study, todo, unique(configs), progress)
    _wait_until_seen(study, todo)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    ray = optional("ray", "the engine ray", "ray")
    if ray.is_initialized():  # by the program that runs the study
        yield ray
        return
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with handled({signal.SIGTERM: on_sigterm} if callable(on_sigterm) else {}) as install:
        _start(ray, address)
        install()  # again, since ray.init installed its own handler, with other exit codes
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
    try:
        if address != "auto":  # Ray itself would try for minutes
            host, _, port = address.rpartition("://")[2].rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, **quiet)
    except (OSError, ValueError) as error:
        where = "here" if address == "auto" else f"at {address}"
        raise ValueError(
            f"no Ray cluster answers {where}: start one with `ray start --head`, or pass --address local"
        ) from error


def _run_all(ray: Any, study: Study, todo: list[RunConfig], configs: list[RunConfig], progress: StudyProgress) -> None:
    resources = ray.cluster_resources()
    resource = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
    parts = _PartsProgress(ray, progress)
    task = ray.remote(max_retries=NUM_RETRIES, **({"num_gpus": 1} if resource == "GPU" else {"num_cpus": 1}))(_train_part)
    # Paths of data may be relative to where the command was given.
    where = (str(study.folder.resolve()), str(Path.cwd()), "cuda" if resource == "GPU" else "cpu", study.keeps_weights)

    left, failure = todo, ""
    for _ in range(_ROUNDS):
        pending = {}
        tasks = tasks_of(study, left, configs, num_slots=max(1, int(resources.get(resource, 1))), resource=resource)
        for number, (part, others) in enumerate(tasks, start=len(parts.configs)):
            parts.configs[number] = part
            pending[task.remote(*where, part, others, parts.reports, number)] = number
        lost, failures = _collect(ray, pending, parts)
        left = [config for config in todo if config.id not in parts.finished]
        if not left:
            return
        failure = failures[0] if failures else "workers were lost"
        if not lost:  # a task that failed by itself would fail again
            break
    raise ValueError(
        f"{len(left)} of {len(todo)} runs have no result ({failure}). Finished runs are kept: start the same command again"
    )


def tasks_of(
    study: Study, todo: Sequence[RunConfig], configs: Sequence[RunConfig], **slots: Any
) -> list[tuple[list[RunConfig], list[RunConfig]]]:
    """The work in parts, each with the other runs of its old stacks. Runs that share a stack stay in one part."""
    begun = recorded_divisions(study, [config.id for config in todo])
    tasks = []
    for division in begun:
        together = [config for config in configs if config.id in division.runs]
        part = [config for config in todo if config.id in division.runs]
        tasks.append((part, [config for config in together if config not in part]))
    fresh = without([config.id for config in todo], begun)
    return tasks + [(part, []) for part in split([config for config in todo if config.id in fresh], **slots)]


def split(configs: Sequence[RunConfig], *, num_slots: int, resource: str) -> list[list[RunConfig]]:
    """Parts that can be stacked, the most expensive first. They cost about the same, so that no slot is idle."""
    grouped = [(estimate(group[0]).dense_flops, group) for group in groups(configs)]
    total = sum(flops * len(group) for flops, group in grouped)
    parts: list[tuple[float, list[RunConfig]]] = []
    for flops, group in grouped:
        share = round(flops * len(group) / total * num_slots * _PARTS_PER_SLOT[resource])
        num_parts = min(len(group), max(1, share, math.ceil(len(group) / _MOST)))
        bounds = [len(group) * number // num_parts for number in range(num_parts + 1)]
        parts += [(flops * (end - start), group[start:end]) for start, end in itertools.pairwise(bounds)]
    return [part for _, part in sorted(parts, key=lambda item: -item[0])]


def _collect(ray: Any, pending: dict[Any, int], parts: _PartsProgress) -> tuple[int, list[str]]:
    """Waits for tasks. Returns how many were lost with their workers, and the errors of those that failed."""
    lost, failures = 0, []
    try:
        while pending:
            ready, _ = ray.wait(list(pending), timeout=_TELL_EVERY)
            for reference in ready:
                number = pending.pop(reference)
                try:
                    parts.end(number, ray.get(reference))
                except ray.exceptions.RayTaskError as error:
                    failures.append(first_line(error.cause))
                except ray.exceptions.RayError:
                    lost += 1
            parts.refresh()
    except BaseException:  # mostly Ctrl-C: cancel tasks whose results nobody will use
        for reference in pending:
            ray.cancel(reference, force=True)
        raise
    return lost, failures


class _PartsProgress:
    """The progress of all parts, which the driver shows as the progress of the study."""

    def __init__(self, ray: Any, progress: StudyProgress) -> None:
        self.ray, self.progress = ray, progress
        self.configs: dict[int, list[RunConfig]] = {}  # by the number of the part
        self.states: dict[int, _PartState] = {}
        self.ended: set[int] = set()
        self.finished: set[str] = set()  # ids of runs
        self.reports = _start_reports(ray)
        self._answer: Any = None

    def end(self, number: int, outcomes: list[tuple[str, bool]]) -> None:
        self.finished |= {id_ for id_, _ in outcomes}
        self.ended.add(number)
        steps = sum(config.steps for config in self.configs[number])
        self.states[number] = _PartState(steps, len(outcomes), sum(diverged for _, diverged in outcomes))

    def refresh(self) -> None:
        self._ask()
        progress, states = self.progress, self.states.values()
        progress.num_done = sum(state.done for state in states)
        progress.num_diverged = sum(state.diverged for state in states)
        running = sum(len(self.configs[number]) - self.states[number].done for number in self.states.keys() - self.ended)
        progress.steps(sum(state.steps for state in states) - progress.num_steps, running)

    def _ask(self) -> None:
        """Reads the workers' reports if they are there. They are only shown, so nothing waits for them."""
        if self._answer is None:
            self._answer = self.reports.get.remote()
        if self.ray.wait([self._answer], timeout=0)[0]:
            with contextlib.suppress(self.ray.exceptions.RayError):
                states = self.ray.get(self._answer)
                self.states |= {number: _PartState(*state) for number, state in states.items() if number not in self.ended}
            self._answer = None


def _start_reports(ray: Any) -> Any:
    """An actor that holds the reports of workers about their parts. It is on the driver's node, so that it lives as long as the
    driver."""

    # Defined in a function, so that Ray sends the class itself and the actor need not import this module, and torch with it.
    class Reports:
        def __init__(self) -> None:
            self.states: dict[int, tuple[int, int, int]] = {}

        def tell(self, number: int, state: tuple[int, int, int]) -> None:
            self.states[number] = state

        def get(self) -> dict[int, tuple[int, int, int]]:
            return self.states

    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(Reports).remote()


class _WorkerProgress(StudyProgress):
    """The progress of a worker's part. It reports to the driver now and then."""

    def __init__(self, tell: Callable[[_PartState], None], num_done: int) -> None:
        self._tell, self._state, self._last = tell, _PartState(), -math.inf
        self._add(done=num_done)

    def begin(self, config: RunConfig) -> None:
        self.doing = ""

    def steps(self, num: int, running: int) -> None:
        self._add(steps=num)

    def done(self, summary: Summary) -> None:
        self.running = {run: rows for run, rows in self.running.items() if run != summary.id}
        self._add(done=1, diverged=int(summary.status == "diverged"))

    @property
    def share_done(self) -> float:
        return 0.0  # one part says nothing about the time left of the study; the driver computes that

    def _add(self, **more: int) -> None:
        self._state = _PartState(*map(operator.add, self._state, _PartState(**more)))
        if time.monotonic() - self._last >= _TELL_EVERY:
            self._tell(self._state)
            self._last = time.monotonic()


def _train_part(
    folder: str,
    cwd: str,
    device: str,
    keeps_weights: bool,
    configs: list[RunConfig],
    others: list[RunConfig],
    reports: Any,
    number: int,
) -> list[tuple[str, bool]]:
    """Trains the missing runs of a part, in a worker. ``others`` are finished runs of the same stacks. Returns the ids of the
    part's finished runs, and whether each diverged."""
    refuse(
        not (Path(folder) / "study.json").exists(),
        f"{folder} is not on node {socket.gethostname()}: choose an --out that all nodes share",
    )
    if device == "cpu":
        torch.set_num_threads(1)
    study = Study(folder, keeps_weights=keeps_weights)
    with contextlib.chdir(cwd) if Path(cwd).is_dir() else contextlib.nullcontext():
        todo = study.missing(configs)
        progress = _WorkerProgress(lambda state: reports.tell.remote(number, tuple(state)), len(configs) - len(todo))
        if todo:
            progress.device = device_name(torch.device(device))
            with beating(study, progress):
                run_group(study, [*configs, *others], "auto", torch.device(device), progress)
    return [(result.config.id, result.summary.status == "diverged") for result in study.results(configs)]


def _wait_until_seen(study: Study, configs: Sequence[RunConfig]) -> None:
    deadline = time.monotonic() + _SEEN_WITHIN
    while missing := study.missing(configs):
        refuse(
            time.monotonic() > deadline,
            f"workers finished {len(missing)} runs that are not in {study.folder}: choose an --out that all nodes share",
        )
        time.sleep(1)
