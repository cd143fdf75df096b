"""Reproduces a figure or table: runs, picture, rows, and whether the paper's claim holds here.

All figures of a scale share one folder. In it, each run is named by the hash of its configuration. So Figures 1, 6, 8 and 14
train each model only once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from smupar import __version__
from smupar.lm.config.run_config import STANDARD_LIBRARY, RunConfig, name_of_text, padded_vocab
from smupar.lm.data.shards import read_index
from smupar.lm.run.distributed import device_name, pick_device
from smupar.lm.run.folder import versions
from smupar.output.files import write_atomic
from smupar.output.page import write_page
from smupar.output.pictures import missing_pictures
from smupar.output.terminal import say
from smupar.paper.catalogue import EVERY, figure
from smupar.paper.cost import refuse_device
from smupar.paper.figure import Claim, Figure, Place
from smupar.paper.page import ANSWERS, GrowingPage, judged
from smupar.paper.settings import Scale, ScaleName
from smupar.paper.stages import command_of, definition_of, stages_of
from smupar.study.config import EngineConfig
from smupar.study.curves.curves import chart_of
from smupar.study.curves.picture import draw_png
from smupar.study.definition import Stage
from smupar.study.kinds.reproduction import CLAIM, PAGE
from smupar.study.page.run_table import result_rows
from smupar.study.run_configs import unique
from smupar.study.stages import run_study
from smupar.study.store import Result, Study, row_of, write_rows

MADE_ON = "made-on.json"  # the device and versions of a measurement without runs
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
        stages = stages_of(fig, fig.runs(scale), scale, published)
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
        place.folder / PAGE, judged(name, fig, claim, place, command_of(name, scale, _out(place)), charts, result_rows(rows))
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
        refuse_device(name, scale, every, pick_device(how.device), asked=how.device != "auto")
    if fig.prepare:
        fig.prepare(place.data_dir)
    page = GrowingPage(name, fig, place, command_of(name, scale, _out(place)))
    definition = definition_of([page.announcing(stage) for stage in stages], scale)
    command = command_of(EVERY, scale, _out(place))
    running = run_study(place.runs.parent, definition, command, how, keeps_weights=fig.keeps_weights)
    with page.growing(), running as (study, configs):
        return study.results(configs), study.files(configs), 0


def _results_so_far(fig: Figure, stages: Sequence[Stage], place: Place) -> _Results:
    """The results of the runs of a figure that have ended."""
    stored, command = definition_of(stages, place.scale).stored, command_of(EVERY, place.scale, _out(place))
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


def _out(place: Place) -> Path:
    """The folder that holds a folder for each scale, and in it the runs."""
    return place.runs.parents[2]
