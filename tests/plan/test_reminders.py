"""What only the user can set, and how a plan says so."""

import pytest
import torch
from torch import nn

import smupar
from smupar.plan.plan import Plan
from tests.plan.nets import ALPHA_INPUT, ALPHA_OUTPUT, MLP, attention_plan, plan_mlp
from tests.plan.roles.nets import LM, Attention, ConvNet
from tests.support.models import on_meta


def test_attention_scale_is_a_number_and_reading_it_changes_nothing():
    plan = attention_plan()
    before = plan.to_json()
    assert plan.attention_scale(80) == 1 / 80
    assert plan.to_json() == before
    assert "plan.settle('attention_scale')" in plan.pending["attention_scale"]


def test_example_without_attention_needs_no_note_about_it():
    def kinds(**settings):
        return {note.kind for note in smupar.make_plan(MLP(32), base=MLP(8), **settings).notes}

    assert "attention" in kinds()
    assert "attention" not in kinds(example=torch.zeros(2, 7))


class Projections(nn.Module):
    """Attention under a class name that does not tell, with the projections called as people call them."""

    def __init__(self, width, names):
        super().__init__()
        self.embed = nn.Embedding(9, width)
        for name in names:
            self.add_module(name, nn.Linear(width, 3 * width if "qkv" in name else width))
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, 9)


