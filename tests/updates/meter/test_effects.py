"""What a step does to the output of a layer: measured for every kind of layer, optimizer and loop."""

import pytest
import torch
import torch.nn.functional as F
from lion_pytorch import Lion
from torch import nn

import smupar
from smupar.plan.facts.optimizers import family_of
from smupar.updates.law import LAW
from smupar.updates.meter import UpdatesWarning
from smupar.updates.probe import NUM_TOKENS, some_rows
from smupar.updates.trace import Trace
from tests.support.loops import OPTIMIZERS, adamw, assert_same_tensors, loss_of, make_step, optimizers_of, used_lrs, weights_of
from tests.support.models import CLASSES
from tests.updates.measured import Attending, Net, batch, inputs_of, make, ready, rms, started, train, used_rows


class Images(nn.Module):
    """A hidden convolution, with a stride."""

    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.mix = nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.last(F.relu(self.mix(F.relu(self.first(x)))).mean((2, 3)))


class Transposed(nn.Module):
    """A hidden layer that stores (in, out)."""

    def __init__(self, width=32):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.first = nn.Linear(6, width)
        self.up = Conv1D(2 * width, width)
        self.down = Conv1D(width, 2 * width)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.last(F.relu(self.down(F.relu(self.up(F.relu(self.first(x)))))))


@pytest.mark.parametrize("size", [40, 200])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_effect_is_the_change_of_the_output_over_the_base_learning_rate(name, size):
    model, plan = make()
    optimizers = optimizers_of(name, model, plan)
    (_, lr, _), decay = OPTIMIZERS[name], 0.1
    names = ["blocks.0.weight", "blocks.1.weight"]
    with smupar.record_updates(model, plan, optimizers) as trace:
        expected = {key: [] for key in names}
        for number in range(3):
            x, before = inputs_of(model, names, batch(number, size)[0]), weights_of(model)
            train(model, optimizers, [number], size=size)
            for key in names:
                row, new = plan[key], model.get_parameter(key).detach().double()
                # Adam, SGD and Adagrad add the decay to the gradient, the others shrink the weights by LR x decay.
                family = family_of(name)
                shrunk = (
                    lr * row.lr_factor(family) * decay * row.decay_factor(family) if name in ("adamw", "lion", "muon") else 0
                )
                update = new - (1 - shrunk) * before[key].double()
                expected[key].append(rms(used_rows(x[key]) @ update.T) / lr)
    assert trace.at == [0, 1, 2]
    assert trace.num_steps == 3
    assert trace.optimizer == name
    assert trace.shapes == dict.fromkeys(names, (32, 32))
    for key in names:
        assert trace.effects[key] == pytest.approx(expected[key], rel=1e-4)


def first_effects(name, weight_decay):
    model, plan = make()
    optimizers = optimizers_of(name, model, plan, weight_decay=weight_decay, decay="coupled")
    with smupar.record_updates(model, plan, optimizers) as trace:
        train(model, optimizers, [0])
    return [values[0] for values in trace.effects.values()], weights_of(model)["blocks.0.weight"]


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_decoupled_decay_is_kept_out(name):
    with_decay, weight = first_effects(name, 0.1)
    without, other = first_effects(name, 0.0)
    assert not torch.equal(weight, other)
    assert with_decay == pytest.approx(without, rel=1e-4)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_coupled_decay_is_part_of_the_update(name):
    with_decay, _ = first_effects(name, 0.1)
    without, _ = first_effects(name, 0.0)
    assert with_decay != pytest.approx(without, rel=1e-3)


def test_coupled_decay_of_adam_is_part_of_the_update():
    """Without a gradient to speak of, a step of Adam is the learning rate times the sign of the weight."""
    model, plan = make(density=1.0)
    optimizer = torch.optim.Adam(smupar.param_groups(model, plan, lr=0.01, weight_decay=1e6, decay="coupled", optimizer="adam"))
    x, before = inputs_of(model, ["blocks.0.weight"], batch(0)[0]), weights_of(model)["blocks.0.weight"]
    with smupar.record_updates(model, plan, optimizer) as trace:
        train(model, optimizer, [0])
    expected = rms(used_rows(x["blocks.0.weight"]) @ before.double().sign().T) * plan["blocks.0.weight"].lr_factor("adam")
    assert trace.effects["blocks.0.weight"][0] == pytest.approx(expected, rel=1e-3)


