"""Table 3: the random search for base hyperparameters on the dense proxy."""

from __future__ import annotations

from dataclasses import replace

from smupar.lm.config.presets import TABLE_3
from smupar.lm.config.run_config import RunConfig
from smupar.output.colours import rule_colour
from smupar.paper.figure import Claim, Figure, Rows
from smupar.paper.settings import Scale
from smupar.study.config import TUNED, TuneConfig
from smupar.study.curves.curves import Line, Panel, Point
from smupar.study.kinds.tune import propose, tune_panels
from smupar.study.run_configs import with_fields
from smupar.study.store import Result

NUM_SAMPLES = {"cpu": 24, "small": 350, "paper": 350}
# The paper's proxy: 24 layers, 800M tokens of batches of 256 x 2048.
_PAPER = {"depth": 24, "batch_size": 256, "seq_len": 2048, "steps": 1526}


def config(scale: Scale) -> TuneConfig:
    run = scale.run("sweep", rule="mup", width=scale.run("sweep").base_width)
    if scale.name == "paper":
        run = with_fields(run, {**_PAPER, "warmup": None})
    return TuneConfig(run=run, num_samples=NUM_SAMPLES[scale.name])


def default(scale: Scale) -> RunConfig:
    """A run with common defaults: no alphas, PyTorch's learning rate for Adam, and GPT-2's init at this width."""
    return replace(config(scale).run, lr=1e-3, init_std=0.02, alpha_input=1.0, alpha_output=1.0)


def printed(scale: Scale) -> RunConfig:
    """The run with the values that Table 3 prints."""
    return with_fields(config(scale).run, TABLE_3)


def runs(scale: Scale) -> list[RunConfig]:
    return [default(scale), printed(scale), *propose(config(scale))]


def draw(rows: Rows) -> list[Panel]:
    """Loss over each hyperparameter, a point for each sample. The star is the best sample."""
    default, printed, *samples = rows
    panels = tune_panels(samples)
    return [replace(panel, lines=(*panel.lines, *_marks(panel.x_label, default, printed))) for panel in panels]


def _marks(name: str, default: Result, printed: Result) -> tuple[Line, Line]:
    return (
        Line("Table 3's values", (_at(name, printed),), rule_colour("SmuPar"), joined=False, marker="D"),
        Line("common defaults", (_at(name, default),), rule_colour("SP"), joined=False, marker="s"),
    )


def _at(name: str, row: Result) -> Point:
    return Point(getattr(row.config, name), row.loss, row.config.id)


def claim(rows: Rows) -> Claim:
    best = min(rows[2:], key=lambda row: row.loss)
    values = ", ".join(f"{name} {getattr(best.config, name):.4g}" for name in TUNED)
    others = f"common defaults have {rows[0].loss:.3f}, Table 3's values {rows[1].loss:.3f}"
    text = f"the best of {len(rows) - 2} samples has a loss of {best.loss:.3f} ({values}); {others}"
    return Claim(best.loss < rows[0].loss, text)


FIGURE = Figure(
    title="Tuning the dense proxy",
    shows="350 random samples of learning rate, init std and alphas on a proxy of width 256 give the base hyperparameters.",
    runs=runs,
    draw=draw,
    claim=claim,
)
