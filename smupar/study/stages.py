"""Executes a study stage by stage: each stage proposes runs, the engines train those that are missing, and the results may lead
to further runs."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from smupar.execute.threads import cpu_threads
from smupar.lm.config.run_config import RunConfig
from smupar.lm.data.batches import open_text
from smupar.lm.model.gpt import plan_on_meta
from smupar.lm.run.signals import ended_by_sigterm
from smupar.output.progress import waiting
from smupar.output.terminal import say
from smupar.plan.facts.optimizers import family_of
from smupar.plan.plan import PlanWarning
from smupar.study.config import EngineConfig
from smupar.study.definition import Stage, StudyDefinition
from smupar.study.engines import execute
from smupar.study.live import beating, forget_signs, write_planned
from smupar.study.page.view import refreshed
from smupar.study.progress import CHECKING, StudyProgress
from smupar.study.stacks.division import remove_leftovers
from smupar.study.store import Study


@contextlib.contextmanager
def run_study(
    folder: str | Path, definition: StudyDefinition, command: str, how: EngineConfig, *, keeps_weights: bool = False
) -> Iterator[tuple[Study, list[RunConfig]]]:
    """Executes the missing runs of a study. Yields the study and its runs; during the block the folder stays locked."""
    opened = Study.open(folder, definition.stored, command, keeps_weights=keeps_weights)
    with cpu_threads(how.threads), opened as study:
        forget_signs(study)
        progress = StudyProgress()
        with refreshed(study, definition), beating(study, progress):
            configs = [run for propose in definition.stages for run in run_until_complete(study, propose, how, progress)]
        remove_leftovers(study)
        yield study, configs


def run_until_complete(
    study: Study, propose: Stage, how: EngineConfig, progress: StudyProgress | None = None
) -> Sequence[RunConfig]:
    """Executes the runs that a stage proposes. Asks it again with their results, until no run is missing. Returns all its
    runs."""
    message, progress = "", StudyProgress() if progress is None else progress
    while True:
        progress.doing = CHECKING
        configs = propose(study)
        missing = study.missing(configs)
        with waiting(CHECKING):
            _refuse_other_files(study, configs)
            refuse_impossible(missing)
        if configs:
            hint = f"; watch it: smupar watch {shlex.quote(str(study.folder))}" if missing else ""
            if missing or not message:  # otherwise these runs have just ended
                message = f"{len(configs)} runs, {len(configs) - len(missing)} of them done, in {study.folder}{hint}"
                say(message)
        write_planned(study, missing)
        if not missing:
            return configs
        try:
            with ended_by_sigterm():
                execute(study, configs, engine=how.engine, device=how.device, address=how.address, progress=progress)
        except (KeyboardInterrupt, SystemExit):
            say(
                f"{len(configs) - len(study.missing(configs))} of {len(configs)} runs are done and kept. Start the same "
                "command again: runs that were interrupted continue from their last save"
            )
            raise
        if left := study.missing(missing):
            raise ValueError(f"{len(left)} runs of {study.folder} have not ended: start the same command again")


def _refuse_other_files(study: Study, configs: Sequence[RunConfig]) -> None:
    """Raises if earlier runs of the study read another text or trace under the same name. Configurations hold only names."""
    for config in {(config.data, config.valid_data): config for config in configs}.values():
        info = open_text(config).info
        study.record_checksum("text", info.name, info.sha256)
    for trace in dict.fromkeys(Path(config.follow) for config in configs if config.follow):
        study.record_checksum("trace", trace.name, hashlib.sha256(trace.read_bytes()).hexdigest())


def refuse_impossible(configs: Sequence[RunConfig]) -> None:
    """Raises before the first run if any run refers to something that does not exist. Warns of masks that hardly move."""
    distinct = {(c.rule, c.pattern, c.allocation, c.optimizer.lower(), c.sparsity, c.model): c for c in configs}
    for config in distinct.values():
        family_of(config.optimizer)
        with warnings.catch_warnings(action="ignore"):  # the run itself will warn
            plan_on_meta(config)
    for warning in dict.fromkeys(config.few_moves_warning for config in configs):
        if warning:
            warnings.warn(warning, PlanWarning, stacklevel=2)
