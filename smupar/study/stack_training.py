"""Trains one stack of a study to its end, from where it was interrupted, and writes the results of its runs."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tqdm import tqdm

from smupar.lm.config.run import RunConfig
from smupar.lm.run.folder import Summary
from smupar.lm.run.loop import Cadence, Loop, Progress
from smupar.lm.run.metrics import Row
from smupar.lm.run.signals import Stop, end_if_stopped
from smupar.lm.run.stack import GPTStack
from smupar.study.stack_state import StackState
from smupar.study.stacks import Division
from smupar.study.store import Study

_LOOK_EVERY = 50  # steps after which losses of a stack are fetched from a GPU, and runs that diverged are seen
_NUM_ROWS = 50  # rows of metrics that a run of a stack has
_SAVE_SECONDS = 45.0  # between states of a stack; with the time of a save, less than a minute is lost


def train_stack(
    study: Study, stack: GPTStack, part: Sequence[RunConfig], division: Division, number: int, progress: StudyProgress
) -> None:
    """Trains the stack of this number. ``part`` are its first runs, without those that only fill it up. Results are kept of
    those that have none yet."""
    runs, steps = division.stacks[number], part[0].steps
    wanted = [n for n, run in enumerate(runs) if part[n].id == run and not study.has_ended([run])]
    state = StackState(study, division, number)
    saved = state.load(stack)
    start, started = (saved.step, saved.progress) if saved else (0, [Progress() for _ in part])
    keeper = _StackKeeper(stack, state, saved.rows if saved else [[] for _ in part], len(wanted), progress)
    progress.running = {part[n].id: keeper.rows[n] for n in wanted}
    cadence = Cadence(steps, max(1, steps // _NUM_ROWS), valid_every=steps, look_every=_LOOK_EVERY, save_seconds=_SAVE_SECONDS)
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
    if stop.requested:  # by a signal after the last step
        end_if_stopped(stop.status)


class _StackKeeper:
    """Holds the rows of a stack's runs until they have ended, saves its state, and shows its progress."""

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
        if own and own[-1]["step"] == row["step"]:  # a validation that was interrupted has been repeated
            own[-1] |= row
        else:
            own.append(dict(row))

    def save(self, progress: Sequence[Progress]) -> None:
        """Saves the state, unless the runs have ended: then their results are written next."""
        if all(run.valid_step is None for run in progress):
            self.state.save(self.stack, progress, self.rows)


class StudyProgress:
    """A progress bar: how many runs are done, running or diverged, and the time left."""

    running: Mapping[str, Sequence[Row]] = MappingProxyType({})  # the rows of runs that are trained now, by id

    def __init__(self, configs: Sequence[RunConfig]) -> None:
        self.num_runs, self.num_done, self.num_diverged = len(configs), 0, 0
        self.bar = tqdm(
            total=sum(config.steps for config in configs),
            desc="study",
            unit="step",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 10,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed} gone, {remaining} left, {postfix}",
        )

    def steps(self, num: int, running: int) -> None:
        self.bar.set_postfix_str(
            f"{self.num_done} of {self.num_runs} runs done, {running} running, {self.num_diverged} diverged", refresh=False
        )
        self.bar.update(num)

    def done(self, summary: Summary) -> None:
        self.num_done += 1
        self.num_diverged += summary.status == "diverged"

    @property
    def share_done(self) -> float:
        """Share of the steps, or of the runs, where the trainer counts their steps."""
        return max(self.bar.n / (self.bar.total or 1), self.num_done / max(1, self.num_runs))

    def close(self) -> None:
        self.bar.close()
