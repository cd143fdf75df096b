"""Plans: the identities of Table 1 bit for bit, the numbers of single rows, and reading, writing, comparing them."""

import copy
import json
import math
import re
import warnings
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import smupar
from smupar.plan.settings import layer_glob

SIGMA, ALPHA_INPUT, ALPHA_OUTPUT = 0.08665602, 9.1705, 1.0951835  # Table 3 of the paper


class MLP(nn.Module):
    """Embedding layer, two hidden layers (the first one ``expand`` times as wide), readout."""

    def __init__(self, width, expand=1, activation=F.gelu):
        super().__init__()
        self.activation = activation
        self.embed = nn.Linear(7, width)
        self.fc1 = nn.Linear(width, expand * width)
        self.fc2 = nn.Linear(expand * width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.activation(self.embed(x))
        x = self.activation(self.fc2(self.activation(self.fc1(x))))
        return self.head(x)


class Blocks(nn.Module):
    def __init__(self, width, depth=3):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "fc": nn.Linear(width, width)}) for _ in range(depth)
        )
        self.head = nn.Linear(width, 11, bias=False)


class Headless(nn.Module):
    """Makes its logits out of sight: F.linear(x, self.embed.weight)."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.attn = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)


class Conv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.conv = nn.Conv2d(width, 2 * width, 3)
        self.up = nn.ConvTranspose2d(2 * width, width, 3)
        self.head = nn.Linear(width, 5)


def on_meta(kind, *args, **kwargs):
    with torch.device("meta"):
        return kind(*args, **kwargs)


def plan_mlp(width, base_width, *, expand=1, **settings):
    return smupar.make_plan(on_meta(MLP, width, expand), base=on_meta(MLP, base_width, expand), **settings)


def numbers(plan):
    """Every number a run would use."""
    return {row.name: (row.init_std, row.lr_factors, row.eps_factor, row.forward) for row in plan}


HIDDEN = ("fc1.weight", "fc2.weight")


# Identities of METHOD.md, section 1. Equality of floats is meant.


@pytest.mark.parametrize("rule", ["smupar", "smupar-init-only", "smupar-lr-only"])
@pytest.mark.parametrize("pattern", ["random", "bernoulli", "fan_in"])
@pytest.mark.parametrize("density", [0.1, 1 / 3, 0.7, 1 / 20, 1.0])
@pytest.mark.parametrize(("width", "base_width", "expand"), [(97, 31, 1), (1088, 256, 1), (45, 180, 3)])
def test_base_density_gives_mup_bit_for_bit(rule, pattern, density, width, base_width, expand):
    shared = {"density": density, "base_density": density, "pattern": pattern, "expand": expand, "init_std": SIGMA}
    plan = plan_mlp(width, base_width, rule=rule, **shared)
    assert numbers(plan) == numbers(plan_mlp(width, base_width, rule="mup", **shared))
    # And muP does not know the density.
    dense = plan_mlp(width, base_width, rule="mup", expand=expand, init_std=SIGMA)
    assert numbers(plan) == numbers(dense)
    assert all(row.density_mult == 1 for row in plan)


@settings(deadline=None)
@given(st.integers(20, 300), st.integers(20, 300), st.floats(0.01, 1))
def test_base_density_gives_mup_at_any_shape_and_density(width, base_width, density):
    plan = plan_mlp(width, base_width, density=density, base_density=density)
    assert numbers(plan) == numbers(plan_mlp(width, base_width, rule="mup"))


@pytest.mark.parametrize(
    ("pattern", "density"),
    [("2:4", 0.5), ("2:4-transposable", 0.5), ("1:4", 0.25), ("block-16", 0.1)],
)
def test_base_density_gives_mup_for_structured_patterns(pattern, density):
    plan = plan_mlp(96, 32, pattern=pattern, density=density, base_density=density)
    assert plan["fc1.weight"].pattern == pattern
    assert numbers(plan) == numbers(plan_mlp(96, 32, rule="mup"))


def test_base_density_gives_mup_on_convolutions():
    model, base = on_meta(Conv, 33), on_meta(Conv, 10)
    plan = smupar.make_plan(model, base=base, density=0.1, base_density=0.1)
    assert numbers(plan) == numbers(smupar.make_plan(model, base=base, rule="mup"))
    assert plan["conv.weight"].num_kept == 1960  # 19602 / 10, rounded
    assert plan["up.weight"].width_in == Fraction(33, 10)


@pytest.mark.parametrize("rule", ["sp", "mup", "smupar", "smupar-init-only", "smupar-lr-only"])
@pytest.mark.parametrize("density", [1.0, 0.1])
def test_base_width_and_density_give_factors_of_one(rule, density):
    plan = plan_mlp(
        100,
        100,
        rule=rule,
        density=density,
        base_density=density,
        init_std=SIGMA,
        alpha_input=ALPHA_INPUT,
        alpha_output=ALPHA_OUTPUT,
    )
    for row in plan:
        assert set(row.lr_factors.values()) == {1.0}
        assert row.eps_factor == 1.0
    assert {row.name: row.init_std for row in plan if row.init_std is not None} == {
        "embed.weight": SIGMA,
        "fc1.weight": SIGMA,
        "fc2.weight": SIGMA,
        "head.weight": SIGMA,
    }
    # Alphas and 1 / d_head are not functions of width: they stay, except that SP has none.
    alphas = (1.0, 1.0) if rule == "sp" else (ALPHA_INPUT, ALPHA_OUTPUT)
    assert plan["embed.weight"].forward == (("embed", alphas[0]),)
    assert plan["head.weight"].forward == (("head", alphas[1]),)
    assert plan.output_factor == alphas[1]
    assert plan.attention_scale(64) == (1 / 8 if rule == "sp" else 1 / 64)


@pytest.mark.parametrize("pattern", ["random", "bernoulli", "fan_in"])
@pytest.mark.parametrize("width", [256, 512, 1088, 2048])
def test_iso_wpn_gives_the_hidden_factors_of_sp(width, pattern):
    iso = {"density": 256 / width, "pattern": pattern, "init_std": SIGMA}
    smupar_plan, sp, mup = (plan_mlp(width, 256, rule=rule, **iso) for rule in ("smupar", "sp", "mup"))
    for name in HIDDEN:
        assert smupar_plan[name].init_std == sp[name].init_std == SIGMA
        assert smupar_plan[name].lr_factor("adam") == sp[name].lr_factor("adam") == 1.0
        # The paper calls muP and SmuPar synonymous there; Table 1 does not.
        if width > 256:
            assert mup[name].init_std == SIGMA * math.sqrt(256 / width) < SIGMA
            assert mup[name].lr_factor("adam") == 256 / width < 1


@settings(deadline=None)
@given(st.integers(16, 300), st.integers(0, 2000))
def test_iso_wpn_is_exact_at_any_width(base_width, wider):
    # Products of rounded multipliers miss 1 at some widths; exact fractions do not.
    width = base_width + wider
    plan = plan_mlp(width, base_width, density=base_width / width, init_std=SIGMA)
    for name in HIDDEN:
        assert plan[name].init_std == SIGMA
        assert plan[name].lr_factor("adam") == 1.0


def test_fractional_multipliers_are_exact():
    plan = plan_mlp(1088, 256, density=1 / 16, init_std=SIGMA, alpha_output=ALPHA_OUTPUT)
    row = plan["fc1.weight"]
    assert (row.width_in, row.width_out, row.density_mult) == (Fraction(17, 4), Fraction(17, 4), Fraction(1, 16))
    assert row.lr_factors == {"adam": 64 / 17, "sgd": 16.0, "muon": 1.0}
    assert row.init_std == SIGMA * math.sqrt(64 / 17)
    assert plan["head.weight"].lr_factors == {"adam": 1.0, "sgd": 17 / 4}
    assert plan["head.weight"].forward == (("head", ALPHA_OUTPUT * (4 / 17)),)
    assert plan.output_factor == ALPHA_OUTPUT * (4 / 17)


def test_multipliers_below_one_are_exact():
    row = plan_mlp(64, 256, density=0.5)["fc1.weight"]
    assert row.width_in == Fraction(1, 4)
    assert row.lr_factor("adam") == 8.0
    assert row.init_std == 1 / 16 * math.sqrt(8)


def test_hidden_weights_use_their_own_fan_in_and_fan_out():
    class Funnel(nn.Module):
        def __init__(self, width, inner):
            super().__init__()
            self.embed = nn.Linear(7, width)
            self.up = nn.Linear(width, inner)
            self.down = nn.Linear(inner, width)
            self.head = nn.Linear(width, 5)

    # m_d = 4 and an inner width that grows by 21/5 only.
    plan = smupar.make_plan(on_meta(Funnel, 256, 672), base=on_meta(Funnel, 64, 160), density=1 / 16)
    up, down = plan["up.weight"], plan["down.weight"]
    assert (up.width_in, up.width_out) == (Fraction(4), Fraction(21, 5))
    assert (up.lr_factor("adam"), up.lr_factor("sgd")) == (4.0, 16.8)
    assert (down.width_in, down.width_out) == (Fraction(21, 5), Fraction(4))
    assert (down.lr_factor("adam"), down.lr_factor("sgd")) == (80 / 21, 320 / 21)


def test_lr_and_decay_factors_agree_with_mup_package():
    # PEERS.md: MLP with hidden width 64 against 8, lr .01 and decay .1 -> hidden (.00125, .8), SGD input weight (.08, .0125).
    plan = plan_mlp(64, 8, rule="mup")
    adam = {row.name: row.lr_factor("adam") for row in plan}
    assert adam == {name: 1 / 8 if name in HIDDEN else 1.0 for name in adam}
    assert plan["fc1.weight"].decay_factor("adam") == 8.0
    assert {row.name: row.lr_factor("sgd") for row in plan} == {
        "embed.weight": 8.0,
        "embed.bias": 8.0,
        "fc1.weight": 1.0,
        "fc1.bias": 8.0,
        "fc2.weight": 1.0,
        "fc2.bias": 8.0,
        "head.weight": 8.0,
        "head.bias": 1.0,
    }
    assert plan["embed.weight"].decay_factor("sgd") == 0.125


def test_muon_has_no_rule_for_an_embedding():
    plan = plan_mlp(64, 16)
    assert plan["fc1.weight"].lr_factor("muon") == 1.0
    with pytest.raises(ValueError, match=r"'embed.weight' is embedding: the muon family"):
        plan["embed.weight"].lr_factor("muon")


def test_ablations_correct_one_of_init_and_lr():
    # m_in 4, m_rho 1/16: SmuPar's variance and LR factor are both 4, muP's both 1/4.
    found = {}
    for rule in ("mup", "smupar", "smupar-init-only", "smupar-lr-only"):
        row = plan_mlp(256, 64, rule=rule, density=1 / 16, init_std=1.0)["fc2.weight"]
        found[rule] = (row.init_std, row.lr_factor("adam"), row.lr_factor("sgd"))
    assert found == {
        "mup": (0.5, 0.25, 1.0),
        "smupar": (2.0, 4.0, 16.0),
        "smupar-init-only": (2.0, 0.25, 1.0),
        "smupar-lr-only": (0.5, 4.0, 16.0),
    }


# Densities


def test_per_layer_densities_give_per_layer_corrections():
    plan = plan_mlp(256, 64, density={"fc1.weight": 1 / 4, "fc*.weight": 1 / 16}, init_std=1.0)
    first, second = plan["fc1.weight"], plan["fc2.weight"]
    assert (first.density, first.init_std, first.lr_factor("adam")) == (Fraction(1, 4), 1.0, 1.0)
    assert (second.density, second.init_std, second.lr_factor("adam")) == (Fraction(1, 16), 2.0, 4.0)


def test_layers_that_no_glob_names_stay_dense():
    plan = plan_mlp(256, 64, density={"fc2.weight": 1 / 16})
    assert plan["fc1.weight"].pattern is None
    assert plan["fc1.weight"].lr_factor("adam") == 0.25
    assert plan["fc2.weight"].pattern == "random"


def test_erk_gives_each_layer_its_own_correction():
    plan = plan_mlp(64, 64, expand=4, density=smupar.erk(1 / 8), roles={"head.weight": "unembedding"})
    # Both have (64 + 256) / (64 * 256): equal densities, 2048 of 16384 weights each.
    assert plan["fc1.weight"].num_kept == plan["fc2.weight"].num_kept == 2048
    blocks = smupar.make_plan(on_meta(Conv, 32), base=on_meta(Conv, 16), density=smupar.erk(1 / 8))
    for name in ("conv.weight", "up.weight"):
        row = blocks[name]
        assert row.lr_factor("adam") == float(1 / (row.width_in * row.density))


def test_plan_on_meta_uses_realised_densities():
    plan = plan_mlp(100, 50, density=1 / 3)
    row = plan["fc1.weight"]
    assert (row.num_kept, row.density, row.density_mult) == (3333, Fraction(3333, 10000), Fraction(3333, 10000))
    assert row.lr_factor("adam") == 10000 / 6666
    fan_in = plan_mlp(100, 50, density=1 / 3, pattern="fan_in")["fc1.weight"]
    assert (fan_in.num_kept, fan_in.density) == (3300, Fraction(33, 100))
    block = plan_mlp(96, 48, density=1 / 3, pattern="block-16")["fc1.weight"]
    assert (block.num_kept, block.density) == (12 * 256, Fraction(1, 3))


def test_bernoulli_uses_the_nominal_density():
    row = plan_mlp(100, 50, density=1 / 3, pattern="bernoulli")["fc1.weight"]
    assert (row.num_kept, row.density) == (None, Fraction(1, 3))
    assert row.lr_factor("adam") == 1.5


def test_nm_density_is_what_the_pattern_says():
    row = plan_mlp(128, 64, pattern="2:4")["fc1.weight"]
    assert (row.density, row.num_kept, row.lr_factor("adam")) == (Fraction(1, 2), 8192, 1.0)
    with pytest.raises(ValueError, match=r"'fc1.weight' of shape \(128, 128\): 2:4 keeps exactly 2/4"):
        plan_mlp(128, 64, pattern="2:4", density=0.25)


def test_only_hidden_weights_are_made_sparse():
    plan = plan_mlp(64, 16, density=0.25)
    assert [row.name for row in plan if row.masked] == list(HIDDEN)
    assert {row.density for row in plan if not row.masked} == {1}


@pytest.mark.parametrize("pattern", ["random", "bernoulli", "fan_in", "2:4", "2:4-transposable", "block-16"])
def test_draw_mask_has_the_planned_density(pattern):
    plan = plan_mlp(128, 64, density=0.5, pattern=pattern, seed=3)
    for name in HIDDEN:
        mask = plan.draw_mask(name)
        assert tuple(mask.shape) == plan[name].shape
        if pattern == "bernoulli":
            assert abs(int(mask.sum()) - 8192) < 6 * 64
        else:
            assert int(mask.sum()) == plan[name].num_kept == 8192
        assert torch.equal(mask, plan.draw_mask(name))
    assert not torch.equal(plan.draw_mask("fc1.weight"), plan.draw_mask("fc2.weight"))
    assert plan.draw_mask("head.weight") is None


def test_draw_mask_of_another_model_with_the_same_layer_is_the_same():
    # A mask is of (seed, name): neither depth, base nor the rule may change it.
    first = smupar.make_plan(on_meta(Blocks, 64, 2), base=on_meta(Blocks, 32, 2), density=0.25, seed=5)
    second = smupar.make_plan(on_meta(Blocks, 64, 6), base=on_meta(Blocks, 16, 6), density=0.25, seed=5, rule="mup")
    name = "blocks.1.fc.weight"
    assert torch.equal(first.draw_mask(name), second.draw_mask(name))


def test_draw_mask_follows_the_seed_of_the_plan():
    first, second = (plan_mlp(64, 16, density=0.25, seed=seed).draw_mask("fc1.weight") for seed in (0, 1))
    assert not torch.equal(first, second)


def test_density_without_hidden_weights_raises():
    class Shallow(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.embed = nn.Linear(7, width)
            self.head = nn.Linear(width, 5)

    with pytest.raises(ValueError, match="no hidden weight could be made sparse"):
        smupar.make_plan(on_meta(Shallow, 64), base=on_meta(Shallow, 16), density=0.5)


# Masks of the user's own


def own_mask(num_kept, size=64):
    mask = torch.zeros(size * size, dtype=torch.bool)
    mask[:num_kept] = True
    return mask.view(size, size)


@pytest.mark.parametrize("key", ["fc1.weight", "fc1.weight_mask"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_given_masks_are_read_off(key, dtype):
    with pytest.warns(smupar.PlanWarning, match="assumes random masks"):
        plan = plan_mlp(64, 16, density=0.5, masks={key: own_mask(1024).to(dtype)})
    row = plan["fc1.weight"]
    assert (row.pattern, row.num_kept, row.density) == ("given", 1024, Fraction(1, 4))
    assert row.lr_factor("adam") == 1.0
    assert plan["fc2.weight"].density == Fraction(1, 2)
    assert any(note.kind == "given masks" and "assumes random masks" in note.text for note in plan.notes)


def test_given_mask_cannot_be_drawn_again():
    plan = plan_mlp(64, 16, masks={"fc1.weight": own_mask(1024)})
    with pytest.raises(ValueError, match=r"mask of 'fc1.weight' was given by the user"):
        plan.draw_mask("fc1.weight")


# Warnings


def plan_warnings(**kwargs):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plan = plan_mlp(**kwargs)
    return plan, [warning for warning in seen if issubclass(warning.category, smupar.PlanWarning)]


def test_few_weights_per_neuron_warn():
    # 256 / 32 = 8 per neuron.
    with pytest.warns(smupar.PlanWarning, match=r"2 hidden weights keep fewer than 16 weights per neuron \('fc1.weight': 8\)"):
        plan = plan_mlp(256, 64, density=1 / 32)
    assert any(note.kind == "thin" and "fewer than 16" in str(note) for note in plan.notes)
    assert plan["fc1.weight"].lr_factor("adam") == 8.0  # warned about, not changed


def test_few_weights_per_neuron_counts_the_fan_in_of_a_convolution():
    # 16 channels x 9 kernel positions / 8 = 18 per neuron.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smupar.make_plan(on_meta(Conv, 16), base=on_meta(Conv, 8), density=1 / 8)


@pytest.mark.parametrize("density", [1 / 16, 1 / 4, 1.0])
def test_enough_weights_per_neuron_do_not_warn(density):
    plan, seen = plan_warnings(width=256, base_width=64, density=density)
    assert seen == []
    assert not any(note.kind == "thin" or "weights per neuron" in str(note) for note in plan.notes)


def test_dense_narrow_layers_do_not_warn():
    assert plan_warnings(width=12, base_width=6)[1] == []


def test_neuron_pattern_counts_weights_of_live_neurons():
    # 26 of 64 neurons live, so each reads 26 weights: a dense layer of that width would not warn either.
    plan, seen = plan_warnings(width=64, base_width=32, density=0.4, pattern="neuron")
    assert plan.live_neurons == (26, 64)
    assert seen == []


def test_warning_points_at_the_caller_of_make_plan():
    model, base = on_meta(MLP, 256), on_meta(MLP, 64)
    with pytest.warns(smupar.PlanWarning) as seen:
        smupar.make_plan(model, base=base, density=1 / 32)
    assert seen[0].filename == __file__


def test_warning_points_at_the_caller_of_parameterize():
    model, base = MLP(64), on_meta(MLP, 16)
    with pytest.warns(smupar.PlanWarning) as seen:
        smupar.parameterize(model, base=base, density=1 / 32)
    assert seen[0].filename == __file__


def test_sp_notes_that_it_has_no_alphas():
    plan = plan_mlp(64, 16, rule="sp", alpha_input=ALPHA_INPUT)
    assert [str(note) for note in plan.notes] == ["SP has no alpha_input and alpha_output: they are not used"]
    assert plan["embed.weight"].forward == (("embed", 1.0),)
    assert plan.output_factor == 1.0


# Init


def test_init_std_float_is_scaled_for_hidden_weights_only():
    # Proxy's sigma at m_d = 16 is the std that the paper prints for SP, 2.166e-2.
    plan = plan_mlp(4096, 256, rule="mup", init_std=SIGMA)
    assert plan["fc1.weight"].init_std == SIGMA / 4
    assert round(plan["fc1.weight"].init_std, 5) == 0.02166
    assert plan["embed.weight"].init_std == plan["head.weight"].init_std == SIGMA
    # m_d = 8 and 99.2 % sparsity: a variance 128 / 8 times sigma^2.
    assert plan_mlp(2048, 256, density=1 / 128, init_std=SIGMA)["fc1.weight"].init_std == 4 * SIGMA


def test_init_std_fan_in_is_of_the_base():
    plan = plan_mlp(256, 64, density=1 / 16)
    assert plan["embed.weight"].init_std == 1 / math.sqrt(7)
    assert plan["fc1.weight"].init_std == 1 / 8 * 2
    assert plan["head.weight"].init_std == 1 / 8
    # At the base itself this is 1 / sqrt(fan_in) everywhere.
    assert plan_mlp(64, 64)["fc1.weight"].init_std == 1 / 8


def test_init_std_fan_in_of_convolutions_counts_the_kernel():
    plan = smupar.make_plan(on_meta(Conv, 32), base=on_meta(Conv, 16))
    assert plan["stem.weight"].init_std == 1 / math.sqrt(27)
    assert plan["conv.weight"].init_std == 1 / 12 * math.sqrt(1 / 2)
    assert plan["up.weight"].init_std == 1 / math.sqrt(32 * 9) * math.sqrt(1 / 2)


def test_init_std_fan_in_of_a_lookup_is_one():
    plan = smupar.make_plan(on_meta(Blocks, 64), base=on_meta(Blocks, 16))
    assert plan["embed.weight"].init_std == 1.0
    assert plan["head.weight"].init_std == 0.25


def test_init_std_by_glob():
    plan = plan_mlp(256, 64, init_std={"embed.weight": 0.5, "head.weight": 0, "*": "fan_in"})
    assert plan["embed.weight"].init_std == 0.5
    assert plan["head.weight"].init_std == 0.0
    assert plan["fc1.weight"].init_std == 1 / 16


def test_init_std_leaves_vectors_to_the_model():
    plan = smupar.make_plan(on_meta(Blocks, 64), base=on_meta(Blocks, 16), init_std=1.0)
    assert {row.name for row in plan if row.init_std is None} == {
        f"blocks.{i}.{leaf}" for i in range(3) for leaf in ("norm.weight", "norm.bias", "fc.bias")
    }


# What only the user can set


def attention_plan(**settings):
    return smupar.make_plan(on_meta(Headless, 64), base=on_meta(Headless, 16), **settings)


def test_attention_scale_is_a_number_and_reading_it_changes_nothing():
    plan = attention_plan()
    before = plan.to_json()
    assert plan.attention_scale(80) == 1 / 80
    assert plan.to_json() == before
    assert "plan.settle('attention_scale')" in plan.pending["attention_scale"]


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


def test_attention_is_told_by_the_classes_of_modules():
    model, base = (on_meta(named_layer, width, "mixer", QueryLayer) for width in (64, 16))
    assert set(smupar.make_plan(model, base=base).pending) == {"attention_scale"}


@pytest.mark.parametrize("leaf", ["mixer", "pattern", "attribute", "v_proj"])
def test_other_names_are_no_attention(leaf):
    plan = smupar.make_plan(on_meta(named_layer, 64, leaf), base=on_meta(named_layer, 16, leaf))
    assert plan.pending == {}


def test_attention_scale_of_sp_is_what_models_do_anyway():
    plan = attention_plan(rule="sp")
    assert plan.pending == {}
    assert plan.attention_scale(64) == 0.125


@pytest.mark.parametrize("head_dim", [0, -1])
def test_attention_scale_of_no_head_raises_and_settles_nothing(head_dim):
    plan = attention_plan()
    with pytest.raises(ValueError, match="head_dim"):
        plan.attention_scale(head_dim)
    assert "attention_scale" in plan.pending


def test_models_without_attention_have_nothing_pending():
    assert plan_mlp(64, 16, alpha_input=ALPHA_INPUT, alpha_output=ALPHA_OUTPUT).pending == {}


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


# Reading, writing, comparing


def some_plans():
    yield plan_mlp(1088, 256, density=0.1, base_density=0.3, init_std=SIGMA, alpha_input=ALPHA_INPUT, seed=7)
    yield plan_mlp(64, 32, pattern="neuron", density=3 / 8)
    yield plan_mlp(64, 16, density=0.3, pattern="bernoulli", rule="smupar-lr-only")
    yield plan_mlp(64, 16, masks={"fc1.weight": own_mask(17)})
    yield attention_plan(density=1 / 3)
    yield smupar.make_plan(on_meta(Conv, 33), base=on_meta(Conv, 10), density=smupar.erk(0.1))


def test_json_round_trip_is_equal():
    for plan in some_plans():
        again = smupar.Plan.from_json(plan.to_json())
        assert again == plan
        assert numbers(again) == numbers(plan)
        assert again.diff(plan) == []
        assert str(again) == str(plan)
        assert again.to_json() == plan.to_json()


def test_json_round_trip_draws_the_same_masks():
    for pattern in ("random", "neuron"):
        plan = plan_mlp(64, 32, pattern=pattern, density=3 / 8, seed=2)
        again = smupar.Plan.from_json(plan.to_json())
        assert torch.equal(again.draw_mask("fc1.weight"), plan.draw_mask("fc1.weight"))


def test_json_round_trip_keeps_what_is_settled():
    plan = attention_plan()
    plan.settle("output_factor")
    again = smupar.Plan.from_json(plan.to_json())
    assert set(again.pending) == {"attention_scale"}


def test_json_round_trip_keeps_the_kinds_of_notes():
    with pytest.warns(smupar.PlanWarning):
        plan = attention_plan(density=1 / 16)
    again = smupar.Plan.from_json(plan.to_json())
    assert again.notes == plan.notes
    assert [note.kind for note in again.notes] == ["thin"]


def test_plan_of_the_first_version_loads():
    plan = smupar.Plan.from_json((Path(__file__).parents[1] / "fixtures" / "older" / "plan.json").read_text())
    assert len(plan) == 8
    assert plan["attention.qkv.weight"].density == Fraction(1, 4)
    assert int(plan.draw_mask("attention.qkv.weight").sum()) == 768
    assert plan["embed.weight"].forward == (("embed", 2.0),)
    assert [str(note)[:43] for note in plan.notes] == ["2 hidden weights keep fewer than 16 weights"]
    assert "plan.settle('attention_scale')" in plan.pending["attention_scale"]  # what it says to do can be done
    plan.settle("attention_scale")
    assert smupar.Plan.from_json(plan.to_json()) == plan


def without_rows():
    plan = json.loads(plan_mlp(64, 16).to_json())
    del plan["rows"]
    return json.dumps(plan)


@pytest.mark.parametrize("text", ["", "not json", "[]", "3", "{}", '{"format": "smupar-plan/0"}', without_rows()])
def test_from_json_of_something_else_raises(text):
    with pytest.raises(ValueError):
        smupar.Plan.from_json(text)


def test_from_json_of_another_format_says_what_it_wants():
    with pytest.raises(ValueError, match=r"not a plan in format 'smupar-plan/1'"):
        smupar.Plan.from_json('{"format": "smupar-plan/0", "rows": []}')


def test_plan_is_a_collection_of_rows_by_name():
    plan = plan_mlp(64, 16)
    names = [name for name, _ in MLP(4).named_parameters()]
    assert [row.name for row in plan] == names
    assert len(plan) == 8
    assert "fc1.weight" in plan
    assert "fc9.weight" not in plan
    assert plan["fc1.weight"].shape == (64, 64)


def test_diff_of_equal_plans_is_empty():
    assert plan_mlp(64, 16, density=0.25).diff(plan_mlp(64, 16, density=0.25)) == []


def test_diff_names_what_differs():
    lines = plan_mlp(64, 16, density=0.25, seed=1).diff(plan_mlp(64, 16, density={"fc2.weight": 0.5, "*": 0.25}, seed=2))
    assert lines[0] == "seed: 1 -> 2"
    assert "fc2.weight: density 0.25 -> 0.5" in lines
    assert "fc2.weight: num_kept 1024 -> 2048" in lines
    assert "fc2.weight: init_std 0.25 -> 0.176777" in lines
    assert "fc2.weight: lr_factors adam 1, sgd 4, muon 1 -> adam 0.5, sgd 2, muon 1" in lines
    assert not [line for line in lines if line.startswith(("fc1", "embed", "head"))]


def test_diff_of_rules_and_alphas_is_listed():
    lines = plan_mlp(64, 16, rule="mup").diff(plan_mlp(64, 16, alpha_output=3.0))
    assert lines == [
        "rule: mup -> smupar",
        "alpha_output: 1.0 -> 3.0",
        "output_factor: 0.25 -> 0.75",
        "head.weight: forward (('head', 0.25),) -> (('head', 0.75),)",
    ]


def test_diff_of_depths_names_the_extra_parameters():
    shallow = smupar.make_plan(on_meta(Blocks, 64, 1), base=on_meta(Blocks, 16, 1))
    deep = smupar.make_plan(on_meta(Blocks, 64, 2), base=on_meta(Blocks, 16, 2))
    extra = [f"blocks.1.{leaf}" for leaf in ("norm.weight", "norm.bias", "fc.weight", "fc.bias")]
    assert shallow.diff(deep) == [f"{name}: only in the second" for name in extra]
    assert deep.diff(shallow) == [f"{name}: only in the first" for name in extra]


COLUMNS = ["parameter", "role", "shape", "density", "m_in", "m_out", "m_rho", "init std", "LR Adam", "LR SGD", "forward"]


def printed_cells(plan):
    """The table of a printed plan, cut where its header's columns start."""
    lines = str(plan).splitlines()
    header = lines[1]
    starts = [header.index(column) for column in COLUMNS]
    assert starts == sorted(starts)
    table = []
    for line in lines[2:]:
        if line.startswith(("TO DO", "note:")):
            break
        assert all(line[start - 1 : start] in ("", " ") for start in starts[1:]), "a cell runs into the next column"
        table.append([line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)])
    return table


