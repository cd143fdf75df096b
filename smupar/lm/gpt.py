"""A plain GPT as in the paper: ALiBi positions, SwiGLU, pre-norm, tied embedding. Read it top to bottom."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smupar.apply import parameterize
from smupar.lm.config import ModelConfig, RunConfig
from smupar.plan import Plan
from smupar.planner import Settings, make_plan


class Attention(nn.Module):
    scale: Tensor
    slopes: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        # A tensor, so that models that differ in their rule can be trained as one batch.
        self.register_buffer("scale", torch.tensor(config.head_dim**-0.5), persistent=False)
        self.register_buffer("slopes", alibi_slopes(config.num_heads), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        position = torch.arange(length, device=x.device)
        distance = (position[None, :] - position[:, None]).to(x.dtype)
        bias = (self.slopes.to(x.dtype)[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))
        y = F.scaled_dot_product_attention(q * self.scale, k, v, attn_mask=bias, scale=1.0)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.inner_width, bias=False)
        self.up = nn.Linear(config.width, config.inner_width, bias=False)
        self.down = nn.Linear(config.inner_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width, bias=False)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.unembedding = nn.Linear(config.width, config.vocab_size, bias=False)
        self.unembedding.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.unembedding(self.norm(x))


def alibi_slopes(num_heads: int) -> Tensor:
    """2^(-8 i / n) for head i = 1 .. n."""
    return 2.0 ** (-8.0 * torch.arange(1, num_heads + 1) / num_heads)


def build(config: RunConfig) -> tuple[GPT, Plan]:
    """A parameterized GPT and its plan, with the attention scale set."""
    model = GPT(config.model)
    plan = parameterize(model, base=_on_meta(config.model, config.base_width), **_settings(config))
    set_attention_scale(model, plan)
    return model, plan


def set_attention_scale(model: nn.Module, plan: Plan) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            module.scale.fill_(plan.attention_scale(module.head_dim))


def plan_on_meta(config: RunConfig) -> Plan:
    """The plan ``build`` would carry out, for a model of any size, in no memory."""
    model = _on_meta(config.model, config.model.width)
    plan = make_plan(model, base=_on_meta(config.model, config.base_width), **_settings(config))
    plan.attention_scale(config.model.head_dim)  # build sets it
    return plan


def _on_meta(config: ModelConfig, width: int) -> GPT:
    with torch.device("meta"):
        return GPT(replace(config, width=width))


def _settings(config: RunConfig) -> Settings:
    return {
        "rule": config.rule,
        "density": config.density,
        "pattern": config.pattern,
        "seed": config.seed,
        "init_std": config.init_std,
        "alpha_input": config.alpha_input,
        "alpha_output": config.alpha_output,
    }
