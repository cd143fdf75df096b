"""param_groups: every group's learning rate, decay and epsilon, on real optimizers."""

import copy
import warnings

import lion_pytorch
import pytest
import torch
from torch import nn

import smupar
from tests.support.models import MLP
from tests.support.models import parameterized_mlp as mlp

ADAM_FAMILY = [
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    lion_pytorch.Lion,
]


class FeedForward(nn.Module):
    """d and d_ff grow by different multiples."""

    def __init__(self, d, d_ff):
        super().__init__()
        self.embedding = nn.Embedding(10, d)
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, d_ff)
        self.down = nn.Linear(d_ff, d)
        self.head = nn.Linear(d, 10, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


class ConvNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.conv = nn.Conv2d(width, width, 3)
        self.head = nn.Linear(width, 4)


def by_name(model, groups, key):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group[key] for group in groups for parameter in group["params"]}


def backward(model, factor=1.0):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(32, 8, generator=rng).to(model.fc1.weight.dtype)
    (factor * model(x).sum()).backward()


# Learning rates, decays, epsilons


@pytest.mark.parametrize("optimizer", ADAM_FAMILY)
@pytest.mark.parametrize(("density", "hidden_lr", "hidden_decay"), [(1, 0.00125, 0.8), (1 / 4, 0.005, 0.2)])
def test_adam_family_divides_the_hidden_lr_by_width_and_density(optimizer, density, hidden_lr, hidden_decay):
    model, plan = mlp(density)
    groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, optimizer=optimizer)
    assert by_name(model, groups, "lr") == pytest.approx(
        {
            "fc1.weight": 0.01,
            "fc1.bias": 0.01,
            "fc2.weight": hidden_lr,
            "fc2.bias": 0.01,
            "head.weight": 0.01,
            "head.bias": 0.01,
        }
    )
    decays = by_name(model, groups, "weight_decay")
    assert decays.pop("fc2.weight") == pytest.approx(hidden_decay)
    assert set(decays.values()) == {0.1}


@pytest.mark.parametrize(("density", "hidden_lr", "hidden_decay"), [(1, 0.01, 0.1), (1 / 4, 0.04, 0.025)])
def test_sgd_multiplies_tensors_with_one_scaling_dimension_by_the_width(density, hidden_lr, hidden_decay):
    model, plan = mlp(density)
    groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, optimizer="sgd")
    assert by_name(model, groups, "lr") == pytest.approx(
        {
            "fc1.weight": 0.08,
            "fc1.bias": 0.08,
            "fc2.weight": hidden_lr,
            "fc2.bias": 0.08,
            "head.weight": 0.08,
            "head.bias": 0.01,
        }
    )
    assert by_name(model, groups, "weight_decay") == pytest.approx(
        {
            "fc1.weight": 0.0125,
            "fc1.bias": 0.0125,
            "fc2.weight": hidden_decay,
            "fc2.bias": 0.0125,
            "head.weight": 0.0125,
            "head.bias": 0.1,
        }
    )


def test_each_tensor_uses_its_own_multipliers_where_d_ff_grows_differently():
    model = FeedForward(64, 96)
    plan = smupar.parameterize(model, base=FeedForward(16, 32), density={"up.weight": 1 / 2, "down.weight": 1 / 4})
    adam = by_name(model, smupar.param_groups(model, plan, lr=0.12), "lr")
    sgd = by_name(model, smupar.param_groups(model, plan, lr=0.12, optimizer="sgd"), "lr")
    # m_d = 4, m_ff = 3: up reads d and writes d_ff, down the other way round.
    assert adam == pytest.approx(
        {
            "embedding.weight": 0.12,
            "norm.weight": 0.12,
            "norm.bias": 0.12,
            "up.weight": 0.06,
            "up.bias": 0.12,
            "down.weight": 0.16,
            "down.bias": 0.12,
            "head.weight": 0.12,
        }
    )
    assert sgd == pytest.approx(
        {
            "embedding.weight": 0.48,
            "norm.weight": 0.48,
            "norm.bias": 0.48,
            "up.weight": 0.18,
            "up.bias": 0.36,
            "down.weight": 0.64,
            "down.bias": 0.48,
            "head.weight": 0.48,
        }
    )


@pytest.mark.parametrize(
    ("rule", "adam", "sgd"),
    [("sp", 1, 1), ("mup", 1 / 8, 1), ("smupar", 1 / 2, 4), ("smupar-init-only", 1 / 8, 1), ("smupar-lr-only", 1 / 2, 4)],
)
def test_hidden_lr_factor_of_each_rule_at_a_quarter_of_the_weights(rule, adam, sgd):
    model, plan = mlp(1 / 4, rule=rule)
    for optimizer, factor in (("adamw", adam), ("sgd", sgd)):
        groups = smupar.param_groups(model, plan, lr=0.01, optimizer=optimizer)
        assert by_name(model, groups, "lr")["fc2.weight"] == pytest.approx(0.01 * factor)


