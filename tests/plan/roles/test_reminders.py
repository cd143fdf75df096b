"""What only the user can set, and when a plan reminds of it."""

import pytest
from torch import nn

import smupar
from tests.models import sequential
from tests.plan.roles.nets import LM, Attention, ConvNet


class Block(nn.Module):
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
    plan = smupar.make_plan(Block(16, names), base=Block(4, names), rule=rule)
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


def test_attention_under_sp_needs_no_reminder():
    plan = smupar.make_plan(LM(32), base=LM(8), rule="sp")
    assert plan.pending == {}
    assert plan.attention_scale(16) == 0.25


@pytest.mark.parametrize("rule", ["sp", "mup", "smupar"])
def test_models_without_attention_have_nothing_pending(rule):
    assert smupar.make_plan(sequential(64), base=sequential(16), rule=rule).pending == {}
    assert smupar.make_plan(ConvNet(32), base=ConvNet(8), rule=rule).pending == {}
