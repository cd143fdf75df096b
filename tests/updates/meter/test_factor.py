"""The factor that is measured: what it is, when it is in force, and what it leaves to schedulers and GMP."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

import smupar
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.data.batches import open_text, read_batch
from smupar.lm.model.gpt import build
from smupar.lm.run.optimizers import make_optimizers
from smupar.lm.run.step import next_token_loss
from smupar.optim.layer_rates import group_of_weight
from smupar.updates.trace import Trace
from tests.support.loops import adamw, assert_same_tensors, used_lrs, weights_of
from tests.updates.measured import make, ready, recorded, start, started, train

GPT = RunConfig(
    model=ModelConfig(width=64, depth=2, head_dim=32), base_width=64, sparsity=0.0, lr=2**-7, seq_len=64, batch_size=8
)


@pytest.fixture(scope="module")
def text():
    return open_text(GPT)


def run_gpt(config, text, trace=None, steps=3):
    """The trace, and factors over those of the plan after every step."""
    model, plan = build(config)
    (optimizer,) = make_optimizers(model, plan, config)
    if trace is None:
        meter = smupar.record_updates(model, plan, optimizer)
    else:
        meter = smupar.follow_updates(model, plan, optimizer, trace=trace)
    factors = []
    for number in range(steps):
        pair = read_batch(text.train, seed=config.seed, step=number, batch_size=config.batch_size, seq_len=config.seq_len)
        optimizer.zero_grad()
        next_token_loss(model, pair).backward()
        optimizer.step()
        factors.append({name: factor / plan[name].lr_factor("adam") for name, factor in meter.rates.measured.items()})
    return meter.trace, factors, model


def test_measured_factor_of_a_wide_sparse_gpt_is_that_of_table_1(text):
    wide = replace(GPT, model=replace(GPT.model, width=512), sparsity=0.875)
    seeds = []
    for seed in range(4):
        trace, _, _ = run_gpt(replace(GPT, seed=seed), text)
        seeds.append(run_gpt(replace(wide, seed=seed), text, trace)[1])
    for number in range(3):
        by_layer = [statistics.median(factors[number][name] for factors in seeds) for name in seeds[0][0]]
        assert len(by_layer) == 2 * 5
        assert statistics.median(by_layer) == pytest.approx(1, abs=0.2)
        assert min(by_layer) > 0.6
        assert max(by_layer) < 1.4


def test_mup_plan_of_a_sparse_gpt_is_corrected_to_smupar(text):
    """Plans differ by the density alone: what is measured finds the missing factor of 4, if init is SmuPar's."""
    trace, _, _ = run_gpt(GPT, text)
    wide = replace(GPT, model=replace(GPT.model, width=256), sparsity=0.75)
    _, factors, _ = run_gpt(replace(wide, rule="smupar-init-only"), text, trace)
    assert statistics.median(factors[-1].values()) == pytest.approx(4, rel=0.2)


def test_copy_of_the_proxy_follows_it_with_factors_of_one(text):
    trace, _, model = run_gpt(GPT, text, steps=8)
    own, factors, copied = run_gpt(GPT, text, trace, steps=8)
    assert len(factors[-1]) == 10
    assert all(factor == pytest.approx(1, abs=1e-6) for after in factors for factor in after.values())
    for name, weight in weights_of(copied).items():
        torch.testing.assert_close(weight, model.get_parameter(name), rtol=1e-4, atol=1e-7)
    for name, effects in trace.effects.items():
        assert own.effects[name] == pytest.approx(effects, rel=1e-5)


def test_following_brings_a_target_with_a_wrong_plan_to_the_effects_of_the_proxy():
    """The learning rate lacks the factor of density 1/8; width 8 times the base's is in the plan."""
    trace = recorded(30)

    def excess(follows):
        model, plan, optimizer = ready(width=128, density=0.125, rule="smupar-init-only")
        meter = start(model, plan, optimizer, trace if follows else None)
        train(model, optimizer, range(30))
        pairs = [(own[10:], trace.effects[name][10:]) for name, own in meter.trace.effects.items()]
        return [statistics.mean(math.log2(x / y) for x, y in zip(own, wanted, strict=True)) for own, wanted in pairs]

    assert excess(False) == pytest.approx([-3, -3], abs=1)
    assert excess(True) == pytest.approx([0, 0], abs=0.3)


def test_factor_is_the_ratio_of_two_running_means():
    """0.8 old, 0.2 new, of what is wanted and of what a unit of learning rate does."""
    model, plan, optimizer = ready()
    wanted = {"blocks.0.weight": [1.0, 2.0, 4.0, 8.0], "blocks.1.weight": [1.0, 1.0, 1.0, 1.0]}
    follower = smupar.follow_updates(model, plan, optimizer, trace=Trace(4, [0, 1, 2, 3], wanted, {}, "adamw"))
    used = {name: plan[name].lr_factor("adam") for name in wanted}
    means = {}
    for number in range(4):
        train(model, optimizer, [number])
        for name, values in wanted.items():
            gain = follower.trace.effects[name][number] / used[name]
            old = means.get(name, (values[number], gain))
            means[name] = tuple(0.8 * before + 0.2 * now for before, now in zip(old, (values[number], gain), strict=True))
            used[name] = means[name][0] / means[name][1]
            assert follower.rates.measured[name] == pytest.approx(used[name], rel=1e-9)


