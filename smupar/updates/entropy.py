"""The entropy of attention, from calls of torch's scaled dot product attention, and of softmax on tensors with four
dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from smupar.updates.probe import spread

_QUERIES = 64  # queries of the first sequence, in each head
_SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)


class AttentionWatch:
    """Records the entropy of attention in forward passes at due steps, without changing them."""

    def __init__(self, model: nn.Module, is_due: Callable[[], bool]) -> None:
        self.is_due = is_due
        self._modes: list[_EntropyMode] = []
        self._entropies: list[Tensor] = []
        self.hooks = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def take(self) -> dict[str, float]:
        """Name of each call of attention in the last forward pass -> mean entropy in nats."""
        entropies, self._entropies = self._entropies, []
        values = torch.stack(entropies).tolist() if entropies else []
        return {f"attention {number}": value for number, value in enumerate(values)}

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and self.is_due()):
            return
        self._modes.append(_EntropyMode())
        self._modes[-1].__enter__()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._modes:
            mode = self._modes.pop()
            mode.__exit__(None, None, None)
            self._entropies = mode.entropies


class _EntropyMode(TorchFunctionMode):
    """While active, records the entropy of each call of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.entropies: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        with torch.no_grad():
            if func is F.scaled_dot_product_attention and args[0].ndim == 4:
                self.entropies.append(_entropy(_attention(*args, **(kwargs or {}))))
            elif func in _SOFTMAX and isinstance(output, Tensor) and output.ndim == 4:
                self.entropies.append(_entropy(output[:1, :, spread(output.shape[2], _QUERIES, output.device)]))
        return output


def _entropy(shares: Tensor) -> Tensor:
    return torch.special.entr(shares.double()).sum(-1).mean()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The attention weights of some queries of the first sequence: (1, heads, queries, keys)."""
    chosen = spread(query.shape[2], _QUERIES, query.device)
    keys = key[:1].repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = (query[:1, :, chosen] @ keys.mT).float() * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        later = torch.arange(key.shape[2], device=query.device) > chosen[:, None]
        logits = logits.masked_fill(later, -math.inf)
    if attn_mask is not None:
        mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])[:1, :, chosen]
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1).nan_to_num()