def test_effect_is_per_unit_of_the_scheduled_learning_rate():
    """A step of Lion is its learning rate: half of it makes half the change, and the same effect."""
    traces = []
    for share in (1.0, 0.5):
        model, plan = make()
        optimizer = Lion(smupar.param_groups(model, plan, lr=0.002, optimizer="lion"))
        recorder = smupar.record_updates(model, plan, optimizer)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _, share=share: share)
        train(model, optimizer, [0])
        traces.append(recorder.trace)
    assert traces[1].effects["blocks.0.weight"] == pytest.approx(traces[0].effects["blocks.0.weight"], rel=1e-3)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("density", [1.0, 0.5])
def test_recording_does_not_change_the_run(name, density):
    models = []
    for records in (True, False):
        model, plan = make(density=density)
        optimizers = optimizers_of(name, model, plan)
        if records:
            smupar.record_updates(model, plan, optimizers)
        train(model, optimizers, range(5))
        models.append(model)
    assert_same_tensors(*map(weights_of, models))


def test_first_twenty_steps_are_measured_then_every_fifth(proxy):
    assert proxy.at == [*range(20), 20, 25, 30, 35]
    assert proxy.num_steps == 40
    assert [LAW.is_measured(number) for number in (19, 20, 21, 25)] == [True, True, False, True]


def test_step_without_a_learning_rate_is_not_measured():
    model, _, optimizer, recorder = started()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.0 if number in (0, 3) else 1.0)
    for number in range(5):
        train(model, optimizer, [number])
        scheduler.step()
    assert recorder.trace.at == [1, 2, 4]
    assert recorder.trace.num_steps == 5
    assert not recorder.trace.diverged


def test_validation_between_steps_leaves_no_inputs_behind():
    traces = []
    for validates in (True, False):
        model, plan, optimizer = ready()
        with smupar.record_updates(model, plan, optimizer) as trace:
            for number in range(3):
                optimizer.zero_grad()
                loss_of(model, batch(number)).backward()
                if validates:
                    with torch.no_grad():
                        model(batch(99)[0])
                optimizer.step()
        traces.append(trace)
    assert traces[0] == traces[1]


