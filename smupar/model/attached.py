"""Is a model parameterized? The mark that ``parameterize`` leaves on the root module, and questions about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from smupar.model.weights import weight_of
from smupar.plan.plan import Plan
from smupar.refusals import refuse

MARK = "_smupar_attached"


@dataclass(frozen=True)
class Attached:
    """The mark on the root module of a parameterized model."""

    masked: tuple[str, ...] = ()  # names of the parameters that have masks
    masks_move: bool = False  # whether the masks may differ from the plan's


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside torch.compile, DDP or DataParallel, which add prefixes to all names."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):  # checked by attribute, to avoid importing torch._dynamo
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        else:
            return model


def is_parameterized(model: nn.Module) -> bool:
    return hasattr(model, MARK)


def check_parameterized(model: nn.Module, remedy: str = "first (smupar.attach on a loaded one)") -> None:
    """Refuses a model that is not parameterized. ``remedy`` says when to parameterize it."""
    refuse(not is_parameterized(model), f"this model is not parameterized: call smupar.parameterize {remedy}")


def check_not_compiled(model: nn.Module, remedy: str) -> None:
    """Refuses a model with a compiled module, since compiled code keeps the hooks and weights that it was compiled with."""
    for path, module in model.named_modules():
        refuse(module._compiled_call_impl is not None, f"{path or 'the model'!r} is compiled already {remedy}")


def let_masks_move(model: nn.Module) -> None:
    """Records on the model that its masks may differ from the plan's from now on."""
    set_mark(model, masks_move=True)


def masks_move(model: nn.Module) -> bool:
    return attached(model).masks_move


def attached(model: nn.Module) -> Attached:
    return getattr(model, MARK, Attached())


def set_mark(model: nn.Module, **changes: Any) -> None:
    setattr(model, MARK, replace(attached(model), **changes))


def mask_of(model: nn.Module, name: str) -> Tensor | None:
    """The mask of a parameter: its buffer, or a new tensor if only non-zeros are kept; None if there is no mask."""
    return weight_of(model, name).mask


def check_plan(model: nn.Module, plan: Plan) -> None:
    names = {name: weight_of(model, name).shape for name, _ in model.named_parameters()}
    unknown = [row.name for row in plan if names.get(row.name) != row.shape]
    if unknown:
        raise ValueError(
            f"the plan belongs to another model or width, since {len(unknown)} parameters differ: it has {unknown[0]!r} as "
            f"{plan[unknown[0]].shape}, this model {names.get(unknown[0], 'has none')}; make a plan for this model"
        )
