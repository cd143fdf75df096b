"""Random small models whose right roles are known by construction, for the fuzz test of roles.

A model is a stem, some blocks and a head. Each part says of every weight that it adds which role it has and over which
dimensions it is summed (``Truth``). Sizes: tokens (2, 5), features (2, 5, 6), bottlenecks of 6 or 4.
"""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

LENGTH, FEATURES, VOCAB, CLASSES, NARROW = 5, 6, 11, 7, 4
EXAMPLE = (
    torch.arange(2 * LENGTH).reshape(2, LENGTH),
    torch.linspace(-1, 1, 2 * LENGTH * FEATURES).reshape(2, LENGTH, FEATURES),
)


@dataclass(frozen=True)
class Truth:
    """What a weight is. ``role`` is "ask" where no role is right."""

    role: str
    in_dims: tuple[int, ...] = ()
    out_dims: tuple[int, ...] = ()
    is_lookup: bool = False
    is_tied: bool = False

    @property
    def answer(self):
        """What a user would pass as ``roles=``."""
        if self.role != "hidden":
            return self.role
        return self.role, self.in_dims[0] if len(self.in_dims) == 1 else self.in_dims


INPUT = Truth("embedding", (1,), (0,))
HIDDEN = Truth("hidden", (1,), (0,))
HIDDEN_BACK = Truth("hidden", (0,), (1,))
ROUTER = Truth("router", (1,), (0,))
ROUTER_BACK = Truth("router", (0,), (1,))
OUTPUT = Truth("unembedding", (1,), (0,))
VECTOR, FIXED = Truth("vector"), Truth("fixed")


class Part(nn.Module):
    """Some weights, and a function of (part, x, tokens, features) that uses them."""

    def __init__(self, weights, use):
        super().__init__()
        self.truth = {}
        self.use = use
        for name, (weight, truth) in weights.items():
            setattr(self, name, weight if isinstance(weight, nn.Module) else nn.Parameter(weight))
            if isinstance(truth, dict):  # of a module with several weights, by their names
                self.truth |= {f"{name}.{leaf}": role for leaf, role in truth.items()}
            else:
                self.truth[f"{name}.weight" if isinstance(weight, nn.Module) else name] = truth

    def forward(self, x, tokens, features):
        return self.use(self, x, tokens, features)


def raw(*shape):
    return torch.randn(*shape) / 4


# Stems


def table(width, rng):
    return Part(
        {"embed": (nn.Embedding(VOCAB, width), Truth("embedding", (0,), (1,), is_lookup=True))},
        lambda p, x, tokens, features: p.embed(tokens),
    )


def linear_stem(width, rng):
    return Part({"fc": (nn.Linear(FEATURES, width), INPUT)}, lambda p, x, tokens, features: p.fc(features))


def raw_stem(width, rng):
    if rng.random() < 0.5:
        truth = Truth("embedding", (0,), (1,))
        return Part({"w": (raw(FEATURES, width), truth)}, lambda p, x, tokens, features: features @ p.w)
    return Part({"w": (raw(width, FEATURES), INPUT)}, lambda p, x, tokens, features: torch.einsum("btf,df->btd", features, p.w))


def conv_stem(width, rng):
    return Part(
        {"conv": (nn.Conv1d(FEATURES, width, 3, padding=1), Truth("embedding", (1, 2), (0,)))},
        lambda p, x, tokens, features: p.conv(features.mT).mT,
    )


def two_inputs(width, rng):
    lookup = Truth("embedding", (0,), (1,), is_lookup=True)
    return Part(
        {"embed": (nn.Embedding(VOCAB, width), lookup), "fc": (nn.Linear(FEATURES, width), INPUT)},
        lambda p, x, tokens, features: p.embed(tokens) + p.fc(features),
    )


def fixed_table(width, rng):
    return Part(
        {"embed": (nn.Embedding(VOCAB, FEATURES), FIXED), "into": (nn.Linear(FEATURES, width, bias=False), INPUT)},
        lambda p, x, tokens, features: p.into(p.embed(tokens)),
    )


def raw_table(width, rng):
    truth = Truth("embedding", (), (1,), is_lookup=True)
    return Part({"rows": (raw(VOCAB, width), truth)}, lambda p, x, tokens, features: p.rows[tokens])


STEMS = (table, table, linear_stem, raw_stem, conv_stem, two_inputs, fixed_table, raw_table)


# Blocks


