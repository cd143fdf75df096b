"""The progress of a study, which the status line and the signs of life show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from smupar.lm.config.run_config import RunConfig
from smupar.lm.run.folder import Summary
from smupar.lm.run.metrics import Row
from smupar.output.progress import Status

CHECKING = "checking runs and text"


class StudyProgress:
    """What a process does for a study: work done, runs done, running and diverged, and the best loss so far."""

    running: Mapping[str, Sequence[Row]] = MappingProxyType({})  # the rows of runs that are trained now, by id
    doing = CHECKING  # what happens while no run is trained; "" while runs are trained
    device = ""  # where runs are trained; "" until that is known

    def __init__(self, configs: Sequence[RunConfig] = ()) -> None:
        self.plan(configs)

    def plan(self, configs: Sequence[RunConfig], device: str = "") -> None:
        """Counts from now on the runs that are missing in a stage."""
        self.device, self.running = device or self.device, {}
        self.num_runs, self.num_done, self.num_running, self.num_diverged = len(configs), 0, 0, 0
        self.num_steps, self.total_steps = 0, max(1, sum(config.steps for config in configs))
        self.usual_work = sum(config.steps * _work_of_step(config) for config in configs) / self.total_steps or 1.0
        self.work, self.weight = 0.0, 1.0  # work so far in usual steps; usual steps that a current step counts as
        self.best: float | None = None

    def begin(self, config: RunConfig) -> None:
        """Tells the display that runs like this one come next."""
        self.weight, self.doing = _work_of_step(config) / self.usual_work, ""

    def steps(self, num: int, running: int) -> None:
        self.num_steps += num
        self.work += num * self.weight
        self.num_running = running

    def done(self, summary: Summary) -> None:
        self.num_done += 1
        self.running = {run: rows for run, rows in self.running.items() if run != summary.id}
        if summary.status == "diverged":
            self.num_diverged += 1
        elif summary.train_loss is not None:
            self.best = min(summary.train_loss, math.inf if self.best is None else self.best)

    @property
    def share_done(self) -> float:
        """The share of the work that is done, or the share of the runs if the trainer counts the steps."""
        if self.num_done == self.num_runs:
            return float(self.num_runs > 0)  # 0 before runs are planned
        return min(1.0, max(self.work / self.total_steps, 0.0 if self.work else self.num_done / max(1, self.num_runs)))

    def status(self) -> Status:
        """The status line."""
        num_running = len(self.running) or self.num_running
        words = [f"{self.num_done} of {self.num_runs} done", self.doing or f"{num_running} running"]
        words.append(f"{self.num_diverged} diverged")
        if self.best is not None:
            words.append(f"best {self.best:.3f}")
        # If there is little room, "0 diverged" is left out first.
        rank = (0, 1, 3 if self.num_diverged == 0 else 2, 2 if self.num_diverged == 0 else 3)
        return Status(self.share_done, tuple(words), rank[: len(words)], is_working=not self.doing)


def _work_of_step(config: RunConfig) -> float:
    """The time of a step in arbitrary units: the products of all layers, plus a fixed cost for each product."""
    width, beside = config.model.width, 512  # narrower products take as long as products of width 512
    return config.batch_size * config.seq_len * config.model.depth * width * (width + beside)
