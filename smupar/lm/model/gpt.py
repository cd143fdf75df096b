"""A plain GPT as in the paper (ALiBi positions, SwiGLU, pre-norm, tied embedding), and common alternatives. Read it top to
bottom."""

from __future__ import annotations

import math
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from smupar.execute.attention_kernels import fused_alibi, fused_attention
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.model.parameterize import add_masks, parameterize
from smupar.plan.make import cautions, planned, warn
from smupar.plan.masks.allocations import Allocation, er, erk
from smupar.plan.plan import Plan
from smupar.plan.settings import Settings

AttentionKernel = Literal["sdpa", "fused", "products"]


class Cache:
    """Keys and values of every layer for the tokens seen so far, for generation.

    All texts of a batch end at the same place: shorter ones are padded on the left. ``padding`` is the number of padding tokens
    of each text.
    """

    def __init__(self, depth: int, padding: Tensor | None = None) -> None:
        self.layers = [LayerCache(self) for _ in range(depth)]
        self.length, self.padding = 0, padding
        self._bias: Tensor | None = None

    def __len__(self) -> int:
        return self.length

    def advance(self, num: int) -> None:
        """Adds to the number of tokens that all layers have seen."""
        self.length, self._bias = self.length + num, None

    def bias(self, attention: Attention, q: Tensor, num_keys: int) -> Tensor:
        """The bias of the attention logits of these tokens. It is the same in every layer, so it is computed once."""
        if self._bias is None:
            bias = attention.bias(q, num_keys)[None]
            self._bias = bias if self.padding is None else bias.masked_fill(self._padded(num_keys), float("-inf"))
        return self._bias

    def _padded(self, num_keys: int) -> Tensor:
        """True where a query must not see a key because the key is padding. Queries that are padding may see padding, since a
        softmax over nothing would be NaN."""
        assert self.padding is not None
        position, first = torch.arange(num_keys, device=self.padding.device), self.padding[:, None, None, None]
        return (position < first) & (position[self.length :, None] >= first)


