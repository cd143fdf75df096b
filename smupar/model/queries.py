"""Watches an attention module while it runs. This shows whether its scale field has an effect, which outputs of which layers
are its queries, and by which number it multiplies q.k.

A forward pass is watched from the start of the module to its first softmax. ``scaled_dot_product_attention`` counts as a
softmax. To find the queries, the outputs of the module's layers are replaced by noise, and become leaves of the autograd graph,
as do the module's inputs. Derivatives of the logits then tell what a leaf is: a query has an effect on logits with different
keys. The mixed derivative of s * q.k by a query's and a key's entries is s times a rotation, or s times the identity. So its
rows have the length s, in whatever notation and at whatever place the model multiplies by s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from smupar.plan.facts.layers import channel_dim
from smupar.plan.scales.find_attention import FoundAttention
from smupar.plan.scales.multipliers import set_multiplier

_SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)
_MASKED = 1e4  # attention masks add large negative numbers
_ROUNDING = 1e-5  # derivatives that cancel leave rounding errors of this size, relative to the largest
_NUM_ROWS = 8  # rows of the mixed derivative that are compared
Run = Callable[[], Any]
Ranges = tuple[tuple[int, int], ...]
Leaf = tuple[str, int]  # path of a layer inside the attention, and the number of its call; "" for the module's inputs
Elements = dict[Leaf, Tensor]  # marks entries of leaves


@dataclass(frozen=True)
class Queries:
    """Where an attention's queries come from."""

    layers: tuple[tuple[str, Ranges], ...]  # paths inside the attention, and ranges of outputs; no ranges if all are queries
    head_dim: int
    scale: float  # the number by which the model multiplies q.k


@dataclass
class _Seen:
    """What was seen in one attention module."""

    logits: Tensor | None = None  # before the softmax, with the keys in the last dimension
    leaves: dict[Leaf, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)  # what the module returns, without what comes through the logits


@dataclass(frozen=True)
class _Cut:
    """How the outputs of layers are replaced: noise from a seed, times the factors of some layers' outputs."""

    seed: int = 0
    factors: Mapping[str, Tensor] = field(default_factory=dict)


class _Watch(TorchFunctionMode):
    """Keeps the logits of the first softmax that runs while ``inside`` is set. With a ``cut``, outputs become leaves."""

    def __init__(self, cut: _Cut | None = None) -> None:
        super().__init__()
        self.cut = cut
        self.inside, self.seen = False, _Seen()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_fused = func is F.scaled_dot_product_attention
        if not self.inside or self.seen.logits is not None or not (is_fused or func in _SOFTMAXES):
            return func(*args, **kwargs)
        self.seen.logits = _fused_logits(*args, **kwargs) if is_fused else _keys_last(*args, **kwargs)
        if self.cut is None:
            return func(*args, **kwargs)
        # What follows depends on the queries only if the model uses them for more than logits.
        name = "query" if is_fused else "input"
        return func(args[0].detach(), *args[1:], **kwargs) if args else func(**{**kwargs, name: kwargs[name].detach()})

    def leaf(self, layer: str, value: Any, channels: int = -1) -> Any:
        """Makes the output of a layer, or an input of the module, a leaf, if it comes before the softmax."""
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        if self.cut is None or self.seen.logits is not None or not is_floating:
            return value
        number = sum(name == layer for name, _ in self.seen.leaves)
        cut = value.detach()
        if layer:
            rng = torch.Generator().manual_seed(1000 * self.cut.seed + len(self.seen.leaves))
            cut = torch.randn(cut.shape, generator=rng).to(cut)
        self.seen.leaves[layer, number] = cut.requires_grad_()
        factor = self.cut.factors.get(layer)
        return cut if factor is None else (cut.transpose(channels, -1) * factor.to(cut)).transpose(channels, -1)


def _fused_logits(query: Tensor, key: Tensor, *_: Any, scale: float | None = None, **__: Any) -> Tensor:
    if key.ndim > 2 and key.shape[-3] != query.shape[-3]:  # several queries for each key
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    return (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)


