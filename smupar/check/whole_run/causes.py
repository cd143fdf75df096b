"""Finds likely causes of a drift in the observations: learning rates, decay, masks and alignment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median

from smupar.check.coordinates.diagnosis import Diagnosis
from smupar.check.coordinates.readings import Cell
from smupar.plan.globs import layer_glob
from smupar.updates.observation import ALIGNMENT, DECAY, LATE, LR, MOVED, Observation

_UNEVEN = 1.5  # decay rates are uneven if they differ by this factor
_STOPPED = 0.1  # decay has stopped if it falls below this share of its former value
_HIGH = 0.5  # a learning rate is high if it ends above this share of its peak
_RANDOM = 1.3  # up to this alignment an update is almost random
_FEW = 32  # below this many weights per neuron, random updates count as a cause

Seen = tuple[str, tuple[str, ...], str]  # (cause, places, evidence)


def causes(rule: str, observations: Mapping[Cell, Observation], *, is_wrong: bool) -> list[Diagnosis]:
    """All causes that were seen, the most likely first. A cause in several runs is listed once, with the number of runs. Masks
    that moved and random updates count as causes only if sizes are wrong."""
    of_rule = {cell: observed for cell, observed in observations.items() if cell.rule == rule and observed.at}
    seen: dict[str, tuple[list[str], str, list[Cell]]] = {}  # cause -> places, evidence of the first run, runs
    for find in (_uneven, _stopped, _missing, _moving, _high, *((_moved, _few) if is_wrong else ())):
        for cell, observed in of_rule.items():
            for cause, places, evidence in find(observed):
                text = f"Seen at width {cell.width}, density {cell.density:g}: {evidence}"
                known, first, cells = seen.get(cause, ([], text, []))
                seen[cause] = list(dict.fromkeys([*known, *places])), first, [*cells, cell]
    diagnoses = [
        Diagnosis(rule, cause, tuple(places), f"{evidence}{f' ({len(set(cells))} runs)' if len(set(cells)) > 1 else ''}")
        for cause, (places, evidence, cells) in seen.items()
    ]
    return [Diagnosis(rule, *cause) for cause in _between_runs(of_rule)] + diagnoses


def _uneven(observed: Observation) -> Iterator[Seen]:
    """Layers whose weights decay faster or slower than the weights of most layers, for example because their decay is
    coupled."""
    rows = observed.sizes[DECAY]
    for index, step in enumerate(observed.at):
        rates = {name: values[index] for name, values in rows.items() if math.isfinite(values[index])}
        usual = median(rates.values()) if rates else 0.0
        odd = {n: rate / usual for n, rate in rates.items() if usual > 0 and not 1 / _UNEVEN < rate / usual < _UNEVEN}
        if odd:
            name, share = max(odd.items(), key=lambda pair: abs(math.log(max(pair[1], 1e-9))))
            yield (
                "decay uneven",
                tuple(dict.fromkeys(map(layer_glob, odd))),
                f"from step {step} on {name!r} decays {share:.3g} times as fast as most hidden weights",
            )
            return


def _stopped(observed: Observation) -> Iterator[Seen]:
    """Layers whose decay was switched off in the middle of the run."""
    for name, decays in observed.sizes[DECAY].items():
        shares = [decay / lr if lr else math.nan for decay, lr in zip(decays, observed.sizes[LR][name], strict=True)]
        largest = max((share for share in shares if math.isfinite(share)), default=0.0)
        small = [step for step, share in zip(observed.at, shares, strict=True) if share < _STOPPED * largest]
        if largest > 0 and small and small[-1] == observed.at[-1]:
            before = max((step for step in observed.at if step not in small and step < small[-1]), default=0)
            yield "decay stopped", (layer_glob(name),), f"its weights stop decaying after step {before}"


def _missing(observed: Observation) -> Iterator[Seen]:
    if not any(value > 0 for values in observed.sizes[DECAY].values() for value in values):
        yield "decay missing", (), "hidden weights do not decay, so what they learn early never fades"


def _moving(observed: Observation) -> Iterator[Seen]:
    """Layers whose masks still move late in the run."""
    since = int(LATE * observed.num_steps)
    # A look counts the moves since the look before it.
    late = [index for index, before in enumerate(observed.at[:-1], 1) if before >= since]
    moving = [name for name, values in observed.sizes[MOVED].items() if any(values[index] > 0 for index in late)]
    if moving:
        yield (
            "masks move",
            tuple(dict.fromkeys(map(layer_glob, moving))),
            f"masks still move in the last {1 - LATE:.0%} of the run",
        )


def _moved(observed: Observation) -> Iterator[Seen]:
    """Layers whose masks moved earlier in the run."""
    moved = [name for name, values in observed.sizes[MOVED].items() if any(value > 0 for value in values)]
    if moved and not any(_moving(observed)):
        yield "masks moved", tuple(dict.fromkeys(map(layer_glob, moved))), "masks moved before the end of the run"


def _high(observed: Observation) -> Iterator[Seen]:
    """A learning rate that ends too high."""
    for name, values in observed.sizes[LR].items():
        if values[-1] > _HIGH * max(values):
            share = values[-1] / max(values)
            yield "schedule", (), f"the learning rate of {name!r} ends at {share:.0%} of its peak"
            return


def _few(observed: Observation) -> Iterator[Seen]:
    """Layers with few weights per neuron, whose updates are almost random."""
    rows = {name: values[-1] for name, values in observed.sizes[ALIGNMENT].items() if observed.per_neuron[name] < _FEW}
    random = {name: value for name, value in rows.items() if value < _RANDOM}
    if random:
        name, value = min(random.items(), key=lambda pair: pair[1])
        yield (
            "few weights",
            tuple(dict.fromkeys(map(layer_glob, random))),
            f"in {name!r}, with {observed.per_neuron[name]:.3g} weights per neuron, updates end almost random: alignment "
            f"{value:.2f}, where 1 is random and {math.sqrt(observed.per_neuron[name]):.3g} is full agreement",
        )


def _between_runs(observations: Mapping[Cell, Observation]) -> list[Seen]:
    """Runs whose weights decay faster or slower than in the densest, narrowest run, because decay is coupled to the learning
    rate."""
    if not observations:
        return []
    rates = {cell: _decay(observed) for cell, observed in observations.items()}
    base = rates[max(observations, key=lambda cell: (cell.density, -cell.width))]
    odd = {cell: rate / base for cell, rate in rates.items() if base > 0 and not 1 / _UNEVEN < rate / base < _UNEVEN}
    if not odd:
        return []
    cell, share = max(odd.items(), key=lambda pair: abs(math.log(max(pair[1], 1e-9))))
    where = f"at width {cell.width}, density {cell.density:g}"
    return [("decay", (), f"{where} hidden weights decay {share:.3g} times as fast as in the densest model")]


def _decay(observed: Observation) -> float:
    """The median over layers of the decay at the first three looks together."""
    return median(sum(values[:3]) for values in observed.sizes[DECAY].values())