def test_smupar_at_base_density_gives_the_groups_of_mup_bit_for_bit():
    model, plan = mlp(1 / 4, base_density=1 / 4)
    other, mup = mlp(rule="mup")
    for optimizer in ("adamw", "sgd"):
        groups = smupar.param_groups(model, plan, lr=0.013, optimizer=optimizer)
        assert by_name(model, groups, "lr") == by_name(
            other, smupar.param_groups(other, mup, lr=0.013, optimizer=optimizer), "lr"
        )


def test_independent_decay_keeps_lr_times_decay_what_was_tuned():
    model, plan = mlp(1 / 4)
    for optimizer in ("adamw", "sgd"):
        groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, optimizer=optimizer)
        assert [group["lr"] * group["weight_decay"] for group in groups] == pytest.approx([0.001] * len(groups))


def test_coupled_decay_is_the_same_everywhere():
    model, plan = mlp(1 / 4)
    groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, decay="coupled")
    assert {group["weight_decay"] for group in groups} == {0.1}
    assert by_name(model, groups, "lr")["fc2.weight"] == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("decay", "lr", "words"),
    [
        (
            "coupled",
            0.2,
            r"shrinks 'hidden, LR x 4.*' by 0\.08 .*the factor 4, times.*within 13 steps\. Pass decay='independent'",
        ),
        ("independent", 0.8, r"by 0\.08 of its size.*within 13 steps\. Pass a lower lr or weight_decay"),
    ],
)
def test_decay_that_forgets_within_20_steps_is_named(decay, lr, words):
    model, plan = mlp(1 / 32)  # 8 times as wide: a factor of 4 on the learning rate
    with pytest.warns(smupar.PlanWarning, match=words):
        smupar.param_groups(model, plan, lr=lr, weight_decay=0.1, decay=decay)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smupar.param_groups(model, plan, lr=lr / 2, weight_decay=0.1, decay=decay)


def test_independent_decay_shrinks_every_weight_alike_in_a_step_without_gradient():
    model, plan = mlp(1 / 4, torch.float64)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), 0.999 * before[name])


def test_constant_eps_leaves_the_optimizers_own():
    model, plan = mlp()
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01), eps=1e-7)
    assert {group["eps"] for group in optimizer.param_groups} == {1e-7}


def test_width_eps_shrinks_with_the_gradients():
    model, plan = mlp(1 / 4)
    groups = smupar.param_groups(model, plan, lr=0.01, eps="width", eps_value=1e-6)
    expected = dict.fromkeys(("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "head.weight"), 1.25e-07)
    assert by_name(model, groups, "eps") == pytest.approx({**expected, "head.bias": 1e-6})
    optimizer = torch.optim.AdamW(groups, eps=1e-3)
    assert [group["eps"] for group in optimizer.param_groups] == [group["eps"] for group in groups]


def test_width_eps_of_sp_is_constant():
    model, plan = mlp(rule="sp")
    assert {group["eps"] for group in smupar.param_groups(model, plan, lr=0.01, eps="width")} == {1e-8}


# Groups


def test_one_group_for_each_distinct_setting():
    model, plan = mlp(1 / 4)
    assert len(smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1)) == 2  # hidden and all others
    assert len(smupar.param_groups(model, plan, lr=0.01, optimizer="sgd")) == 3  # 8 eta, 4 eta, eta
    assert len(smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, no_decay=["*.bias"])) == 3
    sp, sp_plan = mlp(1 / 4, rule="sp")
    assert len(smupar.param_groups(sp, sp_plan, lr=0.01, weight_decay=0.1)) == 1


def test_group_names_tell_role_factor_width_and_density():
    model, plan = mlp(1 / 4)
    names = [group["name"] for group in smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, no_decay="*.bias")]
    assert "hidden, LR x 0.5, width 8, density 0.25" in names
    assert any("embedding" in name and "unembedding" in name and "no decay" not in name for name in names)
    assert any("vector" in name and "no decay" in name for name in names)


def test_group_names_are_distinct_for_layer_wise_densities_decays_and_eps():
    model = FeedForward(64, 96)
    plan = smupar.parameterize(model, base=FeedForward(16, 32), density={"up.weight": 0.5, "down.weight": 0.51})
    for optimizer in ("adamw", "sgd"):
        groups = smupar.param_groups(
            model, plan, lr=0.12, weight_decay=0.1, optimizer=optimizer, eps="width", no_decay=lambda name, _: "bias" in name
        )
        names = [group["name"] for group in groups]
        assert len(set(names)) == len(names) >= 5
        assert all(len(name) < 80 for name in names)


