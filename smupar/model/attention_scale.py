"""``set_attention_scale`` gives every attention module the scale of its rule.

Most attention modules keep the scale in a field. If a module has no such field, or if the field has no effect, its queries are
multiplied by a factor instead. The plan records what was changed, so that ``attach`` can repeat it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smupar.model.queries import Queries, acts, field_set, find_queries
from smupar.plan.facts.layers import channel_dim
from smupar.plan.notes import Note
from smupar.plan.plan import Plan, PlanWarning
from smupar.plan.reminders import is_scaled
from smupar.plan.scales.find_attention import AttentionChange, FoundAttention, find_attentions
from smupar.plan.scales.multipliers import set_multiplier
from smupar.rules import SP

QUERY_FACTOR = "smupar_query_factor"
Run = Callable[[], Any]


def set_attention_scale(model: nn.Module, plan: Plan, example: Any = None) -> None:
    """Gives every attention module the rule's scale, in its own field or by a factor on its queries, and settles the reminder.

    example   arguments for the model: a mapping of keyword arguments, a tuple of arguments, or one tensor. With it, forward
              passes show whether the field of an attention has an effect, and which layer makes its queries.

    If the scale of some attention cannot be set, a warning and the reminder name it.
    """
    set_scales(model, plan, [] if example is None else [lambda: call(model, example)])


def call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


@torch.no_grad()
def set_scales(model: nn.Module, plan: Plan, runs: Sequence[Run]) -> None:
    """Does the work of ``set_attention_scale``. Each of ``runs`` is a forward pass. An attention module may run in one pass and
    not in another."""
    attentions = find_attentions(model) if plan.rule != SP.name else []
    scored = [attention for attention in attentions if attention.path not in plan.unscored]
    known = {change.path for change in plan.attention}
    fresh = [attention for attention in scored if attention.path not in known and attention.holder not in known]
    left: list[FoundAttention] = []
    changes: list[AttentionChange] = []
    for alike in _kinds(fresh).values():
        changes_for = _way_to_scale(model, alike[0], plan, runs)
        for attention in alike:
            found = [] if changes_for is None else changes_for(attention)
            left += [] if found else [attention]
            changes += [change for change in found if change.path not in {earlier.path for earlier in changes}]
    replaced = [old for old in fresh if old not in left and old.field and not _is_usual(old, plan)]
    if replaced:
        fields = ", ".join(sorted({f"{type(old.module).__name__}.{old.field} = {old.value:g}" for old in replaced}))
        plan.notes.append(Note("attention", f"the rule's attention scale replaces the model's own: {fields}", False))
    plan.attention += changes
    apply_attention(model, plan)
    if not left:
        plan.settle("attention_scale")
        return
    plan.pending["attention_scale"] = (
        f"the scale of {_named(left)} could not be set: smupar found no field there that has an effect, and no layer whose "
        "outputs are the queries and nothing else. Make the model multiply q.k by plan.attention_scale(head_dim), then "
        "plan.settle('attention_scale')."
    )
    warnings.warn(f"not set yet: attention_scale: {plan.pending['attention_scale']}", PlanWarning, stacklevel=4)


def apply_attention(model: nn.Module, plan: Plan) -> None:
    """Puts the scales that the plan records into a model. Scales that are in place do not change."""
    for change in plan.attention:
        module = model.get_submodule(change.path)
        if change.field:
            set_multiplier(model, change.path, change.field, change.value)
        else:
            _scale_queries_of(module, change)


# Deciding


def _kinds(attentions: Sequence[FoundAttention]) -> dict[tuple[object, ...], list[FoundAttention]]:
    """Groups attention modules of the same structure. Only one module of each group is tested."""
    kinds: dict[tuple[object, ...], list[FoundAttention]] = {}
    for attention in attentions:
        shapes = tuple(tuple(parameter.shape) for parameter in attention.module.parameters())
        kinds.setdefault((type(attention.module), attention.field, attention.head_dim, shapes), []).append(attention)
    return kinds


def _way_to_scale(
    model: nn.Module, attention: FoundAttention, plan: Plan, runs: Sequence[Run]
) -> Callable[[FoundAttention], list[AttentionChange]] | None:
    """A function from an attention module of this structure to the changes that set its scale; None if there is no way."""
    if isinstance(attention.module, nn.MultiheadAttention):
        factor = plan.attention_scale(attention.module.head_dim) * math.sqrt(attention.module.head_dim)
        return lambda alike: [AttentionChange(alike.path, "", factor)]
    if attention.field and attention.head_dim is not None and acts(model, attention, runs) is not False:
        scale = plan.attention_scale(attention.head_dim)
        if _gives(model, attention, scale, runs):
            return lambda alike: [AttentionChange(alike.holder, alike.field, alike.stored(_for_layer(alike, scale)))]
    queries = find_queries(model, attention, runs)
    return None if queries is None else lambda alike: _factors_on_queries(alike, queries, plan)


def _gives(model: nn.Module, attention: FoundAttention, scale: float, runs: Sequence[Run]) -> bool:
    """Whether the model multiplies q.k by this scale if the field says so. Other numbers may multiply q.k as well, or heads may
    have another size than attributes show. What cannot be watched is taken on trust."""
    scale = _for_layer(attention, scale)
    with field_set(model, attention, attention.stored(scale)):
        found = find_queries(model, attention, runs)
    return found is None or (found.head_dim == attention.head_dim and math.isclose(found.scale, scale, rel_tol=2e-2))


def _for_layer(attention: FoundAttention, scale: float) -> float:
    """The scale of one layer. GPT-2 has an option that also divides it by the number of the layer, under any rule."""
    module: Any = attention.module
    return scale / (module.layer_idx + 1) if getattr(module, "scale_attn_by_inverse_layer_idx", False) else scale


def _factors_on_queries(attention: FoundAttention, queries: Queries, plan: Plan) -> list[AttentionChange]:
    factor = plan.attention_scale(queries.head_dim) / queries.scale
    return [AttentionChange(f"{attention.path}.{layer}".lstrip("."), "", factor, rows) for layer, rows in queries.layers]


def _is_usual(attention: FoundAttention, plan: Plan) -> bool:
    """Whether the field held the usual scale 1 / sqrt(head size), a scale by layer, or the rule's scale."""
    size = attention.head_dim
    usual = size is not None and math.isclose(attention.scale, size**-0.5, rel_tol=1e-2)
    by_layer = getattr(attention.module, "scale_attn_by_inverse_layer_idx", False)
    return usual or by_layer or is_scaled(attention, plan.attention_scale)


