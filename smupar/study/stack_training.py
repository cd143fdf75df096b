"""Trains one stack of a study to its end, from its last save if it was interrupted, and writes the results of its runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from smupar.lm.config.run import RunConfig
from smupar.lm.run.folder import Summary
from smupar.lm.run.loop import Cadence, Loop, Progress
from smupar.lm.run.metrics import Row
from smupar.lm.run.signals import Stop, end_if_stopped
from smupar.lm.run.stack import GPTStack
from smupar.output.progress import Status
from smupar.study.stack_state import StackState
from smupar.study.stacks import Division
from smupar.study.store import Study

_LOOK_EVERY = 50  # steps between looks at losses on a GPU, which also find runs that diverged
_NUM_ROWS = 50  # rows in the metrics of a stacked run
SAVE_SECONDS = 45.0  # between saves of a stack; with the time that a save takes, less than a minute is lost


def train_stack(
    study: Study, stack: GPTStack, part: Sequence[RunConfig], division: Division, number: int, progress: StudyProgress
) -> None:
    """Trains the stack with this number. ``part`` are its runs without the copies that fill it up. Stores the results of runs
    that have none yet."""
    runs, steps = division.stacks[number], part[0].steps
    wanted = [n for n, run in enumerate(runs) if part[n].id == run and not study.has_ended([run])]
    state = StackState(study, division, number)
    saved = state.load(stack)
    start, started = (saved.step, saved.progress) if saved else (0, [Progress() for _ in part])
    keeper = _StackKeeper(stack, state, saved.rows if saved else [[] for _ in part], len(wanted), progress)
    progress.begin(part[0])
    progress.running = {part[n].id: keeper.rows[n] for n in wanted}
    cadence = Cadence(steps, max(1, steps // _NUM_ROWS), valid_every=steps, look_every=_LOOK_EVERY, save_seconds=SAVE_SECONDS)
    if start:
        keeper.show(start)
    with contextlib.closing(state), Stop.on_signals() as stop:
        loop = Loop(stack, cadence, keeper, stop, started, start=start)
        status = loop.run()
    end_if_stopped(status)
    keeper.show(steps)  # also if all diverged, and the loop ended early
    summaries = loop.summaries(status, [config.id for config in part])
    division.write(study)
    if study.keeps_weights:
        stack.save(study.runs, {n: summaries[n] for n in wanted})
    traces = stack.traces()
    for n in wanted:
        is_measured = part[n].record or part[n].follow
        study.add(part[n], summaries[n], keeper.rows[n], traces[n] if is_measured else None)
        progress.done(summaries[n])
    state.remove()
    if stop.requested:  # a signal came after the last step
        end_if_stopped(stop.status)


class _StackKeeper:
    """Keeps the metrics of a stack's runs until they end, saves the stack's state, and shows its progress."""

    def __init__(
        self,
        stack: GPTStack,
        state: StackState,
        rows: Sequence[list[dict[str, float | None]]],
        num_wanted: int,
        progress: StudyProgress,
    ) -> None:
        self.stack, self.state, self.rows = stack, state, rows
        self.num_wanted, self.progress, self.shown = num_wanted, progress, 0

    def show(self, done: int, loss: float = math.nan, seconds: float = math.nan) -> None:
        self.progress.steps((done - self.shown) * self.num_wanted, self.num_wanted)
        self.shown = done

    def log(self, index: int, row: Row) -> None:
        own = self.rows[index]
        if own and own[-1]["step"] == row["step"]:  # an interrupted validation was repeated
            own[-1] |= row
        else:
            own.append(dict(row))

    def save(self, progress: Sequence[Progress]) -> None:
        """Saves the state, unless the runs have ended and their results are written next."""
        if all(run.valid_step is None for run in progress):
            self.state.save(self.stack, progress, self.rows)


class StudyProgress:
    """The progress of a study: work done, runs done, running and diverged, and the best loss so far."""

    running: Mapping[str, Sequence[Row]] = MappingProxyType({})  # the rows of runs that are trained now, by id

    def __init__(self, configs: Sequence[RunConfig]) -> None:
        self.num_runs, self.num_done, self.num_running, self.num_diverged = len(configs), 0, 0, 0
        self.num_steps, self.total_steps = 0, max(1, sum(config.steps for config in configs))
        self.usual_work = sum(config.steps * _work_of_step(config) for config in configs) / self.total_steps or 1.0
        self.work, self.weight = 0.0, 1.0  # work so far in usual steps; usual steps that a current step counts as
        self.best: float | None = None
        self.doing = ""  # what happens before runs are trained
        self.ended: set[str] = set()

    def begin(self, config: RunConfig) -> None:
        """Tells the display that runs like this one come next."""
        self.weight, self.doing = _work_of_step(config) / self.usual_work, ""

    def steps(self, num: int, running: int) -> None:
        self.num_steps += num
        self.work += num * self.weight
        self.num_running = running

    def done(self, summary: Summary) -> None:
        self.num_done += 1
        self.ended.add(summary.id)
        if summary.status == "diverged":
            self.num_diverged += 1
        elif summary.train_loss is not None:
            self.best = min(summary.train_loss, math.inf if self.best is None else self.best)

    @property
    def share_done(self) -> float:
        """The share of the work that is done, or the share of the runs if the trainer counts the steps."""
        if self.num_done == self.num_runs:
            return 1.0
        return min(1.0, max(self.work / self.total_steps, 0.0 if self.work else self.num_done / max(1, self.num_runs)))

    def status(self) -> Status:
        """The status line."""
        num_running = len(self.running.keys() - self.ended) if self.running else self.num_running
        words = [f"{self.num_done} of {self.num_runs} done", self.doing or f"{num_running} running"]
        words.append(f"{self.num_diverged} diverged")
        if self.best is not None:
            words.append(f"best {self.best:.3f}")
        # If there is little room, "0 diverged" is left out first.
        rank = (0, 1, 3 if self.num_diverged == 0 else 2, 2 if self.num_diverged == 0 else 3)
        return Status(self.share_done, tuple(words), rank[: len(words)])


def _work_of_step(config: RunConfig) -> float:
    """The time of a step in arbitrary units: the products of all layers, plus a fixed cost for each product."""
    width, beside = config.model.width, 512  # narrow products take as long as those of width 512
    return config.batch_size * config.seq_len * config.model.depth * width * (width + beside)
