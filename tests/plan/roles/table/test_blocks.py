"""Roles in attention and MLP blocks."""

from fractions import Fraction

import pytest
import torch
from torch import nn

import smupar
from tests.plan.roles.nets import LM, refusal, roles, suggested, widths


def test_fused_qkv_is_hidden():
    plan = smupar.make_plan(LM(32, fused=True), base=LM(8, fused=True))
    assert roles(plan) == {
        "embed.weight": "embedding",
        "norm.weight": "vector",
        "norm.bias": "vector",
        "qkv.weight": "hidden",
        "o_proj.weight": "hidden",
        "gate.weight": "hidden",
        "up.weight": "hidden",
        "down.weight": "hidden",
        "final.weight": "vector",
        "head.weight": "unembedding",
    }
    assert widths(plan, "qkv.weight", "embed.weight", "head.weight", "norm.bias") == [(4, 4), (1, 4), (4, 1), (1, 4)]
    assert plan["qkv.weight"].in_dims == (1,)
    assert plan["qkv.weight"].scaling == (0, 1)


def test_separate_q_k_v_o_are_hidden():
    plan = smupar.make_plan(LM(32), base=LM(8))
    names = [f"{part}_proj.weight" for part in "qkvo"]
    assert [plan[name].role for name in names] == ["hidden"] * 4
    assert widths(plan, *names) == [(4, 4)] * 4


def test_grouped_query_attention_with_scaling_kv_is_hidden():
    plan = smupar.make_plan(LM(32, num_kv_heads=4), base=LM(8, num_kv_heads=1))
    assert plan["k_proj.weight"].shape == (16, 32)
    assert [plan[f"{part}_proj.weight"].role for part in "qkvo"] == ["hidden"] * 4
    assert widths(plan, "k_proj.weight", "v_proj.weight") == [(4, 4), (4, 4)]


@pytest.mark.parametrize("tied", [False, True])
def test_grouped_query_attention_with_fixed_kv_asks_and_an_answer_works(tied):
    # Keys and values look exactly like a readout: fan-in scales, fan-out does not. A tied table shows where the logits are.
    model, base = (LM(width, num_kv_heads=1, tied=tied) for width in (32, 8))
    error = refusal(model, base=base, match="cannot be inferred")
    assert "k_proj.weight (4, 32), base (4, 8)" in str(error)
    assert "v_proj.weight (4, 32), base (4, 8)" in str(error)
    pasted = suggested(error)
    assert pasted["k_proj.weight"] == pasted["v_proj.weight"] == ("hidden" if tied else ...)
    answers = {name: "hidden" if role is ... else role for name, role in pasted.items()}
    plan = smupar.make_plan(model, base=base, roles=answers)
    assert [plan[name].role for name in ("k_proj.weight", "v_proj.weight")] == ["hidden", "hidden"]
    assert widths(plan, "k_proj.weight", "v_proj.weight") == [(4, 1), (4, 1)]
    # eta / m_in for Adam, eta m_out / m_in for SGD with m_out = 1
    assert plan["k_proj.weight"].lr_factors["adam"] == 0.25
    assert plan["k_proj.weight"].lr_factors["sgd"] == 0.25
    assert dict(plan["embed.weight" if tied else "head.weight"].forward)["head"] == 0.25
    assert plan["k_proj.weight"].forward == ()


def test_fixed_kv_alone_may_be_named_and_the_head_is_then_found():
    model, base = (LM(width, num_kv_heads=1) for width in (32, 8))
    plan = smupar.make_plan(model, base=base, roles={"[kv]_proj.weight": "hidden"})
    assert plan["head.weight"].role == "unembedding"


def test_gated_mlp_has_its_own_multiplier_for_d_ff():
    plan = smupar.make_plan(LM(32, d_ff=120), base=LM(8, d_ff=24))
    assert [plan[name].role for name in ("gate.weight", "up.weight", "down.weight")] == ["hidden"] * 3
    assert widths(plan, "gate.weight", "up.weight", "down.weight") == [(4, 5), (4, 5), (5, 4)]
    assert plan["gate.weight"].lr_factors == {"adam": 1 / 4, "sgd": 5 / 4, "muon": 1.0}
    assert plan["down.weight"].lr_factors == {"adam": 1 / 5, "sgd": 4 / 5, "muon": 1.0}


def test_multipliers_may_be_fractional_and_below_one():
    plan = smupar.make_plan(LM(12, d_ff=20), base=LM(32, d_ff=48))
    assert widths(plan, "gate.weight", "head.weight") == [(Fraction(3, 8), Fraction(5, 12)), (Fraction(3, 8), 1)]
    assert plan["head.weight"].forward == (("head", pytest.approx(8 / 3, rel=1e-15)),)


def test_mlp_that_alone_scales_inside_a_fixed_network_asks():
    # Only d_ff differs: up looks like an input, down like a readout, and both are hidden.
    model, base = LM(8, d_ff=64), LM(8, d_ff=16)
    error = refusal(model, base=base)
    assert suggested(error) == {"gate.weight": "hidden", "up.weight": "hidden", "down.weight": ...}
    plan = smupar.make_plan(model, base=base, roles={"gate.weight": "hidden", "up.weight": "hidden", "down.weight": "hidden"})
    assert widths(plan, "up.weight", "down.weight") == [(1, 4), (4, 1)]
    assert plan["q_proj.weight"].role == "fixed"


class GraphAttention(nn.Module):
    """As PyTorch Geometric writes it: each head has a vector that is multiplied with its outputs and summed."""

    def __init__(self, width, num_heads=4):
        super().__init__()
        self.project = nn.Linear(6, width)
        self.positions = nn.Parameter(torch.randn(1, 3, width))
        self.scores = nn.Parameter(torch.randn(1, num_heads, width // num_heads))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.project(x) + self.positions
        parts = x.unflatten(-1, self.scores.shape[1:])
        shares = (parts * self.scores).sum(-1, keepdim=True).softmax(1)
        return self.head((shares * parts).sum(1).flatten(1))


def test_tensor_that_is_not_as_wide_as_any_layer_does_not_just_broadcast():
    models = {"model": GraphAttention(64), "base": GraphAttention(16)}
    assert suggested(refusal(**models)) == {"scores": ...}
    plan = smupar.make_plan(**models, example=torch.randn(2, 3, 6))
    assert roles(plan)["scores"] == "router"
    assert (plan["scores"].in_dims, plan["scores"].width_in) == ((2,), 4)
    assert roles(plan)["positions"] == "vector"
