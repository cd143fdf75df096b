"""Roles of parameters that no layer of torch holds, and of parametrized weights."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import smupar
from tests.plan.roles.nets import LM, Raw, Twice, parametrized_mlp, refusal, suggested, widths


def test_raw_parameters_follow_their_scaling_dimensions():
    plan = smupar.make_plan(Raw(16), base=Raw(4))
    named = ("cls_token", "position", "square", "temperature", "bins")
    assert [plan[name].role for name in named] == ["vector", "vector", "hidden", "fixed", "fixed"]
    assert widths(plan, *named) == [(1, 4), (1, 4), (4, 4), (1, 1), (1, 1)]
    assert plan["position"].init_std is None
    assert plan["position"].scaling == (2,)
    assert plan["square"].in_dims == (1,)
    assert "(out, in)" in plan["square"].note


@pytest.mark.parametrize(("setting", "expected"), [(("hidden", 1), (6, 4)), (("hidden", 0), (4, 6))])
def test_raw_matrix_that_is_not_square_asks_for_its_input_dimension(setting, expected):
    model, base = Raw(16, expand=3), Raw(4, expand=2)
    error = refusal(model, base=base, match="whose input dimension smupar does not know")
    assert suggested(error) == {"expand": ...}  # x @ W and W @ x look alike
    plan = smupar.make_plan(model, base=base, roles={"expand": setting})
    assert plan["expand"].role == "hidden"
    assert plan["expand"].in_dims == (setting[1],)
    assert widths(plan, "expand") == [expected]
    base_fan_in = base.expand.shape[setting[1]]
    assert plan["expand"].init_std == pytest.approx((base_fan_in * expected[0]) ** -0.5, rel=1e-12)


def test_raw_embedding_cannot_be_scaled_so_its_factor_is_pending():
    plan = smupar.make_plan(Raw(16), base=Raw(4), roles={"position": "embedding"}, alpha_input=2)
    assert plan["position"].forward == ()
    assert "position" in plan.pending["input_factor"]
    assert "alpha_input = 2" in plan.pending["input_factor"]


class Experts(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inputs = nn.Linear(3, width)
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(2, width, 4 * width)) for _ in range(2))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width))])
        self.head = nn.Linear(width, 2)


def test_parameter_lists_ask_for_matrices_and_are_masked_like_any_other():
    model, base = Experts(16), Experts(4)
    error = refusal(model, base=base, match="belongs to a ParameterList")
    assert suggested(error) == {"up.*": ...}
    plan = smupar.parameterize(model, base=base, roles={"up.*": ("hidden", 1)}, density=0.25)
    assert [plan[name].role for name in ("up.0", "up.1", "scales.0")] == ["hidden", "hidden", "vector"]
    assert widths(plan, "up.0", "up.1", "scales.0") == [(4, 4), (4, 4), (1, 4)]
    assert [int(weight.count_nonzero()) for weight in model.up] == [512, 512]  # a quarter of 2 x 16 x 64


def test_parametrized_weights_have_the_role_of_their_layer():
    model = parametrized_mlp(64)
    plan = smupar.parameterize(model, base=parametrized_mlp(16), density=0.5)
    names = [f"{layer}.parametrizations.weight.original" for layer in (0, 2, 4)]
    assert [plan[name].role for name in names] == ["embedding", "hidden", "unembedding"]
    assert widths(plan, *names) == [(1, 4), (4, 4), (4, 1)]
    assert plan[names[2]].forward == (("4", 0.25),)
    # What is initialised is the weight behind the parametrization, not a temporary.
    original = model[2].parametrizations.weight.original.detach()
    assert int(original.count_nonzero()) == 2048
    torch.testing.assert_close(model[2].weight.detach(), 2 * original)
    assert float(original[original != 0].std()) == pytest.approx(plan[names[1]].init_std, rel=0.1)


@pytest.mark.parametrize("head_first", [False, True])
def test_parametrized_table_tied_to_a_head_is_one_row_with_two_factors(head_first):
    def model(width):
        tied = LM(width, tied=True, head_first=head_first)
        parametrize.register_parametrization(tied.embed, "weight", Twice())
        return tied

    plan = smupar.make_plan(model(32), base=model(8))
    (row,) = (row for row in plan if row.forward)
    assert row.role == "embedding"
    assert row.forward == (("embed", 1.0), ("head", 0.25))
