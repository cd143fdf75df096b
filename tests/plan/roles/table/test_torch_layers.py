"""Roles in layers of torch."""

from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import smupar
from tests.plan.roles.nets import Attention, ConvNet, Recurrent, TwoInputs, grouped_by_size, refusal, roles, suggested, widths
from tests.support.models import sequential


def test_packed_multihead_attention_is_hidden():
    plan = smupar.make_plan(Attention(16, add_bias_kv=True), base=Attention(8, add_bias_kv=True))
    assert plan["mix.in_proj_weight"].shape == (48, 16)
    assert plan["mix.in_proj_weight"].role == plan["mix.out_proj.weight"].role == "hidden"
    assert widths(plan, "mix.in_proj_weight", "mix.out_proj.weight") == [(2, 2), (2, 2)]
    vectors = ("mix.in_proj_bias", "mix.out_proj.bias", "mix.bias_k", "mix.bias_v")
    assert [plan[name].role for name in vectors] == ["vector"] * 4
    assert widths(plan, *vectors) == [(1, 2)] * 4


def test_multihead_attention_with_scaling_kdim_is_hidden():
    plan = smupar.make_plan(Attention(16, kdim=18, vdim=12), base=Attention(8, kdim=6, vdim=6))
    names = ("mix.q_proj_weight", "mix.k_proj_weight", "mix.v_proj_weight")
    assert [plan[name].role for name in names] == ["hidden"] * 3
    assert widths(plan, *names) == [(2, 2), (3, 2), (2, 2)]


def test_multihead_attention_with_fixed_kdim_asks_and_the_line_works():
    model, base = Attention(16, kdim=6, vdim=6), Attention(8, kdim=6, vdim=6)
    error = refusal(model, base=base, match="has a fixed input and a scaling output")
    # No layer writes 6 values, but a table reads the data already.
    assert suggested(error) == {"mix.k_proj_weight": ..., "mix.v_proj_weight": ...}
    plan = smupar.make_plan(model, base=base, roles={"mix.[kv]_proj_weight": "embedding"})
    assert plan["mix.k_proj_weight"].role == plan["mix.v_proj_weight"].role == "embedding"
    assert widths(plan, "mix.k_proj_weight", "mix.q_proj_weight") == [(1, 2), (2, 2)]


def test_convolutions_read_input_channels_and_kernel():
    plan = smupar.make_plan(ConvNet(32), base=ConvNet(8))
    weights = {name: role for name, role in roles(plan).items() if name.endswith("weight")}
    assert weights == {
        "stem.weight": "embedding",
        "norm.weight": "vector",
        "depthwise.weight": "vector",  # each output reads one channel at every width
        "pointwise.weight": "hidden",
        "grouped.weight": "hidden",
        "line.weight": "hidden",
        "up.weight": "hidden",
        "depthwise_up.weight": "vector",
        "head.weight": "unembedding",
    }
    hidden = ("pointwise.weight", "grouped.weight", "line.weight", "up.weight")
    assert widths(plan, *hidden) == [(4, 4)] * 4
    assert widths(plan, "stem.weight", "depthwise.weight", "head.weight") == [(1, 4), (1, 4), (4, 1)]
    assert plan["line.weight"].in_dims == (1, 2)
    assert plan["up.weight"].in_dims == (0, 2, 3)  # torch stores transposed kernels input first
    # std = 1 / sqrt(base fan-in m_in): base fan-ins are 3*9, 4*9 (16 channels in 4 groups), 16*5, 16*4, 8
    stds = [plan[name].init_std for name in ("stem.weight", "grouped.weight", "line.weight", "up.weight", "head.weight")]
    assert stds == pytest.approx([27**-0.5, (36 * 4) ** -0.5, (80 * 4) ** -0.5, (64 * 4) ** -0.5, 8**-0.5], rel=1e-12)
    assert plan["stem.bias"].role == plan["norm.bias"].role == plan["up.bias"].role == "vector"
    assert plan["head.bias"].role == "fixed"


def test_grouped_transposed_convolution_counts_its_group_only():
    def model(width):
        return nn.Sequential(nn.Conv1d(3, width, 1), nn.ConvTranspose1d(width, width, 2, groups=2), nn.Conv1d(width, 5, 1))

    plan = smupar.make_plan(model(32), base=model(8))
    assert plan["1.weight"].role == "hidden"
    assert widths(plan, "1.weight") == [(4, 4)]
    # 8 channels in 2 groups: an output reads 4 of them, at 2 positions of the kernel
    assert plan["1.weight"].init_std == pytest.approx((4 * 2 * 4) ** -0.5, rel=1e-12)


def test_groups_of_fixed_size_read_a_fixed_fan_in():
    plan = smupar.make_plan(grouped_by_size(32), base=grouped_by_size(8))
    assert plan["1.weight"].role == "vector"
    assert widths(plan, "1.weight") == [(1, 4)]
    assert plan["1.weight"].lr_factors["adam"] == 1


