"""Makes a model of transformers follow a rule: roles, masks, init, factors, and the attention scale, in the model's own field
or by a factor on its queries."""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from typing import Any, Unpack

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from smupar.integrations.huggingface.families import FAMILIES, base_config
from smupar.integrations.huggingface.folders import keep_plan
from smupar.integrations.huggingface.inputs import fitting, forward_passes
from smupar.model import parameterize as apply
from smupar.model.attached import unwrapped
from smupar.model.attention_scale import set_scales
from smupar.plan.forward.run_copy import Example
from smupar.plan.notes import Note
from smupar.plan.plan import Plan, PlanWarning
from smupar.plan.settings import Settings
from smupar.refusals import refuse

# If the number of key and value heads does not follow the width, these matrices look like readouts.
_HIDDEN = ("*.k_proj.weight", "*.v_proj.weight")
_ABOUT_FILES = ("dtype", "torch_dtype", "architectures", "transformers_version", "model_type", "name_or_path")
_NO_EXAMPLE = "no inputs for a forward pass are known, so roles come from shapes and modules alone. Pass example=, a batch"
_FEW = 2**14  # largest tensor of the base that gets its initial values, for comparison with the model's


def parameterize(
    model: PreTrainedModel,
    *,
    base: int | PreTrainedConfig | nn.Module = 256,
    reset: bool | None = None,
    **settings: Unpack[Settings],
) -> Plan:
    """``smupar.parameterize`` for a model of transformers. Weight matrices get a fresh init. It also sets the attention scale,
    gives the base's values to numbers that follow the width (``multipliers="base"``), and makes ``save_pretrained`` write the
    plan.

    base      width at which hyperparameters were tuned, or the config or model of that width, which may have fewer layers
    settings  settings of ``smupar.parameterize``. Without an ``example``, smupar's own small inputs show how the model uses its
              parameters; ``example=None`` skips this pass

    GPT-2, Llama, Mistral, Qwen2, Qwen3, GPT-NeoX and ViT are known. For other architectures, give a config or a model as base;
    a warning says what to confirm.
    """
    _check_model(model)
    is_known = model.config.model_type in FAMILIES
    narrow = _base_model(model, base)
    if is_known:
        settings = _with_known_roles(model, narrow, settings)
    else:
        warnings.warn(_to_confirm(model), PlanWarning, stacklevel=2)
    for difference in _other_settings(model.config, getattr(narrow, "config", model.config)):
        warnings.warn(difference, PlanWarning, stacklevel=2)
    if origin := getattr(model, "name_or_path", ""):
        warnings.warn(
            f"the weights that were loaded from {origin!r} are replaced by a fresh init, since rules are for training from "
            "scratch",
            PlanWarning,
            stacklevel=2,
        )
    settings.setdefault("multipliers", "base")
    given = settings.get("example")
    if "example" not in settings:
        settings["example"] = fitting(narrow if isinstance(narrow, PreTrainedModel) else model)
    plan = apply.parameterize(model, base=narrow, reset=reset, **settings)
    if settings["example"] is None:
        plan.notes.append(Note("example", _NO_EXAMPLE, False))
    set_attention_scale(model, plan, given)
    keep_plan(model, plan)
    return plan


def set_attention_scale(model: PreTrainedModel, plan: Plan, example: Example | None = None) -> None:
    """Gives every attention module the rule's scale: in its own field if a probe on small inputs shows that the field has an
    effect, otherwise by a factor on its queries. A warning and the plan's reminder name modules whose scale cannot be set.

    example   a batch for the model, in addition to smupar's own small inputs
    """
    set_scales(model, plan, forward_passes(model, example))