def linear(width, rng):
    return Part({"fc": (nn.Linear(width, width), HIDDEN)}, lambda p, x, *_: F.gelu(p.fc(x)))


def mlp(width, rng):
    return Part(
        {"up": (nn.Linear(width, 2 * width), HIDDEN), "down": (nn.Linear(2 * width, width), HIDDEN)},
        lambda p, x, *_: p.down(F.gelu(p.up(x))),
    )


def raw_mlp(width, rng):
    """In both orders: x @ W, and W x by einsum or F.linear."""
    if rng.random() < 0.5:
        return Part(
            {"up": (raw(width, 2 * width), HIDDEN_BACK), "down": (raw(2 * width, width), HIDDEN_BACK)},
            lambda p, x, *_: torch.tanh(x @ p.up) @ p.down,
        )
    return Part(
        {"up": (raw(2 * width, width), HIDDEN), "down": (raw(width, 2 * width), HIDDEN)},
        lambda p, x, *_: F.linear(torch.einsum("btd,ed->bte", x, p.up).relu(), p.down),
    )


def square(width, rng):
    return Part({"w": (raw(width, width), HIDDEN)}, lambda p, x, *_: (p.w @ x.mT).mT)


def bottleneck(width, rng):
    size = rng.choice((NARROW, FEATURES))
    weights = {"down": (nn.Linear(width, size), HIDDEN), "up": (nn.Linear(size, width), HIDDEN)}
    if rng.random() < 0.5:
        weights = dict(reversed(weights.items()))
    return Part(weights, lambda p, x, *_: p.up(torch.tanh(p.down(x))))


def raw_bottleneck(width, rng):
    size = rng.choice((NARROW, FEATURES))
    if rng.random() < 0.5:
        return Part(
            {"down": (raw(width, size), HIDDEN_BACK), "up": (raw(size, width), HIDDEN_BACK)}, lambda p, x, *_: x @ p.down @ p.up
        )
    return Part(
        {"down": (raw(size, width), HIDDEN), "up": (raw(width, size), HIDDEN)},
        lambda p, x, *_: F.linear(F.linear(x, p.down), p.up),
    )


def conv(width, rng):
    return Part(
        {"conv": (nn.Conv1d(width, width, 3, padding=1), Truth("hidden", (1, 2), (0,)))}, lambda p, x, *_: p.conv(x.mT).mT
    )


def gate(width, rng):
    return Part(
        {"gate": (nn.Linear(width, 1), ROUTER), "fc": (nn.Linear(width, width), HIDDEN)},
        lambda p, x, *_: torch.sigmoid(p.gate(x)) * p.fc(x),
    )


def glu(width, rng):
    return Part(
        {"both": (nn.Linear(width, 4 * width), HIDDEN), "down": (nn.Linear(2 * width, width), HIDDEN)},
        lambda p, x, *_: p.down(F.glu(p.both(x))),
    )


def experts(width, rng):
    """Three experts in 3-D parameters, of scaling or of fixed size, with a router that may be raw."""
    size = rng.choice((2 * width, FEATURES))
    into, out = Truth("hidden", (1,), (2,)), Truth("hidden", (1,), (2,))
    router = (nn.Linear(width, 3), ROUTER) if rng.random() < 0.5 else (raw(width, 3), ROUTER_BACK)

    def use(p, x, *_):
        shares = (p.router(x) if isinstance(p.router, nn.Module) else x @ p.router).softmax(-1)
        outputs = torch.einsum("btef,efd->bted", F.gelu(torch.einsum("btd,edf->btef", x, p.into)), p.out)
        return (shares[..., None] * outputs).sum(2)

    return Part({"router": router, "into": (raw(3, width, size), into), "out": (raw(3, size, width), out)}, use)


def concatenation(width, rng):
    return Part(
        {"fc": (nn.Linear(width, width), HIDDEN), "join": (nn.Linear(2 * width, width), HIDDEN)},
        lambda p, x, *_: p.join(torch.cat([x, torch.tanh(p.fc(x))], -1)),
    )


def partial_concatenation(width, rng):
    return Part(
        {"join": (nn.Linear(width + FEATURES, width), HIDDEN)},
        lambda p, x, tokens, features: p.join(torch.cat([x, features], -1)),
    )


