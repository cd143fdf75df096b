"""Moving the masks of a model: weights and optimizer state go along.

``sparsifier.step()`` is called after ``optimizer.step()`` and counts those steps: after the n-th one masks move if n is due.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smupar.apply import (
    MaskGradient,
    attach,
    gradient_mask,
    has_mask,
    is_parameterized,
    let_masks_move,
    mask_of,
    unwrapped,
    whole_weight,
)
from smupar.dynamic.moves import DropAndGrow, Times, key_of, random_scores
from smupar.optimizers import facts_of, name_of
from smupar.plan import Plan
from smupar.planner import PlanWarning
from smupar.stepping import Step, optimizers, seam_of
from smupar.storage import Compressed, Moved, compressed
from smupar.values import is_sharded, like, local, num_ranks, whole, zero_off_mask

# Calls of step() before it says that it saw none of the optimizer's.
_MANY_IDLE = 1000
_MOVABLE = ("random", "bernoulli", "given", None)


class Sparsifier:
    """What all kinds share: counting steps, the masks of hidden weights, what becomes of weights and optimizer state.

    A grown weight starts at 0 with optimizer state 0; a dropped one is 0 and has no state left. ``restart_bias_correction``
    gives grown weights Adam's bias correction from their own first step: else their first updates are too large. ``steps`` is
    the length of the run, if it is known: a schedule that ends behind it is refused.
    """

    grows_by_gradient = False

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: Any,
        *,
        stop: int,
        restart_bias_correction: bool = False,
        steps: int | None = None,
    ) -> None:
        self.model, self.plan, self.optimizers = unwrapped(model), plan, optimizers(optimizer)
        if not is_parameterized(self.model):
            raise ValueError("this model is not parameterized: call smupar.parameterize before masks move")
        if steps is not None and stop > steps:
            raise ValueError(f"masks would move until step {stop}, but the run ends at {steps}: choose an earlier stop")
        structured = sorted({str(row.pattern) for row in plan if row.role == "hidden" and row.pattern not in _MOVABLE})
        if structured:
            raise ValueError(f"masks that move are unstructured, pattern {structured[0]!r} would be lost: use pattern='random'")
        attach(self.model, plan)
        for reason in filter(None, (facts_of(each).no_moves for each in self.optimizers)):
            raise ValueError(reason)
        self._refuse_strangers()
        let_masks_move(self.model)
        self.num_steps = 0
        self._stepped, self._num_idle = False, 0
        for each in self.optimizers:
            seam_of(each).add(self, count=self._count)
        self.restart = _Restart(self) if restart_bias_correction else None

    def _refuse_strangers(self) -> None:
        held = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        hidden = {row.name for row in self.plan if row.role == "hidden"}
        for name, parameter in self.model.named_parameters():
            if name in hidden and parameter.requires_grad and id(parameter) not in held:
                raise ValueError(
                    f"{name!r} is in none of the optimizers: pass the one that trains this model (or several, as a list), "
                    "made of its param_groups"
                )

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Hidden weights that have a mask and are trained."""
        every = dict(self.model.named_parameters())
        hidden = (row.name for row in self.plan if row.role == "hidden")
        return {n: every[n] for n in hidden if has_mask(self.model, n) and every[n].requires_grad}

    @property
    def densities(self) -> dict[str, float]:
        counts = {name: int(whole(self._mask(name)).sum()) for name in self.parameters}
        return {name: count / math.prod(self.plan[name].shape) for name, count in counts.items()}

    @torch.no_grad()
    def step(self) -> bool:
        """After every ``optimizer.step()``. Says whether masks moved. Where the optimizer made no step, as while gradients are
        accumulated or when a scaler skips one, nothing happens."""
        if not self.has_stepped():
            self._num_idle += 1
            if self.num_steps == 0 and self._num_idle == _MANY_IDLE:
                warnings.warn(
                    f"called {_MANY_IDLE} times, but no step of the optimizer was seen: make the sparsifier with the one whose "
                    "step() is called",
                    PlanWarning,
                    stacklevel=3,
                )
            return False
        self._stepped = False
        self.num_steps += 1
        due = self.due(self.num_steps)
        if due:
            self.update(self.num_steps)
        due_next = self.due(self.num_steps + 1)
        if due or due_next:
            self._listen(due_next)
        return due

    def has_stepped(self) -> bool:
        """Whether an optimizer has trained the model since the last call of ``step``."""
        for each in self.optimizers:
            seam_of(each).finish()  # this may be called by a hook of the optimizer, before the seam's own
        return self._stepped

    def _count(self, step: Step) -> None:
        self._stepped |= not step.was_noop

    def due(self, step: int) -> bool:
        raise NotImplementedError

    def update(self, step: int) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Masks are in the model's own state dict."""
        return {"num_steps": self.num_steps, "born": dict(self.restart.born) if self.restart else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps = state["num_steps"]
        if self.restart:
            parameters = self.parameters
            self.restart.born = {name: born.to(parameters[name].device, copy=True) for name, born in state["born"].items()}
        self._listen(self.due(self.num_steps + 1))

    def _mask(self, name: str) -> Tensor:
        mask = mask_of(self.model, name)
        assert mask is not None
        return mask

    def _weight(self, name: str, parameter: nn.Parameter) -> Tensor:
        return whole_weight(self.model, name, parameter)

    def _sees_gradient(self, name: str, parameter: nn.Parameter) -> MaskGradient | Compressed | None:
        """Who can keep the dense gradient."""
        return compressed(self.model, name) or gradient_mask(parameter)

    def _listen(self, keep: bool) -> None:
        """Has the dense gradient kept in the step to come."""
        if self.grows_by_gradient:
            for name, parameter in self.parameters.items():
                keeper = self._sees_gradient(name, parameter)
                if keeper is not None:
                    keeper.keeps_dense, keeper.dense = keep, None

    def _replace(self, name: str, parameter: nn.Parameter, flat: Tensor) -> None:
        """Makes ``flat``, (1, weights), the mask of a parameter: all that a moving mask entails, and nothing else does it."""
        new = flat.view(self.plan[name].shape)
        if num_ranks() > 1:
            dist.broadcast(sent := new.to(torch.uint8), 0)  # equal by construction; a rounding apart they would stay apart
            new = sent.bool()
        before, layer = parameter.shape, compressed(self.model, name)
        if layer is None and bool(local(parameter)[~local(self._mask(name))].count_nonzero()):
            warnings.warn(
                f"weights of {name!r} off its mask are not 0: another optimizer than the one that was given here trains it, or "
                "something wrote to it. Make a sparsifier for the optimizer that is used",
                PlanWarning,
                stacklevel=4,
            )
        if layer is None:
            moved = self._mask_anew(self._mask(name), parameter, like(new, parameter))
        elif num_ranks() > 1 and int(new.sum()) != len(parameter):
            raise ValueError(f"{name!r} keeps only its non-zeros, whose number cannot change on several ranks: keep it dense")
        else:
            moved = layer.move(new)
        for optimizer in self.optimizers:
            state = optimizer.state.get(parameter, {})
            for what, value in state.items():
                if isinstance(value, Tensor) and value.shape == before:
                    state[what] = moved.carry(value)
        if self.restart:
            if layer is not None and name in self.restart.born:
                self.restart.born[name] = moved.carry(self.restart.born[name])
            self.restart.note(name, parameter, moved.grown)

    @staticmethod
    def _mask_anew(mask: Tensor, parameter: nn.Parameter, new: Tensor) -> Moved:
        changed = mask ^ new
        parameter.masked_fill_(changed, 0)  # dropped: 0 from now on; grown: starts at 0
        mask.copy_(new)
        if parameter.grad is not None:
            zero_off_mask(parameter.grad, new)
        return Moved(lambda value: value.masked_fill_(changed, 0), changed & new)


class _Moving(Sparsifier):
    """RigL and SET: as many weights as at the start, others."""

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
        drop_fraction   share of a layer's active weights that is dropped, at first; ``decay`` takes it to 0: "cosine", "linear"
                        or "constant"
        """
        self.rule = DropAndGrow(Times(every, stop, start), self.grow, drop_fraction, decay)
        self.grows_by_gradient = self.grow == "gradient"
        self._idle_before: set[str] = set()
        super().__init__(model, plan, optimizer, stop=stop, restart_bias_correction=restart_bias_correction, steps=steps)
        if not self.parameters:
            raise ValueError("no hidden weight is sparse, so no mask can move: pass a density below 1 to parameterize")
        if not any(self.due(step) for step in range(start, stop + 1)):
            raise ValueError(f"masks would never move: no multiple of every={every} lies between {start} and stop={stop}")
        self._listen(self.due(1))

    def due(self, step: int) -> bool:
        return self.rule.due(step)

    def update(self, step: int) -> None:
        idle = self._without_gradient() if self.grows_by_gradient else []
        for name, parameter in self.parameters.items():
            if name in idle:
                continue
            weight, mask = self._weight(name, parameter).flatten()[None], whole(self._mask(name)).flatten()[None]
            score = self._grow_score(name, parameter, step)
            if not bool(score.isfinite().all()):
                warnings.warn(f"the gradient of {name!r} is not finite, so its mask stays", PlanWarning, stacklevel=4)
                continue
            self._replace(name, parameter, self.rule.moved(weight, mask, score, step))

    def _without_gradient(self) -> list[str]:
        """Layers that had no part in the last step on any rank, such as experts without tokens: their masks stay."""
        parameters = self.parameters
        keepers = [self._sees_gradient(name, parameter) for name, parameter in parameters.items()]
        has = torch.tensor(
            [int(keeper is not None and keeper.dense is not None) for keeper in keepers],
            device=local(next(iter(parameters.values()))).device,
        )
        if num_ranks() > 1:
            dist.all_reduce(has, dist.ReduceOp.MAX)
        idle = [name for name, there in zip(parameters, has.tolist(), strict=True) if not there]
        if len(idle) == len(parameters):
            raise ValueError(
                f"{idle[0]!r} got no gradient that RigL could look at: call sparsifier.step() after every "
                "optimizer.step(), and smupar.attach(model, plan) after a copy, a conversion or sharding"
            )
        if not self._idle_before.issuperset(idle):
            names = ", ".join(idle[:4])
            warnings.warn(f"no gradient in this step, so their masks stay: {names}", PlanWarning, stacklevel=5)
            self._idle_before.update(idle)
        return idle

    def _grow_score(self, name: str, parameter: nn.Parameter, step: int) -> Tensor:
        if self.grow == "random":
            keys = torch.tensor([key_of(self.plan.seed, step, name)], device=parameter.device)
            return random_scores(math.prod(self.plan[name].shape), keys)
        keeper = self._sees_gradient(name, parameter)
        dense = keeper.dense if keeper is not None else None
        if dense is None:  # on other ranks it has one
            shape = self.plan[name].shape if compressed(self.model, name) is not None else local(parameter).shape
            dense = torch.zeros(shape, dtype=parameter.dtype, device=local(parameter).device)
        if is_sharded(parameter):
            from torch.distributed.tensor import DTensor

            assert isinstance(parameter, DTensor)
            dense = whole(
                DTensor.from_local(
                    dense, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
                )
            )
        elif num_ranks() > 1:
            dist.all_reduce(dense)
        return dense.abs().flatten()[None]


class RigL(_Moving):
    """Evci et al.: grows where the gradient of the dense network is largest."""

    grow = "gradient"


class SET(_Moving):
    """Mocanu et al.: grows at random."""

    grow = "random"


class _Restart:
    """Adam corrects its averages for having started at 0, by the optimizer's step, but a grown weight starts later: this takes
    the difference out of the weight, after each step. ``born``: the optimizer's step at which a weight grew, 0 at first."""

    def __init__(self, sparsifier: Sparsifier) -> None:
        self.sparsifier = sparsifier
        self.born: dict[str, Tensor] = {}
        plan = sparsifier.plan
        hidden = {id(p) for n, p in sparsifier.model.named_parameters() if n in plan and plan[n].role == "hidden"}
        for optimizer in sparsifier.optimizers:
            facts = facts_of(optimizer)
            groups = [group for group in optimizer.param_groups if any(id(p) in hidden for p in group["params"])]
            if groups and (not facts.restartable or any(group.get("amsgrad") for group in groups)):
                kind = name_of(optimizer)
                raise ValueError(f"restart_bias_correction is for Adam and AdamW without amsgrad, not {kind}: leave it out")
            seam_of(optimizer).add(sparsifier.model, correct=self._correct)  # in place of an earlier sparsifier's

    def note(self, name: str, parameter: nn.Parameter, grown: Tensor) -> None:
        state: dict[str, Any] = next((o.state[parameter] for o in self.sparsifier.optimizers if parameter in o.state), {})
        born = self.born.setdefault(name, torch.zeros_like(parameter, dtype=torch.float32))
        born.masked_fill_(grown, float(state.get("step", 0)))

    @torch.no_grad()
    def _correct(self, step: Step) -> None:
        if step.was_noop:
            return
        optimizer = step.optimizer
        names = {id(parameter): name for name, parameter in self.sparsifier.parameters.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name in self.born and parameter.grad is not None and parameter in optimizer.state:
                    parameter.add_(self._difference(optimizer.state[parameter], group, self.born[name]))

    @staticmethod
    def _difference(state: Mapping[str, Any], group: dict[str, Any], born: Tensor) -> Tensor:
        """What the step took too much of young weights."""
        beta1, beta2 = group["betas"]
        count = torch.as_tensor(state["step"], dtype=torch.float32, device=born.device)
        mean, square = state["exp_avg"], state["exp_avg_sq"]

        def update(age: Any) -> Tensor:
            started1, started2 = (-torch.expm1(age * math.log(beta)) for beta in (beta1, beta2))  # 1 - beta^age
            return mean / started1 / ((square / started2).sqrt() + group["eps"])

        difference: Tensor = group["lr"] * (update(count) - update(count - born))
        return difference.masked_fill_(born == 0, 0)
