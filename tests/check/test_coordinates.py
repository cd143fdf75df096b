"""The coordinate check: what is measured, how it is judged, and what it says of models that are right and wrong.

Planted faults and their diagnosis are in test_coordinate_faults.py.
"""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.check.coordinates.measure import CHANGE, DY, GRAD_W, GRAD_X, JUDGED, Reading, SizeRecorder, Y
from smupar.check.coordinates.report import Report
from smupar.check.coordinates.verdict import EXCEPTION, FAIL, PASS, UNCLEAR, Slope, judge, overall, slopes
from smupar.lm.config.run import ModelConfig
from smupar.lm.data import batches as data
from smupar.lm.model.gpt import GPT, Attention, set_attention_scale
from smupar.lm.run.step import next_token_loss

# Models


class Fork(nn.Module):
    """``left`` and ``right`` read the same input: the gradient of each through itself is not the gradient of that input."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        shared = self.first(x).tanh()
        return self.head(self.left(shared).tanh() + self.right(shared).tanh())


class Tied(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.inner = nn.Linear(width, width)
        self.readout = nn.Linear(width, 11, bias=False)
        self.readout.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        return self.readout(x + self.inner(x).tanh())


class Conv1D(nn.Module):
    """As in Hugging Face's GPT-2: a Linear with a transposed weight."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class Transposed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.inner = Conv1D(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.inner(self.first(x).tanh()).tanh())


class Shared(nn.Module):
    """Applies ``inner`` twice, the second time to some of the rows only."""

    def __init__(self, width, num_rows=None):
        super().__init__()
        self.num_rows = num_rows
        self.first = nn.Linear(6, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.inner(self.first(x).tanh()).tanh()
        return self.head(x) + self.inner(x[: self.num_rows]).mean()


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = F.relu(self.first(x))
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.head(x)


class CNN(nn.Module):
    def __init__(self, width, inplace=False):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.relu = nn.ReLU(inplace=inplace)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = F.avg_pool2d(self.relu(self.first(x)), 2)
        x = self.relu(self.conv2(self.relu(self.conv1(x))))
        return self.head(x.mean((2, 3)))


class Bottleneck(nn.Module):
    """Layers of such different shapes that ERK keeps ``squeeze`` dense while it prunes the others."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.squeeze = nn.Linear(width, width // 8)
        self.expand = nn.Linear(width // 8, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = F.relu(self.first(x))
        for layer in (self.up, self.down, self.squeeze, self.expand):
            x = F.relu(layer(x))
        return self.head(x)


class GeluMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class GeluTransformer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(ModelConfig(width=width))
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = GeluMLP(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(self.norm_attention(x))
        return self.head(self.norm(x + self.mlp(self.norm_mlp(x))))


# Runs


def _loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _batches(num, shape, *, num_classes, size=32):
    rng = torch.Generator().manual_seed(0)
    return [(torch.randn(size, *shape, generator=rng), torch.randint(num_classes, (size,), generator=rng)) for _ in range(num)]


def _token_batches(num, *, vocab=11, shape=(4, 5)):
    rng = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(vocab, shape, generator=rng) for _ in range(2)) for _ in range(num)]


def _check(make_model=Fork, loss_fn=_loss, batches=None, **changes):
    """A check of seconds; every argument can be changed."""
    settings = {"base_width": 8, "widths": (16,), "densities": (1, 0.5), "steps": 1, "seeds": 1, "progress": False, **changes}
    if batches is None:
        batches = _batches(max(1, settings["steps"]), (6,), num_classes=3)
    return smupar.coord_check(make_model, loss_fn, batches, **settings)


def _size(report, place, quantity, *, step=1, rule="smupar", density=0.5, width=16, seed=0):
    (found,) = [
        one
        for one in report.readings
        if (one.place, one.quantity, one.step, one.rule, one.density, one.width, one.seed)
        == (place, quantity, step, rule, density, width, seed)
    ]
    return found


def _slope(report, rule, place, quantity=Y, *, step=1, axis="density"):
    (found,) = [
        one.slope
        for one in report.slopes
        if (one.rule, one.place, one.quantity, one.step, one.axis) == (rule, place, quantity, step, axis)
    ]
    return found


def _assert_sizes(report, place, quantity, values, **where):
    found = _size(report, place, quantity, **where)
    assert found.rms == pytest.approx(values.double().square().mean().sqrt().item(), rel=2e-4)
    assert found.mean_abs == pytest.approx(values.double().abs().mean().item(), rel=2e-4)


def _assert_no_reading(report, place, quantity):
    assert not [one for one in report.readings if (one.place, one.quantity) == (place, quantity)]


def _twin(make_model, *, density=0.5, **settings):
    """The model that coord_check built for seed 0 at width 16, base 8, and its plan."""
    torch.manual_seed(0)
    model = make_model(16)
    plan = smupar.parameterize(model, base=make_model(8), density=density, seed=0, reset=False, **settings)
    return model, plan


def _trained(model, plan, batch, optimizer, lr):
    """One step; the weights before it."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    stepper = optimizer(smupar.param_groups(model, plan, lr=lr, weight_decay=0.0, optimizer=optimizer))
    _loss(model, batch).backward()
    stepper.step()
    return before


def _kept(values):
    values.retain_grad()
    return values


# What is measured


@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.AdamW, 0.01), (torch.optim.SGD, 0.3)])
def test_sizes_of_a_linear_model_equal_a_reference_by_hand(optimizer, lr):
    (batch,) = _batches(1, (6,), num_classes=3)
    report = _check(batches=[batch], optimizer=optimizer, lr=lr, alpha_output=0.7)

    model, plan = _twin(Fork, alpha_output=0.7)
    assert plan.output_factor == pytest.approx(0.35)  # alpha_output / m_d
    x, targets = batch
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = _kept(model.first(x))
    shared = first.tanh()
    left, right = _kept(model.left(shared)), _kept(model.right(shared))
    joined = left.tanh() + right.tanh()
    logits = _kept(0.35 * joined @ model.head.weight.T + model.head.bias)
    F.cross_entropy(logits, targets).backward()
    outputs = {"first": first, "left": left, "right": right, "head": logits}
    for place, output in outputs.items():
        _assert_sizes(report, place, Y, output.detach())
        _assert_sizes(report, place, GRAD_W, model.get_submodule(place).weight.grad)
    _assert_sizes(report, "", Y, logits.detach())

    # Through the layer alone: left and right share an input, whose own gradient is the sum of both.
    for place in ("first", "left", "right"):
        _assert_sizes(report, place, GRAD_X, outputs[place].grad @ start[f"{place}.weight"] / 0.35)
    _assert_sizes(report, "head", GRAD_X, logits.grad @ start["head.weight"])  # the factor, divided out again

    model.zero_grad()
    before = _trained(model, plan, batch, optimizer, lr)
    change = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    assert change["left.bias"].abs().max() > 1e-4  # biases move, and do not count
    inputs = {"first": x, "left": shared.detach(), "right": shared.detach(), "head": 0.35 * joined.detach()}
    for place, read in inputs.items():
        _assert_sizes(report, place, DY, read @ change[f"{place}.weight"].T)
    with torch.no_grad():
        _assert_sizes(report, "left", CHANGE, model.left(model.first(x).tanh()) - left)
        _assert_sizes(report, "", CHANGE, model(x) - logits)


