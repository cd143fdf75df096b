"""Facts about each known architecture of transformers. Everything else follows from shapes, as for any model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from smupar.plan.plan import Plan
from smupar.plan.settings import refuse


@dataclass(frozen=True)
class Family:
    """A family of models. Their attention modules keep the scale as ``scaling``, and the head size is the same at every
    width."""

    intermediate: str  # the config's name for the width inside an MLP
    queries: Callable[[Any], list[Tensor]]  # attention module -> views of its parameters; queries are proportional to these


def _projected(attention: Any) -> list[Tensor]:
    """The parameters that scale the queries of Llama and similar models, and of ViT. If the model normalises its queries, only
    the weight of the norm scales them."""
    return _parts(attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj)


def _gpt2(attention: Any) -> list[Tensor]:
    if attention.is_cross_attention:
        return _parts(attention.q_attn)
    # Conv1D stores its weight as (in, out), with q, k and v concatenated along the outputs.
    return [attention.c_attn.weight[:, : attention.split_size], attention.c_attn.bias[: attention.split_size]]


def _gpt_neox(attention: Any) -> list[Tensor]:
    """The parameters that scale the queries of GPT-NeoX, which stores q, k and v of each head one after the other."""
    return [part.view(-1, 3, attention.head_size, *part.shape[1:])[:, 0] for part in _parts(attention.query_key_value)]


def _parts(layer: nn.Module) -> list[Tensor]:
    return list(layer.parameters(recurse=False))


_LLAMA_LIKE = Family("intermediate_size", _projected)
FAMILIES = {  # by ``config.model_type``
    "gpt2": Family("n_inner", _gpt2),
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
    "gpt_neox": Family("intermediate_size", _gpt_neox),
    "vit": _LLAMA_LIKE,
}
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")  # attributes in which attention modules store the head size


def attentions(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Path and module of each attention that keeps its scale as ``scaling``, as all of the known families do."""
    for path, module in model.named_modules():
        if hasattr(module, "scaling") and any(hasattr(module, name) for name in _HEAD_SIZES):
            yield path, module


def head_dim(attention: Any) -> int:
    return next(int(getattr(attention, name)) for name in _HEAD_SIZES if getattr(attention, name, None))


def set_attention_scale(model: nn.Module, plan: Plan) -> None:
    """Sets the rule's scale in every attention module that stores its scale as ``scaling``."""
    every = [attention for _, attention in attentions(model)]
    refuse(
        not every,
        f"no module of this {type(model).__name__} has the fields 'scaling' and one of {', '.join(_HEAD_SIZES)}: set its "
        "attention scale to plan.attention_scale(head_dim) yourself",
    )
    for attention in every:
        scale = plan.attention_scale(head_dim(attention))
        if getattr(attention, "scale_attn_by_inverse_layer_idx", False):  # an option of GPT-2, on top of any rule
            scale /= attention.layer_idx + 1
        attention.scaling = scale
    plan.settle("attention_scale")


def base_config(config: PreTrainedConfig, width: int = 256) -> PreTrainedConfig:
    """The config of the same architecture at another width. The number of layers, the size of heads and the number of queries
    for each key stay the same. The number of heads and the width of MLPs change in proportion."""
    kind = config.model_type
    refuse(
        kind not in FAMILIES,
        f"base_config knows {', '.join(FAMILIES)}, not {kind!r}: build the base's config yourself, changing only widths "
        "(fewer heads of the same size), and pass it as parameterize(model, base=config)",
    )
    refuse(
        isinstance(width, bool) or not isinstance(width, int) or width < 1,
        f"the base width must be a positive whole number, got {width!r}",
    )
    ratio = Fraction(width, config.hidden_size)
    # A single head for keys and values stays a single head at every width.
    every = {name: getattr(config, name, None) or 1 for name in ("num_attention_heads", "num_key_value_heads")}
    counts = {name: count for name, count in every.items() if count > 1}
    unit = Fraction(config.hidden_size, math.gcd(*counts.values()) if counts else 1)
    shown = " and ".join(f"{name} {count}" for name, count in counts.items()) or "one head"
    refuse(
        Fraction(width) % unit,
        f"at width {width} the heads of this {kind} ({shown} at width {config.hidden_size}) would not be a whole number: "
        f"choose a multiple of {unit.numerator}",
    )
    base = deepcopy(config)
    inside = getattr(config, FAMILIES[kind].intermediate)
    base.hidden_size = width
    for name, count in counts.items():
        setattr(base, name, int(count * ratio))
    if inside is not None:
        setattr(base, FAMILIES[kind].intermediate, max(1, round(inside * ratio)))
    if getattr(config, "pooler_output_size", None) == config.hidden_size:
        base.pooler_output_size = width
    return base