def test_convolution_flattened_into_a_linear_is_scaled_by_channels():
    def model(width):
        return nn.Sequential(nn.Conv2d(3, width, 3), nn.Flatten(), nn.Linear(25 * width, 10))

    plan = smupar.make_plan(model(12), base=model(8))
    assert plan["2.weight"].role == "unembedding"
    assert widths(plan, "2.weight") == [(Fraction(3, 2), 1)]


@pytest.mark.parametrize(("cell", "num_gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_are_embedding_then_hidden(cell, num_gates):
    plan = smupar.make_plan(Recurrent(16, cell, num_layers=2), base=Recurrent(4, cell, num_layers=2))
    assert plan["rnn.weight_ih_l0"].shape == (num_gates * 16, 5)
    assert roles(plan) == {
        "rnn.weight_ih_l0": "embedding",
        "rnn.weight_hh_l0": "hidden",
        "rnn.bias_ih_l0": "vector",
        "rnn.bias_hh_l0": "vector",
        "rnn.weight_ih_l1": "hidden",
        "rnn.weight_hh_l1": "hidden",
        "rnn.bias_ih_l1": "vector",
        "rnn.bias_hh_l1": "vector",
        "head.weight": "unembedding",
        "head.bias": "fixed",
    }
    assert widths(plan, "rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_hh_l1") == [(1, 4), (4, 4), (1, 4)]


def test_projected_lstm_has_its_own_multiplier():
    model, base = Recurrent(16, nn.LSTM, proj_size=6), Recurrent(4, nn.LSTM, proj_size=2)
    model.head, base.head = nn.Linear(6, 3), nn.Linear(2, 3)
    plan = smupar.make_plan(model, base=base)
    assert plan["rnn.weight_hr_l0"].role == "hidden"
    assert widths(plan, "rnn.weight_hr_l0", "rnn.weight_hh_l0", "head.weight") == [(4, 3), (3, 4), (3, 1)]


@pytest.mark.parametrize("width", [16, 4], ids=["wider than the base", "as wide as the base"])
def test_both_directions_of_a_bidirectional_lstm_are_alike(width):
    model, base = (Recurrent(size, nn.LSTM, bidirectional=True) for size in (width, 4))
    plan = smupar.make_plan(model, base=base)
    assert plan["rnn.weight_ih_l0"].role == plan["rnn.weight_ih_l0_reverse"].role == "embedding"
    assert plan["rnn.weight_hh_l0"].role == plan["rnn.weight_hh_l0_reverse"].role == "hidden"


def test_parameterized_lstm_takes_packed_sequences():
    model = Recurrent(16, nn.LSTM)
    smupar.parameterize(model, base=Recurrent(4, nn.LSTM), alpha_input=2)
    x, lengths = torch.linspace(-1, 1, 70).reshape(7, 2, 5), torch.tensor([7, 7])
    with torch.no_grad():
        packed, _ = pad_packed_sequence(model.rnn(pack_padded_sequence(x, lengths))[0])
        torch.testing.assert_close(packed, model.rnn(x)[0])


def test_norms_are_vectors_also_with_several_dimensions():
    def model(width):
        norms = [nn.LayerNorm(width), nn.RMSNorm(width), nn.BatchNorm1d(width), nn.GroupNorm(2, width)]
        return nn.Sequential(nn.Linear(3, width), *norms, nn.LayerNorm((5, width)), nn.PReLU(), nn.Linear(width, 2))

    plan = smupar.make_plan(model(16), base=model(4))
    norms = [row for row in plan if row.name[0] in "12345"]
    assert len(norms) == 9
    assert {(row.role, row.width_in, row.width_out, row.init_std) for row in norms} == {("vector", 1, 4, None)}
    assert plan["6.weight"].role == "fixed"  # PReLU's one slope


def test_biases_are_vectors_inside_and_fixed_at_the_readout():
    plan = smupar.make_plan(sequential(64), base=sequential(8))
    assert [plan[name].role for name in ("0.bias", "2.bias", "4.bias")] == ["vector", "vector", "fixed"]
    assert [plan[name].lr_factors["sgd"] for name in ("0.bias", "2.bias", "4.bias")] == [8, 8, 1]
    assert [plan[name].lr_factors["adam"] for name in ("0.bias", "2.bias", "4.bias")] == [1, 1, 1]


def test_several_inputs_are_all_embeddings():
    plan = smupar.make_plan(TwoInputs(16), base=TwoInputs(4), alpha_input=3)
    assert [plan[name].role for name in ("features.weight", "tokens.weight", "time.weight")] == ["embedding"] * 3
    assert [row.forward for row in plan if row.role == "embedding"] == [
        (("features", 3.0),),
        (("tokens", 3.0),),
        (("time", 3.0),),
    ]


def test_parameters_that_do_not_scale_are_fixed():
    def model(width):
        return nn.ModuleDict({"side": nn.Linear(3, 3), "table": nn.Embedding(5, 2), "main": sequential(width)})

    plan = smupar.make_plan(model(64), base=model(16), roles={"main.0.weight": "embedding"})
    assert [plan[name].role for name in ("side.weight", "side.bias", "table.weight")] == ["fixed"] * 3
    assert plan["table.weight"].init_std is None
    assert set(plan["side.weight"].lr_factors.values()) == {1.0}
    assert plan["side.weight"].forward == ()
