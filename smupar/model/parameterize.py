"""``parameterize`` and ``attach`` put a plan into a model; no other code does.

They add the following to a model. Each addition is found by its name, so ``attach`` can put it back from the plan:

- a bool buffer ``<param>_mask`` beside every sparse parameter; the weight is exactly 0 where it is False;
- a hook on that parameter that masks its gradient as soon as it is accumulated, so that optimizers, clipping and reducers
  never see off-mask gradients. Hooks on tensors get lost by deepcopy, to_empty and sharding, which is why ``attach`` exists;
- a non-persistent buffer ``smupar_factor`` and a hook on every module that Table 1 multiplies: lookup tables at their output,
  all others at their input, so that a bias is not multiplied;
- ``smupar_branch``, with a hook, on every module that ends a residual branch in a model that is deeper than its base;
- numbers that follow the width (``multipliers=``) and attention scales, which are set to the plan's values where the model has
  fields for them; elsewhere a factor on the queries;
- an attribute of the root module that names the masked parameters, and hooks before and after ``load_state_dict``.

If an optimizer's updates mix entries, its weights are also masked after each step (``seam``).
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from smupar.model.attention_scale import apply_attention
from smupar.model.csr import MASK, expand_state, is_compressed
from smupar.model.factors import BRANCH, FACTOR, no_broadcast, set_branch_factor, set_factor
from smupar.model.gradients import gradient_mask
from smupar.model.init import initialise, padding_rows, plan_resets
from smupar.model.relayout import watch_optimizers
from smupar.model.seam import Step, on_every_step, optimizers, seam_of
from smupar.model.sharding import is_sharded, zero_off_mask
from smupar.model.weights import hidden_weights, weight_of
from smupar.plan.facts.optimizers import facts_of
from smupar.plan.make import MaskSetting, Settings, cautions, planned, warn
from smupar.plan.masks.patterns import read_masks
from smupar.plan.plan import Plan, PlanWarning
from smupar.plan.roles.parameters import parent_path
from smupar.plan.scales.multipliers import set_multiplier
from smupar.refusals import refuse

_MARK = "_smupar_attached"


@dataclass(frozen=True)
class _Attached:
    """The mark on the root module of a parameterized model."""

    masked: tuple[str, ...] = ()  # names of the parameters that have masks
    masks_move: bool = False  # whether the masks may differ from the plan's


def parameterize(model: nn.Module, *, base: nn.Module, reset: bool | None = None, **settings: Unpack[Settings]) -> Plan:
    """Makes ``model`` follow a rule, in place: sets masks, init and forward factors. Returns the plan.

    Weight matrices get new values. Norms, biases and parameters that do not scale keep their values, except that biases from
    torch's own init, which shrink with width, are rescaled to the size they have in the base. Weights that the model set to
    zero stay zero, and frozen tables keep their values. On bad input the model stays unchanged.

    base          the same model at base width, the width at which hyperparameters were tuned; it may have fewer layers
    rule          "sp" | "mup" | "smupar" (default) | "smupar-init-only" | "smupar-lr-only" | "smupar-aligned"
    density       share of hidden weights kept: a float, {"glob": float} (first match wins) or an allocation such as
                  erk(1 / 16); default 1, or N / M for an N:M pattern
    base_density  density at which hyperparameters were tuned, default 1
    pattern       "random" (default) | "bernoulli" | "fan_in" | "2:4" | "2:4-transposable" | "block-16" | "neuron"
    seed          seed of masks and initial weights, which depend on (seed, parameter name) only
    init_std      init std at base width: a float, "fan_in" (default; 1 / sqrt(base fan-in) of each tensor), or {"glob": either}
    alpha_input   tuned factor on the embedding's output
    alpha_output  tuned factor on the unembedding's output
    masks         your own masks: {"name": bool tensor}, or a file with these or with a state dict; they set the densities
    roles         {"glob": role or ("hidden", in_dim)}, for parameters whose role cannot be inferred; in_dim is the dimension
                  that is summed over, or a tuple of several
    delta         the same model at any other width; shows which dimensions scale if model and base are equally wide
    example       a batch for the model: a tensor, a tuple of arguments, or a dict of keyword arguments. One forward pass of
                  copies of base and model shows how each parameter is used, so that you hardly ever have to name roles
    branches      globs of the modules whose outputs are added to the residual stream, such as ["blocks.*.attn.proj",
                  "blocks.*.mlp.down"]; needed if the model is deeper than the base and no example shows them
    depth         "completep" | "depth-mup" | "none": how factors follow the depth; default "completep" for SmuPar's rules and
                  "none" for SP and muP, as in the tables of the papers
    multipliers   numbers that follow the width but are not sizes, such as sqrt(width) after an embedding: "base" gives them the
                  base's values, "own" leaves them alone, "ask" (default) leaves a reminder
    kappa         for rule "smupar-aligned": ``smupar.observe(...).observation.kappa()`` of the proxy
    reset         True: norms get their module's own init and biases become 0, as a model needs after ``to_empty``, which leaves
                  no values to keep. None (default) does so, with a warning, if no parameter of the model was ever
                  written in place. That is the case after ``to_empty``, and after deepcopy
    """
    _refuse(model)
    settings["masks"] = own_masks = read_masks(settings.get("masks"))  # so that the planner does not read a file again
    parameters = dict(model.named_parameters())
    is_empty = reset or (reset is None and all(parameter._version == 0 for parameter in parameters.values()))
    plan = planned(model, base, settings, has_values=not is_empty)
    _refuse_used_names(model, plan)
    resets, messages = None, cautions(plan)
    if is_empty:
        resets = plan_resets(model, plan, sure=reset is True)
        messages += resets.cautions if reset is None else []
    # Masks are drawn, and warnings issued, before anything changes: both may raise, and must then leave the model as it is.
    with torch.device("cpu"):
        masks = _masks(plan, _by_parameter(own_masks, plan))
    warn(messages, stacklevel=3)
    with torch.no_grad(), torch.device("cpu"):
        if resets is not None:
            resets.run(plan.seed)
        padding = padding_rows(model)
        for row in plan:
            parameter = parameters[row.name]
            initialise(parameter, row, masks.get(row.name), plan.seed, padding=padding.get(id(parameter)))
    _attach(model, plan, masks)
    return plan


def attach(model: nn.Module, plan: Plan, optimizer: Any = None, *, masks: MaskSetting = None) -> None:
    """Puts masks, gradient hooks and forward factors back from the plan. Those that are in place do not change.

    Call it after deepcopy, ``to_empty`` with a loaded checkpoint, ``load_state_dict(assign=True)`` or sharding. Missing masks
    are drawn again from the plan. If you gave masks to ``parameterize``, give them again as ``masks``.

    Weights are masked after each step of an optimizer whose updates mix entries, such as Muon, and of an unknown optimizer.
    They are also masked after each step of any ``optimizer`` (one or several) that you pass.
    """
    model = unwrapped(model)
    check_plan(model, plan)
    given = _by_parameter(read_masks(masks), plan)
    missing = {row.name for row in plan if row.masked and (row.name in given or not weight_of(model, row.name).is_masked)}
    with torch.device("cpu"):
        new = _masks(plan, given, missing)
    _warn_of_other_zeros(model, {name: mask for name, mask in new.items() if name not in given})
    _attach(model, plan, new)
    for inner in optimizers(optimizer):
        seam_of(inner).add(mask_updates, mask=mask_updates)


def _warn_of_other_zeros(model: nn.Module, drawn: Mapping[str, Tensor]) -> None:
    """Warns if weights seem to have been trained with another mask than the drawn mask. Their non-zeros off the drawn mask
    would stay non-zero and never train."""
    parameters = dict(model.named_parameters())
    for name, mask in drawn.items():
        weight = parameters[name].detach()
        if weight.is_meta or is_sharded(weight) or weight.shape != mask.shape:
            continue
        kept = (weight != 0).cpu()
        num_zeros, num_dropped = int((~kept).sum()), int((~mask).sum())
        is_fresh = 2 * num_zeros <= num_dropped  # a checkpoint will be loaded into weights that have few zeros
        if bool((kept & ~mask).any()) and not is_fresh:
            warnings.warn(
                f"{name!r} has other zeros than the mask that the plan draws. If these are trained weights, their masks moved "
                "or were given: load the state dict with its masks after attach, or pass masks=",
                PlanWarning,
                stacklevel=3,
            )
            return


def check_plan(model: nn.Module, plan: Plan) -> None:
    names = {name: weight_of(model, name).shape for name, _ in model.named_parameters()}
    unknown = [row.name for row in plan if names.get(row.name) != row.shape]
    if unknown:
        raise ValueError(
            f"the plan belongs to another model or width, since {len(unknown)} parameters differ: it has {unknown[0]!r} as "
            f"{plan[unknown[0]].shape}, this model {names.get(unknown[0], 'has none')}; make a plan for this model"
        )


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
    return hasattr(model, _MARK)


def check_parameterized(model: nn.Module, remedy: str = "first (smupar.attach on a loaded one)") -> None:
    """Refuses a model that is not parameterized. ``remedy`` says when to parameterize it."""
    refuse(not is_parameterized(model), f"this model is not parameterized: call smupar.parameterize {remedy}")


def check_not_compiled(model: nn.Module, remedy: str) -> None:
    """Refuses a model with a compiled module, since compiled code keeps the hooks and weights that it was compiled with."""
    for path, module in model.named_modules():
        refuse(module._compiled_call_impl is not None, f"{path or 'the model'!r} is compiled already {remedy}")


def let_masks_move(model: nn.Module) -> None:
    """Records on the model that its masks may differ from the plan's from now on."""
    setattr(model, _MARK, replace(_attached(model), masks_move=True))


