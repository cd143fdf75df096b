"""``train(config, how)`` builds, trains and reports one run, on one process or many. The loop is in loop.py.

A run that is started again with the same configuration and folder continues from its last checkpoint, on a CPU with the same
bits. Batches and scheduled learning rates are pure functions of (config, step), so a checkpoint holds weights, masks, optimizer
state and progress: step, last losses, best validation. If masks move, or updates are measured or followed, it also holds their
state, since learning rates that follow a trace depend on earlier measurements.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from smupar.execute.threads import cpu_threads
from smupar.lm.config.run_config import Execution, RunConfig
from smupar.lm.data.batches import Corpus, open_text
from smupar.lm.model.cost import peak_flops
from smupar.lm.run import checkpoint
from smupar.lm.run.distributed import World, join
from smupar.lm.run.folder import SUMMARY_FILE, RunFolder, Summary, default_folder, read_followed, read_summary
from smupar.lm.run.loop import Cadence, Loop, Progress
from smupar.lm.run.metrics import Row
from smupar.lm.run.signals import Stop
from smupar.lm.run.step import Stepper
from smupar.lm.run.tracking import tracked
from smupar.output.json_files import as_record
from smupar.output.progress import Display, Status
from smupar.output.terminal import say
from smupar.plan.plan import PlanWarning
from smupar.plan.summary import summary_of
from smupar.refusals import refuse

_NUM_VALIDATIONS = 5


def train(config: RunConfig, how: Execution | None = None, *, shows: bool = True) -> Summary:
    """Trains one GPT as configured. Shows its plan and progress, and writes metrics and checkpoints into the run's folder. A
    study that shows its own progress passes ``shows=False``."""
    config, how = config.normalised, how or Execution()
    path = Path(how.out) if how.out else default_folder(config)
    with cpu_threads(how.threads), join(how) as world, Stop.on_signals() as stop:
        if not world.is_main:
            world.wait()  # the main rank checks text and folder first
            return read_summary(path) or _train(config, how, world, open_text(config, check=False), path, None, stop, shows)
        corpus = open_text(config)
        with contextlib.closing(RunFolder(path, config, corpus)) as folder:
            if how.from_step is not None:
                folder.go_back(how.from_step)
            world.wait()
            summary = read_summary(path)
            if summary:
                refuse(
                    summary.id != folder.config.id,
                    f"{path / SUMMARY_FILE} is damaged (it belongs to run {summary.id}): delete it, and run the same command "
                    "to write it again",
                )
                say(f"{path} has ended already; for another run of the same configuration choose another --out")
            return summary or _train(folder.config, how, world, corpus, path, folder, stop, shows)


def _train(
    config: RunConfig,
    how: Execution,
    world: World,
    corpus: Corpus,
    path: Path,
    folder: RunFolder | None,
    stop: Stop,
    shows: bool,
) -> Summary:
    """Trains in ``path``. ``folder`` is None except on the main rank, which writes."""
    stepper = Stepper(config, how, world, corpus, read_followed(path))
    if folder:
        folder.begin(config, corpus)  # not earlier: if the model cannot be built, the folder must stay free
    if shows:
        _say(world, _plan_text(stepper, full=how.full))
    if world.is_main and config.few_moves_warning:
        warnings.warn(config.few_moves_warning, PlanWarning, stacklevel=3)
    progress = _resumed(stepper, path, folder)
    if shows:
        doing = f"continuing from step {progress.step} of {config.steps}, in" if progress.step else "training in"
        _say(world, f"{doing} {path}; watch it: smupar watch {shlex.quote(str(path))}")
    cadence = Cadence(
        config.steps, how.log_every, how.valid_every or max(1, config.steps // _NUM_VALIDATIONS), save_every=how.save_every
    )
    first = progress.step
    with tracked(path, config, how, first, writes=world.is_main) as track:
        keeper = _FolderKeeper(stepper, how, path, folder, track, first)
        loop = Loop(stepper, cadence, keeper, stop, [progress])
        with Display(keeper.status) if world.is_main and shows else contextlib.nullcontext():
            status = loop.run()
    [summary] = loop.summaries(status, [str(path)])
    if summary.status == "diverged":
        _doubt_checkpoint(path / "checkpoints", first, world)
    if folder and summary.status in ("finished", "diverged"):
        [trace], observer = stepper.traces(), stepper.companions.observer
        summary.write(path, trace, None if observer is None else observer.observation)
    world.wait()
    return summary


def _plan_text(stepper: Stepper, *, full: bool) -> str:
    """The text about the plan, and about the storage of weights."""
    plan = str(stepper.plan) if full else f"{summary_of(stepper.plan)}\n--full prints every parameter"
    return plan if stepper.storage is None else f"{plan}\n{stepper.storage}"


def _resumed(stepper: Stepper, path: Path, folder: RunFolder | None) -> Progress:
    last, progress, rows_checksum = _last_intact(path / "checkpoints", stepper.world), Progress(), None
    if last is not None:
        state = checkpoint.load(last, stepper.model, stepper.optimizers)
        rows_checksum = state.pop("rows", None)
        checkpoint.refuse_other_run(last, state.pop("run", None), stepper.config.id)
        with checkpoint.named(last):
            stepper.load_state_dict(state.pop("moving", {}))
            progress = as_record(Progress, state, source=f"{last / checkpoint.STATE}", remedy="restore it")
        if stepper.companions.observer is not None:
            stepper.companions.observer.step = progress.step
    if folder:
        # If losses are pending for a row, the checkpoint's own step has no row yet.
        logged = progress.step - bool(progress.since_row)
        progress.num_rows = folder.resume_metrics(logged, progress.num_rows, rows_checksum)
    return progress


def _last_intact(folder: Path, world: World) -> Path | None:
    """The last intact checkpoint; None if there is no checkpoint. Damaged ones after it are set aside, each with a line that
    names the damage. Raises if all are damaged."""
    damaged: list[tuple[Path, checkpoint.DamagedCheckpointError]] = []
    for step in reversed(checkpoint.steps_in(folder)):
        path = folder / checkpoint.folder_name(step)
        try:
            checkpoint.check(path, world)
        except checkpoint.DamagedCheckpointError as error:
            damaged.append((path, error))
            continue
        world.wait()  # until all ranks have checked it
        for bad, why in damaged:
            aside = checkpoint.set_aside(bad) if world.is_main else bad
            _say(world, f"the checkpoint {bad} is damaged ({why.reason}), and is now called {aside.name}: using step {step}")
        world.wait()
        return path
    if damaged:
        raise damaged[-1][1]
    return None


def _doubt_checkpoint(folder: Path, first: int, world: World) -> None:
    """Warns that a checkpoint may be damaged, if the run resumed from it and diverged before the next save."""
    steps = checkpoint.steps_in(folder)
    if first and steps and steps[-1] == first:
        earlier = " or ".join(f"--from-step {step}" for step in [*reversed(steps[:-1]), 0])
        _say(
            world,
            f"the run diverged before it saved again, so the checkpoint of step {first}, from which it resumed, may be "
            f"damaged. The same command with {earlier} resumes from an earlier step",
        )


def _say(world: World, text: str) -> None:
    if world.is_main:
        say(text)


class _FolderKeeper:
    """Writes rows and checkpoints of one run into its folder, and sends rows to the trackers."""

    def __init__(
        self, stepper: Stepper, how: Execution, path: Path, folder: RunFolder | None, track: Callable[[Row], None], first: int
    ) -> None:
        self.stepper, self.checkpoints, self.num_kept = stepper, path / "checkpoints", how.keep
        self.folder, self.track = folder, track
        self.steps, world = stepper.config.steps, stepper.world
        # None on a CPU, unless the user names its peak: it is not known, and other processes would disturb a measurement.
        self.peak_speed: float | None = None
        if world.device.type != "cpu" or how.peak_tflops:
            peak = peak_flops(world.device, stepper.config.dtype, how.peak_tflops) * world.size
            self.peak_speed = peak / (6 * stepper.num_parameters)  # the usual convention: FLOPs for each parameter and token
        self.done, self.loss, self.speed = first, math.nan, math.nan

    def show(self, done: int, loss: float, seconds: float) -> None:
        self.done, self.loss = done, loss
        self.speed = self.stepper.config.batch_size * self.stepper.config.seq_len / seconds

    def status(self) -> Status:
        """The status line."""
        words = [f"step {self.done} of {self.steps}"]
        if math.isfinite(self.speed):
            words += [f"loss {self.loss:.3f}", f"{_short(self.speed)} tokens/s"]
            words += [f"{self.speed / self.peak_speed:.0%} of peak"] if self.peak_speed else []
        return Status(self.done / self.steps, tuple(words), rank=(1, 0, 2, 3)[: len(words)])

    def log(self, index: int, row: Row) -> None:
        if self.folder:
            self.folder.log(row)
        self.track(row)

    def save(self, progress: Sequence[Progress]) -> None:
        [run], stepper = progress, self.stepper
        state = {name: value for name, value in asdict(run).items() if name != "step"}
        state |= {"run": stepper.config.id, "moving": stepper.state_dict()}
        if self.folder:
            state["rows"] = self.folder.rows_checksum
        checkpoint.save(self.checkpoints, run.step, stepper.model, stepper.optimizers, state, stepper.world)
        if stepper.world.is_main:
            checkpoint.prune(self.checkpoints, keep=self.num_kept, best=run.best_step)


def _short(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"