def test_groups_hold_every_parameter_exactly_once():
    model, plan = mlp(1 / 4)
    groups = smupar.param_groups(model, plan, lr=0.01, optimizer="sgd", weight_decay=0.1, no_decay="*.bias")
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())


def test_tensor_lr_is_not_changed_and_every_group_gets_its_own():
    model, plan = mlp(1 / 4)
    lr = torch.tensor(0.01)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=lr, weight_decay=0.1, no_decay="*.bias"))
    rates = [group["lr"] for group in optimizer.param_groups]
    assert all(isinstance(rate, torch.Tensor) for rate in rates)
    assert len({rate.data_ptr() for rate in (lr, *rates)}) == 4
    rates[0].mul_(3)
    assert lr.item() == pytest.approx(0.01)
    assert sorted(rate.item() for rate in rates) == pytest.approx([0.005, 0.01, 0.03])
    backward(model)
    optimizer.step()


def test_lr_zero_with_decay_changes_no_weight():
    for optimizer, kind in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
        model, plan = mlp(1 / 4)
        before = copy.deepcopy(model.state_dict())
        groups = smupar.param_groups(model, plan, lr=0.0, weight_decay=0.1, optimizer=optimizer)
        assert {group["lr"] for group in groups} == {0.0}
        assert all(0 < group["weight_decay"] < 1 for group in groups)
        backward(model)
        kind(groups).step()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_no_decay_by_globs_and_by_function_agree():
    model, plan = mlp(1 / 4)
    expected = {"fc1.weight": 0.1, "fc1.bias": 0.0, "fc2.weight": 0.2, "fc2.bias": 0.0, "head.weight": 0.0, "head.bias": 0.0}
    globs = ["*.bias", "head.weight"]
    for no_decay in (globs, tuple(globs), lambda name, parameter: parameter.ndim < 2 or name.startswith("head")):
        groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, no_decay=no_decay)
        assert by_name(model, groups, "weight_decay") == pytest.approx(expected)
    assert globs == ["*.bias", "head.weight"]


def test_no_decay_keeps_the_learning_rate():
    model, plan = mlp(1 / 4)
    groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, no_decay="fc2.weight")
    assert by_name(model, groups, "lr")["fc2.weight"] == pytest.approx(0.005)


def test_extra_groups_are_appended_as_copies_and_take_their_parameters():
    model, plan = mlp(1 / 4)
    temperature = nn.Parameter(torch.ones(()))
    single = {"params": temperature, "lr": 0.3, "name": "temperature"}
    several = {"params": [model.head.bias, model.head.weight], "lr": 0.07, "weight_decay": 0.5}
    extra = [single, several]
    groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, extra=extra)
    assert extra == [single, several]
    assert single == {"params": temperature, "lr": 0.3, "name": "temperature"}
    assert list(several) == ["params", "lr", "weight_decay"]
    assert len(several["params"]) == 2
    assert [group["lr"] for group in groups[-2:]] == [0.3, 0.07]
    assert groups[-1]["weight_decay"] == 0.5
    ours = by_name(model, groups[:-2], "lr")
    assert set(ours) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    optimizer = torch.optim.AdamW(groups)  # torch adds its defaults to the dicts it gets
    optimizer.param_groups[-1]["params"].clear()
    optimizer.param_groups[-1]["lr"] = 1.0
    assert several["lr"] == 0.07
    assert several["params"][0] is model.head.bias
    assert len(several["params"]) == 2


def test_extra_group_takes_parameters_the_plan_does_not_know():
    model, plan = mlp()
    model.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"the plan has no row for scale.*extra="):
        smupar.param_groups(model, plan, lr=0.01)
    groups = smupar.param_groups(model, plan, lr=0.01, extra=[{"params": [model.scale], "lr": 0.5}])
    assert by_name(model, groups, "lr")["scale"] == 0.5


def test_frozen_parameters_are_left_out():
    model, plan = mlp(1 / 4)
    model.fc2.weight.requires_grad_(False)
    groups = smupar.param_groups(model, plan, lr=0.01)
    assert set(by_name(model, groups, "lr")) == {"fc1.weight", "fc1.bias", "fc2.bias", "head.weight", "head.bias"}


