"""Traces hold the effects of updates on each hidden layer over a run. Learning rates follow a trace by a law (``law``)."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path

from smupar.output.files import write_atomic
from smupar.output.json_files import read_text, sealed_json
from smupar.output.page import write_page
from smupar.output.pictures import new_figure, save_figure
from smupar.plan.globs import layer_glob
from smupar.refusals import refuse
from smupar.updates.page import trace_document
from smupar.updates.stored import FORMAT, REMEDY, parse_trace


@dataclass
class Trace:
    """Effects of updates, by hidden weight and measured step.

    num_steps  length of the run
    at         the steps that were measured, counted from 0
    effects    for each hidden weight and measured step: RMS of the change of the layer's output by the update, divided by the
               base learning rate; not finite if the run diverged
    shapes     the shape of each hidden weight
    optimizer  the optimizer of the hidden weights
    note       the measured quantity, if it is not the effect: such as "rms"
    """

    num_steps: int = 0
    at: list[int] = field(default_factory=list)
    effects: dict[str, list[float]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    optimizer: str = ""
    note: str = ""

    @property
    def diverged(self) -> bool:
        return any(not math.isfinite(value) for values in self.effects.values() for value in values)

    def add(self, step: int, effects: Mapping[str, float]) -> None:
        self.at.append(step)
        for name, value in effects.items():
            self.effects.setdefault(name, []).append(value)

    def to_json(self) -> str:
        effects = {name: [v if math.isfinite(v) else None for v in values] for name, values in self.effects.items()}
        return json.dumps({"format": FORMAT, **asdict(self), "effects": effects})

    @classmethod
    def from_json(cls, text: str, *, source: str = "this text") -> Trace:
        """Reads what ``to_json`` or ``save`` wrote. ``source`` names the text in errors."""
        trace = parse_trace(text, source=source)
        effects = {name: [math.nan if v is None else float(v) for v in values] for name, values in trace.effects.items()}
        return cls(**{**vars(trace), "effects": effects})

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the trace with a checksum. If you edit the file, remove its field "seal", or it is refused."""
        write_atomic(Path(path), sealed_json(json.loads(self.to_json()), indent=None))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trace:
        refuse(Path(path).is_dir(), f"{path} is a folder: name the trace in it, {Path(path) / 'trace.json'}")
        return cls.from_json(read_text(Path(path), remedy=REMEDY), source=str(path))

    def effect(self, name: str, step: float) -> float:
        """The effect on a layer at a step. Between measured steps the logarithm of the effect is interpolated linearly."""
        values = self.effects[name]
        after = bisect_left(self.at, step)
        if after == 0 or after == len(self.at):
            return values[min(after, len(values) - 1)]
        low, high = values[after - 1], values[after]
        share = (step - self.at[after - 1]) / (self.at[after] - self.at[after - 1])
        if share == 1 or not 0 < low * high < math.inf:
            return high
        return math.exp((1 - share) * math.log(low) + share * math.log(high))

    def plot(self, path: str | PathLike[str], proxy: Trace | None = None) -> None:
        """Draws effects over the run, with a panel for each kind of layer. A proxy's effects are drawn beside them."""
        _plot(self, proxy, path)

    def to_html(self, path: str | PathLike[str], proxy: Trace | None = None) -> None:
        """Writes the same charts as a page, in one file."""
        target, other = json.loads(self.to_json()), None if proxy is None else json.loads(proxy.to_json())
        write_page(Path(path), trace_document(target, other, folder=str(path)))


