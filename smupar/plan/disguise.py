"""Numbers in a model that follow its width without being sizes: sqrt(d) after an embedding, 1 / sqrt(d) before a head.

A rule holds if such factors are the same at every width, since Table 1 has every power of the width that is needed. They are
found by comparing the model with its base: floating-point attributes, buffers of one element and fields of configs that differ.
Whole numbers that differ are sizes as a rule. They count only if the source of the forward pass takes a root or a power of
them, or divides by them.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor, nn

from smupar.plan.attention import find_attentions, numbers
from smupar.plan.settings import refuse

_ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
CHOICES = ("ask", "base", "own")


@dataclass(frozen=True)
class Multiplier:
    """A number that the forward pass may multiply by, and that follows the width."""

    path: str  # of the module
    name: str  # of its attribute; a dot leads into a config
    value: float
    base_value: float
    can_be_set: bool = True  # False if the model also uses the number as a size, or computes it from one
    is_set: bool = False  # ``parameterize`` sets it to the base's value

    @property
    def where(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")

    def __str__(self) -> str:
        return f"{self.where} = {self.value:g} (base: {self.base_value:g})"


def find_multipliers(model: nn.Module, base: nn.Module) -> list[Multiplier]:
    """All numbers of the model that differ from the base's and are not mere sizes. The scale of attention is left out: it has a
    rule of its own."""
    scales = {(attention.holder, attention.field) for attention in find_attentions(model)}
    sizes = {attention.path: attention.head_dim for attention in find_attentions(model)}
    others = dict(base.named_modules(remove_duplicate=False))
    configs: set[int] = set()
    found = []
    for path, module in model.named_modules():
        other = others.get(path)
        if other is None:
            continue
        pairs = {pair[0]: pair for pair in _powers(module, other)}
        pairs |= {pair[0]: pair for pair in (*_attributes(module, other), *_fields(module, other, configs))}
        found += [
            Multiplier(path, name, value, base_value, can_be_set)
            for name, value, base_value, can_be_set in pairs.values()
            if (path, name) not in scales and not (path in sizes and value == sizes[path])
        ]
    return found


# name, value, value in the base, whether it can be set
_Pair = tuple[str, float, float, bool]


def _attributes(module: nn.Module, other: nn.Module) -> Iterator[_Pair]:
    own, base = numbers(module), numbers(other)
    for name, value in own.items():
        base_value = base.get(name)
        if base_value is None and getattr(getattr(other, name, None), "is_meta", False):
            base_value = _as_power_of_size(value, module, other)
        if base_value is not None and _differ(value, base_value):
            yield name, value, base_value, True


def _as_power_of_size(value: float, module: nn.Module, other: nn.Module) -> float | None:
    """The value that a number has at base width, if it is a root, a multiple or the inverse of a size of the module that
    scales. It is for bases on the meta device, whose buffers have no values."""
    pairs = zip(module.parameters(), other.parameters(), strict=False)
    sizes = {sizes for own, base in pairs for sizes in zip(own.shape, base.shape, strict=False) if sizes[0] != sizes[1]}
    for size, base_size in sizes:
        for exponent in (0.5, -0.5, 1.0, -1.0):
            if math.isclose(value, size**exponent, rel_tol=1e-5):
                return float(base_size**exponent)
    return None


def _fields(module: nn.Module, other: nn.Module, seen: set[int]) -> Iterator[_Pair]:
    """Floating-point fields of configs, which models keep as attributes. A config that many modules share is read once."""
    for name, value in vars(module).items():
        config, base = _as_config(value), _as_config(getattr(other, name, None))
        if name.startswith("_") or config is None or base is None or id(value) in seen:
            continue
        seen.add(id(value))
        for field, number in config.items():
            base_number = base.get(field)
            both = isinstance(number, (int, float)) and isinstance(base_number, (int, float))
            if both and float in (type(number), type(base_number)) and "init" not in field and _differ(number, base_number):
                yield f"{name}.{field}", float(number), float(base_number), True


def _as_config(value: Any) -> Mapping[str, Any] | None:
    """The fields of a plain object that only holds settings; None for everything else."""
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value) or not hasattr(value, "__dict__"):
        return None
    return {name: field for name, field in vars(value).items() if not name.startswith("_")}


def _powers(module: nn.Module, other: nn.Module) -> Iterator[_Pair]:
    for power in powers_in_source(type(module)):
        value, base_value = _evaluated(power.expression, module), _evaluated(power.expression, other)
        if type(value) in (int, float) and type(base_value) in (int, float) and _differ(value, base_value):
            yield power.source, value, base_value, power.can_be_set


def _evaluated(node: ast.AST, root: object) -> Any:
    """The value of arithmetic with attributes of self; None if there is anything else in it."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute):
        chain = _chain(node)
        return None if chain is None else reduce(lambda owner, name: getattr(owner, name, None), chain.split("."), root)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        sides = [_evaluated(side, root) for side in (node.left, node.right)]
        if all(type(side) in (int, float) for side in sides) and sides[1]:
            return _ARITHMETIC[type(node.op)](*sides)
    return None


