"""Roles and width multipliers on small models: what is inferred, what is asked for, and that the asked-for line works."""

import ast
import re
import warnings
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import smupar


def roles(plan):
    return {row.name: row.role for row in plan}


def widths(plan, *names):
    """(width_in, width_out) of some parameters."""
    return [(row.width_in, row.width_out) for row in map(plan.__getitem__, names)]


def suggested(error):
    """The paste-ready line of an error, evaluated."""
    line = re.search(r"^\s*roles=(\{.*\})$", str(error), re.MULTILINE)
    assert line, f"no paste-ready line in: {error}"
    return ast.literal_eval(line[1])


def mlp(width, *, num_in=8, num_out=4, bias=True):
    return nn.Sequential(
        nn.Linear(num_in, width, bias=bias),
        nn.ReLU(),
        nn.Linear(width, width, bias=bias),
        nn.ReLU(),
        nn.Linear(width, num_out, bias=bias),
    )


class LM(nn.Module):
    """One attention block with everything optional; vocabulary 40, head 4."""

    def __init__(self, width, *, fused=False, num_kv_heads=None, d_ff=None, tied=False, head_first=False, head_bias=False):
        super().__init__()
        kv_width = width if num_kv_heads is None else 4 * num_kv_heads
        if head_first:
            self.head = nn.Linear(width, 40, bias=head_bias)
        self.embed = nn.Embedding(40, width)
        self.norm = nn.LayerNorm(width)
        if fused:
            self.qkv = nn.Linear(width, 3 * width, bias=False)
        else:
            self.q_proj = nn.Linear(width, width, bias=False)
            self.k_proj = nn.Linear(width, kv_width, bias=False)
            self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        d_ff = 2 * width if d_ff is None else d_ff
        self.gate = nn.Linear(width, d_ff, bias=False)
        self.up = nn.Linear(width, d_ff, bias=False)
        self.down = nn.Linear(d_ff, width, bias=False)
        self.final = nn.RMSNorm(width)
        if not head_first:
            self.head = nn.Linear(width, 40, bias=head_bias)
        if tied:
            self.head.weight = self.embed.weight
        self.fused = fused

    def forward(self, tokens):
        x = self.embed(tokens)
        h = self.norm(x)
        q, k, v = self.qkv(h).chunk(3, -1) if self.fused else (self.q_proj(h), self.k_proj(h), self.v_proj(h))
        heads = [part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.25, enable_gqa=True).transpose(1, 2).flatten(2)
        x = x + self.o_proj(y)
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return self.head(self.final(x))


TOKENS = torch.arange(12).reshape(2, 6)


# Attention and MLP blocks


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
def test_grouped_query_attention_with_fixed_kv_asks_and_the_line_works(tied):
    # Keys and values look exactly like a readout: fan-in scales, fan-out does not.
    model, base = (LM(width, num_kv_heads=1, tied=tied) for width in (32, 8))
    with pytest.raises(ValueError, match="cannot be inferred") as error:
        smupar.make_plan(model, base=base)
    assert "k_proj.weight (4, 32), base (4, 8)" in str(error.value)
    assert "v_proj.weight (4, 32), base (4, 8)" in str(error.value)
    pasted = suggested(error.value)
    assert pasted["k_proj.weight"] == pasted["v_proj.weight"] == "hidden"
    plan = smupar.make_plan(model, base=base, roles=pasted)
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


def test_suggestion_has_one_line_for_all_layers_with_numbers_as_stars():
    def stack(width):
        return nn.ModuleDict({"layers": nn.ModuleList(LM(width, num_kv_heads=1, tied=True) for _ in range(3))})

    with pytest.raises(ValueError) as error:
        smupar.make_plan(stack(32), base=stack(8))
    assert suggested(error.value) == {"layers.*.k_proj.weight": "hidden", "layers.*.v_proj.weight": "hidden"}


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
    with pytest.raises(ValueError) as error:
        smupar.make_plan(model, base=base)
    assert suggested(error.value) == {"gate.weight": "hidden", "up.weight": "hidden", "down.weight": "hidden"}
    plan = smupar.make_plan(model, base=base, roles=suggested(error.value))
    assert widths(plan, "up.weight", "down.weight") == [(1, 4), (4, 1)]
    assert plan["q_proj.weight"].role == "fixed"


