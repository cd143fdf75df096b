"""Pruning while a model trains: gradually (GMP), or in rounds after which the weights are rewound (IMP).

Both correct the learning rate. With ``correction="moment"`` it follows the density of the moment, by Table 1, and the init is
that of the first density. With "fixed" init and learning rate are those of the last density from the start, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from smupar.dynamic.moves import Pruning, Rounds, Times, pruning_goal
from smupar.dynamic.sparsifiers import Sparsifier
from smupar.plan.allocations import Allocation
from smupar.plan.plan import Plan


class GMP(Sparsifier):
    """Gradual magnitude pruning (Zhu and Gupta): removes the smallest weights, along a curve, until ``density`` is reached.
    Make it before you load a checkpoint, since it adds the masks that the checkpoint holds.

    density     density at the end: a number, {"glob": number} or an allocation such as ``erk(1 / 16)``
    pool        "layer": weights are ranked in each layer; "global": all hidden weights are ranked together
    correction  "moment": learning rates follow the density of the moment; "fixed": init and rates of the last density
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
        move = Pruning(Times(every, stop, start), curve, pool)
        super().__init__(model, optimizer, pruning_goal(plan, move, density, correction), steps=steps)


class IMP(Sparsifier):
    """Iterative magnitude pruning with rewinding (Frankle et al.): trains, prunes, goes back to the weights of step ``rewind``,
    and trains again. A round has ``every`` steps. After the last pruning comes one more round.

    All parameters and running statistics go back, and optimizers forget their steps. Use ``round_step`` to restart a learning
    rate schedule of your own.
    """

    move: Rounds

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
        move = Rounds(every, rounds, pool, rewind)
        super().__init__(model, optimizer, pruning_goal(plan, move, density, correction), steps=steps)

    @property
    def round_step(self) -> int:
        """Steps that the weights have been trained for. After a rewind it counts on from ``rewind``."""
        rounds = min(self.num_steps // self.move.every, self.move.rounds)
        return self.num_steps - rounds * self.move.every + (self.move.rewind if rounds else 0)
