"""Reads in the source of a module what its forward pass does with the module's own numbers, without running it."""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce
from threading import Lock
from tokenize import TokenError
from typing import Any

from torch import nn

# Python 3.11 may raise a SystemError if two threads parse at once, and models of a stack are planned by several threads.
_PARSING = Lock()
_ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class PowerInSource:
    """An expression of which the source takes a root or a power, or by which it divides."""

    expression: ast.expr
    source: str  # the expression without "self."
    can_be_set: bool  # whether it is an attribute that the class uses for nothing else


def powers_in_source(module: nn.Module) -> tuple[PowerInSource, ...]:
    """The expressions of which a module takes a root or a power, or by which it divides, outside of its init."""
    kind: Any = type(module)
    return _powers(kind)


def may_read(module: nn.Module, name: str) -> bool:
    """Whether the forward pass of a module may read a field of this name, of its config or of any other object. The source that
    runs when the module is made does not count, since sizes are computed there."""
    kind: Any = type(module)
    mentioned = _mentioned(kind)
    return mentioned is None or name in mentioned


def divides_by(module: nn.Module, name: str) -> bool:
    """Whether a module divides by one of its attributes."""
    kind: Any = type(module)
    return _divides(kind, name)


@cache
def _powers(kind: Any) -> tuple[PowerInSource, ...]:
    methods = list(_methods(kind))
    bases = [base for method in methods for base in _bases(method)]
    sources = Counter(ast.unparse(base).removeprefix("self.") for base in bases)
    anywhere = Counter(chain for method in methods for chain in _chains(method))
    return tuple(
        PowerInSource(base, source, source.isidentifier() and anywhere[source] == sources[source])
        for source, base in {ast.unparse(base).removeprefix("self."): base for base in bases}.items()
    )


@cache
def _mentioned(kind: Any) -> frozenset[str] | None:
    """Names of attributes, and texts, in the methods of a class and in the functions that they call; None if some source is not
    known."""
    sources = [_parsed(function) for function in _functions(kind)]
    if None in sources:
        return None
    methods = [method for method in sources if method is not None]
    called = {
        node.func.id
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    around = [vars(inspect.getmodule(base)) for base in kind.__mro__ if issubclass(base, nn.Module) and inspect.getmodule(base)]
    helpers = [names[name] for names in around for name in called if inspect.isfunction(names.get(name))]
    methods += [parsed for parsed in map(_parsed, helpers) if parsed is not None]
    nodes = [node for method in methods for node in ast.walk(method)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return frozenset(texts | {node.attr for node in nodes if isinstance(node, ast.Attribute)})


def _methods(kind: type[nn.Module]) -> Iterator[ast.AST]:
    """The parsed methods of a module's class and its base classes, without those that only run when the module is made."""
    return (parsed for parsed in map(_parsed, _functions(kind)) if parsed is not None)


def _functions(kind: type[nn.Module]) -> list[Any]:
    """The methods of a module's class and its base classes, without torch's own. Inits are left out, as are methods that only
    inits call."""
    classes = [base for base in kind.__mro__ if issubclass(base, nn.Module) and not base.__module__.startswith("torch.")]
    methods = {(base, name): method for base in classes for name, method in vars(base).items() if inspect.isfunction(method)}
    inits = {place for place in methods if any(word in place[1] for word in ("init", "reset"))}
    called = {place: _called(method) for place, method in methods.items()}
    at_start = frozenset[str]().union(*(called[place] for place in inits))
    later = frozenset[str]().union(*(names for place, names in called.items() if place not in inits and place[1] not in names))
    return [
        method for place, method in methods.items() if place not in inits and place[1] not in at_start - later - {"forward"}
    ]


def _called(method: Any) -> frozenset[str]:
    """Names of the methods that a method calls."""
    parsed = _parsed(method)
    calls = [] if parsed is None else [node.func for node in ast.walk(parsed) if isinstance(node, ast.Call)]
    return frozenset(call.attr for call in calls if isinstance(call, ast.Attribute))


@cache
def _parsed(function: Any) -> ast.AST | None:
    """The source of a function; None if it was typed at a prompt, or made by a decorator."""
    try:
        with _PARSING:
            return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError, TokenError):
        return None


def _bases(method: ast.AST) -> Iterator[ast.expr]:
    """The expressions in a method of which it takes a root or a power, or by which it divides. The end n of a range is left out
    if the range is divided by n, because ``arange(n) / n`` runs from 0 to 1 at every width."""
    ranges: dict[str, set[str]] = {}  # source of the end of a range -> names of the variables that hold such a range
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            for end in _ends_of_ranges(node.value):
                ranges.setdefault(end, set()).add(node.targets[0].id)
    for node in ast.walk(method):
        base = _base_of_power(node)
        if base is None:
            continue
        if isinstance(node, ast.BinOp) and _is_quotient(node):
            names = {part.id for part in ast.walk(node.left) if isinstance(part, ast.Name)}
            end = ast.unparse(base)
            if names & ranges.get(end, set()) or end in _ends_of_ranges(node.left):
                continue
        yield base


def _ends_of_ranges(node: ast.AST) -> set[str]:
    """The sources of all arguments of calls of arange in an expression."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    ranges = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) in ("arange", "range")]
    return {ast.unparse(argument) for call in ranges for argument in call.args}


def _base_of_power(node: ast.AST) -> ast.expr | None:
    """The inner expression, if the expression is a root, a power or a reciprocal."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return node.left
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("sqrt", "rsqrt"):
        return node.args[0] if node.args else None
    return node.right if isinstance(node, ast.BinOp) and _is_quotient(node) else None


def _is_quotient(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_tensor(node.left)


def _is_tensor(node: ast.AST) -> bool:
    """Whether an expression contains local variables. Arithmetic with sizes contains only numbers and attributes of self."""
    return any(isinstance(part, ast.Name) and part.id not in ("self", "math", "int", "float") for part in ast.walk(node))


def _chains(node: ast.AST) -> Iterator[str]:
    """The attributes of self in an expression, with dots for attributes of attributes: ``config.scale``."""
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


@cache
def _divides(kind: Any, name: str) -> bool:
    quotients = (node for method in _methods(kind) for node in ast.walk(method) if _is_quotient(node))
    return any(name in _chains(node.right) for node in quotients if isinstance(node, ast.BinOp))


def evaluated(node: ast.AST, root: object) -> Any:
    """The value of arithmetic with attributes of self; None for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute):
        chain = _chain(node)
        return None if chain is None else reduce(lambda owner, name: getattr(owner, name, None), chain.split("."), root)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        sides = [evaluated(side, root) for side in (node.left, node.right)]
        if all(type(side) in (int, float) for side in sides) and sides[1]:
            return _ARITHMETIC[type(node.op)](*sides)
    return None
