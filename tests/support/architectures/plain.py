"""Models in plain torch: recurrent, convolutional, graphs, mixtures, recommenders, raw parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.support.architectures.architecture import (
    FIXED,
    HEAD_DIM,
    NUM_CLASSES,
    VOCAB,
    Architecture,
    labels,
    noise,
    settle_all,
    tokens,
)

FEATURES = 12
NUM_PATCHES = 256  # tokens of a Mixer


def next_tokens(seed: int) -> tuple[Tensor, Tensor]:
    walk = tokens(seed)
    return walk[:, :-1], walk[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def logits_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0])


def first(batch: Any) -> tuple[Any]:
    return (batch[0],)


def lm(name: str, make: Callable[[int], nn.Module], **facts: Any) -> Architecture:
    return Architecture(name, make, next_tokens, loss_of, logits_of, first, **facts)


def classifier(name: str, make: Callable[[int], nn.Module], *shape: int, num: int = 4, **facts: Any) -> Architecture:
    """Classes of noise of this shape."""
    return Architecture(name, make, lambda s: (noise(s, num, *shape), labels(s, num)), loss_of, logits_of, first, **facts)


class LSTM(nn.Module):
    def __init__(self, width: int, *, tied: bool = False, embedding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, embedding or width)
        self.rnn = nn.LSTM(embedding or width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.table(ids))[0])


class ResBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(width, width)
        self.norm2, self.conv2 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """The time embedding is registered before the stem."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.inp = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.middle = nn.Conv2d(width, 2 * width, 2, stride=2), ResBlock(2 * width)
        self.bridge, self.up = nn.Linear(width, 2 * width), nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join, self.block = nn.Conv2d(2 * width, width, 1), ResBlock(width)
        self.out = nn.Conv2d(width, NUM_CLASSES, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, t = batch
        t = self.time(t)
        x = self.inp(x)
        y = self.up(self.middle(self.down(x), self.bridge(t)))
        return self.out(self.block(self.join(torch.cat([x, y], 1)), t)).movedim(1, -1)


class Mixer(nn.Module):
    """Layers that read all tokens of a channel, so these are inputs that have to be enough for the rule."""

    def __init__(self, width: int, *, token_width: int | None = None) -> None:
        super().__init__()
        inner = token_width or width
        self.stem = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "t1": nn.Linear(NUM_PATCHES, inner),
                    "t2": nn.Linear(inner, NUM_PATCHES),
                    "norm2": nn.LayerNorm(width),
                    "c1": nn.Linear(width, 2 * width),
                    "c2": nn.Linear(2 * width, width),
                }
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block["t2"](F.gelu(block["t1"](block["norm1"](x).mT))).mT
            x = x + block["c2"](F.gelu(block["c1"](block["norm2"](x))))
        return self.head(self.norm(x).mean(1))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim, self.scale = HEAD_DIM, HEAD_DIM**-0.5
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, 5, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class DiT(nn.Module):
    """Blocks whose norms follow the class, by layers that start at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches, self.classes = nn.Linear(FEATURES, width), nn.Embedding(NUM_CLASSES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.changes = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, FEATURES)
        for layer in (*self.changes, self.out):
            nn.init.zeros_(layer.weight)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, kind = self.patches(batch[0]), F.silu(self.classes(batch[1]))
        for block, change in zip(self.blocks, self.changes, strict=True):
            shift, scale = change(kind)[:, None].chunk(2, -1)
            x = block(x * (1 + scale) + shift)
        return self.out(self.norm(x))


class TwoTowers(nn.Module):
    """Similarity is a dot product over the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, width)
        self.left, self.right = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(2))
        self.factor = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.factor * self.left(x[0]) @ self.right(x[1]).T


def scale_similarity(model: Any, plan: Any) -> None:
    model.factor = plan.output_factor
    settle_all(model, plan)


