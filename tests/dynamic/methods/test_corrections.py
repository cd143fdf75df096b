"""The learning rate of GMP: the density of the moment, or of the end, by Table 1."""

from fractions import Fraction

import pytest
import torch

import smupar
from smupar.dynamic.policies import density_factor
from smupar.optim.layer_rates import group_of_weight, layer_rates
from tests.dynamic.moving import SIZES, counts, hidden_of, make, moving, optimize, ready, train
from tests.support.loops import adamw, assert_same_tensors, optimizers_of, used_lrs


def make_sign(model, plan, lr=0.01):
    """Adam without memory: a step is exactly the learning rate, times the sign of the gradient."""
    return torch.optim.Adam(smupar.param_groups(model, plan, lr=lr, optimizer="adam"), betas=(0.0, 0.0), eps=1e-30)


def test_gmp_starts_from_the_init_of_the_dense_plan():
    model, plan = make(1.0)
    before = hidden_of(model)
    smupar.GMP(model, plan, adamw(model, plan), density=0.25, every=2, stop=8)
    assert_same_tensors(hidden_of(model), before)
    assert counts(model) == SIZES


def test_gmp_moves_weights_by_the_learning_rate_of_the_density_of_the_moment():
    model, optimizer, gmp = moving(
        "GMP", plan_settings={"dtype": torch.float64}, optimizer=make_sign, density=0.25, every=2, stop=6
    )
    densities, used = [], used_lrs(optimizer)
    for step in range(8):
        density = gmp.densities["up.weight"]
        before = hidden_of(model)
        optimize(model, optimizer, step)
        for name in SIZES:
            parameter, group = model.get_parameter(name), group_of_weight(optimizer)[name]
            sizes = (parameter.detach() - before[name])[parameter.grad != 0].abs()
            # Table 1: eta / (m_in m_rho), at twice the base width.
            torch.testing.assert_close(sizes, torch.full_like(sizes, 0.01 / 2 / gmp.densities[name]), rtol=1e-9, atol=1e-15)
            assert used[name] == pytest.approx(0.01 / 2 / gmp.densities[name])
            assert group["lr"] == pytest.approx(0.01 / 2)
        gmp.step()
        densities.append(density)
    assert (densities[0], densities[-1], len(set(densities))) == (1, 0.25, 4)


@pytest.mark.parametrize(
    ("rule", "family", "expected"),
    [
        *(("smupar", "adam", 4), ("smupar", "sgd", 4), ("smupar-lr-only", "adam", 4), ("smupar-init-only", "adam", 1)),
        *(("mup", "adam", 1), ("mup", "sgd", 1), ("sp", "adam", 1), ("sp", "sgd", 1)),
    ],
)
def test_density_corrects_the_learning_rate_by_table_1(rule, family, expected):
    model, plan = make(1.0, rule=rule)
    (optimizer,) = optimizers_of({"adam": "adamw", "sgd": "sgd"}[family], model, plan, lr=0.01)
    gmp = smupar.GMP(model, plan, optimizer, density=0.25, every=1, stop=1)
    used = used_lrs(optimizer)
    train(model, optimizer, gmp, range(2))
    assert used.keys() == SIZES.keys()
    for name, lr in used.items():
        assert lr == pytest.approx(0.01 * plan[name].lr_factor(family) * expected)
        assert density_factor(plan, plan[name], Fraction(1, 4), family) == expected
    assert any("hidden_weight" not in group for group in optimizer.param_groups)


def test_muon_needs_no_correction():
    model, plan = make(1.0)
    optimizers = optimizers_of("muon", model, plan)
    gmp = smupar.GMP(model, plan, optimizers, density=0.25, every=1, stop=1)
    used = used_lrs(optimizers[0])
    train(model, optimizers, gmp, range(2))
    assert used == dict.fromkeys(SIZES, 0.02)


# Allocations and rounded counts differ from tensor to tensor, the overall base density does not.
@pytest.mark.parametrize("base_density", [1.0, 0.5, 0.3, smupar.erk(0.5)])
@pytest.mark.parametrize("density", [1.0, 0.5])
def test_gmp_ends_with_the_learning_rates_of_a_plan_for_the_last_density(base_density, density):
    model, plan, optimizer = ready(density, base_density=base_density)
    gmp = smupar.GMP(model, plan, optimizer, density=0.125, every=1, stop=1)
    used = used_lrs(optimizer)
    optimize(model, optimizer, 0)
    assert used == pytest.approx({name: 0.01 * plan[name].lr_factor("adam") for name in SIZES})
    gmp.step()
    optimize(model, optimizer, 1)
    _, last = make(0.125, base_density=base_density)
    assert used == pytest.approx({name: 0.01 * last[name].lr_factor("adam") for name in SIZES})


