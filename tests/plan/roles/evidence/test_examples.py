"""Roles with an example, whose forward pass shows how each parameter is used; and what is asked or noted without one."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import smupar
from tests.plan.roles.nets import LM, TOKENS, refusal, suggested, widths
from tests.support.models import Residual, on_meta, sequential

IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
ROWS = torch.linspace(-1, 1, 4 * 8).reshape(4, 8)


def kinds(plan):
    return {note.kind for note in plan.notes}


class LowRank(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(width, 8)), nn.Parameter(torch.randn(8, width))

    def forward(self, x):
        return x + F.gelu(x @ self.down) @ self.up


class Experts(nn.Module):
    """Experts of fixed size in 3-D parameters, stored as (out, in)."""

    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, 3, bias=False)
        self.into, self.back = nn.Parameter(torch.randn(3, 8, width)), nn.Parameter(torch.randn(3, width, 8))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        hidden = F.gelu(torch.einsum("btd,efd->btef", x, self.into))
        return x + torch.einsum("btef,edf,bte->btd", hidden, self.back, shares)


class ExpertList(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, 3, bias=False)
        self.into = nn.ParameterList(nn.Parameter(torch.randn(width, 8)) for _ in range(3))
        self.back = nn.ParameterList(nn.Parameter(torch.randn(8, width)) for _ in range(3))

    def forward(self, x):
        shares = self.router(x).softmax(-1).unbind(-1)
        experts = zip(shares, self.into, self.back, strict=True)
        return x + sum(share[..., None] * (torch.tanh(x @ into) @ back) for share, into, back in experts)


def with_block(block):
    """Embedding, a block, a readout."""

    def make(width):
        return nn.Sequential(nn.Embedding(40, width), block(width), nn.LayerNorm(width), nn.Linear(width, 40, bias=False))

    return make


# name of the weight -> (input dimensions, m_in, m_out)
FIXED_SIZES = {
    "low rank": (LowRank, {"down": ((0,), 4, 1), "up": ((0,), 1, 4)}),
    "3-D experts": (Experts, {"router.weight": ((1,), 4, 1), "into": ((2,), 4, 1), "back": ((2,), 1, 4)}),
    "lists of experts": (ExpertList, {"router.weight": ((1,), 4, 1), "into.1": ((0,), 4, 1), "back.2": ((0,), 1, 4)}),
}


@pytest.mark.parametrize(("block", "expected"), FIXED_SIZES.values(), ids=FIXED_SIZES)
def test_raw_matrices_of_fixed_size_are_asked_for_and_an_example_decides(block, expected):
    make = with_block(block)
    error = refusal(make(64), base=make(16), match="pass example=")
    assert all(f"1.{name} " in str(error) for name in expected)
    plan = smupar.make_plan(make(64), base=make(16), example=TOKENS)
    for name, (in_dims, m_in, m_out) in expected.items():
        row = plan[f"1.{name}"]
        role = "router" if name == "router.weight" else "hidden"
        assert (row.role, row.in_dims, row.width_in, row.width_out) == (role, in_dims, m_in, m_out)
        assert row.lr_factors["adam"] == 1 / m_in
    assert (plan["0.weight"].role, plan["3.weight"].role) == ("embedding", "unembedding")


class Pooled(nn.Module):
    """Attention pooling over the states of an RNN, whose own gates are sigmoids."""

    def __init__(self, width, rnn):
        super().__init__()
        self.table, self.rnn = nn.Embedding(40, width), rnn(width, width, batch_first=True)
        self.keys, self.score = nn.Linear(width, width), nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(width, 5)

    def forward(self, tokens):
        states, _ = self.rnn(self.table(tokens))
        shares = self.score(self.keys(states).tanh()).softmax(1)
        return self.head((shares * states).sum(1))


@pytest.mark.parametrize("rnn", [nn.GRU, nn.LSTM])
def test_scores_that_weight_the_states_of_an_rnn_are_a_router(rnn):
    plan = smupar.make_plan(Pooled(64, rnn), base=Pooled(16, rnn), example=TOKENS, density=1 / 4)
    assert (plan["score.weight"].role, plan["score.weight"].density) == ("router", 1)
    assert plan["rnn.weight_ih_l0"].role == plan["rnn.weight_hh_l0"].role == "hidden"


class Mixer(nn.Module):
    """Mixes 4 patches by layers whose inner size follows the width."""

    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"t1": nn.Linear(4, width // 2), "t2": nn.Linear(width // 2, 4), "c": nn.Linear(width, width)})
            for _ in range(2)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.stem(x).flatten(2).mT
        for block in self.blocks:
            x = x + block["t2"](F.gelu(block["t1"](x.mT))).mT
            x = x + F.gelu(block["c"](x))
        return self.head(x.mean(1))


class Projected(nn.Module):
    """As OPT-350m: the tied table has a fixed size, and two layers lead from it to the width and back."""

    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(40, 12)
        self.project_out, self.project_in = nn.Linear(width, 12, bias=False), nn.Linear(12, width, bias=False)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(12, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.project_out(torch.tanh(self.inner(self.project_in(self.table(tokens))))))


class UNet(nn.Module):
    """The embedding of time is registered before the stem."""

    def __init__(self, width):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.out = nn.Conv2d(2 * width, 3, 1)

    def forward(self, x, time):
        x = self.stem(x) + self.time(time)[..., None, None]
        return self.out(torch.cat([x, self.up(F.silu(self.down(x)))], 1))


class TwoTowers(nn.Module):
    """As CLIP: a tower for text, registered first, and one for images; cosines are the output."""

    def __init__(self, width):
        super().__init__()
        self.table, self.text = nn.Embedding(40, width), nn.Linear(width, width)
        self.patches, self.image = nn.Conv2d(3, width, 4, 4), nn.Linear(width, width)
        self.text_out, self.image_out = nn.Linear(width, 6, bias=False), nn.Linear(width, 6, bias=False)

    def forward(self, tokens, images):
        text = self.text_out(torch.tanh(self.text(self.table(tokens).mean(1))))
        image = self.image_out(torch.tanh(self.image(self.patches(images).flatten(2).mean(2))))
        return F.normalize(text, dim=-1) @ F.normalize(image, dim=-1).T


class DeepAndCross(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 4) for _ in range(3))
        self.cross = nn.Linear(12, 12)
        self.deep = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width))
        self.out = nn.Linear(width + 12, 1)

    def forward(self, ids):
        x = torch.cat([table(ids[:, place]) for place, table in enumerate(self.tables)], -1)
        return self.out(torch.cat([self.deep(x), x + x * self.cross(x)], -1))


class LogitsByHand(nn.Module):
    """The layer that leads into a bottleneck is registered last, where a readout would be."""

    def __init__(self, width):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(40, width), nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, tokens):
        x = self.table(tokens)
        return F.linear(x + self.up(torch.tanh(self.down(x))), self.table.weight)


def weight_normed(width):
    model = sequential(width)
    for place in (0, 2, 4):
        parametrizations.weight_norm(model[place])
    return model


PARTS = "parametrizations.weight.original"
# The example, the line that the question proposes, and what the example decides: roles, of some with (m_in, m_out).
ENDS = {
    "token layers of a mixer": (
        Mixer, IMAGES,
        {"blocks.*.t1.weight": "hidden", "blocks.*.t2.weight": "hidden", "head.weight": "unembedding"},
        {"stem.weight": "embedding", "blocks.0.t1.weight": ("hidden", 1, 4), "blocks.0.t2.weight": ("hidden", 4, 1),
         "blocks.1.t1.weight": ("hidden", 1, 4), "blocks.1.t2.weight": ("hidden", 4, 1), "head.weight": "unembedding"},
    ),
    "a bottleneck registered where a readout would be": (
        LogitsByHand, TOKENS,
        {"up.weight": "embedding", "down.weight": "unembedding"},
        {"up.weight": "hidden", "down.weight": "hidden"},
    ),
    "directions and sizes of a weight norm": (
        weight_normed, ROWS,
        {f"0.{PARTS}0": "vector", f"2.{PARTS}0": "vector", f"*.{PARTS}1": ("hidden", 1)},
        {f"0.{PARTS}0": "vector", f"2.{PARTS}0": "vector", f"4.{PARTS}0": "fixed",
         f"0.{PARTS}1": "embedding", f"2.{PARTS}1": ("hidden", 4, 4), f"4.{PARTS}1": "unembedding"},
    ),
    "projections round a fixed table": (
        Projected, TOKENS,
        {"project_out.weight": "unembedding", "project_in.weight": "embedding"},
        {"project_out.weight": "unembedding", "project_in.weight": "embedding", "inner.weight": "hidden"},
    ),
    "a stem after the embedding of time": (
        UNet, (IMAGES, ROWS[:2]),
        {"stem.weight": "embedding"},
        {"stem.weight": "embedding", "time.0.weight": "embedding", "time.2.weight": "hidden", "out.weight": "unembedding"},
    ),
    "two towers": (
        TwoTowers, (TOKENS, IMAGES),
        {"patches.weight": ..., "text_out.weight": ..., "image_out.weight": ...},  # nothing but their order to guess from
        {"table.weight": "embedding", "patches.weight": "embedding", "text_out.weight": "hidden",
         "image_out.weight": "hidden"},  # cosines: the factor of an unembedding would be divided out
    ),
    "deep and cross": (
        DeepAndCross, TOKENS[:, :3] % 10,
        {"deep.0.weight": "embedding"},
        {"deep.0.weight": "embedding", "deep.2.weight": "hidden", "cross.weight": "fixed", "out.weight": "unembedding"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "example", "proposal", "decided"), ENDS.values(), ids=ENDS)
def test_layers_at_the_ends_are_asked_for_and_an_example_decides(make, example, proposal, decided):
    error = refusal(make(64), base=make(16), match="pass example=")
    assert suggested(error) == proposal
    plan = smupar.make_plan(make(64), base=make(16), example=example)
    for name, expected in decided.items():
        row = plan[name]
        assert expected in (row.role, (row.role, row.width_in, row.width_out)), name


class EinsumAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(40, width)
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(width, width // 4, 4)) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(width // 4, 4, width))
        self.head = nn.Linear(width, 40)

    def forward(self, tokens):
        x = self.table(tokens)
        q, k, v = (torch.einsum("btd,dhk->bthk", x, weight) for weight in (self.wq, self.wk, self.wv))
        shares = torch.einsum("bqhk,bshk->bhqs", q, k).softmax(-1)
        y = torch.einsum("bhqs,bshk->bqhk", shares, v)
        return self.head(x + torch.einsum("bthk,hkd->btd", y, self.wo))


def test_einsum_attention_reads_the_right_dimensions():
    plan = smupar.make_plan(EinsumAttention(64), base=EinsumAttention(16), example=TOKENS)
    assert plan["wq"].in_dims == plan["wk"].in_dims == plan["wv"].in_dims == (0,)
    assert plan["wo"].in_dims == (0, 1)
    assert widths(plan, "wq", "wo") == [(4, 4), (4, 4)]
    assert plan["wq"].init_std == plan["wo"].init_std == pytest.approx((16 * 4) ** -0.5, rel=1e-12)
    assert "dot product" not in kinds(plan)  # heads have 4 entries at every width


def test_several_input_dimensions_can_be_named():
    answers = {"w[qkv]": ("hidden", 0), "wo": ("hidden", (0, 1))}
    model = EinsumAttention(64)
    plan = smupar.parameterize(model, base=EinsumAttention(16), roles=answers, density=0.25, pattern="fan_in")
    assert plan["wo"].in_dims == (0, 1)
    assert plan["wo"].init_std == pytest.approx((16 * 4 * 0.25) ** -0.5, rel=1e-12)
    assert set(torch.count_nonzero(model.wo, dim=(0, 1)).tolist()) == {16}  # a quarter of 16 x 4 inputs for each output
    for wrong in ((), (0, 0), (0, 3), (0, 1, 2)):
        refusal(
            EinsumAttention(64), base=EinsumAttention(16), roles={**answers, "wo": ("hidden", wrong)}, match="'wo' of shape"
        )


def test_state_matrix_that_acts_by_element_is_a_vector():
    class Scan(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.rates = nn.Parameter(torch.ones(width, 8))

        def forward(self, x):
            return x + (x[..., None] * torch.exp(-self.rates)).amax(-1)

    make = with_block(Scan)
    refusal(make(64), base=make(16), match="or act element by element")
    assert smupar.make_plan(make(64), base=make(16), example=TOKENS)["1.rates"].role == "vector"


# Sizes that scale in part


class Fused(nn.Module):
    """As Mamba: one layer writes a part that follows the width and two parts of 8."""

    def __init__(self, width):
        super().__init__()
        self.fused, self.rate = nn.Linear(width, width // 4 + 16), nn.Linear(width // 4, width)

    def forward(self, x):
        rate, b, c = self.fused(x).split([self.rate.in_features, 8, 8], -1)
        return x * F.softplus(self.rate(rate)) * (b * c).mean(-1, keepdim=True)


@pytest.mark.parametrize("example", [None, TOKENS], ids=["without an example", "with an example"])
def test_output_that_scales_in_part_is_noted(example):
    make = with_block(Fused)
    plan = smupar.make_plan(make(64), base=make(16), example=example)
    (note,) = (note for note in plan.notes if note.kind == "writes in part")
    assert "'1.fused.weight' is writing" in str(note)
    assert not note.is_caution
    assert plan["1.fused.weight"].lr_factors["adam"] == 0.25


@pytest.mark.parametrize("example", [None, TOKENS[:, :3] % 10], ids=["without an example", "with an example"])
def test_input_that_scales_in_part_is_noted(example):
    answers = {"deep.0.weight": "embedding"}
    plan = smupar.make_plan(DeepAndCross(64), base=DeepAndCross(16), example=example, roles=answers)
    (note,) = (note for note in plan.notes if note.kind == "reads in part")
    assert "'out.weight' is reading" in str(note)
    assert widths(plan, "out.weight") == [(Fraction(64 + 12, 16 + 12), 1)]


def test_concatenation_of_parts_that_all_scale_is_not_noted():
    for example in (None, (IMAGES, ROWS[:2])):
        plan = smupar.make_plan(UNet(64), base=UNet(16), example=example, roles={"stem.weight": "embedding"})
        assert not kinds(plan) & {"reads in part", "writes in part"}


# Products that no layer shows


class Towers(nn.Module):
    """Two towers with outputs of fixed size."""

    def __init__(self, width, score):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 8)) for _ in range(2))
        self.score = score

    def forward(self, x):
        return self.score(self.left(x), self.right(x))


PRODUCTS = {
    "dot product": (lambda a, b: (a * b).sum(-1), True),
    "matrix of scores": (lambda a, b: a @ b.mT, True),
    "product": (lambda a, b: a * b, True),
    "sum": (lambda a, b: a + b, False),
    "gate": (lambda a, b: a.sigmoid() * b, False),
    "cosine": (lambda a, b: F.cosine_similarity(a, b, dim=-1), False),
}


@pytest.mark.parametrize(("score", "is_asked"), PRODUCTS.values(), ids=PRODUCTS)
def test_readouts_are_asked_for_if_the_output_is_their_product(score, is_asked):
    model, base, x = Towers(64, score), Towers(16, score), torch.randn(4, 6)
    if not is_asked:
        smupar.make_plan(model, base=base, example=x)
        return
    roles = suggested(refusal(model, base=base, example=x, match="product vanishes"))
    assert roles == {"left.2.weight": ("hidden", 1)}
    plan = smupar.make_plan(model, base=base, example=x, roles=roles)
    assert plan["right.2.weight"].role == "unembedding"


class Retrieval(nn.Module):
    def __init__(self, width, score):
        super().__init__()
        self.table, self.left, self.right = nn.Embedding(40, width), nn.Linear(width, width), nn.Linear(width, width)
        self.score = score

    def forward(self, tokens):
        x = self.table(tokens)
        return self.score(self.left(x), self.right(x))


def _pairs(parts):
    """Products of all pairs of parts, as a factorization machine computes them."""
    return 0.5 * (parts.sum(0).square() - parts.square().sum(0))


def _with_temperature(a, b):
    """As XCLIP: a parameter multiplies one side."""
    return torch.einsum("bnd,bmd->bnm", F.normalize(a, dim=-1), nn.Parameter(torch.zeros(())).exp() * F.normalize(b, dim=-1))


SCORES = {
    "matrix of scores": (lambda a, b: a @ b.mT, True),
    "sum of products": (lambda a, b: (a * b).sum(-1), True),
    "einsum": (lambda a, b: torch.einsum("btd,bsd->bts", a, b), True),
    "halved": (lambda a, b: (0.5 * (a * b)).sum(-1), True),
    "difference of squares": (lambda a, b: ((a + b).square() - (a - b).square()).sum(-1), True),
    "factorization machine": (lambda a, b: _pairs(torch.stack([a, b])).sum(-1), True),
    "variance": (lambda a, b: a.square().mean(-1) - a.mean(-1).square() + b.sum(-1), False),
    "mean of products": (lambda a, b: (a * b).mean(-1), False),
    "cosine": (lambda a, b: F.cosine_similarity(a, b, dim=-1), False),
    "normalised": (lambda a, b: F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).mT, False),
    "normalised, with a temperature": (_with_temperature, False),
    "normalised by hand": (lambda a, b: (a / a.pow(2).sum(-1, keepdim=True).sqrt()) @ F.normalize(b, dim=-1).mT, False),
    "attention": (lambda a, b: (a @ b.mT).softmax(-1) @ b, False),  # of which the attention scale reminds
    "gates": (lambda a, b: a * b, False),
}


@pytest.mark.parametrize(("score", "is_noted"), SCORES.values(), ids=SCORES)
def test_dot_product_over_the_width_is_noted_unless_it_is_normalised(score, is_noted):
    plan = smupar.make_plan(Retrieval(64, score), base=Retrieval(16, score), example=TOKENS)
    assert ("dot product" in kinds(plan)) is is_noted


def _capsules(a, b):
    """Votes of capsules of fixed size, whose number follows the width."""
    votes = a.unflatten(-1, (-1, 4)) * b.unflatten(-1, (-1, 4))[..., :1].sigmoid()
    return votes.sum(-2)


SUMS = {
    "over the width": (lambda a, b: (a + b).sum(-1), True),
    "over capsules": (_capsules, True),
    "over tokens": (lambda a, b: (a + b).sum(1), False),
    "mean": (lambda a, b: (a + b).mean(-1), False),
    "length by hand": (lambda a, b: b / a.square().sum(-1, keepdim=True).sqrt(), False),
    "softmax by hand": (lambda a, b: (a @ b.mT).exp() / (a @ b.mT).exp().sum(-1, keepdim=True) @ b, False),
}


@pytest.mark.parametrize(("score", "is_noted"), SUMS.values(), ids=SUMS)
def test_sum_of_outputs_over_the_width_is_noted(score, is_noted):
    plan = smupar.make_plan(Retrieval(64, score), base=Retrieval(16, score), example=TOKENS)
    assert ("sum" in kinds(plan)) is is_noted


def _by_hand(a, b):
    centred = a - a.mean(-1, keepdim=True)
    return centred / centred.square().sum(-1, keepdim=True).sqrt() * b


DISTANCES = {
    "squares": (lambda a, b: (a - b).square().sum(-1), True),
    "of all pairs": (lambda a, b: (a[:, :, None] - b[:, None]).pow(2).sum(-1), True),
    "norm": (lambda a, b: (a - b).norm(dim=-1), True),
    "torch's": (lambda a, b: F.pairwise_distance(a, b), True),
    "torch's of all pairs": (lambda a, b: torch.cdist(a, b), True),
    "mean": (lambda a, b: (a - b).square().mean(-1), False),
    "mean squared error": (lambda a, b: F.mse_loss(a, b), False),
    "over tokens": (lambda a, b: (a - b).square().sum(1), False),
    "norm by hand": (_by_hand, False),
}


@pytest.mark.parametrize(("score", "is_noted"), DISTANCES.values(), ids=DISTANCES)
def test_distance_over_the_width_is_noted(score, is_noted):
    plan = smupar.make_plan(Retrieval(64, score), base=Retrieval(16, score), example=TOKENS)
    assert ("distance" in kinds(plan)) is is_noted


class Divided(Retrieval):
    """Scores are divided by the root of the width; ``also`` multiplies what the layers read by the same number."""

    def __init__(self, width, *, also):
        super().__init__(width, torch.matmul)
        self.factor, self.also = width**-0.5, also

    def forward(self, tokens):
        x = self.table(tokens) * (self.factor if self.also else 1.0)
        return self.factor * self.left(x) @ self.right(x).mT


def test_number_that_multiplies_sums_over_the_width_alone_is_left_alone():
    model = Divided(64, also=False)
    plan = smupar.parameterize(model, base=Divided(16, also=False), example=TOKENS, multipliers="base")
    assert plan.multipliers == ()
    assert model.factor == 1 / 8
    assert any("left to follow the width" in str(note) and "factor = 0.125" in str(note) for note in plan.notes)
    both = smupar.make_plan(Divided(64, also=True), base=Divided(16, also=True), example=TOKENS)
    assert "factor = 0.125 (base: 0.25)" in both.pending["multipliers"]  # which of its two uses counts cannot be told


class PerHead(nn.Module):
    """A matrix of fixed size for each head, of which wider models have more."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width // 8, 8, 8))

    def forward(self, x):
        return torch.einsum("bthd,hde->bthe", x.unflatten(-1, (-1, 8)), self.weight).flatten(2)