def test_print_has_every_number_of_a_row():
    table = printed_cells(plan_mlp(1088, 256, density=1 / 16, init_std=SIGMA, alpha_input=2.0))
    assert table == [
        ["embed.weight", "embedding", "1088x7", "1", "1", "4.25", "1", "0.086656", "1", "4.25", "2"],
        ["embed.bias", "vector", "1088", "1", "1", "4.25", "1", "kept", "1", "4.25", ""],
        ["fc1.weight", "hidden", "1088x1088", "0.0625", "4.25", "4.25", "0.0625", "0.168137", "3.76471", "16", ""],
        ["fc1.bias", "vector", "1088", "1", "1", "4.25", "1", "kept", "1", "4.25", ""],
        ["fc2.weight", "hidden", "1088x1088", "0.0625", "4.25", "4.25", "0.0625", "0.168137", "3.76471", "16", ""],
        ["fc2.bias", "vector", "1088", "1", "1", "4.25", "1", "kept", "1", "4.25", ""],
        ["head.weight", "unembedding", "5x1088", "1", "4.25", "1", "1", "0.086656", "1", "4.25", "0.235294"],
        ["head.bias", "fixed", "5", "1", "1", "1", "1", "kept", "1", "1", ""],
    ]


def test_print_starts_with_the_settings_and_the_sizes():
    plan = plan_mlp(100, 50, density=0.25, base_density=0.5, pattern="fan_in", seed=3)
    # 700 + 100 + 2 * (10,000 + 100) + 500 + 5; 2 * 7,500 of them dropped.
    assert str(plan).splitlines()[0] == ("rule SmuPar, pattern fan_in, base density 0.5, seed 3; 21,505 parameters, 6,505 kept")


