"""The one seam round ``optimizer.step()``: what the package does before a step and after it, by name and in a fixed order.

torch calls two global hooks of ours round the step of every optimizer, the first before an optimizer's own hooks and the second
after them. Each optimizer has a ``Seam``, an attribute that copies and pickles leave behind as they do hooks, with the phases
that apply to it; ``print(seam_of(optimizer))`` shows what will run. An optimizer without phases pays for one attribute look-up.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from smupar.model.sharding import local

# ``look`` comes last: where the step gets a closure, after each of its calls, whose forward pass belongs to this step.
BEFORE = ("refuse_replaced", "fit_state", "check_ratios", "set_rates", "look")
# What is measured has been corrected and masked, at the learning rates of the step.
AFTER = ("correct", "mask", "measure", "restore_rates", "count")
_SEAM = "_smupar_seam"


class Step:
    """One step of an optimizer, as the phases see it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @cached_property
    def was_noop(self) -> bool:
        """For the phases after the step: asked once, by the first that wants to know."""
        return step_was_noop(self.optimizer)


Phase = Callable[[Step], None]


class Seam:
    """The phases of one optimizer. Each belongs to an owner, who has at most one of a name: a second one replaces the first."""

    def __init__(self) -> None:
        self.phases: dict[str, dict[Hashable, Phase]] = {}
        self.step: Step | None = None  # the one that is being made
        self.fitted_state: object = None  # the optimizer's ``state`` that ``fit_state`` saw last; loading brings another

    def add(self, owner: Hashable, **phases: Phase) -> None:
        for name, phase in phases.items():
            if name not in (*BEFORE, *AFTER):
                raise ValueError(f"a step has no phase {name!r}: choose one of {', '.join((*BEFORE, *AFTER))}")
            self.phases.setdefault(name, {})[owner] = phase

    def remove(self, owner: Hashable) -> None:
        for own in self.phases.values():
            own.pop(owner, None)
        self.phases = {name: own for name, own in self.phases.items() if own}

    def owners(self, phase: str) -> list[Any]:
        return list(self.phases.get(phase, ()))

    def __str__(self) -> str:
        lines = []
        for when, names in (("before", BEFORE), ("after", AFTER)):
            owners = {name: [getattr(who, "__name__", type(who).__name__) for who in self.owners(name)] for name in names}
            shown = ", ".join(f"{name} ({', '.join(own)})" for name, own in owners.items() if own)
            lines.append(f"{when}: {shown or 'nothing'}")
        return "\n".join(lines)

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Runs what comes before the step; returns its arguments if a closure among them had to be wrapped."""
        step = Step(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        waits = closure is not None and "look" in self.phases
        self._run(BEFORE[:-1] if waits else BEFORE, step)
        self.step = step
        if not waits:
            return None

        def looked() -> Any:
            loss = closure()
            self._run(BEFORE[-1:], step)
            return loss

        return ((args[0], looked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": looked})

    def finish(self) -> None:
        """Runs what comes after the step, once: whoever acts in a hook of the optimizer's own may call this first."""
        if (step := self.step) is not None:
            self.step = None
            try:
                self._run(AFTER[:-2], step)
            finally:  # schedulers must not find the rates of a step, whatever a measurement raised
                self._run(AFTER[-2:], step)

    def _run(self, names: Iterable[str], step: Step) -> None:
        for name in names:
            for phase in list(self.phases.get(name, {}).values()):
                phase(step)


def seam_of(optimizer: Optimizer) -> Seam:
    """The seam of an optimizer, made the first time it is asked for, with the phases that every optimizer has."""
    seam: Seam | None = optimizer.__dict__.get(_SEAM)
    if seam is None:
        with _LOCK:
            _install()
            setattr(optimizer, _SEAM, seam := Seam())
            _KNOWN.add(optimizer)
            for name, (phase, applies) in _EVERYWHERE.items():
                if applies(optimizer):
                    seam.add(phase, **{name: phase})
    return seam


_EVERYWHERE: dict[str, tuple[Phase, Callable[[Optimizer], bool]]] = {}
_KNOWN: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_LOCK = threading.RLock()  # models are made, and optimizers stepped, in threads


def on_every_step(name: str, phase: Phase, applies: Callable[[Optimizer], bool] = lambda _: True) -> None:
    """Adds a phase, which is its own owner, to all optimizers that it applies to, now and later."""
    with _LOCK:
        if name not in _EVERYWHERE:
            _install()
            _EVERYWHERE[name] = (phase, applies)
            for optimizer in filter(applies, _KNOWN):
                seam_of(optimizer).add(phase, **{name: phase})


@cache
def _install() -> None:
    """The only hooks that belong to no model and no optimizer. A compiled step runs them as they are: traced, the masks of
    parameters would not be seen."""
    register_optimizer_step_pre_hook(torch.compiler.disable(_before))
    register_optimizer_step_post_hook(torch.compiler.disable(_after))


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    seam = seam_of(optimizer)
    return seam.begin(optimizer, args, kwargs) if seam.phases else None


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    seam = seam_of(optimizer)
    if seam.step is not None:
        seam.finish()
    elif "mask" in seam.phases:
        # A step that called its parent class's step, which torch wraps too: the inner one has done the rest.
        seam._run(("mask",), Step(optimizer))


# Optimizers, as users hand them over


def optimizers(optimizer: Any) -> list[Optimizer]:
    """One optimizer, several or none, as a list, each without its wrappers."""
    if optimizer is None:
        return []
    return [unwrap_optimizer(each) for each in (optimizer if isinstance(optimizer, Iterable) else [optimizer])]


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer that owns the state and takes the step, inside the wrappers of Accelerate (``optimizer``) and of
    sharpness-aware minimisation (``base_optimizer``)."""
    while True:
        inner = (getattr(optimizer, name, None) for name in ("optimizer", "base_optimizer"))
        found = next((each for each in inner if isinstance(each, Optimizer)), None)
        if found is None:
            return optimizer
        optimizer = found


def step_was_noop(optimizer: Optimizer) -> bool:
    """Whether the step that an optimizer has just made changed nothing: torch.distributed.checkpoint makes such a step with a
    learning rate of 0 to create state, and a fused optimizer skips one where a GradScaler found an overflow."""
    overflow = getattr(optimizer, "found_inf", None)  # from a GradScaler; nobody else waits here for the GPU
    if overflow is not None and bool(overflow):
        return True
    rates = [group["lr"] for group in optimizer.param_groups]
    # Reading a GPU tensor at each step would stall it; torch's own step has its rates on the CPU.
    if any((isinstance(lr, Tensor) and lr.device.type != "cpu") or float(lr) != 0 for lr in rates):
        return False
    grads = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return not any(bool(local(grad).any()) for grad in grads if grad is not None)
