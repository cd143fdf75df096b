"""Reproduces a figure or table: runs, picture, rows, and whether the paper's claim holds here.

All figures of a scale share one folder. In it, each run is named by the hash of its configuration. So Figures 1, 6, 8 and 14
train each model only once.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from smupar import __version__
from smupar.lm.config.run_config import STANDARD_LIBRARY, RunConfig, name_of_text, padded_vocab
from smupar.lm.data.shards import read_index
from smupar.lm.model.cost import Cost, estimate
from smupar.lm.run.distributed import device_name, pick_device
from smupar.lm.run.folder import versions
from smupar.output.files import write_atomic
from smupar.output.page import write_page
from smupar.output.pictures import missing_pictures
from smupar.output.terminal import say
from smupar.paper.figure import Claim, Figure, Place
from smupar.paper.page import ANSWERS, GrowingPage, judged
from smupar.paper.published import restore
from smupar.paper.settings import CLIP, WEIGHT_DECAY, Scale, ScaleName
from smupar.study.config import EngineConfig
from smupar.study.curves import chart_of
from smupar.study.definition import Stage, StudyDefinition, with_more_seeds
from smupar.study.forecast import forecast
from smupar.study.picture import draw_png
from smupar.study.reproduction import CLAIM, PAGE, define_reproduction
from smupar.study.run_configs import unique
from smupar.study.stages import run_study
from smupar.study.store import Result, Study, row_of, write_rows
from smupar.study.view import result_rows

DEFAULT_OUT = "runs/reproduce"
EVERY = "all"  # the name that stands for all figures
MADE_ON = "made-on.json"  # the device and versions of a measurement without runs
FIGURES = (
    *("tab01", "fig01", "fig03", "fig05", "fig06", "fig07", "fig08", "fig09", "fig10", "fig11", "fig12", "fig13", "fig14"),
    *("tab02", "tab03", "tab04", "wpn", "patterns", "thin", "decay", "drift", "held", "depth", "controls"),
)
FINDINGS = {
    1: "Increasing sparsity makes activations and gradients vanish under SP and muP",
    2: "With SP and muP, dense and sparse networks do not share the same optimal hyperparameters",
    3: "SmuPar enables stable activation and stable optimal hyperparameters for any width and sparsity",
    4: "Sparse networks trained with SmuPar improve over SP and muP due to improved tuning",
}
_GIB = 2**30
_GPT2_VOCAB = 50257


@dataclass(frozen=True)
class Reproduced:
    name: str
    claim: Claim
    folder: Path
    rows: Sequence[Result] = ()
    files: dict[str, str] = field(default_factory=dict)  # sha256 of the texts and traces that the runs read
    missing: int = 0  # number of runs that have not ended

    @property
    def title(self) -> str:
        return figure(self.name).title

    @property
    def verdict(self) -> str:
        return verdict_of(self.claim)

    @property
    def values(self) -> dict[str, Any]:
        """The result as plain values, for programs."""
        claim, parts = self.claim, [{"holds": part.holds, "text": part.text} for part in self.claim.parts]
        about = {"figure": self.name, "title": self.title, "holds": claim.holds, "text": claim.text, "parts": parts}
        return {**about, "folder": str(self.folder), "runs": len(self.rows), "missing": self.missing}


def verdict_of(claim: Claim) -> str:
    return ANSWERS[claim.holds]


def figure(name: str) -> Figure:
    if name in ("fig02", "fig04"):
        raise ValueError(f"{name} is a diagram, with nothing to run: see docs/reproduce.md")
    if name not in FIGURES:
        raise ValueError(f"no figure or table is called {name!r}: choose one of {', '.join(FIGURES)}")
    asked: Figure = import_module(f"smupar.paper.figures.{name}").FIGURE
    return asked


def list_values() -> list[dict[str, Any]]:
    """The figures and tables as plain values, for programs."""
    figures = ((name, figure(name)) for name in FIGURES)
    return [{"figure": name, "title": fig.title, "finding": fig.finding, "shows": fig.shows} for name, fig in figures]


def listed() -> str:
    """The text of ``smupar reproduce --list``."""
    lines = []
    for name in FIGURES:
        fig = figure(name)
        finding = f" (Finding {fig.finding})" if fig.finding else ""
        lines.append(f"{name}  {fig.title}{finding}. {fig.shows}")
    return "\n".join([*lines, *(f"Finding {number}: {text}." for number, text in FINDINGS.items())])


def make_scale(name: ScaleName, data: str | None, *, reads: bool = True, **decay: float | None) -> Scale:
    """Makes a scale.

    data    folder made by `smupar data prepare`; by default at scale cpu, the source of Python's standard library
    reads   False if nothing is trained, so that no text is needed
    decay   ``weight_decay`` and ``clip`` of all runs
    """
    scale = Scale(name, **decay)  # type: ignore[arg-type]
    if data is None:
        if name == "cpu":
            return scale
        if not reads:
            return replace(scale, data="DATA", vocab_size=_GPT2_VOCAB)
        raise ValueError(f"scale {name} needs text: make some with `smupar data prepare` and pass --data FOLDER")
    if data == STANDARD_LIBRARY:
        return scale
    return replace(scale, data=name_of_text(data), vocab_size=padded_vocab(read_index(data).tokenizer.vocab_size))


def reproduce(
    name: str,
    scale: Scale,
    how: EngineConfig,
    *,
    out: str,
    data_dir: str | None = None,
    published: str | None = None,
    so_far: bool = False,
) -> Reproduced:
    """Runs the missing runs of a figure, draws it and decides its claim. Writes picture.png, rows.csv, rows.json and claim.json
    to ``out``/scale/name; runs are in ``out``/scale/study.

    data_dir    local copies of the tasks of Table 2
    published   folder of pages; runs with rows there are not run again, unless the figure needs their weights
    so_far      train nothing, and read the runs that have ended
    """
    fig, root = figure(name), Path(out) / scale.folder
    place = Place(scale, root / name, root / "study" / "runs", how.device, data_dir)
    rows: list[Result] = []
    files: dict[str, str] = {}
    missing = 0
    if fig.runs:
        stages = _stages(fig, fig.runs(scale), scale, published)
        rows, files, missing = _results_so_far(fig, stages, place) if so_far else _results_of_all(name, fig, stages, place, how)
    place.folder.mkdir(parents=True, exist_ok=True)
    if rows:
        measures = [{**row_of(row), "seconds": row.summary.seconds, "device": row.summary.device} for row in rows]
        write_rows(place.folder / "rows", measures)
    start = time.perf_counter()
    measured = fig.measure(place, rows) if fig.measure else rows
    if fig.what:
        made_on = {"device": device_name(pick_device(how.device)), "seconds": round(time.perf_counter() - start), **versions()}
        write_atomic(place.folder / MADE_ON, json.dumps(made_on))
    if fig.text:
        write_atomic(place.folder / "table.txt", fig.text() + "\n")
    panels = fig.draw(measured) if fig.draw else []  # none if what is drawn has not ended
    if panels and not missing_pictures():
        draw_png(panels, place.folder / "picture.png", fig.title, columns=fig.columns)
    claim = fig.claim(measured)
    about = {"figure": name, "title": fig.title, "scale": asdict(scale), "smupar": __version__}
    content: dict[str, Any] = {**about, "runs": len(rows), **asdict(claim)}
    charts = [chart_of(panel) for panel in panels]
    write_page(
        place.folder / PAGE, judged(name, fig, claim, place, _command(name, scale, _out(place)), charts, result_rows(rows))
    )
    write_atomic(place.folder / CLAIM, json.dumps(content, indent=1))  # last, since it says that the page is there
    return Reproduced(name, claim, place.folder, rows, files, missing)


# Results, the sha256 of the files that their runs read, and the number of runs that have not ended.
_Results = tuple[list[Result], dict[str, str], int]


def _results_of_all(name: str, fig: Figure, stages: Sequence[Stage], place: Place, how: EngineConfig) -> _Results:
    """The results of all runs of a figure, once they have ended."""
    scale = place.scale
    if how.engine != "ray" and fig.runs:  # with Ray, runs are on other machines
        every = [*fig.runs(scale), *(fig.last(scale) if fig.last else [])]
        _refuse_device(name, scale, every, pick_device(how.device), asked=how.device != "auto")
    if fig.prepare:
        fig.prepare(place.data_dir)
    page = GrowingPage(name, fig, place, _command(name, scale, _out(place)))
    definition = _definition([page.announcing(stage) for stage in stages], scale)
    command = _command(EVERY, scale, _out(place))
    running = run_study(place.runs.parent, definition, command, how, keeps_weights=fig.keeps_weights)
    with page.growing(), running as (study, configs):
        return study.results(configs), study.files(configs), 0


def _results_so_far(fig: Figure, stages: Sequence[Stage], place: Place) -> _Results:
    """The results of the runs of a figure that have ended."""
    stored, command = _definition(stages, place.scale).stored, _command(EVERY, place.scale, _out(place))
    configs: list[RunConfig] = []
    with Study.open(place.runs.parent, stored, command, keeps_weights=fig.keeps_weights) as study:
        try:
            for propose in stages:
                configs += propose(study)
        except ValueError as error:  # some runs depend on results that are still missing
            say(str(error))
        results = study.results(unique(configs))
        if not results:
            raise ValueError(f"no run of this figure has ended in {study.folder}: leave out --so-far to train them")
        return results, study.files(configs), len(study.missing(configs))


def _stages(fig: Figure, configs: Sequence[RunConfig], scale: Scale, published: str | None) -> list[Stage]:
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


def _definition(stages: Sequence[Stage], scale: Scale) -> StudyDefinition:
    """The definition of the study that all figures of a scale share; so it does not name a figure."""
    return define_reproduction({"kind": "reproduce", "scale": scale.name, "data": scale.data}, stages)


def _command(name: str, scale: Scale, out: Path) -> str:
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


def _out(place: Place) -> Path:
    """The folder that holds a folder for each scale, and in it the runs."""
    return place.runs.parents[2]


def _refuse_device(name: str, scale: Scale, configs: Sequence[RunConfig], device: torch.device, *, asked: bool) -> None:
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


# What it would cost


@dataclass(frozen=True)
class FigureCost:
    """The cost of a figure, as lines of name and text, and as values for programs."""

    name: str
    title: str
    lines: Mapping[str, str]
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {self.title}", *(f"  {name:<12}{text}" for name, text in self.lines.items())])


def dry_run(name: str, scale: Scale, how: EngineConfig, *, out: str) -> FigureCost:
    """The cost of a figure, and the command that reproduces it. At scale cpu the time is measured here; larger scales are for
    other machines."""
    fig = figure(name)
    if not fig.runs:
        what = fig.what(scale) if fig.what else "nothing is trained"
        return FigureCost(name, what, {}, {"figure": name, "runs": 0, "what": what})
    command = _command(name, scale, Path(out))
    if scale.name == "cpu" and how.engine != "ray":
        expected = forecast(
            Path(out) / scale.folder / "study", _definition(_stages(fig, fig.runs(scale), scale, None), scale), how
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
    each = [costs[_cost_fields(config).id] for config in configs]
    hours, tokens, flops = (
        sum(cost.hours() for cost in each),
        sum(cost.num_tokens for cost in each),
        sum(cost.usual_flops for cost in each),
    )
    largest = max(each, key=lambda cost: cost.num_parameters)
    small, big = min(cost.num_parameters for cost in each), largest.num_parameters
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