@pytest.mark.parametrize(
    "density",
    [1.0, 0.25, {"blocks.1.*": 0.25, "blocks.3.*": 0.25, "blocks.10.*": 0.5}],
)
def test_print_shows_every_parameter_once(density):
    # 11 blocks, so that numbers have one and two digits.
    plan = smupar.make_plan(on_meta(Blocks, 64, 11), base=on_meta(Blocks, 16, 11), density=density)
    shown = 0
    for name, *_ in printed_cells(plan):
        folded = re.fullmatch(r"(\S+) \((\d+)x\)", name)
        if folded:
            assert int(folded[2]) == sum(layer_glob(row.name) == folded[1] for row in plan) > 1
            shown += int(folded[2])
        else:
            assert name in plan
            shown += 1
    assert shown == len(plan) == 46


def test_print_folds_equal_blocks():
    plan = smupar.make_plan(on_meta(Blocks, 64, 11), base=on_meta(Blocks, 16, 11), density=0.5)
    assert [cells[0] for cells in printed_cells(plan)] == [
        "embed.weight",
        "blocks.*.norm.weight (11x)",
        "blocks.*.norm.bias (11x)",
        "blocks.*.fc.weight (11x)",
        "blocks.*.fc.bias (11x)",
        "head.weight",
    ]


