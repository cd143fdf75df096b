"""The optimizers that a run can name, on the built-in GPT."""

import sys
from dataclasses import replace

import pytest
import torch

from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.model.gpt import build
from smupar.lm.run import checkpoint
from smupar.lm.run.distributed import World
from smupar.lm.run.optimizers import make_optimizers, set_lr
from smupar.lm.run.step import next_token_loss
from smupar.model.attached import mask_of
from smupar.plan.facts.optimizers import FAMILIES

NAMES = ("adamw", "adam", "sgd", "muon", "lion", "nadam", "radam", "adamax", "rmsprop", "adagrad")
# Twice the base width at a quarter of the weights: the hidden LR factor of SmuPar is 1 / (2 * 1/4) = 2 for Adam.
TINY = RunConfig(
    model=ModelConfig(width=64, depth=1, biases=True, activation="gelu"),
    base_width=32,
    sparsity=0.75,
    lr=0.01,
    weight_decay=0.1,
)


def _made(**options):
    config = replace(TINY, **options)
    model, plan = build(config)
    return model, plan, make_optimizers(model, plan, config)


def _train(model, optimizers, steps):
    for step in steps:
        tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(step))
        next_token_loss(model, (tokens[:, :-1], tokens[:, 1:])).backward()
        for optim in optimizers:
            optim.step()
            optim.zero_grad()


def _group_of(optimizers, parameter):
    groups = [g for optim in optimizers for g in optim.param_groups if any(parameter is p for p in g["params"])]
    assert len(groups) == 1
    return groups[0]


def _hidden(model):
    return model.blocks[0].attention.out.weight


