"""Side by side with microsoft's ``mup`` 1.0.0 at density 1: learning rates, weight decays, init variances, and training.

Both packages get the same network under the same parameter names; mup's copy has its MuReadout as the last layer.
"""

import copy

import mup
import mup.init
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar


class MLP(nn.Module):
    def __init__(self, width, readout=nn.Linear):
        super().__init__()
        self.inputs = nn.Linear(8, width)
        self.hidden = nn.Linear(width, width)
        self.readout = readout(width, 4)

    def forward(self, x):
        return self.readout(F.relu(self.hidden(F.relu(self.inputs(x)))))


class LM(nn.Module):
    """One transformer block with 1 / d_head attention, head 8; d_ff grows faster than the width."""

    def __init__(self, width, readout=nn.Linear):
        super().__init__()
        d_ff = width * width // 8
        self.embed = nn.Embedding(40, width)
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, d_ff)
        self.down = nn.Linear(d_ff, width)
        self.norm_3 = nn.LayerNorm(width)
        self.readout = readout(width, 40, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / 8)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return self.readout(self.norm_3(x))


MODELS = {"mlp": (MLP, 64, 8), "mlp, fractional": (MLP, 20, 8), "lm": (LM, 64, 16), "lm, fractional": (LM, 40, 16)}
each_model = pytest.mark.parametrize(("build", "width", "base_width"), MODELS.values(), ids=MODELS.keys())
INPUTS = {MLP: torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(6, 8), LM: torch.arange(24).reshape(2, 12)}


def muped(build, width, base_width):
    """mup's copy; ``set_base_shapes`` also rescales the readout and all biases."""
    return mup.set_base_shapes(build(width, mup.MuReadout), build(base_width, mup.MuReadout))


def settings_by_name(model, groups):
    """The learning rate and weight decay of each parameter, by name."""
    found = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


def ours(build, width, base_width, optimizer, *, rule="mup"):
    model = build(width)
    plan = smupar.parameterize(model, base=build(base_width), rule=rule)
    groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, optimizer=optimizer)
    return settings_by_name(model, groups)


def theirs(build, width, base_width, optimizer):
    model = muped(build, width, base_width)
    return settings_by_name(model, optimizer(model.parameters(), lr=0.01, weight_decay=0.1).param_groups)


def approximately(settings):
    return {name: pytest.approx(values, rel=1e-12) for name, values in settings.items()}


@each_model
@pytest.mark.parametrize(
    ("optimizer", "their_optimizer"),
    [("adam", mup.MuAdam), ("adamw", mup.MuAdamW), ("sgd", mup.MuSGD)],
    ids=["adam", "adamw", "sgd"],
)
@pytest.mark.parametrize("rule", ["mup", "smupar"])  # at density 1 they are the same rule
def test_learning_rates_and_decays_equal_mups(build, width, base_width, optimizer, their_optimizer, rule):
    expected = theirs(build, width, base_width, their_optimizer)
    assert ours(build, width, base_width, optimizer, rule=rule) == approximately(expected)


ADAM_MLP = {
    "inputs.weight": (0.01, 0.1),
    "inputs.bias": (0.01, 0.1),
    "hidden.weight": (0.00125, 0.8),
    "hidden.bias": (0.01, 0.1),
    "readout.weight": (0.01, 0.1),
    "readout.bias": (0.01, 0.1),
}
SGD_MLP = {
    "inputs.weight": (0.08, 0.0125),
    "inputs.bias": (0.08, 0.0125),
    "hidden.weight": (0.01, 0.1),
    "hidden.bias": (0.08, 0.0125),
    "readout.weight": (0.08, 0.0125),
    "readout.bias": (0.01, 0.1),
}


@pytest.mark.parametrize(
    ("optimizer", "their_optimizer", "expected"),
    [("adamw", mup.MuAdamW, ADAM_MLP), ("sgd", mup.MuSGD, SGD_MLP)],
    ids=["adamw", "sgd"],
)
def test_mlp_8_64_64_4_over_base_8_has_the_known_numbers(optimizer, their_optimizer, expected):
    # Literals, so that a mistake shared by both packages, or by this file's helpers, would show.
    assert ours(MLP, 64, 8, optimizer) == approximately(expected)
    assert theirs(MLP, 64, 8, their_optimizer) == approximately(expected)


def test_lm_16_to_64_has_the_known_numbers():
    # Widths times 4, d_ff 32 -> 512 times 16: Adam divides by the fan-in's, SGD multiplies by fan-out over fan-in.
    adam, sgd = ours(LM, 64, 16, "adamw"), ours(LM, 64, 16, "sgd")
    hidden = {name: (adam[name], sgd[name]) for name in ("qkv.weight", "out.weight", "up.weight", "down.weight")}
    assert hidden == {
        "qkv.weight": (pytest.approx((0.0025, 0.4), rel=1e-12), pytest.approx((0.01, 0.1), rel=1e-12)),
        "out.weight": (pytest.approx((0.0025, 0.4), rel=1e-12), pytest.approx((0.01, 0.1), rel=1e-12)),
        "up.weight": (pytest.approx((0.0025, 0.4), rel=1e-12), pytest.approx((0.04, 0.025), rel=1e-12)),
        "down.weight": (pytest.approx((0.000625, 1.6), rel=1e-12), pytest.approx((0.0025, 0.4), rel=1e-12)),
    }
    rest = adam.keys() - hidden.keys()
    assert {name: adam[name] for name in rest} == approximately(dict.fromkeys(rest, (0.01, 0.1)))
    assert {name: sgd[name] for name in rest - {"up.bias"}} == approximately(dict.fromkeys(rest - {"up.bias"}, (0.04, 0.025)))
    assert sgd["up.bias"] == pytest.approx((0.16, 0.00625), rel=1e-12)


