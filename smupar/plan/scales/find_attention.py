"""Finds a model's attention modules and the fields that hold the scale of ``q.k``, by names and numbers alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from smupar.plan.scales.source import divides_by

# Names of attention modules and of their parts.
_ATTENTION = re.compile(r"att(ention|n)|qkv|query|q_proj|(^|_)(to_)?w?q$", re.IGNORECASE)
# Names of layers and parameters that make queries, alone or together with keys and values.
_QUERIES = re.compile(r"query|qkv|c_attn|in_proj_weight|(^|_)(to_)?w?q(_[ab])?(_lin|_proj|_proj_weight)?$", re.IGNORECASE)
_SCALES = ("scale", "scaling", "softmax_scale", "attention_scale", "attn_scale", "inv_norm_factor")
# Further names of fields that may hold the scale, if the number is a power of the head size.
_MAY_SCALE = re.compile(r"scal|norm|temper", re.IGNORECASE)
# Scales of rotary positions and dropout rates are not attention scales, even if they have the same value.
_NOT_SCALES = re.compile(r"rope|rotary|freq|theta|attention_scaling|drop|eps|init|softcap|_clip", re.IGNORECASE)
_HEAD_SIZES = (
    "qk_head_dim",
    "head_dim",
    "head_size",
    "attention_head_size",
    "key_value_proj_dim",
    "d_head",
    "dim_head",
    "d_kv",
    "attention_hidden_size_per_head",
)
_WIDTHS = ("all_head_size", "embed_dim", "inner_dim", "hidden_size", "d_model", "dim", "width", "n_embd")
_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")


@dataclass(frozen=True)
class FoundAttention:
    """An attention module, with the scale of ``q.k`` that its attributes show."""

    path: str
    module: nn.Module
    head_dim: int | None  # None if no attribute shows it
    holder: str = ""  # path of the module that has the field
    field: str = ""  # the attribute that holds the scale; "" if none was found
    divides: bool = False  # True if q.k is divided by the field, as in GPT-J
    value: float = math.nan

    @property
    def scale(self) -> float:
        """The number by which q.k is multiplied, according to the attributes; NaN if they do not show it."""
        return 1 / self.value if self.divides else self.value

    def stored(self, scale: float) -> float:
        """The value of the field that multiplies q.k by ``scale``."""
        return 1 / scale if self.divides else scale


@dataclass(frozen=True)
class AttentionChange:
    """One change that gives an attention module its scale: a value for a field, or a factor on the queries."""

    path: str  # path of the module with the field, or of the layer that makes the queries
    field: str  # "" if the queries are multiplied instead
    value: float  # value of the field, or factor on the queries
    rows: tuple[tuple[int, int], ...] = ()  # ranges of the layer's outputs that are queries; empty if all are


def named_like_attention(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Paths and modules whose names look like attention or a part of it."""
    for path, module in model.named_modules():
        if _ATTENTION.search(path.rpartition(".")[2]) or _ATTENTION.search(type(module).__name__):
            yield path, module


def find_attentions(model: nn.Module) -> list[FoundAttention]:
    """Every module that makes queries, and every other module that has matrices and is named like attention."""
    cores = {path: module for path, module in model.named_modules() if _makes_queries(module)}
    for path, module in named_like_attention(model):
        related = any(is_inside(path, core) or is_inside(core, path) for core in cores)
        if not related and any(parameter.ndim > 1 for parameter in module.parameters()):
            cores[path] = module
    modules = dict(model.named_modules())
    return [_attention(path, modules) for path in modules if path in cores]


def is_inside(path: str, other: str) -> bool:
    return not other or path == other or path.startswith(f"{other}.")


def _makes_queries(module: nn.Module) -> bool:
    parts = [name for name, child in module.named_children() if any(p.ndim > 1 for p in child.parameters())]
    parts += [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim > 1]
    return any(_QUERIES.search(name) for name in parts)


def _attention(path: str, modules: dict[str, nn.Module]) -> FoundAttention:
    """Describes one attention module. The scale may be a field of the module, of a part of it, or of its parent. A parent
    counts only if it shows the head size as well."""
    size = head_size(modules[path])
    parts = [name for name in modules if path and is_inside(name, path)]
    sizes = {name: head_size(modules[name]) or size for name in parts or [path]}
    if path:
        around = path.rpartition(".")[0]
        sizes |= {around: parent_size} if (parent_size := head_size(modules[around])) is not None else {}
    for name, head_dim in sizes.items():
        field = _field(modules[name], head_dim)
        if field is not None:
            return FoundAttention(path, modules[path], head_dim, name, *field)
    return FoundAttention(path, modules[path], size)


def head_size(module: nn.Module) -> int | None:
    """The size of a head, if the module's attributes show it."""
    for name in _HEAD_SIZES:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    widths = [getattr(module, name, None) for name in _WIDTHS]
    heads = [getattr(module, name, None) for name in _NUM_HEADS]
    for width in (value for value in widths if isinstance(value, int)):
        for number in (value for value in heads if isinstance(value, int) and value > 0):
            if width % number == 0:
                return width // number
    return None


def _field(module: nn.Module, size: int | None) -> tuple[str, bool, float] | None:
    """(attribute that holds the scale, whether q.k is divided by it, its value).

    An attribute whose value is a power of the head size takes precedence over an attribute that only has a fitting name. q.k is
    divided by the attribute if the module's source divides by it, or if it is a power of the head size above 1.
    """
    whole = {name: float(value) for name, value in vars(module).items() if type(value) is int and name in _SCALES}
    candidates = {name: value for name, value in (numbers(module) | whole).items() if not _NOT_SCALES.search(name)}
    powers = [size**exponent for exponent in (-0.5, -1.0, 0.5, 1.0)] if size is not None and size > 1 else []
    likely = [
        name
        for name, value in candidates.items()
        if _MAY_SCALE.search(name) and any(math.isclose(value, power, rel_tol=1e-2) for power in powers)
    ]
    named = [name for name in _SCALES if candidates.get(name, 0) > 0]
    name = next(iter((*likely, *named)), None)
    if name is None:
        return None
    return name, divides_by(module, name) or (name in likely and candidates[name] > 1), candidates[name]


def numbers(module: nn.Module) -> dict[str, float]:
    """The module's own attributes and buffers that hold a single floating-point number, without those on the meta device."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, float)}
    tensors = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    tensors |= dict(module.named_buffers(recurse=False))
    known = {
        name: float(value)
        for name, value in tensors.items()
        if value.numel() == 1 and value.is_floating_point() and not value.is_meta
    }
    return {name: value for name, value in (plain | known).items() if not name.startswith("_")}