def test_names_are_all_that_have_a_rule():
    assert set(NAMES) == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_trains_three_steps_and_keeps_masked_weights_at_zero(name):
    model, plan, optimizers = _made(optimizer=name)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _train(model, optimizers, range(3))
    for row in plan:
        parameter, mask = model.get_parameter(row.name), mask_of(model, row.name)
        assert parameter.isfinite().all()
        assert (mask is not None) == (row.role == "hidden")
        if mask is not None:
            assert (parameter[~mask] == 0).all()
            assert (parameter[mask] != before[row.name][mask]).float().mean() > 0.99
        else:
            assert not torch.equal(parameter, before[row.name])


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_hold_every_parameter_once(name):
    model, _, optimizers = _made(optimizer=name)
    held = [id(p) for optim in optimizers for group in optim.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    assert len(optimizers) == (2 if name == "muon" else 1)


@pytest.mark.parametrize("name", NAMES)
def test_learning_rates_are_those_of_the_plan(name):
    model, plan, optimizers = _made(optimizer=name)
    for row in plan:
        family = "adam" if name == "muon" and row.role != "hidden" else FAMILIES[name]
        group = _group_of(optimizers, model.get_parameter(row.name))
        assert group["lr"] == pytest.approx(0.01 * row.lr_factor(family))
    expected = {"adam": 2.0, "sgd": 4.0, "muon": 1.0}[FAMILIES[name]]  # SGD: m_out / (m_in m_rho)
    assert _group_of(optimizers, _hidden(model))["lr"] == pytest.approx(0.01 * expected)


OPTIONS = {
    "betas": ((0.8, 0.7), ("adamw", "adam", "adamax", "nadam", "radam", "lion")),
    "eps": (1e-5, ("adamw", "adam", "adamax", "nadam", "radam", "rmsprop", "adagrad")),
    "momentum": (0.5, ("sgd", "muon")),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option_reaches_every_group(option):
    value, names = OPTIONS[option]
    for name in names:
        _, _, optimizers = _made(optimizer=name, **{option: value})
        assert {group[option] for group in optimizers[0].param_groups} == {value}


def test_epsilon_reaches_the_second_optimizer():
    for options in ({"optimizer": "muon"}, {"optimizer": "sgd", "rest_lr": 0.01}):
        _, _, (_, rest) = _made(eps=1e-5, **options)
        assert {group["eps"] for group in rest.param_groups} == {1e-5}


def test_epsilon_shrinks_with_the_width_where_asked():
    model, _, optimizers = _made(eps=1e-5, eps_scaling="width")
    assert _group_of(optimizers, _hidden(model))["eps"] == pytest.approx(5e-6)
    assert _group_of(optimizers, model.embedding.weight)["eps"] == pytest.approx(5e-6)


@pytest.mark.parametrize(("decay", "hidden"), [("independent", 0.05), ("coupled", 0.1)])
def test_weight_decay_is_divided_by_the_lr_factor_unless_coupled(decay, hidden):
    model, _, optimizers = _made(decay=decay)
    assert _group_of(optimizers, _hidden(model))["weight_decay"] == pytest.approx(hidden)
    assert _group_of(optimizers, model.embedding.weight)["weight_decay"] == pytest.approx(0.1)


def test_one_step_of_adamw_moves_kept_weights_by_their_own_learning_rate():
    model, _, optimizers = _made(weight_decay=0.0, eps=1e-30)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    set_lr(optimizers, 0.5)
    _train(model, optimizers, [0])
    # The first step of Adam is the sign of the gradient times the learning rate: 0.01, halved, times 2 for hidden weights.
    for name, step in (("blocks.0.attention.out.weight", 0.01), ("norm.weight", 0.005), ("blocks.0.mlp.up.bias", 0.005)):
        moved = (model.get_parameter(name) - before[name]).abs()
        assert moved[moved > 0].median().item() == pytest.approx(step, rel=1e-3)


# Muon


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    model, plan, (muon, adamw) = _made(optimizer="muon")
    assert (type(muon).__name__, type(adamw).__name__) == ("Muon", "AdamW")
    hidden = {id(model.get_parameter(row.name)) for row in plan if row.role == "hidden"}
    assert {id(p) for group in muon.param_groups for p in group["params"]} == hidden


def test_rest_lr_is_that_of_the_adamw_beside_muon():
    for rest_lr, expected in ((None, 0.01), (0.003, 0.003), (0.0, 0.0)):
        model, _, (muon, adamw) = _made(optimizer="muon", rest_lr=rest_lr)
        assert _group_of([muon, adamw], model.embedding.weight)["lr"] == pytest.approx(expected)
        assert _group_of([muon, adamw], _hidden(model))["lr"] == pytest.approx(0.01)


# Schedules


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_set_lr_keeps_the_ratios_of_groups_and_forgets_what_came_before(name):
    _, _, optimizers = _made(optimizer=name, rest_lr=0.002)
    peaks = [group["lr"] for optim in optimizers for group in optim.param_groups]
    assert len(set(peaks)) > 1
    for share in (0.25, 0.0, 1.0, 0.1):
        set_lr(optimizers, share)
        rates = [group["lr"] for optim in optimizers for group in optim.param_groups]
        assert rates == pytest.approx([share * peak for peak in peaks])


# Checkpoints


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_goes_on_from_a_checkpoint_with_the_same_bits(name, tmp_path):
    model, _, optimizers = _made(optimizer=name)
    _train(model, optimizers, range(2))
    checkpoint.save(tmp_path, 2, model, optimizers, {}, World(0, 1, torch.device("cpu"), "ddp"))
    _train(model, optimizers, range(2, 4))
    again, _, new_optimizers = _made(optimizer=name)
    checkpoint.load(tmp_path / "step-00000002", again, new_optimizers)
    _train(again, new_optimizers, range(2, 4))
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other)


# Bad input


def test_names_may_be_written_in_capitals():
    _, _, optimizers = _made(optimizer="AdamW")
    assert type(optimizers[0]) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adafactor", "no factor of Table 1 fits it. Use AdamW or SGD"),
        ("shampoo", r"no learning-rate rule is known for optimizer 'shampoo' \(known: .*adamw.*muon.*sgd\)"),
    ],
)
def test_optimizer_without_a_rule_raises_with_the_remedy(name, message):
    with pytest.raises(ValueError, match=message):
        _made(optimizer=name)


def test_lion_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)
    with pytest.raises(ModuleNotFoundError, match="torch has no Lion: pip install lion-pytorch"):
        _made(optimizer="lion")


@pytest.mark.parametrize(("decayed", "roles"), [("all", None), ("matrices", {"embedding", "hidden"}), ("hidden", {"hidden"})])
def test_run_decays_the_roles_it_names(decayed, roles):
    model, plan, (optimizer,) = _made(decayed=decayed)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {plan[names[id(p)]].role for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert found == (roles or {"embedding", "hidden", "vector"})
