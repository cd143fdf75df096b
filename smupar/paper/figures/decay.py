"""Beyond the paper: how much weight decay is best, for which parameters, and does the best amount transfer over density, width
and length?

All runs use settings that the paper's code has but the paper does not print (AdamW .9/.95, clipping at 1). The learning rate is
2^-6, and at some densities also 2^-7 and 2^-5. Losses are validation losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import fmean
from typing import NamedTuple

from smupar.lm.config.run_config import RunConfig
from smupar.paper.figure import Claim, Figure, Rows, all_of, valid_loss
from smupar.paper.settings import WEIGHT_DECAY, Scale
from smupar.rules import DECAYED
from smupar.study.conventions import density_in_words
from smupar.study.curves.curves import Line, Panel, Point
from smupar.study.run_configs import with_fields

DECAYS = (0.0, 0.03, 0.1, 0.2, 0.4)
_NEAR = 0.005  # a decay is near the best one if its loss is higher by no more than this share
LR = 2.0**-6
_SETTINGS = {"lr": LR, "schedule": "linear-to-zero", "valid_batches": 20}


@dataclass(frozen=True)
class _Size:
    width: int
    steps: int
    densities: tuple[float, ...]
    other_steps: tuple[int, ...] = ()
    wider: dict[int, tuple[float, ...]] = field(default_factory=dict)  # wider models, and the amounts of decay that they get
    num_seeds: int = 1


_SIZES = {
    "cpu": _Size(128, 60, (1.0, 1 / 8)),
    "small": _Size(512, 2000, (1.0, 1 / 8, 1 / 32, 1 / 128), (500, 8000), {1024: DECAYS, 2048: DECAYS[1:4]}, 3),
    "paper": _Size(2048, 11752, (1.0, 1 / 8, 1 / 32, 1 / 128), (2938,), num_seeds=3),
}


def decay_run(scale: Scale, density: float, width: int | None = None, **fields: object) -> RunConfig:
    """A run of the study, by default with the study's main width and length."""
    size = _SIZES[scale.name]
    rule = "mup" if density == 1 else "smupar"
    start = scale.run("sweep", rule=rule, width=width or size.width, sparsity=1 - density)
    return with_fields(start, {"steps": size.steps, **_SETTINGS, **fields})


def runs(scale: Scale) -> list[RunConfig]:
    size, run = _SIZES[scale.name], partial(decay_run, scale)
    base_width = scale.run("sweep").base_width
    few = [density for density in size.densities if density >= 1 / 32]
    seeds = range(size.num_seeds)

    asked = [
        *(run(density, weight_decay=decay, seed=seed) for seed in seeds for decay in DECAYS for density in size.densities),
        *(run(density, decayed=part, seed=seed) for seed in seeds for part in DECAYED for density in few),
        *(run(density, decayed=part, lr=lr) for lr in (LR / 2, 2 * LR) for part in DECAYED for density in few),
        *(run(density, decay="coupled") for density in size.densities),
        *(run(density, decay="coupled", lr=lr) for lr in (LR / 2, 2 * LR) for density in few),
        *(run(density, base_width, weight_decay=decay) for decay in DECAYS for density in few),
        *_elsewhere(run, size, (few[0], few[-1])),
    ]
    return list({config.id: config for config in asked}.values())


def _elsewhere(run: Callable[..., RunConfig], size: _Size, densities: Sequence[float]) -> Iterator[RunConfig]:
    """The amounts of decay at other lengths, and in wider models."""
    for steps, decay, density in product(size.other_steps, DECAYS, densities):
        yield run(density, steps=steps, weight_decay=decay)
    for width, decays in size.wider.items():
        for decay, density in product(decays, densities):
            yield run(density, width, weight_decay=decay)


# Reading


class _Setting(NamedTuple):
    """Everything that varies between runs, except the amount of decay and the seed."""

    width: int
    steps: int
    sparsity: float
    decay: str = "independent"
    decayed: str = "all"
    lr: float = LR

    @property
    def density(self) -> str:
        return density_in_words(self.sparsity)


Losses = dict[float, float]  # amount of decay -> mean loss over seeds


def _seeds(rows: Rows) -> dict[_Setting, dict[float, list[float]]]:
    """Losses of all seeds by setting and amount of decay, sorted by width, steps and sparsity."""
    losses: dict[_Setting, dict[float, list[float]]] = {}
    for row in rows:
        run = row.config
        setting = _Setting(run.model.width, run.steps, run.sparsity or 0.0, run.decay, run.decayed, run.lr)
        losses.setdefault(setting, {}).setdefault(run.weight_decay, []).append(valid_loss(row))
    return {setting: dict(sorted(own.items())) for setting, own in sorted(losses.items())}


def _losses(rows: Rows) -> dict[_Setting, Losses]:
    """Mean losses by setting."""
    return {setting: {decay: fmean(seeds) for decay, seeds in own.items()} for setting, own in _seeds(rows).items()}


def _scans(losses: dict[_Setting, Losses]) -> tuple[dict[_Setting, Losses], dict[_Setting, Losses]]:
    """The settings in which the amount of decay was varied: the main size at each density, and the other sizes."""
    scans = {setting: own for setting, own in losses.items() if len(own) > 1}
    sizes = [(setting.width, setting.steps) for setting in losses]
    main = max(set(sizes), key=sizes.count)
    inside = {setting: own for setting, own in scans.items() if (setting.width, setting.steps) == main}
    return inside, {setting: own for setting, own in scans.items() if setting not in inside}


