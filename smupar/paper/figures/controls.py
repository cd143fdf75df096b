"""Beyond the paper: controls for measured updates. Is the proxy's trace needed, or does one tuned constant do as well? Must the
measured quantity be the effect of updates on a layer's output?

Every run uses the proxy's best learning rate for everything but hidden weights. Only the learning rate of hidden weights is
swept, as a factor on the proxy's best one. Measured updates follow the trace of the proxy, at factor 1 without any tuning. The
controls follow a constant, at their best factor:

constant   one number for the effect of updates, RMS(X dW), in all layers and at all steps
trust      one number for the norm of an update divided by the norm of its weight, as in LAMB
rms        one number for the RMS of an update
spectral   one number for the spectral norm of an update, times sqrt(in / out)

"function" follows a trace of the effect of each layer's update on the model's output, as FLeRM does (Milsom et al., arXiv
2502.17405), but only for hidden weights, and measured by a forward pass for each layer. "smupar" follows nothing. Constants are
geometric means over the proxy's trace, so their best factors are close to 1. They are tuned nevertheless.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import Any

from smupar.lm.config.run_config import STANDARD_LIBRARY, RunConfig
from smupar.lm.run.folder import TRACE_FILE
from smupar.paper.figure import NUM_SPREADS, USUAL_SPREAD, Claim, Figure, Rows, all_of
from smupar.paper.figures.fig12 import with_moving_masks
from smupar.paper.settings import Scale
from smupar.study.curves.curves import LOSS, Line, Panel, Point
from smupar.study.run_configs import unique
from smupar.study.store import Study

MEASURED, SMUPAR, CONSTANT, FUNCTION = "measured", "smupar", "constant", "function"
# log2 of the factors on the learning rate of hidden weights that are tried first. A sweep continues if the best factor is at an
# end.
_FACTORS = {
    MEASURED: range(-2, 3), CONSTANT: range(-3, 3), SMUPAR: range(-3, 2), FUNCTION: range(-2, 3),
    "trust": range(-2, 4), "rms": range(-1, 5), "spectral": range(-2, 4),
}  # fmt: skip
_FURTHER = 4  # number of times that a sweep may continue
_FIRST, _OTHERS = (MEASURED, CONSTANT, SMUPAR), ("trust", "rms", "spectral", FUNCTION)
_UNTUNED = (MEASURED, SMUPAR, FUNCTION)  # whose factor is 1 without any tuning
_NEAR = 0.005  # a factor is near the best one if its loss is higher by no more than this share
_LAWS = {
    "no averaging": "effect,old=0", "longer averages": "effect,old=0.95", "every step": "effect,every=1",
    "every 25 steps": "effect,every=25", "16 tokens": "effect,tokens=16", "512 tokens": "effect,tokens=512",
    "2048 tokens": "effect,tokens=2048", "held-out tokens": "effect,held-out",
}  # fmt: skip
_TRACES = ("flat", "shuffled", "half-lr", "double-lr", "other-seed", "other-text")


@dataclass(frozen=True)
class _ControlSize:
    densities: tuple[float, ...]  # the sparsest first
    methods: tuple[str, ...]
    num_seeds: int
    laws: tuple[str, ...] = tuple(_LAWS)


_SIZES = {
    "cpu": _ControlSize((1 / 16,), ("rigl",), 2, ("every 25 steps", "held-out tokens")),
    "small": _ControlSize((1 / 64, 1 / 16), ("rigl", "none", "gmp"), 5),
    "paper": _ControlSize((1 / 64, 1 / 16), ("rigl", "none", "gmp"), 5),
}


# Proposing


def proxies(scale: Scale) -> list[RunConfig]:
    """The dense proxy at every learning rate. Figure 12 has the same runs."""
    proxy = scale.run("dynamic", rule="mup", width=scale.run("dynamic").base_width)
    return [replace(proxy, lr=2.0**log2, record=True) for log2 in scale.size("dynamic").log2_values]


def then(scale: Scale, study: Study) -> list[RunConfig]:
    """The runs that follow the proxy, part by part, up to the first part with missing results. The most valuable parts come
    first."""
    asked: list[RunConfig] = []
    for part in _Plan(scale, study).parts():
        asked += part
        if study.missing(part):
            break
    return unique(asked)


def expected(scale: Scale) -> list[RunConfig]:
    """The runs of ``then``, if no sweep has to continue."""
    return unique(run for part in _Plan(scale, None).parts() for run in part)


class _Plan:
    """The runs that follow the proxy, given the results of a study so far; without a study, the expected runs."""

    def __init__(self, scale: Scale, study: Study | None) -> None:
        self.scale, self.study, self.size = scale, study, _SIZES[scale.name]
        results = [] if study is None else study.results(proxies(scale))
        if study is not None and not results:
            raise ValueError("no run of the proxy has finished")
        usual = proxies(scale)[len(proxies(scale)) // 2]
        self.proxy = min(results, key=lambda result: result.loss).config if results else usual
        self.places = [(method, density) for density in self.size.densities for method in self.size.methods]
        self.sparsest = [place for place in self.places if place[1] == self.size.densities[0]]
        has_other = scale.data != STANDARD_LIBRARY
        self.traces = _TRACES if has_other else tuple(kind for kind in _TRACES if kind != "other-text")

    def parts(self) -> Iterator[list[RunConfig]]:
        """The parts in order. Each is computed only when the results of earlier parts are there."""
        for places, kinds in ((self.places, _FIRST), (self.sparsest, _OTHERS)):
            yield [self._recorded(kind) for kind in kinds if kind in _OTHERS]
            for _ in range(1 + _FURTHER):
                yield [run for place in places for kind in kinds for run in self._sweep(kind, *place)]
            yield [run for place in places for kind in kinds for run in self._seeds(kind, *place)]
        yield [self._proxy_of(kind) for kind in self.traces[2:]]
        yield list(self._ablations())

    def target(self, method: str, density: float) -> RunConfig:
        run = self.scale.run("dynamic", rule="smupar", sparsity=1 - density)
        run = run if method == "none" else with_moving_masks(run, method, "moment")
        return replace(run, rest_lr=self.proxy.lr, lr=self.proxy.lr)

    def _sweep(self, kind: str, method: str, density: float) -> list[RunConfig]:
        """The first factors, and more until the best one is not at an end."""
        found = [self._at(kind, method, density, factor) for factor in _FACTORS[kind]]
        low, high = min(_FACTORS[kind]), max(_FACTORS[kind])
        for _ in range(_FURTHER):
            best = self._best(found)
            if best is None or low < best < high:
                break
            factor = low - 1 if best == low else high + 1
            low, high = min(low, factor), max(high, factor)
            found.append(self._at(kind, method, density, factor))
        return found

    def _best(self, runs: list[RunConfig]) -> int | None:
        """The best factor; None until all runs have ended."""
        results = [] if self.study is None else self.study.results(runs)
        return _log2_factor(min(results, key=lambda result: result.loss).config) if len(results) == len(runs) else None

    def _seeds(self, kind: str, method: str, density: float) -> list[RunConfig]:
        """More seeds at the best factor, and at factor 1 for kinds that need no tuning."""
        best = self._best(self._sweep(kind, method, density))
        factors = {-1 if best is None else best, *((0,) if kind in _UNTUNED else ())}
        runs = [self._at(kind, method, density, factor) for factor in sorted(factors)]
        return [replace(run, seed=seed) for run in runs for seed in range(1, self.size.num_seeds)]

    def _at(self, kind: str, method: str, density: float, factor: int) -> RunConfig:
        run = self.target(method, density)
        law = kind if kind in _OTHERS else ""
        return replace(run, lr=run.lr * 2.0**factor, law=law, follow=None if kind == SMUPAR else str(self._trace(kind)))

    def _ablations(self) -> Iterator[RunConfig]:
        """Measured updates at factor 1 with one thing changed, at the sparsest density under RigL."""
        base = self.target(self.size.methods[0], self.size.densities[0])
        for seed in range(min(3, self.size.num_seeds)):
            for kind in self.traces:
                yield replace(base, seed=seed, follow=str(self._trace(kind)))
            for name in self.size.laws:
                yield replace(base, seed=seed, follow=str(self._trace(MEASURED)), law=_LAWS[name])

    # Traces

    def _recorded(self, kind: str) -> RunConfig:
        """The proxy, with another size of its updates recorded."""
        return replace(self.proxy, law=kind)

    def _proxy_of(self, kind: str) -> RunConfig:
        """The proxy whose trace an ablation follows."""
        changes: dict[str, dict[str, Any]] = {
            "half-lr": {"lr": self.proxy.lr / 2}, "double-lr": {"lr": self.proxy.lr * 2}, "other-seed": {"seed": 1},
            "other-text": {"data": STANDARD_LIBRARY if self.scale.data != STANDARD_LIBRARY else self.scale.data},
        }  # fmt: skip
        return replace(self.proxy, **changes.get(kind, {}))

    def _trace(self, kind: str) -> Path:
        """The file with the trace that a kind of run follows. Its name describes it, since configurations hold only names."""
        if self.study is None:
            return Path(f"{kind}-expected.trace.json")
        if kind == MEASURED:
            return self.study.trace_to_follow(self.proxy)
        from smupar.updates.trace import Trace

        recorded = self._recorded(kind) if kind in _OTHERS else self._proxy_of(kind)
        trace = Trace.load(self.study.runs / recorded.id / TRACE_FILE)
        trace = replace(trace, effects=_CHANGES.get(kind, _same)(trace.effects))
        digest = hashlib.sha256(trace.to_json().encode()).hexdigest()[:8]
        path = self.study.folder.resolve() / f"{kind}-{digest}.trace.json"
        if self.study.may_write and not path.exists():
            trace.save(path)
        return path


Effects = dict[str, list[float]]


def _same(effects: Effects) -> Effects:
    return effects


def _one_number(effects: Effects) -> Effects:
    mean = geometric_mean([value for values in effects.values() for value in values if 0 < value < math.inf])
    return {name: [mean] * len(values) for name, values in effects.items()}


def _flat(effects: Effects) -> Effects:
    means = {name: geometric_mean([v for v in values if 0 < v < math.inf]) for name, values in effects.items()}
    return {name: [means[name]] * len(values) for name, values in effects.items()}


def _shuffled(effects: Effects) -> Effects:
    """Every layer gets the effects of the next one."""
    names = list(effects)
    return {name: effects[names[(number + 1) % len(names)]] for number, name in enumerate(names)}


_CHANGES: dict[str, Callable[[Effects], Effects]] = {
    "flat": _flat, "shuffled": _shuffled, **dict.fromkeys((CONSTANT, "trust", "rms", "spectral"), _one_number),
}  # fmt: skip


# Reading


def _kind(run: RunConfig) -> str:
    """What a run follows; "" for proxies."""
    if run.rest_lr is None:
        return ""
    if run.follow is None:
        return SMUPAR
    trace = Path(run.follow).name.rpartition("-")[0]
    ablated = next((name for name, law in _LAWS.items() if run.law == law), "")
    return ablated or (MEASURED if trace == "proxy" else trace)


def _log2_factor(run: RunConfig) -> int:
    assert run.rest_lr is not None
    return round(math.log2(run.lr / run.rest_lr))


@dataclass(frozen=True)
class _Place:
    """The runs of one way of moving masks, at one density: by kind, factor and seed."""

    method: str
    density: float
    losses: dict[str, dict[int, dict[int, float]]]

    @property
    def name(self) -> str:
        return f"{_METHODS[self.method]}, density 1/{1 / self.density:g}"

    def best(self, kind: str) -> int:
        """The best factor of the first seed."""
        return min(self.losses[kind], key=lambda factor: self.losses[kind][factor].get(0, math.inf))

    def usual(self, kind: str) -> int:
        """The factor at which a kind is compared: 1 if it needs no tuning, else its best factor."""
        return 0 if kind in _UNTUNED else self.best(kind)

    def leads(self, kind: str, other: str, factor: int | None = None) -> list[float]:
        """The lead of one kind over another, for each seed that both have; both at ``factor``, if it is given."""
        mine, others = (self.losses[name][self.usual(name) if factor is None else factor] for name in (kind, other))
        return [others[seed] / mine[seed] - 1 for seed in sorted(mine.keys() & others.keys()) if math.isfinite(mine[seed])]


_METHODS = {"rigl": "RigL", "none": "static masks", "gmp": "GMP"}


def _places(rows: Rows) -> list[_Place]:
    found: dict[tuple[str, float], dict[str, dict[int, dict[int, float]]]] = {}
    for row in rows:
        run = row.config
        if kind := _kind(run):
            place = found.setdefault((run.dynamic, run.density or 1.0), {})
            place.setdefault(kind, {}).setdefault(_log2_factor(run), {})[run.seed] = row.loss
    return [_Place(*key, losses) for key, losses in found.items()]


# Drawing


def draw(rows: Rows) -> list[Panel]:
    """For each place, the loss of the first seed over the factor on the learning rate of hidden weights."""
    return [
        Panel(place.name, "factor on the learning rate of hidden weights", LOSS, tuple(_lines(place)), 1.0, "the proxy's")
        for place in _places(rows)
    ]


def _lines(place: _Place) -> Iterator[Line]:
    kinds = [kind for kind in (*_FIRST, *_OTHERS) if kind in place.losses]
    for number, kind in enumerate(kinds):
        by_factor = sorted(place.losses[kind].items())
        points = tuple(Point(2.0**factor, seeds[0]) for factor, seeds in by_factor if math.isfinite(seeds.get(0, math.inf)))
        yield Line(kind, points, number / max(1, len(kinds) - 1), best=2.0 ** place.best(kind))


# Claiming


def claim(rows: Rows) -> Claim:
    places = [place for place in _places(rows) if MEASURED in place.losses]
    if not any({MEASURED, CONSTANT, SMUPAR} <= place.losses.keys() for place in places):
        return Claim(None, "no place has measured updates, a constant and SmuPar")
    parts = [part for place in places for part in _claims(place)]
    return all_of(*parts, *_ablated(places[0]))


def _claims(place: _Place) -> Iterator[Claim]:
    own = place.losses[MEASURED]
    if 0 in own:
        cost = own[0].get(0, math.inf) / min(seeds.get(0, math.inf) for seeds in own.values()) - 1
        best = f"{place.name}: measured updates are best at factor {2.0 ** place.best(MEASURED):g}"
        yield Claim(cost <= _NEAR, f"{best} (factor 1 costs {cost:.2%}, {_NEAR:.1%} is allowed)")
    for other in (CONSTANT, SMUPAR, *_OTHERS):
        if other in place.losses and 0 in own:
            yield _compared(place, other)


def _compared(place: _Place, other: str) -> Claim:
    """Whether measured updates are ahead of another law by more than twice the standard error of the mean over paired seeds."""
    leads = place.leads(MEASURED, other)
    lead, num, needed = fmean(leads) if leads else math.nan, len(leads), _needed(leads)
    at = "untuned" if other in _UNTUNED else f"at its best factor, {2.0 ** place.best(other):g}"
    text = (
        f"{place.name}: measured updates are ahead of {other} ({at}) by {lead:+.2%} over {num} seeds ({needed:.2%} is needed)"
    )
    return Claim(None if math.isnan(lead) else lead > needed, text)


def _needed(leads: list[float]) -> float:
    if len(leads) < 2:
        return NUM_SPREADS * USUAL_SPREAD * math.sqrt(2)
    return NUM_SPREADS * stdev(leads) / math.sqrt(len(leads))


def _ablated(place: _Place) -> list[Claim]:
    """Whether a trace that is flat in time or shuffled over layers is worse. The text also gives the effect of other changes of
    the measurement."""
    kinds = [kind for kind in (*_TRACES, *_LAWS) if kind in place.losses]
    if not kinds:
        return []
    behind = {kind: place.leads(MEASURED, kind, 0) for kind in kinds}
    worse = [kind for kind in ("flat", "shuffled") if behind.get(kind) and fmean(behind[kind]) > _needed(behind[kind])]
    words = ", ".join(f"{kind} {fmean(leads):+.2%}" for kind, leads in behind.items() if leads)
    text = f"{place.name}: layers and moments of the trace matter, as losses compared with measured updates show: {words}"
    return [Claim(bool(worse), text)]


FIGURE = Figure(
    title="Controls for measured updates",
    shows="The paper leaves masks that move open, and has no measured updates.",
    runs=proxies,
    then=then,
    expected=expected,
    draw=draw,
    columns=3,
    claim=claim,
)
