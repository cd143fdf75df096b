"""Initial values that a rule keeps: biases of torch's init, vectors that shrink with width, zeros."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import smupar
from smupar.plan.initial_values import _is_uniform
from smupar.plan.plan import Plan
from tests.support.models import on_meta


class Layers(nn.Module):
    """A bias of every kind of layer that torch draws from U(+-1 / sqrt(fan-in))."""

    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv1d(8, width, 3)
        self.conv = nn.Conv1d(width, width, 3)
        self.rnn = nn.LSTM(width, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 64)


# m_in = 4 for all but the stem, which reads 8 channels at every width
FACTORS = {"stem.bias": 1, "conv.bias": 2, "rnn.bias_ih_l0": 2, "rnn.bias_hh_l0": 2, "hidden.bias": 2, "head.bias": 2}


@pytest.mark.parametrize("base_on_meta", [False, True])
def test_biases_of_torch_get_the_size_that_they_have_in_the_base(base_on_meta):
    model = Layers(256)
    own = {name: model.get_parameter(name).detach().clone() for name in FACTORS}
    plan = smupar.parameterize(model, base=on_meta(Layers, 64) if base_on_meta else Layers(64))
    assert {name: plan[name].kept_factor for name in FACTORS} == FACTORS
    for name, factor in FACTORS.items():
        assert torch.equal(model.get_parameter(name), own[name] * factor)
    assert "kept x 2" in str(plan)
    assert Plan.from_json(plan.to_json()).diff(plan) == []


def test_biases_under_sp_and_of_another_init_stay():
    model = Layers(256)
    assert {row.kept_factor for row in smupar.make_plan(model, base=Layers(64), rule="sp")} == {1}
    with torch.no_grad():
        for name in FACTORS:
            model.get_parameter(name).normal_(0, 0.02)
    base = Layers(64)
    with torch.no_grad():
        for name in FACTORS:
            base.get_parameter(name).normal_(0, 0.02)
    for net in (base, on_meta(Layers, 64)):
        plan = smupar.make_plan(model, base=net)
        assert {row.kept_factor for row in plan} == {1}
        assert not any(note.kind == "kept" for note in plan.notes)


def test_sp_with_the_fan_in_of_another_width_is_noted():
    def kinds(width, **settings):
        return {note.kind for note in smupar.make_plan(Layers(width), base=Layers(64), delta=Layers(128), **settings).notes}

    assert "init" in kinds(256, rule="sp")
    assert not any("init" in found for found in (kinds(256), kinds(64, rule="sp"), kinds(256, rule="sp", init_std=0.02)))


def weight_normed(width):
    """As HuBERT's positions: one length for each step of the kernel, over all channels, so it grows with the width."""
    return nn.Sequential(
        nn.Conv1d(8, width, 1), parametrizations.weight_norm(nn.Conv1d(width, width, 4), dim=2), nn.Conv1d(width, 3, 1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_draw_of_torchs_biases_counts_as_torchs(dtype):
    layer = nn.Linear(16, 32, dtype=dtype)
    for seed in range(8_000):
        torch.manual_seed(seed)
        layer.bias.data.uniform_(-1 / 4, 1 / 4)  # as nn.Linear does
        assert _is_uniform(layer.bias.detach().double(), 1 / 4), f"seed {seed}"


def test_lengths_of_weight_norm_stay():
    """The weight is length * direction / |direction|, and the direction has width^2 entries: they keep the std 1 / sqrt(fan-in)
    if the length grows as the root of the width, as it does by itself."""
    torch.manual_seed(0)
    plan = smupar.make_plan(weight_normed(256), base=weight_normed(64), example=torch.randn(2, 8, 6))
    assert plan["1.parametrizations.weight.original0"].kept_factor == 1
    assert plan["1.parametrizations.weight.original1"].role == "hidden"
    assert plan["1.bias"].kept_factor == 2


def test_model_without_values_has_none_to_rescale():
    model = on_meta(Layers, 256).to_empty(device="cpu")
    plan = smupar.parameterize(model, base=on_meta(Layers, 64), reset=True)
    assert {row.kept_factor for row in plan} == {1}


class Rewritten(Layers):
    def __init__(self, width):
        super().__init__(width)
        nn.init.normal_(self.hidden.bias)


def test_plan_on_meta_knows_the_biases_that_torch_draws():
    plan = smupar.make_plan(on_meta(Rewritten, 256), base=on_meta(Rewritten, 64))
    assert {name: plan[name].kept_factor for name in FACTORS} == FACTORS | {"hidden.bias": 1}
    (note,) = (note for note in plan.notes if note.kind == "kept")
    assert "the values of 'hidden.bias' are not loaded here" in str(note)


class Positions(nn.Module):
    """A vector whose init the model scales itself, as CLIP's class token and T5's relative positions."""

    def __init__(self, width, exponent):
        super().__init__()
        self.first, self.hidden, self.head = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * width**exponent)


@pytest.mark.parametrize(("exponent", "factor"), [(0, 1), (-0.5, 2), (-1, 4), (0.5, 0.5)])
def test_vector_that_follows_the_width_gets_the_size_of_the_base(exponent, factor):
    torch.manual_seed(0)
    model, base = Positions(1024, exponent), Positions(256, exponent)
    assert smupar.make_plan(model, base=base)["token"].kept_factor == factor
    assert smupar.make_plan(model, base=on_meta(Positions, 256, exponent))["token"].kept_factor == 1  # nothing to compare with


def test_vector_of_another_size_that_no_width_explains_is_named():
    torch.manual_seed(0)
    model, base = Positions(1024, 0), Positions(256, 0)
    with torch.no_grad():
        model.token.mul_(7.3)
    with pytest.warns(smupar.PlanWarning, match="'token' differ in size from the base's"):
        plan = smupar.make_plan(model, base=base)
    assert plan["token"].kept_factor == 1


class Zeros(nn.Module):
    """As adaLN-zero and DiT: ``gate`` and ``head`` start at zero. ``waiting`` was made and never written."""

    def __init__(self, width):
        super().__init__()
        self.first, self.gate, self.head = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.waiting = nn.Parameter(torch.zeros(width, width))
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.head.weight)


