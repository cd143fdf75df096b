"""Trains the stacks of a division one after the other, each to its end, from its last save if it was interrupted. Writes the
results of the runs."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping, Sequence

import torch

from smupar.lm.config.run_config import RunConfig
from smupar.lm.data.batches import open_text
from smupar.lm.run.loop import Cadence, Loop, Progress
from smupar.lm.run.metrics import Row
from smupar.lm.run.signals import Stop, end_if_stopped
from smupar.lm.run.stack import GPTStack
from smupar.plan.plan import PlanWarning
from smupar.study.progress import StudyProgress
from smupar.study.stacks.ahead import BuiltAhead
from smupar.study.stacks.division import Division
from smupar.study.stacks.state import StackState
from smupar.study.store import Study

_LOOK_EVERY = 50  # steps between looks at losses on a GPU, which also find runs that diverged
_NUM_ROWS = 50  # rows in the metrics of a stacked run
SAVE_SECONDS = 45.0  # between saves of a stack; with the time that a save takes, less than a minute is lost


def train_stacks(
    study: Study,
    division: Division,
    group: Sequence[RunConfig],
    stack: GPTStack | None,
    device: torch.device,
    progress: StudyProgress,
) -> None:
    """Trains the unfinished stacks of a division. ``stack`` holds the runs of the first stack, if that has been built
    already."""
    by_id = {config.id: config for config in group}
    waiting = [
        (number, part) for number in range(len(division.stacks)) if (part := _runs_of_stack(study, division, number, by_id))
    ]
    filled = [part + [part[-1]] * (division.size - len(part)) for _, part in waiting]
    with (
        # The study has already shown these warnings. The thread that builds ends before they are shown again.
        warnings.catch_warnings(action="ignore", category=PlanWarning),
        contextlib.closing(BuiltAhead()) as ahead,
    ):
        for turn, (number, part) in enumerate(waiting):
            if stack is None:
                stack = GPTStack(filled[turn], open_text(part[0]), device, own_batches=division.own_batches)
            elif stack.num_steps or stack.configs != filled[turn]:
                stack.refill(filled[turn], ahead.take(filled[turn]))
            # Building would slow down training on a CPU, and compiling and capturing on a GPU. A large stack trains for so long
            # that the time to build the next one hardly counts, and a second one would need memory.
            if division.size == 1 and stack.is_captured and turn < len(waiting) - 1:
                ahead.start(filled[turn + 1])
            train_stack(study, stack, part, division, number, progress)


def _runs_of_stack(study: Study, division: Division, number: int, by_id: Mapping[str, RunConfig]) -> list[RunConfig]:
    """The runs of a stack; none if all have ended. Copies of a run fill the places of runs that are no longer wanted, so that
    all stacks have the same size: nothing has to be compiled again, and the other runs are rounded as before. For the same
    reason the caller fills up the last stack."""
    runs = division.stacks[number]
    wanted = study.missing([by_id[run] for run in runs if run in by_id])
    return [by_id.get(run, wanted[0]) for run in runs] if wanted else []


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