def test_print_names_every_layer_where_one_differs():
    # Folding those that are alike would not say which of them is meant.
    plan = smupar.make_plan(on_meta(Blocks, 64), base=on_meta(Blocks, 16), density={"blocks.1.*": 0.5})
    densities = {cells[0]: cells[3] for cells in printed_cells(plan) if "fc.weight" in cells[0]}
    assert densities == {"blocks.0.fc.weight": "1", "blocks.1.fc.weight": "0.5", "blocks.2.fc.weight": "1"}


def test_print_of_a_tied_weight_has_both_factors():
    def tied(width):
        model = on_meta(Blocks, width)
        model.head.weight = model.embed.weight
        return model

    plan = smupar.make_plan(tied(64), base=tied(16), alpha_input=2.0)
    assert plan["embed.weight"].forward == (("embed", 2.0), ("head", 0.25))
    assert printed_cells(plan)[0][-1] == "embed 2, head 0.25"


def test_print_ends_with_what_is_pending_and_noted():
    with pytest.warns(smupar.PlanWarning):
        plan = attention_plan(density=1 / 16)
    ends = [line.partition(":")[0] for line in str(plan).splitlines()[-3:]]
    assert ends == ["TO DO attention_scale", "TO DO output_factor", "note"]
    plan.settle("output_factor")
    assert "TO DO output_factor" not in str(plan)


