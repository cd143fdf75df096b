"""Trains one stack of a study to its end, from its last save if it was interrupted, and writes the results of its runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from smupar.lm.config.run_config import RunConfig
from smupar.lm.run.loop import Cadence, Loop, Progress
from smupar.lm.run.metrics import Row
from smupar.lm.run.signals import Stop, end_if_stopped
from smupar.lm.run.stack import GPTStack
from smupar.study.progress import StudyProgress
from smupar.study.stacks.division import Division
from smupar.study.stacks.state import StackState
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
