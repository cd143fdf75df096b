"""Finds which layers of a model correspond to which layers of its base, when their depths differ.

Models of different depth have different parameter names. A layer in a list (``blocks.7``) corresponds to a layer of the same
kind in the base's list: one with the same class and the same parameter names.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from torch import nn

from smupar.plan.globs import layer_glob
from smupar.refusals import refuse


@dataclass(frozen=True)
class Correspondence:
    """How the layers of a model correspond to those of its base. A *list* here is a list of layers, such as ``blocks``, in
    which model and base have different numbers of blocks."""

    names: Mapping[str, str]  # parameter name -> name of the base's parameter
    lists: Mapping[str, Fraction] = field(default_factory=dict)  # path of a list -> its number of blocks / the base's
    blocks: Mapping[str, Fraction] = field(default_factory=dict)  # path of a block in a list -> the same ratio
    base_blocks: frozenset[str] = frozenset()  # paths of the base's blocks in these lists
    modules: Mapping[str, str] = field(default_factory=dict)  # module path -> path of the base's module

    def m_depth(self, path: str) -> Fraction:
        """The depth multiplier of a parameter or module: the product of the ratios of all lists around it, or 1."""
        return math.prod((self.blocks[block] for block in self._blocks_around(path)), start=Fraction(1))

    def list_of(self, path: str) -> str | None:
        """The path of the innermost list around a module; None if there is none."""
        around = self._blocks_around(path)
        return around[-1].rpartition(".")[0] if around else None

    def base_block_of(self, base_path: str) -> str | None:
        """The path of the innermost block of ``base_blocks`` that is, or contains, a module of the base."""
        return next((path for path in reversed(_prefixes(base_path)) if path in self.base_blocks), None)

    def _blocks_around(self, path: str) -> list[str]:
        return [block for block in _prefixes(path) if block in self.blocks]


def _prefixes(path: str) -> list[str]:
    """``a.b`` as ["a", "a.b"]."""
    parts = path.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def correspond(model: nn.Module, base: nn.Module, base_name: str = "base") -> Correspondence:
    """Finds the layer of ``base`` for each layer of ``model``. Raises if a block has no counterpart of its kind.
    ``parameters.view_parameters`` refuses all other differences. ``base_name`` is the name of
    the base in error messages."""
    lists: dict[str, Fraction] = {}
    blocks: dict[str, Fraction] = {}
    base_blocks: set[str] = set()
    paths = {}
    waiting = [("", "")]
    while waiting:
        path, base_path = waiting.pop()
        paths[path] = base_path
        layers = dict(model.get_submodule(path).named_children())
        base_layers = dict(base.get_submodule(base_path).named_children())
        pairs = {name: name for name in layers if name in base_layers}
        if _differ_in_depth(layers, base_layers):
            pairs = _by_kind(layers, base_layers, path, base_name)
            lists[path] = Fraction(len(_blocks(layers)), len(_blocks(base_layers)))
            blocks |= {_joined(path, name): lists[path] for name in _blocks(layers)}
            base_blocks |= {_joined(base_path, name) for name in _blocks(base_layers)}
        waiting += [(_joined(path, name), _joined(base_path, other)) for name, other in pairs.items()]
    names = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        names[name] = _joined(paths[path], leaf) if path in paths else name
    return Correspondence(names, lists, blocks, frozenset(base_blocks), paths)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _blocks(layers: Mapping[str, nn.Module]) -> list[str]:
    """The layers that contain other modules. A list may also hold layers without parts, such as an embedding and a head."""
    return [name for name, layer in layers.items() if any(True for _ in layer.children())]


def _differ_in_depth(layers: Mapping[str, nn.Module], base_layers: Mapping[str, nn.Module]) -> bool:
    """Whether these are lists of layers with different numbers of blocks."""
    are_lists = all(name.isdigit() for name in (*layers, *base_layers))
    counts = len(_blocks(layers)), len(_blocks(base_layers))
    return are_lists and all(counts) and counts[0] != counts[1]


def _by_kind(
    layers: Mapping[str, nn.Module], base_layers: Mapping[str, nn.Module], path: str, base_name: str
) -> dict[str, str]:
    """Maps each layer to a layer of the base: of the same kind, and at the same relative position among the layers of this
    kind. Layers without parts are mapped only if both lists have equally many of the kind."""
    kinds, base_kinds = _kinds(layers), _kinds(base_layers)
    for kind, names in base_kinds.items():
        refuse(
            kind not in kinds and names[0] in _blocks(base_layers),
            f"{_joined(path, names[0])} of {base_name} is a {kind[0]}, and no layer of the model's {path or 'list'!r} has "
            "its class and its parameters: build both with the same kinds of layers",
        )
    order = [kind for kind, names in kinds.items() if names[0] in _blocks(layers)]
    base_order = [kind for kind in base_kinds if kind in order]
    for kind, other in zip(order, base_order, strict=False):
        refuse(
            len(order) == len(base_order) and kind != other,
            f"in {path or 'the list'!r} the model has a {kind[0]} where {base_name} has a {other[0]}: build {base_name} with "
            "the same kinds of layers in the same order",
        )
    pairs: dict[str, str] = {}
    for kind, names in kinds.items():
        same = base_kinds.get(kind, [])
        is_block = names[0] in _blocks(layers)
        refuse(
            is_block and not same,
            f"{_joined(path, names[0])} is a {kind[0]}, and no layer of {path or 'the list'!r} in {base_name} has its class "
            f"and its parameters: build {base_name} with at least one layer of every kind",
        )
        if is_block or len(same) == len(names):
            pairs |= {name: same[number * len(same) // len(names)] for number, name in enumerate(names)}
    return pairs


def _kinds(layers: Mapping[str, nn.Module]) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """Names of layers by kind: the class, and the names of the parameters."""
    names: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for name, layer in layers.items():
        leaves = tuple(dict.fromkeys(layer_glob(leaf) for leaf, _ in layer.named_parameters()))
        names[_class_name(layer), leaves].append(name)
    return names


def _class_name(layer: nn.Module) -> str:
    """The name of the class that defines the forward pass. Sharding and parametrizations put their own classes in front of
    it."""
    return next(base_class.__name__ for base_class in type(layer).__mro__ if "forward" in vars(base_class))