def _differ(value: float, other: float) -> bool:
    return not math.isclose(value, other, rel_tol=1e-5) and math.isfinite(value) and math.isfinite(other)


# The source of the forward pass


@dataclass(frozen=True)
class _Power:
    expression: ast.expr
    source: str
    can_be_set: bool  # it is an attribute of the module, and the class does nothing else with it


@cache
def powers_in_source(kind: type[nn.Module]) -> tuple[_Power, ...]:
    """Expressions of which a class takes a root or a power, or by which it divides, outside of its init."""
    methods = list(_methods(kind))
    bases = [base for method in methods for node in ast.walk(method) if (base := _base_of_power(node)) is not None]
    sources = Counter(ast.unparse(base).removeprefix("self.") for base in bases)
    anywhere = Counter(chain for method in methods for chain in _chains(method))
    return tuple(
        _Power(base, source, source.isidentifier() and anywhere[source] == sources[source])
        for source, base in {ast.unparse(base).removeprefix("self."): base for base in bases}.items()
    )


def _methods(kind: type[nn.Module]) -> Iterator[ast.AST]:
    classes = [each for each in kind.__mro__ if issubclass(each, nn.Module) and not each.__module__.startswith("torch.")]
    for each in classes:
        for name, function in vars(each).items():
            if not inspect.isfunction(function) or any(word in name for word in ("init", "reset")):
                continue
            try:
                yield ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
            except (OSError, TypeError, SyntaxError):  # typed at a prompt, or made by a decorator
                continue


def _base_of_power(node: ast.AST) -> ast.expr | None:
    """The part of an expression whose root, power or reciprocal it takes."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return node.left
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("sqrt", "rsqrt"):
        return node.args[0] if node.args else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_tensor(node.left):
        return node.right
    return None


def _is_tensor(node: ast.AST) -> bool:
    """Whether an expression has a part besides numbers and attributes of self, so that it is not arithmetic with sizes."""
    return any(isinstance(part, ast.Name) and part.id not in ("self", "math", "int", "float") for part in ast.walk(node))


def _chains(node: ast.AST) -> Iterator[str]:
    """The attributes of self in an expression, each at its full length."""
    if isinstance(node, ast.Attribute):
        chain = _chain(node)
        if chain is not None:
            yield chain
            return
    for child in ast.iter_child_nodes(node):
        yield from _chains(child)


def _chain(node: ast.Attribute) -> str | None:
    inside = node.value
    if isinstance(inside, ast.Name):
        return node.attr if inside.id == "self" else None
    outer = _chain(inside) if isinstance(inside, ast.Attribute) else None
    return None if outer is None else f"{outer}.{node.attr}"


# Putting the base's values into a model


def chosen(multipliers: list[Multiplier], choice: str) -> tuple[Multiplier, ...]:
    """What the plan records, after the user's choice."""
    refuse(choice not in CHOICES, f"multipliers must be one of {', '.join(CHOICES)}, got {choice!r}")
    return tuple(
        replace(each, is_set=choice == "base" and each.can_be_set) for each in multipliers
    )


@torch.no_grad()
def set_multiplier(model: nn.Module, path: str, name: str, value: float) -> None:
    """Writes a number into an attribute, a buffer or a config's field, in the type that is there."""
    *outer, leaf = name.split(".")
    owner: Any = model.get_submodule(path)
    for part in outer:
        owner = getattr(owner, part)
    old = getattr(owner, leaf)
    if isinstance(old, Tensor):
        old.fill_(value)
    else:
        setattr(owner, leaf, type(old)(value) if float(value).is_integer() or type(old) is float else value)
