"""Adam's bias correction for grown weights."""

import math

import pytest
import torch
from torch import nn

import smupar
from smupar.optim.layer_rates import layer_rates
from tests.dynamic.moving import SIZES, hidden_of, make, masks_of, moving, optimize, train
from tests.support.loops import adamw, assert_same_tensors

GROW_AT, BETAS = 6, (0.9, 0.999)


def grown_run(restart, steps, *, make_optimizer=torch.optim.AdamW):
    """Weights and gradients after every step, and what grew after step ``GROW_AT``."""
    model, plan = make(dtype=torch.float64)
    groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1)
    optimizer = make_optimizer(groups, betas=BETAS, eps=1e-10)
    rigl = smupar.RigL(
        model, plan, optimizer, every=GROW_AT, stop=1000, drop_fraction=0.5, decay="constant", restart_bias_correction=restart
    )
    weights, gradients, masks = [], [], []
    for step in range(steps):
        optimize(model, optimizer, step)
        gradients.append({name: model.get_parameter(name).grad.clone() for name in SIZES})
        rigl.step()
        weights.append(hidden_of(model))
        masks.append(masks_of(model))
    grown = {name: masks[GROW_AT - 1][name] & ~masks[GROW_AT - 2][name] for name in SIZES}
    assert all(mask.sum() > 20 for mask in grown.values())
    hidden = next(g for g in optimizer.param_groups if any(p is model.up.weight for p in g["params"]))
    return weights, gradients, grown, hidden


def test_without_restart_the_first_update_of_a_grown_weight_is_too_large():
    weights, gradients, grown, group = grown_run(False, GROW_AT + 1)
    t = GROW_AT + 1
    size = (1 - BETAS[0]) / math.sqrt(1 - BETAS[1]) * math.sqrt(1 - BETAS[1] ** t) / (1 - BETAS[0] ** t)
    for name, mask in grown.items():
        mask = mask & (gradients[-1][name].abs() > 1e-6)
        update = weights[-1][name][mask]
        torch.testing.assert_close(update, -group["lr"] * size * gradients[-1][name][mask].sign(), rtol=1e-3, atol=0)


def test_with_restart_the_first_update_of_a_grown_weight_is_the_learning_rate():
    weights, gradients, grown, group = grown_run(True, GROW_AT + 1)
    for name, mask in grown.items():
        mask = mask & (gradients[-1][name].abs() > 1e-6)
        update = weights[-1][name][mask]
        torch.testing.assert_close(update, -group["lr"] * gradients[-1][name][mask].sign(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, torch.optim.Adam])
def test_with_restart_grown_weights_train_as_in_an_adam_of_their_own(make_optimizer):
    weights, gradients, grown, group = grown_run(True, GROW_AT + 5, make_optimizer=make_optimizer)
    for name, mask in grown.items():
        alone = nn.Parameter(torch.zeros(int(mask.sum()), dtype=torch.float64))
        own = make_optimizer([alone], lr=group["lr"], weight_decay=group["weight_decay"], betas=BETAS, eps=1e-10)
        for step in range(GROW_AT, GROW_AT + 5):
            alone.grad = gradients[step][name][mask]
            own.step()
            torch.testing.assert_close(weights[step][name][mask], alone.detach(), rtol=1e-5, atol=1e-7)


def test_weights_that_did_not_grow_are_untouched_by_the_restart():
    plain, _, _, _ = grown_run(False, GROW_AT + 1)
    restarted, _, grown, _ = grown_run(True, GROW_AT + 1)
    for step in range(GROW_AT):
        assert_same_tensors(restarted[step], plain[step])
    for name, mask in grown.items():
        assert torch.equal(restarted[GROW_AT][name][~mask], plain[GROW_AT][name][~mask])
        assert not torch.equal(restarted[GROW_AT][name][mask], plain[GROW_AT][name][mask])


def test_restart_leaves_weights_alone_in_steps_without_their_gradient():
    model, optimizer, rigl = moving("RigL", every=2, stop=99, drop_fraction=0.5, restart_bias_correction=True)
    train(model, optimizer, rigl, range(2))
    before = hidden_of(model)
    optimizer.zero_grad()
    optimizer.step()
    assert_same_tensors(hidden_of(model), before)
    rigl.step()
    optimize(model, optimizer, 3)
    before = hidden_of(model)
    optimizer.zero_grad()
    optimizer.step()
    assert_same_tensors(hidden_of(model), before)


@pytest.mark.parametrize("corrected", ["before", "after"])
def test_restart_uses_the_learning_rate_that_was_applied(corrected):
    """A scheduler's and a correction's, whichever hook came first."""
    model, plan = make(dtype=torch.float64)
    optimizer = adamw(model, plan, weight_decay=0.0, eps=1e-12)
    if corrected == "before":
        layer_rates(model, plan, optimizer)
    rigl = smupar.RigL(model, plan, optimizer, every=4, stop=99, drop_fraction=0.5, restart_bias_correction=True)
    layer_rates(model, plan, optimizer).corrections["up.weight"] = 3.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        old = masks_of(model)
        optimize(model, optimizer, step)
        rigl.step()
        scheduler.step()
    grown = masks_of(model)["up.weight"] & ~old["up.weight"]
    optimize(model, optimizer, 4)
    update, gradient = model.up.weight.detach()[grown], model.up.weight.grad[grown]
    expected = -0.01 * plan["up.weight"].lr_factor("adam") * 3 / 5 * gradient.sign()
    torch.testing.assert_close(update, expected, rtol=1e-3, atol=0)
