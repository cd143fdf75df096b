"""The study of a figure: which runs it needs, in which order, and the command that makes them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from smupar.lm.config.run_config import STANDARD_LIBRARY, RunConfig
from smupar.output.terminal import say
from smupar.paper.figure import Figure
from smupar.paper.published import restore
from smupar.paper.settings import CLIP, WEIGHT_DECAY, Scale
from smupar.study.definition import Stage, StudyDefinition, with_more_seeds
from smupar.study.kinds.reproduction import define_reproduction
from smupar.study.store import Study

DEFAULT_OUT = "runs/reproduce"


def stages_of(fig: Figure, configs: Sequence[RunConfig], scale: Scale, published: str | None) -> list[Stage]:
    """The stages of a figure: its runs, runs that depend on their results, and in a sweep more seeds around each optimum.
    Published results are reused."""
    stages: list[Stage] = [lambda study: configs]
    if fig.then:
        stages.append(partial(fig.then, scale))
    if fig.swept:
        experiment, axis = fig.swept
        stages = with_more_seeds(stages, axis, scale.size(experiment).seeds)
    if fig.last:
        last = fig.last(scale)
        stages = [*stages, lambda study: last]
    if published and not (fig.measure and fig.keeps_weights):  # a figure that needs weights cannot reuse rows
        stages = [partial(_restored, stage, published, scale) for stage in stages]
    return stages


def _restored(stage: Stage, published: str, scale: Scale, study: Study) -> Sequence[RunConfig]:
    configs = stage(study)
    if num_restored := restore(study, published, scale, configs) if study.may_write else 0:
        say(f"{num_restored} runs are taken from the rows in {published}")
    return configs


def definition_of(stages: Sequence[Stage], scale: Scale) -> StudyDefinition:
    """The definition of the study that all figures of a scale share; so it does not name a figure."""
    return define_reproduction({"kind": "reproduce", "scale": scale.name, "data": scale.data}, stages)


def command_of(name: str, scale: Scale, out: Path) -> str:
    """The command that makes or continues a figure, or the study that all figures share, in the same folder."""
    parts = ["smupar reproduce", name, f"--scale {scale.name}"]
    if scale.data != STANDARD_LIBRARY:
        parts.append(f"--data {shlex.quote(scale.data)}")
    if scale.weight_decay != WEIGHT_DECAY:
        parts.append(f"--weight-decay {scale.weight_decay:g}")
    if scale.clip != CLIP:
        parts.append(f"--clip {scale.clip or 0:g}")
    if out != Path(DEFAULT_OUT):
        parts.append(f"--out {shlex.quote(str(out))}")
    return " ".join(parts)
