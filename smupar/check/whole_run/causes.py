"""Finds likely causes of a drift in the observations: learning rates, decay, masks and alignment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median

from smupar.check.coordinates.diagnosis import Diagnosis
from smupar.check.coordinates.measure import Cell
from smupar.plan.settings import layer_glob
from smupar.updates.observation import ALIGNMENT, DECAY, LATE, LR, MOVED, Observation

_UNEVEN = 1.5  # decay rates are uneven if they differ by this factor
_STOPPED = 0.1  # decay has stopped if it falls below this share of its former value
_HIGH = 0.5  # a learning rate is high if it ends above this share of its peak
_RANDOM = 1.3  # up to this alignment an update is almost random
_FEW = 32  # kept weights per neuron


def causes(rule: str, observations: Mapping[Cell, Observation], *, is_wrong: bool) -> list[Diagnosis]:
    """All causes that were seen, the most likely first. A cause in several runs is listed once, with their number. Updates that
    hardly agree count as a cause only if sizes are wrong."""
    own = {cell: seen for cell, seen in observations.items() if cell.rule == rule and seen.at}
    found: dict[str, tuple[list[str], str, list[Cell]]] = {}
    for look in (_uneven, _stopped, _missing, _moving, _high, *((_moved, _few) if is_wrong else ())):
        for cell, seen in own.items():
            for cause, places, evidence in look(seen):
                text = f"Seen at width {cell.width}, density {cell.density:g}: {evidence}"
                known, first, where = found.get(cause, ([], text, []))
                found[cause] = list(dict.fromkeys([*known, *places])), first, [*where, cell]
    between = _between_runs(own)
    diagnoses = [
        Diagnosis(rule, cause, tuple(places), f"{evidence}{f' ({len(set(where))} runs)' if len(set(where)) > 1 else ''}")
        for cause, (places, evidence, where) in found.items()
    ]
    return [Diagnosis(rule, *each) for each in between] + diagnoses


Found = tuple[str, tuple[str, ...], str]


def _uneven(seen: Observation) -> Iterator[Found]:
    """Layers whose weights decay faster or slower than others, for example because their decay is coupled."""
    rows = seen.sizes[DECAY]
    for index, step in enumerate(seen.at):
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


def _stopped(seen: Observation) -> Iterator[Found]:
    """Layers whose decay was switched off in the middle of the run."""
    for name, decays in seen.sizes[DECAY].items():
        shares = [decay / lr if lr else math.nan for decay, lr in zip(decays, seen.sizes[LR][name], strict=True)]
        largest = max((share for share in shares if math.isfinite(share)), default=0.0)
        later = [step for step, share in zip(seen.at, shares, strict=True) if share < _STOPPED * largest]
        if largest > 0 and later and later[-1] == seen.at[-1]:
            before = max((step for step in seen.at if step not in later and step < later[-1]), default=0)
            yield "decay stopped", (layer_glob(name),), f"its weights stop decaying after step {before}"


def _missing(seen: Observation) -> Iterator[Found]:
    if not any(value > 0 for values in seen.sizes[DECAY].values() for value in values):
        yield "decay missing", (), "hidden weights do not decay, so what they learn early never fades"


def _moving(seen: Observation) -> Iterator[Found]:
    since = int(LATE * seen.num_steps)
    # masks that moved since the previous look
    late = [index for index, before in enumerate(seen.at[:-1], 1) if before >= since]
    moving = [name for name, values in seen.sizes[MOVED].items() if any(values[index] > 0 for index in late)]
    if moving:
        yield (
            "masks move",
            tuple(dict.fromkeys(map(layer_glob, moving))),
            f"masks still move in the last {1 - LATE:.0%} of the run",
        )


def _moved(seen: Observation) -> Iterator[Found]:
    moving = [name for name, values in seen.sizes[MOVED].items() if any(value > 0 for value in values)]
    if moving and not any(_moving(seen)):
        yield "masks moved", tuple(dict.fromkeys(map(layer_glob, moving))), "masks moved while the drift began"


def _high(seen: Observation) -> Iterator[Found]:
    for name, values in seen.sizes[LR].items():
        if values[-1] > _HIGH * max(values):
            share = values[-1] / max(values)
            yield "schedule", (), f"the learning rate of {name!r} ends at {share:.0%} of its peak"
            return


def _few(seen: Observation) -> Iterator[Found]:
    """Updates that hardly agree, in layers with few weights per neuron."""
    rows = {name: values[-1] for name, values in seen.sizes[ALIGNMENT].items() if seen.per_neuron[name] < _FEW}
    random = {name: value for name, value in rows.items() if value < _RANDOM}
    if random:
        name, value = min(random.items(), key=lambda pair: pair[1])
        yield (
            "few weights",
            tuple(dict.fromkeys(map(layer_glob, random))),
            f"in {name!r}, with {seen.per_neuron[name]:.3g} weights per neuron, updates end almost random: alignment "
            f"{value:.2f}, where 1 is random and {math.sqrt(seen.per_neuron[name]):.3g} is full agreement",
        )


def _between_runs(own: Mapping[Cell, Observation]) -> list[tuple[str, tuple[str, ...], str]]:
    """Runs that decay faster or slower than the densest, narrowest run, because decay is coupled to the learning rate."""
    if not own:
        return []
    rates = {cell: _decay(seen) for cell, seen in own.items()}
    base = rates[max(own, key=lambda cell: (cell.density, -cell.width))]
    odd = {cell: rate / base for cell, rate in rates.items() if base > 0 and not 1 / _UNEVEN < rate / base < _UNEVEN}
    if not odd:
        return []
    cell, share = max(odd.items(), key=lambda pair: abs(math.log(max(pair[1], 1e-9))))
    where = f"at width {cell.width}, density {cell.density:g}"
    return [("decay", (), f"{where} hidden weights decay {share:.3g} times as fast as in the densest model")]


def _decay(seen: Observation) -> float:
    """The sum of the decays at the first three looks; the median over layers."""
    return median(sum(values[:3]) for values in seen.sizes[DECAY].values())
