"""The audit finds faults in optimizers, their groups and their learning rates."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

import smupar
from tests.check.audit.audited import adamw, findings, mlp, only_finding, ready, train


def test_optimizer_of_all_parameters_is_found():
    model, plan = mlp()
    lines = findings(model, plan, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert [line.split(":")[0] for line in lines] == ["'fc2.weight'", "'fc3.weight'"]
    assert all("learning rate is 0.01, the plan says 0.005" in line for line in lines)
    assert all("smupar.param_groups(model, plan, lr=...)" in line for line in lines)


def test_optimizer_of_all_parameters_is_found_under_a_warm_up_from_zero():
    model, plan = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    lines = findings(model, plan, optimizer)
    assert [line.split(":")[0] for line in lines] == ["'fc2.weight'", "'fc3.weight'"]


def test_groups_of_another_family_are_found():
    model, plan = mlp()
    line = only_finding(model, plan, torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, optimizer="sgd")))
    assert "sgd family" in line
    assert "AdamW" in line
    assert "optimizer='adamw' to param_groups" in line
    line = only_finding(model, plan, torch.optim.SGD(smupar.param_groups(model, plan, lr=0.01)))
    assert "adam family" in line
    assert "optimizer='sgd' to param_groups" in line


def test_one_group_with_twice_its_lr_is_found_and_named():
    for doubled in range(3):
        model, plan = mlp({"fc2.weight": 1 / 8, "fc3.weight": 1 / 2})
        optimizer = adamw(model, plan)
        names = [group["name"] for group in optimizer.param_groups]
        assert len(names) == 3
        optimizer.param_groups[doubled]["lr"] *= 2
        line = only_finding(model, plan, optimizer)
        assert [name for name in names if repr(name) in line] == [names[doubled]]


def test_one_group_with_twice_its_lr_before_its_scheduler_is_found():
    model, plan, optimizer = ready()
    optimizer.param_groups[1]["lr"] *= 2
    lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # lr is 0 now; what it will be is in initial_lr
    lines = findings(model, plan, optimizer)
    assert [line.split(":")[0] for line in lines] == ["'fc2.weight'", "'fc3.weight'"]
    assert all("learning rate is 0.01, the plan says 0.005" in line for line in lines)


def test_scheduler_that_erased_the_ratios_is_found():
    model, plan, optimizer = ready()
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    line = only_finding(model, plan, optimizer)
    assert "'hidden, LR x 0.5, width 4, density 0.5'" in line
    assert "give OneCycleLR max_lr=[g['lr'] for g in optimizer.param_groups]" in line


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


def test_parameter_missing_from_the_optimizer_is_found():
    model, plan = mlp()
    groups = smupar.param_groups(model, plan, lr=0.01)
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not model.fc3.bias]
    line = only_finding(model, plan, torch.optim.AdamW(groups))
    assert line.startswith("'fc3.bias' is trained but in no optimizer group")
    assert "param_groups" in line or "requires_grad" in line  # what to do about it


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


def test_adafactor_is_found():
    model, plan = mlp()
    for groups in (model.parameters(), smupar.param_groups(model, plan, lr=0.01)):
        line = only_finding(model, plan, torch.optim.Adafactor(groups))
        assert "Adafactor" in line
        assert "Use AdamW or SGD" in line
        assert "measured updates" in line


def test_groups_that_name_an_unknown_family_are_found():
    class Mine(torch.optim.AdamW):
        pass

    model, plan = mlp()
    optimizer = Mine(smupar.param_groups(model, plan, lr=0.01))
    for group in optimizer.param_groups:
        group["family"] = "mine"
    assert "no learning-rate rule is known for optimizer 'Mine'" in only_finding(model, plan, optimizer)


def test_unknown_optimizer_is_found_unless_its_groups_name_a_family():
    class Signum(torch.optim.SGD):
        """An optimizer of the user's own."""

    model, plan = mlp()
    line = only_finding(model, plan, Signum(model.parameters(), lr=0.01))
    assert "'Signum'" in line
    assert "optimizer='adamw'" in line
    own = Signum(smupar.param_groups(model, plan, lr=0.01, optimizer="adamw"))
    assert smupar.audit(model, plan, own, lr=0.01) == []
    own.param_groups[1]["lr"] *= 2
    assert "'hidden, LR x 0.5, width 4, density 0.5'" in only_finding(model, plan, own)


def muon_and_adamw(model, plan):
    muon = torch.optim.Muon(smupar.param_groups(model, plan, lr=0.02, optimizer="muon", only="hidden"))
    return [muon, adamw(model, plan, only="rest")]


@pytest.mark.parametrize("attached", [False, True])
def test_muon_passes_with_and_without_attach(attached):
    model, plan = mlp()
    optimizers = muon_and_adamw(model, plan)
    if attached:
        smupar.attach(model, plan, optimizers)
    assert smupar.audit(model, plan, optimizers) == []


def test_muon_that_sizes_its_update_in_another_way_is_found():
    model, plan = mlp(1)
    optimizers = muon_and_adamw(model, plan)
    for group in optimizers[0].param_groups:
        group["adjust_lr_fn"] = "match_rms_adamw"
    assert only_finding(model, plan, optimizers).startswith("Muon with adjust_lr_fn='match_rms_adamw'")


def test_infinite_weight_on_the_mask_is_not_off_it():
    model, plan = mlp()
    place = model.fc2.weight_mask.nonzero()[0]
    with torch.no_grad():
        model.fc2.weight[tuple(place)] = math.inf
    assert not any("off the mask" in line for line in findings(model, plan))


def test_dense_muon_passes():
    model, plan = mlp(1)
    assert smupar.audit(model, plan, muon_and_adamw(model, plan)) == []


def test_muon_with_other_than_hidden_weights_is_found():
    model, plan = mlp(1)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]
    line = only_finding(model, plan, optimizers)
    assert "not hidden weights" in line
    assert "only='hidden'" in line


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