class Decays(nn.Module):
    """A state-space layer's rates of decay: a sequence over heads, whose number grows with the width."""

    def __init__(self, width, values):
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 4)
        self.A_log = nn.Parameter(values(width // 16))


@pytest.mark.parametrize(
    ("values", "is_named"),
    [
        (lambda heads: torch.arange(1.0, heads + 1).log(), True),  # Mamba-2: the largest rate is the number of heads
        (lambda heads: torch.linspace(1, 16, heads).log(), False),  # the same range at every width
    ],
)
def test_sequence_that_grows_with_the_number_of_heads_is_named(values, is_named):
    plan = smupar.make_plan(Decays(256, values), base=Decays(64, values))
    assert ("'A_log' differ in size from the base's" in str(plan)) == is_named


def test_weights_that_start_at_zero_stay_zero():
    model = Zeros(64)
    plan = smupar.parameterize(model, base=Zeros(16), density=0.5)
    assert (plan["gate.weight"].init_std, plan["head.weight"].init_std) == (0, 0)
    assert not model.gate.weight.any()
    assert not model.head.weight.any()
    assert model.waiting.any()
    lines = {line.split()[0]: line.split() for line in str(plan).splitlines() if line.strip()}
    assert "zero" in lines["gate.weight"]
    assert "'gate.weight', 'head.weight': the model sets these weights to zero, and they stay zero" in str(plan)
    assert smupar.audit(model, plan) == []


def test_zeros_are_drawn_if_the_user_names_them():
    model = Zeros(64)
    plan = smupar.parameterize(model, base=Zeros(16), init_std={"gate.*": "fan_in", "*": "fan_in"})
    assert plan["gate.weight"].init_std == pytest.approx(1 / 8)  # 1 / sqrt(16), divided by sqrt(m_in) = 2
    assert model.gate.weight.any()
    assert plan["head.weight"].init_std == 0