class TraceReader:
    """Reads a trace for one target, which has its own layers and number of steps."""

    def __init__(self, trace: Trace, names: Sequence[str], num_steps: int | None = None) -> None:
        """``num_steps`` is the target's number of steps; by default the trace's."""
        refuse(not trace.at or not trace.effects, "the trace has no measured step: record it over a whole run of the proxy")
        self.cautions: list[str] = []
        if trace.diverged:
            self.cautions.append("the proxy's run diverged: record a trace at a smaller learning rate")
        self.trace, self.num_steps = trace, num_steps or trace.num_steps
        targets, traced = _by_kind(names), _by_kind(trace.effects)
        for kind, layers in targets.items():
            refuse(
                kind not in traced,
                f"the trace belongs to another architecture: it has no layer like {layers[0]!r} (it has "
                f"{', '.join(list(trace.effects)[:3])}, ...)",
            )
        for kind, layers in targets.items():
            most = max(len(traced[other]) for other in targets if len(targets[other]) == len(layers))
            refuse(
                len(traced[kind]) < most,
                f"the trace misses layers: it has {len(traced[kind])} like {kind!r} and {most} of other kinds",
            )
        self.sources = {
            name: _sources(number, len(layers), traced[kind])
            for kind, layers in targets.items()
            for number, name in enumerate(layers)
        }

    def effect(self, name: str, step: int) -> float:
        """The effect that an update should have at this step of the target."""
        moment = same_moment(step, self.num_steps, self.trace.num_steps)
        parts = [(share, self.trace.effect(source, moment)) for source, share in self.sources[name]]
        if any(value <= 0 or not math.isfinite(value) for _, value in parts):
            return math.nan
        return math.exp(sum(share * math.log(value) for share, value in parts))


def same_moment(step: int, num_steps: int, other_num_steps: int) -> float:
    """The corresponding step in a run of another length.

    Updates have the largest effects in the first steps. This phase has the same number of steps in long and short runs, so
    first steps correspond by their number. The last step corresponds to the last, with a smooth transition in between.
    """
    step = min(step, num_steps)  # steps after the end count as the last step
    return step / (1 + step * (1 / other_num_steps - 1 / num_steps))


def _by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(layer_glob(name), []).append(name)
    return kinds


def _sources(number: int, count: int, traced: Sequence[str]) -> list[tuple[str, float]]:
    """The layers of the trace that correspond to layer ``number`` of ``count``, with their shares. This is the layer with the
    same number or, if the depth differs, the two layers around the same relative depth."""
    if count == len(traced):
        return [(traced[number], 1.0)]
    low, share = divmod(number / max(1, count - 1) * (len(traced) - 1), 1)
    parts = [(traced[int(low)], 1 - share), (traced[min(int(low) + 1, len(traced) - 1)], share)]
    return [(source, part) for source, part in parts if part > 0]


def _plot(target: Trace, proxy: Trace | None, path: str | PathLike[str]) -> None:
    kinds = list(dict.fromkeys(layer_glob(name) for name in target.effects))
    columns = min(3, len(kinds))
    num_rows = -(-len(kinds) // columns)
    figure = new_figure(figsize=(4.2 * columns, 3 * num_rows))
    axes = figure.subplots(num_rows, columns, squeeze=False, sharex=True)
    for panel, kind in zip(axes.flat, kinds, strict=False):
        for trace, colour, label in ((proxy, "0.45", "proxy"), (target, "#c2410c", "target" if proxy else "effect")):
            names = [name for name in trace.effects if layer_glob(name) == kind] if trace else []
            for number, name in enumerate(names):
                assert trace is not None
                shares = [step / max(1, trace.num_steps) for step in trace.at]
                panel.plot(shares, trace.effects[name], color=colour, lw=1, alpha=0.8, label=None if number else label)
        panel.set_title(kind, fontsize=9)
        panel.set_yscale("log")
        panel.grid(alpha=0.25)
    for panel in axes.flat[len(kinds) :]:
        panel.set_visible(False)
    for panel in axes.flat[max(0, len(kinds) - columns) : len(kinds)]:  # the lowest of each column
        panel.set_xlabel("share of the run")
        panel.tick_params(labelbottom=True)
    for panel in axes[:, 0]:
        panel.set_ylabel("RMS(X dW) / base LR")
    axes.flat[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save_figure(figure, path, dpi=120)
