"""A policy decides when masks move, and which weights they then keep, in one model or in a stack of many."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from smupar.model.weights import Weight
from smupar.plan.masks.allocations import Allocation, allocate, round_half_up
from smupar.plan.plan import Plan, PlanRow
from smupar.refusals import choice, refuse
from smupar.rules import get_rule

# Progress of the schedule -> share of the drop fraction that is left.
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}
# Progress of the schedule -> share of the way from the first density to the last.
CURVES: dict[str, Callable[[float], float]] = {
    "cubic": lambda progress: 1 - (1 - progress) ** 3,
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
}
POOLS = ("layer", "global")


# When


@dataclass(frozen=True)
class MoveSchedule:
    """When masks move: every ``every`` steps of the optimizer, from ``start`` to ``stop`` inclusive."""

    every: int
    stop: int
    start: int = 0

    def __post_init__(self) -> None:
        refuse(
            self.every < 1 or not 0 <= self.start < self.stop,
            f"masks move every {self.every} steps from {self.start} to {self.stop}: every must be at least 1, and stop "
            "after start",
        )

    def due(self, done: int) -> bool:
        return max(1, self.start) <= done <= self.stop and (done - self.start) % self.every == 0

    def progress(self, done: int) -> float:
        return min(1.0, max(0.0, (done - self.start) / (self.stop - self.start)))


# Which weights are kept. All tensors have the shape (models, weights).


def largest(score: Tensor, candidates: Tensor, num: Tensor) -> Tensor:
    """Marks the ``num[i]`` candidates with the largest scores in each row i, or all candidates if there are fewer. Of equal
    scores, the first wins."""
    order = score.masked_fill(~candidates, -math.inf).argsort(dim=1, descending=True, stable=True)
    chosen = torch.arange(score.shape[1], device=score.device) < num[:, None]
    return torch.zeros_like(candidates).scatter_(1, order, chosen).logical_and_(candidates)


def random_scores(num: int, keys: Tensor) -> Tensor:
    """A row of uniform numbers for each key. They are hashes of the positions (splitmix64's finaliser), so they are the same on
    every device."""
    x = torch.arange(1, num + 1, device=keys.device)[None] * 0x1E3779B97F4A7C15 + keys[:, None]
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x >> 40 & 0xFFFFFF).float()


def key_of(seed: int, done: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/grow/{done}/{name}".encode()).digest()[:8], "little") >> 1


# How many


class Policy(ABC):
    """``done`` is the number of steps that the optimizer has made."""

    @property
    @abstractmethod
    def stop(self) -> int:
        """The last step after which masks may move."""

    @property
    def needs_gradient(self) -> bool:
        """Whether the dense gradient decides which weights grow."""
        return False

    @property
    def rewinds_to(self) -> int | None:
        """After each move, the weights get the values that they had after this many steps; None: they stay."""
        return None

    @abstractmethod
    def due(self, done: int) -> bool:
        """Whether masks move after this step."""

    @abstractmethod
    def next_masks(
        self, weights: Mapping[str, Weight], goals: Mapping[int, MaskGoal], done: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and the new mask, (models, entries), of each weight. ``goals`` has the goals of the models that share
        the policy, by the model's number."""


@dataclass(frozen=True)
class DropAndGrow(Policy):
    """RigL and SET: drops the active weights of smallest magnitude and grows as many. A weight that was just dropped is a
    candidate to grow as well."""

    schedule: MoveSchedule
    grow: str
    drop_fraction: float = 0.3
    decay: str = "cosine"

    def __post_init__(self) -> None:
        refuse(not 0 < self.drop_fraction < 1, f"drop_fraction must lie in (0, 1), got {self.drop_fraction}")
        choice("decay", self.decay, DECAYS)
        choice("grow", self.grow, ("gradient", "random"))
        every, start, stop = self.schedule.every, self.schedule.start, self.schedule.stop
        refuse(
            start == 0 and every > stop,
            f"masks would never move: no multiple of every={every} lies between {start} and stop={stop}",
        )

    @property
    def needs_gradient(self) -> bool:
        return self.grow == "gradient"

    @property
    def stop(self) -> int:
        return self.schedule.stop

    def due(self, done: int) -> bool:
        return self.schedule.due(done)

    def next_masks(
        self, weights: Mapping[str, Weight], goals: Mapping[int, MaskGoal], done: int
    ) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            values, mask = weight.rows(list(goals))
            if self.needs_gradient:
                score = weight.dense_grad(list(goals)).abs()
            else:
                keys = torch.tensor([key_of(goal.plan.seed, done, name) for goal in goals.values()], device=mask.device)
                score = random_scores(mask.shape[1], keys)
            yield name, self.next_mask(values, mask, score, done)

    def next_mask(self, weight: Tensor, mask: Tensor, grow_score: Tensor, done: int) -> Tensor:
        share = self.drop_fraction * DECAYS[self.decay](self.schedule.progress(done))
        active = mask.sum(1)
        num = (share * active.double() + 0.5).long()
        kept = largest(weight.abs(), mask, active - num)
        return kept | largest(grow_score.nan_to_num(nan=0.0), ~kept, num)


class _KeepLargest(Policy):
    """Keeps the weights of largest magnitude, as many as the density of the step allows. ``pool`` is "layer" to rank weights
    in each layer, or "global" to rank all hidden weights together."""

    pool: str

    @abstractmethod
    def density(self, first: Fraction, last: Fraction, done: int) -> Fraction:
        """The density after ``done`` steps, on the way from the first to the last."""

    def next_masks(
        self, weights: Mapping[str, Weight], goals: Mapping[int, MaskGoal], done: int
    ) -> Iterator[tuple[str, Tensor]]:
        def sizes(name: str) -> list[int]:
            rows = [(goal.plan[name], goal.last[name]) for goal in goals.values()]
            return [num_kept(name, row.shape, self.density(row.density, last, done)) for row, last in rows]

        layers = ((name, *weight.rows(list(goals)), sizes(name)) for name, weight in weights.items())
        return largest_masks(layers, self.pool, "prune less, or with pool='layer'")


@dataclass(frozen=True)
class Pruning(_KeepLargest):
    """Gradual pruning. The last step is always due, even if it is not a multiple of ``every``."""

    schedule: MoveSchedule
    curve: str = "cubic"
    pool: str = "layer"

    def __post_init__(self) -> None:
        choice("curve", self.curve, CURVES)
        choice("pool", self.pool, POOLS)

    @property
    def stop(self) -> int:
        return self.schedule.stop

    def due(self, done: int) -> bool:
        return self.schedule.due(done) or done == self.schedule.stop

    def density(self, first: Fraction, last: Fraction, done: int) -> Fraction:
        """The density after ``done`` steps; at the end it is exactly ``last``."""
        progress = self.schedule.progress(done)
        return last if progress == 1 else first + (last - first) * Fraction(CURVES[self.curve](progress))


@dataclass(frozen=True)
class Rounds(_KeepLargest):
    """Pruning in rounds. Each round keeps the same share of the weights, and training then starts again from step
    ``rewind``."""

    every: int
    rounds: int
    pool: str = "layer"
    rewind: int = 0

    def __post_init__(self) -> None:
        refuse(
            self.rounds < 1 or self.every < 1,
            f"IMP needs at least one round of at least one step, got {self.rounds} of {self.every}",
        )
        refuse(
            not 0 <= self.rewind < self.every,
            f"IMP rewinds to a step of its first round: rewind must lie in [0, {self.every}), got {self.rewind}",
        )
        choice("pool", self.pool, POOLS)

    @property
    def stop(self) -> int:
        return self.rounds * self.every

    @property
    def rewinds_to(self) -> int:
        return self.rewind

    def due(self, done: int) -> bool:
        return 0 < done <= self.stop and done % self.every == 0

    def density(self, first: Fraction, last: Fraction, done: int) -> Fraction:
        """The density after ``done`` steps; after the last pruning it is exactly ``last``."""
        share = Fraction(done // self.every, self.rounds)
        return last if share == 1 else first * Fraction(float(last / first) ** float(share))


def largest_masks(
    layers: Iterable[tuple[str, Tensor, Tensor, list[int]]], pool: str, remedy: str
) -> Iterator[tuple[str, Tensor]]:
    """Yields the name of each layer and the mask of its largest weights. In a global pool all layers share one ranking.

    layers   for each layer its name, its weights and mask, of shape (models, weights), and how many weights each model keeps
    remedy   ends the error about a layer that would lose all its weights
    """
    for group in [list(layers)] if pool == "global" else ([layer] for layer in layers):
        names, weights, masks, sizes = zip(*group, strict=True)
        num = torch.tensor(sizes, device=masks[0].device).sum(0)
        kept = largest(torch.cat(weights, 1).abs(), torch.cat(masks, 1), num)
        parts = dict(zip(names, kept.split([mask.shape[1] for mask in masks], 1), strict=True))
        empty = [name for name, part in parts.items() if not part.any()] if pool == "global" else []
        if empty:
            raise ValueError(f"every weight of {empty[0]!r} would be dropped: {remedy}")
        yield from parts.items()


@dataclass(frozen=True)
class MaskGoal:
    """How the masks of one model move, and towards which densities.

    last        final densities of a pruned model, by parameter name
    correction  for a pruned model, "moment" or "fixed", as in ``methods``; None for other models
    """

    plan: Plan
    policy: Policy
    last: Mapping[str, Fraction] = field(default_factory=dict)
    correction: str | None = None


def pruning_goal(
    plan: Plan, policy: Pruning | Rounds, density: float | Mapping[str, float] | Allocation, correction: str = "moment"
) -> MaskGoal:
    """The goal of a model that is pruned to ``density``. Refuses a density that pruning cannot reach."""
    choice("correction", correction, ("moment", "fixed"))
    refuse(
        bool(get_rule(plan.rule).two_terms),
        f"rule {plan.rule!r} is for constant densities, as with RigL and SET: prune under rule 'smupar'",
    )
    hidden = {row.name: row for row in plan if row.role == "hidden"}
    last = allocate(density, {name: row.shape for name, row in hidden.items()})
    for name, row in hidden.items():
        num_kept(name, row.shape, last[name])
        refuse(
            last[name] > row.density,
            f"{name!r} already has density {float(row.density):g}, and pruning would end at {float(last[name]):g}: "
            "parameterize with the density to start from, usually 1",
        )
    return MaskGoal(plan, policy, last, correction)


def density_factor(plan: Plan, row: PlanRow, density: Fraction, family: str) -> float:
    """The factor on the plan's learning rate for a density other than the planned one, by Table 1."""
    return float(get_rule(plan.rule).lr[family][row.role].of(1, 1, density / row.density))


def init_factor(plan: Plan, row: PlanRow, density: Fraction) -> float:
    """The factor on the plan's init std for a density other than the planned one, by Table 1."""
    return math.sqrt(get_rule(plan.rule).init_var[row.role].of(1, 1, density / row.density))


def num_kept(name: str, shape: tuple[int, ...], density: Fraction) -> int:
    num = round_half_up(density * math.prod(shape))
    refuse(num == 0, f"density {float(density):g} would drop every weight of {name!r}, of shape {shape}: raise it")
    return num