# Purity


def test_make_plan_leaves_the_model_untouched():
    torch.manual_seed(0)
    model, base = MLP(64), MLP(16)
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    for pattern in ("random", "neuron"):
        smupar.make_plan(model, base=base, density=0.25, pattern=pattern, alpha_input=2.0)
    smupar.make_plan(model, base=base, masks={"fc1.weight": own_mask(1024)})
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._buffers
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
        assert parameter._version <= 1  # written by its own init and not since


def test_make_plan_does_not_keep_the_given_settings():
    density, init_std = {"fc1.weight": 0.25}, {"*": 0.5}
    plan = plan_mlp(64, 16, density=density, init_std=init_std)
    text = plan.to_json()
    density["fc1.weight"], init_std["*"] = 0.5, 1.0
    assert plan.to_json() == text


# Whole neurons: a narrower dense network


@pytest.mark.parametrize("base_width", [32, 64])
def test_neuron_multipliers_follow_the_live_widths(base_width):
    # Also where the model is as wide as its base and structure alone tells what scales.
    plan = plan_mlp(64, base_width, expand=2, pattern="neuron", density=3 / 8, init_std=SIGMA, alpha_output=ALPHA_OUTPUT)
    narrow = plan_mlp(24, base_width, expand=2, init_std=SIGMA, alpha_output=ALPHA_OUTPUT)
    assert plan["fc1.weight"].width_in == Fraction(24, base_width)
    assert plan["fc1.weight"].density == Fraction(9, 64)
    assert plan["fc1.weight"].density_mult == 1
    assert numbers(plan) == numbers(narrow)
    assert plan.output_factor == narrow.output_factor == ALPHA_OUTPUT * (base_width / 24)
    assert [(row.width_in, row.width_out) for row in plan] == [(row.width_in, row.width_out) for row in narrow]