def _keys_last(input: Tensor, dim: int | None = -1, *_: Any, **__: Any) -> Tensor:  # noqa: A002  # torch's name
    return input.movedim(-1 if dim is None else dim, -1)


def acts(model: nn.Module, attention: FoundAttention, runs: Sequence[Run]) -> bool | None:
    """Whether changing the field changes the attention's logits; None if no forward pass could be watched.
    A second pass that cannot be watched counts as changed."""
    before = _watched(model, attention, runs)
    if before is None or before.logits is None:
        return None
    with field_set(model, attention, 2 * attention.value):
        after = _watched(model, attention, runs)
    return after is None or after.logits is None or not torch.equal(before.logits, after.logits)


def is_reached(model: nn.Module, attention: FoundAttention, runs: Sequence[Run]) -> bool:
    """Whether some forward pass runs the attention module."""
    calls: list[nn.Module] = []
    handle = attention.module.register_forward_pre_hook(lambda module, _: calls.append(module))
    for run in runs:
        with quiet(model), torch.no_grad(), suppress(Exception):
            run()
    handle.remove()
    return bool(calls)


@contextmanager
def field_set(model: nn.Module, attention: FoundAttention, value: float) -> Iterator[None]:
    """Sets the attention's field for a while."""
    set_multiplier(model, attention.holder, attention.field, value)
    try:
        yield
    finally:
        set_multiplier(model, attention.holder, attention.field, attention.value)


# Finding the queries


@torch.enable_grad()
def find_queries(model: nn.Module, attention: FoundAttention, runs: Sequence[Run]) -> Queries | None:
    """The layers whose outputs are the attention's queries. None if there are none, or if a factor on these outputs would do
    anything else than multiply q.k."""
    # One derivative of a query may happen to be small, but hardly with two different noises.
    views = [_view(_watched(model, attention, runs, _Cut(seed))) for seed in (0, 1)]
    if any(view is None for view in views):
        return None
    first, second = (view for view in views if view is not None)
    queries, head = (_either(here, other) for here, other in zip(first.queries, second.queries, strict=True))
    marked = _outputs(attention.module, queries)
    if not marked or not _multiplies_only_logits(model, attention, runs, first.seen, queries, marked):
        return None
    one_head = {leaf: elements & queries[leaf] for leaf, elements in head.items() if leaf in queries}
    scale = _scale(first, one_head)
    if scale is None:
        return None
    sizes = {int(elements.sum()) for elements in one_head.values() if elements.any()}
    if len(sizes) != 1:  # a head that is a concatenation of several layers' outputs
        return None
    size = sizes.pop()
    layers = tuple((layer, () if rows.all() else _ranges(rows)) for layer, rows in marked.items())
    return Queries(layers, size, size**-0.5 if math.isclose(scale, size**-0.5, rel_tol=1e-2) else scale)


@dataclass(frozen=True)
class _View:
    """The logits of the last query with a few keys. Logits are subtracted from each other, since a model may subtract a number
    from all logits of a query."""

    seen: _Seen
    logit: Tensor  # of the first head, or the difference of two logits
    num_keys: int  # 2 if it is a difference
    queries: tuple[Elements, Elements]  # the entries of leaves on which logits with different keys depend; of all heads, of one


def _view(seen: _Seen | None) -> _View | None:
    if seen is None or seen.logits is None or seen.logits.ndim < 2 or not seen.logits.requires_grad:
        return None
    logits = seen.logits[..., -1, :]
    is_seen = (logits.detach().abs() < _MASKED).flatten(0, -2).all(0)
    visible = is_seen.nonzero().flatten().tolist()
    others = [key for key in visible if key != seen.logits.shape[-2] - 1]  # the last position's key may be its query, too
    keys = others if len(others) > 1 else visible
    if len(keys) < 2:
        return None
    groups = [keys[:2], keys[2:4]] if len(keys) >= 4 else [keys[:1], keys[1:2]]
    values = [logits[..., group[0]] - (logits[..., group[1]] if len(group) > 1 else 0) for group in groups]
    of_all = [_large(_derivatives(_noisy(value), seen.leaves)) for value in values]
    of_one = [_large(_derivatives(value.flatten()[0], seen.leaves)) for value in values]
    both = tuple({leaf: here[leaf] & other[leaf] for leaf in here} for here, other in (of_all, of_one))
    return _View(seen, values[0].flatten()[0], len(groups[0]), (both[0], both[1]))


