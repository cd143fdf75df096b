"""Predicts the cost of a study: number of runs, time and memory. ``smupar sweep --dry-run`` prints it.

The time on this machine is measured with a few steps of each shape, in the stacks that the study would use. The time of runs
that are not stacked, and the time on a cluster, follow from FLOPs. Some runs depend on results, such as further seeds around an
optimum. They are counted as if every optimum lay in the middle of its axis.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from smupar.lm.config.run_config import RunConfig
from smupar.lm.model.cost import Cost, estimate, in_words, peak_flops
from smupar.lm.run.distributed import device_name, pick_device
from smupar.lm.run.stack import stack_key
from smupar.output.progress import Display, Status
from smupar.plan.plan import PlanWarning
from smupar.study.config import TUNED, EngineConfig
from smupar.study.definition import StudyDefinition
from smupar.study.engines import groups
from smupar.study.run_configs import unique
from smupar.study.stacks.size import divide, seconds_of_warm_step
from smupar.study.stages import refuse_impossible
from smupar.study.store import Result, Study

if TYPE_CHECKING:
    from smupar.lm.run.folder import Summary

_GIB = 2**30
_SHARE = 0.45  # share of the peak that an unmeasured training step is assumed to reach
_H200_TFLOPS = 990.0


@dataclass(frozen=True)
class StudyForecast:
    """The remaining work of a study, and its cost."""

    folder: Path
    num_runs: int
    num_done: int
    num_dependent: int  # runs that depend on results
    counts_all: bool  # False if some runs cannot be known yet
    num_parameters: tuple[int, int]  # of the smallest and the largest model
    num_tokens: int  # in the remaining runs
    flops: float
    seconds: float
    memory_bytes: float
    time_source: str  # where the time comes from: a measurement, or FLOPs

    @property
    def values(self) -> dict[str, Any]:
        """The forecast as plain values, for programs."""
        return {
            "folder": str(self.folder),
            "runs": self.num_runs,
            "done": self.num_done,
            "after_results": self.num_dependent,
            "counts_all": self.counts_all,
            "parameters": self.num_parameters,
            "tokens": self.num_tokens,
            "flops": self.flops,
            "seconds": self.seconds,
            "memory_gib": self.memory_bytes / _GIB,
            "how": self.time_source,
        }

    @property
    def lines(self) -> dict[str, str]:
        smallest, largest = self.num_parameters
        after = f", {self.num_dependent} of them chosen by the results of others" if self.num_dependent else ""
        more = "" if self.counts_all else ", and those that follow a trace of the proxy, which are not counted"
        return {
            "runs": f"{self.num_runs:,} ({self.num_done:,} done){after}{more}",
            "parameters": f"{smallest:,}" + (f" to {largest:,}" if largest != smallest else ""),
            "tokens": f"{self.num_tokens:,} in the remaining runs",
            "FLOPs": f"{self.flops:.3g}",
            "time": f"about {in_words(self.seconds)}, {self.time_source}",
            "memory": f"about {self.memory_bytes / _GIB:.2f} GiB at most",
            "folder": f"{self.folder}",
        }

    def __str__(self) -> str:
        return "\n".join(f"{name:<12}{text}" for name, text in self.lines.items())


def forecast(folder: str | Path, definition: StudyDefinition, how: EngineConfig) -> StudyForecast:
    """Predicts the cost of what is left of a study. Writes nothing."""
    study = Study(folder)
    with warnings.catch_warnings(action="ignore", category=PlanWarning):  # the runs themselves will warn
        configs, num_first, counts_all = _all_runs(study, definition)
        costs = {config.id: estimate(config) for config in unique(configs)}
    missing = study.missing(configs)
    refuse_impossible(missing)
    left = [costs[config.id] for config in missing]
    sizes = [cost.num_parameters for cost in costs.values()]
    seconds, memory, source = _on_cluster(left) if how.engine == "ray" else _on_this_machine(missing, costs, how)
    return StudyForecast(
        folder=study.folder,
        num_runs=len(costs),
        num_done=len(costs) - len(missing),
        num_dependent=len(costs) - num_first,
        counts_all=counts_all,
        num_parameters=(min(sizes), max(sizes)),
        num_tokens=sum(cost.num_tokens for cost in left),
        flops=sum(cost.dense_flops for cost in left),
        seconds=seconds,
        memory_bytes=memory,
        time_source=source,
    )


def _all_runs(study: Study, definition: StudyDefinition) -> tuple[list[RunConfig], int, bool]:
    """The runs that can be known now, how many of them do not depend on results, and whether the study has no other
    runs."""
    first, counts_all = unique(definition.stages[0](study)), True
    imagined, found = _Imagined(study.folder, first), list(first)
    for propose in definition.stages:
        grows = True
        while grows:  # a stage may propose in rounds
            try:
                more = unique([*found, *propose(imagined)])
            except (ValueError, OSError):  # the stage needs a file that only a finished run leaves
                counts_all = False
                break
            grows = len(more) > len(found)
            found = imagined.imagined = more
    return found, len(first), counts_all


class _Imagined(Study):
    """A study in which every run has ended, with the lowest loss in the middle of each axis."""

    def __init__(self, folder: Path, configs: Sequence[RunConfig]) -> None:
        super().__init__(folder)
        self.middle = {name: statistics.median(getattr(config, name) for config in configs) for name in TUNED}
        self.imagined = list(configs)

    def results(self, configs: Sequence[RunConfig] | None = None) -> list[Result]:
        return [Result(config, self._summary(config)) for config in (self.imagined if configs is None else configs)]

    def _summary(self, config: RunConfig) -> Summary:
        values = {name: getattr(config, name) for name in TUNED}
        far = sum(
            abs(math.log(values[name] / self.middle[name])) for name in TUNED if values[name] > 0 and self.middle[name] > 0
        )
        return cast("Summary", SimpleNamespace(status="finished", train_loss=1.0 + far))


def _on_cluster(left: Sequence[Cost]) -> tuple[float, float, str]:
    hours = sum(cost.hours(peak_tflops=_H200_TFLOPS, share=_SHARE) for cost in left)
    memory = max((cost.state_bytes + cost.activation_bytes for cost in left), default=0.0)
    return 3600 * hours, memory, f"on one H200 at {_SHARE:.0%} of {_H200_TFLOPS:g} TFLOP/s; a cluster divides it among its GPUs"


def _on_this_machine(missing: Sequence[RunConfig], costs: dict[str, Cost], how: EngineConfig) -> tuple[float, float, str]:
    """Seconds, bytes, and where the seconds come from: from a few steps of each shape that is stacked, and from FLOPs for
    others."""
    device = pick_device(how.device)
    seconds = memory = 0.0
    shapes, done, is_measured = groups(missing), 0, True

    def status() -> Status:
        return Status(done / max(1, len(shapes)), (f"{done} of {len(shapes)} shapes measured",))

    with Display(status), warnings.catch_warnings(action="ignore", category=PlanWarning):
        for group in shapes:
            cost = costs[group[0].id]
            size, stack = 1, None
            if stack_key(group[0]) is not None:
                division, stack = divide(group, how.engine, device)
                size = max(1, division.size)
            if stack is None:  # the trainer will train these runs
                is_measured = False
                peak = peak_flops(device, group[0].dtype)
                seconds += sum(costs[config.id].dense_flops for config in group) / (_SHARE * peak)
            else:
                seconds += seconds_of_warm_step(stack, device) * group[0].steps * -(-len(group) // size)
            memory = max(memory, size * (cost.state_bytes + cost.activation_bytes))
            done += 1
    measured = f"measured on {device_name(device)} by a few steps of each shape"
    return seconds, memory, measured if is_measured else f"{measured}, or from FLOPs at {_SHARE:.0%} of the peak"
