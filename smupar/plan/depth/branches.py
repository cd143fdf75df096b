"""Residual branches: finds the modules whose outputs are added to the residual stream, and the factor that a depth rule gives
each.

The user names these modules, or a forward pass of the base shows them. Models that already scale their branches by depth are
refused or reset, so that depth is not counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from statistics import median

import torch
from torch import nn

from smupar.plan.depth.correspondence import Correspondence, correspond
from smupar.plan.facts.layers import kind_of
from smupar.plan.forward.run import CannotRunError, Example
from smupar.plan.forward.uses import Usage
from smupar.plan.forward.watcher import watch
from smupar.plan.notes import Note
from smupar.plan.scales.multipliers import Multiplier
from smupar.plan.settings import layer_glob, match_globs, refuse
from smupar.rules import DepthRule, depth_factor

_CLOSE = 0.04  # factors that differ by less are taken to be equal


def branch_factors(
    model: nn.Module,
    base: nn.Module,
    depth: Correspondence,
    rule: DepthRule,
    branches: Sequence[str] | None,
    example: Example | None = None,
) -> tuple[tuple[str, float], ...]:
    """(module path, factor on its output) for every module that ends a residual branch, in lists of layers that are longer than
    in the base. ``branches`` are the user's globs; without them the example's forward pass shows the branches."""
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
    usage, why = _seen(base, example)
    if branches is None:
        chosen = _inferred(model, base, depth, usage) if usage else set()
        refuse(not chosen, _question(model, depth, why))
    scaled = [path for path in paths if path in chosen and depth.m_depth(path) != 1]
    _refuse_gaps(depth, scaled)
    if branches is not None and usage is not None and usage.residuals:
        _refuse_not_added(depth, scaled, usage)
    return tuple((path, depth_factor(depth.m_depth(path), rule.branch)) for path in scaled)


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


def _seen(base: nn.Module, example: Example | None) -> tuple[Usage | None, str]:
    """What a forward pass of the base shows; or None, and the reason."""
    if example is None:
        return None, "pass example=, a batch for the model, and a forward pass will show them"
    try:
        return watch(base, example, scaling={name: () for name, _ in base.named_parameters()}, reads={}), ""
    except CannotRunError as error:
        return None, f"the example could not be run through base ({error})"


def find_branches(model: nn.Module, base: nn.Module, example: Example) -> list[str] | None:
    """The modules that end residual branches where model and base differ in depth; None if a forward pass does not show
    them."""
    depth = correspond(model, base)
    usage, _ = _seen(base, example)
    return sorted(_inferred(model, base, depth, usage)) or None if usage and depth.lists else None


def _inferred(model: nn.Module, base: nn.Module, depth: Correspondence, usage: Usage) -> set[str]:
    """The modules of the model that correspond to ends of branches in the base."""
    ends = _ends(depth, base, usage)
    return {path for path, _ in model.named_modules() if depth.modules.get(path) in ends}


def _ends(depth: Correspondence, base: nn.Module, usage: Usage) -> set[str]:
    """The modules of the base that end residual branches, in the lists whose length differs. Empty if some branch is not the
    output of modules in its own block."""
    by_block: dict[str, set[str]] = {block: set() for block in depth.base_blocks}
    for residual in usage.residuals:
        inside = {depth.base_block_of(end) for end in residual.ends} - {None}
        if not inside and depth.base_block_of(residual.path) is None:
            continue  # outside these lists
        if len(inside) != 1 or any(depth.base_block_of(end) is None for end in residual.ends):
            return set()
        by_block[str(*inside)] |= set(residual.ends)
    # In the first block of a ResNet's stage a projection replaces x, so no residual is seen. Its branch ends as in the other
    # blocks.
    for block, ends in by_block.items():
        found = ends or set(_as_in_others(block, by_block, base))
        if not found:
            return set()
        by_block[block] = found
    return set().union(*by_block.values())


def _as_in_others(block: str, by_block: dict[str, set[str]], base: nn.Module) -> Iterator[str]:
    """The modules of a block with the same name and class as modules that end branches in other blocks of its list."""
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
        else f"what the sums in {', '.join(map(repr, sums))} add is not the output of a module: compute it in a module of its "
        "own, or pass depth='none'"
    )
    refuse(
        wrong,
        f"branches names {wrong[0] if wrong else ''!r}, whose output the example's forward pass does not add to a residual "
        f"stream; {remedy}",
    )


def _glob(path: str, block: str) -> str:
    """The glob for a module of a block, in all blocks of its list."""
    return f"{block.rpartition('.')[0]}.*{path.removeprefix(block)}".lstrip(".")


# Asking


def _question(model: nn.Module, depth: Correspondence, why: str) -> str:
    """The error that asks for the residual branches, with a line to paste that may be right."""
    lists = ", ".join(f"{path!r} ({float(multiplier):g} times as many)" for path, multiplier in depth.lists.items())
    return (
        f"model and base have different numbers of layers in {lists}. Name the modules whose outputs are added to the residual "
        f"stream, so that each can be divided; if these guesses are right, pass:\n  branches={_guesses(model, depth)!r}\n"
        "If the model has no residual branches, or scales them itself, pass depth='none'."
        f" They were not inferred: {why or 'what is added is not always the output of modules inside the block'}."
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
    own = [each for each in multipliers if branches and _follows(each, depth.m_depth(each.path))]
    left = [each for each in own if choice != "base" or not each.can_be_set]
    remedy = (
        "pass multipliers='base' to hold it at the base's depth"
        if all(each.can_be_set for each in left)
        else "build the model with the base's depth there, since it cannot be set from outside"
    )
    refuse(
        left,
        f"{left[0] if left else ''} follows the depth: the model scales its branches itself, and the depth rule would do so a "
        f"second time. Either {remedy}, or pass depth='none' to leave the branches to the model",
    )


def _follows(multiplier: Multiplier, m_depth: Fraction) -> bool:
    """Whether a number in a block follows the depth: its ratio to the base's is m_depth to the power 1/2 or 1, or the
    inverse."""
    if m_depth == 1 or multiplier.base_value == 0:
        return False
    ratio = abs(multiplier.value / multiplier.base_value)
    return any(math.isclose(ratio, float(m_depth) ** power, rel_tol=1e-3) for power in (-1, -0.5, 0.5, 1))


def own_init(model: nn.Module, depth: Correspondence, branches: tuple[tuple[str, float], ...]) -> Iterator[Note]:
    """A note for each module that ends branches with smaller initial weights, by 1 / sqrt(2 depth) as in GPT-2 or by 1 /
    sqrt(depth). The plan draws them without that factor."""
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
            if not any(_is(ratio, 1.0) for ratio in ratios) and any(_is(ratio, own) for ratio in ratios for own in usual):
                text = (
                    f"{_glob(end, blocks[0])!r} starts {min(ratios):.3g} times as large as other weights of its block, by a "
                    "factor for the model's own depth: the plan draws it without that factor, since it divides the branch"
                )
                yield Note("own init", text, False)


def _is(ratio: float, value: float) -> bool:
    return abs(ratio / value - 1) < _CLOSE


def _has_values(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and not weight.is_meta and weight.ndim == 2 and bool(weight.numel() > 1)


def _spread(module: nn.Module) -> tuple[float, float]:
    """The standard deviation of a layer's weights, and that times the square root of the fan-in."""
    weight = module.get_parameter("weight").detach().float()
    std, num_in = float(weight.std()), weight.shape[1]
    return std, std * math.sqrt(num_in)