def test_first_step_uses_the_factor_of_the_plan(proxy):
    model, plan, optimizer = ready(density=0.25)
    other, other_plan = make(density=0.25)
    plain = adamw(other, other_plan, weight_decay=0.0)
    follower = smupar.follow_updates(model, plan, optimizer, trace=proxy)
    assert follower.rates.measured == {}
    train(model, optimizer, [0])
    train(other, plain, [0])
    assert_same_tensors(weights_of(model), weights_of(other))
    assert follower.rates.measured.keys() == {"blocks.0.weight", "blocks.1.weight"}
    train(model, optimizer, [1])
    train(other, plain, [1])
    assert not torch.equal(model.blocks[0].weight, other.blocks[0].weight)


SCHEDULERS = {
    "none": None,
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number)),
    "CosineAnnealingLR": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_factor_is_in_force_during_a_step_and_gone_behind_it(proxy, kind):
    model, plan, optimizer = ready(density=0.25)
    other, other_plan = make(density=0.25)
    plain = adamw(other, other_plan, weight_decay=0.0)
    follower = smupar.follow_updates(model, plan, optimizer, trace=proxy)
    smupar.audit(model, plan, optimizer)
    make_scheduler = SCHEDULERS[kind]
    schedulers = [make_scheduler(optim) for optim in (optimizer, plain)] if make_scheduler else []
    seen = used_lrs(optimizer)
    for number in range(5):
        planned = {id(p): group["lr"] / group["lr_factor"] for group in plain.param_groups for p in group["params"]}
        base_lr = next(iter(planned.values()))
        expected = {name: base_lr * follower.rates.measured.get(name, plan[name].lr_factor("adam")) for name in follower.probes}
        train(model, optimizer, [number])
        train(other, plain, [number])
        for scheduler in schedulers:
            scheduler.step()
        assert seen == pytest.approx(expected, rel=1e-9)
        scheduled = {parameter: group["lr"] for group in plain.param_groups for parameter in group["params"]}
        names = {id(parameter): name for name, parameter in other.named_parameters()}
        ours = {name: group["lr"] for group in optimizer.param_groups for name in own_names(model, group)}
        assert ours == {names[id(parameter)]: lr for parameter, lr in scheduled.items()}
        assert all("scheduled_lr" not in group for group in optimizer.param_groups)
    assert smupar.audit(model, plan, optimizer) == []


def own_names(model, group):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in group["params"]]


def test_guard_still_sees_a_scheduler_that_erases_the_ratios(proxy):
    model, _, optimizer, _ = started(proxy, density=0.25)
    smupar.guard(optimizer)
    train(model, optimizer, range(2))
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    with pytest.warns(smupar.LRRatioWarning):
        train(model, optimizer, [2])


def test_step_that_failed_leaves_the_scheduled_learning_rate(proxy):
    model, _, optimizer, _ = started(proxy, density=0.25)
    train(model, optimizer, range(2))
    before = {name: group["lr"] for name, group in group_of_weight(optimizer).items()}

    def fail(*_):
        raise RuntimeError("no")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        train(model, optimizer, [2])
    hook.remove()
    train(model, optimizer, [2])
    assert {name: group["lr"] for name, group in group_of_weight(optimizer).items()} == before


@pytest.mark.parametrize("correction", ["moment", "fixed"])
def test_measured_factor_takes_the_place_of_the_correction_of_gmp(proxy, correction):
    model, plan, optimizer = ready(density=1.0)
    gmp = smupar.GMP(model, plan, optimizer, density=0.25, stop=6, every=2, correction=correction)
    follower = smupar.follow_updates(model, plan, optimizer, trace=proxy)
    assert follower.rates is gmp.rates
    used = used_lrs(optimizer)
    for number in range(8):
        measured = dict(follower.rates.measured)
        assert bool(measured) == (number > 0)
        train(model, optimizer, [number])
        gmp.step()
        for name, lr in used.items():
            first = plan[name].lr_factor("adam") * (4.0 if correction == "fixed" else 1.0)
            assert lr == pytest.approx(0.01 * measured.get(name, first), rel=1e-9)
    assert set(gmp.densities.values()) == {0.25}
    assert set(gmp.rates.corrections.values()) == {4.0}
    follower.remove()
    train(model, optimizer, [8])
    assert used == pytest.approx({name: 0.01 * plan[name].lr_factor("adam") * 4 for name in gmp.densities}, rel=1e-9)
