"""The audit finds faults in optimizers, their groups and their learning rates."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

import smupar
from tests.check.audit.audited import adamw, findings, mlp, only_finding, ready, train

AdamW, SGD, Adafactor = torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor


class Signum(SGD):
    """An optimizer of the user's own."""


def grouped(kind, model, plan, **settings):
    return kind(smupar.param_groups(model, plan, lr=0.01, **settings))


def changed(optimizer, *numbers, **settings):
    """An optimizer with other settings in these of its groups, or in all."""
    for number in numbers or range(len(optimizer.param_groups)):
        optimizer.param_groups[number].update(settings)
    return optimizer


def warmed_up(optimizer):
    """The learning rate is 0 now; what it will be is in ``initial_lr``."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: step / 10).optimizer


def without(optimizer, parameter):
    for group in optimizer.param_groups:
        group["params"] = [held for held in group["params"] if held is not parameter]
    return optimizer


def muon_and_adamw(model, plan, **settings):
    muon = torch.optim.Muon(smupar.param_groups(model, plan, lr=0.02, optimizer="muon", only="hidden"))
    return [changed(muon, **settings), adamw(model, plan, only="rest")]


def by_shape(model):
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), AdamW(vectors, lr=0.01)]


HIDDEN = ["'fc2.weight'", "'fc3.weight'"]
SAME_RATE = "learning rate is 0.01, the plan says 0.005"
SECOND = "'hidden, LR x 0.5, width 4, density 0.5'"
ADAFACTOR = ["Adafactor", "Use AdamW or SGD", "measured updates"]
# The mistake -> (the optimizers that make it, the weights that are named, or None if one finding tells of all, what it says).
MISTAKES = {
    "all parameters in one group": (
        lambda model, plan: AdamW(model.parameters(), lr=0.01),
        HIDDEN, [SAME_RATE, "smupar.param_groups(model, plan, lr=...)"],
    ),
    "all parameters in one group, under a warm-up from zero": (
        lambda model, plan: warmed_up(AdamW(model.parameters(), lr=0.01)), HIDDEN, [],
    ),
    "groups of SGD given to AdamW": (
        lambda model, plan: grouped(AdamW, model, plan, optimizer="sgd"),
        None, ["sgd family", "AdamW", "optimizer='adamw' to param_groups"],
    ),
    "groups of AdamW given to SGD": (
        lambda model, plan: grouped(SGD, model, plan), None, ["adam family", "optimizer='sgd' to param_groups"],
    ),
    "twice the rate of a group before its scheduler": (
        lambda model, plan: warmed_up(changed(adamw(model, plan), 1, lr=0.01)), HIDDEN, [SAME_RATE],
    ),
    "a scheduler that erased the ratios": (
        lambda model, plan: lr_scheduler.OneCycleLR(adamw(model, plan), max_lr=0.01, total_steps=10).optimizer,
        None, [SECOND, "give OneCycleLR max_lr=[g['lr'] for g in optimizer.param_groups]"],
    ),
    "a parameter is missing": (
        lambda model, plan: without(adamw(model, plan), model.fc3.bias),
        ["'fc3.bias' is trained but in no optimizer group"], ["param_groups"],
    ),
    "Adafactor with all parameters": (lambda model, plan: Adafactor(model.parameters()), None, ADAFACTOR),
    "Adafactor with groups": (lambda model, plan: grouped(Adafactor, model, plan), None, ADAFACTOR),
    "groups that name an unknown family": (
        lambda model, plan: changed(grouped(Signum, model, plan, optimizer="adamw"), family="mine"),
        None, ["no learning-rate rule is known for optimizer 'Signum'"],
    ),
    "an optimizer that is not known": (
        lambda model, plan: Signum(model.parameters(), lr=0.01), None, ["'Signum'", "optimizer='adamw'"],
    ),
    "twice the rate of a group of an optimizer that is not known": (
        lambda model, plan: changed(grouped(Signum, model, plan, optimizer="adamw"), 1, lr=0.01), None, [SECOND],
    ),
    "Muon that sizes its update in another way": (
        lambda model, plan: muon_and_adamw(model, plan, adjust_lr_fn="match_rms_adamw"),
        None, ["Muon with adjust_lr_fn='match_rms_adamw'"],
    ),
    "Muon with other than hidden weights": (lambda model, plan: by_shape(model), None, ["not hidden weights", "only='hidden'"]),
    "a decay given to the optimizer alone": (
        lambda model, plan: AdamW(smupar.param_groups(model, plan, lr=0.01), weight_decay=0.2),
        None, ["weight_decay=0.2 was given to AdamW, where it has no effect", "pass it to param_groups(..., weight_decay=...)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "named", "parts"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_in_optimizers_is_found(make, named, parts):
    model, plan = mlp()
    lines = findings(model, plan, make(model, plan))
    assert len(lines) == 1 if named is None else [line.split(":")[0] for line in lines] == named
    assert all(part in line for line in lines for part in parts)


@pytest.mark.parametrize("doubled", range(3))
def test_one_group_with_twice_its_lr_is_found_and_named(doubled):
    model, plan = mlp({"fc2.weight": 1 / 8, "fc3.weight": 1 / 2})
    optimizer = adamw(model, plan)
    names = [group["name"] for group in optimizer.param_groups]
    assert len(names) == 3
    optimizer.param_groups[doubled]["lr"] *= 2
    line = only_finding(model, plan, optimizer)
    assert [name for name in names if repr(name) in line] == [names[doubled]]


def test_optimizer_of_the_users_own_passes_if_its_groups_name_a_family():
    model, plan = mlp()
    assert smupar.audit(model, plan, grouped(Signum, model, plan, optimizer="adamw"), lr=0.01) == []


def test_decay_of_the_groups_may_also_be_given_to_the_optimizer():
    model, plan = mlp()
    groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.2)
    assert smupar.audit(model, plan, torch.optim.AdamW(groups, weight_decay=0.2)) == []


def test_schedulers_that_multiply_pass():
    model, plan = mlp()
    for make in (
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 10),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.01),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [group["lr"] for group in optimizer.param_groups], 10),
    ):
        optimizer = adamw(model, plan)
        scheduler = make(optimizer)
        assert smupar.audit(model, plan, optimizer) == []
        # The lr and initial_lr of one cycle are its start; the rate that was asked for is its max_lr.
        if not isinstance(scheduler, lr_scheduler.LinearLR):
            assert smupar.audit(model, plan, optimizer, lr=0.01) == []


def test_lr_checks_the_base_rate():
    model, plan = mlp()
    optimizer = adamw(model, plan, lr=0.02)
    assert smupar.audit(model, plan, optimizer) == []
    assert smupar.audit(model, plan, optimizer, lr=0.02) == []
    lines = findings(model, plan, optimizer, lr=0.01)
    assert len(lines) == len(plan)
    assert "'fc2.weight': learning rate is 0.01, the plan says 0.005 (base 0.01 x 0.5, adam family)" in "\n".join(lines)


def test_tensor_lrs_pass_and_are_checked():
    model, plan = mlp()
    optimizer = adamw(model, plan, lr=torch.tensor(0.01))
    assert smupar.audit(model, plan, optimizer, lr=0.01) == []
    optimizer.param_groups[1]["lr"].mul_(2)
    assert "'hidden, LR x 0.5, width 4, density 0.5'" in only_finding(model, plan, optimizer)


def test_frozen_parameter_need_not_be_in_the_optimizer():
    model, plan = mlp()
    model.fc3.weight.requires_grad_(False)
    assert smupar.audit(model, plan, adamw(model, plan)) == []


def test_parameter_in_two_optimizers_is_found():
    model, plan = mlp()
    muon = torch.optim.Muon(smupar.param_groups(model, plan, lr=0.01, optimizer="muon", only="hidden"))
    smupar.attach(model, plan, muon)
    everything = adamw(model, plan)  # only="rest" was forgotten
    lines = findings(model, plan, [muon, everything])
    assert any("fc2.weight" in line for line in lines)


@pytest.mark.parametrize("attached", [False, True])
def test_muon_passes_with_and_without_attach(attached):
    model, plan = mlp()
    optimizers = muon_and_adamw(model, plan)
    if attached:
        smupar.attach(model, plan, optimizers)
    assert smupar.audit(model, plan, optimizers) == []


def test_infinite_weight_on_the_mask_is_not_off_it():
    model, plan = mlp()
    place = model.fc2.weight_mask.nonzero()[0]
    with torch.no_grad():
        model.fc2.weight[tuple(place)] = math.inf
    assert not any("off the mask" in line for line in findings(model, plan))


def test_dense_muon_passes():
    model, plan = mlp(1)
    assert smupar.audit(model, plan, muon_and_adamw(model, plan)) == []


def test_every_optimizer_of_a_list_is_checked():
    model, plan = mlp()
    hidden, rest = adamw(model, plan, only="hidden"), adamw(model, plan, only="rest")
    assert smupar.audit(model, plan, [hidden, rest], lr=0.01) == []
    lines = findings(model, plan, hidden)
    assert len(lines) == len(plan) - 2
    assert all("in no optimizer group" in line for line in lines)
    sgd = torch.optim.SGD(smupar.param_groups(model, plan, lr=0.01, only="rest"))
    assert "adam family but given to SGD" in only_finding(model, plan, [hidden, sgd])


def test_all_faults_are_told_at_once():
    model, plan = mlp()
    with torch.no_grad():
        model.fc1.weight.mul_(1.5)
        model.fc3.weight.add_(0.1)
    model.head.smupar_factor.fill_(2.0)
    lines = "\n".join(findings(model, plan, torch.optim.Adafactor(model.parameters())))
    for part in ("'fc1.weight': init std", "'fc3.weight': 2048 weights off the mask", "'head' ('head.weight')", "Adafactor"):
        assert part in lines


def test_passed_audit_leaves_the_guard_for_schedulers_that_come_later():
    model, plan, optimizer = ready()
    smupar.audit(model, plan, optimizer)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.005)
    train(model, optimizer)
    scheduler.step()
    with pytest.warns(smupar.LRRatioWarning, match=r"hidden, LR x 0\.5"):
        train(model, optimizer)
