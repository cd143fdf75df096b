"""make_plan: the identities of Table 1, init, warnings, and what is refused."""

import math
import warnings
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import smupar
from smupar.plan.settings import DEFAULTS, Settings
from tests.plan.nets import ALPHA_INPUT, ALPHA_OUTPUT, HIDDEN, MLP, SIGMA, Blocks, Conv, numbers, own_mask, plan_mlp
from tests.support.models import on_meta


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


@pytest.mark.parametrize(("pattern", "density"), [("2:4", 0.5), ("2:4-transposable", 0.5), ("1:4", 0.25), ("block-16", 0.1)])
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
    # As mup computes it, for hidden width 64 against 8, lr .01, decay .1: hidden (.00125, .8), SGD input weight (.08, .0125).
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


@pytest.mark.parametrize("call", [smupar.make_plan, smupar.parameterize])
def test_warning_points_at_the_caller(call):
    with pytest.warns(smupar.PlanWarning) as seen:
        call(MLP(64), base=on_meta(MLP, 16), density=1 / 32)
    assert seen[0].filename == __file__


def test_sp_notes_that_it_has_no_alphas():
    plan = plan_mlp(64, 16, rule="sp", alpha_input=ALPHA_INPUT, init_std=0.08)
    assert [str(note) for note in plan.notes] == ["SP does not use alpha_input and alpha_output"]
    assert plan["embed.weight"].forward == (("embed", 1.0),)
    assert plan.output_factor == 1.0


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


NAN, INF = float("nan"), float("inf")


NARROWS = "narrows the whole network"


REFUSED = [
    ({"density": 0.001, "width": 16, "base_width": 8},
     r"'fc1.weight' of shape \(16, 16\) would lose every weight at density 0.001"),
    *(({"density": density}, r"density must lie in \(0, 1\]") for density in (0, -0.1, 1.1, NAN, True)),
    *(({"base_density": density}, r"base_density must lie in \(0, 1\]") for density in (0, -0.1, 1.1, NAN, True)),
    ({"density": {"head.weight": 0.5}}, r"density: 'head.weight' matches none of the hidden weights"),
    ({"masks": {"fc9.weight": own_mask(5)}}, "'fc9.weight' is not a parameter of this model"),
    ({"masks": {"fc1.weight": own_mask(5, size=32)}}, r"shape \(32, 32\), the parameter \(64, 64\)"),
    ({"masks": {"fc1.weight": own_mask(5) * 0.5}}, "values other than 0 and 1"),
    ({"masks": {"fc1.weight": own_mask(0)}}, "keeps no weight at all"),
    ({"masks": {"fc1.weight": own_mask(5), "fc1.weight_mask": own_mask(6)}}, "'fc1.weight' is given twice"),
    ({"masks": {"head.weight": torch.ones(5, 64, dtype=torch.bool)}}, "only hidden weights and routers may be sparse"),
    ({"init_std": {"fc*": 0.1}}, r"init_std does not cover embed.weight, head.weight; add a last line"),
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


@pytest.mark.parametrize("base_density", [1.0, 0.5])
def test_aligned_rule_uses_the_weights_per_neuron_of_the_proxy(base_density):
    """fc1 reads 64 inputs in the base, fc2 three times as many; in the model 4 times as many, of which some are kept."""
    density, kappa = 0.125, 20.0
    shared = {"density": density, "base_density": base_density, "expand": 3}
    plan = plan_mlp(256, 64, rule="smupar-aligned", kappa=kappa, **shared)
    other = plan_mlp(256, 64, rule="smupar", **shared)
    m = 4 * density / base_density
    for name, fan_in in (("fc1.weight", 64), ("fc2.weight", 192)):
        n0 = fan_in * base_density
        expected = math.sqrt((n0 + kappa) / (n0 + kappa / m)) / m
        assert plan[name].lr_factor("adam") == pytest.approx(expected)
        assert plan[name].lr_factor("adam") * plan[name].decay_factor("adam") == pytest.approx(1)
        assert plan[name].lr_factor("sgd") == other[name].lr_factor("sgd")
        assert plan[name].init_std == other[name].init_std
    for name in ("embed.weight", "fc1.bias", "head.weight"):
        assert plan[name] == other[name]
    agrees = plan_mlp(256, 64, rule="smupar-aligned", kappa=0.0, **shared)
    assert numbers(agrees) == numbers(other)


def test_kappa_is_asked_for_by_the_rule_that_has_one():
    with pytest.raises(ValueError, match="rule 'smupar-aligned' needs kappa: observe a run of the proxy"):
        plan_mlp(64, 16, rule="smupar-aligned")
    with pytest.raises(ValueError, match="rule 'smupar' has no kappa: leave kappa=3 out"):
        plan_mlp(64, 16, kappa=3)
    with pytest.raises(ValueError, match="kappa must be a number, at least 0"):
        plan_mlp(64, 16, rule="smupar-aligned", kappa=-1)


def test_every_setting_has_a_default_that_changes_nothing_when_given():
    assert DEFAULTS.keys() == Settings.__annotations__.keys()
    model, base = on_meta(MLP, 64), on_meta(MLP, 16)
    plan = smupar.make_plan(model, base=base)
    assert smupar.make_plan(model, base=base, **DEFAULTS) == plan
    assert (plan.rule, plan.pattern, plan.base_density, plan.seed) == ("smupar", "random", 1, 0)