class GNN(nn.Module):
    """Raw matrices, on the right of their inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(FEATURES, width) / FEATURES**0.5)
        self.w_hidden = nn.ParameterList(torch.randn(width, 2 * width) / width**0.5 for _ in range(2))
        self.w_back = nn.ParameterList(torch.randn(2 * width, width) / (2 * width) ** 0.5 for _ in range(2))
        self.w_out = nn.Parameter(torch.randn(width, NUM_CLASSES) / width**0.5)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        near = torch.eye(4) / 2 + torch.ones(4, 4) / 8
        x = x @ self.w_in
        for forth, back in zip(self.w_hidden, self.w_back, strict=True):
            x = x + F.gelu(torch.einsum("nm,bmd,de->bne", near, x, forth)) @ back
        return (self.factor * x @ self.w_out).mean(1)


GNN_ROLES = {"w_in": "embedding", "w_hidden.*": ("hidden", 0), "w_back.*": ("hidden", 0), "w_out": "unembedding"}


class Experts(nn.Module):
    """Experts as raw matrices, mixed softly."""

    def __init__(self, width: int, inner: int | None = None) -> None:
        super().__init__()
        inner = inner or 2 * width
        self.router = nn.Linear(width, 4, bias=False)
        self.w1 = nn.ParameterList(torch.randn(width, inner) / width**0.5 for _ in range(4))
        self.w2 = nn.ParameterList(torch.randn(inner, width) / inner**0.5 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1).unbind(-1)
        parts = (F.gelu(x @ w1) @ w2 for w1, w2 in zip(self.w1, self.w2, strict=True))
        return x + sum(weight[..., None] * part for weight, part in zip(weights, parts, strict=True))


class LowRank(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(width, FIXED) / width**0.5)
        self.up = nn.Parameter(torch.randn(FIXED, width) / FIXED**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(x @ self.down) @ self.up


def around(make: Callable[[int], nn.Module], width: int) -> nn.Module:
    """A model of two such layers between an embedding and a readout."""
    ends = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
    return nn.Sequential(nn.Embedding(VOCAB, width), nn.Linear(width, width), make(width), make(width), *ends)


def normed(width: int) -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(width, width)), nn.GELU())


class DeepAndCross(nn.Module):
    def __init__(self, width: int, *, embedding: int | None = None) -> None:
        super().__init__()
        size = embedding or width // 4
        self.tables = nn.ModuleList(nn.Embedding(VOCAB, size) for _ in range(4))
        self.cross = nn.ModuleList(nn.Linear(4 * size, 4 * size) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(4 * size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.out = nn.Linear(4 * size + width, NUM_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        first = x = torch.cat([table(part) for table, part in zip(self.tables, ids.unbind(-1), strict=True)], -1)
        for layer in self.cross:
            x = first * layer(x) + x
        return self.out(torch.cat([x, self.deep(first)], -1))


class DLRM(nn.Module):
    """Features meet in dot products over the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCAB, width) for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.top = nn.Sequential(nn.Linear(16 + width, width), nn.ReLU(), nn.Linear(width, NUM_CLASSES))
        self.factor = width**-0.5

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.stack([table(part) for table, part in zip(self.tables, ids.unbind(-1), strict=True)], 1)
        bottom = self.bottom(x.mean(1))
        return self.top(torch.cat([(self.factor * x @ x.mT).flatten(1), bottom], -1))