def test_sizes_of_a_tied_embedding_are_those_of_both_its_uses():
    (batch,) = _token_batches(1)
    report = _check(Tied, batches=[batch], lr=0.01, alpha_input=3.0)

    model, plan = _twin(Tied, alpha_input=3.0)
    tokens, targets = batch
    looked_up = _kept(3.0 * model.table.weight[tokens])
    inner = _kept(model.inner(looked_up))
    read = looked_up + inner.tanh()
    logits = _kept(0.5 * read @ model.table.weight.T)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    table = model.table.weight.detach().clone()
    _assert_sizes(report, "table", Y, looked_up.detach())
    _assert_sizes(report, "readout", Y, logits.detach())
    _assert_sizes(report, "readout", GRAD_X, logits.grad @ table)
    _assert_sizes(report, "inner", GRAD_X, inner.grad @ model.inner.weight.detach() / 0.5)
    _assert_sizes(report, "table", GRAD_W, model.table.weight.grad)
    assert _size(report, "table", GRAD_W).norm == pytest.approx(float(model.table.weight.grad.norm()), rel=1e-4)
    _assert_no_reading(report, "table", GRAD_X)  # its input is a token
    assert _size(report, "table", Y).role == "embedding"
    assert _size(report, "readout", Y).role == "unembedding"

    model.zero_grad()
    _trained(model, plan, batch, torch.optim.AdamW, 0.01)
    change = model.table.weight.detach() - table
    _assert_sizes(report, "table", DY, 3.0 * change[tokens])
    _assert_sizes(report, "readout", DY, 0.5 * read.detach() @ change.T)


def test_sizes_of_a_convolution_equal_a_reference_by_hand():
    (batch,) = _batches(1, (3, 8, 8), num_classes=10, size=8)
    report = _check(CNN, batches=[batch], optimizer=torch.optim.SGD, lr=0.5)

    model, plan = _twin(CNN)
    x = F.avg_pool2d(F.relu(model.first(batch[0])), 2)
    conv1 = _kept(model.conv1(x))
    between = F.relu(conv1)
    conv2 = _kept(model.conv2(between))
    F.cross_entropy(model.head(F.relu(conv2).mean((2, 3))), batch[1]).backward()
    _assert_sizes(report, "conv2", Y, conv2.detach())
    grad = torch.nn.grad.conv2d_input(between.shape, model.conv2.weight, conv2.grad, stride=2, padding=1)
    _assert_sizes(report, "conv2", GRAD_X, grad.detach() / plan.output_factor)

    model.zero_grad()
    before = _trained(model, plan, batch, torch.optim.SGD, 0.5)
    change = model.conv2.weight.detach() - before["conv2.weight"]
    _assert_sizes(report, "conv2", DY, F.conv2d(between.detach(), change, stride=2, padding=1))


def test_sizes_of_a_transposed_linear_equal_a_reference_by_hand():
    (batch,) = _batches(1, (6,), num_classes=3)
    report = _check(Transposed, batches=[batch], lr=0.01)

    model, plan = _twin(Transposed)
    x = model.first(batch[0]).tanh()
    inner = _kept(model.inner(x))
    F.cross_entropy(model.head(inner.tanh()), batch[1]).backward()
    _assert_sizes(report, "inner", Y, inner.detach())
    _assert_sizes(report, "inner", GRAD_X, inner.grad @ model.inner.weight.detach().T / 0.5)

    model.zero_grad()
    before = _trained(model, plan, batch, torch.optim.AdamW, 0.01)
    _assert_sizes(report, "inner", DY, x.detach() @ (model.inner.weight.detach() - before["inner.weight"]))


def test_change_of_y_is_zero_while_nothing_is_learned_and_counts_from_init():
    batches = _batches(3, (6,), num_classes=3)
    still = _check(batches=batches, steps=3, optimizer=torch.optim.SGD, lr=0.0)
    changes = [one for one in still.readings if one.quantity == CHANGE]
    assert {one.step for one in changes} == {1, 2, 3}
    assert {one.rms for one in changes} == {0.0}

    # Always on the first batch and against the untrained model, whatever batch was trained on last.
    report = _check(batches=batches, steps=3, lr=0.01)
    model, plan = _twin(Fork)
    with torch.no_grad():
        start = model(batches[0][0])
    stepper = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, weight_decay=0.0))
    for step, batch in enumerate(batches, 1):
        stepper.zero_grad()
        _loss(model, batch).backward()
        stepper.step()
        with torch.no_grad():
            _assert_sizes(report, "", CHANGE, model(batches[0][0]) - start, step=step)


def test_sizes_of_later_steps_are_those_of_their_own_batch_and_weights():
    batches = _batches(2, (6,), num_classes=3)
    report = _check(batches=batches, steps=2, lr=0.01)
    model, plan = _twin(Fork)
    stepper = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, weight_decay=0.0))
    _loss(model, batches[0]).backward()
    stepper.step()
    stepper.zero_grad()
    _loss(model, batches[1]).backward()
    shared, before = model.first(batches[1][0]).tanh().detach(), model.left.weight.detach().clone()
    _assert_sizes(report, "left", Y, model.left(shared).detach(), step=2)
    _assert_sizes(report, "left", GRAD_W, model.left.weight.grad, step=2)
    stepper.step()
    _assert_sizes(report, "left", DY, shared @ (model.left.weight.detach() - before).T, step=2)


def test_sizes_do_not_depend_on_activations_in_place():
    batches = _batches(2, (3, 8, 8), num_classes=10, size=8)
    plain = _check(CNN, batches=batches, steps=2)
    inplace = _check(lambda width: CNN(width, inplace=True), batches=batches, steps=2)
    assert plain.readings == inplace.readings


def test_blocks_and_logits_are_reported_beside_layers():
    report = _check(lambda width: GPT(ModelConfig(width=width, depth=1, head_dim=8)), batches=_token_batches(1, vocab=256))
    kinds = {(one.place, one.kind, one.role) for one in report.readings if one.quantity == Y}
    assert kinds == {
        ("embedding", "layer", "embedding"),
        ("blocks.0.attention.qkv", "layer", "hidden"),
        ("blocks.0.attention.out", "layer", "hidden"),
        ("blocks.0.attention", "block", "block"),
        ("blocks.0.mlp.gate", "layer", "hidden"),
        ("blocks.0.mlp.up", "layer", "hidden"),
        ("blocks.0.mlp.down", "layer", "hidden"),
        ("blocks.0.mlp", "block", "block"),
        ("unembedding", "layer", "unembedding"),
        ("", "block", "logits"),
    }
    assert {one.place for one in report.readings if one.quantity == GRAD_X} >= {"blocks.0.attention", "blocks.0.mlp"}