def _named(attentions: Sequence[FoundAttention]) -> str:
    kinds: dict[str, list[str]] = {}
    for attention in attentions:
        kinds.setdefault(type(attention.module).__name__, []).append(attention.path)
    return ", ".join(f"{kind} ({paths[0]!r}{', ...' if len(paths) > 1 else ''})" for kind, paths in kinds.items())


# The factor on queries


def _scale_queries_of(module: nn.Module, change: AttentionChange) -> None:
    tensor = next(module.parameters())
    factor = torch.tensor(change.value, device=tensor.device)
    if change.rows:
        size = max(stop for _, stop in change.rows)
        factor = torch.ones(max(size, _num_outputs(module)), device=tensor.device)
        for start, stop in change.rows:
            factor[start:stop] = change.value
    module.register_buffer(QUERY_FACTOR, factor, persistent=False)
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if _scale_output in hooks or _scale_query_input in hooks:
        return
    if isinstance(module, nn.MultiheadAttention):
        module.register_forward_pre_hook(_scale_query_input, with_kwargs=True)
    else:
        module.register_forward_hook(_scale_output)


def _num_outputs(module: nn.Module) -> int:
    bias, weight = getattr(module, "bias", None), getattr(module, "weight", None)
    sizes: Tensor | None = bias if isinstance(bias, Tensor) else weight
    is_transposed = hasattr(module, "nf")  # transformers' Conv1D stores (in, out)
    return 0 if sizes is None else int(sizes.shape[-1 if is_transposed else 0])


def _scale_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    factor, channels = getattr(module, QUERY_FACTOR).to(output.dtype), channel_dim(module)
    return output * factor if not factor.ndim else (output.transpose(channels, -1) * factor).transpose(channels, -1)


def _scale_query_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Scales the query input of an nn.MultiheadAttention, whose query weights belong to no layer. The bias is not scaled."""
    factor = getattr(module, QUERY_FACTOR)
    if args:
        return (args[0] * factor.to(args[0].dtype), *args[1:]), kwargs
    return args, {**kwargs, "query": kwargs["query"] * factor.to(kwargs["query"].dtype)}
