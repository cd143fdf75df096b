"""The training loop, for one run or for a stack of many. It ends with a ``Summary`` of each run.

It trains ``TrainableRuns``: a ``Stepper`` or a ``GPTStack``. Rows and checkpoints go to a ``Keeper``. For one run it writes
into the run's folder. For a stack it writes the rows and the state of all runs from time to time. The coordinate check
(check/coordinates/grid_run.py) has its own loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from smupar.lm.config.run_config import RunConfig
from smupar.lm.run.distributed import World, device_name
from smupar.lm.run.folder import Status, Summary, versions
from smupar.lm.run.metrics import Row
from smupar.lm.run.schedule import lr_share
from smupar.lm.run.signals import Stop

_SLOW_SECONDS = 0.5
LONGEST_LOOK = 2.0


class TrainableRuns(Protocol):
    """One run, or a stack of runs, that can be trained step by step."""

    configs: list[RunConfig]
    world: World

    @property
    def num_parameters(self) -> int:
        """The number of parameters of one model."""

    @property
    def sparsities(self) -> list[float]:
        """The current share of zeros among each run's hidden weights."""

    def step(self, step: int) -> Tensor:
        """Makes a step of all runs. Returns their losses, which stay on the device."""

    def validate(self, *, until: Callable[[], bool]) -> list[float] | None:
        """The loss of each run over its validation batches; None if ``until`` stopped it."""


class Keeper(Protocol):
    """Stores and shows the numbers of a loop."""

    def show(self, done: int, loss: float, seconds: float) -> None:
        """Shows progress: steps done, the first run's last loss, and seconds per step."""

    def log(self, index: int, row: Row) -> None:
        """Stores a row of metrics of the run with this number."""

    def save(self, progress: Sequence[Progress]) -> None:
        """Saves a checkpoint."""


@dataclass
class Progress:
    """The progress of a run, which a checkpoint holds besides tensors."""

    step: int = 0  # steps done; of a run that diverged, those whose loss was a number
    seconds: float = 0.0
    # Losses of the last 5 % of the steps. If the run diverged, the last one is NaN or infinite, and no more are added.
    losses: list[float] = field(default_factory=list)
    valid_loss: float | None = None
    valid_step: int | None = None
    best_valid_loss: float | None = None
    best_step: int | None = None
    since_row: list[float] = field(default_factory=list)  # losses since the last row of metrics, for the mean in the next row
    num_rows: int = 0  # rows of metrics so far; 0 if an older version did not count them

    @property
    def diverged(self) -> bool:
        return bool(self.losses) and not math.isfinite(self.losses[-1])

    def add(self, loss: float, num_kept: int) -> None:
        """Adds the loss of the next step, and keeps the last ``num_kept`` losses."""
        if not self.diverged:
            self.losses.append(loss)
            del self.losses[:-num_kept]
            self.step += math.isfinite(loss)

    def validated(self, loss: float, step: int) -> None:
        self.valid_loss, self.valid_step = loss, step
        if math.isfinite(loss) and (self.best_valid_loss is None or loss < self.best_valid_loss):
            self.best_valid_loss, self.best_step = loss, step


@dataclass(frozen=True)
class Cadence:
    """Decides what is due after a step: a row, a validation, a checkpoint, or a look at the losses."""

    steps: int
    log_every: int
    valid_every: int
    save_every: int = 0  # steps; 0: by time. There is always a save at the end
    save_seconds: float = 300.0  # between checkpoints, if save_every is 0
    # Steps between looks at the losses, for which the host waits for the GPU. Slow steps are looked at more often. 0: at each
    # row, and after each step while steps are slow, because ranks must agree to stop before torchrun kills them.
    look_every: int = 0

    def validates(self, done: int) -> bool:
        return done == self.steps or done % self.valid_every == 0

    def saves(self, done: int) -> bool:
        return done == self.steps or (self.save_every > 0 and done % self.save_every == 0)

    def logs(self, done: int) -> bool:
        return done % self.log_every == 0 or self.validates(done) or self.saves(done)

    def looks(self, done: int) -> bool:
        return done % self.look_every == 0 or done == self.steps if self.look_every else self.logs(done)