def test_only_hidden_and_only_rest_partition_the_model():
    model, plan = mlp(1 / 4)
    hidden = by_name(model, smupar.param_groups(model, plan, lr=0.01, only="hidden"), "lr")
    rest = by_name(model, smupar.param_groups(model, plan, lr=0.01, only="rest"), "lr")
    assert hidden == pytest.approx({"fc2.weight": 0.005})
    assert set(rest) == {"fc1.weight", "fc1.bias", "fc2.bias", "head.weight", "head.bias"}
    assert set(rest.values()) == {0.01}


# Which optimizer


def test_optimizer_class_and_name_give_the_same_groups():
    model, plan = mlp(1 / 4)
    for name, kind in (("sgd", torch.optim.SGD), ("Adam", torch.optim.Adam), ("lion", lion_pytorch.Lion)):
        by_string = smupar.param_groups(model, plan, lr=0.01, optimizer=name)
        by_class = smupar.param_groups(model, plan, lr=0.01, optimizer=kind)
        assert by_name(model, by_string, "lr") == by_name(model, by_class, "lr")


def test_muon_uses_the_base_lr_at_every_width_and_density():
    model, plan = mlp(1 / 4)
    groups = smupar.param_groups(model, plan, lr=0.02, weight_decay=0.1, optimizer=torch.optim.Muon, only="hidden")
    assert by_name(model, groups, "lr") == {"fc2.weight": 0.02}
    assert by_name(model, groups, "weight_decay") == {"fc2.weight": 0.1}
    optimizer = torch.optim.Muon(groups)
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_muon_without_only_hidden_raises_with_the_two_calls_to_make():
    model, plan = mlp()
    for only in (None, "rest"):
        with pytest.raises(ValueError, match=r"optimizer='muon', only='hidden'.*only='rest'"):
            smupar.param_groups(model, plan, lr=0.02, optimizer="muon", only=only)


def test_muon_refuses_convolutions():
    model = ConvNet(32)
    plan = smupar.parameterize(model, base=ConvNet(8))
    with pytest.raises(ValueError, match=r"'conv\.weight' has shape \(32, 32, 3, 3\).*AdamW or SGD"):
        smupar.param_groups(model, plan, lr=0.02, optimizer="muon", only="hidden")
    adam = by_name(model, smupar.param_groups(model, plan, lr=0.02), "lr")
    assert adam["conv.weight"] == pytest.approx(0.005)


# The first step of the real optimizers, on float64, from the gradient that the optimizer saw


def first_step(kind, density, lr=0.01, **options):
    """{name: (change, gradient, planned LR)} of one step without decay."""
    model, plan = mlp(density, torch.float64)
    groups = smupar.param_groups(model, plan, lr=lr, optimizer=kind)
    rates = by_name(model, groups, "lr")
    optimizer = kind(groups, weight_decay=0.0, **options)
    backward(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    return {
        name: (parameter.detach() - before[name], parameter.grad, rates[name]) for name, parameter in model.named_parameters()
    }


# NAdam looks one momentum step ahead: beta_1 (1 - 0.96^(t psi) / 2) at t = 1 and 2.
MU_1, MU_2 = (0.9 * (1 - 0.5 * 0.96 ** (step * 0.004)) for step in (1, 2))


@pytest.mark.parametrize("density", [1, 1 / 4])
@pytest.mark.parametrize(
    ("kind", "options", "size"),
    [
        (torch.optim.Adam, {"eps": 1e-20}, 1.0),
        (torch.optim.AdamW, {"eps": 1e-20}, 1.0),
        (torch.optim.Adamax, {"eps": 1e-20}, 1.0),
        (torch.optim.Adagrad, {"eps": 1e-20}, 1.0),
        (torch.optim.RMSprop, {"eps": 1e-20}, 10.0),  # no bias correction: 1 / sqrt(1 - 0.99)
        (torch.optim.NAdam, {"eps": 1e-20}, 1 + 0.1 * MU_2 / (1 - MU_1 * MU_2)),
        (lion_pytorch.Lion, {}, 1.0),
    ],
)
def test_first_step_of_the_adam_family_moves_each_kept_weight_by_its_planned_lr(kind, options, size, density):
    changes = first_step(kind, density, **options)
    for change, gradient, rate in changes.values():
        torch.testing.assert_close(change, -size * rate * gradient.sign())
    # Not an empty statement: the hidden step is 0.01 / (8 density), and only kept weights have a gradient.
    change, gradient, _ = changes["fc2.weight"]
    assert change.abs().max().item() == pytest.approx(size * 0.00125 / density)
    assert int(torch.count_nonzero(gradient)) == 4096 * density


@pytest.mark.parametrize("density", [1, 1 / 4])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RAdam])
def test_first_step_proportional_to_the_gradient_moves_by_the_planned_lr_times_it(kind, density):
    # RAdam takes its first steps without the second moment.
    for change, gradient, rate in first_step(kind, density).values():
        assert gradient.any()
        torch.testing.assert_close(change, -rate * gradient)


