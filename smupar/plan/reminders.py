"""Reminders of what only the user can set, because no hook reaches it, and a probe that sees whether the attention scale is
set."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from smupar.plan.roles import ParamRole
from smupar.rules import Rule

REMINDERS = ("attention_scale", "output_factor", "input_factor")  # ``Plan.settle`` takes these names

_ATTENTION = re.compile(r"att(ention|n)|qkv|query|q_proj|(^|_)(to_)?w?q$", re.IGNORECASE)
_SCALES = ("scale", "scaling", "softmax_scale", "attention_scale", "attn_scale")
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head")


def make_reminders(
    model: nn.Module, roles: list[ParamRole], rule: Rule, output_factor: float, input_factor: float
) -> dict[str, str]:
    """Maps each reminder to what the user must do, for everything that the user must set under this rule."""
    about_output = _about_factor(
        roles,
        "unembedding",
        output_factor,
        "no layer of {} could be scaled:",
        "no module that makes the outputs was found. If the model computes them itself (F.linear with the embedding),",
        f"multiply its logits by plan.output_factor = {output_factor:g}, in training and evaluation; "
        "then plan.settle('output_factor').",
    )
    about_input = _about_factor(
        roles,
        "embedding",
        input_factor,
        "{} belongs to no layer that could be scaled: multiply what the model reads from it by",
        "no layer that reads the inputs was found, so no hook applies this factor: multiply the embedded inputs by",
        f"alpha_input = {input_factor:g}; then plan.settle('input_factor').",
    )
    texts = (_about_attention(model, rule), about_output, about_input)
    return {name: text for name, text in zip(REMINDERS, texts, strict=True) if text}


def attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Paths and modules that look like attention, or a part of it, by their names."""
    for path, module in model.named_modules():
        if _ATTENTION.search(path.rpartition(".")[2]) or _ATTENTION.search(type(module).__name__):
            yield path, module


def _about_attention(model: nn.Module, rule: Rule) -> str:
    if rule.attention_exponent != -1 or not any(attentions(model)):
        return ""
    return (
        "attention logits are q.k / d_head under this rule: set your model's scale to plan.attention_scale(head_dim), then "
        "plan.settle('attention_scale'). If the scale cannot be set (nn.MultiheadAttention) and head_dim is the same at every "
        "width, settle the reminder as well."
    )


def _about_factor(roles: list[ParamRole], role_name: str, factor: float, unscaled: str, absent: str, remedy: str) -> str:
    """What to do about a factor that no hook applies; "" if nothing. The text starts with ``unscaled`` if hooks miss parameters
    of this role, and with ``absent`` if the model has no such parameters."""
    missing = [role.name for role in roles if role.role == role_name and not role.uses]
    is_reached = any(use == role_name for role in roles for _, use in role.uses)
    if factor == 1 or (is_reached and not missing):
        return ""
    return f"{unscaled.format(', '.join(missing)) if missing else absent} {remedy}"


# The probe


def shows_scale(model: nn.Module, scale_of: Callable[[int], float]) -> bool:
    """Whether every attention module stores the plan's scale and its head size in attributes.

    If a module stores one of them elsewhere, the probe misses it, and the user has to settle the reminder.
    """
    seen = [f"{path}." for path, module in model.named_modules() if _shows(module, scale_of)]
    weights = [f"{path}." for path, part in attentions(model) if any(parameter.ndim > 1 for parameter in part.parameters())]
    return bool(seen) and all(any(path.startswith(other) or other.startswith(path) for other in seen) for path in weights)


def _shows(module: nn.Module, scale_of: Callable[[int], float]) -> bool:
    scale, head_dim = _number(module, _SCALES), _number(module, _HEAD_SIZES)
    if scale is None or head_dim is None or head_dim < 1:
        return False
    return math.isclose(scale, scale_of(int(head_dim)), rel_tol=1e-2)  # 16-bit buffers round the scale


def _number(module: nn.Module, names: tuple[str, ...]) -> float | None:
    values = (getattr(module, name, None) for name in names)
    numbers = (
        value for value in values if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    )
    number = next(numbers, None)
    return None if number is None or (isinstance(number, Tensor) and number.is_meta) else float(number)
