"""Causal attention by torch's fused kernels, for one model and for the models of a stack.

``torch.func`` cannot batch the backward passes of these kernels, and some kernels it cannot batch at all. Here the models of a
stack become part of the batch. Only the forward pass needs a rule for this, because a stack differentiates the sum of its
losses (``stack.loss.gradients_of_sum``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ADDED = 8  # entries added to each head for distances: four are used, but kernels need a multiple of eight
# A position is the sum of a multiple of _BLOCK and a rest below it. bf16 holds both exactly, up to a length of 32,768.
_BLOCK = 128


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(Q K' + bias) V for heads of shape (batch, heads, length, size). Without a bias the attention is causal."""
    out: Tensor = torch.ops.smupar.fused_attention(q, k, v, bias)
    return out


def fused_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """Causal attention with ALiBi's bias, slope times distance. The bias is never in memory: queries and keys get a few more
    entries, whose product is the slope times the key's position. The query's position is left out, because it adds the same
    number to all logits of a query."""
    size = v.shape[-1]
    position = torch.arange(1 - k.shape[-2], 1, device=k.device)
    rest = position % _BLOCK
    coarse = slopes.to(q.dtype)
    fine = (slopes - coarse).to(q.dtype)  # coarse and fine together have twice the digits
    of_q = F.pad(torch.stack([coarse, coarse, fine, fine], -1), (0, _ADDED - 4))
    of_k = F.pad(torch.stack([position - rest, rest, position - rest, rest], -1).to(k.dtype), (0, _ADDED - 4))
    q = torch.cat([q, of_q[:, None, :].expand(*q.shape[:-1], _ADDED)], -1)
    k = torch.cat([k, of_k.expand(*k.shape[:-1], _ADDED)], -1)
    return fused_attention(q, k, F.pad(v, (0, _ADDED)), None)[..., :size]


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=1.0)


def _of_stack(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None) -> tuple[Tensor, int]:
    *heads, bias = tensors
    num_models = info.batch_size
    folded = [
        (head.expand(num_models, *head.shape) if dim is None else head.movedim(dim, 0)).flatten(0, 1)
        for head, dim in zip(heads, in_dims, strict=False)
        if head is not None
    ]
    assert in_dims[3] is None, "the models of a stack share the bias of their attention"
    out = _attention(folded[0], folded[1], folded[2], bias)
    return out.unflatten(0, (num_models, -1)), 0


torch.library.define("smupar::fused_attention", "(Tensor q, Tensor k, Tensor v, Tensor? bias) -> Tensor")
torch.library.impl("smupar::fused_attention", "CompositeImplicitAutograd", _attention)
torch.library.register_vmap("smupar::fused_attention", _of_stack)
