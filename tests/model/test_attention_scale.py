"""The attention scale of models that keep it in a field, in none, or in one that does nothing, in several notations."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.plan.plan import Plan
from smupar.plan.scales.find_attention import find_attentions

HEAD, VOCAB = 8, 11
TOKENS = torch.arange(12).reshape(2, 6) % VOCAB


def split(x):
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


class Attention(nn.Module):
    """Queries, keys and values from three layers; subclasses say how logits are made."""

    own = HEAD**-0.5  # the number by which q.k is multiplied
    queries = ("q_proj",)

    def __init__(self, width):
        super().__init__()
        self.head_dim = HEAD
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(width, width) for _ in range(4))

    def parts(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x):
        q, k, v = map(split, self.parts(x))
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


class Field(Attention):
    def __init__(self, width):
        super().__init__(width)
        self.scale = HEAD**-0.5

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale)


class Divisor(Attention):
    """As GPT-J: the field divides."""

    def __init__(self, width):
        super().__init__(width)
        self.scale_attn = math.sqrt(HEAD)

    def mix(self, q, k, v):
        return torch.softmax(q @ k.mT / self.scale_attn, -1) @ v


class IdleField(Attention):
    """As Falcon: the field does nothing where torch's kernel is used. ``scaling`` of rotary positions is another number."""

    def __init__(self, width):
        super().__init__(width)
        self.inv_norm_factor = self.rope_scaling = HEAD**-0.5

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class HardCoded(Attention):
    """As nanoGPT: no field, and a bias that is not scaled."""

    def mix(self, q, k, v):
        logits = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        return F.softmax(logits.masked_fill(~mask, float("-inf")), dim=-1) @ v


class Sinks(Attention):
    """As GPT-OSS, without its field: a logit for no key, and the largest logit of each row is subtracted from all."""

    def __init__(self, width):
        super().__init__(width)
        self.sinks = nn.Parameter(torch.zeros(width // HEAD))

    def mix(self, q, k, v):
        logits = q @ k.mT / math.sqrt(HEAD)
        sinks = self.sinks[:, None, None].expand(len(q), -1, q.shape[-2], 1)
        logits = torch.cat([logits, sinks], -1)
        return F.softmax(logits - logits.amax(-1, keepdim=True), -1)[..., :-1] @ v


class Fused(HardCoded):
    """One layer; queries, keys and values of each head after each other."""

    def __init__(self, width):
        nn.Module.__init__(self)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def parts(self, x):
        return (part.flatten(2) for part in self.qkv(x).unflatten(-1, (-1, 3, HEAD)).unbind(-2))


class Normed(HardCoded):
    """A norm after the queries' layer: only the norm can scale them."""

    def __init__(self, width):
        super().__init__(width)
        self.q_norm = nn.LayerNorm(HEAD)

    def parts(self, x):
        q, k, v = super().parts(x)
        return self.q_norm(q.unflatten(-1, (-1, HEAD))).flatten(2), k, v


class Before(Attention):
    """As Flaubert: queries are divided before the product."""

    def mix(self, q, k, v):
        return torch.softmax((q / math.sqrt(HEAD)) @ k.mT, -1) @ v


class OnBothSides(Attention):
    """As U-Nets: queries and keys are multiplied, in einsum notation."""

    def mix(self, q, k, v):
        logits = torch.einsum("bhid,bhjd->bhij", q * HEAD**-0.25, k * HEAD**-0.25)
        return torch.einsum("bhij,bhjd->bhid", logits.softmax(-1), v)


class BeforeKernel(Attention):
    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q * HEAD**-0.5, k, v, scale=1.0)


class Twice(Attention):
    """The kernel divides again, so q.k is divided by the head size already."""

    own = 1 / HEAD

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q * HEAD**-0.5, k, v)


class FieldAndKernel(Twice):
    def __init__(self, width):
        super().__init__(width)
        self.scale = HEAD**-0.5

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q * self.scale, k, v)


class Unscaled(Attention):
    """As T5, without its field."""

    own = 1.0

    def mix(self, q, k, v):
        return torch.softmax(q @ k.mT, -1) @ v


class KeysFirst(Attention):
    def mix(self, q, k, v):
        return torch.softmax(k @ q.mT / math.sqrt(HEAD), -2).mT @ v


class Sum(HardCoded):
    """As Conditional DETR: two layers make the queries."""

    queries = ("q_proj", "q_position")

    def __init__(self, width):
        super().__init__(width)
        self.q_position = nn.Linear(width, width)

    def parts(self, x):
        q, k, v = super().parts(x)
        return q + self.q_position(x.flip(1)), k, v


