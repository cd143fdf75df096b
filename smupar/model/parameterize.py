"""``parameterize`` and ``attach`` put a plan into a model.

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

import warnings
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from smupar.model.attached import MARK, check_not_compiled, check_plan, unwrapped
from smupar.model.csr import MASK
from smupar.model.factors import BRANCH, FACTOR
from smupar.model.hooks import mask_updates, put_on
from smupar.model.init import initialise, padding_rows, plan_resets
from smupar.model.seam import optimizers, seam_of
from smupar.model.sharding import is_sharded
from smupar.model.weights import hidden_weights, weight_of
from smupar.plan.make import cautions, planned, warn
from smupar.plan.masks.patterns import read_masks
from smupar.plan.plan import Plan, PlanWarning
from smupar.plan.settings import MaskSetting, Settings
from smupar.refusals import refuse


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
    put_on(model, plan, masks)
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
    put_on(model, plan, new)
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


def add_masks(model: nn.Module, plan: Plan) -> None:
    """Gives every hidden weight without a mask a mask of ones, which can move later."""
    missing = [weight for weight in hidden_weights(model, plan).values() if not weight.is_masked]
    put_on(model, plan, {weight.name: weight.full_mask() for weight in missing})


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
            any(hasattr(module, mark) for mark in (MARK, FACTOR, BRANCH)),
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
