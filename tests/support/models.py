"""Small models that many tests share, by what they show. All take their width first."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

import smupar

VOCAB = 11
CLASSES = 5


def on_meta(make, *args, **options):
    """What a base is for: shapes without memory."""
    with torch.device("meta"):
        return make(*args, **options)


class MLP(nn.Module):
    """``fc1`` reads 8 features, ``fc2`` and up are hidden, ``head`` makes 4 logits."""

    def __init__(self, width, num_hidden=1):
        super().__init__()
        self.num_hidden = num_hidden
        self.fc1 = nn.Linear(8, width)
        for number in range(num_hidden):
            self.add_module(f"fc{number + 2}", nn.Linear(width, width))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        for number in range(self.num_hidden + 1):
            x = torch.tanh(self.get_submodule(f"fc{number + 1}")(x))
        return self.head(x)


def parameterized_mlp(density=1.0, dtype=torch.float32, **settings):
    """An MLP of width 64 with base 8, and its plan."""
    torch.manual_seed(0)  # biases keep the values they were built with
    model = MLP(64).to(dtype)
    return model, smupar.parameterize(model, base=MLP(8), density=density, **settings)


def sequential(width, num_hidden=1, *, num_in=8, num_out=4, bias=True):
    """Layers "0" (input), "2", "4", ... (hidden), the last one the readout, with ReLUs between."""
    sizes = [num_in, *[width] * (num_hidden + 1), num_out]
    layers = [nn.Linear(*pair, bias=bias) for pair in pairwise(sizes)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]


class Conv1D(nn.Module):
    """As transformers', which is known by its name: a Linear that stores (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.empty(nf))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, x):
        return x @ self.weight + self.bias


class TokenNet(nn.Module):
    """Hidden weights ``mix``, ``up`` and ``down``: of 256, 512 and 512 entries at width 16. A ``down`` that is a Conv1D stores
    (in, out), as GPT-2 does."""

    def __init__(self, width=16, *, vocab=VOCAB, down=nn.Linear):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width) if down is nn.Linear else down(width, 2 * width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + F.gelu(self.mix(self.norm(x)))
        return self.head(x + self.down(F.gelu(self.up(x))))


class Residual(nn.Module):
    """An embedding, ``blocks``, a norm and a readout."""

    def __init__(self, width, blocks, *, vocab=VOCAB, bias=True):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=bias)

    def embed(self, tokens):
        return self.embedding(tokens)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Mixture(nn.Module):
    """A softmax mixture of experts."""

    def __init__(self, width, make_router, num_experts):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), make_router(width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(num_experts)
        )

    def forward(self, x):
        x_normed = self.norm(x)
        shares = self.gate(x_normed).softmax(-1)
        return x + sum(shares[..., place, None] * expert(x_normed) for place, expert in enumerate(self.experts))


def mixture_of(make_router, num_experts):
    """width -> a network of two mixtures of experts, from 8 features to 5 logits."""

    def make(width):
        mixtures = [Mixture(width, make_router, num_experts) for _ in range(2)]
        return nn.Sequential(nn.Linear(8, width), *mixtures, nn.LayerNorm(width), nn.Linear(width, 5))

    return make


mixture = mixture_of(lambda width: nn.Linear(width, 4, bias=False), 4)