class _RealNumbers(TorchFunctionMode):
    """Keeps tensors of a single number off the meta device, so that the base's can be compared with the model's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_number = func is torch.tensor and args and isinstance(args[0], (int, float))
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if is_number else {})})


def build(kind: type[nn.Module], config: PreTrainedConfig) -> nn.Module:
    """Builds a model on the meta device, where only tensors of a single number have values."""
    with torch.device("meta"), _RealNumbers():
        return kind(config)


@torch.no_grad()
def _with_small_values(model: nn.Module) -> nn.Module:
    """Gives a model on the meta device the initial values of its small tensors, such as relative position biases."""
    small: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta and parameter.numel() <= _FEW:
                on_cpu = small.setdefault(id(parameter), nn.Parameter(torch.full(parameter.shape, torch.nan, device="cpu")))
                setattr(module, name, on_cpu.requires_grad_(parameter.requires_grad))
    # an inner model initialises its own parameters
    owners = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    inits = {module: owner._init_weights for owner in owners for module in owner.modules()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module, init in reversed(inits.items()):
            getattr(module, "reset_parameters", lambda: None)()
            init(module)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta and parameter.isnan().any():  # no init above has set it
                setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad))
    return model


def _check_model(model: nn.Module) -> None:
    """Refuses what cannot follow a rule, before anything changes."""
    refuse(
        _has_adapters(model),
        "this model has adapters (LoRA, PEFT), which train beside frozen weights, and Table 1 has no row for them: "
        "parameterize and train the model without them, or merge them first (merge_and_unload)",
    )
    if not isinstance(model, PreTrainedModel):
        is_wrapped = unwrapped(model) is not model
        remedy = "parameterize first, then compile or wrap it" if is_wrapped else "use smupar.parameterize for others"
        raise ValueError(f"a {type(model).__name__} is not a model of transformers: {remedy}")
    refuse(
        getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None) is not None,
        "this model is quantized, but a rule is about floating-point weights: load the model without quantization",
    )


def _has_adapters(model: nn.Module) -> bool:
    named = any(".lora_" in f".{name}" for name, _ in model.named_parameters())
    return named or hasattr(model, "peft_config") or bool(getattr(model, "_hf_peft_config_loaded", False))


def _base_model(model: PreTrainedModel, base: int | PreTrainedConfig | nn.Module) -> nn.Module:
    if isinstance(base, nn.Module):
        return base
    config = base if isinstance(base, PreTrainedConfig) else base_config(model.config, base)
    refuse(
        config.model_type != model.config.model_type,
        f"the base's config is for a {config.model_type!r}, but the model is a {model.config.model_type!r}: they must match",
    )
    return _with_small_values(build(type(model), config))


def _other_settings(config: PreTrainedConfig, base: PreTrainedConfig) -> list[str]:
    """Lists the texts and switches that differ between two configs. The plan compares numbers that are not sizes."""
    names = {*config.to_diff_dict(), *base.to_diff_dict()} - {*_ABOUT_FILES}
    pairs = {name: (getattr(config, name, None), getattr(base, name, None)) for name in sorted(names)}
    differ = [
        f"{name} ({own!r}, base {other!r})"
        for name, (own, other) in pairs.items()
        if own != other and {type(own), type(other)} <= {str, bool} and not name.startswith("_")
    ]
    return [f"model and base may differ in widths only, but {', '.join(differ)} differ as well"] if differ else []


def _with_known_roles(model: PreTrainedModel, base: nn.Module, settings: Settings) -> Settings:
    """The settings, completed with what is known about the architecture: roles of keys and values, and a delta."""
    names = [name for name, _ in model.named_parameters()]
    hidden = {glob: "hidden" for glob in _HIDDEN if any(fnmatchcase(name, glob) for name in names)}
    roles = dict(settings.get("roles") or {})  # the first match wins, so the user's roles come first
    delta = settings.get("delta")
    config: Any = model.config
    if delta is None and getattr(base, "config", config).hidden_size == config.hidden_size:
        delta = build(type(model), base_config(config, 2 * config.hidden_size))
    return {**settings, "roles": roles | {glob: role for glob, role in hidden.items() if glob not in roles}, "delta": delta}


def _to_confirm(model: PreTrainedModel) -> str:
    return (
        f"{model.config.model_type!r} is not among the known architectures ({', '.join(FAMILIES)}), so its roles follow from "
        "shapes alone. Please confirm: 1. in print(plan), matrices inside the blocks are hidden, tables are embeddings and the "
        "head is the unembedding; 2. model and base differ in widths only, with heads of the same size; 3. nothing is left "
        "under TO DO in print(plan); 4. smupar.coord_check passes."
    )
