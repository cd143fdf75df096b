"""Finds the modules that end residual branches, and the factor by which a depth rule multiplies each branch.

A residual block computes ``x + branch(x)``. A module ends a branch if its output is added to x, the residual stream.

The user names these modules, or a forward pass of the base shows them. A model may already scale its branches by depth. It is
refused, or its own factors are set to the base's, so that depth is not counted twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from statistics import median
from typing import Any

import torch
from torch import nn

from smupar.plan.depth.correspondence import Correspondence
from smupar.plan.facts.layers import kind_of
from smupar.plan.forward.run_copy import CannotRunError, Example
from smupar.plan.forward.uses import Usage
from smupar.plan.forward.watcher import watch
from smupar.plan.globs import layer_glob, match_globs
from smupar.plan.notes import Note
from smupar.plan.scales.multipliers import Multiplier, as_config
from smupar.refusals import refuse
from smupar.rules import DepthRule, depth_factor

_CLOSE = 0.04  # ratios that differ by a smaller share count as equal


def branch_factors(
    model: nn.Module,
    base: nn.Module,
    depth: Correspondence,
    rule: DepthRule,
    branches: Sequence[str] | None,
    example: Example | None = None,
) -> tuple[tuple[str, float], ...]:
    """(module path, factor on its output) for every module that ends a residual branch. Only the lists of layers that are
    longer than in the base count. ``branches`` are the user's globs; without them the example's forward pass shows the
    branches."""
    paths = [path for path, _ in model.named_modules() if path]
    chosen = {path for glob in branches or () for path in match_globs({glob: True}, paths, setting="branches", among="modules")}
    if rule.alpha is None:
        return ()
    if not depth.lists:
        _refuse_repeated_layers(model, base, depth)
        return ()
    shallower = [path for path, multiplier in depth.lists.items() if multiplier < 1]
    refuse(
        shallower,
        f"base has more layers in {', '.join(map(repr, shallower))} than the model: tune on a model that is not deeper than "
        "the one you train, or pass depth='none'",
    )
    usage, reason = _usage_of(base, example)
    if branches is None:
        chosen = _inferred(model, base, depth, usage) if usage else set()
        refuse(not chosen, _question(model, depth, reason))
    scaled = [path for path in paths if path in chosen and depth.m_depth(path) != 1]
    _refuse_gaps(depth, scaled)
    if branches is not None and usage is not None and usage.residuals:
        _refuse_not_added(depth, scaled, usage)
    return tuple((path, depth_factor(depth.m_depth(path), rule.branch)) for path in scaled)


def _refuse_repeated_layers(model: nn.Module, base: nn.Module, depth: Correspondence) -> None:
    """Refuses a model whose attributes count more layers than the base's, although no list of layers is longer. Its layers may
    share their weights."""
    for path, base_path in depth.modules.items():
        base_counts = _counts(base.get_submodule(base_path))
        for name, count in _counts(model.get_submodule(path)).items():
            where, base_count = f"{path}.{name}" if path else name, base_counts.get(name, count)
            refuse(
                count != base_count,
                f"{where} is {count} in the model and {base_count} in the base, but no list of layers is longer, so layers may "
                "share their weights: build the base with as many layers, or pass depth='none' to leave the depth alone",
            )


_COUNTS_LAYERS = re.compile(r"(n|num)_?(\w+_)?(layers?|blocks?|repeats?)|depth|layers|repeats")


def _counts(module: nn.Module) -> dict[str, int]:
    """Whole numbers that seem to count layers, among a module's attributes and in its configs."""
    found: dict[str, Any] = dict(vars(module))
    configs = {name: config for name, value in vars(module).items() if (config := as_config(value)) is not None}
    found |= {f"{name}.{field}": value for name, config in configs.items() for field, value in config.items()}
    numbers = {name: value for name, value in found.items() if type(value) is int}
    return {name: value for name, value in numbers.items() if _COUNTS_LAYERS.fullmatch(name.rpartition(".")[2])}


def _refuse_gaps(depth: Correspondence, scaled: list[str]) -> None:
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


# What a forward pass shows