NAMES = [
    ("qkv",),
    ("Wqkv",),
    ("c_attn",),
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
@pytest.mark.parametrize("rule", ["mup", "smupar"])
def test_attention_is_recognised_by_the_names_of_its_projections(names, rule):
    plan = smupar.make_plan(Projections(16, names), base=Projections(4, names), rule=rule)
    assert "attention_scale" in plan.pending


@pytest.mark.parametrize("build", [LM, lambda width: LM(width, fused=True), Attention], ids=["separate", "fused", "torch's"])
@pytest.mark.parametrize("rule", ["mup", "smupar", "smupar-init-only", "smupar-lr-only"])
def test_attention_models_are_reminded_of_the_scale(build, rule):
    plan = smupar.make_plan(build(16), base=build(8), rule=rule)
    assert "plan.attention_scale(head_dim)" in plan.pending["attention_scale"]
    assert plan.attention_scale(4) == 0.25
    plan.settle("attention_scale")
    assert "attention_scale" not in plan.pending


@pytest.mark.parametrize("width", [32, 8])
def test_attention_reminder_does_not_depend_on_the_width(width):
    # 1 / d_head holds at base width as well: there it differs from what the model does by itself.
    assert "attention_scale" in smupar.make_plan(LM(width), base=LM(8)).pending


class QueryLayer(nn.Linear):
    pass


def named_layer(width, leaf, kind=nn.Linear):
    model = MLP(width)
    model.add_module(leaf, kind(width, width))
    model.add_module("head", model._modules.pop("head"))  # the readout stays last
    return model


@pytest.mark.parametrize("leaf", ["attn", "self_attn", "c_attn", "attention", "qkv", "q_proj", "query_key_value", "wq"])
def test_attention_is_told_by_the_names_of_modules(leaf):
    plan = smupar.make_plan(on_meta(named_layer, 64, leaf), base=on_meta(named_layer, 16, leaf))
    assert set(plan.pending) == {"attention_scale"}


class TimeMix(nn.Module):
    """As RWKV: called attention, but past tokens are weighted by their age."""

    def __init__(self, width):
        super().__init__()
        self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return self.out(self.key(x).sigmoid() * self.value(x).cumsum(1))


class HiddenProduct(torch.autograd.Function):
    """Stands for a kernel that is not torch's: no operation on tensors shows the product."""

    @staticmethod
    def forward(ctx, q, k):
        return torch.tensor((q @ k.mT @ q).tolist())


class ByKernel(TimeMix):
    def forward(self, x):
        return self.out(HiddenProduct.apply(self.key(x), self.value(x)))


class Cosine(TimeMix):
    """As Swin 2: queries and keys have length 1, so their products do not grow with the head."""

    def forward(self, x):
        q, k = nn.functional.normalize(self.key(x), dim=-1), nn.functional.normalize(self.value(x), dim=-1)
        return self.out((10 * (q @ k.mT)).softmax(-1) @ x)


class DotProduct(TimeMix):
    def forward(self, x):
        return self.out((self.key(x) @ self.value(x).mT).softmax(-1) @ x)


def heads(x):
    return x.unflatten(-1, (-1, 8)).transpose(1, 2)


class Linear(TimeMix):
    """Linear attention: no softmax, and heads of the same size at every width."""

    def forward(self, x):
        q, k, v = heads(self.key(x)), heads(self.value(x)), heads(x)
        return self.out((q @ (k.mT @ v)).transpose(1, 2).flatten(2))


class LinearOfOneHead(TimeMix):
    def forward(self, x):
        return self.out(self.key(x) @ (self.value(x).mT @ x))


class SoftmaxByHand(TimeMix):
    def forward(self, x):
        q, k, v = heads(self.key(x)), heads(self.value(x)), heads(x)
        weights = (q @ k.mT).exp()
        return self.out((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))


class SigmoidOfHeads(TimeMix):
    def forward(self, x):
        q, k, v = heads(self.key(x)), heads(self.value(x)), heads(x)
        return self.out(((q @ k.mT).sigmoid() @ v).transpose(1, 2).flatten(2))


class OneBlock(nn.Module):
    def __init__(self, width, kind):
        super().__init__()
        self.table, self.attention, self.head = nn.Embedding(9, width), kind(width), nn.Linear(width, 9)

    def forward(self, tokens):
        return self.head(self.attention(self.table(tokens)))


NEEDED = {"attention_scale"}
WITH_LOGITS = [ByKernel, DotProduct, LinearOfOneHead, SoftmaxByHand, SigmoidOfHeads]


@pytest.mark.parametrize(
    ("kind", "reminders"), [*((kind, set()) for kind in (TimeMix, Cosine, Linear)), *((kind, NEEDED) for kind in WITH_LOGITS)]
)
def test_module_that_is_called_attention_needs_no_scale_if_it_shows_no_logits(kind, reminders):
    tokens = torch.arange(8).reshape(2, 4)
    model, base = OneBlock(64, kind), OneBlock(16, kind)
    assert set(smupar.make_plan(model, base=base).pending) == {"attention_scale"}  # names are all that is known
    plan = smupar.parameterize(model, base=base, example=tokens)
    assert set(plan.pending) == reminders
    if not reminders:
        smupar.set_attention_scale(model, plan, example=tokens)
        assert plan.pending == {}
        assert Plan.from_json(plan.to_json()).unscored == ("attention",)


def test_attention_is_told_by_the_classes_of_modules():
    model, base = (on_meta(named_layer, width, "mixer", QueryLayer) for width in (64, 16))
    assert set(smupar.make_plan(model, base=base).pending) == {"attention_scale"}


@pytest.mark.parametrize("leaf", ["mixer", "pattern", "attribute", "v_proj"])
def test_other_names_are_no_attention(leaf):
    plan = smupar.make_plan(on_meta(named_layer, 64, leaf), base=on_meta(named_layer, 16, leaf))
    assert plan.pending == {}


@pytest.mark.parametrize(
    "plan", [attention_plan(rule="sp"), smupar.make_plan(LM(32), base=LM(8), rule="sp")], ids=["bare", "lm"]
)
def test_attention_scale_of_sp_is_what_models_do_anyway(plan):
    assert plan.pending == {}
    assert plan.attention_scale(64) == 0.125


@pytest.mark.parametrize("head_dim", [0, -1])
def test_attention_scale_of_no_head_raises_and_settles_nothing(head_dim):
    plan = attention_plan()
    with pytest.raises(ValueError, match="head_dim"):
        plan.attention_scale(head_dim)
    assert "attention_scale" in plan.pending


@pytest.mark.parametrize("rule", ["sp", "mup", "smupar"])
def test_models_without_attention_have_nothing_pending(rule):
    assert plan_mlp(64, 16, rule=rule, alpha_input=ALPHA_INPUT, alpha_output=ALPHA_OUTPUT).pending == {}
    assert smupar.make_plan(ConvNet(32), base=ConvNet(8), rule=rule).pending == {}


def test_logits_made_out_of_sight_are_pending():
    plan = attention_plan(alpha_output=2.0)
    assert plan.output_factor == 0.5
    assert "plan.output_factor = 0.5" in plan.pending["output_factor"]


def test_settle_settles_one_reminder():
    plan = attention_plan()
    assert set(plan.pending) == {"attention_scale", "output_factor"}
    plan.settle("output_factor")
    assert set(plan.pending) == {"attention_scale"}
    plan.settle("output_factor")  # said twice, or under a rule that does not ask for it
    assert set(plan.pending) == {"attention_scale"}


@pytest.mark.parametrize("name", ["attention scale", "scale", ""])
def test_settle_of_an_unknown_name_lists_the_reminders(name):
    plan = attention_plan()
    with pytest.raises(ValueError, match=f"'{name}': choose one of attention_scale, output_factor, input_factor"):
        plan.settle(name)
    assert set(plan.pending) == {"attention_scale", "output_factor"}


def test_waive_is_gone():
    with pytest.raises(AttributeError):
        attention_plan().waive("output_factor")


class RawTable(nn.Module):
    """Reads a parameter of its own."""

    def __init__(self, width):
        super().__init__()
        self.table, self.hidden, self.last = nn.Parameter(torch.randn(50, width)), nn.Linear(width, width), nn.Linear(width, 3)


class GroupedInput(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.hidden = nn.Conv1d(6, width, 3, groups=2), nn.Conv1d(width, width, 3)
        self.last = nn.Linear(width, 3)


@pytest.mark.parametrize(
    ("kind", "roles"), [(RawTable, {"table": "vector"}), (RawTable, {"table": "embedding"}), (GroupedInput, {})]
)
def test_alpha_input_that_nothing_applies_is_pending(kind, roles):
    def pending(**settings):
        return smupar.make_plan(kind(64), base=kind(16), roles=roles, **settings).pending

    assert "alpha_input = 9" in pending(alpha_input=9.0)["input_factor"]
    assert "input_factor" not in pending()
    assert "input_factor" not in pending(rule="sp", alpha_input=9.0)