def test_a_lookup_table_called_hidden_is_measured():
    # roles= may say so, wrongly or not; the check should tell, not crash.
    report = _check(Tied, batches=_token_batches(1), densities=(1,), widths=(8, 16), roles={"table.weight": "hidden"})
    assert any(found.cause == "embedding as hidden" for found in report.diagnoses)


@pytest.mark.parametrize("num_rows", [None, 5])
def test_a_layer_that_is_applied_twice_is_measured(num_rows):
    report = _check(lambda width: Shared(width, num_rows), optimizer=torch.optim.SGD, lr=0.0)
    changes = [one for one in report.readings if one.quantity == CHANGE and one.place == "inner"]
    assert changes
    assert {one.step for one in changes} == {1}  # there is no change before the first step
    assert {one.rms for one in changes} == {0.0}  # nothing was learned: each call is compared with itself


@pytest.mark.parametrize(("num_sequences", "length"), [(512, 5), (64, 16), (300, 7)])
def test_a_large_batch_is_sampled_at_all_positions_alike(num_sequences, length):
    x = torch.arange(length).float()[None, :, None].expand(num_sequences, length, 6)  # 0 at the first position
    batch = x, torch.randint(3, (num_sequences, length), generator=torch.Generator().manual_seed(0))
    report = _check(batches=[batch], lr=0.01)
    model, plan = _twin(Fork)
    before = _trained(model, plan, batch, torch.optim.AdamW, 0.01)
    effect = x @ (model.first.weight - before["first.weight"]).T
    assert _size(report, "first", DY).rms == pytest.approx(effect.square().mean().sqrt().item(), rel=0.02)


def test_two_runs_give_identical_readings():
    first, second = (_check(steps=2, seeds=2, batches=_batches(2, (6,), num_classes=3)) for _ in range(2))
    assert first.readings == second.readings
    assert len({one.rms for one in first.readings if (one.place, one.quantity, one.step) == ("left", Y, 1)}) == 4


def test_readings_do_not_depend_on_the_callers_random_state():
    torch.manual_seed(1)
    first = _check()
    torch.manual_seed(2)
    assert _check().readings == first.readings


def _plain(width):
    return Fork(width)


def _seeding(width):
    torch.manual_seed(7)
    return Fork(width)


def _computing(width):
    model = Fork(width)
    model.constant = float(torch.rand(3).sum())  # not possible on the meta device
    return model


@pytest.mark.parametrize("make_model", [_plain, _seeding, _computing])
def test_global_random_state_is_untouched(make_model):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    _check(make_model)
    assert torch.equal(torch.get_rng_state(), before)


def test_callers_batches_are_untouched():
    batches = _batches(2, (6,), num_classes=3)
    kept = [tuple(part.clone() for part in batch) for batch in batches]
    _check(batches=batches, steps=2)
    assert len(batches) == 2
    for batch, copy in zip(batches, kept, strict=True):
        assert all(torch.equal(part, other) for part, other in zip(batch, copy, strict=True))
        assert batch[0].grad is None
        assert not batch[0].requires_grad


def test_hooks_are_gone_after_the_check():
    made = []

    def make_model(width):
        made.append(Fork(width))
        return made[-1]

    _check(make_model)
    trained = [model for model in made if not model.first.weight.is_meta]
    assert len(trained) == 2
    for model in trained:
        # Only what parameterize attached is left: the readout's factor, before its forward pass.
        assert [len(module._forward_hooks) for module in model.modules()] == [0] * 5
        assert len(model.head._forward_pre_hooks) == 1
        assert torch.isfinite(model(torch.ones(2, 6))).all()


def test_batches_may_be_an_endless_generator_and_every_run_gets_the_same():
    def endless():
        rng = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(8, 6, generator=rng), torch.randint(3, (8,), generator=rng)

    seen = []

    def loss_fn(model, batch):
        seen.append(batch[0].sum().item())
        return _loss(model, batch)

    _check(loss_fn=loss_fn, batches=endless(), steps=3)
    first, second, third = seen[1], seen[3], seen[5]
    # Before the first step and after each one the first batch is probed again.
    assert seen == [first, first, first, second, first, third, first] * 2
    assert len({first, second, third}) == 3


def test_recorder_keeps_as_many_tensors_after_ten_steps_as_after_one():
    model, plan = _twin(Fork)
    stepper = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    recorder = SizeRecorder(model, plan)

    def held():
        values = [value for value in vars(recorder).values() if isinstance(value, dict)]
        return sum(tensor.numel() for value in values for tensor in value.values() if isinstance(tensor, torch.Tensor))

    counts, lengths = [], []
    with recorder.probe(), torch.no_grad():
        _loss(model, _batches(1, (6,), num_classes=3)[0])
    for step, batch in enumerate(_batches(10, (6,), num_classes=3), 1):
        recorder.step = step
        _loss(model, batch).backward()
        weights = recorder.before_update()
        stepper.step()
        stepper.zero_grad()
        recorder.after_update(weights)
        counts.append(held())
        lengths.append(len(recorder.sizes))
    assert len(set(counts)) == 1
    # What grows is two numbers for each size; none of them holds on to a graph or a larger tensor.
    assert {after - before for before, after in pairwise(lengths)} == {lengths[0]}
    for *_, rms, mean_abs, _ in recorder.sizes:
        assert rms.untyped_storage().nbytes() == mean_abs.untyped_storage().nbytes() == 4
        assert not rms.requires_grad
        assert rms.grad_fn is None
    recorder.close()


# Verdicts on made-up sizes


def _reading(density, rms, *, seed=0, place="layer", quantity=Y, kind="layer", role="hidden", width=64, step=1, rule="smupar"):
    return Reading(rule, width, density, seed, step, place, kind, role, quantity, rms, rms)


def _made(exponent, *, xs=(1.0, 0.5, 0.25, 0.125), axis="density", **where):
    """Sizes 3 x ** exponent."""
    if axis == "width":
        return [replace(_reading(1.0, 3 * x**exponent, **where), width=x) for x in xs]
    return [_reading(x, 3 * x**exponent, **where) for x in xs]


def _one_slope(exponent, ci=math.nan, **changes):
    made = Slope("smupar", "density", 64, "layer", "layer", "hidden", Y, 1, exponent, ci, 3)
    return replace(made, **changes)


@pytest.mark.parametrize("exponent", [-1.5, -0.31, 0.0, 0.5, 2.0])
@pytest.mark.parametrize("axis", ["density", "width"])
def test_slope_of_a_power_is_its_exponent(exponent, axis):
    (found,) = slopes(_made(exponent, axis=axis, xs=(64, 128, 512) if axis == "width" else (1.0, 0.3, 0.01)))
    assert found.slope == pytest.approx(exponent, abs=1e-9)
    assert found.axis == axis
    assert found.at == (1.0 if axis == "width" else 64)
    assert math.isnan(found.ci)
    assert found.num_seeds == 1


