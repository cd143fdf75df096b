"""Models to plan, all on meta: a plan needs shapes alone."""

import torch
import torch.nn.functional as F
from torch import nn

import smupar
from tests.support.models import on_meta

SIGMA, ALPHA_INPUT, ALPHA_OUTPUT = 0.08665602, 9.1705, 1.0951835  # Table 3 of the paper


class MLP(nn.Module):
    """Embedding layer, two hidden layers (the first one ``expand`` times as wide), readout."""

    def __init__(self, width, expand=1, activation=F.gelu):
        super().__init__()
        self.activation = activation
        self.embed = nn.Linear(7, width)
        self.fc1 = nn.Linear(width, expand * width)
        self.fc2 = nn.Linear(expand * width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.activation(self.embed(x))
        x = self.activation(self.fc2(self.activation(self.fc1(x))))
        return self.head(x)


class Blocks(nn.Module):
    def __init__(self, width, depth=3):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "fc": nn.Linear(width, width)}) for _ in range(depth)
        )
        self.head = nn.Linear(width, 11, bias=False)


class Headless(nn.Module):
    """Makes its logits out of sight: F.linear(x, self.embed.weight)."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.attn = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)


class Conv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.conv = nn.Conv2d(width, 2 * width, 3)
        self.up = nn.ConvTranspose2d(2 * width, width, 3)
        self.head = nn.Linear(width, 5)


def plan_mlp(width, base_width, *, expand=1, **settings):
    return smupar.make_plan(on_meta(MLP, width, expand), base=on_meta(MLP, base_width, expand), **settings)


def numbers(plan):
    """Every number a run would use."""
    return {row.name: (row.init_std, row.lr_factors, row.eps_factor, row.forward) for row in plan}


def own_mask(num_kept, size=64):
    mask = torch.zeros(size * size, dtype=torch.bool)
    mask[:num_kept] = True
    return mask.view(size, size)


def attention_plan(**settings):
    return smupar.make_plan(on_meta(Headless, 64), base=on_meta(Headless, 16), **settings)


HIDDEN = ("fc1.weight", "fc2.weight")
