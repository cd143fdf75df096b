"""Depth: which layers correspond, which factors follow, and what is asked or refused."""

from copy import deepcopy
from fractions import Fraction

import pytest
import torch
from torch import nn

import smupar
from smupar.plan.depth.correspondence import correspond
from smupar.rules import DEPTH_RULES
from tests.support.models import Residual, on_meta


class Block(nn.Module):
    def __init__(self, width, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU())
        self.down = nn.Sequential(nn.Linear(2 * width, width, bias=bias))

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)))


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.sigmoid(self.gate(x)) * x


def residual(width, depth, kinds=(Block,)):
    return Residual(width, (kinds[number % len(kinds)](width) for number in range(depth)))


BRANCHES = ["blocks.*.down.0"]


def plan_of(width, num_blocks, *, base_width=16, base_depth=2, kinds=(Block,), **settings):
    base = on_meta(residual, base_width, base_depth, kinds)
    delta = on_meta(residual, 2 * base_width, base_depth, kinds) if width == base_width else None
    return smupar.make_plan(on_meta(residual, width, num_blocks, kinds), base=base, delta=delta, **settings)


# CompleteP, Table 1: LR, epsilon and decay of weights, norms and biases in blocks, and the factor on branches.
@pytest.mark.parametrize("alpha", [1, 0.5])
@pytest.mark.parametrize("m_width", [1, 4])
@pytest.mark.parametrize("m_depth", [1, 2, 16])
def test_factors_are_those_of_the_table_of_completep(m_width, m_depth, alpha):
    rule = {1: "completep", 0.5: "depth-mup"}[alpha]
    plan = plan_of(16 * m_width, 2 * m_depth, rule="mup", depth=rule, branches=BRANCHES)
    hidden, bias, norm = (plan[f"blocks.1.{name}"] for name in ("up.0.weight", "up.0.bias", "norm.weight"))
    assert hidden.lr_factor("adam") == pytest.approx(m_width**-1 * m_depth ** (alpha - 1))
    assert bias.lr_factor("adam") == norm.lr_factor("adam") == pytest.approx(m_depth ** (alpha - 1))
    assert hidden.decay_factor("adam") * hidden.lr_factor("adam") == pytest.approx(1)
    # The table scales epsilon in residual blocks. The reference code gives all groups one epsilon, also those outside.
    assert hidden.eps_factor == pytest.approx(m_width**-1 * m_depth**-alpha)
    assert plan["head.weight"].eps_factor == pytest.approx(m_width**-1)
    assert all(plan[name].lr_factor("adam") == 1 for name in ("embedding.weight", "norm.weight", "head.weight"))
    expected = {f"blocks.{number}.down.0": pytest.approx(m_depth**-alpha) for number in range(2 * m_depth)}
    assert dict(plan.branches) == (expected if m_depth > 1 else {})
    assert hidden.init_std == pytest.approx((16 * m_width) ** -0.5)


def test_sgd_follows_the_gradient_that_the_branch_divides():
    # The gradient of a weight in a branch has 1 / m_depth^alpha, its update should have m_depth^(alpha - 1).
    assert [DEPTH_RULES[name].lr("sgd") for name in ("completep", "depth-mup", "none")] == [1, 0, 0]
    plan = plan_of(16, 8, branches=BRANCHES)
    assert plan["blocks.0.up.0.weight"].lr_factor("sgd") == 4


def test_rules_have_the_depth_rule_of_their_papers():
    assert plan_of(32, 8, rule="sp").depth == plan_of(32, 8, rule="mup").depth == "none"
    assert plan_of(32, 8, branches=BRANCHES).depth == "completep"


def test_equal_depth_changes_no_number():
    without, with_branches = plan_of(64, 2), plan_of(64, 2, branches=BRANCHES, depth="completep")
    assert without.diff(with_branches) == []
    assert "m_depth" not in str(without)


def test_layers_correspond_by_kind():
    model, base = residual(8, 8, (Block, Gate)), residual(8, 4, (Block, Gate))
    names = correspond(model, base).names
    of_blocks = [names[f"blocks.{number}.norm.weight"] for number in (0, 2, 4, 6)]
    assert of_blocks == [f"blocks.{number}.norm.weight" for number in (0, 0, 2, 2)]
    assert names["blocks.7.gate.weight"] == "blocks.3.gate.weight"
    assert correspond(model, base).m_depth("blocks.7.gate") == Fraction(2)
    assert correspond(model, base).m_depth("head.weight") == 1


def test_blocks_between_single_layers_correspond():
    def make(depth):
        return nn.Sequential(nn.Embedding(5, 8), *(Block(8) for _ in range(depth)), nn.Linear(8, 5))

    depth = correspond(make(6), make(2))
    assert depth.names["7.weight"] == "3.weight"
    assert (depth.m_depth("3.norm.weight"), depth.m_depth("7.weight")) == (3, 1)


