"""Watches an attention module while it runs. This shows whether its scale field has an effect, and which outputs of which layer
are its queries.

A forward pass is watched from the start of the module to its first softmax. ``scaled_dot_product_attention`` counts as a
softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from smupar.plan.scales.find_attention import FoundAttention
from smupar.plan.scales.multipliers import set_multiplier

_SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
Run = Callable[[], Any]


@dataclass(frozen=True)
class Queries:
    """Where an attention's queries come from."""

    layer: str  # path of the layer inside the attention
    rows: tuple[tuple[int, int], ...]  # ranges of its outputs; empty if all are queries
    head_dim: int
    scale: float  # the number by which the model multiplies q.k; NaN if unknown


@dataclass
class _Seen:
    """What was seen in one attention module. ``signal`` holds the logits before the softmax, or queries times scale if torch
    computes logits and softmax in one operation."""

    signal: Tensor | None = None
    is_fused: bool = False
    head_dim: int = 0
    scale: float = math.nan  # known only for fused attention
    product: Tensor | None = None  # q.k before scaling
    called: list[str] = field(default_factory=list)  # layers that ran before the softmax


class _Watch(TorchFunctionMode):
    """Records the first softmax that runs while ``inside`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.seen = False, _Seen()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.inside or self.seen.signal is not None:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            scale = kwargs.get("scale")
            scale = query.shape[-1] ** -0.5 if scale is None else float(torch.as_tensor(scale).detach())
            self.seen.is_fused, self.seen.head_dim, self.seen.scale = True, query.shape[-1], scale
            self.seen.signal = query * scale
        elif func in _SOFTMAXES:
            self.seen.signal = args[0] if args else kwargs["input"]
        output = func(*args, **kwargs)
        if func in _PRODUCTS and self.seen.signal is None:
            self.seen.product, self.seen.head_dim = output, args[0].shape[-1]
        return output


def acts(model: nn.Module, attention: FoundAttention, runs: Sequence[Run]) -> bool | None:
    """Whether changing the field changes the attention's logits; None if no forward pass could be watched.
    A second pass that cannot be watched counts as changed."""
    before = _watched(model, attention, runs)
    if before is None or before.signal is None:
        return None
    set_multiplier(model, attention.holder, attention.field, 2 * attention.value)
    try:
        after = _watched(model, attention, runs)
    finally:
        set_multiplier(model, attention.holder, attention.field, attention.value)
    return after is None or after.signal is None or not torch.equal(before.signal, after.signal)


def find_queries(model: nn.Module, attention: FoundAttention, runs: Sequence[Run]) -> Queries | None:
    """The last layer of the attention whose outputs are queries: the logits grow linearly with all or a part of these
    outputs."""
    seen = _watched(model, attention, runs)
    if seen is None or seen.signal is None:
        return None
    for layer in reversed(seen.called):
        rows = _rows(model, attention, layer, runs)
        if rows is None or not rows.any():
            continue
        scale = _scale_if_linear(model, attention, layer, rows, runs)
        if scale is not None:
            size = seen.head_dim
            return Queries(layer, () if rows.all() else _ranges(rows), size, scale)
    return None


def _rows(model: nn.Module, attention: FoundAttention, layer: str, runs: Sequence[Run]) -> Tensor | None:
    """Marks the layer's outputs that are queries. An output is a query if, at the last position, it changes the logits between
    that position and earlier keys.

    These logits do not depend on the key of the last position. Differences of logits are used, since a model may subtract a
    number from all of them.
    """
    outputs: list[Tensor] = []

    def cut(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        if outputs:  # the layer was called before; only its first call is watched
            return output
        outputs.append(output.detach().requires_grad_())
        return outputs[0]

    with torch.enable_grad(), attention.module.get_submodule(layer).register_forward_hook(cut):
        seen = _watched(model, attention, runs)
        if seen is None or seen.signal is None or not outputs or not seen.signal.requires_grad:
            return None
        signal = seen.signal if seen.is_fused else _of_earlier_keys(seen.signal)
        noise = torch.linspace(1, 2, signal.numel(), dtype=signal.dtype, device=signal.device).reshape(signal.shape)
        gradient = torch.autograd.grad((signal * noise).sum(), outputs[0], allow_unused=True)[0]
    if gradient is None:
        return None
    by_position = not seen.is_fused and gradient.ndim == 3
    reached = (gradient[:, -1] if by_position else gradient).flatten(0, -2).abs().amax(0)
    return reached > 1e-4 * gradient.abs().max()  # outputs that cancel leave rounding errors


def _of_earlier_keys(logits: Tensor) -> Tensor:
    """The logits of the last position with all earlier keys, minus the logit with the first key. Columns after the keys, such
    as attention sinks, are left out."""
    num_queries, num_keys = logits.shape[-2:]
    earlier = logits[..., -1, : max(min(num_queries, num_keys) - 1, 1)]
    return earlier - earlier[..., :1] if earlier.shape[-1] > 1 else earlier


def _scale_if_linear(
    model: nn.Module, attention: FoundAttention, layer: str, rows: Tensor, runs: Sequence[Run]
) -> float | None:
    """The number by which the model multiplies q.k; NaN if it is unknown. None if the logits are not a linear function of these
    outputs."""
    seen = []
    for factor in (0.0, 1.0, 2.0):
        vector = torch.where(rows, factor, 1.0)
        with attention.module.get_submodule(layer).register_forward_hook(
            lambda _, args, output, v=vector: output * v.to(output)
        ):
            watched = _watched(model, attention, runs)
        if watched is None or watched.signal is None:
            return None
        seen.append(watched)
    signals = [run.signal.double() for run in seen if run.signal is not None]
    product = seen[1].product
    if not seen[1].is_fused:
        signals, product = _relative(signals, product)
    zero, once, twice = signals
    usable = (once.abs() < 1e4) & (zero.abs() < 1e4)  # attention masks add large negative numbers
    change, second_change = (once - zero)[usable], (twice - once)[usable]
    if not change.abs().max() > 0 or not torch.allclose(
        change, second_change, rtol=1e-3, atol=1e-4 * float(change.abs().max())
    ):
        return None
    if seen[1].is_fused:
        return seen[1].scale
    if product is None:
        return math.nan
    slope = float((change * product[usable]).sum() / product[usable].square().sum())
    usual = seen[1].head_dim ** -0.5
    return usual if math.isclose(slope, usual, rel_tol=1e-2) else math.nan


def _relative(signals: list[Tensor], product: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
    """Subtracts from each row of logits and of q.k its entry for one chosen key. A model may subtract a row's largest logit,
    which this cancels. Columns that belong to no key, such as attention sinks, are left out."""
    once = signals[1]
    if product is None or product.shape[:-1] != once.shape[:-1] or product.shape[-1] > once.shape[-1]:
        product = None
    else:
        signals = [logits[..., : product.shape[-1]] for logits in signals]
    chosen = signals[1].argmax(-1, keepdim=True)
    relative = [logits - logits.gather(-1, chosen) for logits in signals]
    return relative, None if product is None else product.double() - product.double().gather(-1, chosen)


def _ranges(rows: Tensor) -> tuple[tuple[int, int], ...]:
    ends = torch.diff(rows.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    return tuple(zip(ends.eq(1).nonzero().flatten().tolist(), ends.eq(-1).nonzero().flatten().tolist(), strict=True))


# Watching


def _watched(model: nn.Module, attention: FoundAttention, runs: Sequence[Run]) -> _Seen | None:
    """What was seen in the first run that reaches the softmax of the module; None if no run does."""
    for run in runs:
        watch = _Watch()
        with quiet(model), _hooks(attention.module, watch), suppress(Exception), watch:
            run()
        if watch.seen.signal is not None:
            return watch.seen
    return None


@contextmanager
def _hooks(core: nn.Module, watch: _Watch) -> Iterator[None]:
    def enter(*_: Any) -> None:
        watch.inside = True

    def leave(*_: Any) -> None:
        watch.inside = False

    def note(name: str) -> Callable[..., None]:
        def called(*_: Any) -> None:
            if watch.seen.signal is None:
                watch.seen.called.append(name)

        return called

    layers = [(name, part) for name, part in core.named_modules() if name and any(True for _ in part.parameters(recurse=False))]
    handles = [core.register_forward_pre_hook(enter), core.register_forward_hook(leave)]
    handles += [part.register_forward_hook(note(name)) for name, part in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