def attention(width, rng):
    heads = width // 4
    into, out = Truth("hidden", (0,), (1, 2)), Truth("hidden", (0, 1), (2,))

    def use(p, x, *_):
        q, k, v = (torch.einsum("btd,dhk->bhtk", x, weight) for weight in (p.wq, p.wk, p.wv))
        return torch.einsum("bhtk,hkd->btd", (q @ k.mT / 4).softmax(-1) @ v, p.wo)

    three = {name: (raw(width, heads, 4), into) for name in ("wq", "wk", "wv")}
    return Part({**three, "wo": (raw(heads, 4, width), out)}, use)


def token_mixing(width, rng):
    size = width // 2
    return Part(
        {"t1": (nn.Linear(LENGTH, size), HIDDEN), "t2": (nn.Linear(size, LENGTH), HIDDEN)},
        lambda p, x, *_: p.t2(F.gelu(p.t1(x.mT))).mT,
    )


def vectors(width, rng):
    return Part(
        {"scale": (1 + raw(width), VECTOR), "shift": (raw(1, LENGTH, width), VECTOR)}, lambda p, x, *_: x * p.scale + p.shift
    )


def positions(width, rng):
    return Part({"rows": (raw(LENGTH, width), VECTOR)}, lambda p, x, *_: x + p.rows)


def shared(width, rng):
    return Part({"fc": (nn.Linear(width, width), HIDDEN)}, lambda p, x, *_: torch.tanh(p.fc(torch.tanh(p.fc(x)))))


def stacked(width, rng):
    """Members of a ParameterList, stacked and multiplied at once; cast on the way."""
    size = rng.choice((width, FEATURES))
    members = nn.ParameterList(raw(width, size) for _ in range(3))

    def use(p, x, *_):
        outputs = torch.einsum("btd,edf->betf", x.double(), torch.stack([weight.double() for weight in p.members]))
        return p.back(outputs.float().sum(1))

    return Part({"members": (members, dict.fromkeys("012", HIDDEN_BACK)), "back": (nn.Linear(size, width), HIDDEN)}, use)


def fused(width, rng):
    """Slices of one raw matrix."""
    size = 2 * width

    def use(p, x, *_):
        return p.down(torch.tanh(x @ p.both[:, :size]) * (x @ p.both[:, size:]))

    return Part({"both": (raw(width, 2 * size), HIDDEN_BACK), "down": (nn.Linear(size, width), HIDDEN)}, use)


def by_hand(width, rng):
    """A product that is written as a multiplication and a sum."""
    return Part(
        {"w": (raw(width, NARROW), HIDDEN_BACK), "up": (raw(NARROW, width), HIDDEN_BACK)},
        lambda p, x, *_: (x[..., None] * p.w).sum(-2) @ p.up,
    )


def raw_conv(width, rng):
    truth = Truth("hidden", (1, 2), (0,))
    return Part({"w": (raw(width, width, 3), truth)}, lambda p, x, *_: F.conv1d(x.mT, p.w, padding=1).mT)


def chosen(width, rng):
    """Experts that are chosen by index."""
    truth = Truth("hidden", (2,), (1,))

    def use(p, x, *_):
        chosen = p.router(x).argmax(-1).flatten()
        return torch.bmm(p.w[chosen], x.flatten(0, 1)[..., None]).view_as(x) + p.bias[chosen].view_as(x)

    weights = {"w": (raw(3, width, width), truth), "bias": (raw(3, width), VECTOR)}
    return Part({"router": (nn.Linear(width, 3), ROUTER), **weights}, use)


def recurrent(width, rng):
    truth = {"weight_ih_l0": HIDDEN, "weight_hh_l0": HIDDEN}
    return Part({"rnn": (rng.choice((nn.GRU, nn.LSTM))(width, width, batch_first=True), truth)}, lambda p, x, *_: p.rnn(x)[0])


def normed(width, rng):
    def use(p, x, *_):
        x = p.norm(x)
        x += F.normalize(x, dim=-1)
        return p.fc(x)

    return Part({"norm": (nn.LayerNorm(width), VECTOR), "fc": (nn.Linear(width, width), HIDDEN)}, use)


def low_rank_change(width, rng):
    """A layer and a change of it in two factors, the second of them a part of a larger matrix."""
    return Part(
        {"fc": (nn.Linear(width, width), HIDDEN), "a": (raw(NARROW, width), HIDDEN), "b": (raw(width, NARROW), HIDDEN)},
        lambda p, x, *_: p.fc(x) + torch.matmul(p.b, torch.matmul(p.a, x.mT)).mT,
    )