def test_first_step_of_muon_on_the_hidden_weights_has_the_size_of_its_lr():
    model, plan = mlp(1 / 4)
    optimizer = torch.optim.Muon(smupar.param_groups(model, plan, lr=0.02, optimizer="muon", only="hidden"), weight_decay=0.0)
    smupar.attach(model, plan, optimizer)
    before = model.fc2.weight.detach().clone()
    backward(model)
    optimizer.step()
    change = model.fc2.weight.detach() - before
    # An orthogonal update of 64 x 64 has a norm of lr sqrt(64) = 0.16; the mask then takes part of it away.
    assert 0.01 < change.norm().item() < 0.16
    assert not change[~model.fc2.weight_mask].any()


def test_lr_factors_survive_a_round_trip_of_the_optimizers_state():
    model, plan = mlp(1 / 4)
    first = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    backward(model)
    first.step()
    second = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.5))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert [group["lr"] for group in second.param_groups] == [group["lr"] for group in first.param_groups]
    assert [group["name"] for group in second.param_groups] == [group["name"] for group in first.param_groups]
    assert smupar.audit(model, plan, second, lr=0.01) == []


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_decay_that_is_part_of_a_gradient_which_shrinks_with_width_is_warned_of(kind):
    model, plan = mlp(1 / 4)
    with pytest.warns(smupar.PlanWarning, match=f"{kind} adds weight decay to the gradient.*Use AdamW"):
        smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, optimizer=kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoupled = torch.optim.NAdam(model.parameters(), decoupled_weight_decay=True)
        smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, optimizer=decoupled)
        smupar.param_groups(model, plan, lr=0.01, optimizer=kind)
        smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, optimizer="adamw")
        smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, optimizer="sgd")
        same = MLP(8)
        same_plan = smupar.parameterize(same, base=MLP(8), delta=MLP(16))
        smupar.param_groups(same, same_plan, lr=0.01, weight_decay=0.1, optimizer=kind)


def test_weights_that_were_tied_and_are_not_any_more_are_to_be_tied_again():
    def make(width):
        model = nn.ModuleDict(
            {"embedding": nn.Embedding(8, width), "mix": nn.Linear(width, width), "head": nn.Linear(width, 8)}
        )
        model["head"].weight = model["embedding"].weight
        return model

    model = make(32)
    plan = smupar.parameterize(model, base=make(8))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    if model["head"].weight is model["embedding"].weight:  # as some versions of torch keep it
        model["head"].weight = nn.Parameter(model["head"].weight.detach().clone())
    with pytest.raises(
        ValueError, match=r"'head\.weight' was tied to another parameter when the plan was made, but no longer is"
    ):
        smupar.param_groups(model, plan, lr=0.01)


# Refusals


def feed_forward_plan():
    return smupar.parameterize(FeedForward(64, 96), base=FeedForward(16, 32))


def wider_plan():
    return smupar.parameterize(MLP(128), base=MLP(8), density=1 / 4)


REMEDY = r"(?i)(lamb|lbfgs).*optimizer='adamw'.*'sgd'"
ADAFACTOR = r"Adafactor.*AdamW or SGD.*measured updates"
REFUSED = [
    ({"weight_decay": 0.1, "no_decay": ["*.bias", "*.gamma"]}, r"no_decay: '\*\.gamma' matches none .*fc1\.weight"),
    ({"decay": "decoupled"}, r"decay must be one of 'independent', 'coupled', got 'decoupled'"),
    ({"eps": "scaled"}, r"eps must be one of 'constant', 'width'"),
    ({"lr": "1e-3"}, "lr must be a finite number, got '1e-3'"),
    ({"only": "vectors"}, r"only must be one of None, 'hidden', 'rest'"),
    ({"plan": feed_forward_plan}, "the plan belongs to another model"),
    ({"plan": wider_plan}, "another"),
    ({"optimizer": "adafactor"}, ADAFACTOR),
    ({"optimizer": torch.optim.Adafactor}, ADAFACTOR),
    ({"optimizer": "lamb"}, REMEDY),
    ({"optimizer": torch.optim.LBFGS}, REMEDY),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_groups_that_make_no_sense_are_refused(settings, message):
    model, plan = mlp()
    plan = settings["plan"]() if "plan" in settings else plan
    with pytest.raises(ValueError, match=message):
        smupar.param_groups(model, **{"lr": 0.01, **settings, "plan": plan})
