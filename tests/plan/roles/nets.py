"""Models whose parameters have every role, and what a plan says about them."""

import ast
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import smupar
from tests.support.models import sequential


def roles(plan):
    return {row.name: row.role for row in plan}


def widths(plan, *names):
    """(width_in, width_out) of some parameters."""
    return [(row.width_in, row.width_out) for row in map(plan.__getitem__, names)]


def suggested(error):
    """The paste-ready line of an error, evaluated."""
    line = re.search(r"^\s*roles=(\{.*\})$", str(error), re.MULTILINE)
    assert line, f"no paste-ready line in: {error}"
    return ast.literal_eval(line[1])


def refusal(model, *, base, match="roles=", **settings):
    """What make_plan says when it cannot tell, or will not."""
    with pytest.raises(ValueError, match=match) as error:
        smupar.make_plan(model, base=base, **settings)
    return error.value


class LM(nn.Module):
    """One attention block with everything optional; vocabulary 40, head 4."""

    def __init__(self, width, *, fused=False, num_kv_heads=None, d_ff=None, tied=False, head_first=False, head_bias=False):
        super().__init__()
        kv_width = width if num_kv_heads is None else 4 * num_kv_heads
        if head_first:
            self.head = nn.Linear(width, 40, bias=head_bias)
        self.embed = nn.Embedding(40, width)
        self.norm = nn.LayerNorm(width)
        if fused:
            self.qkv = nn.Linear(width, 3 * width, bias=False)
        else:
            self.q_proj = nn.Linear(width, width, bias=False)
            self.k_proj = nn.Linear(width, kv_width, bias=False)
            self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        d_ff = 2 * width if d_ff is None else d_ff
        self.gate = nn.Linear(width, d_ff, bias=False)
        self.up = nn.Linear(width, d_ff, bias=False)
        self.down = nn.Linear(d_ff, width, bias=False)
        self.final = nn.RMSNorm(width)
        if not head_first:
            self.head = nn.Linear(width, 40, bias=head_bias)
        if tied:
            self.head.weight = self.embed.weight
        self.fused = fused

    def forward(self, tokens):
        x = self.embed(tokens)
        h = self.norm(x)
        q, k, v = self.qkv(h).chunk(3, -1) if self.fused else (self.q_proj(h), self.k_proj(h), self.v_proj(h))
        heads = [part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.25, enable_gqa=True).transpose(1, 2).flatten(2)
        x = x + self.o_proj(y)
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return self.head(self.final(x))


TOKENS = torch.arange(12).reshape(2, 6)


class EncoderDecoder(nn.Module):
    """Both sides read one table, and the head is that table again."""

    def __init__(self, width, *, share):
        super().__init__()
        self.built_with = {"width": width, "share": share}
        self.encoder = nn.ModuleDict({"embed": nn.Embedding(40, width), "fc": nn.Linear(width, width, bias=False)})
        table = self.encoder["embed"]
        self.decoder = nn.ModuleDict(
            {"embed": table if share == "module" else nn.Embedding(40, width), "fc": nn.Linear(width, width, bias=False)}
        )
        self.head = nn.Linear(width, 40, bias=False)
        self.decoder["embed"].weight = table.weight
        self.head.weight = table.weight

    def forward(self, tokens):
        seen = self.encoder["fc"](self.encoder["embed"](tokens))
        return self.head(self.decoder["fc"](self.decoder["embed"](tokens) + seen))


class TwoHeads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.fc = nn.Linear(width, width)
        self.policy = nn.Linear(width, 3)
        self.value = nn.Linear(width, 2)


class WithGetter(nn.Module):
    """The head comes first and something that looks like a head may come last; the getter tells which is which."""

    def __init__(self, width, *, probe=False):
        super().__init__()
        self.lm = nn.Linear(width, 9)
        self.embed = nn.Embedding(9, width)
        self.fc = nn.Linear(width, width)
        self.probe = nn.Linear(width, 2) if probe else None

    def get_output_embeddings(self):
        return self.lm


class Attention(nn.Module):
    def __init__(self, width, **options):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.mix = nn.MultiheadAttention(width, 2, **options)
        self.head = nn.Linear(width, 10)


class ConvNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.depthwise = nn.Conv2d(width, width, 3, groups=width)
        self.pointwise = nn.Conv2d(width, 2 * width, 1)
        self.grouped = nn.Conv2d(2 * width, 2 * width, 3, groups=4)
        self.line = nn.Conv1d(2 * width, 2 * width, 5)
        self.up = nn.ConvTranspose2d(2 * width, width, 2)
        self.depthwise_up = nn.ConvTranspose2d(width, width, 2, groups=width)
        self.head = nn.Conv2d(width, 5, 1)


def grouped_by_size(width):
    """ResNeXt-like: groups of 4 channels, more of them in wider models."""
    return nn.Sequential(nn.Conv1d(3, width, 1), nn.Conv1d(width, width, 3, groups=width // 4), nn.Conv1d(width, 5, 1))


class Recurrent(nn.Module):
    def __init__(self, width, cell, **options):
        super().__init__()
        self.rnn = cell(5, width, **options)
        self.head = nn.Linear(width * (2 if self.rnn.bidirectional else 1), 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class TwoInputs(nn.Module):
    """A table and two projections of inputs of fixed size."""

    def __init__(self, width):
        super().__init__()
        self.features = nn.Linear(3, width)
        self.tokens = nn.Embedding(5, width)
        self.time = nn.Linear(7, width)
        self.fc = nn.Linear(width, width)
        self.head = nn.Linear(width, 2)


class Raw(nn.Module):
    def __init__(self, width, *, expand=0):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, 6, width))
        self.square = nn.Parameter(torch.zeros(width, width))
        self.temperature = nn.Parameter(torch.ones(()))
        self.bins = nn.Parameter(torch.zeros(2, 3))
        if expand:
            self.expand = nn.Parameter(torch.zeros(width, expand * width))
        self.inputs = nn.Linear(3, width)
        self.head = nn.Linear(width, 2)


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized_mlp(width):
    model = sequential(width)
    for layer in (model[0], model[2], model[4]):
        parametrize.register_parametrization(layer, "weight", Twice())
    return model