def _usage_of(base: nn.Module, example: Example | None) -> tuple[Usage | None, str]:
    """The record of a forward pass of the base. If there is none: None, and the reason."""
    if example is None:
        return None, "pass example=, a batch for the model, and a forward pass will show them"
    try:
        return watch(base, example, scaling={name: () for name, _ in base.named_parameters()}, reads={}), ""
    except CannotRunError as error:
        return None, f"the example could not be run through base ({error})"


def _inferred(model: nn.Module, base: nn.Module, depth: Correspondence, usage: Usage) -> set[str]:
    """The modules of the model that correspond to ends of branches in the base."""
    ends = _ends(depth, base, usage)
    return {path for path, _ in model.named_modules() if depth.modules.get(path) in ends}


def _ends(depth: Correspondence, base: nn.Module, usage: Usage) -> set[str]:
    """The modules of the base that end residual branches, in the lists of layers whose length differs. The set is empty if some
    branch is not the output of modules in its own block."""
    by_block: dict[str, set[str]] = {block: set() for block in depth.base_blocks}
    for residual in usage.residuals:
        inside = {depth.base_block_of(end) for end in residual.ends} - {None}
        if not inside and depth.base_block_of(residual.path) is None:
            continue  # the sum is outside these lists
        if len(inside) != 1 or any(depth.base_block_of(end) is None for end in residual.ends):
            return set()
        by_block[str(*inside)] |= set(residual.ends)
    # In the first block of a ResNet's stage a projection replaces x, so the pass shows no residual sum. The branch of that
    # block ends at the same modules as in the other blocks.
    for block, ends in by_block.items():
        block_ends = ends or set(_ends_as_in_others(block, by_block, base))
        if not block_ends:
            return set()
        by_block[block] = block_ends
    return set().union(*by_block.values())


def _ends_as_in_others(block: str, by_block: dict[str, set[str]], base: nn.Module) -> Iterator[str]:
    """The modules of a block with the same name and class as a module that ends a branch in another block of the list."""
    modules, parent = dict(base.named_modules(remove_duplicate=False)), block.rpartition(".")[0]
    for other, ends in by_block.items():
        for end in ends if other.rpartition(".")[0] == parent else ():
            path = block + end.removeprefix(other)
            if path in modules and type(modules[path]) is type(modules[end]):
                yield path


def _refuse_not_added(depth: Correspondence, scaled: list[str], usage: Usage) -> None:
    """Refuses modules whose outputs are not added to anything in the example's forward pass."""
    added = {end for residual in usage.residuals for end in residual.ends}
    wrong = [path for path in scaled if not usage.same.get(depth.modules[path], {depth.modules[path]}) <= added]
    blocks = {end: depth.base_block_of(end) for end in sorted(added)}
    ends = dict.fromkeys(_glob(end, block) for end, block in blocks.items() if block is not None)
    sums = dict.fromkeys(layer_glob(residual.path) for residual in usage.residuals)
    remedy = (
        f"these are:\n  branches={list(ends)!r}"
        if ends
        else f"the sums in {', '.join(map(repr, sums))} add values that are not the output of a module: compute them in a "
        "module of their own, or pass depth='none'"
    )
    refuse(
        wrong,
        f"branches names {wrong[0] if wrong else ''!r}, whose output the example's forward pass does not add to a residual "
        f"stream; {remedy}",
    )


def _glob(path: str, block: str) -> str:
    """The glob that matches a module of a block in every block of the list."""
    return f"{block.rpartition('.')[0]}.*{path.removeprefix(block)}".lstrip(".")


# Asking


def _question(model: nn.Module, depth: Correspondence, reason: str) -> str:
    """The error that asks for the residual branches. It suggests a line to paste."""
    lists = ", ".join(f"{path!r} ({float(multiplier):g} times as many)" for path, multiplier in depth.lists.items())
    return (
        f"model and base have different numbers of layers in {lists}. Name the modules whose outputs are added to the residual "
        f"stream, so that each can be divided; if these guesses are right, pass:\n  branches={_guesses(model, depth)!r}\n"
        "If the model has no residual branches, or scales them itself, pass depth='none'."
        f" The modules were not inferred: {reason or 'in some block, what is added is not the output of modules of the block'}."
    )


