"""Beyond the paper: does weight decay help because it keeps weights small? Would it be better to hold the size of weights
constant?

Runs with held sizes scale each hidden weight back to the size of its init after each step, and do not decay it. Other runs have
no decay, decay of all parameters, of hidden weights alone, or of norms alone. The settings are the decay study's. The usual
learning rate is 2^-6. Half of it and twice as much are tried as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import NamedTuple

from smupar.lm.config.run_config import RunConfig
from smupar.paper.figure import Claim, Figure, Rows, all_of, valid_loss
from smupar.paper.figures.decay import LR, decay_run
from smupar.paper.settings import Scale
from smupar.study.conventions import density_in_words
from smupar.study.curves.curves import Line, Panel, Point
from smupar.study.run_configs import unique

NO_DECAY, DECAY, HIDDEN, NORMS, HELD = "no decay", "decay", "decay of hidden weights", "decay of norms", "size held"
_WAYS: dict[str, dict[str, object]] = {
    NO_DECAY: {"weight_decay": 0.0},
    DECAY: {},
    HIDDEN: {"decayed": "hidden"},
    NORMS: {"decayed": "vectors"},
    HELD: {"decay": "held"},
}
_RATES = (LR / 2, LR, 2 * LR)
_NEAR = 0.005  # a learning rate is near the best one if its loss is higher by no more than this share


@dataclass(frozen=True)
class _HeldSize:
    densities: tuple[float, ...]
    num_seeds: int
    elsewhere: tuple[dict[str, int], ...]  # other lengths and widths, for decay and held sizes


_SIZES = {
    "cpu": _HeldSize((1.0, 1 / 8), 1, ()),
    "small": _HeldSize((1.0, 1 / 8, 1 / 32), 3, ({"steps": 500}, {"steps": 8000}, {"width": 2048})),
    "paper": _HeldSize((1.0, 1 / 8, 1 / 32), 3, ({"steps": 2938},)),
}


def runs(scale: Scale) -> list[RunConfig]:
    size, ends = _SIZES[scale.name], (_SIZES[scale.name].densities[0], _SIZES[scale.name].densities[-1])
    return unique(
        [
            *(_run(scale, way, density, lr=lr) for density, lr, way in product(size.densities, _RATES, _WAYS)),
            *(
                _run(scale, way, density, seed=seed)
                for seed, density, way in product(range(1, size.num_seeds), size.densities, (NO_DECAY, DECAY, HELD))
            ),
            *(
                _run(scale, way, density, **other, lr=lr)
                for other, density, lr, way in product(size.elsewhere, ends, _RATES, (DECAY, HELD))
            ),
        ]
    )


def _run(scale: Scale, way: str, density: float, width: int | None = None, **fields: object) -> RunConfig:
    return decay_run(scale, density, width, **_WAYS[way], **fields)


# Reading


class _Where(NamedTuple):
    """A size of the model, a length and a density."""

    width: int
    steps: int
    sparsity: float

    @property
    def density(self) -> str:
        return density_in_words(self.sparsity)


Losses = dict[str, dict[float, list[float]]]  # way -> learning rate -> losses of all seeds


def _losses(rows: Rows) -> dict[_Where, Losses]:
    """The losses of each place, with the places of the main size first."""
    found: dict[_Where, Losses] = {}
    for row in rows:
        run = row.config
        place = _Where(run.model.width, run.steps, run.sparsity or 0.0)
        found.setdefault(place, {}).setdefault(way_of(run), {}).setdefault(run.lr, []).append(valid_loss(row))
    return dict(sorted(found.items(), key=lambda item: (HIDDEN not in item[1], item[0])))


def way_of(run: RunConfig) -> str:
    if run.weight_decay == 0:
        return NO_DECAY
    return HELD if run.decay == "held" else {"all": DECAY, "hidden": HIDDEN, "vectors": NORMS}[run.decayed]


def _at(losses: Losses, way: str, lr: float = LR) -> float:
    return fmean(losses[way][lr])


# Drawing


def draw(rows: Rows) -> list[Panel]:
    """Loss over the learning rate for each place, with a line for each way."""
    panels = []
    for place, losses in _losses(rows).items():
        lines = tuple(_line(way, losses[way], number) for number, way in enumerate(_WAYS) if way in losses)
        heading = f"density {place.density}, width {place.width}, {place.steps} steps"
        panels.append(Panel(heading, "learning rate", "validation loss", lines, LR, "as in the decay study", whole_y=True))
    return panels


def _line(way: str, by_rate: dict[float, list[float]], number: int) -> Line:
    points = tuple(Point(lr, fmean(seeds), seeds=tuple(seeds)) for lr, seeds in sorted(by_rate.items()))
    best = min(points, key=lambda point: point.y).x
    return Line(way, points, number / (len(_WAYS) - 1), dashed=way == NO_DECAY, best=best if len(points) > 1 else None)


# Claiming


def claim(rows: Rows) -> Claim:
    places = _losses(rows)
    main = {place.density: losses for place, losses in places.items() if place.sparsity and HIDDEN in losses}
    return all_of(
        Claim(
            all(_at(losses, HELD) < _at(losses, NO_DECAY) for losses in main.values()),
            f"with held sizes the loss is lower than without decay, at every sparse density: {_gains(main, HELD)} (decay gains "
            f"{_gains(main, DECAY)})",
        ),
        Claim(
            all(_gain(losses, NORMS) < _gain(losses, DECAY) / 2 for losses in main.values()),
            f"decay of norms alone gains less than half of what decay gains: {_gains(main, NORMS)} (decay of hidden weights "
            f"alone gains {_gains(main, HIDDEN)})",
        ),
        *(_transfers(way, places) for way in (DECAY, HELD)),
        _is_better(places),
    )


def _gain(losses: Losses, way: str) -> float:
    return 1 - _at(losses, way) / _at(losses, NO_DECAY)


def _gains(places: dict[str, Losses], way: str) -> str:
    return ", ".join(f"{_gain(losses, way):+.1%} at {density}" for density, losses in places.items())


def _transfers(way: str, places: dict[_Where, Losses]) -> Claim:
    """Whether the usual learning rate is near the best of the three everywhere."""
    costs = {place: _at(own, way) / min(map(fmean, own[way].values())) - 1 for place, own in _whole(way, places)}
    if not costs:
        return Claim(None, f"{way}: no place has all learning rates")
    worst = max(costs, key=lambda place: costs[place])
    where = f"density {worst.density}, width {worst.width}, {worst.steps} steps"
    return Claim(
        costs[worst] <= _NEAR,
        f"{way}: the usual learning rate ends at most {costs[worst]:.2%} above the best of the three ({where}; {_NEAR:.1%} is "
        "allowed)",
    )


def _whole(way: str, places: dict[_Where, Losses]) -> Iterator[tuple[_Where, Losses]]:
    return ((place, own) for place, own in places.items() if len(own.get(way, ())) == len(_RATES))


def _is_better(places: dict[_Where, Losses]) -> Claim:
    """Whether holding the size ends ahead of decay everywhere."""
    leads = {place: _at(own, DECAY) / _at(own, HELD) - 1 for place, own in places.items() if {DECAY, HELD} <= own.keys()}
    words = ", ".join(f"{lead:+.2%} at {p.density} (width {p.width}, {p.steps} steps)" for p, lead in leads.items())
    return Claim(min(leads.values(), default=math.nan) > 0, f"holding the size is ahead of decay everywhere: {words}")


FIGURE = Figure(
    title="Weights of constant size instead of weight decay",
    shows="The paper does not discuss how weights grow.",
    runs=runs,
    draw=draw,
    columns=3,
    claim=claim,
)