def test_slope_of_scattered_sizes_is_least_squares():
    # log2 sizes 0, 2, 1 at log2 densities 0, -1, -2: slope = sum (x - mean)(y - mean) / sum (x - mean)^2 = -1 / 2.
    (found,) = slopes([_reading(1.0, 1.0), _reading(0.5, 4.0), _reading(0.25, 2.0)])
    assert found.slope == pytest.approx(-0.5)


def test_slopes_over_both_axes_hold_the_other_one_fixed():
    readings = [
        _reading(density, width**1.0 * density**-0.5, width=width) for width in (64, 128, 256) for density in (1.0, 0.25)
    ]
    found = {(one.axis, one.at): one.slope for one in slopes(readings)}
    assert found == pytest.approx(
        {
            ("width", 1.0): 1.0,
            ("width", 0.25): 1.0,
            ("density", 64): -0.5,
            ("density", 128): -0.5,
            ("density", 256): -0.5,
        }
    )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("size", "ci", "verdict"),
    [
        (0.19, math.nan, PASS),
        (0.2, math.nan, UNCLEAR),
        (0.35, math.nan, UNCLEAR),
        (0.36, math.nan, FAIL),
        (0.19, 0.15, PASS),
        (0.19, 0.17, UNCLEAR),  # up to 0.36
        (0.4, 0.19, FAIL),
        (0.4, 0.21, UNCLEAR),  # down to 0.19
        (0.0, 0.34, PASS),
        (3.0, 2.7, FAIL),
    ],
)
def test_layer_at_step_1_is_judged_at_020_and_035(size, ci, verdict, sign):
    assert judge(_one_slope(sign * size, ci)) == verdict


@pytest.mark.parametrize("changes", [{"kind": "block", "role": "block"}, {"step": 2}, {"step": 10, "quantity": DY}])
@pytest.mark.parametrize(
    ("size", "ci", "verdict"),
    [
        (0.49, math.nan, PASS),
        (0.5, math.nan, UNCLEAR),
        (0.8, math.nan, UNCLEAR),
        (0.81, math.nan, FAIL),
        (0.4, 0.39, PASS),
        (0.4, 0.41, UNCLEAR),
        (-1.0, 0.49, FAIL),
        (-1.0, 0.51, UNCLEAR),
    ],
)
def test_blocks_and_later_steps_are_judged_at_050_and_080(size, ci, verdict, changes):
    assert judge(_one_slope(size, ci, **changes)) == verdict


@pytest.mark.parametrize("quantity", [CHANGE, GRAD_W])
def test_gradient_flow_and_change_of_activations_are_not_judged(quantity):
    assert judge(_one_slope(2.0, quantity=quantity)) == ""
    (found,) = slopes(_made(2.0, quantity=quantity))
    assert (found.slope, found.verdict) == (pytest.approx(2.0), "")


def test_overall_is_the_worst_verdict():
    made = {name: _one_slope(0.0, verdict=name) for name in (PASS, UNCLEAR, FAIL, EXCEPTION, "")}
    assert overall([made[PASS], made[EXCEPTION], made[""]]) == PASS
    assert overall([made[PASS], made[UNCLEAR]]) == UNCLEAR
    assert overall([made[UNCLEAR], made[PASS], made[FAIL]]) == FAIL


def test_later_steps_are_judged_by_their_mean():
    # Step 3 alone is steep, as one chaotic gradient is; the mean of steps 2 to 4 is (0.1 + 1.0 + 0.1) / 3.
    readings = [one for step, exponent in ((1, 0.0), (2, 0.1), (3, 1.0), (4, 0.1)) for one in _made(exponent, step=step)]
    found = {one.when: one for one in slopes(readings)}
    assert found["step 3"].verdict == FAIL
    assert found["mean of later steps"].slope == pytest.approx(0.4)
    assert found["mean of later steps"].verdict == PASS
    assert overall(found.values()) == PASS


def test_confidence_interval_of_three_seeds_is_students():
    # Slopes 0.1, 0.2, 0.3: standard deviation 0.1, two degrees of freedom, t = 4.30.
    (found,) = slopes([one for seed in range(3) for one in _made(0.1 * (seed + 1), seed=seed)])
    assert found.slope == pytest.approx(0.2)
    assert found.ci == pytest.approx(4.30 * 0.1 / math.sqrt(3), abs=1e-6)
    assert found.num_seeds == 3
    assert found.verdict == UNCLEAR


def test_confidence_interval_counts_no_more_than_three_places_as_independent():
    readings = [one for place in "abcdef" for seed in range(3) for one in _made(0.1 * (seed + 1), seed=seed, place=place)]
    # Slopes 0.1, 0.2, 0.3 in all six places: standard deviation 0.1; 3 x 2 degrees of freedom, t = 2.45, not 12 and 2.18.
    for one in slopes(readings):
        assert one.ci == pytest.approx(2.45 * 0.1 / math.sqrt(3), abs=1e-6)


def test_confidence_interval_pools_places_of_one_kind_and_no_others():
    readings = [
        one
        for seed in range(3)
        for one in (
            *_made(0.1 * (seed + 1), seed=seed, place="a"),
            *_made(0.0, seed=seed, place="b"),
            *_made(0.5 * seed, seed=seed, place="c", kind="block", role="block"),
            *_made(0.05 * seed, seed=seed, place="a", quantity=DY),
        )
    ]
    found = {(one.place, one.quantity): one.ci for one in slopes(readings)}
    # Squares 0.02 of a and 0 of b over 2 + 2 degrees of freedom: variance 0.005, t = 2.78.
    pooled = 2.78 * math.sqrt(0.005) / math.sqrt(3)
    assert found == pytest.approx(
        {
            ("a", Y): pooled,
            ("b", Y): pooled,
            ("c", Y): 4.30 * 0.5 / math.sqrt(3),
            ("a", DY): 4.30 * 0.05 / math.sqrt(3),
        },
        abs=1e-6,
    )


@pytest.mark.parametrize("role", ["unembedding", "logits"])
@pytest.mark.parametrize("rule", ["mup", "smupar"])
def test_logits_that_shrink_like_the_root_of_width_are_a_known_exception(rule, role):
    logits = _one_slope(-0.5, 0.1, rule=rule, axis="width", at=1.0, role=role)
    assert judge(logits) == EXCEPTION
    assert judge(replace(logits, rule="sp")) == FAIL
    assert judge(replace(logits, axis="density", at=64)) == FAIL
    assert judge(replace(logits, role="hidden")) == FAIL
    assert judge(replace(logits, quantity=DY)) == FAIL
    assert judge(replace(logits, slope=0.5)) == FAIL
    assert judge(replace(logits, slope=-1.0)) == FAIL
    assert judge(replace(logits, slope=-1.0, step=10)) == FAIL  # by then the readout has learned