def _either(here: Elements, other: Elements) -> Elements:
    """What one of two runs marks, without the module's inputs, and without leaves that have no mark."""
    both = {leaf: elements | other.get(leaf, elements) for leaf, elements in here.items() if leaf[0]}
    return {leaf: elements for leaf, elements in both.items() if elements.any()}


def _outputs(module: nn.Module, queries: Elements) -> dict[str, Tensor]:
    """The marked outputs of each layer."""
    marked: dict[str, Tensor] = {}
    for (layer, _), elements in queries.items():
        rows = elements.transpose(channel_dim(module.get_submodule(layer)), -1).flatten(0, -2).any(0)
        marked[layer] = marked.get(layer, torch.zeros_like(rows)) | rows
    return marked


def _scale(view: _View, one_head: Elements) -> float | None:
    """The number by which q.k is multiplied, if the mixed derivatives of a logit show one."""
    slopes = _derivatives(view.logit, view.seen.leaves, again=True)
    lengths = []
    for leaf, elements in one_head.items():
        chosen = elements.flatten().nonzero().flatten()
        for place in chosen[:: max(1, len(chosen) // _NUM_ROWS)].tolist():
            row = _derivatives(slopes[leaf].flatten()[place], view.seen.leaves)
            # A query may meet the sum of a key and a position, which have the same derivative.
            lengths.append(max(float(part.double().norm()) for part in row.values()) / math.sqrt(view.num_keys))
    if not lengths or not min(lengths) > 0 or max(lengths) / min(lengths) > 1.02:
        return None
    return sum(lengths) / len(lengths)


def _multiplies_only_logits(
    model: nn.Module,
    attention: FoundAttention,
    runs: Sequence[Run],
    seen: _Seen,
    queries: Elements,
    marked: Mapping[str, Tensor],
) -> bool:
    """Whether a factor on the marked outputs multiplies q.k and nothing else: logits are linear in the factor; at 0 they do not
    depend on the keys; and the outputs reach nothing but the logits."""
    factors = [{layer: torch.where(rows, factor, 1.0) for layer, rows in marked.items()} for factor in (0.0, 2.0)]
    zero, two = (_watched(model, attention, runs, _Cut(factors=cut_factors)) for cut_factors in factors)
    if seen.logits is None or zero is None or zero.logits is None or two is None or two.logits is None:
        return False
    three = [zero.logits, seen.logits, two.logits]
    usable = torch.stack([logits.detach().abs() < _MASKED for logits in three]).all(0)
    # A model may subtract each query's largest logit.
    at_zero, once, twice = (_relative(logits, usable) for logits in three)
    tolerance = max(1e-4, 4 * torch.finfo(once.dtype).eps) * float(once.detach().abs().max())
    if not torch.allclose((once - at_zero).detach(), (twice - once).detach(), rtol=1e-3, atol=tolerance):
        return False
    slopes = _derivatives(_noisy(once), seen.leaves, again=True)
    if not all(slopes[leaf].requires_grad for leaf in queries):
        return False  # the logits do not depend on any key
    of_queries = torch.stack([_noisy(slopes[leaf] * elements) for leaf, elements in queries.items()]).sum()
    keys = _large(_derivatives(of_queries, seen.leaves))
    left = _derivatives(_noisy(at_zero), zero.leaves)
    largest = max(float(slope.detach().abs().max()) for slope in slopes.values())
    if any((left[leaf] * elements).abs().max() > 1e-3 * largest for leaf, elements in keys.items()):
        return False
    elsewhere = torch.stack([torch.zeros(()), *(_noisy(output).float().cpu() for output in seen.outputs)]).sum()
    slopes = _derivatives(elsewhere, seen.leaves)
    return not any((slopes[leaf] * elements).any() for leaf, elements in queries.items())


def _relative(logits: Tensor, usable: Tensor) -> Tensor:
    """Subtracts each query's first usable logit from its others. Masked logits become 0."""
    logits = logits.masked_fill(~usable, 0.0)
    return (logits - logits.gather(-1, usable.int().argmax(-1, keepdim=True))).masked_fill(~usable, 0.0)


def _noisy(values: Tensor) -> Tensor:
    """A sum with weights, so that terms do not cancel."""
    rng = torch.Generator().manual_seed(0)
    return (values * (1 + torch.rand(values.shape, generator=rng).to(values))).sum()


def _derivatives(value: Tensor, leaves: Mapping[Leaf, Tensor], *, again: bool = False) -> dict[Leaf, Tensor]:
    """The derivatives of a number by all leaves. ``again``: they will be differentiated again."""
    if not value.requires_grad:
        return {leaf: torch.zeros_like(tensor) for leaf, tensor in leaves.items()}
    found = torch.autograd.grad(value, [*leaves.values()], allow_unused=True, retain_graph=True, create_graph=again)
    pairs = zip(leaves.items(), found, strict=True)
    return {leaf: torch.zeros_like(tensor) if slope is None else slope for (leaf, tensor), slope in pairs}


def _large(slopes: Mapping[Leaf, Tensor]) -> Elements:
    """Marks the entries of leaves on which a value depends."""
    largest = max((float(slope.abs().max()) for slope in slopes.values() if slope.numel()), default=0.0)
    return {leaf: slope.detach().abs() > _ROUNDING * largest for leaf, slope in slopes.items()}


def _ranges(rows: Tensor) -> Ranges:
    ends = torch.diff(rows.int().cpu(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    return tuple(zip(ends.eq(1).nonzero().flatten().tolist(), ends.eq(-1).nonzero().flatten().tolist(), strict=True))


# Watching


def _watched(model: nn.Module, attention: FoundAttention, runs: Sequence[Run], cut: _Cut | None = None) -> _Seen | None:
    """What was seen in the first run that reaches the softmax of the module; None if no run does."""
    for run in runs:
        watch = _Watch(cut)
        with quiet(model), _hooks(attention.module, watch), suppress(Exception), watch:
            run()
        if watch.seen.logits is not None:
            return watch.seen
    return None


@contextmanager
def _hooks(core: nn.Module, watch: _Watch) -> Iterator[None]:
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch.inside = True
        cut = {name: watch.leaf("", value) for name, value in kwargs.items()}
        return tuple(watch.leaf("", value) for value in args), cut

    def leave(_: nn.Module, args: object, output: Any) -> None:
        watch.inside = False
        parts = output if isinstance(output, (tuple, list)) else [output]
        tensors = [part for part in parts if isinstance(part, Tensor) and part.requires_grad]
        watch.seen.outputs = watch.seen.outputs or tensors

    def cut(name: str, channels: int) -> Callable[..., Any]:
        return lambda _, args, output: watch.leaf(name, output, channels) if watch.inside else output

    layers = [(name, part) for name, part in core.named_modules() if name and _has_parameters(part)]
    handles = [core.register_forward_pre_hook(enter, with_kwargs=True), core.register_forward_hook(leave)]
    handles += [part.register_forward_hook(cut(name, channel_dim(part))) for name, part in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _has_parameters(module: nn.Module) -> bool:
    return is_parametrized(module) or any(True for _ in module.parameters(recurse=False))


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Switches to evaluation mode, and restores the modes and the random state afterwards. Whether gradients are recorded does
    not change."""
    modes = {module: module.training for module in model.modules()}
    grad = torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad()
    try:
        model.eval()
        with torch.random.fork_rng(), grad:
            yield
    finally:
        for module, training in modes.items():
            module.training = training
