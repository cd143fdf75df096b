"""The training loop: ``train(config, how)`` builds, trains and reports one run, on one process or many. There is no other.

Started again with the same configuration and folder, a run goes on from its last checkpoint, on a CPU with the same bits.
Everything a step needs is a pure function of (config, step), so a checkpoint is weights, masks, optimizer state and a number.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
import warnings
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from smupar.lm import checkpoint, data
from smupar.lm.config import Execution, RunConfig
from smupar.lm.cost import peak_flops
from smupar.lm.distributed import World, device_name, join
from smupar.lm.folder import RunFolder, Status, Summary, default_folder, read_followed, read_summary, versions
from smupar.lm.schedule import lr_share
from smupar.lm.step import Stepper
from smupar.lm.tracking import Tracker
from smupar.planner import PlanWarning

_SAVE_SECONDS = 300.0
_NUM_VALIDATIONS = 5
_SLOW_SECONDS = 0.5
_LINE_SECONDS = 10.0


def train(config: RunConfig, how: Execution | None = None) -> Summary:
    """Trains one GPT as configured: prints its plan, shows progress, leaves metrics and checkpoints in the run's folder."""
    config, how = config.normalised, how or Execution()
    path = Path(how.out) if how.out else default_folder(config)
    with join(how) as world, _Stop() as stop:
        if not world.is_main:
            world.wait()  # while the main rank looks at text and folder
            summary = read_summary(path)
            return summary or _Loop(config, how, world, data.open_text(config, check=False), path, None, stop).run()
        text = data.open_text(config)
        folder = RunFolder(path, config, text)
        try:
            world.wait()
            summary = read_summary(path)
            if summary:
                print(f"{path} has ended already; for another run of the same configuration choose another --out")
            return summary or _Loop(folder.config, how, world, text, path, folder, stop).run()
        finally:
            folder.close()


@dataclass
class _Progress:
    """What a checkpoint holds beside tensors."""

    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)  # of the last 5 % of the steps
    valid_loss: float | None = None
    valid_step: int | None = None
    best_valid_loss: float | None = None
    best_step: int | None = None


