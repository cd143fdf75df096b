"""Makes a model of transformers follow a rule: roles, masks, init, factors, and the attention scale in the model's own
field."""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from typing import Any, Unpack

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from smupar.integrations.huggingface.families import FAMILIES, Family, attentions, base_config, set_attention_scale
from smupar.integrations.huggingface.folders import keep_plan
from smupar.model import parameterize as apply
from smupar.plan.make import Settings
from smupar.plan.plan import Plan, PlanWarning
from smupar.plan.settings import refuse

# If the number of key and value heads is the same at every width, these matrices have the shape of readouts.
_HIDDEN = ("*.k_proj.weight", "*.v_proj.weight")


def parameterize(
    model: PreTrainedModel,
    *,
    base: int | PreTrainedConfig | nn.Module = 256,
    reset: bool | None = None,
    **settings: Unpack[Settings],
) -> Plan:
    """``smupar.parameterize`` for a model of transformers. It also sets the attention scale, and lets ``save_pretrained`` save
    the plan. Weight matrices get a fresh init.

    base      width at which hyperparameters were tuned, or the config or model of that width
    settings  settings of ``smupar.parameterize``

    GPT-2, Llama, Mistral, Qwen2, Qwen3, GPT-NeoX and ViT are known. For other architectures, give a config or a model as base;
    a warning says what to confirm.
    """
    _check_model(model)
    family = FAMILIES.get(model.config.model_type)
    narrow = _base_model(model, base)
    if family is None:
        warnings.warn(_to_confirm(model), PlanWarning, stacklevel=2)
    else:
        _check_attention(model, family)
        settings = _with_known_roles(model, narrow, settings)
    if origin := getattr(model, "name_or_path", ""):
        warnings.warn(
            f"the weights that were loaded from {origin!r} are replaced by a fresh init: a rule is about training from scratch",
            PlanWarning,
            stacklevel=2,
        )
    plan = apply.parameterize(model, base=narrow, reset=reset, **settings)
    if family is not None:
        set_attention_scale(model, plan)
    keep_plan(model, plan)
    return plan


def build(kind: type[nn.Module], config: PreTrainedConfig) -> nn.Module:
    """Builds a model on the meta device, without values."""
    with torch.device("meta"):
        return kind(config)


def _check_model(model: nn.Module) -> None:
    """Refuses what cannot follow a rule, before anything changes."""
    refuse(
        _has_adapters(model),
        "this model has adapters (LoRA, PEFT), which train beside frozen weights, and no row of Table 1 is about them: "
        "parameterize and train the model without them, or merge them first (merge_and_unload)",
    )
    if not isinstance(model, PreTrainedModel):
        is_wrapped = apply.unwrapped(model) is not model
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
    return build(type(model), config)


def _check_attention(model: PreTrainedModel, family: Family) -> None:
    try:
        queries = [family.queries(attention) for _, attention in attentions(model)]
    except AttributeError:  # some earlier versions use other names inside
        queries = []
    refuse(
        not queries,
        f"the attention of this {model.config.model_type} is not what current versions of transformers have, which store its "
        f"scale as 'scaling' (this is {transformers.__version__}): update transformers, or, for a copy of your own, use "
        "smupar.parameterize and set the attention scale yourself",
    )


def _with_known_roles(model: PreTrainedModel, base: nn.Module, settings: Settings) -> Settings:
    """The settings, completed by what is known about the architecture: roles of keys and values, and a delta."""
    names = [name for name, _ in model.named_parameters()]
    hidden = {glob: "hidden" for glob in _HIDDEN if any(fnmatchcase(name, glob) for name in names)}
    roles = dict(settings.get("roles") or {})  # the first match wins, so the user's roles come first
    delta = settings.get("delta")
    config: Any = model.config
    if delta is None and getattr(base, "config", config).hidden_size == config.hidden_size:
        delta = build(type(model), base_config(config, 2 * config.hidden_size))
    return {**settings, "roles": roles | {glob: role for glob, role in hidden.items() if glob not in roles}, "delta": delta}


def _to_confirm(model: PreTrainedModel) -> str:
    kind = model.config.model_type
    scales = sorted(
        {
            f"{type(module).__name__}.{name}"
            for module in model.modules()
            for name, value in vars(module).items()
            if "scal" in name and isinstance(value, float)
        }
    )
    where = f"; it may be {', '.join(scales[:4])}" if scales else ""
    return (
        f"{kind!r} is not among the known architectures ({', '.join(FAMILIES)}), so its roles follow from shapes alone. "
        "Please confirm: 1. in print(plan), matrices inside the blocks are hidden, tables are embeddings and the head is the "
        "unembedding; 2. model and base differ in widths only, with heads of the same size; 3. set the attention scale to "
        f"plan.attention_scale(head_dim) where the model has it{where} (set_attention_scale sets fields called 'scaling'); "
        "4. smupar.coord_check passes."
    )
