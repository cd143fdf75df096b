"""The seam round a step: its phases and their order, and masked weights under optimizers that mix entries."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.model.hooks import mask_updates
from smupar.model.seam import AFTER, BEFORE, optimizers, seam_of
from tests.support.models import sequential

HIDDEN = ("2.weight", "4.weight")


def make(density=1 / 4, seed=0):
    torch.manual_seed(seed)
    model = sequential(32, 2)
    return model, smupar.parameterize(model, base=sequential(16, 2), density=density, seed=seed)


class Spread(torch.optim.Optimizer):
    """Gives every weight of a matrix the mean gradient of its row: nobody has heard of it, and it mixes entries."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = parameter.grad.mean(-1, keepdim=True) if parameter.ndim > 1 else parameter.grad
                    parameter.sub_(float(group["lr"]) * update)


class Child(Spread):
    """Its step is one of its parent's and a little more: torch runs hooks round both."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1e-3)


class Sharp(torch.optim.Optimizer):
    """As sharpness-aware minimisation has it: a wrapper with groups of its own that steps another optimizer."""

    def __init__(self, base_optimizer):
        self.base_optimizer = base_optimizer
        super().__init__(base_optimizer.param_groups, {})
        self.param_groups = base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.base_optimizer.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1e-3)


def muon(model, plan):
    groups = smupar.param_groups(model, plan, lr=0.02, optimizer="muon", only="hidden")
    return [torch.optim.Muon(groups), torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, only="rest"))]


MIXING = {
    "Muon": muon,
    "Spread": lambda model, plan: [Spread(smupar.param_groups(model, plan, lr=0.01, optimizer="sgd"))],
    "Child": lambda model, plan: [Child(smupar.param_groups(model, plan, lr=0.01, optimizer="sgd"))],
    "Sharp": lambda model, plan: [Sharp(Spread(smupar.param_groups(model, plan, lr=0.01, optimizer="sgd")))],
}


def backward(model, number):
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def num_off_mask(model):
    layers = [model.get_submodule(name.removesuffix(".weight")) for name in HIDDEN]
    return sum(int(layer.weight.detach()[~layer.weight_mask].count_nonzero()) for layer in layers)


def train(models, all_, numbers, sparsifier=None):
    """Says how many weights off the masks were not 0, after each step."""
    stray = []
    for number in numbers:
        for model in models:
            backward(model, number)
        for optimizer in all_:
            optimizer.step()
            optimizer.zero_grad()
        stray.append(sum(map(num_off_mask, models)))
        if sparsifier is not None:
            sparsifier.step()
            stray.append(sum(map(num_off_mask, models)))
    return stray


# Weights off the mask


@pytest.mark.parametrize("kind", MIXING)
def test_nothing_but_groups_keeps_off_mask_weights_at_zero(kind):
    model, plan = make()
    before = {name: model.get_parameter(name).detach().clone() for name in HIDDEN}
    all_ = MIXING[kind](model, plan)
    assert train([model], all_, range(4)) == [0] * 4
    for name in HIDDEN:
        mask = model.get_submodule(name.removesuffix(".weight")).weight_mask
        assert (model.get_parameter(name) != before[name])[mask].float().mean() > 0.5  # some neurons are silent


@pytest.mark.parametrize("kind", MIXING)
def test_optimizers_that_mix_would_train_off_mask_weights(kind):
    # Or the tests here would prove nothing: hooks of an optimizer run before the seam puts the mask on.
    model, plan = make()
    all_ = MIXING[kind](model, plan)
    seen = []
    all_[0].register_step_post_hook(lambda *_: seen.append(num_off_mask(model)))
    train([model], all_, [0])
    assert seen[0] > 500


@pytest.mark.parametrize("kind", ["Muon", "Spread", "Child"])
@pytest.mark.parametrize("moved", ["follow", "RigL", "SET", "GMP", "RigL and follow"])
def test_off_mask_weights_stay_zero_where_rates_and_masks_move(kind, moved, tmp_path):
    model, plan = make()
    recorded = MIXING[kind](model, plan)
    with smupar.record_updates(model, plan, recorded) as trace:
        train([model], recorded, range(6))
    model, plan = make()
    all_ = MIXING[kind](model, plan)
    if "follow" in moved:
        smupar.follow_updates(model, plan, all_, trace=trace)
    sparsifier = None
    if "RigL" in moved or moved == "SET":
        sparsifier = getattr(smupar, moved.split()[0])(model, plan, all_, every=2, stop=6)
    if moved == "GMP":
        sparsifier = smupar.GMP(model, plan, all_, density=1 / 8, every=2, stop=6)
    assert set(train([model], all_, range(6), sparsifier)) == {0}


@pytest.mark.parametrize("kind", [torch.optim.Muon, Spread])
def test_one_optimizer_of_two_models_keeps_both_on_their_masks(kind):
    pairs = [make(), make(seed=1)]
    name = {"Muon": "muon", "Spread": "sgd"}[kind.__name__]
    groups = [smupar.param_groups(model, plan, lr=0.02, optimizer=name, only="hidden") for model, plan in pairs]
    assert train([model for model, _ in pairs], [kind([group for own in groups for group in own])], range(3)) == [0] * 3


def test_copies_of_an_optimizer_mask_as_well():
    for remade in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        model, plan = make()
        all_ = MIXING["Spread"](model, plan)
        train([model], all_, [0])
        other, its = remade((model, all_))
        smupar.attach(other, plan)
        assert train([other], its, range(3)) == [0] * 3


def test_masks_are_put_on_again_after_a_step_that_failed():
    model, plan = make()
    optimizer = MIXING["Spread"](model, plan)[0]
    smupar.follow_updates(model, plan, optimizer, trace=smupar.Trace(4, [0], {n: [1.0] for n in HIDDEN}, {}, "spread"))
    rates = [group["lr"] for group in optimizer.param_groups]
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    backward(model, 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()
    assert train([model], [optimizer], range(3)) == [0] * 3
    assert [group["lr"] for group in optimizer.param_groups] == rates


def test_optimizer_that_is_known_to_leave_zeros_alone_is_left_alone():
    model, plan = make()
    for kind in (torch.optim.AdamW, torch.optim.SGD, type("Prodigy", (torch.optim.AdamW,), {})):
        optimizer = kind(smupar.param_groups(model, plan, lr=0.01, optimizer="adamw"))
        train([model], [optimizer], [0])
        assert seam_of(optimizer).owners("mask") == []


def test_attach_masks_an_optimizer_whose_name_is_known_and_which_mixes():
    class AdamW(Spread):
        pass

    model, plan = make()
    optimizer = AdamW(smupar.param_groups(model, plan, lr=0.01))
    smupar.attach(model, plan, optimizer)
    assert train([model], [optimizer], range(2)) == [0] * 2


def test_compiled_step_keeps_off_mask_weights_at_zero():
    torch._dynamo.reset()
    model, plan = make()
    optimizer = MIXING["Spread"](model, plan)[0]
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(2):
        backward(model, number)
        step()
        optimizer.zero_grad()
        assert num_off_mask(model) == 0


# Phases


def test_phases_run_in_their_order_whoever_came_first():
    model, plan = make()
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    seam, seen = seam_of(optimizer), []
    for name in reversed((*BEFORE, *AFTER)):
        seam.add(test_phases_run_in_their_order_whoever_came_first, **{name: lambda _, name=name: seen.append(name)})
    optimizer.register_step_pre_hook(lambda *_: seen.append("its own, before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("its own, after"))
    train([model], [optimizer], [0])
    assert seen == [*BEFORE, "its own, before", "its own, after", *AFTER]


def test_seam_can_be_printed():
    smupar.sparsify_storage(*make(), backend="csr")  # from now on every optimizer of the process has two phases
    replaced = "before: refuse_replaced (_refuse_replaced), fit_state (_fit_state)"
    model, plan = make()
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    assert str(seam_of(optimizer)) == f"{replaced}\nafter: nothing"
    smupar.RigL(model, plan, optimizer, every=2, stop=4, restart_bias_correction=True)
    recorder = smupar.record_updates(model, plan, optimizer)
    smupar.audit(model, plan, optimizer)
    assert str(seam_of(optimizer)).splitlines() == [
        f"{replaced}, check_ratios (_Guard), set_rates (LayerRates), look (Recorder)",
        "after: correct (Sequential), measure (Recorder), restore_rates (LayerRates), count (RigL, _Guard)",
    ]
    recorder.remove()
    assert "Recorder" not in str(seam_of(optimizer))
    assert str(seam_of(MIXING["Muon"](model, plan)[0])) == f"{replaced}\nafter: mask (mask_updates)"


def test_phase_of_an_owner_is_replaced_and_an_unknown_one_refused():
    model, plan = make()
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    seam, seen = seam_of(optimizer), []
    for value in (1, 2):
        seam.add("me", count=lambda _, value=value: seen.append(value))
    train([model], [optimizer], [0])
    seam.remove("me")
    train([model], [optimizer], [1])
    assert seen == [2]
    with pytest.raises(ValueError, match="a step has no phase 'counted': choose one of refuse_replaced, "):
        seam.add("me", counted=print)


def test_phase_for_every_optimizer_reaches_old_and_new_ones(monkeypatch):
    from smupar.model import seam

    monkeypatch.setattr(seam, "EVERYWHERE", {})
    seen = []
    old, new = (torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(2))
    seam_of(old)
    seam.on_every_step("count", seen.append, lambda optimizer: optimizer in (old, new))
    for optimizer in (old, new):
        optimizer.step()
    assert [step.optimizer for step in seen] == [old, new]
    others = []
    seam.on_every_step("count", others.append, lambda optimizer: optimizer is old)
    old.step()
    assert len(seen) == 3
    assert len(others) == 1  # a phase of one name does not take the place of another


def test_rates_are_restored_and_steps_counted_where_a_measurement_raises():
    model, plan = make()
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    gmp = smupar.GMP(model, plan, optimizer, density=1 / 8, every=1, stop=6, correction="fixed")
    rates = [group["lr"] for group in optimizer.param_groups]
    seam_of(optimizer).add("me", measure=lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train([model], [optimizer], [0])
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert gmp.step()


def test_what_is_measured_has_been_masked():
    model, plan = make()
    optimizer = MIXING["Spread"](model, plan)[0]
    trace = smupar.record_updates(model, plan, optimizer).trace
    before, inputs = model[2].weight.detach().clone(), []
    model[2].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    train([model], [optimizer], [0])
    change = inputs[0] @ (model[2].weight.detach() - before).T
    assert trace.effects["2.weight"] == [pytest.approx(float(change.square().mean().sqrt()) / 0.01, rel=1e-3)]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_closure_runs_once_and_what_looks_comes_after_it(by_keyword):
    model, plan = make()
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    seen = []
    seam_of(optimizer).add("me", set_rates=lambda _: seen.append("rates"), look=lambda _: seen.append("look"))

    def closure():
        seen.append("closure")
        return backward(model, 0)

    loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    assert loss > 0
    assert seen == ["rates", "closure", "look"]


def test_whether_a_step_was_one_is_asked_once(monkeypatch):
    from smupar.model import seam

    asked = []
    monkeypatch.setattr(seam, "step_was_noop", lambda optimizer: bool(asked.append(optimizer)))
    model, plan = make()
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    smupar.RigL(model, plan, optimizer, every=2, stop=4, restart_bias_correction=True)
    smupar.record_updates(model, plan, optimizer)
    train([model], [optimizer], range(3))
    assert asked == [optimizer] * 3


def test_sparsifier_may_be_stepped_by_a_hook_of_the_optimizer():
    masks = []
    for by_hook in (False, True):
        model, plan = make()
        optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
        trace = smupar.record_updates(model, plan, optimizer).trace
        rigl = smupar.RigL(model, plan, optimizer, every=2, stop=6)
        if by_hook:
            optimizer.register_step_post_hook(lambda *_, rigl=rigl: rigl.step())
        train([model], [optimizer], range(7), None if by_hook else rigl)
        masks.append((model[2].weight_mask.clone(), rigl.num_steps, trace.effects))
    assert masks[0][1:] == masks[1][1:]
    assert torch.equal(masks[0][0], masks[1][0])


def test_optimizers_are_listed_without_their_wrappers():
    model, plan = make()
    inner = Spread(smupar.param_groups(model, plan, lr=0.01, optimizer="sgd"))
    assert optimizers(Sharp(Sharp(inner))) == [inner]
    assert optimizers(None) == []
    assert mask_updates in seam_of(inner).owners("mask")
