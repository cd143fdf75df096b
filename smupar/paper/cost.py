"""What it would cost to reproduce a figure, and whether a device is large enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from smupar.lm.config.run_config import RunConfig
from smupar.lm.model.cost import Cost, estimate
from smupar.paper.catalogue import figure
from smupar.paper.figure import Figure
from smupar.paper.settings import Scale
from smupar.paper.stages import command_of, definition_of, stages_of
from smupar.study.config import EngineConfig
from smupar.study.forecast import forecast
from smupar.study.run_configs import unique

_GIB = 2**30


@dataclass(frozen=True)
class FigureCost:
    """The cost of a figure, as lines of name and text, and as values for programs."""

    name: str
    title: str
    lines: Mapping[str, str]
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {self.title}", *(f"  {name:<12}{text}" for name, text in self.lines.items())])


def cost_of(name: str, scale: Scale, how: EngineConfig, *, out: str) -> FigureCost:
    """The cost of a figure, and the command that reproduces it. At scale cpu the time is measured here; larger scales are for
    other machines."""
    fig = figure(name)
    if not fig.runs:
        what = fig.what(scale) if fig.what else "nothing is trained"
        return FigureCost(name, what, {}, {"figure": name, "runs": 0, "what": what})
    command = command_of(name, scale, Path(out))
    if scale.name == "cpu" and how.engine != "ray":
        expected = forecast(
            Path(out) / scale.folder / "study", definition_of(stages_of(fig, fig.runs(scale), scale, None), scale), how
        )
        return FigureCost(name, fig.title, {**expected.lines, "command": command}, {"figure": name, **expected.values})
    return _cost_on_gpus(name, fig, scale, f"{command} --engine ray --address auto" if scale.name == "paper" else command)


def _cost_on_gpus(name: str, fig: Figure, scale: Scale, command: str) -> FigureCost:
    """The cost on H200s, from FLOPs."""
    assert fig.runs is not None
    configs = [*fig.runs(scale), *(fig.expected(scale) if fig.expected else ())]
    if fig.swept:  # three values of each curve get more seeds; their cost does not depend on the optimum
        experiment, axis = fig.swept
        values = sorted({getattr(config, axis) for config in configs})
        middle = [config for config in configs if getattr(config, axis) in values[len(values) // 2 - 1 :][:3]]
        configs += [replace(config, seed=seed) for config in middle for seed in range(1, scale.size(experiment).seeds)]
    configs += fig.last(scale) if fig.last else []
    costs = {config.id: estimate(config, micro_batch=1) for config in unique(map(_cost_fields, configs))}
    costs_of_runs = [costs[_cost_fields(config).id] for config in configs]
    hours = sum(cost.hours() for cost in costs_of_runs)
    tokens = sum(cost.num_tokens for cost in costs_of_runs)
    flops = sum(cost.usual_flops for cost in costs_of_runs)
    largest = max(costs_of_runs, key=lambda cost: cost.num_parameters)
    small, big = min(cost.num_parameters for cost in costs_of_runs), largest.num_parameters
    gib = _bytes(largest) / _GIB
    lines = {
        "runs": f"{len(configs)}{' and those that follow a trace' if fig.then and not fig.expected else ''}",
        "parameters": f"{small:,}" + (f" to {big:,}" if big != small else ""),
        "tokens": f"{tokens:.3g}, of which {largest.num_tokens:.3g} in a run of the largest model",
        "FLOPs": f"{flops:.3g} (6 x parameters x tokens)",
        "time": f"{hours:,.1f} GPU-hours of an H200 at 45% of 990 TFLOP/s",
        "memory": f"{gib:.1f} GiB for the largest model, with one sequence at a time",
        "command": command,
    }
    numbers = {
        "runs": len(configs),
        "counts_all": not fig.then or fig.expected is not None,
        "parameters": (small, big),
        "tokens": tokens,
        "flops": flops,
    }
    return FigureCost(name, fig.title, lines, {"figure": name, **numbers, "seconds": 3600 * hours, "memory_gib": gib})


def _cost_fields(config: RunConfig) -> RunConfig:
    """The run with only the fields that decide its cost."""
    return RunConfig(
        model=config.model, base_width=config.base_width, sparsity=config.sparsity, steps=config.steps,
        batch_size=config.batch_size, seq_len=config.seq_len, dtype=config.dtype, dynamic=config.dynamic,
    )  # fmt: skip


def _bytes(cost: Cost) -> float:
    return cost.state_bytes + cost.activation_bytes


def refuse_device(name: str, scale: Scale, configs: Sequence[RunConfig], device: torch.device, *, asked: bool) -> None:
    if device.type == "cpu":
        if scale.name != "cpu" and not asked:
            raise ValueError(f"scale {scale.name} is for a GPU and torch sees none: try --scale cpu, or pass --device cpu")
        return
    memory = torch.cuda.get_device_properties(device).total_memory
    needed = max(_bytes(estimate(config, micro_batch=1)) for config in unique(map(_cost_fields, configs)))
    if needed > memory:
        raise ValueError(
            f"{name} at scale {scale.name} needs {needed / _GIB:.0f} GiB for its largest model, this GPU has "
            f"{memory / _GIB:.0f}: try a smaller --scale"
        )
