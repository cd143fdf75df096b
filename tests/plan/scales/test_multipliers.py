"""Numbers that follow the width but are not sizes."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import smupar
from smupar.plan.plan import Plan
from smupar.plan.scales.multipliers import find_multipliers
from tests.support.models import MLP, TokenNet, on_meta, sequential


class Scaled(nn.Module):
    """``forward`` of subclasses multiplies by something of the width."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.embedding, self.hidden, self.head = nn.Embedding(9, width), nn.Linear(width, width), nn.Linear(width, 9)

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.embedding(tokens) * self.factor())))


class Attribute(Scaled):
    """As Bart: a number."""

    def __init__(self, width):
        super().__init__(width)
        self.embed_scale = math.sqrt(width)

    def factor(self):
        return self.embed_scale


class Buffer(Scaled):
    """As Gemma: a buffer that is not saved."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("embed_scale", torch.tensor(width**0.5), persistent=False)

    def factor(self):
        return self.embed_scale


@dataclass
class Config:
    width: int
    multiplier: float


class Configured(Scaled):
    """As Granite: a field of a config, which the model reads in the forward pass."""

    def __init__(self, width):
        super().__init__(width)
        self.config = Config(width, width / 64)

    def factor(self):
        return self.config.multiplier


class Rooted(Scaled):
    """As T5: a whole number that only the forward pass shows to be more than a size."""

    def __init__(self, width):
        super().__init__(width)
        self.model_dim = width

    def factor(self):
        return self.model_dim**-0.5


class AlsoASize(Rooted):
    def forward(self, tokens):
        return super().forward(tokens.view(-1)).view(*tokens.shape, -1)[..., : self.model_dim]


CASES = {
    Attribute: ("embed_scale", 16, 8),
    Buffer: ("embed_scale", 16, 8),
    Configured: ("config.multiplier", 4, 1),
    Rooted: ("model_dim", 256, 64),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("base_on_meta", [False, True])
def test_number_that_follows_the_width_is_found_asked_for_and_set(kind, base_on_meta):
    base = on_meta(kind, 64) if base_on_meta else kind(64)
    name, value, base_value = CASES[kind]
    (found,) = find_multipliers(kind(256), base)
    assert (found.where, found.value, found.base_value, found.can_be_set) == (name, value, base_value, True)
    asked = smupar.make_plan(kind(256), base=base)
    assert f"{name} = {value} (base: {base_value})" in asked.pending["multipliers"]
    assert "multipliers='base'" in asked.pending["multipliers"]

    model = kind(256)
    plan = smupar.parameterize(model, base=base, multipliers="base")
    assert plan.pending == {}
    assert model.factor() == kind(64).factor()
    assert f"{name} {value} -> {base_value}" in str(plan)
    fresh = kind(256)
    smupar.attach(fresh, Plan.from_json(plan.to_json()))
    assert fresh.factor() == kind(64).factor()


@pytest.mark.parametrize("kind", CASES)
def test_number_stays_if_the_user_or_the_rule_wants_it(kind):
    for settings in ({"multipliers": "own"}, {"rule": "sp"}):
        model = kind(256)
        assert smupar.parameterize(model, base=kind(64), **settings).pending == {}
        assert model.factor() == kind(256).factor()
    plan = smupar.make_plan(kind(256), base=kind(64))
    plan.settle("multipliers")
    assert plan.pending == {}


def test_size_that_is_also_a_factor_is_left_to_the_user():
    model = AlsoASize(256)
    plan = smupar.parameterize(model, base=AlsoASize(64), multipliers="base")
    assert model.model_dim == 256
    assert "model_dim: by hand, since the model also uses the number as a size" in plan.pending["multipliers"]


def test_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="multipliers must be one of ask, base, own, got 'both'"):
        smupar.make_plan(Attribute(64), base=Attribute(32), multipliers="both")


class Sizes(nn.Module):
    """Many numbers that follow the width and are mere sizes, and numbers that do not follow it."""

    def __init__(self, width):
        super().__init__()
        self.width, self.num_heads, self.inner = width, width // 16, 4 * width
        self.head_dim, self.scaling, self.eps, self.dropout = 16, 16**-0.5, 1e-5, 0.1
        self.config = Config(width, 3.0)
        self.q_proj, self.out, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)
        self.register_buffer("table", torch.arange(width) / width, persistent=False)

    def forward(self, x):
        steps = torch.arange(0, self.width, 2.0)
        x = x + torch.cat([torch.sin(steps / self.width), torch.cos(torch.arange(0, self.width, 2) / self.width)])
        x = self.q_proj(x).view(*x.shape[:-1], self.num_heads, self.width // self.num_heads)
        return self.out(self.norm(x.flatten(-2)) / math.sqrt(self.width // self.num_heads)) * self.scaling


@pytest.mark.parametrize(
    "make", [Sizes, MLP, TokenNet, sequential, lambda w: nn.LSTM(8, w), lambda w: nn.TransformerEncoderLayer(w, w // 16)]
)
def test_sizes_are_not_reported(make):
    assert find_multipliers(make(128), make(64)) == []


class SizedByFactor(nn.Module):
    """As MobileNet: a field of the config multiplies all sizes, and the forward pass does not read it."""

    def __init__(self, width):
        super().__init__()
        self.config = Config(width, width / 64)
        self.layers = nn.Sequential(
            nn.Linear(8, int(64 * self.config.multiplier)), nn.Linear(int(64 * self.config.multiplier), 5)
        )

    def forward(self, x):
        return self.layers(x)


class SinesAtStart(nn.Module):
    """As Qwen3-ASR: a method that only the init calls divides by a size."""

    def __init__(self, width):
        super().__init__()
        self.channels = width
        self.table, self.layer = nn.Buffer(self.sines(), persistent=False), nn.Linear(width, width)

    def sines(self):
        step = torch.tensor(10000.0).log() / (self.channels // 2 - 1)
        times = torch.arange(8)[:, None] * torch.exp(-step * torch.arange(self.channels // 2))
        return torch.cat([times.sin(), times.cos()], 1)

    def forward(self, x):
        return self.layer(x + self.table[: x.shape[1]])


class ReadByFunction(SizedByFactor):
    def forward(self, x):
        return _multiplied(super().forward(x), self.config)


def _multiplied(x, config):
    return x * config.multiplier


@pytest.mark.parametrize(("make", "found"), [(SizedByFactor, 0), (SinesAtStart, 0), (ReadByFunction, 1)])
def test_numbers_that_only_the_init_reads_are_not_reported(make, found):
    assert len(find_multipliers(make(128), make(64))) == found


class ScaledHeads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head_dim, self.scale, self.q_proj = width // 4, (width // 4) ** -0.5, nn.Linear(width, width)


def test_scale_of_attention_is_left_to_its_own_reminder():
    assert find_multipliers(ScaledHeads(128), ScaledHeads(64)) == []