def test_matrices_of_heads_read_a_fixed_size_and_write_the_width():
    make = with_block(PerHead)
    row = smupar.make_plan(make(64), base=make(16), example=TOKENS, density=0.5)["1.weight"]
    assert (row.role, row.in_dims, row.width_in, row.width_out) == ("hidden", (1,), 1, 4)
    assert row.init_std == pytest.approx((8 * 0.5) ** -0.5)  # each output is a sum over the 8 entries of its own head
    assert (row.lr_factors["adam"], row.lr_factors["sgd"]) == (2, 8)  # 1 / rho, and m_out / rho


class Viewer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.attention = nn.Embedding(40, width), nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, tokens):
        q, k, v = self.attention(self.table(tokens)).chunk(3, -1)
        x = self.projection(F.scaled_dot_product_attention(q, k, v, scale=0.1))
        return F.normalize(x, dim=-1) @ F.normalize(x, dim=-1).mT


def test_small_base_and_large_model_are_compared_although_one_runs_without_values():
    plan = smupar.make_plan(on_meta(Viewer, 1280), base=on_meta(Viewer, 16), example=TOKENS)
    assert plan.pending.keys() == {"attention_scale"}  # outputs are cosines, so no output factor is missing
    assert not {"example", "dot product"} & kinds(plan)