def test_encoder_and_decoder_have_multipliers_of_their_own():
    def make(encoder, decoder):
        return nn.ModuleDict({"encoder": residual(8, encoder), "decoder": residual(8, decoder)})

    depth = correspond(make(4, 6), make(2, 2))
    assert depth.lists == {"encoder.blocks": 2, "decoder.blocks": 3}
    assert depth.m_depth("decoder.blocks.5.norm.weight") == 3


def test_model_divides_its_branches_bias_included():
    torch.manual_seed(0)
    model = residual(16, 4)
    plan = smupar.parameterize(model, base=residual(8, 2), branches=BRANCHES)
    for block in model.blocks:
        nn.init.normal_(block.down[0].bias)
    x = torch.randn(3, 16)
    block = model.blocks[1]
    expected = x + 0.5 * nn.functional.linear(block.up(block.norm(x)), block.down[0].weight, block.down[0].bias)
    torch.testing.assert_close(block(x), expected)
    copy = deepcopy(model)
    smupar.attach(copy, plan)
    torch.testing.assert_close(copy.blocks[1](x), expected)
    smupar.audit(copy, plan)
    copy.blocks[1].down[0].smupar_branch.fill_(1.0)
    with pytest.raises(smupar.AuditError, match=r"'blocks.1.down.0' ends a residual branch .* by 1, the plan says 0.5"):
        smupar.audit(copy, plan)


def test_attention_that_returns_a_tuple_has_its_first_output_divided():
    class Attention(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.out = nn.Linear(width, width, bias=False)

        def forward(self, x):
            return self.out(x), "weights"

    class Layer(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.attention = Attention(width)

        def forward(self, x):
            return x + self.attention(x)[0]

    model, base = residual(16, 4, (Layer,)), residual(8, 2, (Layer,))
    smupar.parameterize(model, base=base, branches=["blocks.*.attention"])
    x = torch.randn(2, 16)
    output, weights = model.blocks[0].attention(x)
    assert weights == "weights"
    torch.testing.assert_close(output, x @ model.blocks[0].attention.out.weight.T / 2)


def test_plan_keeps_its_branches_in_json_and_prints_them():
    plan = plan_of(64, 8, density=1 / 4, branches=BRANCHES)
    again = smupar.Plan.from_json(plan.to_json())
    assert plan.diff(again) == []
    assert again.branches == plan.branches
    printed = str(plan)
    assert "m_depth" in printed
    assert "branch 0.25" in printed
    assert "'blocks' has 4 times as many layers as the base; depth rule CompleteP (alpha 1)" in printed


REFUSALS = {
    "branches are not named": ({}, r"different numbers of layers in 'blocks' \(4 times as many\)(.|\n)*branches=\['blocks"),
    "a glob matches nothing": ({"branches": ["layers.*"]}, "branches: 'layers.*' matches none of the modules"),
    "branches lie elsewhere": ({"branches": ["norm"]}, "branches names no module in 'blocks'"),
    "a branch inside another": ({"branches": ["blocks.*.down", "blocks.*.down.0"]}, "would be divided twice"),
    "an unknown depth rule": ({"depth": "sqrt"}, "unknown depth rule 'sqrt': choose one of none, completep, depth-mup"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSALS.values(), ids=REFUSALS)
def test_depth_that_is_not_clear_is_refused_with_the_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        plan_of(64, 8, **settings)


def test_kinds_of_layers_in_another_order_are_refused():
    model, base = residual(64, 8, (Gate, Block)), residual(16, 2, (Block, Gate))
    with pytest.raises(ValueError, match="has a Gate where base has a Block: build base with the same kinds of layers in the"):
        smupar.make_plan(model, base=base, branches=BRANCHES)
    assert smupar.make_plan(model, base=residual(16, 2, (Gate, Block)), branches=BRANCHES).branches


def test_question_proposes_the_last_layer_of_each_part():
    with pytest.raises(ValueError, match="branches=") as error:
        plan_of(64, 8)
    assert "branches=['blocks.*.up.0', 'blocks.*.down.0']" in str(error.value)


def test_base_that_is_deeper_is_refused():
    with pytest.raises(ValueError, match=r"base has more layers in 'blocks' than the model(.|\n)*depth='none'"):
        plan_of(64, 2, base_depth=4, branches=BRANCHES)
    assert plan_of(64, 2, base_depth=4, depth="none").branches == ()


def test_kinds_that_the_base_lacks_are_refused():
    with pytest.raises(ValueError, match=r"blocks\.1 is a Gate, and no layer of 'blocks' in base has its class"):
        smupar.make_plan(residual(16, 4, (Block, Gate)), base=residual(8, 2), branches=BRANCHES)


def test_lists_of_single_layers_must_be_equally_long():
    def make(width, depth):
        return nn.Sequential(nn.Linear(8, width), *(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 4))

    with pytest.raises(ValueError, match=r"only in the model: 5\.bias"):
        smupar.make_plan(make(16, 4), base=make(8, 3))