@pytest.mark.parametrize(("last", "verdict"), [(3, PASS), (10, UNCLEAR)])
def test_logits_that_go_on_shrinking_are_no_exception(last, verdict):
    where = {"axis": "width", "xs": (64, 128, 256), "role": "logits", "kind": "block", "place": ""}
    found = slopes([one for step in range(1, last + 1) for one in _made(-0.6, step=step, **where)])
    later = next(one for one in found if one.is_mean)
    assert later.slope == pytest.approx(-0.6)
    # Three steps may be too few for a readout to learn; between 0.5 and 0.8 is neither flat nor a power.
    assert later.verdict == (EXCEPTION if last == 3 else UNCLEAR)
    assert overall(found) == verdict


def test_zero_and_infinite_sizes_are_skipped():
    assert slopes([_reading(x, 0.0) for x in (1.0, 0.5, 0.25)]) == []
    some = [_reading(1.0, 0.0), _reading(0.5, 2.0), _reading(0.25, 1.0), _reading(0.125, math.inf), _reading(0.1, math.nan)]
    (found,) = slopes(some)
    assert found.slope == pytest.approx(1.0)
    assert slopes([_reading(1.0, 0.0), _reading(0.5, 2.0)]) == []  # one point has no slope


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("axis", [{"widths": (64, 128, 256)}, {"widths": (256,), "densities": (1, 1 / 4, 1 / 16)}])
def test_zero_initialised_readout_raises_no_alarm(axis, optimizer):
    report = _check(
        MLP,
        batches=_batches(3, (16,), num_classes=10),
        init_std={"head.weight": 0.0, "*": "fan_in"},
        optimizer=optimizer,
        lr=2**-8 if optimizer is torch.optim.AdamW else 0.1,
        **{"base_width": 64, "densities": (1,), "steps": 3, "seeds": 3, **axis},
    )
    first = [one for one in report.slopes if one.step == 1 and one.place == "hidden.0"]
    assert {one.quantity for one in first} == {Y}  # nothing flows back through zeros
    assert FAIL not in {one.verdict for one in report.slopes}
    assert report.verdicts["smupar"] != FAIL
    report.explain()


# The GPT

GPT_SETTINGS = {"init_std": 0.087, "alpha_input": 9.17, "alpha_output": 1.095, "prepare": set_attention_scale}


def _gpt_check(*, steps=3, seeds=3, batch_size=4, seq_len=32, make_model=None, **changes):
    text, _ = data.split(data.standard_library())
    return smupar.coord_check(
        make_model or (lambda width: GPT(ModelConfig(width=width, depth=2))),
        next_token_loss,
        [data.batch(text, seed=0, step=step, batch_size=batch_size, seq_len=seq_len) for step in range(steps)],
        steps=steps,
        seeds=seeds,
        progress=False,
        **{"base_width": 64, "widths": (256,), **GPT_SETTINGS, **changes},
    )


@pytest.fixture(scope="module")
def gpt_over_density():
    # SP's first attention block measures 1.13 on 32 tokens and 1.09 on 64: the longer ones leave a margin to 1.15.
    return _gpt_check(rules=("sp", "mup", "smupar"), densities=(1, 1 / 4, 1 / 16), seq_len=64)


def _hidden_and_blocks(report, rule, quantity, *, step=1):
    found = [
        one
        for one in report.slopes
        if one.rule == rule and one.quantity == quantity and one.step == step and one.role in ("hidden", "block")
    ]
    assert found
    return found


@pytest.mark.parametrize("rule", ["sp", "mup"])
def test_gpt_slopes_at_step_1_are_the_papers_without_density_correction(gpt_over_density, rule):
    for block in ("blocks.0", "blocks.1"):
        assert _slope(gpt_over_density, rule, f"{block}.attention") == pytest.approx(1.0, abs=0.15)
        assert _slope(gpt_over_density, rule, f"{block}.mlp") == pytest.approx(1.5, abs=0.15)
        for layer in ("attention.qkv", "mlp.gate", "mlp.up"):
            assert _slope(gpt_over_density, rule, f"{block}.{layer}") == pytest.approx(0.5, abs=0.1)


def test_gpt_slopes_at_step_1_are_flat_under_smupar(gpt_over_density):
    found = [one for one in gpt_over_density.slopes if one.rule == "smupar" and one.step == 1 and one.quantity in JUDGED]
    assert len(found) > 30
    for one in found:
        assert abs(one.slope) < 0.2, one


def test_gpt_later_slopes_have_the_sign_of_the_paper(gpt_over_density):
    for rule in ("sp", "mup"):
        for one in _hidden_and_blocks(gpt_over_density, rule, Y, step=3):
            assert one.slope > 0.3, one


def test_gpt_over_density_passes_under_smupar_and_fails_under_sp_and_mup(gpt_over_density):
    assert gpt_over_density.verdicts == {"sp": FAIL, "mup": FAIL, "smupar": PASS}
    assert gpt_over_density.ok  # SP and muP are baselines beside SmuPar
    for rule in ("sp", "mup"):
        for quantity in JUDGED:
            assert FAIL in {one.verdict for one in gpt_over_density.slopes if (one.rule, one.quantity) == (rule, quantity)}


def test_gpt_over_width_fails_under_sp_and_never_under_smupar():
    report = _gpt_check(rules=("sp", "smupar"), widths=(64, 128, 256), steps=2)
    assert report.verdicts["sp"] == FAIL
    assert FAIL not in {one.verdict for one in report.slopes if one.rule == "smupar"}