class SplitDLRM(DLRM):
    """A layer for each part of what the other one concatenates: one for the dot products, one for the part that scales."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.dots, self.deep = nn.Linear(16, width, bias=False), nn.Linear(width, width)
        self.top = nn.Sequential(nn.ReLU(), nn.Linear(width, NUM_CLASSES))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.stack([table(part) for table, part in zip(self.tables, ids.unbind(-1), strict=True)], 1)
        dots = (self.factor * x @ x.mT).flatten(1)
        return self.top(self.dots(dots) + self.deep(self.bottom(x.mean(1))))


def scale_dots(model: Any, plan: Any) -> None:
    """Makes the dot products fall as 1 / m_d in all, as the plan's note says. The model's own factor falls as its root."""
    model.factor *= plan.output_factor**0.5
    settle_all(model, plan)


class EinsumAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        heads = width // HEAD_DIM
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(width, heads, HEAD_DIM) / width**0.5) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(heads * HEAD_DIM, width) / width**0.5)
        self.scale, self.head_dim = HEAD_DIM**-0.5, HEAD_DIM

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhk->bhtk", x, weight) for weight in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return x + out.transpose(1, 2).flatten(2) @ self.wo


def convnet(width: int) -> nn.Module:
    """Convolutions with batch norms, and groups of fixed size."""

    def stage(stride: int) -> tuple[nn.Module, ...]:
        grouped = nn.Conv2d(width, width, 3, stride=stride, padding=1, groups=width // HEAD_DIM)
        return grouped, nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU()

    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, NUM_CLASSES)
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *stage(2), *stage(1), *ends)


def denoised(seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (noise(seed, 2, 3, 4, 4), noise(seed + 1, 2, 8)), labels(seed, 2, 4, 4)


def squared(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[:2]), batch[2])


def ids_of(seed: int) -> tuple[Tensor, Tensor]:
    return tokens(seed, num=16, length=4), labels(seed, 16)


def clicks(name: str, make: Callable[[int], nn.Module], **facts: Any) -> Architecture:
    return Architecture(name, make, ids_of, loss_of, logits_of, first, **facts)


RIGHT = ("hidden", 0)  # x @ W
PLAIN = [
    lm("LSTM", LSTM),
    lm("LSTM, tied", partial(LSTM, tied=True)),
    lm("LSTM, embedding of fixed size", partial(LSTM, embedding=32)),
    Architecture(
        "U-Net",
        UNet,
        denoised,
        loss_of,
        logits_of,
        first,
        roles={"inp.weight": "embedding", "time.0.weight": "embedding", "out.weight": "unembedding"},
    ),
    classifier("Mixer", Mixer, NUM_PATCHES, FEATURES, num=1, roles={"blocks.*.t?.weight": "hidden"}),
    classifier("Mixer, token layers of fixed size", partial(Mixer, token_width=FIXED), NUM_PATCHES, FEATURES, num=1),
    classifier("ViT by hand", ViT, 3, 8, 8),
    Architecture(
        "DiT",
        DiT,
        lambda s: (noise(s, 4, 4, FEATURES), labels(s, 4), noise(s + 1, 4, 4, FEATURES)),
        squared,
        lambda model, batch: model(batch[:2]),
        lambda batch: (batch[:2],),
    ),
    Architecture(
        "two towers",
        TwoTowers,
        lambda s: (tokens(s, length=8), torch.arange(8)),
        loss_of,
        logits_of,
        first,
        prepare=scale_similarity,
    ),
    classifier("graph network, raw matrices", GNN, 4, FEATURES, prepare=scale_similarity, roles=GNN_ROLES),
    lm("experts, raw matrices", partial(around, Experts), roles={"*.w1.*": RIGHT, "*.w2.*": RIGHT}),
    lm(
        "experts of fixed size, raw matrices",
        partial(around, partial(Experts, inner=FIXED)),
        roles={"*.w1.*": RIGHT, "*.w2.*": RIGHT},
    ),
    lm("low-rank layers, raw matrices", partial(around, LowRank), roles={"*.down": RIGHT, "*.up": RIGHT}),
    lm("weight norm", partial(around, normed), roles={"*.original0": "vector", "*.original1": ("hidden", 1)}),
    classifier("grouped convolutions, batch norm", convnet, 3, 4, 4),
    clicks("Deep & Cross", DeepAndCross),
    clicks("Deep & Cross, embeddings of fixed size", partial(DeepAndCross, embedding=8), roles={"deep.0.weight": "embedding"}),
    clicks("DLRM", DLRM),
    clicks(
        "DLRM, a layer for each part",
        SplitDLRM,
        prepare=scale_dots,
        roles={"top.1.weight": "unembedding", "dots.weight": "hidden"},
    ),
    lm("einsum attention", partial(around, EinsumAttention), roles={"*.w?": RIGHT}),
]