def masks_move(model: nn.Module) -> bool:
    return _attached(model).masks_move


def _attached(model: nn.Module) -> _Attached:
    return getattr(model, _MARK, _Attached())


def mask_of(model: nn.Module, name: str) -> Tensor | None:
    """The mask of a parameter: its buffer, or a new tensor if only non-zeros are kept; None if there is no mask."""
    return weight_of(model, name).mask


def add_masks(model: nn.Module, plan: Plan) -> None:
    """Gives every hidden weight without a mask a mask of ones, which can move later."""
    missing = [weight for weight in hidden_weights(model, plan).values() if not weight.is_masked]
    _attach(model, plan, {weight.name: weight.full_mask() for weight in missing})


# Before anything changes


def _refuse(model: nn.Module) -> None:
    refuse(
        unwrapped(model) is not model,
        f"the model is wrapped in a {type(model).__name__} already: parameterize first, then compile or wrap it "
        "(a compiled model ignores new hooks)",
    )
    check_not_compiled(model, "and would ignore new hooks: parameterize before you compile")
    for path, module in model.named_modules():
        refuse(
            any(hasattr(module, mark) for mark in (_MARK, FACTOR, BRANCH)),
            f"{'this model' if not path else repr(path)} is parameterized already. Build a fresh model to parameterize it "
            "again; to restore hooks after a copy use smupar.attach(model, plan).",
        )
    named = list(model.named_parameters())  # the plan refuses complex ones
    integer = [name for name, parameter in named if not parameter.is_floating_point() and not parameter.is_complex()]
    if integer:
        raise ValueError(
            f"{integer[0]!r} is not a floating-point tensor (quantised?): parameterize the model before you quantise it"
        )
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise ValueError(
            f"{on_meta[0]!r} and {len(on_meta) - 1} more are on the meta device: call model.to_empty(device=...) first "
            "(after fully_shard under FSDP2), or use smupar.make_plan for a dry run"
        )


