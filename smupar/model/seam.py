"""The seam around ``optimizer.step()``: everything that smupar does before and after a step, by name and in a fixed order.

torch calls two global hooks of ours at the step of every optimizer: the first before the optimizer's own hooks, the second
after them. Each optimizer has a ``Seam`` with the phases that apply to it. The seam is an attribute of the optimizer. Copies
and pickles do not have it, just as they do not have hooks. ``print(seam_of(optimizer))`` shows what will run. For an optimizer
without phases, a step costs two function calls more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from smupar.model.sharding import local
from smupar.refusals import refuse

_PREPARE = ("refuse_replaced", "fit_state", "check_ratios", "set_rates")
# If the step has a closure, ``look`` runs after each call of the closure, since its forward passes belong to this step.
_LOOK = ("look",)
# ``measure`` sees corrected and masked weights, and the learning rates of the step.
_FOLLOW_UP = ("correct", "mask", "measure")
# These run even if an earlier phase raises, since schedulers must not see the learning rates that were set for one step. If the
# step itself raises, torch calls no hook after it, and the next step restores the scheduled rates.
_ALWAYS = ("restore_rates", "count")
BEFORE, AFTER = _PREPARE + _LOOK, _FOLLOW_UP + _ALWAYS
_SEAM = "_smupar_seam"


class Step:
    """One step of an optimizer. Phases get it as their argument."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @cached_property
    def was_noop(self) -> bool:
        """Whether the step changed nothing. Only phases after the step may ask; the answer is computed once."""
        return step_was_noop(self.optimizer)


Phase = Callable[[Step], None]
Owner = TypeVar("Owner")


class Seam:
    """The phases of one optimizer. Each phase belongs to an owner, and an owner has at most one phase of each name. A second
    phase of that name replaces the first."""

    def __init__(self) -> None:
        self.phases: dict[str, dict[Hashable, Phase]] = {}
        self.step: Step | None = None  # the current step

    def add(self, owner: Hashable, **phases: Phase) -> None:
        for name, phase in phases.items():
            refuse(name not in (*BEFORE, *AFTER), f"a step has no phase {name!r}: choose one of {', '.join((*BEFORE, *AFTER))}")
            self.phases.setdefault(name, {})[owner] = phase

    def remove(self, owner: Hashable) -> None:
        for phases in self.phases.values():
            phases.pop(owner, None)
        self.phases = {name: phases for name, phases in self.phases.items() if phases}

    def owners(self, phase: str) -> list[Any]:
        return list(self.phases.get(phase, ()))

    def owner(self, kind: type[Owner]) -> Owner | None:
        """The owner that has this class; None if there is none."""
        return next((owner for phases in self.phases.values() for owner in phases if isinstance(owner, kind)), None)

    def __str__(self) -> str:
        lines = []
        for when, names in (("before", BEFORE), ("after", AFTER)):
            owners = {name: [getattr(owner, "__name__", type(owner).__name__) for owner in self.owners(name)] for name in names}
            shown = ", ".join(f"{name} ({', '.join(titles)})" for name, titles in owners.items() if titles)
            lines.append(f"{when}: {shown or 'nothing'}")
        return "\n".join(lines)

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Runs the phases before the step. If it has to wrap the closure among the arguments of the step, it returns new
        arguments."""
        step = Step(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        self.run(_PREPARE, step)
        waits = closure is not None and "look" in self.phases
        if not waits:
            self.run(_LOOK, step)
        self.step = step
        if not waits:
            return None

        def closure_and_look() -> Any:
            loss = closure()
            self.run(_LOOK, step)
            return loss

        return (
            ((args[0], closure_and_look, *args[2:]), kwargs)
            if len(args) > 1
            else (args, {**kwargs, "closure": closure_and_look})
        )

    def finish(self) -> None:
        """Runs the phases after the step, once. A hook of the optimizer may call this before torch does."""
        if (step := self.step) is not None:
            self.step = None
            try:
                self.run(_FOLLOW_UP, step)
            finally:
                self.run(_ALWAYS, step)

    def run(self, names: Iterable[str], step: Step) -> None:
        for name in names:
            for phase in list(self.phases.get(name, {}).values()):
                phase(step)


def seam_of(optimizer: Optimizer) -> Seam:
    """The seam of an optimizer. The first call makes it, with the phases that every optimizer has."""
    seam: Seam | None = optimizer.__dict__.get(_SEAM)
    if seam is None:
        with _LOCK:
            _install()
            setattr(optimizer, _SEAM, seam := Seam())
            _KNOWN.add(optimizer)
            for (name, phase), applies in EVERYWHERE.items():
                if applies(optimizer):
                    seam.add(phase, **{name: phase})
    return seam


EVERYWHERE: dict[tuple[str, Phase], Callable[[Optimizer], bool]] = {}
_KNOWN: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_LOCK = threading.RLock()  # threads may make models and step optimizers at the same time


def on_every_step(name: str, phase: Phase, applies: Callable[[Optimizer], bool] = lambda _: True) -> None:
    """Adds a phase to all optimizers to which it applies, now and in the future. The phase is its own owner. A second call
    changes nothing."""
    with _LOCK:
        if (name, phase) not in EVERYWHERE:
            _install()
            EVERYWHERE[name, phase] = applies
            for optimizer in filter(applies, _KNOWN):
                seam_of(optimizer).add(phase, **{name: phase})


@cache
def _install() -> None:
    """Installs the only hooks that belong to no model and no optimizer. torch.compile must not trace them, since it does not
    see the masks of parameters."""
    register_optimizer_step_pre_hook(torch.compiler.disable(_before))
    register_optimizer_step_post_hook(torch.compiler.disable(_after))


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    seam = seam_of(optimizer)
    return seam.begin(optimizer, args, kwargs) if seam.phases else None


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    seam = seam_of(optimizer)
    if seam.step is not None:
        seam.finish()
    else:
        # The optimizer's step called the step of its parent class, which torch wraps too. That inner step has run all phases.
        # The outer step may have written to weights afterwards, so they are masked again.
        seam.run(("mask",), Step(optimizer))


# Optimizers, as users pass them


def optimizers(optimizer: Any) -> list[Optimizer]:
    """One optimizer, several or none, as a list of unwrapped optimizers."""
    if optimizer is None:
        return []
    return [unwrap_optimizer(wrapped) for wrapped in (optimizer if isinstance(optimizer, Iterable) else [optimizer])]


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer that owns the state and takes the step, inside the wrappers of Accelerate (``optimizer``) and of
    sharpness-aware minimisation (``base_optimizer``)."""
    while True:
        attributes = (getattr(optimizer, name, None) for name in ("optimizer", "base_optimizer"))
        inner = next((value for value in attributes if isinstance(value, Optimizer)), None)
        if inner is None:
            return optimizer
        optimizer = inner


def step_was_noop(optimizer: Optimizer) -> bool:
    """Whether the last step of an optimizer changed nothing. There are two such steps: torch.distributed.checkpoint makes a
    step with a learning rate of 0, to create state, and a fused optimizer skips a step if a GradScaler found an overflow."""
    overflow = getattr(optimizer, "found_inf", None)  # set by a GradScaler; reading it waits for the GPU
    if overflow is not None and bool(overflow):
        return True
    rates = [group["lr"] for group in optimizer.param_groups]
    # Reading a GPU tensor at each step would stall the GPU; torch.distributed.checkpoint makes its empty step on the CPU.
    if any((isinstance(lr, Tensor) and lr.device.type != "cpu") or float(lr) != 0 for lr in rates):
        return False
    grads = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return not any(bool(local(grad).any()) for grad in grads if grad is not None)
