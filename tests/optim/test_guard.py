"""The guard: which schedulers and loops erase the ratios between learning rates, and which do not."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import smupar
from tests.optim.test_groups import backward, mlp


def guarded(**options):
    model, plan = mlp(1 / 4)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, **options))
    smupar.guard(optimizer)
    return model, optimizer


def train(model, optimizer, scheduler, steps=12):
    for _ in range(steps):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def ratio_warnings(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert {item.category for item in caught} <= {smupar.LRRatioWarning}
    return [str(item.message) for item in caught]


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=20)


def one_cycle_list(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[group["lr"] for group in optimizer.param_groups], total_steps=20)


def cosine(eta_min):
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=eta_min)


def warmup_then_cosine(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 8)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


@pytest.mark.parametrize("make", [one_cycle, cosine(0.001)], ids=["OneCycleLR", "CosineAnnealingLR"])
def test_guard_warns_once_and_names_the_groups_of_a_scheduler_that_sets_absolute_values(make):
    model, optimizer = guarded()
    scheduler = make(optimizer)
    messages = ratio_warnings(lambda: train(model, optimizer, scheduler))
    assert len(messages) == 1
    assert "'hidden, LR x 0.5, width 8, density 0.25'" in messages[0]
    assert "OneCycleLR" in messages[0]
    assert "eta_min=0" in messages[0]
    assert "LambdaLR" in messages[0]


def test_guard_warns_once_when_a_loop_assigns_one_lr_to_all_groups():
    model, optimizer = guarded()
    train(model, optimizer, None, steps=2)

    def loop():
        for step in range(5):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 - step / 5)
            train(model, optimizer, None, steps=1)

    messages = ratio_warnings(loop)
    assert len(messages) == 1
    assert "'hidden, LR x 0.5, width 8, density 0.25': lr 0.01" in messages[0]


def test_guard_names_the_one_group_that_changed_whichever_it_is():
    for changed in range(3):
        model, optimizer = guarded(optimizer="adamw", weight_decay=0.1, no_decay="*.bias")
        names = [group["name"] for group in optimizer.param_groups]
        assert len(names) == 3
        optimizer.param_groups[changed]["lr"] *= 2
        (message,) = ratio_warnings(lambda model=model, optimizer=optimizer: train(model, optimizer, None, steps=2))
        assert [name for name in names if repr(name) in message] == [names[changed]]


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 5),  # a warm-up from 0
        cosine(0.0),
        one_cycle_list,
        lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.1),
        lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=5),
        lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=10),
        warmup_then_cosine,
    ],
    ids=["LambdaLR", "warm-up from 0", "cosine", "OneCycleLR list", "StepLR", "LinearLR", "LinearLR to 0", "SequentialLR"],
)
def test_guard_is_silent_for_schedulers_that_multiply(make):
    model, optimizer = guarded()
    scheduler = make(optimizer)
    assert ratio_warnings(lambda: train(model, optimizer, scheduler)) == []


def test_guard_is_silent_for_tensor_lrs_scaled_in_place():
    model, plan = mlp(1 / 4)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=torch.tensor(0.01)))
    smupar.guard(optimizer)

    def loop():
        for _ in range(5):
            for group in optimizer.param_groups:
                group["lr"].mul_(0.7)
            train(model, optimizer, None, steps=1)

    assert ratio_warnings(loop) == []
    optimizer.param_groups[1]["lr"].fill_(0.01)
    assert len(ratio_warnings(lambda: train(model, optimizer, None, steps=3))) == 1


def test_guard_ignores_groups_of_the_users_own():
    model, plan = mlp(1 / 4)
    extra = [{"params": [model.head.bias], "lr": 0.5}]
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, extra=extra))
    smupar.guard(optimizer)
    assert ratio_warnings(lambda: train(model, optimizer, None)) == []


def test_guard_twice_warns_once_and_takes_a_list():
    model, plan = mlp(1 / 4)
    hidden = torch.optim.SGD(smupar.param_groups(model, plan, lr=0.01, optimizer="sgd", only="hidden"))
    rest = torch.optim.SGD(smupar.param_groups(model, plan, lr=0.01, optimizer="sgd", only="rest"))
    smupar.guard([hidden, rest])
    smupar.guard([hidden, rest])
    smupar.guard(rest)
    for group in rest.param_groups:
        group["lr"] = 0.01
    messages = ratio_warnings(lambda: (train(model, hidden, None, 2), train(model, rest, None, 2)))
    assert len(messages) == 1


def test_guard_changes_no_step():
    plain, plan = mlp(1 / 4)
    optimizer = torch.optim.AdamW(smupar.param_groups(plain, plan, lr=0.01))
    watched, watched_optimizer = guarded()
    train(plain, optimizer, None, 3)
    train(watched, watched_optimizer, None, 3)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))


def test_guard_looks_at_each_group_a_few_times_only(monkeypatch):
    from smupar.optim import guard as optim

    weights = [nn.Parameter(torch.zeros(1)) for _ in range(300)]
    groups = [{"params": [weight], "lr": 1e-3, "lr_factor": 1.0, "name": str(number)} for number, weight in enumerate(weights)]
    optimizer, calls, same = torch.optim.SGD(groups), [], optim._same
    monkeypatch.setattr(optim, "_same", lambda one, other: calls.append(1) or same(one, other))
    assert optim.ratio_problem(optimizer) is None
    assert len(calls) <= 4 * len(weights)
