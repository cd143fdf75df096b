"""Puts hooks and buffers on a model, as its plan says; some of them prepare and follow ``load_state_dict``."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smupar.model.attached import attached, is_parameterized, mask_of, set_mark
from smupar.model.attention_scale import apply_attention
from smupar.model.csr import MASK, expand_state, is_compressed
from smupar.model.factors import BRANCH, FACTOR, no_broadcast, set_branch_factor, set_factor
from smupar.model.gradients import gradient_mask
from smupar.model.relayout import watch_optimizers
from smupar.model.seam import Step, on_every_step
from smupar.model.sharding import zero_off_mask
from smupar.model.weights import weight_of
from smupar.plan.facts.optimizers import facts_of
from smupar.plan.plan import Plan, PlanWarning
from smupar.plan.roles.parameters import parent_path
from smupar.plan.scales.multipliers import set_multiplier


def put_on(model: nn.Module, plan: Plan, masks: Mapping[str, Tensor]) -> None:
    """Puts everything that the plan names on the model, where it is not there yet. ``masks`` are the masks that it lacks."""
    _let_compilers_see_hooks()
    for number in plan.multipliers:
        if number.is_set:
            set_multiplier(model, number.path, number.name, number.base_value)
    apply_attention(model, plan)
    on_every_step("mask", mask_updates, lambda optimizer: facts_of(optimizer).mixes_entries)
    rows = [(row, weight_of(model, row.name)) for row in plan]
    for row, weight in rows:
        weight.install_mask(masks.get(row.name))
        for path, factor in row.forward:
            set_factor(model.get_submodule(path), factor, weight.parameter)
    for path, factor in plan.branches:
        set_branch_factor(model.get_submodule(path), factor, next(model.parameters()))
    # These weights have a mask from the plan, or a mask of ones that will move.
    masked = {weight.name: weight for _, weight in rows if weight.is_masked}
    no_broadcast(model, (name for weight in masked.values() for name in weight.mask_buffers))
    no_broadcast(model, (f"{path}.{FACTOR}" for row, _ in rows for path, _ in row.forward))
    no_broadcast(model, (f"{path}.{BRANCH}" for path, _ in plan.branches))
    if not all(weight.stores_zeros for weight in masked.values()):
        watch_optimizers(model, ())  # copied and unpickled models are not registered yet
    if not is_parameterized(model):
        model.register_load_state_dict_pre_hook(_before_load)
        model.register_load_state_dict_post_hook(_after_load)
    set_mark(model, masked=tuple(masked))


@torch.no_grad()
def mask_updates(step: Step) -> None:
    """Masks the weights of an optimizer. Weights off the mask were 0 before the step, so this masks the update."""
    for group in step.optimizer.param_groups:
        for parameter in group["params"]:
            masked = gradient_mask(parameter)
            if masked is not None:
                zero_off_mask(parameter, getattr(masked.module, masked.mask_leaf))


def _let_compilers_see_hooks() -> None:
    """Makes torch.compile check hooks. By default it does not, and a model with hooks would run code that was compiled for the
    same model without hooks. Each thread has its own settings of torch.compile."""
    may_have_compiled = "torch._dynamo" in sys.modules
    import torch._dynamo  # every optimizer imports this as well

    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        # Code that was compiled earlier does not check hooks, so it is dropped. Only the main thread does so, since other
        # threads may be making models at the same time.
        if may_have_compiled and threading.current_thread() is threading.main_thread():
            torch._dynamo.reset()


# Loading a state dict


def _before_load(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Prepares a state dict for loading. Weights that it stores as non-zeros are expanded, and masks that it lacks are taken
    from the model."""
    masked = _every_name(model, attached(model).masked)
    for name in masked:
        if is_compressed(state, f"{prefix}{name}") and (weight := weight_of(model, name)).stores_zeros:
            expand_state(state, f"{prefix}{name}", weight.shape)
    keys = {name: f"{prefix}{name}" for name in masked if f"{prefix}{name}" in state}
    absent = [name for name, key in keys.items() if f"{key}{MASK}" not in state and not is_compressed(state, key)]
    for name in absent:
        state[f"{prefix}{name}{MASK}"] = mask_of(model, name)
    if absent:
        several = f"{len(absent)} sparse parameters ({absent[0]!r}, ...)"
        warnings.warn(
            f"the checkpoint holds no mask for {several if len(absent) > 1 else repr(absent[0])}: "
            "the model's own masks stay, and weights off the mask become 0",
            PlanWarning,
            stacklevel=6,
        )


def _every_name(model: nn.Module, names: Iterable[str]) -> list[str]:
    """All names of these parameters. A state dict has one entry for each name of a module that is used in several places."""
    modules: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(id(module), []).append(path)
    places = ((modules[id(model.get_submodule(parent_path(name)))], name.rpartition(".")[2]) for name in names)
    return [f"{path}.{leaf}".lstrip(".") for paths, leaf in places for path in paths]


@torch.no_grad()
def _after_load(model: nn.Module, _: Any) -> None:
    """Sets weights off the mask to 0, and gives parameters that ``assign=True`` replaced their hooks again."""
    for weight in (weight_of(model, name) for name in attached(model).masked):
        weight.install_mask()
        weight.zero_off_mask()
