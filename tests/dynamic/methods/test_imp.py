"""IMP: rounds, each from the weights of an early step."""

import pytest
import torch

import smupar
from tests.dynamic.moving import SIZES, counts, hidden_of, make, masks_of, moving, optimize, train
from tests.support.loops import adamw, used_lrs


@pytest.mark.parametrize("rewind", [0, 3])
def test_imp_goes_back_to_the_weights_of_the_rewind_step(rewind):
    model, optimizer, imp = moving("IMP", density=0.125, rounds=3, every=5, rewind=rewind)
    remembered, rounds = None, []
    for step in range(21):
        if imp.num_steps == rewind:
            remembered = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimize(model, optimizer, step)
        before = hidden_of(model)
        if not imp.step():
            continue
        rounds.append((step + 1, counts(model)))
        masks = masks_of(model)
        for name, parameter in model.named_parameters():
            mask = masks.get(name, torch.ones_like(parameter, dtype=torch.bool))
            assert torch.equal(parameter[mask], remembered[name][mask]), name
            assert not parameter[~mask].any()
        for name, mask in masks.items():
            assert before[name][mask].abs().min() >= before[name][~mask].abs().max()
        assert not optimizer.state
    halves = [{name: size // 2**turn for name, size in SIZES.items()} for turn in (1, 2, 3)]
    assert rounds == [(5, halves[0]), (10, halves[1]), (15, halves[2])]


def test_imp_shrinks_geometrically_to_exactly_the_last_density():
    model, optimizer, imp = moving("IMP", start_from=0.5, density=0.1, rounds=2, every=1)
    seen = []
    for step in range(3):
        train(model, optimizer, imp, [step])
        seen.append(counts(model)["up.weight"])
    # 512 * 0.5 * sqrt(0.2) = 114.5 and 512 * 0.1 = 51.2
    assert seen == [114, 51, 51]


def test_imp_learning_rate_follows_the_density_of_the_round():
    model, optimizer, imp = moving("IMP", density=0.25, rounds=2, every=2)
    rates, used = [], used_lrs(optimizer)
    for step in range(6):
        train(model, optimizer, imp, [step])
        rates.append(used["up.weight"])
    assert rates == pytest.approx([0.005, 0.005, 0.01, 0.01, 0.02, 0.02])


def test_imp_with_fixed_correction_goes_back_to_the_corrected_init():
    model, plan = make(1.0)
    before = hidden_of(model)
    optimizer = adamw(model, plan)
    imp = smupar.IMP(model, plan, optimizer, density=0.25, rounds=1, every=2, correction="fixed")
    train(model, optimizer, imp, range(2))
    for name, mask in masks_of(model).items():
        assert torch.equal(model.get_parameter(name).detach(), before[name] * 2 * mask)


@pytest.mark.parametrize(
    ("rewind", "expected"), [(0, [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]), (2, [0, 1, 2, 3, 2, 3, 4, 5, 2, 3, 4, 5])]
)
def test_round_step_is_the_step_that_the_weights_are_at(rewind, expected):
    model, optimizer, imp = moving("IMP", density=0.25, rounds=2, every=4, rewind=rewind)
    seen = []
    for step in range(12):
        seen.append(imp.round_step)
        train(model, optimizer, imp, [step])
    assert seen == expected