def test_convolution_is_measured_over_all_places_of_the_first_images():
    model, plan, optimizer = ready(Images)
    pair = batch(0, 9, (3, 6, 6))
    x, before = inputs_of(model, ["mix.weight"], pair[0])["mix.weight"], weights_of(model)["mix.weight"].double()
    with smupar.record_updates(model, plan, optimizer) as trace:
        make_step(model, optimizer, pair)
    update = model.mix.weight.detach().double() - before
    images = x[: -(-NUM_TOKENS // 36)]
    patches = F.unfold(images, 3, padding=1, stride=2)
    expected = rms(torch.einsum("oi,nip->nop", update.flatten(1), patches)) / 0.01
    assert list(trace.effects) == ["mix.weight"]
    assert trace.effects["mix.weight"] == [pytest.approx(expected, rel=1e-4)]


def test_number_and_size_of_images_may_change_while_recording():
    model, plan, optimizer = ready(Images)
    with smupar.record_updates(model, plan, optimizer) as trace:
        for number, (size, side) in enumerate([(9, 6), (2, 6), (9, 8)]):
            make_step(model, optimizer, batch(number, size, (3, side, side)))
    assert len(trace.effects["mix.weight"]) == 3
    assert not trace.diverged


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # when transformers is imported
def test_layers_that_store_in_before_out_are_measured():
    model, plan, optimizer = ready(Transposed)
    names = ["up.weight", "down.weight"]
    x, before = inputs_of(model, names, batch(0)[0]), weights_of(model)
    with smupar.record_updates(model, plan, optimizer) as trace:
        train(model, optimizer, [0])
    for name in names:
        update = model.get_parameter(name).detach().double() - before[name].double()
        assert trace.effects[name] == [pytest.approx(rms(used_rows(x[name]) @ update) / 0.01, rel=1e-4)]


def test_layers_that_cannot_be_measured_warn_and_keep_the_factor_of_the_plan():
    model, plan = make(Attending)
    plan.settle("attention_scale")
    optimizer = adamw(model, plan, weight_decay=0.0)
    trace = Trace(4, [0, 1, 2, 3], {"mix.weight": [2.0] * 4}, {}, "adamw")
    with pytest.warns(UpdatesWarning, match=r"cannot be measured \(attention\.in_proj_weight"):
        follower = smupar.follow_updates(model, plan, optimizer, trace=trace)
    used = used_lrs(optimizer)
    train(model, optimizer, range(3))
    assert follower.rates.measured.keys() == {"mix.weight"}
    for name in ("attention.in_proj_weight", "attention.out_proj.weight"):
        assert used[name] == 0.01 * plan[name].lr_factor("adam")


def test_layer_that_gets_no_tokens_is_not_an_error_of_the_user():
    """As an expert that no token was sent to: its weights do not move either."""

    class Skipping(Net):
        def forward(self, x):
            return self.last(F.relu(self.blocks[0](F.relu(self.first(x)))))

    model, plan, optimizer = ready(Skipping)
    with smupar.record_updates(model, plan, optimizer) as trace:
        train(model, optimizer, range(2))
    assert trace.num_steps == 2


def trace_of(way, steps=3):
    model, _, optimizer, recorder = started(None, saves=way == "checkpointed")
    called = torch.compile(model, backend=way) if way in ("eager", "aot_eager") else model
    for number in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16"):
            loss = loss_of(called, batch(number))
        loss.backward()
        optimizer.step()
    return recorder.trace


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
@pytest.mark.parametrize("way", ["checkpointed", "eager", "aot_eager"])
def test_trace_is_the_same_with_checkpointed_and_compiled_layers(way):
    ours, plain = trace_of(way), trace_of("plain")
    for name, effects in plain.effects.items():
        assert ours.effects[name] == pytest.approx(effects, rel=1e-4)


def test_trace_under_autocast_is_that_of_fp32_up_to_rounding():
    ours, plain = trace_of("bf16"), trace_of("plain")
    assert ours != plain
    for name, effects in plain.effects.items():
        assert ours.effects[name] == pytest.approx(effects, rel=0.05)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_convolutions_are_measured():
    traces = []
    for compiles in (True, False):
        model, _, optimizer, recorder = started(None, Images)
        called = torch.compile(model, backend="aot_eager") if compiles else model
        for number in range(2):
            make_step(called, optimizer, batch(number, 9, (3, 6, 6)))
        traces.append(recorder.trace.effects["mix.weight"])
    assert traces[0] == pytest.approx(traces[1], rel=1e-4)


def test_gradient_accumulation_measures_with_the_inputs_of_the_last_micro_batch():
    model, plan, optimizer = ready()
    halves = [batch(0), batch(1)]
    x, before = inputs_of(model, ["blocks.0.weight"], halves[1][0]), weights_of(model)["blocks.0.weight"].double()
    with smupar.record_updates(model, plan, optimizer) as trace:
        for half in halves:
            (loss_of(model, half) / 2).backward()
        optimizer.step()
    update = model.blocks[0].weight.detach().double() - before
    expected = rms(used_rows(x["blocks.0.weight"]) @ update.T) / 0.01
    assert trace.effects["blocks.0.weight"] == [pytest.approx(expected, rel=1e-4)]


def _closure_effects(*, in_step):
    torch.manual_seed(0)
    model = Net()
    plan = smupar.parameterize(model, base=Net(16), density=1 / 2)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=1e-3))
    with smupar.record_updates(model, plan, optimizer) as trace:
        for _ in range(3):
            x = torch.randn(32, 6)

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            if in_step:
                assert optimizer.step(closure) > 0
            else:
                closure()
                optimizer.step()
    return trace.effects


def test_step_with_a_closure_is_measured_with_the_inputs_of_its_own_forward_pass():
    assert _closure_effects(in_step=True) == _closure_effects(in_step=False)


class Keyword(Net):
    def forward(self, x):
        x = F.relu(self.first(x))
        for block in self.blocks:
            x = x + F.relu(block(input=x))
        return self.last(x)


@pytest.mark.parametrize("how", ["keyword", "one row", "bfloat16", "double"])
def test_updates_are_measured_however_a_layer_is_called(how):
    make = Keyword if how == "keyword" else Net
    model = make()
    plan = smupar.parameterize(model, base=make(16), density=1 / 2)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=1e-3))
    dtype = {"bfloat16": torch.bfloat16, "double": torch.float64}.get(how, torch.float32)
    with smupar.record_updates(model, plan, optimizer) as trace:
        model.to(dtype)
        model(torch.randn(6 if how == "one row" else (4, 6), dtype=dtype)).square().mean().backward()
        optimizer.step()
    assert all(values[0] > 0 for values in trace.effects.values())


def test_inputs_come_from_all_positions_of_a_batch():
    """The first 128 of 8 sequences of 64 tokens would all be of two of them."""
    rows = some_rows(torch.arange(8 * 64.0).view(8, 64, 1)).flatten()
    assert len(set(rows.tolist())) == NUM_TOKENS
    assert set((rows // 64).tolist()) == set(range(8))
    assert set((rows % 64).tolist()) == set(range(64))