def there_and_back(width, rng):
    """One matrix that narrows, and widens again by its transpose: no row of Table 1 fits both."""
    return Part({"w": (raw(width, NARROW), Truth("ask"))}, lambda p, x, *_: x @ p.w @ p.w.T)


BLOCKS = (
    linear, mlp, raw_mlp, raw_mlp, square, bottleneck, bottleneck, raw_bottleneck, conv, gate, glu, experts, experts,
    concatenation, partial_concatenation, attention, token_mixing, vectors, positions, shared, stacked, fused, by_hand,
    raw_conv, chosen, recurrent, normed, low_rank_change,
)  # fmt: skip


# Heads


def linear_head(width, rng):
    return Part({"fc": (nn.Linear(width, CLASSES), OUTPUT)}, lambda p, x, *_: p.fc(x))


def raw_head(width, rng):
    if rng.random() < 0.5:
        return Part({"w": (raw(width, CLASSES), Truth("unembedding", (0,), (1,)))}, lambda p, x, *_: x @ p.w)
    return Part({"w": (raw(CLASSES, width), OUTPUT)}, lambda p, x, *_: F.linear(x, p.w))


def two_heads(width, rng):
    heads = {"policy": (nn.Linear(width, CLASSES), OUTPUT), "value": (nn.Linear(width, 2), OUTPUT)}
    return Part(heads, lambda p, x, *_: {"policy": p.policy(x), "value": p.value(x).mean(1)})


def narrowing_head(width, rng):
    return Part(
        {"out": (nn.Linear(width, FEATURES, bias=False), OUTPUT), "fc": (nn.Linear(FEATURES, CLASSES), FIXED)},
        lambda p, x, *_: p.fc(p.out(x)),
    )


def normed_head(width, rng):
    """A norm divides out the size of what the layer writes, so no factor would act."""
    norm = rng.choice((nn.LayerNorm, nn.RMSNorm))(CLASSES)
    return Part({"fc": (nn.Linear(width, CLASSES), HIDDEN), "norm": (norm, FIXED)}, lambda p, x, *_: 3 * p.norm(p.fc(x)))


HEADS = (linear_head, linear_head, raw_head, two_heads, narrowing_head, normed_head)
WITH_FIXED_OUTPUT = (gate, experts, token_mixing, chosen, stacked)


class Model(nn.Module):
    """Parts in the order of their use; they may be registered in another order."""

    def __init__(self, width, seed):
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        stem, head = rng.choice(STEMS), rng.choice(HEADS)
        kinds = [rng.choice(BLOCKS) for _ in range(rng.randint(1, 4))]
        kinds += [linear] if all(kind in (vectors, positions) for kind in kinds) else []  # something to be made sparse
        kinds += [there_and_back] if rng.random() < 0.02 else []
        tied = stem is table and rng.random() < 0.4
        parts = [("stem", stem), *((f"{kind.__name__}{place}", kind) for place, kind in enumerate(kinds))]
        # Logits by hand leave no trace in shapes, so that another layer of fixed output would pass for the readout.
        self.by_hand = stem is table and not tied and rng.random() < 0.3 and not {*kinds} & {*WITH_FIXED_OUTPUT}
        parts += [] if tied or self.by_hand else [("head", head)]
        made = {name: kind(width, rng) for name, kind in parts}
        self.is_residual = [rng.random() < 0.7 for _ in kinds]
        self.order = list(made)
        names = list(made)
        if rng.random() < 0.4:
            rng.shuffle(names)
        for name in names:
            self.add_module(name, made[name])
        self.truth = {f"{name}.{leaf}": truth for name, part in made.items() for leaf, truth in part.truth.items()}
        if tied:
            self.head = nn.Linear(width, VOCAB, bias=False)
            self.head.weight = self.stem.embed.weight
            self.truth["stem.embed.weight"] = Truth("embedding", (0,), (1,), is_lookup=True, is_tied=True)

    def forward(self, tokens, features):
        blocks = [getattr(self, name) for name in self.order if name not in ("stem", "head")]
        x = self.stem(None, tokens, features)
        for block, residual in zip(blocks, self.is_residual, strict=False):
            y = block(x, tokens, features)
            x = x + y if residual else y
        if self.by_hand:
            return F.linear(x, self.stem.embed.weight)
        return self.head(x, tokens, features) if isinstance(self.head, Part) else self.head(x)