def test_gelu_mlp_block_has_slope_1_without_density_correction():
    report = _gpt_check(
        make_model=GeluTransformer, rules=("sp", "mup", "smupar"), densities=(1, 1 / 4, 1 / 16), steps=1, seeds=2
    )
    for rule in ("sp", "mup"):
        assert _slope(report, rule, "mlp") == pytest.approx(1.0, abs=0.15)
        assert _slope(report, rule, "attention") == pytest.approx(1.0, abs=0.15)
        assert _slope(report, rule, "mlp.up") == pytest.approx(0.5, abs=0.1)
    assert _slope(report, "smupar", "mlp") == pytest.approx(0.0, abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_gpt_over_density_at_full_size(optimizer):
    report = _gpt_check(
        rules=("sp", "mup", "smupar"),
        densities=(1, 1 / 2, 1 / 4, 1 / 8, 1 / 16),
        steps=10,
        batch_size=8,
        seq_len=64,
        optimizer=optimizer,
        lr=2**-6 if optimizer is torch.optim.AdamW else 0.1,
    )
    assert report.verdicts == {"sp": FAIL, "mup": FAIL, "smupar": PASS}, report.explain()


@pytest.mark.slow
@pytest.mark.parametrize("density", [1, 1 / 4])
def test_gpt_over_width_at_full_size(density):
    report = _gpt_check(
        rules=("sp", "smupar"), widths=(64, 128, 256, 512), densities=(density,), steps=10, batch_size=8, seq_len=64
    )
    assert report.verdicts == {"sp": FAIL, "smupar": PASS}, report.explain()


# Patterns and allocations

PATTERNS = {
    "2:4": {"pattern": "2:4", "densities": (1, 1 / 2)},
    "fan_in": {"pattern": "fan_in", "densities": (1, 1 / 4, 1 / 16)},
    "erk": {"allocation": smupar.erk, "densities": (1, 1 / 4, 1 / 16)},
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gpt_passes_under_smupar_with_other_patterns(pattern):
    report = _gpt_check(steps=2, **PATTERNS[pattern])
    assert report.verdicts == {"smupar": PASS}, report.explain()


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gpt_patterns_at_full_size(pattern):
    report = _gpt_check(rules=("sp", "mup", "smupar"), steps=10, batch_size=8, seq_len=64, **PATTERNS[pattern])
    assert report.verdicts == {"sp": FAIL, "mup": FAIL, "smupar": PASS}, report.explain()


def _overall_density(plan):
    hidden = [row for row in plan if row.role == "hidden"]
    return sum(row.num_kept for row in hidden) / sum(math.prod(row.shape) for row in hidden)


def _one_init_for_all(model, plan):
    """Each hidden weight as if its density were that of the whole model."""
    overall_density = _overall_density(plan)
    with torch.no_grad():
        for row in plan:
            if row.role == "hidden":
                model.get_parameter(row.name).mul_(math.sqrt(float(row.density) / overall_density))


def _one_lr_for_all(model, plan):
    rate = 2**-8 / _overall_density(plan)  # width is the base width here
    hidden = [model.get_parameter(row.name) for row in plan if row.role == "hidden"]
    rest = [model.get_parameter(row.name) for row in plan if row.role != "hidden"]
    return torch.optim.AdamW([{"params": hidden, "lr": rate}, {"params": rest, "lr": 2**-8}], weight_decay=0.0)


def test_erk_passes_with_each_layers_own_density_and_fails_with_one_correction_for_all():
    settings = {
        "batches": _batches(3, (16,), num_classes=10, size=64),
        "base_width": 256,
        "widths": (256,),
        "densities": (1, 1 / 2, 1 / 4),
        "allocation": smupar.erk,
        "steps": 3,
        "seeds": 5,
        "lr": 2**-8,
    }
    right = _check(Bottleneck, **settings)
    squeezed = right.plans["smupar", 256, 1 / 4]
    assert squeezed["squeeze.weight"].density > 3 * squeezed["up.weight"].density
    assert right.verdicts == {"smupar": PASS}, right.explain()

    wrong = _check(Bottleneck, **settings, prepare=_one_init_for_all, optimizer=_one_lr_for_all)
    # The audit knows as well; here the sizes themselves must show it.
    assert overall(wrong.slopes) == FAIL
    failing = {(one.place, one.quantity) for one in wrong.slopes if one.verdict == FAIL and one.step == 1}
    assert {("squeeze", Y), ("squeeze", DY)} <= failing


# MLP and CNN, AdamW and SGD

LRS = {torch.optim.AdamW: 2**-8, torch.optim.SGD: 0.1}
OPTIMIZERS = pytest.mark.parametrize("optimizer", LRS)
RULES = ("sp", "mup", "smupar")
TITLES = ("SP", "muP", "SmuPar")


# Over width 5 seeds leave the readout's dY under SGD undecided (-0.15 +- 0.20 at step 1).
SEEDS = {torch.optim.AdamW: 5, torch.optim.SGD: 8}


def _mlp_check(optimizer, **changes):
    settings = {"base_width": 64, "densities": (1,), "steps": 5, "seeds": SEEDS[optimizer], "rules": RULES, **changes}
    return _check(MLP, batches=_batches(5, (16,), num_classes=10, size=64), optimizer=optimizer, lr=LRS[optimizer], **settings)


def _cnn_check(optimizer, **changes):
    settings = {"base_width": 64, "densities": (1,), "steps": 3, "seeds": SEEDS[optimizer], "rules": RULES, **changes}
    batches = _batches(3, (3, 8, 8), num_classes=10, size=16)
    return _check(CNN, batches=batches, optimizer=optimizer, lr=LRS[optimizer], **settings)


@OPTIMIZERS
def test_mlp_over_density_passes_under_smupar_alone(optimizer):
    report = _mlp_check(optimizer, widths=(256,), densities=(1, 1 / 4, 1 / 16))
    assert report.verdicts == {"sp": FAIL, "mup": FAIL, "smupar": PASS}, report.explain()


@OPTIMIZERS
def test_mlp_over_width_passes_under_mup_and_smupar(optimizer):
    report = _mlp_check(optimizer, widths=(64, 128, 256, 512))
    assert report.verdicts == {"sp": FAIL, "mup": PASS, "smupar": PASS}, report.explain()


@OPTIMIZERS
def test_sparse_mlp_over_width_passes_under_smupar(optimizer):
    report = _mlp_check(optimizer, widths=(64, 128, 256, 512), densities=(1 / 4,), rules=("sp", "smupar"))
    assert report.verdicts == {"sp": FAIL, "smupar": PASS}, report.explain()


@OPTIMIZERS
def test_cnn_over_density_passes_under_smupar_alone(optimizer):
    report = _cnn_check(optimizer, widths=(128,), densities=(1, 1 / 4, 1 / 16))
    assert report.verdicts == {"sp": FAIL, "mup": FAIL, "smupar": PASS}, report.explain()


@OPTIMIZERS
def test_cnn_over_width_passes_under_smupar(optimizer):
    report = _cnn_check(optimizer, widths=(64, 128, 256), rules=("sp", "smupar"))
    assert report.verdicts == {"sp": FAIL, "smupar": PASS}, report.explain()


@pytest.mark.slow
@OPTIMIZERS
@pytest.mark.parametrize("density", [1, 1 / 4])
def test_cnn_over_width_at_full_size(optimizer, density):
    report = _cnn_check(optimizer, widths=(64, 128, 256, 512), densities=(density,), rules=("sp", "smupar"), seeds=10)
    assert report.verdicts == {"sp": FAIL, "smupar": PASS}, report.explain()


# Bad input


def test_loss_that_is_no_scalar_raises():
    def per_sample(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with pytest.raises(ValueError, match=r"scalar tensor, got \(32,\).*\.mean\(\)"):
        _check(loss_fn=per_sample)
    with pytest.raises(ValueError, match="scalar tensor, got float"):
        _check(loss_fn=lambda model, batch: _loss(model, batch).item())
    with pytest.raises(ValueError, match="scalar tensor, got tuple"):
        _check(loss_fn=lambda model, batch: (_loss(model, batch), model))


def test_loss_without_a_graph_raises():
    with pytest.raises(ValueError, match="loss_fn"):
        _check(loss_fn=lambda model, batch: _loss(model, batch).detach())


def test_loss_that_is_not_finite_at_the_first_step_raises_and_says_where():
    with pytest.raises(ValueError, match=r"the loss is nan before any step \(rule smupar, width 16, density 1\).*init_std"):
        _check(loss_fn=lambda model, batch: _loss(model, batch) * math.nan)
    with pytest.raises(ValueError, match="the loss is inf before any step"):
        _check(loss_fn=lambda model, batch: _loss(model, batch) + math.inf)


def test_loss_that_explodes_later_is_a_finding(tmp_path):
    calls = []

    def loss_fn(model, batch):
        calls.append(torch.is_grad_enabled())
        # Passes with gradients are the training steps; every third one of each run is beyond repair.
        return _loss(model, batch) * (math.inf if sum(calls) % 3 == 0 and calls[-1] else 1)

    report = _check(loss_fn=loss_fn, steps=3)
    assert report.verdicts == {"smupar": FAIL}
    assert [found.cause for found in report.diagnoses if not found.is_caution] == ["diverged"]
    assert "lower the learning rate" in report.explain()
    assert max(one.step for one in report.readings) == 3
    assert {one.step for one in report.readings if one.quantity == DY} == {1, 2}
    # The picture of what was measured before that is whole, although the last step has no updates to show.
    panels = [axes for axes in report.plot(tmp_path / "check.png").axes if axes.get_lines()]
    assert [[label.get_text() for label in axes.get_xticklabels()] for axes in panels] == [["1/2", "1"]] * 3


def test_one_point_on_every_axis_raises():
    message = r"nothing to compare: widths=\[16\] and densities=\[1\.0\].*at least two widths or two densities"
    with pytest.raises(ValueError, match=message):
        _check(densities=(1,))
    with pytest.raises(ValueError, match="nothing to compare"):
        _check(densities=(1, 1.0), widths=(16, 16))


@pytest.mark.parametrize("widths", [(), (8,), (16,), (8, 16)])
def test_make_model_that_ignores_its_width_raises(widths):
    with pytest.raises(ValueError, match=r"make_model\(16\) and make_model\(8\) have the same shapes: make_model must use its"):
        _check(lambda width: Fork(16), widths=widths)


def test_make_model_that_caps_its_width_raises():
    with pytest.raises(ValueError, match="same shapes"):
        _check(lambda width: Fork(min(width, 16)), widths=(16, 32), densities=(1,))


def test_batches_that_run_out_raise():
    with pytest.raises(ValueError, match=r"batches ran out: 5 steps need as many batches, there are 3; pass more, or fewer"):
        _check(batches=_batches(3, (6,), num_classes=3), steps=5)


@pytest.mark.parametrize("changes", [{"steps": 0}, {"steps": -1}, {"seeds": 0}, {"seeds": ()}])
def test_no_steps_and_no_seeds_raise(changes):
    with pytest.raises(ValueError, match="steps and seeds must be at least 1"):
        _check(batches=_batches(3, (6,), num_classes=3), **changes)


def test_no_rules_and_unknown_rules_raise():
    with pytest.raises(ValueError, match="unknown rule 'super': choose one of sp, mup, smupar"):
        _check(rules=("super",))
    with pytest.raises(ValueError, match="rule"):
        _check(rules=())


@pytest.mark.parametrize("setting", [{"rule": "mup"}, {"density": 0.25}, {"seed": 3}])
def test_settings_that_the_grid_sets_are_refused(setting):
    # They would be overwritten in silence: rules, densities and seeds say it here.
    with pytest.raises((TypeError, ValueError), match=next(iter(setting))):
        _check(**setting)


# The report


@pytest.fixture(scope="module")
def report():
    return _check(
        batches=_batches(2, (6,), num_classes=3),
        rules=("sp", "mup", "smupar"),
        base_width=32,
        widths=(32, 64),
        densities=(1, 0.5),
        steps=2,
        seeds=2,
    )


def test_ok_is_about_the_rules_that_are_no_baselines():
    plan = smupar.make_plan(Fork(64), base=Fork(32))

    def made(**exponents):
        readings = [one for rule, exponent in exponents.items() for one in _made(exponent, rule=rule)]
        return Report(readings, faults={}, plans={(rule, 64, 1.0): plan for rule in exponents})

    both = made(sp=0.5, smupar=0.0)
    assert both.verdicts == {"sp": FAIL, "smupar": PASS}
    assert both.ok
    assert not made(sp=0.0, smupar=0.5).ok
    assert not made(sp=0.5, mup=0.5).ok  # nothing else was asked about
    assert made(mup=0.0).ok
    assert not made(smupar=0.3).ok  # more seeds is not a pass


def test_explain_has_titles_and_verdicts(report):
    words = report.explain()
    for rule, title in (("sp", "SP"), ("mup", "muP"), ("smupar", "SmuPar")):
        assert f"{title}: {report.verdicts[rule].upper()} over width (at density 1, 0.5) and density (at width 64, 32)" in words
    assert "2 steps, 2 seeds" in words
    assert report.verdicts["sp"] == FAIL
    assert "use rule='smupar'" in words


def _run(*command):
    """A process of its own, with one thread, like the tests: they share two cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def _strictly(text):
    """JSON as other languages read it: NaN and Infinity are none."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_holds_every_number(report, tmp_path):
    text = report.to_json(tmp_path / "check.json")
    assert (tmp_path / "check.json").read_text() == text
    read = _strictly(text)
    assert read["format"] == "smupar-coordinates/1"
    assert (read["ok"], read["verdicts"]) == (report.ok, report.verdicts)
    assert [Reading(**one) for one in read["readings"]] == report.readings
    saved = [replace(one, step=0, is_mean=False) if one.is_mean else one for one in report.slopes]
    assert [Slope(**one) for one in read["slopes"]] == saved
    assert [one["cause"] for one in read["diagnoses"]] == [one.cause for one in report.diagnoses]


def test_json_of_one_seed_is_json():
    read = _strictly(_check().to_json())  # one seed has no confidence interval
    assert {one["num_seeds"] for one in read["slopes"]} == {1}


def test_plot_writes_a_png(report, tmp_path):
    figure = report.plot(tmp_path / "check.png")
    assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    panels = [axes for axes in figure.axes if axes.get_lines()]
    assert len(panels) == 3 * 3 * 2  # quantities, rules, axes
    assert all(len(axes.get_lines()) == 2 for axes in panels)  # steps
    assert all((axes.get_xscale(), axes.get_yscale()) == ("log", "log") for axes in panels)
    titles = [axes.get_title() for axes in panels if axes.get_title()]
    named = [(axis, rule, title) for axis in ("width", "density") for rule, title in zip(RULES, TITLES, strict=True)]
    assert titles == [f"{title}: {report.axis_verdict(rule, axis)}" for axis, rule, title in named]


def test_plot_takes_other_quantities(report, tmp_path):
    figure = report.plot(tmp_path / "flow.pdf", quantities=(GRAD_W, CHANGE))
    assert (tmp_path / "flow.pdf").read_bytes().startswith(b"%PDF")
    assert len([axes for axes in figure.axes if axes.get_lines()]) == 2 * 3 * 2


def test_html_is_one_page_that_needs_no_other_file(report, tmp_path):
    report.to_html(tmp_path / "check.html")
    page = (tmp_path / "check.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    sources = re.findall(r"""(?:src|href)\s*=\s*['"]?([^'"\s>]{0,30})""", page)
    assert len(sources) == 1
    assert sources[0].startswith("data:image/png;base64,")
    outside = re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)
    assert not re.search(r"https?:|//|@import|url\(|<script|<link", outside)
    assert "<table>" in page
    judged = {(one.rule, one.axis, one.at, one.place, one.quantity) for one in report.slopes if one.quantity in JUDGED}
    assert page.count("<tr>") == 1 + len(judged)
    for text in ("step 1", "step 2", "SmuPar", "muP", "grad X", "left", "logits"):
        assert text in page


def test_missing_matplotlib_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import smupar, torch; from torch import nn\n"
        "make_model = lambda width: nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 2))\n"
        "loss = lambda model, batch: model(batch).square().mean()\n"
        "settings = dict(base_width=16, densities=(1, 0.5), steps=1, seeds=2, progress=False)\n"
        "report = smupar.coord_check(make_model, loss, [torch.ones(8, 4)], **settings)\n"
        "print(report.explain(), len(report.to_json()))\n"  # words and numbers need no picture
        "report.plot()\n"
    )
    done = _run("-c", code)
    assert "SmuPar: " in done.stdout
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: the picture needs matplotlib: pip install 'smupar[plot]'"


# The command line


TINY = (
    *("--base-width", "64", "--widths", "128", "--sparsities", "0", "0.75", "--depth", "1"),
    *("--steps", "2", "--seeds", "3", "--batch-size", "4", "--seq-len", "32"),
)


def _smupar_check(out, *args):
    return _run("-m", "smupar", "check", *TINY, "--out", str(out), *args)


@pytest.mark.parametrize(("rules", "code"), [(("sp", "smupar"), 0), (("sp",), 1), (("smupar-lr-only",), 1)])
def test_command_exits_with_the_verdict_and_writes_three_files(tmp_path, rules, code):
    done = _smupar_check(tmp_path / "new" / "folder", "--rules", *rules)
    assert done.returncode == code, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["check.html", "check.json", "check.png"]
    written = _strictly((tmp_path / "new" / "folder" / "check.json").read_text())
    assert list(written["verdicts"]) == list(rules)
    assert written["ok"] == (code == 0)
    assert done.stdout.startswith("SmuPar" if rules == ("smupar",) else "muP" if "only" in rules[0] else "SP: FAIL")
    if "smupar" in rules:
        assert "SmuPar: PASS over density (at width 128)" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--sparsities", "0"), "nothing to compare"),
        (("--steps", "0"), "steps must be a positive whole number"),
        (("--rules", "super"), "unknown rule 'super'"),
    ],
)
def test_command_with_bad_input_exits_with_2_and_one_line(tmp_path, args, message):
    done = _smupar_check(tmp_path, *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


# Edge cases


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(20, width), nn.LSTM(width, width, batch_first=True), nn.Linear(width, 5)

    def forward(self, ids):
        return {"out": self.head(self.rnn(self.table(ids))[0][:, -1])}


def _sequences(num):
    rng = torch.Generator().manual_seed(0)
    return [{"x": torch.randint(20, (16, 8), generator=rng), "y": torch.randint(5, (16,), generator=rng)} for _ in range(num)]


def _popping_loss(model, batch):
    return F.cross_entropy(model(batch.pop("x"))["out"], batch.pop("y"))


def test_recurrent_layers_are_measured_as_blocks_and_named(tmp_path):
    report = smupar.coord_check(
        Recurrent, _popping_loss, _sequences(2), base_width=16, widths=np.array([16, 64]), steps=2, seeds=1, progress=False
    )
    assert {one.quantity for one in report.readings if one.place == "rnn"} >= {Y, GRAD_X}
    (note,) = [diagnosis for diagnosis in report.diagnoses if diagnosis.cause == "unmeasured"]
    assert "rnn.weight_hh_l0" in note.places
    assert note.is_caution
    report.plot(tmp_path / "rnn.png")
    report.to_html(tmp_path / "rnn.html")
    assert json.loads(report.to_json())["format"] == "smupar-coordinates/1"


def test_nothing_measured_raises():
    class Own(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner = nn.Parameter(torch.randn(width, width))
            self.first = nn.Parameter(torch.randn(width))

    with pytest.raises(ValueError, match="nothing could be measured"):
        smupar.coord_check(
            Own, lambda m, _: (m.first @ m.inner).mean(), [None], base_width=8, widths=(8, 16), steps=1, seeds=1, progress=False
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.0},
        {"optimizer": lambda model, plan: torch.optim.SGD(smupar.param_groups(model, plan, lr=0.0, optimizer="sgd"))},
    ],
)
def test_check_in_which_nothing_moves_does_not_pass(settings):
    report = _check(**settings)
    assert not report.ok
    assert "nothing was trained" in report.explain()


