"""The methods of the literature, each a sparsifier with its policy: RigL, SET, GMP, IMP.

GMP and IMP prune, and the learning rate goes along. ``correction`` of both: "moment": the learning rate follows the density of
the moment, by Table 1; init stays that of the first density. "fixed": init and learning rate of the last density from the
start, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from smupar.dynamic.policies import DropAndGrow, MaskGoal, Pruning, Rounds, Times, pruning_goal
from smupar.dynamic.sparsifiers import Sparsifier
from smupar.plan.allocations import Allocation
from smupar.plan.plan import Plan


class _DropsAndGrows(Sparsifier):
    grow: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: Any,
        *,
        stop: int,
        drop_fraction: float = 0.3,
        every: int = 100,
        start: int = 0,
        decay: str = "cosine",
        restart_bias_correction: bool = False,
        steps: int | None = None,
    ) -> None:
        """
        stop            last step at which masks may move; 3/4 of the run is a good choice
        drop_fraction   share of a layer's active weights that is dropped at first
        every, start    masks move after steps ``start``, ``start + every`` and so on
        decay           "cosine" and "linear" take drop_fraction to 0 until ``stop``; "constant" leaves it
        steps           length of the run; a ``stop`` after it is refused
        restart_bias_correction  Adam's bias correction starts again for weights that are grown
        """
        goal = MaskGoal(plan, DropAndGrow(Times(every, stop, start), self.grow, drop_fraction, decay))
        super().__init__(model, optimizer, goal, restart_bias_correction=restart_bias_correction, steps=steps)


class RigL(_DropsAndGrows):
    """Evci et al.: grows where the gradient of the dense network is largest."""

    grow = "gradient"


class SET(_DropsAndGrows):
    """Mocanu et al.: grows at random."""

    grow = "random"


class GMP(Sparsifier):
    """Gradual magnitude pruning (Zhu and Gupta): the smallest weights go, along a curve, until ``density`` is reached.
    Made before a checkpoint is loaded: it adds the masks that are in it.

    density     at the end: a number, {"glob": number} or an allocation such as ``erk(1 / 16)``
    pool        "layer": each layer its own number; "global": one ranking of all hidden weights
    correction  "moment": learning rates of the density of the moment; "fixed": init and rates of the last from the start
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: Any,
        *,
        density: float | Mapping[str, float] | Allocation,
        stop: int,
        every: int = 100,
        start: int = 0,
        curve: str = "cubic",
        pool: str = "layer",
        correction: str = "moment",
        steps: int | None = None,
    ) -> None:
        policy = Pruning(Times(every, stop, start), curve, pool)
        super().__init__(model, optimizer, pruning_goal(plan, policy, density, correction), steps=steps)


class IMP(Sparsifier):
    """Iterative magnitude pruning with rewinding (Frankle et al.): train, prune, go back to the weights of step ``rewind``,
    train again. ``every`` steps are a round; after the last pruning comes one more.

    All parameters and running statistics go back, optimizers forget their steps; a schedule of yours should start again with
    ``round_step``.
    """

    policy: Rounds

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: Any,
        *,
        density: float | Mapping[str, float] | Allocation,
        rounds: int,
        every: int,
        rewind: int = 0,
        pool: str = "layer",
        correction: str = "moment",
        steps: int | None = None,
    ) -> None:
        policy = Rounds(every, rounds, pool, rewind)
        super().__init__(model, optimizer, pruning_goal(plan, policy, density, correction), steps=steps)

    @property
    def round_step(self) -> int:
        """Steps that the weights have been trained for: after a rewind it goes on from there."""
        rounds = min(self.num_steps // self.policy.every, self.policy.rounds)
        return self.num_steps - rounds * self.policy.every + (self.policy.rewind if rounds else 0)
