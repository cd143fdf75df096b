"""The published methods RigL, SET, GMP and IMP, each a sparsifier with its policy.

GMP and IMP prune, so the density falls, and Table 1 gives another learning rate and init for each density. With ``correction``
"moment", the learning rate always fits the current density, and the init fits the first one. With "fixed", both fit the last
density from the start, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from smupar.dynamic.policies import DropAndGrow, MaskGoal, MoveSchedule, Pruning, Rounds, pruning_goal
from smupar.dynamic.sparsifiers import Sparsifier
from smupar.plan.masks.allocations import Allocation
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
        drop_fraction   share of a layer's kept weights that the first move drops
        every, start    masks move after steps ``start``, ``start + every`` and so on
        decay           "cosine" and "linear" reduce drop_fraction to 0 until ``stop``; "constant" does not
        steps           length of the run; a ``stop`` after it is refused
        restart_bias_correction  Adam's bias correction starts again for grown weights
        """
        goal = MaskGoal(plan, DropAndGrow(MoveSchedule(every, stop, start), self.grow, drop_fraction, decay))
        super().__init__(model, optimizer, goal, restart_bias_correction=restart_bias_correction, steps=steps)


class RigL(_DropsAndGrows):
    """RigL (Evci et al.): grows the weights with the largest dense gradients."""

    grow = "gradient"


class SET(_DropsAndGrows):
    """SET (Mocanu et al.): grows weights at random."""

    grow = "random"


class GMP(Sparsifier):
    """Gradual magnitude pruning (Zhu and Gupta): drops the smallest weights until ``density`` is reached. The density falls
    along a curve. Make it before you load a checkpoint, since it adds the masks that the checkpoint has.

    density     final density: a number, {"glob": number} or an allocation such as ``erk(1 / 16)``
    every       masks move after steps ``start``, ``start + every`` and so on, and after ``stop``
    pool        "layer" ranks weights in each layer; "global" ranks all hidden weights together
    correction  "moment" fits learning rates to the current density; "fixed" fits init and learning rates to the last one
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
        policy = Pruning(MoveSchedule(every, stop, start), curve, pool)
        super().__init__(model, optimizer, pruning_goal(plan, policy, density, correction), steps=steps)


class IMP(Sparsifier):
    """Iterative magnitude pruning with rewinding (Frankle et al.): train, prune, rewind to the weights of step ``rewind``,
    train again. A round has ``every`` steps. After ``rounds`` prunings, train one more round.

    All parameters and running statistics are rewound, and optimizers lose their state. Your learning-rate schedule should
    depend on ``round_step``.
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
        """The number of steps that the current weights have been trained; a rewind sets it back."""
        rounds = min(self.num_steps // self.policy.every, self.policy.rounds)
        return self.num_steps - rounds * self.policy.every + (self.policy.rewind if rounds else 0)