def _refuse_used_names(model: nn.Module, plan: Plan) -> None:
    for row in plan:
        path, _, leaf = row.name.rpartition(".")
        refuse(
            row.masked and hasattr(model.get_submodule(path), f"{leaf}{MASK}"),
            f"the model already has something called {row.name + MASK!r}, where the mask would go: rename it, "
            "or build a fresh model if this one is parameterized already",
        )


def _by_parameter(masks: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Masks by parameter name, from keys that may have the suffix of a state dict."""
    return {name if name in plan else name.removesuffix(MASK): mask for name, mask in masks.items()}


def _masks(plan: Plan, given: Mapping[str, Tensor], wanted: set[str] | None = None) -> dict[str, Tensor]:
    names = [row.name for row in plan if row.masked and (wanted is None or row.name in wanted)]
    masks = {n: given[n].to("cpu", torch.bool, copy=True) if n in given else plan.draw_mask(n) for n in names}
    return {name: mask for name, mask in masks.items() if mask is not None}


# Hooks


@torch.no_grad()
def mask_updates(step: Step) -> None:
    """Masks the weights of an optimizer. Weights off the mask were 0 before the step, so this masks the update."""
    for group in step.optimizer.param_groups:
        for parameter in group["params"]:
            masked = gradient_mask(parameter)
            if masked is not None:
                zero_off_mask(parameter, getattr(masked.module, masked.mask_leaf))


def _attach(model: nn.Module, plan: Plan, masks: Mapping[str, Tensor]) -> None:
    """Does the work of ``attach``. ``masks`` are the masks that the model still lacks."""
    _let_compilers_see_hooks()
    for number in plan.multipliers:
        if number.is_set:
            set_multiplier(model, number.path, number.name, number.base_value)
    apply_attention(model, plan)
    on_every_step("mask", mask_updates, lambda optimizer: facts_of(optimizer).mixes_entries)
    rows = [(row, weight_of(model, row.name)) for row in plan]
    for row, weight in rows:
        weight.attach(masks.get(row.name))
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
    if not hasattr(model, _MARK):
        model.register_load_state_dict_pre_hook(_before_load)
        model.register_load_state_dict_post_hook(_after_load)
    setattr(model, _MARK, replace(_attached(model), masked=tuple(masked)))


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


# Checkpoints


def _before_load(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Prepares a state dict for loading. Weights that it stores as non-zeros are expanded, and masks that it lacks are taken
    from the model."""
    masked = _every_name(model, _attached(model).masked)
    for name in masked:
        if is_compressed(state, f"{prefix}{name}") and (weight := weight_of(model, name)).stores_zeros:
            expand_state(state, f"{prefix}{name}", weight.shape)
    keys = {name: f"{prefix}{name}" for name in masked if f"{prefix}{name}" in state}
    absent = [name for name, key in keys.items() if f"{key}{MASK}" not in state and not is_compressed(state, key)]
    for name in absent:
        state[f"{prefix}{name}{MASK}"] = mask_of(model, name)
    if absent:
        warnings.warn(
            f"the checkpoint holds no mask for {len(absent)} sparse parameters ({absent[0]!r}, ...): "
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
    for weight in (weight_of(model, name) for name in _attached(model).masked):
        weight.attach()
        weight.zero_off_mask()