def _best(losses: Losses) -> float:
    return min(losses, key=lambda decay: losses[decay])


def _cost(losses: Losses, decay: float) -> float:
    """The relative excess of the loss at a decay over the lowest loss."""
    return losses[decay] / min(losses.values()) - 1


# Drawing


def draw(rows: Rows) -> list[Panel]:
    """A panel for each width, then one for each length of the run, with a curve for each density."""
    seeds, (inside, outside) = _seeds(rows), _scans(_losses(rows))
    sizes = {(setting.width, setting.steps) for setting in (*inside, *outside)}
    usual = next(iter(inside)).steps
    densities = [setting.density for setting in inside]
    panels = []
    for width, steps in sorted(sizes, key=lambda size: (size[1] != usual, *size)):
        scans = {
            setting: own for setting, own in (inside | outside).items() if (setting.width, setting.steps) == (width, steps)
        }
        lines = tuple(
            Line(
                f"density {setting.density}",
                tuple(_point(own, seeds[setting], decay) for decay in own),
                densities.index(setting.density) / max(1, len(densities) - 1),
                best=_best(own),
            )
            for setting, own in scans.items()
        )
        heading = f"width {width}, {steps} steps"
        panels.append(
            Panel(
                heading,
                "weight decay",
                "loss above that of the best decay, %",
                lines,
                WEIGHT_DECAY,
                "as in the paper's code",
                log_x=False,
            )
        )
    return panels


def _point(losses: Losses, seeds: dict[float, list[float]], decay: float) -> Point:
    best = min(losses.values())
    own = tuple(100 * (loss / best - 1) for loss in seeds[decay])
    return Point(decay, 100 * _cost(losses, decay), seeds=own)


# Claiming


def claim(rows: Rows) -> Claim:
    losses = _losses(rows)
    inside, outside = _scans(losses)
    tuned = _best(next(iter(inside.values())))
    without = {setting.density: own[0.0] / own[WEIGHT_DECAY] - 1 for setting, own in inside.items()}
    costs = {setting.density: _cost(own, tuned) for setting, own in inside.items()}
    return all_of(
        Claim(min(without.values()) > 0, f"without decay the loss is higher than with {WEIGHT_DECAY:g}: {_shares(without)}"),
        Claim(
            max(costs.values()) <= _NEAR,
            f"the dense model's best decay, {tuned:g}, costs at most {_NEAR:.1%} at any density: {_shares(costs)}",
        ),
        _elsewhere_claim(outside, tuned),
        _rates(losses, inside),
        *(
            _against(losses, inside, **other)
            for other in ({"decay": "coupled"}, {"decayed": "matrices"}, {"decayed": "hidden"})
        ),
    )


def _elsewhere_claim(outside: dict[_Setting, Losses], tuned: float) -> Claim:
    """Whether the dense model's best decay also serves other widths and lengths."""
    costs = {setting: _cost(own, tuned) for setting, own in outside.items() if tuned in own}
    if not costs:
        return Claim(None, "no other width or length was tried")
    worst = max(costs, key=lambda setting: costs[setting])
    where = f"width {worst.width}, {worst.steps} steps, density {worst.density}"
    text = f"at other widths and lengths it costs at most {costs[worst]:.2%} ({where}; {_NEAR:.1%} is allowed)"
    return Claim(costs[worst] <= _NEAR, text)


def _rates(losses: dict[_Setting, Losses], inside: dict[_Setting, Losses]) -> Claim:
    """Whether half or twice the learning rate is no better, with the usual decay."""
    costs = {}
    for setting, own in inside.items():
        around = [losses[setting._replace(lr=lr)][WEIGHT_DECAY] for lr in (LR / 2, 2 * LR) if setting._replace(lr=lr) in losses]
        if around:
            costs[setting.density] = own[WEIGHT_DECAY] / min(own[WEIGHT_DECAY], *around) - 1
    return Claim(
        max(costs.values()) <= _NEAR,
        f"with decay {WEIGHT_DECAY:g}, half or twice the learning rate gains at most {_NEAR:.1%}: {_shares(costs)}",
    )


def _against(losses: dict[_Setting, Losses], inside: dict[_Setting, Losses], **other: str) -> Claim:
    """Compares another kind of decay with independent decay of all parameters, both at the usual amount."""
    pairs = {setting: losses.get(setting._replace(**other)) for setting in inside}  # type: ignore[arg-type]
    behind = {setting: own[WEIGHT_DECAY] / inside[setting][WEIGHT_DECAY] - 1 for setting, own in pairs.items() if own}
    name = {"coupled": "coupled decay", "matrices": "decay of matrices alone", "hidden": "decay of hidden weights alone"}
    shares = _shares({setting.density: share for setting, share in behind.items()})
    sparse = [share for setting, share in behind.items() if setting.sparsity]
    text = (
        f"{name[next(iter(other.values()))]} ends above independent decay of everything at every sparse density tried: {shares}"
    )
    return Claim(min(sparse) > 0, text)


def _shares(values: dict[str, float]) -> str:
    return ", ".join(f"{share:+.1%} at {density}" for density, share in values.items())


FIGURE = Figure(
    title="Weight decay over density, width and length",
    claimed="Weight decay tuned on the dense model fits other densities, widths and lengths",
    shows="The paper does not print its weight decay. Its code has 0.1, coupled with the learning rate.",
    runs=runs,
    draw=draw,
    claim=claim,
    columns=2,
)
