"""Depth: which layers of a model correspond to which of its base, how many there are of each, and which modules end a residual
branch.

Models of different depth have different parameter names. A layer of a list (``blocks.7``) corresponds to a layer of the base's
list that is of the same kind, that is, of the same class and with the same parameter names.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from torch import nn

from smupar.plan.layers import kind_of
from smupar.plan.settings import layer_glob, match_globs, refuse
from smupar.rules import DepthRule, depth_factor


@dataclass(frozen=True)
class Correspondence:
    """How the layers of a model correspond to those of its base. Lists that are equally long in both are not named."""

    names: Mapping[str, str]  # parameter name -> name of the parameter of the base that corresponds to it
    lists: Mapping[str, Fraction] = field(default_factory=dict)  # path of a list -> its number of blocks over the base's
    blocks: Mapping[str, Fraction] = field(default_factory=dict)  # path of a block of such a list -> the same
    base_blocks: frozenset[str] = frozenset()  # paths of the blocks of such lists in the base
    modules: Mapping[str, str] = field(default_factory=dict)  # module path -> path of the base's module

    def m_depth(self, path: str) -> Fraction:
        """The depth multiplier of a parameter or module: of the list whose block it is in, or 1."""
        return math.prod((self.blocks[block] for block in self._blocks_around(path)), start=Fraction(1))

    def list_of(self, path: str) -> str | None:
        """The path of the innermost such list that a module is in."""
        around = self._blocks_around(path)
        return around[-1].rpartition(".")[0] if around else None

    def _blocks_around(self, path: str) -> list[str]:
        parts = path.split(".")
        around = (".".join(parts[:length]) for length in range(1, len(parts)))
        return [block for block in around if block in self.blocks]


def correspond(model: nn.Module, base: nn.Module, what: str = "base") -> Correspondence:
    """Finds the layer of ``base`` that each layer of ``model`` corresponds to. Raises if a block has no counterpart of its
    kind. Differences that are not of depth are left for the comparison of parameters."""
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
            pairs = _by_kind(layers, base_layers, path, what)
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
    """The layers that are made of other modules. A list may also hold single layers, such as an embedding and a head."""
    return [name for name, layer in layers.items() if any(True for _ in layer.children())]


def _differ_in_depth(layers: Mapping[str, nn.Module], base_layers: Mapping[str, nn.Module]) -> bool:
    """Whether these are two lists of layers that hold different numbers of blocks."""
    are_lists = all(name.isdigit() for name in (*layers, *base_layers))
    counts = len(_blocks(layers)), len(_blocks(base_layers))
    return are_lists and all(counts) and counts[0] != counts[1]


def _by_kind(layers: Mapping[str, nn.Module], base_layers: Mapping[str, nn.Module], path: str, what: str) -> dict[str, str]:
    """The base's layer for each layer: the one of the same kind that is as far along among its kind. Single layers of a kind
    must be equally many, or they have no counterpart."""
    kinds, base_kinds = _kinds(layers), _kinds(base_layers)
    for kind, names in base_kinds.items():
        refuse(
            kind not in kinds and names[0] in _blocks(base_layers),
            f"{_joined(path, names[0])} of {what} is a {kind[0]} whose parameters no layer of the model's "
            f"{path or 'list'!r} has: build both with the same kinds of layers",
        )
    pairs: dict[str, str] = {}
    for kind, names in kinds.items():
        same = base_kinds.get(kind, [])
        is_block = names[0] in _blocks(layers)
        refuse(
            is_block and not same,
            f"{_joined(path, names[0])} is a {kind[0]} whose parameters no layer of {path or 'the list'!r} in {what} has: "
            f"build {what} with at least one layer of every kind",
        )
        if is_block or len(same) == len(names):
            pairs |= {name: same[number * len(same) // len(names)] for number, name in enumerate(names)}
    return pairs


def _kinds(layers: Mapping[str, nn.Module]) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """Names of layers by kind: the class, and the names of the parameters."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for name, layer in layers.items():
        found[type(layer).__name__, tuple(dict.fromkeys(layer_glob(leaf) for leaf, _ in layer.named_parameters()))].append(name)
    return found


# Residual branches


def branch_factors(
    model: nn.Module, depth: Correspondence, rule: DepthRule, branches: Sequence[str] | None
) -> tuple[tuple[str, float], ...]:
    """(module path, factor on its output) of every module that ends a residual branch, in lists of layers that are longer than
    the base's. ``branches`` are the user's globs."""
    paths = [path for path, _ in model.named_modules() if path]
    chosen = {path for glob in branches or () for path in match_globs({glob: True}, paths, what="branches", among="modules")}
    if not depth.lists or rule.alpha is None:
        return ()
    shallower = [path for path, multiplier in depth.lists.items() if multiplier < 1]
    refuse(
        shallower,
        f"base has more layers in {', '.join(map(repr, shallower))} than the model: tune on a model that is not deeper than "
        "the one you train, or pass depth='none'",
    )
    refuse(branches is None, _question(model, depth))
    scaled = [path for path in paths if path in chosen and depth.m_depth(path) != 1]
    reached = {depth.list_of(path) for path in scaled}
    missing = [path or "the model" for path in depth.lists if path not in reached]
    refuse(
        missing,
        f"branches names no module in {', '.join(map(repr, missing))}, where model and base have different numbers of layers: "
        "name the modules there whose outputs are added to the residual stream",
    )
    inner = [path for path in scaled if any(path.startswith(f"{other}.") for other in scaled)]
    refuse(
        inner,
        f"branches names {', '.join(map(repr, inner[:2]))} and a module around it: its output would be divided twice; name one",
    )
    return tuple((path, depth_factor(depth.m_depth(path), rule.branch)) for path in scaled)


def _question(model: nn.Module, depth: Correspondence) -> str:
    """The error that asks for the residual branches, with a line that may settle it."""
    lists = ", ".join(f"{path!r} ({float(multiplier):g} times as many)" for path, multiplier in depth.lists.items())
    return (
        f"model and base have different numbers of layers in {lists}. Name the modules whose outputs are added to the residual "
        f"stream, so that each can be divided; if these guesses are right, pass:\n  branches={_guesses(model, depth)!r}\n"
        "If the model has no residual branches, or scales them itself, pass depth='none'."
    )


def _guesses(model: nn.Module, depth: Correspondence) -> list[str]:
    """Globs of the last linear layer of every part of a block."""
    guesses = []
    for block in depth.blocks:
        for part, module in model.get_submodule(block).named_children():
            linear = [path for path, inner in module.named_modules() if kind_of(inner).is_linear]
            guesses += [".".join(filter(None, (block.rpartition(".")[0], "*", part, path))) for path in linear[-1:]]
    return list(dict.fromkeys(guesses))