class Convolutions(nn.Module):
    """As U-Nets: one convolution of images; no attribute shows the head size."""

    own = HEAD**-0.5

    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x):
        batch, num, width = x.shape
        q, k, v = self.qkv(x.mT.unflatten(-1, (2, -1))).reshape(batch, 3, -1, HEAD, num).unbind(1)
        mixed = v @ torch.softmax(q.mT @ k / math.sqrt(HEAD), -1).mT
        return self.out(mixed.reshape(batch, width, 2, -1)).flatten(2).mT


class MixedHeads(Attention):
    """Talking heads: a layer between the queries and the softmax."""

    def __init__(self, width):
        super().__init__(width)
        self.between = nn.Linear(width // HEAD, width // HEAD)

    def mix(self, q, k, v):
        logits = (q * HEAD**-0.5) @ k.mT
        return torch.softmax(self.between(logits.movedim(1, -1)).movedim(-1, 1), -1) @ v


class BiasedQueries(Attention):
    """As Transformer-XL: a factor on the queries does not reach the bias."""

    def __init__(self, width):
        super().__init__(width)
        self.bias = nn.Parameter(torch.randn(width))

    def mix(self, q, k, v):
        return torch.softmax((q + self.bias.unflatten(0, (-1, 1, HEAD))) @ k.mT / math.sqrt(HEAD), -1) @ v


class QueriesInStream(Attention):
    """As Set Transformers: the queries are also a part of the output."""

    def mix(self, q, k, v):
        return q + torch.softmax(q @ k.mT / math.sqrt(HEAD), -1) @ v


class SharedWithKeys(Attention):
    """As Reformer: one layer makes queries and keys."""

    def __init__(self, width):
        super().__init__(width)
        del self.k_proj

    def parts(self, x):
        return self.q_proj(x), self.q_proj(x), self.v_proj(x)

    def mix(self, q, k, v):
        return torch.softmax(q @ k.mT / math.sqrt(HEAD), -1) @ v


class Torch(nn.Module):
    own = HEAD**-0.5

    def __init__(self, width):
        super().__init__()
        self.inner = nn.MultiheadAttention(width, width // HEAD, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Net(nn.Module):
    def __init__(self, width, kinds):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(kind(width) for kind in kinds)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def parameterized(*kinds, rule="smupar"):
    torch.manual_seed(0)
    model = Net(64, kinds)
    with torch.no_grad():  # larger logits, whose scale is easy to see
        plan = smupar.parameterize(model, base=Net(32, kinds), rule=rule, init_std={"blocks.*": 1.0, "*": "fan_in"})
    return model.eval(), plan


@torch.no_grad()
def with_scaled_queries(model, factor):
    """The model's logits if all of its queries are multiplied by a factor, by changing weights."""
    other = copy.deepcopy(model)
    for block in other.blocks:
        if isinstance(block, Torch):
            parts = [block.inner.in_proj_weight[:64]]
        elif isinstance(block, Normed):
            parts = list(block.q_norm.parameters())
        elif isinstance(block, Fused):
            parts = [part.unflatten(0, (-1, 3, HEAD))[:, 0] for part in block.qkv.parameters()]
        elif isinstance(block, Convolutions):
            parts = [part[:64] for part in block.qkv.parameters()]
        else:
            parts = [part for name in block.queries for part in block.get_submodule(name).parameters()]
        for part in parts:
            part.mul_(factor)
    return other(TOKENS)


KINDS = [Field, Divisor, IdleField, HardCoded, Sinks, Fused, Normed, Before, OnBothSides, BeforeKernel, Twice, FieldAndKernel,
         Unscaled, KeysFirst, Sum, Convolutions, Torch]  # fmt: skip
LEFT = [MixedHeads, BiasedQueries, QueriesInStream, SharedWithKeys]  # no factor on queries gives these the rule's scale


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_scale_of_every_kind_of_attention_becomes_that_of_the_rule(kind):
    model, plan = parameterized(kind)
    before, wanted = model(TOKENS), with_scaled_queries(model, 1 / HEAD / kind.own)
    assert (wanted - before).abs().max() > 0.1 or kind.own == 1 / HEAD
    smupar.set_attention_scale(model, plan, example=TOKENS)
    assert plan.pending == {}
    torch.testing.assert_close(model(TOKENS), wanted, rtol=1e-4, atol=1e-5)
    smupar.set_attention_scale(model, plan, example=TOKENS)  # a second call changes nothing
    torch.testing.assert_close(model(TOKENS), wanted, rtol=1e-4, atol=1e-5)
    assert smupar.audit(model, plan) == []


@torch.no_grad()
def test_two_tokens_are_enough_to_find_the_queries():
    model, plan = parameterized(HardCoded)
    smupar.set_attention_scale(model, plan, example=TOKENS[:, :2])
    assert plan.pending == {}
    assert plan.attention[0].value == pytest.approx(HEAD**-0.5)


@pytest.mark.parametrize("kind", LEFT)
@torch.no_grad()
def test_scale_that_no_factor_on_queries_can_set_is_left_alone_and_asked_for(kind):
    model, plan = parameterized(kind)
    before = model(TOKENS)
    with pytest.warns(smupar.PlanWarning, match=kind.__name__):
        smupar.set_attention_scale(model, plan, example=TOKENS)
    assert "attention_scale" in plan.pending
    torch.testing.assert_close(model(TOKENS), before, rtol=0, atol=0)


def test_layer_that_mixes_heads_does_not_hide_that_a_scale_is_needed():
    torch.manual_seed(0)
    plan = smupar.make_plan(Net(64, [MixedHeads]), base=Net(32, [MixedHeads]), example=TOKENS)
    assert plan.unscored == ()
    assert "attention_scale" in plan.pending


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_attach_restores_the_scale_from_the_plan(kind):
    model, plan = parameterized(kind)
    smupar.set_attention_scale(model, plan, example={"tokens": TOKENS})
    fresh = Net(64, [kind]).eval()
    fresh.load_state_dict(model.state_dict())
    smupar.attach(fresh, Plan.from_json(plan.to_json()))
    torch.testing.assert_close(fresh(TOKENS), model(TOKENS), rtol=0, atol=0)


@torch.no_grad()
def test_factor_on_queries_reaches_training_and_evaluation_of_a_torch_encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    wide = nn.ModuleDict({"in": nn.Embedding(VOCAB, 32), "layer": layer, "head": nn.Linear(32, VOCAB)})
    narrow = nn.ModuleDict({
        "in": nn.Embedding(VOCAB, 16),
        "layer": nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        "head": nn.Linear(16, VOCAB),
    })  # fmt: skip
    plan = smupar.parameterize(wide, base=narrow)
    x = 3 * torch.randn(2, 5, 32)
    smupar.set_attention_scale(wide, plan)
    wanted = copy.deepcopy(layer)
    wanted.self_attn._forward_pre_hooks.clear()
    wanted.self_attn.in_proj_weight[:32] *= HEAD**-0.5
    for mode in (True, False):
        torch.testing.assert_close(layer.train(mode)(x), wanted.train(mode)(x), rtol=1e-4, atol=1e-5)


def test_attention_that_is_left_over_keeps_the_reminder_and_is_named():
    model, plan = parameterized(Field, HardCoded)
    with pytest.warns(smupar.PlanWarning, match="HardCoded"):
        smupar.set_attention_scale(model, plan)  # without an example, only fields can be set
    assert model.blocks[0].scale == 1 / HEAD
    assert "HardCoded ('blocks.1')" in plan.pending["attention_scale"]
    with pytest.warns(smupar.PlanWarning, match="HardCoded"):
        assert len(smupar.audit(model, plan)) == 1
    smupar.set_attention_scale(model, plan, example=(TOKENS,))
    assert plan.pending == {}


def test_scale_in_one_of_two_attentions_does_not_count_for_both():
    model, plan = parameterized(Field, Field)
    model.blocks[0].scale = 1 / HEAD
    with pytest.warns(smupar.PlanWarning, match="attention_scale"):
        assert len(smupar.audit(model, plan)) == 1
    model.blocks[1].scale = 1 / HEAD
    assert smupar.audit(model, plan) == []


def test_divisor_that_was_set_by_hand_is_seen():
    model, plan = parameterized(Divisor)
    model.blocks[0].scale_attn = 1 / HEAD  # as if it were a factor
    with pytest.warns(smupar.PlanWarning, match="attention_scale"):
        assert len(smupar.audit(model, plan)) == 1
    model.blocks[0].scale_attn = float(HEAD)
    assert smupar.audit(model, plan) == []


def test_fields_of_rotary_positions_are_not_taken_for_the_scale():
    (found,) = find_attentions(Net(64, [IdleField]))
    assert (found.path, found.field, found.head_dim) == ("blocks.0", "inv_norm_factor", HEAD)


def test_sp_leaves_attention_alone():
    model, plan = parameterized(Field, rule="sp")
    smupar.set_attention_scale(model, plan, example=TOKENS)
    assert model.blocks[0].scale == HEAD**-0.5
    assert plan.attention == []
