"""Measured updates: what a step does to a layer's output, written down for one model and followed by another."""

import copy
import json
import math
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lion_pytorch import Lion
from torch import nn
from torch.utils.checkpoint import checkpoint

import smupar
from smupar.lm.config.run import ModelConfig, RunConfig
from smupar.lm.data import batches as data
from smupar.lm.model.gpt import build
from smupar.lm.run.optimizers import make_optimizers
from smupar.lm.run.step import next_token_loss
from smupar.model.parameterize import mask_of
from smupar.model.seam import seam_of
from smupar.optim.layer_rates import group_of_weight
from smupar.plan.optimizers import family_of
from smupar.updates.meter import UpdatesWarning
from smupar.updates.probe import NUM_TOKENS
from smupar.updates.trace import Guide, Trace, due, same_moment

CLASSES = 5


class Net(nn.Module):
    """Hidden weights ``blocks.0.weight``, ``blocks.1.weight``, ..., all of one kind."""

    def __init__(self, width=32, depth=2, *, saves=False):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, CLASSES)
        self.saves = saves

    def forward(self, x):
        x = F.relu(self.first(x))
        for block in self.blocks:
            y = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
            x = x + F.relu(y)
        return self.last(x)


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


class Attending(nn.Module):
    """Attention that uses its weights without calling their layers, beside a plain layer."""

    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.attention = nn.MultiheadAttention(width, width // 8, batch_first=True)
        self.mix = nn.Linear(width, width)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.first(x)[:, None].expand(-1, 3, -1)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(F.relu(self.mix(x)))[:, 0]


def base(kind=Net, **options):
    with torch.device("meta"):
        return kind(16, **options)


def make(kind=Net, density=0.5, *, width=32, seed=0, rule="smupar", **options):
    """A parameterized model of twice the base width, and its plan."""
    torch.manual_seed(seed)
    model = kind(width, **options)
    settings = {"delta": kind(64, **options)} if width == 16 else {}
    return model, smupar.parameterize(model, base=base(kind, **options), density=density, seed=seed, rule=rule, **settings)


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, 0.01, 0.1, {}),
    "adam": (torch.optim.Adam, 0.01, 0.1, {}),
    "sgd": (torch.optim.SGD, 0.1, 0.1, {"momentum": 0.9}),
    "lion": (Lion, 0.002, 0.1, {}),
    "adagrad": (torch.optim.Adagrad, 0.05, 0.1, {}),
    "muon": (torch.optim.Muon, 0.02, 0.1, {}),
}


def make_all(name, model, plan, *, lr=None, weight_decay=None, decay="independent"):
    """One optimizer, or Muon and an AdamW, as a user would make them."""
    kind, usual_lr, usual_decay, options = OPTIMIZERS[name]
    settings = {"lr": usual_lr if lr is None else lr, "optimizer": name, "decay": decay}
    settings["weight_decay"] = usual_decay if weight_decay is None else weight_decay
    if name != "muon":
        return [kind(smupar.param_groups(model, plan, **settings), **options)]
    hidden = kind(smupar.param_groups(model, plan, **settings, only="hidden"), **options)
    rest = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, only="rest"))
    smupar.attach(model, plan, hidden)
    return [hidden, rest]


def used_lrs(optimizer):
    """The learning rates of hidden weights at the last step, by name: hooks of an optimizer run after the seam's."""
    used = {}
    optimizer.register_step_pre_hook(
        lambda *_: used.update({name: float(group["lr"]) for name, group in group_of_weight(optimizer).items()})
    )
    return used


def make_adamw(model, plan, lr=0.01, **settings):
    return torch.optim.AdamW(smupar.param_groups(model, plan, lr=lr, **settings))


def batch(step, size=40, shape=(6,)):
    rng = torch.Generator().manual_seed(step)
    return torch.randn(size, *shape, generator=rng), torch.randint(CLASSES, (size,), generator=rng)


def loss_of(model, pair):
    return F.cross_entropy(model(pair[0]), pair[1])


def step(model, optimizer, pair):
    every = optimizer if isinstance(optimizer, list) else [optimizer]
    for one in every:
        one.zero_grad()
    loss_of(model, pair).backward()
    for one in every:
        one.step()


def train(model, optimizer, steps, **options):
    for number in steps:
        step(model, optimizer, batch(number, **options))