# Embeddings and readouts


def both_logits(model, base, inputs, **settings):
    """The plan, and the logits of the parameterized model and of a plain model with the same weights."""
    plain = type(model)(**model.built_with)
    plan = smupar.parameterize(model, base=base, **settings)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        return plan, model.eval()(inputs), plain.eval()(inputs)


class Tied(LM):
    def __init__(self, **built_with):
        super().__init__(tied=True, **built_with)
        self.built_with = built_with


@pytest.mark.parametrize("head_first", [False, True])
def test_tied_embedding_is_one_row_with_two_forward_factors(head_first):
    model, base = (Tied(width=width, head_first=head_first) for width in (32, 8))
    plan, scaled, plain = both_logits(model, base, TOKENS, alpha_output=2)
    name = "head.weight" if head_first else "embed.weight"  # the first name torch lists
    assert [row.name for row in plan if row.forward] == [name]
    assert plan[name].role == "embedding"
    assert plan[name].forward == (("embed", 1.0), ("head", 2 / 4))
    assert widths(plan, name) == [(1, 4)]
    # A tied table starts at the fan-in of its logits, 8 in the base: a lookup's 1 would blow them up.
    assert plan[name].init_std == pytest.approx(8**-0.5, rel=1e-12)
    assert plan.pending.keys() == {"attention_scale"}
    torch.testing.assert_close(scaled, plain * (2 / 4), rtol=1e-6, atol=1e-6)


def test_tied_head_bias_is_fixed_and_not_scaled():
    model, base = (Tied(width=width, head_bias=True) for width in (32, 8))
    with torch.no_grad():
        model.head.bias.copy_(torch.arange(40.0))
    plan, scaled, plain = both_logits(model, base, TOKENS, alpha_output=2)
    assert plan["head.bias"].role == "fixed"
    bias = torch.arange(40.0)
    torch.testing.assert_close(scaled - bias, (plain - bias) / 2, rtol=1e-4, atol=1e-4)


class EncoderDecoder(nn.Module):
    """Both sides read one table, and the head is that table again."""

    def __init__(self, width, *, share):
        super().__init__()
        self.built_with = {"width": width, "share": share}
        self.encoder = nn.ModuleDict({"embed": nn.Embedding(40, width), "fc": nn.Linear(width, width, bias=False)})
        table = self.encoder["embed"]
        self.decoder = nn.ModuleDict(
            {
                "embed": table if share == "module" else nn.Embedding(40, width),
                "fc": nn.Linear(width, width, bias=False),
            }
        )
        self.head = nn.Linear(width, 40, bias=False)
        self.decoder["embed"].weight = table.weight
        self.head.weight = table.weight

    def forward(self, tokens):
        seen = self.encoder["fc"](self.encoder["embed"](tokens))
        return self.head(self.decoder["fc"](self.decoder["embed"](tokens) + seen))


@pytest.mark.parametrize("share", ["module", "weight"])
def test_encoder_decoder_sharing_one_table_scale_each_use_once(share):
    model, base = EncoderDecoder(16, share=share), EncoderDecoder(4, share=share)
    plan, scaled, plain = both_logits(model, base, TOKENS, alpha_input=3, alpha_output=2)
    assert roles(plan) == {"encoder.embed.weight": "embedding", "encoder.fc.weight": "hidden", "decoder.fc.weight": "hidden"}
    second = [("decoder.embed", 3.0)] if share == "weight" else []  # else it is the same module
    assert plan["encoder.embed.weight"].forward == (("encoder.embed", 3.0), *second, ("head", 0.5))
    torch.testing.assert_close(scaled, plain * 3 * 0.5, rtol=1e-5, atol=1e-5)  # the model is linear


