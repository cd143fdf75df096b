"""Roles of models as wide as their base, where only the structure tells."""

from fractions import Fraction

import pytest
from torch import nn

import smupar
from tests.plan.roles.nets import (
    LM,
    Attention,
    EncoderDecoder,
    Raw,
    Recurrent,
    TwoInputs,
    WithGetter,
    grouped_by_size,
    parametrized_mlp,
    refusal,
    roles,
    suggested,
    widths,
)
from tests.support.models import sequential


def shared_table(width):
    return EncoderDecoder(width, share="weight")


STRUCTURE_IS_ENOUGH = {
    "mlp": sequential,
    "mlp without biases": lambda width: sequential(width, bias=False),
    "fused attention": lambda width: LM(width, fused=True),
    "untied head with bias": lambda width: LM(width, head_bias=True),
    "tied head": lambda width: LM(width, tied=True),
    "tied head with bias": lambda width: LM(width, tied=True, head_bias=True),
    "tied head first": lambda width: LM(width, tied=True, head_first=True),
    "encoder and decoder": shared_table,
    "multihead attention": Attention,
    "convolutions with depthwise": lambda width: nn.Sequential(
        nn.Conv1d(3, width, 1), nn.Conv1d(width, width, 3, groups=width), nn.Conv1d(width, width, 1), nn.Conv1d(width, 5, 1)
    ),
    "lstm": lambda width: Recurrent(width, nn.LSTM),
    "table and two projections": TwoInputs,
    "two projections": lambda width: nn.ModuleDict(
        {"a": nn.Linear(3, width), "b": nn.Linear(7, width), "fc": nn.Linear(width, width), "head": nn.Linear(width, 2)}
    ),
    "getter": WithGetter,
    "parametrized": parametrized_mlp,
}


@pytest.mark.parametrize("build", STRUCTURE_IS_ENOUGH.values(), ids=STRUCTURE_IS_ENOUGH.keys())
def test_roles_at_base_width_agree_with_those_at_a_larger_width(build):
    here, wider = smupar.make_plan(build(16), base=build(16)), smupar.make_plan(build(48), base=build(16))
    assert roles(here) == roles(wider)
    # Which dimensions would scale matters as well: the neuron pattern narrows them.
    assert {row.name: row.scaling for row in here} == {row.name: row.scaling for row in wider}
    assert {(row.width_in, row.width_out) for row in here} == {(1, 1)}
    assert {factor for row in here for _, factor in row.forward} == {1.0}


AMBIGUOUS = {
    "as many outputs as neurons": lambda width: sequential(width, num_in=8, num_out=16),
    "trunk": lambda width: sequential(width)[:3],
    "one matrix": lambda width: nn.Sequential(nn.Linear(3, width)),
    "raw parameters": Raw,
    "norm over two dimensions": lambda width: nn.Sequential(nn.Linear(3, width), nn.LayerNorm((5, width)), nn.Linear(width, 2)),
    "groups of fixed size or number": grouped_by_size,
}


@pytest.mark.parametrize("build", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_ambiguous_model_at_base_width_asks_and_delta_resolves_it(build):
    with pytest.raises(ValueError, match="delta="):
        smupar.make_plan(build(16), base=build(16))
    here = smupar.make_plan(build(16), base=build(16), delta=build(24))
    assert roles(here) == roles(smupar.make_plan(build(48), base=build(16)))
    assert {(row.width_in, row.width_out) for row in here} == {(1, 1)}


@pytest.mark.parametrize("role", ["unembedding", "hidden"])
def test_answer_to_an_ambiguous_readout_with_a_bias_is_taken(role):
    model, base = (sequential(16, num_in=8, num_out=16) for _ in range(2))
    error = refusal(model, base=base)
    assert suggested(error) == {"4.weight": "unembedding"}
    plan = smupar.make_plan(model, base=base, roles={"4.weight": role})
    assert plan["4.weight"].role == role
    assert plan["4.bias"].role == {"unembedding": "fixed", "hidden": "vector"}[role]


def test_neuron_pattern_at_base_width_narrows_also_with_depthwise_layers():
    build = STRUCTURE_IS_ENOUGH["convolutions with depthwise"]
    plan = smupar.make_plan(build(16), base=build(16), pattern="neuron", density=0.5)
    assert plan.live_neurons == (8, 16)
    assert widths(plan, "2.weight") == [(Fraction(1, 2), Fraction(1, 2))]


def test_position_table_longer_than_the_base_width_scales_with_the_width():
    # 6 positions of width 4: its largest dimension is not the one that follows the width.
    answers = {"position": "vector", "square": ("hidden", 1), "bins": "fixed"}
    plan = smupar.make_plan(Raw(4), base=Raw(4), roles=answers)
    assert plan["position"].scaling == plan["cls_token"].scaling == (2,)


def test_narrower_keys_at_base_width_ask_without_a_suggestion():
    # Whether they are hidden or outputs, sizes cannot tell; at base width not even whether they scale.
    error = refusal(LM(8, num_kv_heads=1), base=LM(8, num_kv_heads=1))
    assert suggested(error) == {"k_proj.weight": ..., "v_proj.weight": ..., "head.weight": "unembedding"}
    answers = {"[kv]_proj.weight": "hidden", "head.weight": "unembedding"}
    here = smupar.make_plan(LM(8, num_kv_heads=1), base=LM(8, num_kv_heads=1), roles=answers)
    assert here["k_proj.weight"].role == here["v_proj.weight"].role == "hidden"
    assert here["head.weight"].role == "unembedding"
