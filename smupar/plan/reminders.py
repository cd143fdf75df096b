"""Reminds the user of what only the user can set, because hooks cannot, and checks whether the attention scale is set."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from smupar.plan.roles.infer import ParamRole
from smupar.plan.scales.find_attention import FoundAttention, find_attentions, named_like_attention
from smupar.plan.scales.multipliers import Multiplier
from smupar.rules import Rule

REMINDERS = ("attention_scale", "output_factor", "input_factor", "multipliers")  # the names that ``Plan.settle`` takes


def make_reminders(
    model: nn.Module,
    roles: list[ParamRole],
    rule: Rule,
    output_factor: float,
    input_factor: float,
    multipliers: tuple[Multiplier, ...] = (),
    unscored: tuple[str, ...] = (),
) -> dict[str, str]:
    """The reminders of a plan: name -> what the user must do."""
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
        "{} belongs to no layer that could be scaled: multiply the values that the model takes from it by",
        "no layer that reads the inputs was found, so no hook applies this factor: multiply the embedded inputs by",
        f"alpha_input = {input_factor:g}; then plan.settle('input_factor').",
    )
    texts = (_about_attention(model, rule, unscored), about_output, about_input, _about_multipliers(multipliers))
    return {name: text for name, text in zip(REMINDERS, texts, strict=True) if text}


def _about_attention(model: nn.Module, rule: Rule, unscored: tuple[str, ...]) -> str:
    if rule.attention_exponent != -1 or not any(named_like_attention(model)):
        return ""
    if unscored and all(attention.path in unscored for attention in find_attentions(model)):
        return ""
    return (
        "attention logits are q.k / d_head under this rule: smupar.set_attention_scale(model, plan, example=batch) makes them "
        "so, in the model's own field or by a factor on the queries. Or set your model's scale to "
        "plan.attention_scale(head_dim) yourself, then plan.settle('attention_scale')."
    )


def _about_multipliers(multipliers: tuple[Multiplier, ...]) -> str:
    """What to do about numbers that follow the width and were not set to the base's values; "" if there are none."""
    left = [number for number in multipliers if not number.is_set]
    if not left:
        return ""
    shown = ", ".join(map(str, left[:6])) + (f" and {len(left) - 6} more" if len(left) > 6 else "")
    stuck = [number.where for number in left if not number.can_be_set]
    by_hand = f" ({', '.join(stuck[:3])}: by hand, since the model also uses the number as a size)" if stuck else ""
    return (
        f"{shown}: these numbers follow the width but are not sizes. Table 1 holds if the model multiplies by the same numbers "
        f"at every width: pass multipliers='base' to parameterize, which sets them to the base's values{by_hand}. But a number "
        "that divides a sum over neurons must follow the width: then pass multipliers='own', or plan.settle('multipliers')."
    )


def _about_factor(roles: list[ParamRole], role_name: str, factor: float, unscaled: str, absent: str, remedy: str) -> str:
    """What to do about a factor that no hook applies; "" if hooks apply it everywhere. The text starts with ``unscaled`` if
    hooks miss some parameters of this role, and with ``absent`` if the model has no such parameters."""
    missing = [role.name for role in roles if role.role == role_name and not role.uses]
    is_reached = any(use == role_name for role in roles for _, use in role.uses)
    if factor == 1 or (is_reached and not missing):
        return ""
    return f"{unscaled.format(', '.join(missing)) if missing else absent} {remedy}"


# Is the attention scale set?


def shows_scale(model: nn.Module, scale_of: Callable[[int], float]) -> bool:
    """Whether the attributes of every attention module show a head size, and the plan's scale for it.

    If a module keeps the head size or the scale elsewhere, the answer is False, and the user has to settle the reminder.
    """
    attentions = find_attentions(model)
    return bool(attentions) and all(is_scaled(attention, scale_of) for attention in attentions)


def is_scaled(attention: FoundAttention, scale_of: Callable[[int], float]) -> bool:
    if attention.head_dim is None or not attention.field:
        return False
    return math.isclose(attention.scale, scale_of(attention.head_dim), rel_tol=1e-2)  # 16-bit buffers round the scale