def recorded(steps=6, *, kind=Net, width=16, name="adamw", lr=None, weight_decay=0.0, depth=None, **options):
    """The trace of a dense proxy of base width."""
    model, plan = make(kind, 1.0, width=width, **({} if depth is None else {"depth": depth}))
    optimizers = make_all(name, model, plan, lr=lr, weight_decay=weight_decay)
    with smupar.record_updates(model, plan, optimizers) as trace:
        train(model, optimizers, range(steps), **options)
    return trace


@pytest.fixture(scope="module")
def proxy():
    return recorded(40)


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(model, other):
    theirs = weights_of(other)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights_of(model).items())


def assert_untouched(model):
    """Nothing of this package but what parameterize puts there."""
    assert not [name for name, _ in model.named_buffers() if "smupar_input" in name]
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert not [hook for hook in hooks if type(getattr(hook, "__self__", None)).__name__ == "_Probe"]


def inputs_of(model, names, x):
    """What every layer gets, seen from outside."""
    seen, hooks = {}, []
    for name in names:
        keep = lambda module, args, name=name: seen.__setitem__(name, args[0].detach().double())  # noqa: E731
        hooks.append(model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(keep))
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return seen


def used_rows(x):
    rows = x.flatten(0, -2)
    return rows[torch.arange(128) % len(rows)]


def rms(x):
    return x.square().mean().sqrt().item()


# What is measured


@pytest.mark.parametrize("size", [40, 200])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_effect_is_the_change_of_the_output_over_the_base_learning_rate(name, size):
    model, plan = make()
    optimizers = make_all(name, model, plan)
    _, lr, decay, _ = OPTIMIZERS[name]
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
    optimizers = make_all(name, model, plan, weight_decay=weight_decay, decay="coupled")
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
        optimizers = make_all(name, model, plan)
        if records:
            smupar.record_updates(model, plan, optimizers)
        train(model, optimizers, range(5))
        models.append(model)
    assert_same_weights(*models)


def test_first_twenty_steps_are_measured_then_every_fifth(proxy):
    assert proxy.at == [*range(20), 20, 25, 30, 35]
    assert proxy.num_steps == 40
    assert [due(number) for number in (19, 20, 21, 25)] == [True, True, False, True]


def test_step_without_a_learning_rate_is_not_measured():
    model, plan = make()
    optimizer = make_adamw(model, plan)
    recorder = smupar.record_updates(model, plan, optimizer)
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
        model, plan = make()
        optimizer = make_adamw(model, plan)
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


# Kinds of layers