@pytest.mark.parametrize("base_density", [1.0, smupar.erk(0.5)])
def test_fixed_correction_starts_with_the_init_of_a_plan_for_the_last_density(base_density):
    model, plan = make(1.0, base_density=base_density)
    before = hidden_of(model)
    smupar.GMP(model, plan, adamw(model, plan), density=0.125, every=1, stop=1, correction="fixed")
    _, last = make(0.125, base_density=base_density)
    for name, weight in hidden_of(model).items():
        torch.testing.assert_close(weight, before[name] * (last[name].init_std / plan[name].init_std))


def test_scheduler_made_after_gmp_never_sees_the_correction():
    model, optimizer, gmp = moving("GMP", density=0.25, every=2, stop=6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    used = used_lrs(optimizer)
    for step in range(8):
        density = gmp.densities["up.weight"]
        optimize(model, optimizer, step)
        group = group_of_weight(optimizer)["up.weight"]
        assert used["up.weight"] == pytest.approx(0.005 / (1 + step) / density)
        assert group["lr"] == pytest.approx(0.005 / (1 + step))
        gmp.step()
        scheduler.step()
        assert group["lr"] == pytest.approx(0.005 / (2 + step))
        assert group["initial_lr"] == pytest.approx(0.005)
        assert "scheduled_lr" not in group


@pytest.mark.parametrize(
    ("rule", "init", "rate"),
    [("smupar", 2, 4), ("smupar-init-only", 2, 1), ("smupar-lr-only", 1, 4), ("mup", 1, 1), ("sp", 1, 1)],
)
def test_fixed_correction_uses_init_and_learning_rate_of_the_last_density_from_the_start(rule, init, rate):
    model, plan = make(1.0, rule=rule)
    before = hidden_of(model)
    optimizer = adamw(model, plan)
    gmp = smupar.GMP(model, plan, optimizer, density=0.25, every=2, stop=4, correction="fixed")
    assert_same_tensors(hidden_of(model), {name: weight * init for name, weight in before.items()})
    assert counts(model) == SIZES
    used = used_lrs(optimizer)
    for step in range(6):
        optimize(model, optimizer, step)
        assert used == pytest.approx({name: 0.01 * plan[name].lr_factor("adam") * rate for name in SIZES})
        gmp.step()
    assert gmp.densities == dict.fromkeys(SIZES, 0.25)


def test_every_hidden_weight_gets_a_group_of_its_own_with_the_settings_of_the_old_one():
    model, plan, optimizer = ready(1.0)
    before = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    rates = layer_rates(model, plan, optimizer)
    assert layer_rates(model, plan, optimizer) is rates
    after = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert after.keys() == before.keys()
    for key, group in after.items():
        assert {k: v for k, v in group.items() if k in before[key]} | {"params": 0, "name": 0} == before[key] | {
            "params": 0,
            "name": 0,
        }
    assert {name: group["params"] for name, group in group_of_weight(optimizer).items()} == {
        name: [model.get_parameter(name)] for name in SIZES
    }
    names = [group["name"] for group in optimizer.param_groups]
    assert len(set(names)) == len(names)


def test_measured_factor_replaces_the_plan_and_corrections():
    model, plan = make(1.0, dtype=torch.float64)
    optimizer = make_sign(model, plan)
    rates = layer_rates(model, plan, optimizer)
    rates.corrections.update({"up.weight": 3.0, "down.weight": 3.0})
    rates.measured["down.weight"] = 7.0
    before = hidden_of(model)
    optimize(model, optimizer, 0)
    for name, expected in {"mix.weight": 0.005, "up.weight": 0.015, "down.weight": 0.07}.items():
        change = (model.get_parameter(name).detach() - before[name])[model.get_parameter(name).grad != 0].abs()
        torch.testing.assert_close(change, torch.full_like(change, expected), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(("decay", "share"), [("independent", 1), ("coupled", 8)])
@pytest.mark.parametrize("correction", ["moment", "fixed"])
def test_decay_that_is_independent_of_the_learning_rate_stays_so_while_masks_are_pruned(decay, share, correction):
    model, plan = make(1.0)
    groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, decay=decay)
    optimizer = torch.optim.AdamW(groups)
    sparsifier = smupar.GMP(model, plan, optimizer, density=1 / 8, every=1, stop=2, correction=correction)
    train(model, optimizer, sparsifier, range(1, 4))
    planned = {name: (group["lr"], group["weight_decay"]) for name, group in group_of_weight(optimizer).items()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        optimizer.state[parameter]["exp_avg"].zero_()
    before = hidden_of(model)
    optimizer.step()
    for name, weight in hidden_of(model).items():
        lr, weight_decay = planned[name]
        kept = before[name] != 0
        lost = 1 - weight[kept].double() / before[name][kept].double()
        torch.testing.assert_close(lost.mean().item(), share * lr * weight_decay, rtol=1e-3, atol=0)
    assert {name: (group["lr"], group["weight_decay"]) for name, group in group_of_weight(optimizer).items()} == planned