class _Loop:
    def __init__(
        self,
        config: RunConfig,
        how: Execution,
        world: World,
        text: data.Text,
        path: Path,
        folder: RunFolder | None,
        stop: _Stop,
    ) -> None:
        self.config, self.how, self.world, self.folder, self.stop = config, how, world, folder, stop
        self.path, self.checkpoints = path, path / "checkpoints"
        self.stepper = Stepper(config, how, world, text, read_followed(path))
        if folder:
            folder.begin(config, text)  # only now: a configuration that cannot be built must not keep the folder
        self.progress = _Progress()
        self.pending: list[Tensor] = []  # losses that the host has not asked for yet
        self.slow = True  # until a step has been timed
        self.num_parameters = sum(math.prod(row.shape) for row in self.stepper.plan)
        self.peak = peak_flops(world.device, config.dtype, how.peak_tflops) * world.size
        self.valid_every = how.valid_every or max(1, config.steps // _NUM_VALIDATIONS)

    def run(self) -> Summary:
        self._say(str(self.stepper.plan))
        if self.world.is_main and self.config.few_moves:
            warnings.warn(self.config.few_moves, PlanWarning, stacklevel=2)
        if self.stepper.storage is not None:
            self._say(str(self.stepper.storage))
        self._resume()
        with Tracker(self.path, self.config, self.how, self.progress.step, writes=self.world.is_main) as tracker:
            status = self._steps(tracker)
        if status == "finished" and not math.isfinite(self.progress.valid_loss or math.nan):
            status = "diverged"
        summary = self._summary(status)
        if self.folder and status in ("finished", "diverged"):
            if self.stepper.updates is not None:
                self.folder.write_trace(self.stepper.updates.trace)
            self.folder.write_summary(summary)
        self.world.wait()
        return summary

    def _steps(self, tracker: Tracker) -> Status:
        """Trains until the end, or until the run diverges or is asked to stop."""
        first = self.progress.step
        report = _Report(first, self.config.steps, shown=self.world.is_main)
        saved_at = since = time.perf_counter()
        status: Status = "finished"
        if self._validation_due(first):  # stopped in the middle of it last time
            if self._validate(first):
                self._log({"step": first, "valid_loss": self.progress.valid_loss}, tracker)
                self._save()
                saved_at = since = time.perf_counter()
            else:
                status = self.stop.status
        row_losses: list[float] = []
        for step in range(first, self.config.steps if status == "finished" else first):
            self.pending.append(self.stepper.step(step))
            done = step + 1
            last = done == self.config.steps
            validate, save = self._validation_due(done), last or _due(done, self.how.save_every)
            log = validate or save or done % self.how.log_every == 0
            # Where a step takes long, each is looked at: ranks have to agree, and torchrun kills those that do not end soon.
            if not (log or self.slow or (self.world.size == 1 and self.stop.asked)):
                continue
            losses = self._collect(done)
            row_losses += losses
            now = time.perf_counter()
            self.progress.seconds += now - since
            seconds = (now - since) / len(losses)
            speed = self._tokens(1) / seconds
            diverged = not all(math.isfinite(loss) for loss in losses)
            stop, late, self.slow = self.world.any(self.stop.asked, now - saved_at > _SAVE_SECONDS, seconds > _SLOW_SECONDS)
            report.show(done, seconds, f"loss {losses[-1]:.3f}, {_short(speed)} tokens/s, {self._share(speed):.0%} of peak")
            row: dict[str, Any] = {"step": done, "loss": _mean(row_losses)}
            row |= {
                "lr": self.config.lr * lr_share(step, self.config),
                "tokens": self._tokens(done),
                "tokens_per_second": speed,
            }
            if validate and not diverged:
                best_before = self.progress.best_step
                if not stop and not self._validate(done):
                    stop = True  # asked to stop in the middle of it: done again when the run goes on
                row["valid_loss"] = self.progress.valid_loss if self.progress.valid_step == done else None
                save |= self.progress.best_step != best_before
            if log:
                self._log(row, tracker)
                row_losses = []
            if diverged:
                status = "diverged"
                break
            if save or stop or (late and not self.how.save_every):
                self._save()
                saved_at = time.perf_counter()
            if stop and not (last and self.progress.valid_step == done):
                status = self.stop.status
                break
            since = time.perf_counter()
        report.close()
        return status

    def _validation_due(self, done: int) -> bool:
        return done > 0 and self.progress.valid_step != done and (done == self.config.steps or done % self.valid_every == 0)

    def _resume(self) -> None:
        path = checkpoint.latest(self.checkpoints)
        if path is not None:
            state = checkpoint.load(path, self.stepper.model, self.stepper.optimizers)
            self.stepper.load_state_dict(state.pop("moving", {}))
            self.progress = _Progress(**state)
            self._say(f"going on from step {self.progress.step} of {self.config.steps}, in {self.path}")
        else:
            self._say(f"training in {self.path}")
        if self.folder:
            self.folder.resume_metrics(self.progress.step)

    def _collect(self, done: int) -> list[float]:
        """Fetches the losses that are waiting, averaged over ranks. Here the host waits for the GPU."""
        losses: list[float] = self.world.mean(torch.stack(self.pending)).tolist()
        self.pending.clear()
        tail = max(1, self.config.steps // 20)
        self.progress.losses = [*self.progress.losses, *losses][-tail:]
        self.progress.step = done
        return losses

    def _validate(self, done: int) -> bool:
        """Whether it came to its end before the run was asked to stop."""
        loss = self.stepper.validate(until=lambda: self.stop.asked)
        if loss is None:
            return False
        self.progress.valid_loss, self.progress.valid_step = loss, done
        best = self.progress.best_valid_loss
        if math.isfinite(loss) and (best is None or loss < best):
            self.progress.best_valid_loss, self.progress.best_step = loss, done
        return True

    def _save(self) -> None:
        state = {name: value for name, value in asdict(self.progress).items() if name != "step"}
        state["moving"] = self.stepper.state_dict()
        checkpoint.save(self.checkpoints, self.progress.step, self.stepper.model, self.stepper.optimizers, state, self.world)
        if self.world.is_main:
            checkpoint.prune(self.checkpoints, keep=self.how.keep, best=self.progress.best_step)

    def _log(self, row: dict[str, Any], tracker: Tracker) -> None:
        if self.folder:
            self.folder.log(row)
        tracker.write(row)

    def _summary(self, status: Status) -> Summary:
        progress, tokens = self.progress, self._tokens(self.progress.step)
        train_loss = _mean(progress.losses)
        device = device_name(self.world.device)
        return Summary(
            id=self.config.id,
            status=status,
            folder=str(self.path),
            steps=progress.step,
            num_tokens=tokens,
            num_parameters=self.num_parameters,
            sparsity=self.stepper.sparsity,
            train_loss=train_loss if math.isfinite(train_loss) else None,
            valid_loss=None if status == "diverged" else progress.valid_loss,
            best_valid_loss=progress.best_valid_loss,
            best_step=progress.best_step,
            seconds=progress.seconds,
            tokens_per_second=tokens / progress.seconds if progress.seconds else 0.0,
            device=device,
            num_ranks=self.world.size,
            num_threads=torch.get_num_threads(),
            versions=versions(),
        )

    def _tokens(self, steps: int) -> int:
        return steps * self.config.batch_size * self.config.seq_len

    def _share(self, tokens_per_second: float) -> float:
        """Of the peak, counting 6 FLOPs per parameter and token, as is usual."""
        return 6 * self.num_parameters * tokens_per_second / self.peak

    def _say(self, text: str) -> None:
        if self.world.is_main:
            print(text, flush=True)


class _Stop:
    """Notes SIGTERM and SIGINT, so that the loop can save before it ends; the second SIGINT ends it at once."""

    def __init__(self) -> None:
        self.asked = False
        self.status: Status = "terminated"
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python does not allow it
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        self.status = "interrupted" if number == signal.SIGINT else "terminated"


class _Report:
    """Progress: a bar on a terminal, elsewhere a line now and then, so that logs can be read."""

    def __init__(self, first: int, steps: int, *, shown: bool) -> None:
        self.steps, self.shown, self.on_terminal = steps, shown, sys.stderr.isatty()
        self.bar = tqdm(total=steps, initial=first, desc="training", unit="step", disable=not (shown and self.on_terminal))
        self.spoken = -math.inf

    def show(self, done: int, seconds_per_step: float, text: str) -> None:
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(done - self.bar.n)
        now = time.perf_counter()
        if self.shown and not self.on_terminal and (now - self.spoken > _LINE_SECONDS or done == self.steps):
            left = timedelta(seconds=round(seconds_per_step * (self.steps - done)))
            print(f"step {done} of {self.steps}: {text}, {left} left", file=sys.stderr, flush=True)
            self.spoken = now

    def close(self) -> None:
        self.bar.close()


def _due(done: int, every: int) -> bool:
    return bool(every) and done % every == 0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _short(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"