def test_untied_head_alone_and_last_is_unembedding():
    plan = smupar.make_plan(LM(32, head_bias=True), base=LM(8, head_bias=True), alpha_output=3)
    assert plan["head.weight"].role == "unembedding"
    assert plan["head.weight"].forward == (("head", 3 / 4),)
    assert plan["head.bias"].role == "fixed"
    assert plan["embed.weight"].forward == (("embed", 1.0),)
    assert plan["embed.weight"].init_std == 1.0  # a lookup reads one row
    assert plan["head.weight"].init_std == pytest.approx(8**-0.5, rel=1e-12)
    assert "output_factor" not in plan.pending


class TwoHeads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.fc = nn.Linear(width, width)
        self.policy = nn.Linear(width, 3)
        self.value = nn.Linear(width, 2)


@pytest.mark.parametrize("width", [16, 4], ids=["wider than the base", "as wide as the base"])
def test_two_heads_ask(width):
    with pytest.raises(ValueError, match="cannot be inferred") as error:
        smupar.make_plan(TwoHeads(width), base=TwoHeads(4))
    assert "policy.weight" in str(error.value)


def test_two_heads_both_named_get_both_factors():
    heads = {"policy.weight": "unembedding", "value.weight": "unembedding"}
    plan = smupar.make_plan(TwoHeads(16), base=TwoHeads(4), roles=heads, alpha_output=2)
    assert plan["policy.weight"].forward == (("policy", 0.5),)
    assert plan["value.weight"].forward == (("value", 0.5),)
    assert plan["policy.bias"].role == plan["value.bias"].role == "fixed"


class WithGetter(nn.Module):
    """The head comes first and something that looks like a head may come last; the getter tells which is which."""

    def __init__(self, width, *, probe=False):
        super().__init__()
        self.lm = nn.Linear(width, 9)
        self.embed = nn.Embedding(9, width)
        self.fc = nn.Linear(width, width)
        self.probe = nn.Linear(width, 2) if probe else None

    def get_output_embeddings(self):
        return self.lm


@pytest.mark.parametrize("width", [16, 4], ids=["wider than the base", "as wide as the base"])
def test_get_output_embeddings_decides(width):
    plan = smupar.make_plan(WithGetter(width), base=WithGetter(4))
    assert roles(plan) == {
        "lm.weight": "unembedding",
        "lm.bias": "fixed",
        "embed.weight": "embedding",
        "fc.weight": "hidden",
        "fc.bias": "vector",
    }


@pytest.mark.parametrize("width", [16, 4], ids=["wider than the base", "as wide as the base"])
def test_second_head_beside_get_output_embeddings_asks_for_itself_only(width):
    with pytest.raises(ValueError, match="cannot be inferred") as error:
        smupar.make_plan(WithGetter(width, probe=True), base=WithGetter(4, probe=True))
    assert suggested(error.value).keys() == {"probe.weight"}


def test_head_that_is_not_registered_last_asks():
    def model(width):
        return nn.ModuleDict({"head": nn.Linear(width, 3), "embed": nn.Embedding(9, width), "fc": nn.Linear(width, width)})

    with pytest.raises(ValueError, match="reads a scaling input and writes a fixed output") as error:
        smupar.make_plan(model(16), base=model(4))
    assert suggested(error.value).keys() == {"head.weight"}


def test_headless_trunk_has_no_unembedding_and_reminds_of_the_output():
    plan = smupar.make_plan(mlp(64)[:3], base=mlp(16)[:3])
    assert roles(plan) == {"0.weight": "embedding", "0.bias": "vector", "2.weight": "hidden", "2.bias": "vector"}
    assert plan.output_factor == 0.25
    assert "output_factor" in plan.pending