class Eyes(nn.Module):
    """Reads pictures, too, if there are any."""

    def __init__(self, width):
        super().__init__()
        self.lm, self.eye = LM(width), nn.Parameter(torch.randn(6, width))

    def forward(self, tokens, pictures=None):
        return self.lm(tokens) if pictures is None else self.lm.head(pictures @ self.eye)


def test_question_about_parameters_that_the_example_does_not_use_says_so():
    error = refusal(Eyes(64), base=Eyes(16), example=TOKENS, match="does not use all of them: pass example=, a batch that does")
    assert list(suggested(error)) == ["eye"]
    both = {"tokens": TOKENS, "pictures": torch.ones(2, 6)}
    plan = smupar.make_plan(Eyes(64), base=Eyes(16), example=both)
    assert plan["eye"].role == "embedding"


class UnitNorm(nn.Module):
    """Divides vectors of ``size`` entries by their length, and multiplies them by ``factor`` times the root of the width."""

    def __init__(self, width, *, size=None, factor=1.0):
        super().__init__()
        self.scale, self.shape = factor * width**0.5, (-1, size or width)
        self.gain = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return (F.normalize(x.unflatten(-1, self.shape), dim=-1) * self.scale).flatten(-2) * (self.gain + 1)


@pytest.mark.parametrize(
    ("settings", "is_asked"),
    [({}, False), ({"size": 8}, True), ({"factor": 3.0}, True)],
    ids=["the width", "a fixed size", "another number"],
)
def test_root_of_the_width_in_a_norm_is_left_alone(settings, is_asked):
    make = with_block(lambda width: UnitNorm(width, **settings))
    plan = smupar.make_plan(make(64), base=make(16), example=TOKENS)
    assert ("multipliers" in plan.pending) == is_asked
    assert any("left to follow the width" in str(note) for note in plan.notes) != is_asked