# Init


def their_std(parameter, std):
    """The std that ``mup.init.normal_`` draws with: the same numbers once through it and once with std 1."""
    torch.manual_seed(0)
    mup.init.normal_(parameter, std=std)
    torch.manual_seed(0)
    unit = torch.empty_like(parameter).normal_()
    drawn = parameter.detach()
    return float((drawn * unit).sum() / (unit * unit).sum())


@each_model
def test_init_variances_equal_mups_normal(build, width, base_width):
    # Comparable: every matrix, the readout's included, when mup.init.normal_ draws it with one std for the whole model:
    # that is what init_std as a float means here. Not comparable: vectors. Ours keep the model's own init.
    std = 0.3
    model = muped(build, width, base_width).double()
    plan = smupar.make_plan(build(width), base=build(base_width), rule="mup", init_std=std)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    assert {row.name for row in plan if row.init_std is not None} == matrices.keys()
    expected = {name: pytest.approx(their_std(parameter, std), rel=1e-12) for name, parameter in matrices.items()}
    assert {name: plan[name].init_std for name in matrices} == expected


def test_init_stds_of_the_mlp_are_the_known_numbers():
    plan = smupar.make_plan(MLP(64), base=MLP(8), rule="mup", init_std=0.3)
    expected = {"inputs.weight": 0.3, "hidden.weight": 0.3 / 8**0.5, "readout.weight": 0.3}
    assert {name: plan[name].init_std for name in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("width", [8, 20, 64])
def test_default_readout_variance_is_constant_in_width_as_mureadouts(width):
    # By default MuReadout takes torch's uniform init of variance 1 / (3 fan-in) and multiplies it by the width multiplier:
    # 1 / (3 base fan-in) at every width. Ours is 1 / (base fan-in). So widths compare, the constant 3 does not: it is
    # torch's choice of a bound, and both are a base std that the user tunes. MuReadout also rescales its bias; ours keeps it.
    torch.manual_seed(0)
    plain = nn.Linear(width, 4, dtype=torch.float64)
    torch.manual_seed(0)
    readout = nn.Sequential(mup.MuReadout(width, 4, dtype=torch.float64))
    mup.set_base_shapes(readout, nn.Sequential(mup.MuReadout(8, 4)))
    torch.testing.assert_close(readout[0].weight.detach(), plain.weight.detach() * (width / 8) ** 0.5)
    variance_of_torch = 1 / (3 * width)
    their_variance = variance_of_torch * width / 8
    plan = smupar.make_plan(MLP(width), base=MLP(8), rule="mup")
    assert their_variance == pytest.approx(1 / 24, rel=1e-12)
    assert plan["readout.weight"].init_std ** 2 == pytest.approx(1 / 8, rel=1e-12)


# Training


@each_model
@pytest.mark.parametrize(
    ("optimizer", "their_optimizer"),
    [(torch.optim.Adam, mup.MuAdam), (torch.optim.AdamW, mup.MuAdamW), (torch.optim.SGD, mup.MuSGD)],
    ids=["adam", "adamw", "sgd"],
)
def test_three_steps_from_the_same_weights_end_in_the_same_weights(build, width, base_width, optimizer, their_optimizer):
    # Groups may agree and training still differ, by the readout's factor for one; so both train.
    # That factor is kept in float32, which holds 1/8 and 1/4 exactly and 0.4 to 8 digits.
    tight = width % base_width == 0
    close = {"rtol": 1e-9, "atol": 1e-12} if tight else {"rtol": 1e-5, "atol": 1e-8}
    settings, inputs = {"lr": 0.01, "weight_decay": 0.1}, INPUTS[build]
    model = build(width).double()
    plan = smupar.parameterize(model, base=build(base_width), rule="smupar")
    other = muped(build, width, base_width).double()
    other.load_state_dict(model.state_dict())
    start = copy.deepcopy(model.state_dict())
    torch.testing.assert_close(model(inputs), other(inputs), **close)
    groups = smupar.param_groups(model, plan, optimizer=optimizer, **settings)
    pairs = [(model, optimizer(groups)), (other, their_optimizer(other.parameters(), **settings))]
    for _ in range(3):
        for network, optim in pairs:
            optim.zero_grad()
            (network(inputs) ** 2).mean().backward()
            optim.step()
    for name, trained in model.state_dict().items():
        torch.testing.assert_close(trained, other.state_dict()[name], **close, msg=lambda m, n=name: f"{n}: {m}")
    assert not torch.equal(model.state_dict()["readout.weight"], start["readout.weight"])
