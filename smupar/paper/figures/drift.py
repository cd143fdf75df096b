"""Beyond the paper: the effect of one update on the layers of a sparse model, relative to the dense model, over a complete run.

At the first steps SmuPar makes this ratio 1. It uses the runs of the decay study that record a trace.
"""

from __future__ import annotations

import math
import re
from statistics import fmean
from typing import Any

from smupar.lm.config.run_config import RunConfig
from smupar.output.files import write_atomic
from smupar.output.tables import aligned
from smupar.paper.figure import STABLE, Claim, Figure, Place, Rows, all_of
from smupar.paper.figures.decay import decay_run
from smupar.paper.settings import WEIGHT_DECAY, Scale
from smupar.study.curves.curves import Line, Panel, Point
from smupar.study.run_configs import with_fields
from smupar.updates.trace import Trace

_DENSITIES = {"cpu": (1.0, 1 / 8), "small": (1.0, 1 / 8, 1 / 32), "paper": (1.0, 1 / 8, 1 / 32)}
_WAYS: dict[str, dict[str, object]] = {
    "no decay": {"weight_decay": 0.0},
    "independent": {},
    "coupled": {"decay": "coupled"},
    "size held": {"decay": "held"},
}
_IN_WORDS = {"independent": "independent decay", "coupled": "coupled decay", "size held": "held sizes"}
_NUM_STEPS_SHOWN = 8

Ratios = dict[str, dict[int, float]]  # "kind of decay, density" -> step, counted from 1 -> ratio


def runs(scale: Scale) -> list[RunConfig]:
    """One run for each density and kind of decay. The dense model runs with coupled decay too, because it is wider than the
    base, and so coupled decay acts differently on it."""
    return [
        with_fields(decay_run(scale, density, record=True), {"weight_decay": WEIGHT_DECAY, **way})
        for way in _WAYS.values()
        for density in _DENSITIES[scale.name]
    ]


def measure(place: Place, rows: Rows) -> Ratios:
    """Reads the traces, and writes the table."""
    traces = {(_way(row.config), row.config.density): Trace.load(place.runs / row.config.id / "trace.json") for row in rows}
    ratios = {
        f"{way}, density 1/{1 / density:g}": _ratios(trace, traces[way, 1.0])
        for (way, density), trace in traces.items()
        if density is not None and density < 1
    }
    write_atomic(place.folder / "table.txt", _table(ratios))
    return ratios


def from_published(published: dict[str, Any]) -> Ratios:
    """The ratios of a published table."""
    head, *lines = (re.split(r" {2,}", line) for line in published["table"].splitlines())
    return {name: dict(zip(map(int, head[1:]), map(float, values), strict=True)) for name, *values in lines}


def _way(run: RunConfig) -> str:
    return "no decay" if run.weight_decay == 0 else "size held" if run.decay == "held" else run.decay


def _measured_ways(ratios: Ratios) -> list[str]:
    """The kinds of decay for which there are ratios. The first published page had no held sizes."""
    return [way for way in _WAYS if any(name.startswith(f"{way},") for name in ratios)]


def _ratios(trace: Trace, dense: Trace) -> dict[int, float]:
    """Step -> ratio, at step 1 and at the last step divided by powers of two. A ratio is the geometric mean over layers, and
    over measured steps within 10 % of the step."""
    logs = {
        step + 1: fmean(math.log(trace.effects[name][index] / dense.effects[name][index]) for name in trace.effects)
        for index, step in enumerate(trace.at)
    }
    last = max(logs)
    steps = sorted({1, *(round(last / 2**number) for number in range(_NUM_STEPS_SHOWN))})
    return {step: math.exp(fmean(log for at, log in logs.items() if 0.9 * step <= at <= 1.1 * step)) for step in steps if step}


def _table(ratios: Ratios) -> str:
    steps = list(next(iter(ratios.values())))
    rows = [[name, *(f"{own[step]:.2f}" for step in steps)] for name, own in ratios.items()]
    return aligned([["step", *map(str, steps)], *rows]) + "\n"


def draw(ratios: Ratios) -> list[Panel]:
    panels = []
    for way in _measured_ways(ratios):
        own = {name.partition(", ")[2]: points for name, points in ratios.items() if name.startswith(f"{way},")}
        lines = tuple(
            Line(name, tuple(Point(step, ratio) for step, ratio in points.items()), number / max(1, len(own) - 1))
            for number, (name, points) in enumerate(own.items())
        )
        heading, what = _IN_WORDS.get(way, way), "effect of an update, over the dense model's"
        panels.append(Panel(heading, "step", what, lines, level=(1.0, "as in the dense model"), whole_y=True))
    return panels


def claim(ratios: Ratios) -> Claim:
    """Claims about the lowest density, and about all densities with the rule's own decay."""
    last = {
        way: next(own for name, own in reversed(ratios.items()) if name.startswith(f"{way},")) for way in _measured_ways(ratios)
    }
    step = max(last["no decay"])
    first, ends = last["no decay"][1], {way: own[step] for way, own in last.items()}
    return all_of(
        _keeps_size(
            {name.partition(", ")[2]: own[step] for name, own in ratios.items() if name.startswith("independent,")}, step
        ),
        Claim(
            ends["no decay"] > 2 * first,
            f"without decay the effect of an update grows from {first:.2g}x the dense model's at step 1 to "
            f"{ends['no decay']:.2g}x at step {step}",
        ),
        *(
            Claim(
                ends[way] < ends["no decay"] / 2,
                f"with {_IN_WORDS[way]} it ends at {ends[way]:.2g}x (less than half of {ends['no decay']:.2g}x is needed)",
            )
            for way in _IN_WORDS
            if way in ends
        ),
    )


def _keeps_size(ends: dict[str, float], step: int) -> Claim:
    """Whether updates keep their size to the end of the run, which a coordinate check of ten steps cannot see."""
    words = ", ".join(f"{ratio:.2g}x at {density}" for density, ratio in ends.items())
    return Claim(
        max(max(ratio, 1 / ratio) for ratio in ends.values()) <= STABLE,
        f"with independent decay updates do as much as the dense model's even at the end of the run, step {step}: {words} "
        f"(at most {STABLE:g}x is allowed)",
    )


FIGURE = Figure(
    title="What an update does in a sparse model, over a whole run",
    claimed="At the end of a run, an update does as much in a sparse model as in the dense one",
    shows="The paper looks at the first ten steps, in Figure 5.",
    runs=runs,
    measure=measure,
    from_published=from_published,
    draw=draw,
    claim=claim,
)