def _guesses(model: nn.Module, depth: Correspondence) -> list[str]:
    """Globs for the last linear layer in each child of a block."""
    guesses = []
    for block in depth.blocks:
        for part, module in model.get_submodule(block).named_children():
            linear = [path for path, inner in module.named_modules() if kind_of(inner).is_linear]
            guesses += [".".join(filter(None, (block.rpartition(".")[0], "*", part, path))) for path in linear[-1:]]
    return list(dict.fromkeys(guesses))


# A model that scales its branches itself


def refuse_scaled_twice(
    multipliers: Sequence[Multiplier], depth: Correspondence, branches: tuple[tuple[str, float], ...], choice: str
) -> None:
    """Refuses a model whose own factors follow its depth, unless they get the base's values."""
    own = [number for number in multipliers if branches and _follows(number, depth.m_depth(number.path))]
    left = [number for number in own if choice != "base" or not number.can_be_set]
    remedy = (
        "pass multipliers='base' to hold it at the base's depth"
        if all(number.can_be_set for number in left)
        else "compute this number from the base's depth in the model, since smupar cannot set it"
    )
    refuse(
        left,
        f"{left[0] if left else ''} follows the depth: the model scales its branches itself, and the depth rule would do so a "
        f"second time. Either {remedy}, or pass depth='none' to leave the branches to the model",
    )


def _follows(multiplier: Multiplier, m_depth: Fraction) -> bool:
    """Whether a number in a block follows the depth. Its ratio to the base's number is then m_depth or sqrt(m_depth), or the
    inverse of one of these."""
    if m_depth == 1 or multiplier.base_value == 0:
        return False
    ratio = abs(multiplier.value / multiplier.base_value)
    return any(math.isclose(ratio, float(m_depth) ** power, rel_tol=1e-3) for power in (-1, -0.5, 0.5, 1))


def own_init(model: nn.Module, depth: Correspondence, branches: tuple[tuple[str, float], ...]) -> Iterator[Note]:
    """Notes on ends of branches whose initial weights are smaller than others of their block. The ratio is 1 / sqrt(2 depth),
    as in GPT-2, or 1 / sqrt(depth). The plan draws these weights without this ratio."""
    for path in depth.lists:
        blocks = [block for block in depth.blocks if block.rpartition(".")[0] == path]
        ends = [end for end, _ in branches if end.startswith(f"{blocks[0]}.")]
        inside = {
            name: _spread(module)
            for name, module in model.get_submodule(blocks[0]).named_modules()
            if kind_of(module).is_linear and _has_values(module)
        }
        others = [spread for name, spread in inside.items() if f"{blocks[0]}.{name}" not in ends]
        for end in ends:
            spread = inside.get(end.removeprefix(f"{blocks[0]}."))
            if spread is None or not others:
                continue
            ratios = [spread[kind] / (median(other[kind] for other in others) or 1.0) for kind in (0, 1)]
            usual = (1 / math.sqrt(2 * len(blocks)), 1 / math.sqrt(len(blocks)))
            for_depth = any(_is_close(ratio, factor) for ratio in ratios for factor in usual)
            if for_depth and not any(_is_close(ratio, 1.0) for ratio in ratios):
                text = (
                    f"{_glob(end, blocks[0])!r} starts {min(ratios):.3g} times as large as other weights of its block, which "
                    "is the model's own factor for its depth: the plan omits this factor, since the plan divides the branch"
                )
                yield Note("own init", text, False)


def _is_close(ratio: float, value: float) -> bool:
    return abs(ratio / value - 1) < _CLOSE


def _has_values(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and not weight.is_meta and weight.ndim == 2 and bool(weight.numel() > 1)


def _spread(module: nn.Module) -> tuple[float, float]:
    """The standard deviation of a layer's weights, and this number times the square root of the fan-in."""
    weight = module.get_parameter("weight").detach().float()
    std, num_in = float(weight.std()), weight.shape[1]
    return std, std * math.sqrt(num_in)
