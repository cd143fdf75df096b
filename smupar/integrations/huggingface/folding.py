"""Folds everything that a plan adds to a model into the weights of a plain model, with the same outputs.

Forward factors are multiplied into tables, heads and the ends of residual branches, and attention scales into the layers that
make the queries. Numbers that were set to the base's values are multiplied into a table or the head next to them. Several ways
to fold are tried on small inputs, to find one that leaves the outputs unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel

from smupar.integrations.huggingface.inputs import forward_passes
from smupar.model.queries import Run, acts, find_queries, is_reached, quiet
from smupar.plan.facts.layers import kind_of
from smupar.plan.forward.run_copy import Example
from smupar.plan.plan import Plan
from smupar.plan.scales.find_attention import FoundAttention, find_attentions
from smupar.plan.scales.multipliers import Multiplier, set_multiplier

TOLERANCE, EXACT = 1e-3, 1e-6  # of outputs, relative to their size: of an export, and of rounding
_EXPONENTS = (1.0, -1.0, 0.5, -0.5)  # a number may act as a factor, a divisor, or by its root


@torch.no_grad()
def folded(model: PreTrainedModel, plan: Plan, batch: Example | None = None) -> PreTrainedModel:
    """A plain model with the same outputs. The ways to fold are tried on ``batch``, too."""
    numbers = [number for number in plan.multipliers if number.is_set and "." not in number.name]
    config = _with_scales(model, plan)
    if has_two_factors(plan) or numbers:
        config.tie_word_embeddings = False
    plain = type(model)(config).eval()
    nn.Module.to(plain, model.dtype)
    # Under all names, because a tensor that is tied in one model may be untied in the other.
    tensors = {name: parameter.clone() for name, parameter in model.named_parameters(remove_duplicate=False)}
    factors = {id(model.get_submodule(path)): factor for row in plan for path, factor in row.forward}
    every = model.named_modules(remove_duplicate=False)  # one module with several names here may be several modules there
    scaled = {f"{path}.weight": factors[id(module)] for path, module in every if id(module) in factors}
    for name, parameter in plain.named_parameters():
        parameter.copy_(tensors[name] * scaled.get(name, 1.0))
    buffers = dict(model.named_buffers())
    set_here = {number.where for number in numbers}
    for name, buffer in plain.named_buffers():
        if name not in set_here:
            buffer.copy_(buffers[name])
    for number in numbers:  # the numbers keep their values of training, until they are folded one by one
        set_multiplier(plain, number.path, number.name, number.base_value)
    for path, factor in plan.branches:
        _scale_rows(plain.get_submodule(path), (), factor)
    _fold_attention(plain, plan, batch)
    for number in numbers:
        _fold_number(plain, number, batch)
    if getattr(config, "tie_word_embeddings", None) != getattr(model.config, "tie_word_embeddings", None):
        _fold_untied(model, plain, batch)
    if model.can_generate():
        plain.generation_config = deepcopy(model.generation_config)
    return plain


def has_two_factors(plan: Plan) -> bool:
    """Whether a tied table has one factor as embedding and another as head."""
    return any(len({factor for _, factor in row.forward}) > 1 for row in plan)


# Attention


def _with_scales(model: PreTrainedModel, plan: Plan) -> PreTrainedConfig:
    """A copy of the config with the plan's attention scales, where a number of the config decides the modules' fields: Gemma 2
    keeps 1 / scale^2, Granite the scale itself."""
    wanted = {(change.path, change.field): change.value for change in plan.attention if change.field}
    best = deepcopy(model.config)
    usual = _built(model, best)
    scales, sizes = _scales(usual), _sizes(usual)
    for path, name, value in _numbers(best):
        likely = [key for key in wanted if key in scales and _may_decide(value, scales[key])]
        for new in {value * (wanted[key] / scales[key]) ** exponent for key in likely for exponent in (1, -1, 2, -2)}:
            config = deepcopy(best)
            with suppress(Exception):  # configs check types, and this field may be a token id
                setattr(attrgetter(path)(config) if path else config, name, int(new) if float(new).is_integer() else new)
            built = _built(model, config)
            found = _scales(built) if _sizes(built) == sizes else {}  # fewer heads may have the right scale, too
            if _num_right(found, wanted) > _num_right(scales, wanted):
                best, scales = config, found
                break
    return best


def _numbers(config: PreTrainedConfig) -> list[tuple[str, str, float]]:
    """(path of a config inside the config, name of a field, its value) of all positive numbers."""
    parts = {"": config} | {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    every = ((path, name, value) for path, part in parts.items() for name, value in vars(part).items())
    return [entry for entry in every if type(entry[2]) in (int, float) and entry[2] > 0]


def _may_decide(value: float, scale: float) -> bool:
    return any(math.isclose(value**exponent, scale, rel_tol=1e-4) for exponent in (1, -1, 0.5, -0.5))


def _scales(built: nn.Module | None) -> dict[tuple[str, str], float]:
    """The scales in the attention fields of a model; empty if there is none."""
    found = [] if built is None else find_attentions(built)
    return {(attention.holder, attention.field): attention.value for attention in found if attention.field}


def _built(model: nn.Module, config: PreTrainedConfig) -> nn.Module | None:
    """A model with this config on the meta device; None if it cannot be built."""
    try:
        with torch.device("meta"):
            return type(model)(deepcopy(config))
    except Exception:  # a model may raise anything about a number that does not fit
        return None


def _sizes(model: nn.Module | None) -> dict[str, object]:
    """The shapes of parameters and buffers, and the whole numbers that modules keep, other than attention scales."""
    if model is None:
        return {}
    scales = _scales(model)
    sizes: dict[str, object] = {name: tensor.shape for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for path, module in model.named_modules():
        numbers = {name: value for name, value in vars(module).items() if type(value) is int and (path, name) not in scales}
        sizes |= {f"{path}.{name}": value for name, value in numbers.items()}
    return sizes


def _num_right(found: Mapping[tuple[str, str], float], wanted: Mapping[tuple[str, str], float]) -> int:
    return sum(key in found and math.isclose(found[key], value, rel_tol=1e-4) for key, value in wanted.items())


def _fold_attention(plain: PreTrainedModel, plan: Plan, batch: Example | None) -> None:
    fields = {change.path: change for change in plan.attention if change.field}
    for attention in find_attentions(plain):
        change = fields.get(attention.holder)
        if change is None:
            continue
        ratio = attention.stored(change.value) / attention.scale
        _fold_into_queries(plain, attention, ratio, forward_passes(plain, batch))
    for change in plan.attention:
        if not change.field:
            _scale_rows(plain.get_submodule(change.path), change.rows, change.value)


def _fold_into_queries(plain: PreTrainedModel, attention: FoundAttention, ratio: float, runs: Sequence[Run]) -> None:
    if ratio == 1:
        return
    queries = find_queries(plain, attention, runs)
    if queries is None and not is_reached(plain, attention, runs):
        raise ValueError(
            f"the attention scale of {attention.path!r} cannot be folded into the weights, since no forward pass that smupar "
            "knows reaches this module: pass example=, a batch for the model, to huggingface.export"
        )
    if queries is None and acts(plain, attention, runs) is None:
        return  # it makes no logits; outputs are compared in the end
    if queries is None:
        raise ValueError(
            f"the attention scale of {attention.path!r} cannot be folded into the weights: no layer of this "
            f"{type(attention.module).__name__} was found to make the queries"
        )
    for layer, rows in queries.layers:
        _scale_rows(attention.module.get_submodule(layer), rows, ratio)


def _scale_rows(layer: nn.Module, rows: tuple[tuple[int, int], ...], factor: float) -> None:
    """Multiplies some outputs of a layer, which may be a norm."""
    if isinstance(layer, nn.MultiheadAttention):  # its factor is on the queries' input, so the bias has no factor
        weight = layer.in_proj_weight if layer.in_proj_weight is not None else layer.q_proj_weight
        weight[: layer.embed_dim].mul_(factor)
        return
    out_dim = kind_of(layer).out_dim
    added = _added_to_weight(layer)
    for name, parameter in layer.named_parameters(recurse=False):
        dim = out_dim if parameter.ndim > 1 else 0
        for start, stop in rows or ((0, parameter.shape[dim]),):
            part = parameter.narrow(dim, start, stop - start)
            part.mul_(factor).add_(added * (factor - 1) if name == "weight" else 0.0)


def _added_to_weight(layer: nn.Module) -> float:
    """The number that a norm adds to its weight before it multiplies by it: 1 in Gemma and Qwen3-Next; 0 in other layers."""
    parameters = dict(layer.named_parameters())
    if any(parameter.ndim > 1 for parameter in parameters.values()) or "weight" not in parameters:
        return 0.0
    weight = parameters["weight"]
    x = torch.linspace(1, 2, weight.numel(), dtype=weight.dtype, device=weight.device)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    try:
        at_zero, at_one = (functional_call(layer, {**zeros, "weight": zeros["weight"] + value}, (x,)) for value in (0, 1))
    except Exception:  # the layer reads more than one vector
        return 0.0
    return float(at_zero.norm() / (at_one - at_zero).norm())


# Numbers that follow the width


def _fold_number(plain: PreTrainedModel, number: Multiplier, batch: Example | None) -> None:
    """Restores the usual value of a number, and multiplies a table or the head to make up for it."""
    wanted = list(outputs(plain, batch))
    set_multiplier(plain, number.path, number.name, number.value)
    found = difference(wanted, list(outputs(plain, batch)))
    best: tuple[float, Tensor | None, float] = (found, None, 1.0)  # (difference, weight to multiply, factor)
    for weight in _near(plain, number.path):
        kept = weight.clone()
        for exponent in _EXPONENTS:
            if best[0] <= EXACT:  # a number may have a small effect, which is not to be taken for none
                break
            factor = (number.base_value / number.value) ** exponent
            weight.mul_(factor)
            best = min(best, (difference(wanted, list(outputs(plain, batch))), weight, factor), key=itemgetter(0))
            weight.copy_(kept)
    left, chosen, factor = best
    if left > TOLERANCE:
        raise ValueError(
            f"{number.where!r} was set to {number.base_value:g}, and no table, no head and no layer next to it in this "
            f"{type(plain).__name__} can make up for it: share the folder that save_pretrained writes"
        )
    if chosen is not None:
        chosen.mul_(factor)


def _fold_untied(model: PreTrainedModel, plain: PreTrainedModel, batch: Example | None) -> None:
    """Some models divide logits by a power of the width only while the head is tied. Multiplies the untied head by this missing
    factor."""
    head = plain.get_output_embeddings()
    weight = getattr(head, "weight", None)
    expected, output = next(outputs(model, batch), None), next(outputs(plain, batch), None)
    if not isinstance(weight, Tensor) or expected is None or output is None or expected.shape != output.shape:
        return
    ratio = float((expected * output).sum() / output.square().sum())
    if same([expected], [ratio * output]):
        weight.mul_(ratio)


def _near(model: PreTrainedModel, path: str) -> Iterator[Tensor]:
    """The weights that may make up for a number: tables near it, the ends of the model, and layers next to it."""
    around = model.get_submodule(path)
    tables = [module for module in around.modules() if kind_of(module).is_lookup]
    layers = [module for module in around.children() if kind_of(module).is_linear]
    seen: set[int] = set()
    for module in (*tables, model.get_input_embeddings(), model.get_output_embeddings(), *layers):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and id(weight) not in seen:
            seen.add(id(weight))
            yield weight


# Comparing


def outputs(model: PreTrainedModel, batch: Example | None = None) -> Iterator[Tensor]:
    """The outputs of the model on a batch and on small inputs, and of every model inside it. Passes that need other inputs are
    left out."""
    return _outputs(model, forward_passes(model, batch))


def has_outputs(model: PreTrainedModel, batch: Example | None) -> bool:
    """Whether ``outputs`` has outputs of the whole model, and not only of models inside it."""
    whole = forward_passes(model, batch)[: 1 if batch is None else 2]
    return any(True for _ in _outputs(model, whole))


def _outputs(model: PreTrainedModel, runs: Sequence[Run]) -> Iterator[Tensor]:
    for run in runs:
        try:
            with quiet(model), torch.no_grad():
                result: Any = run()
        except Exception:  # an inner model that needs other inputs
            continue
        named = [result.get("logits"), result.get("last_hidden_state"), result.get("logits_per_text")]
        values = [value for value in named if value is not None] or list(result.values())
        yield from (value.float() for value in values if isinstance(value, Tensor) and value.is_floating_point())


def same(expected: list[Tensor], found: list[Tensor], tolerance: float = TOLERANCE) -> bool:
    return difference(expected, found) <= tolerance


def difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference between outputs, relative to the largest entry of each."""
    if len(expected) != len(found):
        return math.inf
    pairs = zip(expected, found, strict=True)
    return max((float((a - b).abs().max()) / max(float(a.abs().max()), 1e-6) for a, b in pairs), default=0.0)