def test_vector_that_is_summed_is_noted():
    class Pool(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.query = nn.Parameter(torch.randn(width))

        def forward(self, x):
            return x * (x @ self.query).softmax(-1)[..., None]

    make = with_block(Pool)
    plan = smupar.make_plan(make(64), base=make(16), example=TOKENS)
    (note,) = (note for note in plan.notes if note.kind == "summed vector")
    assert "'1.query'" in str(note)
    assert "(1, 64)" in str(note)


# What an example cannot decide


class Echo(nn.Module):
    """The readout's logits are also fed back."""

    def __init__(self, width):
        super().__init__()
        self.table, self.head, self.back = nn.Embedding(40, width), nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, tokens):
        logits = self.head(self.table(tokens))
        return logits, self.back(logits)


class Tied(nn.Module):
    """One matrix leads down, and its transpose up again."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 6))

    def forward(self, x):
        return x @ self.weight @ self.weight.T


UNDECIDED = {
    "a readout that is fed back": (Echo, "makes a part of the model's output .* but other layers read it too"),
    "a matrix and its transpose": (with_block(Tied), "is used in products that sum over different dimensions"),
}


@pytest.mark.parametrize(("make", "message"), UNDECIDED.values(), ids=UNDECIDED)
def test_uses_that_contradict_each_other_are_asked_for(make, message):
    error = refusal(make(64), base=make(16), example=TOKENS, match=message)
    assert "pass example=" not in str(error)


class Filters(nn.Module):
    """As S4D: the filter of each neuron is a sum over a fixed number of its states, and acts on the neuron alone."""

    def __init__(self, width):
        super().__init__()
        self.rate, self.weight = nn.Parameter(torch.rand(width, 8)), nn.Parameter(torch.randn(width, 8, 2))
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        filters = torch.einsum("hn,hnl->hl", torch.view_as_complex(self.weight), torch.exp(-self.rate[..., None] * places) + 0j)
        spectra = torch.fft.rfft(x.mT, n=16) * torch.fft.rfft(filters.real, n=16)
        return self.mix(torch.fft.irfft(spectra, n=16)[..., : x.shape[1]].mT)


def test_filters_of_single_neurons_are_vectors():
    plan = smupar.make_plan(with_block(Filters)(64), base=with_block(Filters)(16), example=TOKENS)
    assert (plan["1.rate"].role, plan["1.weight"].role, plan["1.mix.weight"].role) == ("vector", "vector", "hidden")


class Flow(nn.Module):
    """Affine couplings: each writes data, which the next one reads."""

    def __init__(self, width):
        super().__init__()
        parts = (nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()) for _ in range(3))
        self.inner, self.out = nn.ModuleList(parts), nn.ModuleList(nn.Linear(width, 8) for _ in range(3))

    def forward(self, x):
        for inner, out in zip(self.inner, self.out, strict=True):
            first, second = x.chunk(2, -1)
            log_scale, shift = out(inner(first)).chunk(2, -1)
            x = torch.cat([second * log_scale.tanh().exp() + shift, first], -1)
        return x


def test_layers_that_write_data_are_suggested_to_be_readouts_as_the_last_of_them_is():
    """At width 512 (base 64) a flow of four such layers has its best rate at 2^-8 then, and below 2^-9 if they are hidden."""
    example = torch.randn(5, 8)
    error = refusal(Flow(64), base=Flow(16), example=example)
    assert suggested(error) == {"out.0.weight": "unembedding", "out.1.weight": "unembedding"}
    plan = smupar.make_plan(Flow(64), base=Flow(16), example=example, roles=suggested(error))
    assert {plan[f"out.{number}.weight"].role for number in range(3)} == {"unembedding"}


class Branching(nn.Module):
    """Control flow that needs values."""

    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(width, 8)), nn.Parameter(torch.randn(8, width))

    def forward(self, x):
        return x @ self.down @ self.up if bool((x * x).sum() >= 0) else x


def test_control_flow_that_needs_values_is_followed_in_small_models_also_on_meta():
    make = with_block(Branching)
    plan = smupar.make_plan(on_meta(make, 64), base=on_meta(make, 16), example=TOKENS)
    assert widths(plan, "1.down", "1.up") == [(4, 1), (1, 4)]


class Uncopyable(LowRank):
    def __deepcopy__(self, memo):
        raise RuntimeError("this model has a lock")


class Wider(LowRank):
    """Takes another path when it is wide."""

    def forward(self, x):
        return super().forward(torch.cat([x, x], 0)[: len(x)] if x.shape[-1] > 16 else x)


FALLBACKS = {
    "another shape": (with_block(LowRank), torch.zeros(2, 3), "could not be run through base"),
    "another argument": (with_block(LowRank), {"tokens": TOKENS}, "could not be run through base"),
    "a model that cannot be copied": (with_block(Uncopyable), TOKENS, "could not be run through base.*this model has a lock"),
    "another path at another width": (with_block(Wider), TOKENS, "takes different paths through model and base"),
}


@pytest.mark.parametrize(("make", "example", "message"), FALLBACKS.values(), ids=FALLBACKS)
def test_examples_that_cannot_be_run_are_named_and_rules_without_them_hold(make, example, message):
    answers = {"1.down": ("hidden", 0), "1.up": ("hidden", 0)}
    with pytest.warns(smupar.PlanWarning, match=message):
        plan = smupar.make_plan(make(64), base=make(16), example=example, roles=answers)
    without = smupar.make_plan(make(64), base=make(16), roles=answers)
    assert [row.lr_factors for row in plan] == [row.lr_factors for row in without]


class ByNumpy(nn.Module):
    """Leaves torch between two layers, as a kernel of another library would."""

    def __init__(self, width):
        super().__init__()
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.after(torch.from_numpy(self.before(x).numpy().copy()))


def test_weight_whose_output_cannot_be_followed_is_named():
    make = with_block(ByNumpy)
    with pytest.warns(smupar.PlanWarning, match="cannot follow the output of '1.before.weight'.*input of '1.after.weight'"):
        smupar.make_plan(make(64), base=make(16), example=TOKENS)


def test_question_says_that_the_example_could_not_be_run():
    make = with_block(LowRank)
    refusal(make(64), base=make(16), example=torch.zeros(2, 3), match="the example could not be run through base")


def test_example_of_a_model_as_wide_as_its_base_asks_for_delta():
    with pytest.warns(smupar.PlanWarning, match="the example was not used.*delta="):
        smupar.make_plan(sequential(16), base=sequential(16), example=ROWS)
    make = with_block(LowRank)
    plan = smupar.make_plan(make(16), base=make(16), delta=make(32), example=TOKENS)
    assert (plan["1.down"].role, plan["1.down"].in_dims, plan["1.down"].width_in) == ("hidden", (0,), 1)


def test_parameters_that_the_example_does_not_use_are_named():
    class Spare(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.used, self.spare = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x):
            return self.used(x)

    make = with_block(Spare)
    with pytest.warns(smupar.PlanWarning, match="does not use '1.spare.weight': roles there"):
        plan = smupar.make_plan(make(64), base=make(16), example=TOKENS)
    assert plan["1.spare.weight"].role == "hidden"


def test_experts_that_no_token_chose_are_used_as_their_siblings_are():
    class Switch(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.experts = nn.ModuleList(LowRank(width) for _ in range(3))

        def forward(self, x):
            return self.experts[0](x)

    make = with_block(Switch)
    plan = smupar.make_plan(make(64), base=make(16), example=TOKENS)
    assert plan["1.experts.2.down"].in_dims == (0,)
    assert widths(plan, "1.experts.2.down", "1.experts.2.up") == [(4, 1), (1, 4)]


@pytest.mark.parametrize("options", [{"fused": True}, {"num_kv_heads": 1}, {"tied": True, "num_kv_heads": 1}], ids=str)
def test_example_agrees_with_what_structure_decides(options):
    answers = {"[kv]_proj.weight": "hidden"} if "num_kv_heads" in options else None
    with_example = smupar.make_plan(LM(32, **options), base=LM(8, **options), example=TOKENS, density=0.5)
    without = smupar.make_plan(LM(32, **options), base=LM(8, **options), roles=answers, density=0.5)
    assert with_example.diff(without) == []


def test_example_decides_roles_of_a_model_that_is_deeper_than_its_base():
    def make(width, depth):
        blocks = (nn.Sequential(nn.LayerNorm(width), LowRank(width)) for _ in range(depth))
        return Residual(width, blocks, vocab=40, bias=False)

    plan = smupar.make_plan(make(64, 4), base=make(16, 2), example=TOKENS, depth="none")
    assert {plan[f"blocks.{block}.1.down"].in_dims for block in range(4)} == {(0,)}
    assert widths(plan, "blocks.3.1.down", "blocks.3.1.up") == [(4, 1), (1, 4)]
    assert any("differ in depth" in str(note) for note in plan.notes)


class Auxiliary(nn.Module):
    """A head that only the loss uses."""

    def __init__(self, width):
        super().__init__()
        self.body, self.aux, self.head = nn.Linear(6, width), nn.Linear(width, 8), nn.Linear(width, 5)

    def forward(self, x, target=None):
        hidden = self.body(x).relu()
        aux, logits = self.aux(hidden), self.head(hidden)
        return logits if target is None else (logits - target).pow(2).mean() + aux.pow(2).mean()


def test_head_that_only_the_loss_uses_is_asked_about_without_a_guess():
    refusal(
        Auxiliary(64), base=Auxiliary(16), example=torch.randn(3, 6), match=r"(?s)makes the loss too.*'aux\.weight': \.\.\."
    )
    plan = smupar.make_plan(Auxiliary(64), base=Auxiliary(16), example=(torch.randn(3, 6), torch.randn(3, 5)))
    assert (plan["aux.weight"].role, plan["head.weight"].role) == ("unembedding", "unembedding")