def test_neuron_with_full_density_is_dense():
    plan = plan_mlp(64, 16, pattern="neuron", density=1.0)
    assert not [row.name for row in plan if row.masked]
    assert numbers(plan) == numbers(plan_mlp(64, 16))


def live_part(tensor, mask):
    """The entries of a masked tensor that are left, in the shape of the narrower one."""
    if mask is None:
        return tensor
    for dim in range(tensor.ndim):
        others = [other for other in range(tensor.ndim) if other != dim]
        tensor = tensor.index_select(dim, mask.any(others).nonzero().flatten() if others else mask.nonzero().flatten())
    return tensor


@pytest.mark.parametrize("activation", [F.gelu, torch.sigmoid])  # sigmoid(0) is not 0: what dead neurons send must not count
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.AdamW, {"lr": 1e-2}), (torch.optim.SGD, {"lr": 1e-1})],
)
def test_neuron_trains_like_the_narrower_dense_network(optimizer, options, activation):
    base = on_meta(MLP, 32, 2)
    wide, narrow = MLP(64, 2, activation).double(), MLP(24, 2, activation).double()
    with torch.no_grad():  # dead biases must be removed as well, also where they start away from 0
        for parameter in wide.parameters():
            parameter.fill_(0.3)
    shared = {"init_std": 0.3, "alpha_input": 2.0, "alpha_output": 0.7}
    wide_plan = smupar.parameterize(wide, base=base, pattern="neuron", density=3 / 8, **shared)
    narrow_plan = smupar.parameterize(narrow, base=base, **shared)
    masks = {row.name: wide_plan.draw_mask(row.name) for row in wide_plan}

    def assert_same():
        for (name, big), small in zip(wide.named_parameters(), narrow.parameters(), strict=True):
            torch.testing.assert_close(live_part(big.detach(), masks[name]), small.detach(), rtol=1e-9, atol=1e-12)
            if masks[name] is not None:
                assert not big.detach()[~masks[name]].any()

    narrow.load_state_dict({name: live_part(p.detach(), masks[name]) for name, p in wide.named_parameters()})
    assert_same()
    optimizers = [
        optimizer(smupar.param_groups(model, plan, weight_decay=0.1, optimizer=optimizer, **options))
        for model, plan in ((wide, wide_plan), (narrow, narrow_plan))
    ]
    data = torch.Generator().manual_seed(0)
    first = narrow.head.weight.detach().clone()
    for _ in range(10):
        x = torch.randn(16, 7, generator=data, dtype=torch.float64)
        y = torch.randint(5, (16,), generator=data)
        losses = []
        for model, one in zip((wide, narrow), optimizers, strict=True):
            one.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            one.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)
        assert_same()
    assert (narrow.head.weight - first).abs().max() > 1e-3  # it did train