def test_optimizer_function_without_an_optimizer_raises():
    with pytest.raises(ValueError, match="returned no optimizer"):
        _check(optimizer=lambda model, plan: None)


def test_autocast_is_measured():
    def loss_fn(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _loss(model, batch)

    usual, cast = _check(), _check(loss_fn=loss_fn)
    assert _size(cast, "left", GRAD_X).rms == pytest.approx(_size(usual, "left", GRAD_X).rms, rel=0.05)


def test_probe_leaves_running_statistics_and_dropout_alone():
    class Noisy(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.norm = nn.Linear(6, width), nn.BatchNorm1d(width)
            self.inner, self.head = nn.Linear(width, width), nn.Linear(width, 3)

        def forward(self, x):
            return self.head(F.dropout(self.inner(self.norm(self.first(x))), 0.5))

    models = []
    report = _check(make_model=Noisy, prepare=lambda model, plan: models.append(model), lr=1e-12, steps=3)
    assert {int(model.norm.num_batches_tracked) for model in models} == {3}
    assert max(one.rms for one in report.readings if one.quantity == CHANGE) < 1e-5


def test_slopes_that_are_certain_but_between_the_thresholds_are_called_a_drift():
    readings = [one for seed in range(5) for one in _made(-0.28, seed=seed)]
    (found,) = slopes(readings)
    assert found.verdict == UNCLEAR
    report = _check(seeds=2)
    report.readings, report.slopes, report.diagnoses = readings, [found], []
    assert "more seeds will not change" in report.explain()