class LogitsByHand(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.fc = nn.Linear(width, width)

    def forward(self, tokens):
        return F.linear(self.fc(self.embed(tokens)), self.embed.weight)


def test_output_factor_is_pending_when_the_model_makes_its_own_logits():
    plan = smupar.make_plan(LogitsByHand(16), base=LogitsByHand(4), alpha_output=2)
    assert plan.output_factor == 2 / 4
    assert "plan.output_factor = 0.5" in plan.pending["output_factor"]
    plan.settle("output_factor")
    assert "output_factor" not in plan.pending


def test_output_factor_is_not_pending_under_sp():
    plan = smupar.make_plan(LogitsByHand(16), base=LogitsByHand(4), rule="sp", alpha_output=2)
    assert plan.output_factor == 1
    assert plan.pending == {}


# Layers of torch


class Attention(nn.Module):
    def __init__(self, width, **options):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.mix = nn.MultiheadAttention(width, 2, **options)
        self.head = nn.Linear(width, 10)


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
    with pytest.raises(ValueError, match="reads a fixed input and writes a scaling output") as error:
        smupar.make_plan(model, base=base)
    plan = smupar.make_plan(model, base=base, roles=suggested(error.value))
    assert plan["mix.k_proj_weight"].role == plan["mix.v_proj_weight"].role == "hidden"
    assert widths(plan, "mix.k_proj_weight", "mix.q_proj_weight") == [(1, 2), (2, 2)]


class ConvNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.depthwise = nn.Conv2d(width, width, 3, groups=width)
        self.pointwise = nn.Conv2d(width, 2 * width, 1)
        self.grouped = nn.Conv2d(2 * width, 2 * width, 3, groups=4)
        self.line = nn.Conv1d(2 * width, 2 * width, 5)
        self.up = nn.ConvTranspose2d(2 * width, width, 2)
        self.depthwise_up = nn.ConvTranspose2d(width, width, 2, groups=width)
        self.head = nn.Conv2d(width, 5, 1)


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


def grouped_by_size(width):
    """ResNeXt-like: groups of 4 channels, more of them in wider models."""
    return nn.Sequential(nn.Conv1d(3, width, 1), nn.Conv1d(width, width, 3, groups=width // 4), nn.Conv1d(width, 5, 1))


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


class Recurrent(nn.Module):
    def __init__(self, width, cell, **options):
        super().__init__()
        self.rnn = cell(5, width, **options)
        self.head = nn.Linear(width * (2 if self.rnn.bidirectional else 1), 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


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
    plan = smupar.make_plan(mlp(64), base=mlp(8))
    assert [plan[name].role for name in ("0.bias", "2.bias", "4.bias")] == ["vector", "vector", "fixed"]
    assert [plan[name].lr_factors["sgd"] for name in ("0.bias", "2.bias", "4.bias")] == [8, 8, 1]
    assert [plan[name].lr_factors["adam"] for name in ("0.bias", "2.bias", "4.bias")] == [1, 1, 1]


class TwoInputs(nn.Module):
    """A table and two projections of inputs of fixed size."""

    def __init__(self, width):
        super().__init__()
        self.features = nn.Linear(3, width)
        self.tokens = nn.Embedding(5, width)
        self.time = nn.Linear(7, width)
        self.fc = nn.Linear(width, width)
        self.head = nn.Linear(width, 2)


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
        return nn.ModuleDict({"side": nn.Linear(3, 3), "table": nn.Embedding(5, 2), "main": mlp(width)})

    plan = smupar.make_plan(model(64), base=model(16), roles={"main.0.weight": "embedding"})
    assert [plan[name].role for name in ("side.weight", "side.bias", "table.weight")] == ["fixed"] * 3
    assert plan["table.weight"].init_std is None
    assert set(plan["side.weight"].lr_factors.values()) == {1.0}
    assert plan["side.weight"].forward == ()


# Raw parameters


class Raw(nn.Module):
    def __init__(self, width, *, expand=0):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, 6, width))
        self.square = nn.Parameter(torch.zeros(width, width))
        self.temperature = nn.Parameter(torch.ones(()))
        self.bins = nn.Parameter(torch.zeros(2, 3))
        if expand:
            self.expand = nn.Parameter(torch.zeros(width, expand * width))
        self.inputs = nn.Linear(3, width)
        self.head = nn.Linear(width, 2)


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
    with pytest.raises(ValueError, match="does not tell its inputs") as error:
        smupar.make_plan(model, base=base)
    assert suggested(error.value) == {"expand": ("hidden", 1)}
    plan = smupar.make_plan(model, base=base, roles={"expand": setting})
    assert plan["expand"].role == "hidden"
    assert plan["expand"].in_dims == (setting[1],)
    assert widths(plan, "expand") == [expected]
    base_fan_in = base.expand.shape[setting[1]]
    assert plan["expand"].init_std == pytest.approx((base_fan_in * expected[0]) ** -0.5, rel=1e-12)


def test_raw_matrix_as_hidden_without_its_input_dimension_raises():
    with pytest.raises(ValueError, match=r"roles=\{'expand': \('hidden', IN_DIM\)\}"):
        smupar.make_plan(Raw(16, expand=3), base=Raw(4, expand=3), roles={"expand": "hidden"})


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
    with pytest.raises(ValueError, match="belongs to a ParameterList") as error:
        smupar.make_plan(model, base=base)
    assert suggested(error.value) == {"up.*": ("hidden", 2)}
    plan = smupar.parameterize(model, base=base, roles={"up.*": ("hidden", 1)}, density=0.25)
    assert [plan[name].role for name in ("up.0", "up.1", "scales.0")] == ["hidden", "hidden", "vector"]
    assert widths(plan, "up.0", "up.1", "scales.0") == [(4, 4), (4, 4), (1, 4)]
    assert [int(weight.count_nonzero()) for weight in model.up] == [512, 512]  # a quarter of 2 x 16 x 64


# Parametrized weights


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized_mlp(width):
    model = mlp(width)
    for layer in (model[0], model[2], model[4]):
        parametrize.register_parametrization(layer, "weight", Twice())
    return model


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


def test_weight_norm_asks_and_advises_to_remove_it():
    # The norm of such a weight is a tensor of its own, so an init of the other would change nothing.
    def model(width):
        layers = mlp(width)
        parametrizations.weight_norm(layers[2])
        return layers

    with pytest.raises(ValueError, match=r"original1 .*one of several tensors that make a weight; better remove"):
        smupar.make_plan(model(64), base=model(16))


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


# Models as wide as their base


def shared_table(width):
    return EncoderDecoder(width, share="weight")


STRUCTURE_IS_ENOUGH = {
    "mlp": mlp,
    "mlp without biases": lambda width: mlp(width, bias=False),
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
    "as many outputs as neurons": lambda width: mlp(width, num_in=8, num_out=16),
    "trunk": lambda width: mlp(width)[:3],
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
    model, base = (mlp(16, num_in=8, num_out=16) for _ in range(2))
    with pytest.raises(ValueError) as error:
        smupar.make_plan(model, base=base)
    assert suggested(error.value) == {"4.weight": "unembedding"}
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


def test_narrower_keys_at_base_width_ask_and_the_suggested_line_works():
    # Whether they are hidden or outputs, sizes cannot tell; at base width not even whether they scale.
    with pytest.raises(ValueError) as error:
        smupar.make_plan(LM(8, num_kv_heads=1), base=LM(8, num_kv_heads=1))
    assert suggested(error.value) == {"k_proj.weight": "hidden", "v_proj.weight": "hidden", "head.weight": "unembedding"}
    here = smupar.make_plan(LM(8, num_kv_heads=1), base=LM(8, num_kv_heads=1), roles=suggested(error.value))
    assert here["k_proj.weight"].role == here["v_proj.weight"].role == "hidden"
    assert here["head.weight"].role == "unembedding"


# Base models that do not fit, and other mistakes


def test_base_and_model_may_live_on_meta():
    with torch.device("meta"):
        base, model = LM(8, tied=True), LM(32, tied=True)
    on_meta = smupar.make_plan(model, base=base)
    assert on_meta.to_json() == smupar.make_plan(LM(32, tied=True), base=LM(8, tied=True)).to_json()
    assert on_meta["embed.weight"].forward == (("embed", 1.0), ("head", 0.25))


def test_base_of_another_class_raises_and_names_both():
    with pytest.raises(ValueError, match="base is a Sequential, the model a LM"):
        smupar.make_plan(LM(32), base=mlp(8))


def test_base_of_another_depth_raises_and_names_what_is_missing():
    with pytest.raises(
        ValueError, match=r"base has 4 parameters and the model 6 \(only in the model: 4.bias, 4.weight\)"
    ) as error:
        smupar.make_plan(mlp(64), base=mlp(16)[:3])
    assert "same depth" in str(error.value)


def untied_decoder(width):
    """As many parameters under the same canonical names, tied in fewer places."""
    model = EncoderDecoder(width, share="module")
    model.head.weight = model.encoder["embed"].weight
    model.decoder["embed"] = nn.Identity()
    return model


def test_base_with_other_tying_raises_and_says_so():
    with pytest.raises(
        ValueError, match=r"'head.weight' is tied to another parameter in one of model and base.*to_empty unties"
    ):
        smupar.make_plan(LM(32, tied=True), base=LM(8))
    with pytest.raises(ValueError, match=r"'encoder.embed.weight' is tied in one of model and base"):
        smupar.make_plan(EncoderDecoder(16, share="weight"), base=untied_decoder(4))


def test_base_with_other_number_of_dimensions_raises():
    def model(width, shape):
        root = mlp(width)
        root.scale = nn.Parameter(torch.ones(shape))
        return root

    with pytest.raises(ValueError, match=r"'scale' has shape \(64, 1\) in the model and \(16,\) in base"):
        smupar.make_plan(model(64, (64, 1)), base=model(16, 16))


def test_delta_that_does_not_fit_is_called_delta():
    with pytest.raises(ValueError, match="delta is a LM, the model a Sequential"):
        smupar.make_plan(mlp(16), base=mlp(16), delta=LM(8))
    with pytest.raises(ValueError, match="delta has 4 parameters and the model 6"):
        smupar.make_plan(mlp(16), base=mlp(16), delta=mlp(32)[:3])


def test_lazy_modules_ask_for_a_forward_pass_and_work_after_it():
    def model(width):
        return nn.Sequential(nn.LazyLinear(width), nn.ReLU(), nn.LazyLinear(2))

    lazy, base = model(16), model(4)
    with pytest.raises(ValueError, match=r"'0.weight' of the model has no shape yet"):
        smupar.make_plan(lazy, base=base)
    lazy(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"'0.weight' of base has no shape yet"):
        smupar.make_plan(lazy, base=base)
    base(torch.zeros(1, 3))
    plan = smupar.make_plan(lazy, base=base)
    assert roles(plan) == {"0.weight": "embedding", "0.bias": "vector", "2.weight": "unembedding", "2.bias": "fixed"}


def test_roles_glob_that_matches_nothing_raises_and_lists_names():
    with pytest.raises(ValueError, match=r"roles: 'layers.\*' matches none of the parameters: 0.weight, 0.bias"):
        smupar.make_plan(mlp(64), base=mlp(16), roles={"layers.*": "hidden"})


def test_roles_glob_hidden_by_an_earlier_one_raises():
    with pytest.raises(ValueError, match=r"'2.weight' has no effect"):
        smupar.make_plan(mlp(64), base=mlp(16), roles={"2.*": "fixed", "2.weight": "hidden"})


@pytest.mark.parametrize("setting", ["readout", ("hidden", 2), ("hidden", -1), ("embedding", 0)])
def test_roles_that_do_not_exist_raise_and_list_the_choices(setting):
    with pytest.raises(
        ValueError, match=r"roles: '2.weight' of shape \(64, 64\).*embedding, hidden, unembedding, vector, fixed"
    ):
        smupar.make_plan(mlp(64), base=mlp(16), roles={"2.weight": setting})


def test_roles_overrule_what_would_be_inferred():
    plan = smupar.make_plan(mlp(64), base=mlp(16), roles={"2.weight": ("hidden", 0), "0.weight": "fixed"}, density=0.5)
    assert plan["2.weight"].in_dims == (0,)
    assert plan["0.weight"].role == "fixed"
    assert plan["0.weight"].forward == ()


# Reminders


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
    assert smupar.make_plan(mlp(64), base=mlp(16), rule=rule).pending == {}
    assert smupar.make_plan(ConvNet(32), base=ConvNet(8), rule=rule).pending == {}


def test_outputs_that_differ_between_model_and_base_are_asked_about():
    # A head of another vocabulary scales on both sides and would pass for a hidden weight.
    with pytest.raises(ValueError, match="do the outputs of model and base differ in number"):
        smupar.make_plan(mlp(64, num_out=100), base=mlp(16, num_out=50))


def test_table_of_biases_for_the_heads_is_no_embedding():
    class Relative(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.tokens = nn.Embedding(20, width)
            self.bias = nn.Embedding(32, width // 4)
            self.inner = nn.Linear(width, width)
            self.head = nn.Linear(width, 20)

    plan = smupar.make_plan(Relative(64), base=Relative(16), alpha_input=5)
    assert roles(plan)["bias.weight"] == "vector"
    assert plan["bias.weight"].forward == ()
    assert plan["tokens.weight"].forward == (("tokens", 5.0),)


def test_classifier_behind_a_flattened_image_is_suggested_as_the_readout():
    def cnn(width):
        return nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 3), nn.Flatten(), nn.Linear(width * 16, 10))

    with pytest.raises(ValueError) as error:
        smupar.make_plan(cnn(16), base=cnn(16))
    assert suggested(error.value) == {"3.weight": "unembedding"}


def test_old_weight_norm_asks():
    def model(width):
        layers = mlp(width)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that it is old is the point
            nn.utils.weight_norm(layers[2])
        return layers

    with pytest.raises(ValueError, match=r"2\.weight_v"):
        smupar.make_plan(model(64), base=model(24))


# Weights with several holders


class Siamese(nn.Module):
    """Two input layers that share a weight."""

    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(8, width), nn.Linear(8, width)
        self.right.weight = self.left.weight
        self.mix, self.head = nn.Linear(width, width), nn.Linear(width, 3)


class Named(nn.Module):
    """Layers as attributes, and again in a container."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 3)
        self.net = nn.Sequential(self.first, nn.ReLU(), self.second, nn.ReLU(), self.head)


class OwnLogits(nn.Module):
    """Holds its table's weight itself, for logits that no module makes."""

    def __init__(self, width):
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, width), nn.Linear(width, width)
        self.out = self.embed.weight


def test_input_layers_that_share_a_weight_both_have_the_factor_of_inputs():
    plan = smupar.make_plan(Siamese(128), base=Siamese(32), alpha_input=3)
    assert plan["left.weight"].forward == (("left", 3.0), ("right", 3.0))


def test_layers_with_two_names_are_scaled_once():
    model = Named(128)
    plan = smupar.parameterize(model, base=Named(32), alpha_input=3)
    assert plan["first.weight"].forward == (("first", 3.0),)
    assert (float(model.first.smupar_factor), float(model.head.smupar_factor)) == (3.0, 0.25)
    assert smupar.audit(model, plan) == []


def test_module_that_holds_a_table_for_logits_of_its_own_gets_no_factor():
    model = OwnLogits(128)
    plan = smupar.parameterize(model, base=OwnLogits(32))
    assert plan["out"].forward == (("embed", 1.0),)
    assert plan.output_factor == 0.25
    assert "output_factor" in plan.pending
    assert not model._forward_pre_hooks


class Weight(nn.Module):
    """A layer written by hand."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))


def test_matrix_of_a_module_written_by_hand_is_asked_for():
    def make(width):
        return nn.ModuleDict({"table": Weight(50, width), "mix": Weight(width, width), "head": Weight(50, width)})

    with pytest.raises(ValueError, match="does not tell whether it reads or writes") as asked:
        smupar.make_plan(make(128), base=make(32))
    assert "roles={'table.weight': 'embedding', 'head.weight': 'unembedding'}" in str(asked.value)


def test_cells_are_known_as_recurrent_layers_are():
    def make(width):
        return nn.ModuleDict({"cell": nn.GRUCell(8, width), "mix": nn.Linear(width, width), "head": nn.Linear(width, 3)})

    plan = smupar.make_plan(make(128), base=make(32), density=0.25)
    assert (plan["cell.weight_ih"].role, plan["cell.weight_hh"].role) == ("embedding", "hidden")
    assert plan["cell.weight_ih"].init_std == pytest.approx(8**-0.5)


def test_tables_that_are_read_side_by_side_are_embeddings():
    def make(width):
        parts = {"word": nn.Embedding(50, width), "char": nn.Embedding(20, width // 4)}
        read = {"read": nn.LSTM(width + width // 4, width), "mix": nn.Linear(width, width), "head": nn.Linear(width, 50)}
        return nn.ModuleDict({**parts, **read})

    plan = smupar.make_plan(make(128), base=make(32), alpha_input=9)
    assert plan["word.weight"].forward[0][1] == plan["char.weight"].forward[0][1] == 9


def test_frozen_table_is_overwritten_with_a_warning_or_kept():
    def make(width):
        frozen = nn.Embedding.from_pretrained(torch.arange(4.0)[:, None].expand(4, width).clone())
        return nn.ModuleDict({"pos": frozen, "mix": nn.Linear(width, width), "head": nn.Linear(width, 3)})

    with pytest.warns(smupar.PlanWarning, match="'pos.weight' is frozen and initialised all the same"):
        smupar.make_plan(make(32), base=make(8))
    model = make(32)
    smupar.parameterize(model, base=make(8), roles={"pos.weight": "fixed"})
    assert torch.equal(model["pos"].weight[:, 0], torch.arange(4.0))


def test_readout_that_may_be_taken_for_hidden_is_named_before_it_is_made_sparse():
    def make(width):
        layers = {"first": nn.Linear(8, width), "mix": nn.Linear(width, width)}
        return nn.ModuleDict({**layers, "policy": nn.Linear(width, 128), "value": nn.Linear(width, 1)})

    with pytest.warns(smupar.PlanWarning, match="'policy.weight' is taken for hidden, and made sparse.*Pass delta="):
        smupar.make_plan(make(64), base=make(64), density=0.25)
    assert not any("policy" in str(note) for note in smupar.make_plan(make(64), base=make(64)).notes)


class Router(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, width))


def test_matrix_of_the_users_own_beside_a_readout_is_suggested_to_be_hidden():
    def make(width):
        return nn.ModuleDict({"first": nn.Linear(8, width), "router": Router(width), "head": nn.Linear(width, 3)})

    with pytest.raises(ValueError, match=r"roles=\{'router.weight': \('hidden', 1\)\}"):
        smupar.make_plan(make(32), base=make(8))
    plan = smupar.make_plan(make(32), base=make(8), roles={"router.weight": "unembedding"})
    assert "no layer of router.weight could be scaled" in plan.pending["output_factor"]
    assert not smupar.make_plan(make(32), base=make(8), roles={"router.weight": ("hidden", 1)}).pending


class Bilinear(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.hidden, self.mix = nn.Linear(6, width), nn.Linear(width, width), nn.Bilinear(width, 4, 5)
        self.last = nn.Linear(width, 3)


def test_bilinear_layer_sums_over_its_inputs_and_is_asked_for():
    with pytest.raises(ValueError, match="roles=") as error:
        smupar.make_plan(Bilinear(64), base=Bilinear(16))
    plan = smupar.make_plan(Bilinear(64), base=Bilinear(16), roles=suggested(error.value))
    assert plan["mix.weight"].lr_factor("adam") == 1 / 4