def test_convolution_is_measured_over_all_places_of_the_first_images():
    model, plan = make(Images)
    optimizer = make_adamw(model, plan)
    pair = batch(0, 9, (3, 6, 6))
    x, before = inputs_of(model, ["mix.weight"], pair[0])["mix.weight"], weights_of(model)["mix.weight"].double()
    with smupar.record_updates(model, plan, optimizer) as trace:
        step(model, optimizer, pair)
    update = model.mix.weight.detach().double() - before
    images = x[: -(-NUM_TOKENS // 36)]
    patches = F.unfold(images, 3, padding=1, stride=2)
    expected = rms(torch.einsum("oi,nip->nop", update.flatten(1), patches)) / 0.01
    assert list(trace.effects) == ["mix.weight"]
    assert trace.effects["mix.weight"] == [pytest.approx(expected, rel=1e-4)]


def test_number_and_size_of_images_may_change_while_recording():
    model, plan = make(Images)
    optimizer = make_adamw(model, plan)
    with smupar.record_updates(model, plan, optimizer) as trace:
        for number, (size, side) in enumerate([(9, 6), (2, 6), (9, 8)]):
            step(model, optimizer, batch(number, size, (3, side, side)))
    assert len(trace.effects["mix.weight"]) == 3
    assert not trace.diverged


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # when transformers is imported
def test_layers_that_store_in_before_out_are_measured():
    model, plan = make(Transposed)
    optimizer = make_adamw(model, plan)
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
    optimizer = make_adamw(model, plan)
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

    model, plan = make(Skipping)
    optimizer = make_adamw(model, plan)
    with smupar.record_updates(model, plan, optimizer) as trace:
        train(model, optimizer, range(2))
    assert trace.num_steps == 2


# How a model is trained


def trace_of(way, steps=3):
    model, plan = make(saves=way == "checkpointed")
    optimizer = make_adamw(model, plan)
    recorder = smupar.record_updates(model, plan, optimizer)
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
        model, plan = make(Images)
        optimizer = make_adamw(model, plan)
        recorder = smupar.record_updates(model, plan, optimizer)
        called = torch.compile(model, backend="aot_eager") if compiles else model
        for number in range(2):
            step(called, optimizer, batch(number, 9, (3, 6, 6)))
        traces.append(recorder.trace.effects["mix.weight"])
    assert traces[0] == pytest.approx(traces[1], rel=1e-4)


def test_gradient_accumulation_measures_with_the_inputs_of_the_last_micro_batch():
    model, plan = make()
    optimizer = make_adamw(model, plan)
    halves = [batch(0), batch(1)]
    x, before = inputs_of(model, ["blocks.0.weight"], halves[1][0]), weights_of(model)["blocks.0.weight"].double()
    with smupar.record_updates(model, plan, optimizer) as trace:
        for half in halves:
            (loss_of(model, half) / 2).backward()
        optimizer.step()
    update = model.blocks[0].weight.detach().double() - before
    expected = rms(used_rows(x["blocks.0.weight"]) @ update.T) / 0.01
    assert trace.effects["blocks.0.weight"] == [pytest.approx(expected, rel=1e-4)]


# The factor

GPT = RunConfig(
    model=ModelConfig(width=64, depth=2, head_dim=32), base_width=64, sparsity=0.0, lr=2**-7, seq_len=64, batch_size=8
)


@pytest.fixture(scope="module")
def text():
    return data.open_text(GPT)


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
        pair = data.batch(text.train, seed=config.seed, step=number, batch_size=config.batch_size, seq_len=config.seq_len)
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
        model, plan = make(width=128, density=0.125, rule="smupar-init-only")
        optimizer = make_adamw(model, plan)
        meter = start(model, plan, optimizer, trace if follows else None)
        train(model, optimizer, range(30))
        pairs = [(own[10:], trace.effects[name][10:]) for name, own in meter.trace.effects.items()]
        return [statistics.mean(math.log2(x / y) for x, y in zip(own, wanted, strict=True)) for own, wanted in pairs]

    assert excess(False) == pytest.approx([-3, -3], abs=1)
    assert excess(True) == pytest.approx([0, 0], abs=0.3)


def test_factor_is_the_ratio_of_two_running_means():
    """0.8 old, 0.2 new, of what is wanted and of what a unit of learning rate does."""
    model, plan = make()
    optimizer = make_adamw(model, plan)
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


# During a step, and between


def test_first_step_uses_the_factor_of_the_plan(proxy):
    model, plan = make(density=0.25)
    optimizer = make_adamw(model, plan)
    other, other_plan = make(density=0.25)
    plain = make_adamw(other, other_plan)
    follower = smupar.follow_updates(model, plan, optimizer, trace=proxy)
    assert follower.rates.measured == {}
    train(model, optimizer, [0])
    train(other, plain, [0])
    assert_same_weights(model, other)
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
    model, plan = make(density=0.25)
    optimizer = make_adamw(model, plan)
    other, other_plan = make(density=0.25)
    plain = make_adamw(other, other_plan)
    follower = smupar.follow_updates(model, plan, optimizer, trace=proxy)
    smupar.audit(model, plan, optimizer)
    make_scheduler = SCHEDULERS[kind]
    schedulers = [make_scheduler(one) for one in (optimizer, plain)] if make_scheduler else []
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
    model, plan = make(density=0.25)
    optimizer = make_adamw(model, plan)
    smupar.follow_updates(model, plan, optimizer, trace=proxy)
    smupar.guard(optimizer)
    train(model, optimizer, range(2))
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    with pytest.warns(smupar.LRRatioWarning):
        train(model, optimizer, [2])


def test_step_that_failed_leaves_the_scheduled_learning_rate(proxy):
    model, plan = make(density=0.25)
    optimizer = make_adamw(model, plan)
    smupar.follow_updates(model, plan, optimizer, trace=proxy)
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


@pytest.mark.parametrize("made", ["LambdaLR", "CosineAnnealingLR"])
@pytest.mark.parametrize("follows", [True, False])
def test_scheduler_made_before_is_refused(proxy, made, follows):
    model, plan = make(density=0.5)
    optimizer = make_adamw(model, plan)
    SCHEDULERS[made](optimizer)
    with pytest.raises(ValueError, match=r"a scheduler was made for this optimizer already.* make the scheduler afterwards"):
        start(model, plan, optimizer, proxy if follows else None)
    assert_untouched(model)


@pytest.mark.parametrize("correction", ["moment", "fixed"])
def test_measured_factor_takes_the_place_of_the_correction_of_gmp(proxy, correction):
    model, plan = make(density=1.0)
    optimizer = make_adamw(model, plan)
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


# Traces


def test_trace_goes_through_a_file_and_back_exactly(proxy, tmp_path):
    proxy.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == proxy
    assert Trace.from_json(proxy.to_json()).to_json() == proxy.to_json()
    assert json.loads(proxy.to_json())["format"] == "smupar-trace/1"


def test_trace_of_a_run_that_diverged_is_plain_json(tmp_path):
    wild = Trace(2, [0, 1], {"a.weight": [1.0, math.inf], "b.weight": [math.nan, 2.0]}, {}, "adamw")
    wild.save(tmp_path / "trace.json")
    assert "NaN" not in (tmp_path / "trace.json").read_text()
    back = Trace.load(tmp_path / "trace.json")
    assert back.diverged
    assert back.effects["b.weight"][1] == 2.0
    assert math.isnan(back.effects["b.weight"][0])
    assert not Trace(1, [0], {"a.weight": [1.0]}).diverged


DAMAGED = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a list": lambda text: "[1, 2]",
    "a number": lambda text: "3",
    "another format": lambda text: text.replace("smupar-trace/1", "smupar-trace/9"),
    "no format": lambda text: json.dumps({"num_steps": 3}),
    "a field more": lambda text: text[:-1] + ', "speed": 1}',
    "no shapes": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "shapes"}),
    "effects of another kind": lambda text: json.dumps({**json.loads(text), "effects": [1.0]}),
    "fewer effects than steps": lambda text: json.dumps({**json.loads(text), "effects": {"blocks.0.weight": [1.0]}}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_file_that_is_no_trace_is_refused_by_name(proxy, tmp_path, damage):
    file = tmp_path / "trace.json"
    file.write_text(DAMAGED[damage](proxy.to_json()))
    with pytest.raises(ValueError, match=r"trace\.json: this is no trace in format 'smupar-trace/1'"):
        Trace.load(file)


def test_file_that_is_not_text_is_refused_by_name(tmp_path):
    (tmp_path / "trace.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match=r"trace\.json"):
        Trace.load(tmp_path / "trace.json")


def test_file_that_is_not_there_is_refused_by_name(tmp_path):
    model, plan = make()
    optimizer = make_adamw(model, plan)
    with pytest.raises(ValueError, match=r"the trace .*missing\.json cannot be read: No such file"):
        smupar.follow_updates(model, plan, optimizer, trace=tmp_path / "missing.json")
    assert_untouched(model)


def test_trace_is_followed_from_its_file(proxy, tmp_path):
    proxy.save(tmp_path / "trace.json")
    factors = []
    for trace in (proxy, str(tmp_path / "trace.json"), tmp_path / "trace.json"):
        model, plan = make()
        optimizer = make_adamw(model, plan)
        follower = smupar.follow_updates(model, plan, optimizer, trace=trace)
        train(model, optimizer, range(2))
        factors.append(dict(follower.rates.measured))
    assert factors[0] == factors[1] == factors[2]


@pytest.mark.parametrize("beside", [True, False])
def test_trace_is_drawn_with_and_without_a_proxy(proxy, tmp_path, beside):
    longer = Trace(3, [0, 1, 2], {"blocks.0.weight": [1.0, 2.0, 3.0], "head.weight": [1.0, math.nan, 2.0]})
    longer.plot(tmp_path / "picture.png", proxy=proxy if beside else None)
    picture = (tmp_path / "picture.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


# Other lengths and depths


def test_trace_is_read_between_steps_along_the_logarithm():
    trace = Trace(40, [0, 10, 20], {"a.weight": [1.0, 100.0, 4.0]})
    found = [trace.effect("a.weight", at) for at in (0, 5, 10, 15, 20, 39)]
    assert found == pytest.approx([1, 10, 100, 20, 4, 4])
    assert Trace(40, [3, 10], {"a.weight": [7.0, 100.0]}).effect("a.weight", 0) == 7.0


def test_longer_run_reads_first_steps_by_number_and_the_last_from_the_last():
    trace = Trace(20, [0, 10], {"a.weight": [1.0, 100.0]})
    guide = Guide(trace, ["a.weight"], 40)
    # Step 10 of 40 is step 8 of 20: 1 / 8 = 1 / 10 + 1 / 20 - 1 / 40.
    assert [guide.effect("a.weight", at) for at in (0, 10, 20, 40)] == pytest.approx([1, 100**0.8, 100, 100])
    shorter = Guide(trace, ["a.weight"], 10)  # 3 / 20 = 1 / 5 + 1 / 20 - 1 / 10
    assert [shorter.effect("a.weight", at) for at in (0, 5, 10)] == pytest.approx([1, 100 ** (2 / 3), 100])
    assert Guide(trace, ["a.weight"]).effect("a.weight", 5) == pytest.approx(10)


@pytest.mark.parametrize("lengths", [(1000, 250), (250, 1000), (300, 300)])
def test_moments_of_runs_of_other_lengths(lengths):
    own, other = lengths
    moments = [same_moment(step, own, other) for step in range(own + 1)]
    assert moments[:2] == pytest.approx([0, 1], rel=4e-3)
    assert moments[-1] == pytest.approx(other)
    assert moments == sorted(moments)
    assert [same_moment(step, own, other) for step in (own + 1, 100 * own)] == pytest.approx([other, other])
    assert [same_moment(round(there), other, own) for there in (1, other)] == pytest.approx([1, own], rel=4e-3)  # and back


def test_trace_of_twenty_steps_is_followed_for_forty():
    trace = recorded(20)
    model, plan = make()
    optimizer = make_adamw(model, plan)
    follower = smupar.follow_updates(model, plan, optimizer, trace=trace, steps=40)
    train(model, optimizer, range(40))
    name, mean = "blocks.1.weight", None
    for number in follower.trace.at:
        wanted = trace.effect(name, number / (1 + number / 40))  # 1 / there = 1 / number + 1 / 20 - 1 / 40
        mean = wanted if mean is None else 0.8 * mean + 0.2 * wanted
    assert follower.trace.num_steps == 40
    assert follower.averages[name][0] == pytest.approx(mean, rel=1e-9)


def guide_of(num_own, num_theirs, at=0):
    """Effects 1, 10, 100, ... in the layers of the proxy, as each layer of the target reads them."""
    trace = Trace(1, [0], {f"blocks.{number}.up.weight": [10.0**number] for number in range(num_theirs)})
    names = [f"blocks.{number}.up.weight" for number in range(num_own)]
    guide = Guide(trace, names)
    return [guide.effect(name, at) for name in names]


@pytest.mark.parametrize(
    ("num_own", "num_theirs", "expected"),
    [
        (2, 2, [1, 10]),
        (4, 2, [1, 10 ** (1 / 3), 10 ** (2 / 3), 10]),
        (3, 2, [1, 10**0.5, 10]),
        (2, 3, [1, 100]),
        (3, 4, [1, 10**1.5, 1000]),
        (3, 1, [1, 1, 1]),
        (1, 3, [1]),
        (1, 1, [1]),
    ],
)
def test_other_depth_reads_the_trace_at_the_same_share_of_the_depth(num_own, num_theirs, expected):
    assert guide_of(num_own, num_theirs) == pytest.approx(expected)


def test_every_kind_of_layer_is_read_from_its_own():
    effects = {"blocks.0.up.weight": [1.0], "blocks.0.down.weight": [5.0], "blocks.1.up.weight": [4.0]}
    effects["blocks.1.down.weight"] = [20.0]
    names = [f"blocks.{number}.{kind}.weight" for kind in ("up", "down") for number in range(3)]
    guide = Guide(Trace(1, [0], effects), names)
    assert [guide.effect(name, 0) for name in names] == pytest.approx([1, 2, 4, 5, 10, 20])


@pytest.mark.parametrize("depth", [1, 4])
def test_model_of_another_depth_follows(depth):
    trace = recorded(6)
    model, plan = make(depth=depth)
    optimizer = make_adamw(model, plan)
    follower = smupar.follow_updates(model, plan, optimizer, trace=trace)
    train(model, optimizer, range(3))
    assert len(follower.rates.measured) == depth
    first = [trace.effects["blocks.0.weight"][number] for number in range(3)]
    mean = first[0]
    for value in first[1:]:
        mean = 0.8 * mean + 0.2 * value
    assert follower.averages["blocks.0.weight"][0] == pytest.approx(mean)


# Doubtful traces


def test_absurd_trace_warns_once_and_is_held(proxy):
    for factor, held in ((1e9, 1e4), (1e-9, 1e-4)):
        effects = {name: [value * factor for value in values] for name, values in proxy.effects.items()}
        model, plan = make()
        optimizer = make_adamw(model, plan, lr=1e-6)
        follower = smupar.follow_updates(model, plan, optimizer, trace=replace(proxy, effects=effects))
        with pytest.warns(UpdatesWarning, match=rf"would be .* and is held at {held:g}") as caught:
            train(model, optimizer, range(3))
        assert len(caught) == 1
        assert set(follower.rates.measured.values()) == {held}


def test_trace_of_a_run_that_diverged_warns_and_is_followed_where_it_can_be(proxy):
    effects = {name: [*values[:2], *[math.nan] * (len(values) - 2)] for name, values in proxy.effects.items()}
    model, plan = make()
    optimizer = make_adamw(model, plan)
    with pytest.warns(UpdatesWarning, match="diverged: record one at a smaller learning rate"):
        follower = smupar.follow_updates(model, plan, optimizer, trace=replace(proxy, effects=effects))
    train(model, optimizer, range(2))
    factors = dict(follower.rates.measured)
    train(model, optimizer, range(2, 5))
    assert follower.rates.measured == factors
    assert all(weight.isfinite().all() for weight in weights_of(model).values())


def test_target_that_diverges_keeps_its_last_factor_and_says_so_in_its_trace(proxy):
    model, plan = make()
    optimizer = make_adamw(model, plan)
    follower = smupar.follow_updates(model, plan, optimizer, trace=proxy)
    train(model, optimizer, range(2))
    factors = dict(follower.rates.measured)
    with torch.no_grad():
        model.first.weight.fill_(math.nan)
    train(model, optimizer, [2])
    assert follower.rates.measured == factors
    assert follower.trace.diverged


def test_trace_of_another_optimizer_warns(proxy):
    model, plan = make()
    optimizers = make_all("sgd", model, plan)
    with pytest.warns(UpdatesWarning, match="recorded with adamw, this is sgd"):
        smupar.follow_updates(model, plan, optimizers, trace=proxy)


@pytest.mark.parametrize("doubt", ["optimizer", "diverged", "blind"])
def test_warning_raised_as_an_error_leaves_the_model_alone(proxy, doubt):
    model, plan = make(Attending if doubt == "blind" else Net)
    optimizer = make_adamw(model, plan)
    trace = replace(proxy, optimizer="lion") if doubt == "optimizer" else proxy
    if doubt == "diverged":
        trace = replace(proxy, effects={name: [math.nan] * len(values) for name, values in proxy.effects.items()})
    measure = smupar.record_updates if doubt == "blind" else partial(smupar.follow_updates, trace=trace)
    with pytest.raises(UpdatesWarning):  # warnings are errors here
        measure(model, plan, optimizer)
    assert_untouched(model)


def test_warnings_point_at_the_line_of_the_caller(proxy):
    model, plan = make(Attending)
    with pytest.warns(UpdatesWarning) as caught:
        smupar.record_updates(model, plan, make_adamw(model, plan))
    model, plan = make()
    bad = replace(proxy, effects={name: [math.nan] * len(values) for name, values in proxy.effects.items()}, optimizer="lion")
    with pytest.warns(UpdatesWarning) as more:
        smupar.follow_updates(model, plan, make_adamw(model, plan), trace=bad)
    assert [Path(one.filename).name for one in (*caught, *more)] == [Path(__file__).name] * 3


# Refused


def bad_calls(proxy):
    other = {f"encoder.{name}": values for name, values in proxy.effects.items()}
    return {
        "no steps": (Trace(), "the trace has no measured step: record it over a whole run"),
        "another architecture": (replace(proxy, effects=other), r"it has no layer like 'blocks\.0\.weight' \(it has encoder"),
    }


@pytest.mark.parametrize("case", ["no steps", "another architecture"])
def test_trace_that_does_not_fit_is_refused(proxy, case):
    trace, message = bad_calls(proxy)[case]
    model, plan = make()
    optimizer = make_adamw(model, plan)
    with pytest.raises(ValueError, match=message):
        smupar.follow_updates(model, plan, optimizer, trace=trace)
    assert_untouched(model)
    train(model, optimizer, range(2))


def test_trace_that_misses_some_layers_is_refused():
    effects = {"blocks.0.up.weight": [1.0], "blocks.0.down.weight": [1.0], "blocks.1.up.weight": [1.0]}
    names = [*effects, "blocks.1.down.weight"]
    with pytest.raises(ValueError, match=r"the trace misses layers: it has 1 like 'blocks\.\*\.down\.weight'"):
        Guide(Trace(1, [0], effects), names)


@pytest.mark.parametrize("follows", [True, False])
def test_model_must_be_parameterized(proxy, follows):
    model, plan = make()
    optimizer = make_adamw(model, plan)
    plain = Net(32)
    with pytest.raises(ValueError, match=r"this model is not parameterized: call smupar\.parameterize first"):
        start(plain, plan, optimizer, proxy if follows else None)
    assert_untouched(plain)


def start(model, plan, optimizer, trace):
    if trace is None:
        return smupar.record_updates(model, plan, optimizer)
    return smupar.follow_updates(model, plan, optimizer, trace=trace)


@pytest.mark.parametrize("follows", [True, False])
def test_optimizer_must_be_made_from_param_groups(proxy, follows):
    model, plan = make()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"with 'blocks\.0\.weight' was not made by smupar\.param_groups"):
        start(model, plan, optimizer, proxy if follows else None)
    assert_untouched(model)
    with pytest.raises(ValueError, match="no optimizer was given"):
        start(model, plan, [], proxy if follows else None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("follows", [True, False])
def test_compiled_module_is_refused(proxy, follows):
    model, plan = make()
    optimizer = make_adamw(model, plan)
    model.blocks[1].compile(backend="eager")
    with pytest.raises(ValueError, match=r"'blocks\.1' is compiled already and would ignore new hooks: compile afterwards"):
        start(model, plan, optimizer, proxy if follows else None)
    assert_untouched(model)


def test_optimizer_without_a_hidden_weight_is_refused():
    model, plan = make()
    optimizer = make_adamw(model, plan, only="rest")
    with pytest.raises(ValueError, match="no hidden weight can be measured"):
        smupar.record_updates(model, plan, optimizer)
    assert_untouched(model)


# Stopping and going on


def start_run(name, proxy, follows):
    """Everything that has a state, freshly made."""
    model, plan = make(density=1.0 if name == "GMP" else 0.5)
    kind = "muon" if name == "Muon" else "adamw"
    optimizers = make_all(kind.partition("+")[0], model, plan)
    meter = start(model, plan, optimizers, replace(proxy, optimizer=kind) if follows else None)
    sparsifier = None
    if name == "RigL":
        sparsifier = smupar.RigL(model, plan, optimizers, every=3, stop=20)
    if name == "GMP":
        sparsifier = smupar.GMP(model, plan, optimizers, density=0.25, every=3, stop=11)
    return model, optimizers, meter, sparsifier


def go_on(run, steps):
    model, optimizers, _, sparsifier = run
    for number in steps:
        train(model, optimizers, [number])
        if sparsifier is not None:
            sparsifier.step()


@pytest.mark.parametrize("stop", [1, 3, 4, 22, 25])
@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("name", ["plain", "Muon", "RigL", "GMP"])
def test_stopped_run_goes_on_bit_for_bit(proxy, name, follows, stop):
    whole = start_run(name, proxy, follows)
    go_on(whole, range(stop))
    meter = json.loads(json.dumps(whole[2].state_dict()))
    parts = copy.deepcopy([whole[0].state_dict(), [one.state_dict() for one in whole[1]]])
    moving = copy.deepcopy(whole[3].state_dict()) if whole[3] else None
    go_on(whole, range(stop, 28))

    again = start_run(name, proxy, follows)
    again[0].load_state_dict(parts[0])
    for one, state in zip(again[1], parts[1], strict=True):
        one.load_state_dict(state)
    again[2].load_state_dict(meter)
    if moving:
        again[3].load_state_dict(moving)
    go_on(again, range(stop, 28))
    assert_same_weights(again[0], whole[0])
    assert again[2].trace == whole[2].trace
    assert again[2].rates.measured == whole[2].rates.measured
    assert again[2].rates.corrections == whole[2].rates.corrections
    assert bool(again[2].rates.measured) == follows
    assert again[2].trace.num_steps == 28


def test_handed_out_trace_goes_on_when_recording_does():
    whole = start_run("plain", None, False)
    go_on(whole, range(2))
    state = whole[2].state_dict()
    again = start_run("plain", None, False)
    with again[2] as trace:
        again[2].load_state_dict(state)
        go_on(again, range(2))
    assert trace.at == [0, 1, 2, 3]
    assert trace is again[2].trace


@pytest.mark.parametrize("follows", [True, False])
def test_state_dict_stays_as_it_was_while_the_run_goes_on(proxy, follows):
    run = start_run("plain", proxy, follows)
    go_on(run, range(3))
    state = run[2].state_dict()
    before = json.dumps(state)
    go_on(run, range(3, 5))
    run[2].remove()
    assert json.dumps(state) == before


def test_loading_an_earlier_state_takes_later_factors_away(proxy):
    run = start_run("plain", proxy, True)
    start_state = json.dumps(run[2].state_dict())
    go_on(run, range(3))
    run[2].load_state_dict(json.loads(start_state))
    assert run[2].rates.measured == {}
    assert run[2].averages == {}
    assert run[2].trace.at == []


def test_run_that_stopped_before_a_step_without_a_learning_rate_goes_on_bit_for_bit(proxy):
    def lr(run, share):
        for group in run[1][0].param_groups:
            group["lr"] = share * 0.01 * group["lr_factor"]

    runs = [start_run("plain", proxy, True) for _ in range(2)]
    go_on(runs[0], range(3))
    states = copy.deepcopy([part.state_dict() for part in (runs[0][0], runs[0][1][0], runs[0][2])])
    for part, state in zip((runs[1][0], runs[1][1][0], runs[1][2]), states, strict=True):
        part.load_state_dict(state)
    for run in runs:
        lr(run, 0.0)
        go_on(run, [3])
        lr(run, 1.0)
        go_on(run, [4])
    assert runs[0][2].trace == runs[1][2].trace
    assert runs[0][2].rates.measured == runs[1][2].rates.measured


# Nothing is left behind


@pytest.mark.parametrize("follows", [True, False])
def test_remove_takes_everything_away(proxy, follows):
    model, plan = make(density=0.25)
    names = list(model.state_dict())
    optimizer = make_adamw(model, plan)
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
    model, plan = make()
    optimizer = make_adamw(model, plan)
    recorder = smupar.record_updates(model, plan, optimizer)
    with pytest.raises(RuntimeError, match=r"must match the size|shapes cannot be multiplied"), recorder:
        train(model, optimizer, [0, 1], shape=(7,))
    assert_untouched(model)
    assert recorder.trace.at == []


def test_off_mask_weights_stay_zero_while_following(proxy):
    model, plan = make(density=0.25)
    optimizers = make_all("muon", model, plan)
    smupar.follow_updates(model, plan, optimizers, trace=replace(proxy, optimizer="muon"))
    train(model, optimizers, range(3))
    for name in ("blocks.0.weight", "blocks.1.weight"):
        assert not model.get_parameter(name)[~mask_of(model, name)].any()


def test_copy_of_a_measured_model_keeps_its_inputs_to_itself(proxy):
    """An average of weights, say, that is evaluated with gradients between steps."""
    factors = []
    for copies in (True, False):
        model, plan = make(density=0.25)
        optimizer = make_adamw(model, plan)
        follower = smupar.follow_updates(model, plan, optimizer, trace=proxy)
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
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    recorded = smupar.record_updates(model, plan, optimizer)
    get_state_dict(model, optimizer)
    assert recorded.step == 0


def test_layer_that_gets_no_tokens_keeps_its_inputs():
    model = Net(64)
    plan = smupar.parameterize(model, base=Net(16))
    recorded = smupar.record_updates(model, plan, torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01)))
    model.blocks[0](torch.ones(3, 64))
    model.blocks[0](torch.zeros(0, 64))
    assert bool((recorded.probes["blocks.0.weight"].inputs == 1).all())


def test_copy_of_a_measured_model_is_measured_for_itself():
    model, plan = make()
    smupar.record_updates(model, plan, optimizer := make_adamw(model, plan))
    twin = copy.deepcopy(model)
    smupar.attach(twin, plan)
    recorded = smupar.record_updates(twin, plan, own := make_adamw(twin, plan))
    for name, module in twin.named_modules():
        assert len(module._forward_pre_hooks) == len(model.get_submodule(name)._forward_pre_hooks)
    step(twin, own, batch(0))
    assert recorded.trace.num_steps == 1
    with pytest.raises(ValueError, match="measured already"):
        smupar.record_updates(model, plan, optimizer)


# However a step is made and a layer is called


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