class LayerCache:
    """Keys and values of one layer. A full buffer is replaced by one for twice the tokens, so that each token is copied about
    once on average."""

    def __init__(self, model_cache: Cache) -> None:
        self.model_cache = model_cache
        self.buffers: tuple[Tensor, Tensor] | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the keys and values of new tokens. Returns the keys and values of all tokens."""
        start, stop = self.model_cache.length, self.model_cache.length + keys.shape[2]
        if self.buffers is None or self.buffers[0].shape[2] < stop:
            old_keys, old_values = self.buffers or (None, None)
            self.buffers = _larger(keys, stop, old_keys), _larger(values, stop, old_values)
        for buffer, new in zip(self.buffers, (keys, values), strict=True):
            buffer[:, :, start:stop] = new
        return self.buffers[0][:, :, :stop], self.buffers[1][:, :, :stop]


def _larger(like: Tensor, num: int, old: Tensor | None) -> Tensor:
    """A buffer for twice that many tokens, with the content of the old buffer."""
    buffer = like.new_empty(*like.shape[:2], 2 * num, like.shape[3])
    if old is not None:
        buffer[:, :, : old.shape[2]] = old
    return buffer


class Attention(nn.Module):
    scale: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.positions = config.head_dim, config.num_heads, config.positions
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.biases)
        self.out = nn.Linear(config.width, config.width, bias=config.biases)
        # A tensor, so that models with different rules can be trained as one stack.
        self.register_buffer("scale", torch.tensor(config.head_dim**-0.5), persistent=False)
        self.block_mask: BlockMask | None = None  # set by use_flex_attention
        self.kernel: AttentionKernel = "sdpa"  # set by use_attention

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        batch, length, width = x.shape
        start = 0 if cache is None else cache.model_cache.length
        q, k, v = self.qkv(x).view(batch, length, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        if self.positions == "rotary":
            q, k = rotate(q, start), rotate(k, start)
        if cache is not None:
            k, v = cache.extend(k, v)
        q = (q * self.scale).to(v.dtype)  # in a stack the scale has a dimension, and so would turn bf16 into fp32
        if cache is not None:
            bias = cache.model_cache.bias(self, q, k.shape[2])
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        elif self.kernel == "products":
            scores = (q @ k.mT).float() + self.bias(q, length)
            y = torch.softmax(scores, -1).to(v.dtype) @ v
        elif self.kernel == "fused" and self.positions == "alibi" and q.is_cuda:
            y = fused_alibi(q, k, v, alibi_slopes(self.num_heads, q.device))
        elif self.kernel == "fused":
            y = fused_attention(q, k, v, self.bias(q, length) if self.positions == "alibi" else None)
        elif self.positions == "alibi" and self.block_mask is not None:
            y = flex_alibi(q, k, v, self.block_mask)
        elif self.positions == "alibi":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(q, k.shape[2]), scale=1.0)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def bias(self, q: Tensor, num_keys: int) -> Tensor:
        """The bias of the attention logits: -inf for later keys, and ALiBi's slope times the distance for others. The last key
        and the last query are at the same position."""
        position = torch.arange(num_keys, device=q.device)
        distance = (position[None, :] - position[num_keys - q.shape[2] :, None]).to(q.dtype)
        slopes = alibi_slopes(self.num_heads, q.device) if self.positions == "alibi" else q.new_zeros(1)
        return (slopes.to(q.dtype)[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        if self.gated:
            self.gate = nn.Linear(config.width, config.inner_width, bias=config.biases)
        self.up = nn.Linear(config.width, config.inner_width, bias=config.biases)
        self.down = nn.Linear(config.inner_width, config.width, bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x) if self.gated else F.gelu(self.up(x)))


def residual_factor(config: ModelConfig, depth: int) -> float:
    """The model's own factor on residual branches, before any depth rule."""
    return 1 / math.sqrt(2 * depth) if config.residual_factor else 1.0


class TransformerBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width, bias=config.biases)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width, bias=config.biases)
        self.mlp = MLP(config)
        self.factor = residual_factor(config, config.depth)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        x = x + self.factor * self.attention(self.norm_attention(x), cache)
        return x + self.factor * self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        if config.positions == "learned":
            self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, bias=config.biases)
        self.unembedding = nn.Linear(config.width, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Makes embedding and unembedding one tensor if the configuration ties them. Call it again after ``to_empty``, which
        unties them."""
        if self.config.tied:
            self.unembedding.weight = self.embedding.weight

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        return self.unembedding(self.features(tokens, cache))

    def features(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """The input of the unembedding."""
        x = self.embedding(tokens)
        if self.config.positions == "learned":
            x = x + self.position(_positions(tokens, cache))
        for layer, block in enumerate(self.blocks):
            x = block(x) if cache is None else block(x, cache.layers[layer])
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.norm(x)


def _positions(tokens: Tensor, cache: Cache | None) -> Tensor:
    start = 0 if cache is None else cache.length
    position = torch.arange(start, start + tokens.shape[1], device=tokens.device)
    return position if cache is None or cache.padding is None else (position - cache.padding[:, None]).clamp(min=0)


def attentions(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def blocks(model: nn.Module) -> list[TransformerBlock]:
    return [module for module in model.modules() if isinstance(module, TransformerBlock)]


# Positions


def alibi_slopes(num_heads: int, device: torch.device | None = None) -> Tensor:
    """2^(-8 i / n) for head i = 1 .. n."""
    return 2.0 ** (-8.0 * torch.arange(1, num_heads + 1, device=device) / num_heads)


def rotate(x: Tensor, start: int = 0) -> Tensor:
    """Rotary positions: rotates the pairs of entries (i, i + half) of each head by position * 10000^(-i / half)."""
    half = x.shape[-1] // 2
    position = torch.arange(start, start + x.shape[-2], device=x.device, dtype=torch.float32)
    angle = position[:, None] * 10000.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def flex_alibi(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    slopes = alibi_slopes(q.shape[1], q.device)

    def add_bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + slopes[head] * (key - query)

    y = flex_attention(q, k, v, score_mod=add_bias, block_mask=block_mask, scale=1.0)
    assert isinstance(y, Tensor)
    return y


def use_flex_attention(model: GPT, length: int) -> None:
    """Switches to FlexAttention, which keeps no ALiBi bias in memory. It needs sequences of one length, and a compiled model on
    a GPU."""

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, length, length, device=str(model.embedding.weight.device))
    for attention in attentions(model):
        attention.block_mask = mask


def use_attention(model: GPT, kernel: AttentionKernel) -> None:
    """Chooses how attention is computed. "sdpa" calls torch's function. "fused" calls a fused kernel that can be batched over
    models. "products" uses products and a softmax. It can always be batched, but holds the scores of all pairs of tokens in
    memory."""
    for attention in attentions(model):
        attention.kernel = kernel


# Parameterized

BRANCHES = ("blocks.*.attention.out", "blocks.*.mlp.down")  # the modules whose outputs are added to the residual stream


def ends_of_branches(model: GPT) -> list[nn.Module]:
    return [module for path, module in model.named_modules() if any(fnmatchcase(path, glob) for glob in BRANCHES)]


def build(config: RunConfig) -> tuple[GPT, Plan]:
    """A parameterized GPT on the CPU, with its attention scale set, and its plan. Biases start at 0."""
    # torch's own init would take half of the time, and its biases would differ from one call to the next.
    model = on_meta(config.model).to_empty(device="cpu")
    model.tie()
    return model, parameterized(model, config)


def parameterized(model: GPT, config: RunConfig) -> Plan:
    """Parameterizes a GPT in place with the run's settings. It may come from ``to_empty``: none of its values are kept."""
    plan = parameterize(model, base=_base(config), reset=True, **_settings(config))
    set_attention_scale(model, plan)
    for block in blocks(model):
        block.factor = residual_factor(config.model, config.residual_depth)
    if config.prunes:
        add_masks(model, plan)
    return plan


def set_attention_scale(model: nn.Module, plan: Plan) -> None:
    for attention in attentions(model):
        attention.scale.fill_(plan.attention_scale(attention.head_dim))
    plan.settle("attention_scale")


def plan_on_meta(config: RunConfig) -> Plan:
    """The plan that ``build`` would carry out. It takes no memory for weights, so the model may have any size."""
    plan = planned(on_meta(config.model), _base(config), _settings(config), has_values=False)
    warn(cautions(plan), stacklevel=2)
    plan.settle("attention_scale")  # build sets it
    return plan


def on_meta(config: ModelConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def _base(config: RunConfig) -> GPT:
    return on_meta(replace(config.model, width=config.base_width, depth=config.base_depth or config.model.depth))


def allocated(config: RunConfig, density: float | None) -> float | Allocation | None:
    """The density, or the allocation that divides it among layers."""
    if config.allocation == "uniform" or density is None:
        return density
    return {"er": er, "erk": erk}[config.allocation](density)


def _settings(config: RunConfig) -> Settings:
    return {
        "rule": config.rule,
        "density": allocated(config, config.start_density),
        "pattern": config.pattern,
        "seed": config.seed,
        "init_std": config.init_std,
        "alpha_input": config.alpha_input,
        "alpha_output": config.alpha_output,
        # If a depth rule scales the branches, the model's own factor on them must stay the base's.
        "multipliers": "base" if config.scales_branches else "own",
        "branches": BRANCHES,
        "depth": config.depth_rule,
        "kappa": config.used_kappa,
        # If model and base are equally wide, a wider delta shows which dimensions scale.
        "delta": on_meta(replace(config.model, width=2 * config.base_width))
        if config.model.width == config.base_width
        else None,
    }