def test_base_density_may_be_spread_like_the_density():
    model, base = on_meta(MLP, 256), on_meta(MLP, 64)
    plan = smupar.make_plan(model, base=base, density=smupar.erk(0.25), base_density=smupar.erk(0.25))
    without = smupar.make_plan(model, base=base, rule="mup", density=smupar.erk(0.25))
    assert [row.density_mult for row in plan] == [1] * len(plan)
    assert [row.init_std for row in plan] == [row.init_std for row in without]


def test_positions_beside_a_tied_table_get_its_init():
    class Positions(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(50, width), nn.Embedding(9, width)
            self.inner, self.head = nn.Linear(width, width), nn.Linear(width, 50, bias=False)
            self.head.weight = self.tokens.weight

    plan = smupar.make_plan(on_meta(Positions, 256), base=on_meta(Positions, 64))
    assert plan["tokens.weight"].init_std == plan["positions.weight"].init_std == 0.125


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


@pytest.mark.parametrize("kind", [RawTable, GroupedInput])
def test_alpha_input_that_nothing_applies_is_pending(kind):
    assert "alpha_input = 9" in smupar.make_plan(kind(64), base=kind(16), alpha_input=9.0).pending["input_factor"]
    assert "input_factor" not in smupar.make_plan(kind(64), base=kind(16)).pending
    assert "input_factor" not in smupar.make_plan(kind(64), base=kind(16), rule="sp", alpha_input=9.0).pending


# Refusals

NAN, INF = float("nan"), float("inf")
NARROWS = "narrows the whole network"
REFUSED = [
    ({"density": 0.001, "width": 16, "base_width": 8},
     r"'fc1.weight' of shape \(16, 16\) would lose every weight at density 0.001"),
    *(({"density": density}, r"density must lie in \(0, 1\]") for density in (0, -0.1, 1.1, NAN, True)),
    *(({"base_density": density}, r"base_density must lie in \(0, 1\]") for density in (0, -0.1, 1.1, NAN, True)),
    ({"density": {"head.weight": 0.5}}, r"density: 'head.weight' matches none of the hidden weights"),
    ({"masks": {"fc9.weight": own_mask(5)}}, "'fc9.weight' is no parameter of this model"),
    ({"masks": {"fc1.weight": own_mask(5, size=32)}}, r"shape \(32, 32\), the parameter \(64, 64\)"),
    ({"masks": {"fc1.weight": own_mask(5) * 0.5}}, "values other than 0 and 1"),
    ({"masks": {"fc1.weight": own_mask(0)}}, "keeps no weight at all"),
    ({"masks": {"fc1.weight": own_mask(5), "fc1.weight_mask": own_mask(6)}}, "'fc1.weight' is there twice"),
    ({"masks": {"head.weight": torch.ones(5, 64, dtype=torch.bool)}}, "only hidden weights are made sparse"),
    ({"init_std": {"fc*": 0.1}}, r"init_std says nothing about embed.weight, head.weight; add a last line"),
    ({"init_std": {"fc1.bias": 0.1, "*": 0.1}}, r"init_std: 'fc1.bias' matches none of the weights that get an init"),
    *(({"init_std": std}, "init_std must") for std in (-0.1, NAN, INF, "xavier", True, None, {"*": -1}, {"*": "fan_out"})),
    *(({alpha: value}, f"{alpha} must be a finite number")
      for alpha in ("alpha_input", "alpha_output") for value in (NAN, INF, "1", None)),
    ({"rule": "mu"}, "unknown rule 'mu'"),
    ({"pattern": "magnitude"}, "unknown pattern 'magnitude'"),
    ({"pattern": "neuron", "density": {"fc1.weight": 0.5}}, NARROWS),
    ({"pattern": "neuron", "density": smupar.erk(0.5)}, NARROWS),
    ({"pattern": "neuron", "density": 0.5, "base_density": 0.5}, NARROWS),
    ({"pattern": "neuron", "density": 0.5, "masks": {"fc1.weight": own_mask(1024)}}, NARROWS),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        plan_mlp(**{"width": 64, "base_width": 16, **settings})