class Loop:
    """``run()`` trains until the last step, until all runs have diverged, or until a signal asks it to stop."""

    def __init__(
        self,
        runs: TrainableRuns,
        cadence: Cadence,
        keeper: Keeper,
        stop: Stop,
        progress: Sequence[Progress],
        *,
        start: int | None = None,
    ) -> None:
        """``progress`` says where each run starts. A stack may hold further runs, copies that only fill it up. ``start`` is the
        number of steps done, by default by the first run. Pass it for a stack, since its first run may have diverged.
        """
        self.runs, self.cadence, self.keeper, self.stop, self.progress = runs, cadence, keeper, stop, progress
        self.config = runs.configs[0]
        self.done = progress[0].step if start is None else start
        self.pending: list[Tensor] = []  # losses that are still on the device
        self.slow = not cadence.look_every  # until a step has been timed
        self.since = self.saved_at = 0.0

    def run(self) -> Status:
        if not self._catch_up():
            return self.stop.status
        self.since = self.saved_at = time.perf_counter()
        alone = self.runs.world.size == 1
        for step in range(self.done, self.cadence.steps):
            self.pending.append(self.runs.step(step))
            if self.cadence.looks(step + 1) or self.slow or (alone and (self.stop.requested or self._waited_long())):
                status = self._collect(step + 1)
                if status is not None:
                    return status
                self.since = time.perf_counter()
        return "finished"

    def _waited_long(self) -> bool:
        """Whether so much time has passed since the last look at the losses that a checkpoint may be due before the next
        look."""
        return self.cadence.look_every > 0 and time.perf_counter() - self.since > LONGEST_LOOK

    def _catch_up(self) -> bool:
        """Repeats a validation that was interrupted before the run was resumed. Returns False if it is interrupted again."""
        if self.done == 0 or self._has_validated() or not self.cadence.validates(self.done):
            return True
        if not self._validate():
            return False
        for index, progress in enumerate(self.progress):
            if progress.since_row:
                self._log_row(index, self.done, self._tokens(self.done) / max(progress.seconds, 1e-9))
            elif not progress.diverged:  # an older version wrote the row before the validation
                self.keeper.log(index, {"step": self.done, "valid_loss": progress.valid_loss})
        self.keeper.save(self.progress)
        return True

    def _collect(self, done: int) -> Status | None:
        """Does everything that is due after a step. Returns the status if the loop ends."""
        losses = self._fetch()
        self.done, seconds = done, time.perf_counter() - self.since
        seconds_of_step = seconds / len(losses)
        stop, late = self._agree(seconds_of_step)
        self.keeper.show(done, losses[-1][0], seconds_of_step)
        self._record(losses, seconds)
        if self.cadence.validates(done) and not stop and not self._all_diverged():
            stop = not self._validate()  # if it is stopped in the middle, it is repeated when the run is resumed
        saves, status = self._decide(stop, late)
        self._log(losses, seconds_of_step)
        if saves:
            self.keeper.save(self.progress)
            self.saved_at = time.perf_counter()
        return status

    def _decide(self, stop: bool, late: bool) -> tuple[bool, Status | None]:
        """Whether to save, and the status if the loop ends."""
        # The step at which a stack ends must not depend on the clock or on signals, since its masks may still move.
        if self._all_diverged() and (not self.cadence.look_every or self.cadence.looks(self.done)):
            return False, "diverged"
        improved = any(progress.best_step == self.done for progress in self.progress)
        ended = self.done == self.cadence.steps and self._has_validated()
        return self.cadence.saves(self.done) or improved or stop or late, self.stop.status if stop and not ended else None

    def _agree(self, seconds_of_step: float) -> tuple[bool, bool]:
        """Whether to stop, and whether a checkpoint is overdue. If one rank says yes, all ranks do."""
        late = time.perf_counter() - self.saved_at > self.cadence.save_seconds and not self.cadence.save_every
        slow = seconds_of_step > _SLOW_SECONDS and not self.cadence.look_every
        stop, late, self.slow = self.runs.world.any(self.stop.requested, late, slow)
        return stop, late

    def _fetch(self) -> list[list[float]]:
        """The pending losses by step and run, averaged over ranks. The host waits for the GPU here."""
        waiting = torch.stack(self.pending)
        self.pending.clear()
        return self.runs.world.mean(waiting).view(len(waiting), -1).tolist()

    def _record(self, losses: list[list[float]], seconds: float) -> None:
        num_kept = max(1, self.config.steps // 20)
        for index, progress in enumerate(self.progress):
            progress.seconds += seconds / len(self.progress)
            for of_runs in losses:
                progress.add(of_runs[index], num_kept)

    def _validate(self) -> bool:
        """Validates. Returns False if a signal interrupted it."""
        losses = self.runs.validate(until=lambda: self.stop.requested)
        if losses is None:
            return False
        for progress, loss in zip(self.progress, losses, strict=False):
            if not progress.diverged:
                progress.validated(loss, self.done)
        return True

    def _all_diverged(self) -> bool:
        return all(progress.diverged for progress in self.progress)

    def _has_validated(self) -> bool:
        return any(progress.valid_step == self.done for progress in self.progress)

    def _log(self, losses: list[list[float]], seconds: float) -> None:
        """Turns losses into rows, each with the mean since the previous row. A run that diverges has no row after that. If the
        validation of this step was interrupted, the row waits until the validation is repeated, so that a resumed run has the
        same rows."""
        speed = self._tokens(1) / (seconds / len(self.progress))
        for number, of_runs in enumerate(losses, start=self.done + 1 - len(losses)):
            waits = number == self.done and self.cadence.validates(number) and not self._has_validated()
            for index, progress in enumerate(self.progress):
                if number > progress.step + 1 and not progress.since_row:  # it had already diverged
                    continue
                progress.since_row.append(of_runs[index])
                if self.cadence.logs(number) and (not waits or self._all_diverged()):
                    self._log_row(index, number, speed)

    def _log_row(self, index: int, number: int, speed: float) -> None:
        """Writes the row of step ``number``, with the losses since the previous row."""
        config, progress = self.runs.configs[index], self.progress[index]
        row: Row = {
            "step": number,
            "loss": _mean(progress.since_row),
            "lr": config.lr * lr_share(number - 1, config),
            "tokens": self._tokens(number),
            "tokens_per_second": speed,
            "valid_loss": progress.valid_loss if progress.valid_step == number else None,
        }
        self.keeper.log(index, row)
        progress.since_row.clear()
        progress.num_rows += 1

    def summaries(self, status: Status, folders: Sequence[str]) -> list[Summary]:
        """The summary of each run, given the status that ``run`` returned and the runs' folders."""
        ends = enumerate(zip(folders, self.runs.sparsities, strict=False))
        return [self._summary(index, status, folder, sparsity) for index, (folder, sparsity) in ends]

    def _summary(self, index: int, status: Status, folder: str, sparsity: float) -> Summary:
        progress, world = self.progress[index], self.runs.world
        if progress.diverged or (status == "finished" and not math.isfinite(progress.valid_loss or math.nan)):
            status = "diverged"
        tokens = self._tokens(progress.step)
        return Summary(
            id=self.runs.configs[index].id,
            status=status,
            folder=folder,
            steps=progress.step,
            num_tokens=tokens,
            num_parameters=self.runs.num_parameters,
            sparsity=sparsity,
            train_loss=_mean(progress.losses) if progress.losses and status != "diverged" else None,
            valid_loss=None if status == "diverged" else progress.valid_loss,
            best_valid_loss=progress.best_valid_loss,
            best_step=progress.best_step,
            seconds=progress.seconds,
            tokens_per_second=tokens / progress.seconds if progress.seconds else 0.0,
            device=device_name(world.device),
            num_ranks=world.size,
            num_threads=torch.get_num_threads(),
            versions=versions(),
        )

    def _tokens(self, steps: int) -> int:
        return steps * self.config.batch_size * self.config.seq_len


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
