"""Nothing is left behind by what measures updates."""

import copy

import pytest
import torch
import torch.nn.functional as F

import smupar
from smupar.model.seam import seam_of
from tests.support.loops import adamw, loss_of, make_step, used_lrs
from tests.support.models import CLASSES
from tests.updates.measured import Net, assert_untouched, batch, make, start, started, train


@pytest.mark.parametrize("follows", [True, False])
def test_remove_takes_everything_away(proxy, follows):
    model, plan = make(density=0.25)
    names = list(model.state_dict())
    optimizer = adamw(model, plan, weight_decay=0.0)
    used = used_lrs(optimizer)
    meter = start(model, plan, optimizer, proxy if follows else None)
    assert list(model.state_dict()) == names
    train(model, optimizer, range(2))
    assert list(model.state_dict()) == names
    meter.remove()
    assert_untouched(model)
    before = copy.deepcopy(meter.trace)
    planned = {name: 0.01 * plan[name].lr_factor("adam") for name in meter.probes}
    train(model, optimizer, [2])
    assert used == pytest.approx(planned)
    assert meter.trace == before
    phases = seam_of(optimizer).phases
    assert {"set_rates", "restore_rates"} <= phases.keys()  # those of the split groups
    assert not any(meter in owners for owners in phases.values())
    again = start(model, plan, optimizer, proxy if follows else None)
    train(model, optimizer, [3])
    assert again.trace.at == [0]


def test_context_takes_hooks_away_when_training_fails():
    model, _, optimizer, recorder = started()
    with pytest.raises(RuntimeError, match=r"must match the size|shapes cannot be multiplied"), recorder:
        train(model, optimizer, [0, 1], shape=(7,))
    assert_untouched(model)
    assert recorder.trace.at == []


def test_copy_of_a_measured_model_keeps_its_inputs_to_itself(proxy):
    """An average of weights, say, that is evaluated with gradients between steps."""
    factors = []
    for copies in (True, False):
        model, _, optimizer, follower = started(proxy, density=0.25)
        train(model, optimizer, [0])
        other = copy.deepcopy(model) if copies else None
        optimizer.zero_grad()
        loss_of(model, batch(1)).backward()
        if copies:
            other(batch(7)[0])
        optimizer.step()
        factors.append(dict(follower.rates.measured))
    assert factors[0] == factors[1]


def test_what_later_hooks_change_is_measured_whichever_came_first():
    effects = []
    for meter_first in (True, False):
        torch.manual_seed(0)
        model = Net(64)
        plan = smupar.parameterize(model, base=Net(16), density=1 / 16)
        muon = torch.optim.Muon(smupar.param_groups(model, plan, lr=0.02, optimizer="muon", only="hidden"), weight_decay=0)
        if meter_first:
            recorded = smupar.record_updates(model, plan, muon)
            smupar.attach(model, plan, muon)  # masks what Muon mixed, as happens without it
        else:
            recorded = smupar.record_updates(model, plan, muon)
        F.cross_entropy(model(torch.randn(128, 6)), torch.arange(128) % CLASSES).backward()
        muon.step()
        effects.append(recorded.trace.effects)
    assert effects[0] == effects[1]


def test_step_that_torch_makes_to_have_state_is_not_counted():
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = Net(64)
    plan = smupar.parameterize(model, base=Net(16))
    optimizer = adamw(model, plan, weight_decay=0.0)
    recorded = smupar.record_updates(model, plan, optimizer)
    get_state_dict(model, optimizer)
    assert recorded.step == 0


def test_layer_that_gets_no_tokens_keeps_its_inputs():
    model = Net(64)
    plan = smupar.parameterize(model, base=Net(16))
    recorded = smupar.record_updates(model, plan, adamw(model, plan, weight_decay=0.0))
    model.blocks[0](torch.ones(3, 64))
    model.blocks[0](torch.zeros(0, 64))
    assert bool((recorded.probes["blocks.0.weight"].inputs == 1).all())


def test_copy_of_a_measured_model_is_measured_for_itself():
    model, plan = make()
    smupar.record_updates(model, plan, optimizer := adamw(model, plan, weight_decay=0.0))
    twin = copy.deepcopy(model)
    smupar.attach(twin, plan)
    recorded = smupar.record_updates(twin, plan, own := adamw(twin, plan, weight_decay=0.0))
    for name, module in twin.named_modules():
        assert len(module._forward_pre_hooks) == len(model.get_submodule(name)._forward_pre_hooks)
    make_step(twin, own, batch(0))
    assert recorded.trace.num_steps == 1
    with pytest.raises(ValueError, match="measured already"):
        smupar.record_updates(model, plan, optimizer)
