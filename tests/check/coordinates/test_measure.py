"""Sizes of outputs, updates and gradients, against references by hand."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.check.coordinates.measure import SizeRecorder
from smupar.check.coordinates.readings import CHANGE, DY, GRAD_W, GRAD_X, Y
from smupar.lm.config.run_config import ModelConfig
from smupar.lm.model.gpt import GPT
from tests.check.grid import CNN, Fork, Tied, Transposed, batches_of, check, size_of, token_batches, trained_once, twin
from tests.support.loops import loss_of


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


def assert_sizes(report, place, quantity, values, **where):
    found = size_of(report, place, quantity, **where)
    assert found.rms == pytest.approx(values.double().square().mean().sqrt().item(), rel=2e-4)
    assert found.mean_abs == pytest.approx(values.double().abs().mean().item(), rel=2e-4)


def assert_no_reading(report, place, quantity):
    assert not [reading for reading in report.readings if (reading.place, reading.quantity) == (place, quantity)]


def with_grad(values):
    values.retain_grad()
    return values


@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.AdamW, 0.01), (torch.optim.SGD, 0.3)])
def test_sizes_of_a_linear_model_equal_a_reference_by_hand(optimizer, lr):
    (batch,) = batches_of(1)
    report = check(batches=[batch], optimizer=optimizer, lr=lr, alpha_output=0.7)

    model, plan = twin(Fork, alpha_output=0.7)
    assert plan.output_factor == pytest.approx(0.35)  # alpha_output / m_d
    x, targets = batch
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = with_grad(model.first(x))
    shared = first.tanh()
    left, right = with_grad(model.left(shared)), with_grad(model.right(shared))
    joined = left.tanh() + right.tanh()
    logits = with_grad(0.35 * joined @ model.head.weight.T + model.head.bias)
    F.cross_entropy(logits, targets).backward()
    outputs = {"first": first, "left": left, "right": right, "head": logits}
    for place, output in outputs.items():
        assert_sizes(report, place, Y, output.detach())
        assert_sizes(report, place, GRAD_W, model.get_submodule(place).weight.grad)
    assert_sizes(report, "", Y, logits.detach())

    # Through the layer alone: left and right share an input, whose own gradient is the sum of both.
    for place in ("first", "left", "right"):
        assert_sizes(report, place, GRAD_X, outputs[place].grad @ start[f"{place}.weight"] / 0.35)
    assert_sizes(report, "head", GRAD_X, logits.grad @ start["head.weight"])  # the factor, divided out again

    model.zero_grad()
    before = trained_once(model, plan, batch, optimizer, lr)
    change = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    assert change["left.bias"].abs().max() > 1e-4  # biases move, and do not count
    inputs = {"first": x, "left": shared.detach(), "right": shared.detach(), "head": 0.35 * joined.detach()}
    for place, read in inputs.items():
        assert_sizes(report, place, DY, read @ change[f"{place}.weight"].T)
    with torch.no_grad():
        assert_sizes(report, "left", CHANGE, model.left(model.first(x).tanh()) - left)
        assert_sizes(report, "", CHANGE, model(x) - logits)


def test_sizes_of_a_tied_embedding_are_those_of_both_its_uses():
    (batch,) = token_batches(1)
    report = check(Tied, batches=[batch], lr=0.01, alpha_input=3.0)

    model, plan = twin(Tied, alpha_input=3.0)
    tokens, targets = batch
    looked_up = with_grad(3.0 * model.table.weight[tokens])
    inner = with_grad(model.inner(looked_up))
    read = looked_up + inner.tanh()
    logits = with_grad(0.5 * read @ model.table.weight.T)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    table = model.table.weight.detach().clone()
    assert_sizes(report, "table", Y, looked_up.detach())
    assert_sizes(report, "readout", Y, logits.detach())
    assert_sizes(report, "readout", GRAD_X, logits.grad @ table)
    assert_sizes(report, "inner", GRAD_X, inner.grad @ model.inner.weight.detach() / 0.5)
    assert_sizes(report, "table", GRAD_W, model.table.weight.grad)
    assert size_of(report, "table", GRAD_W).norm == pytest.approx(float(model.table.weight.grad.norm()), rel=1e-4)
    assert_no_reading(report, "table", GRAD_X)  # its input is a token
    assert size_of(report, "table", Y).role == "embedding"
    assert size_of(report, "readout", Y).role == "unembedding"

    model.zero_grad()
    trained_once(model, plan, batch, torch.optim.AdamW, 0.01)
    change = model.table.weight.detach() - table
    assert_sizes(report, "table", DY, 3.0 * change[tokens])
    assert_sizes(report, "readout", DY, 0.5 * read.detach() @ change.T)


def test_sizes_of_a_convolution_equal_a_reference_by_hand():
    (batch,) = batches_of(1, (3, 8, 8), num_classes=10, size=8)
    report = check(CNN, batches=[batch], optimizer=torch.optim.SGD, lr=0.5)

    model, plan = twin(CNN)
    x = F.avg_pool2d(F.relu(model.first(batch[0])), 2)
    conv1 = with_grad(model.conv1(x))
    between = F.relu(conv1)
    conv2 = with_grad(model.conv2(between))
    F.cross_entropy(model.head(F.relu(conv2).mean((2, 3))), batch[1]).backward()
    assert_sizes(report, "conv2", Y, conv2.detach())
    grad = torch.nn.grad.conv2d_input(between.shape, model.conv2.weight, conv2.grad, stride=2, padding=1)
    assert_sizes(report, "conv2", GRAD_X, grad.detach() / plan.output_factor)

    model.zero_grad()
    before = trained_once(model, plan, batch, torch.optim.SGD, 0.5)
    change = model.conv2.weight.detach() - before["conv2.weight"]
    assert_sizes(report, "conv2", DY, F.conv2d(between.detach(), change, stride=2, padding=1))


def test_sizes_of_a_transposed_linear_equal_a_reference_by_hand():
    (batch,) = batches_of(1)
    report = check(Transposed, batches=[batch], lr=0.01)

    model, plan = twin(Transposed)
    x = model.first(batch[0]).tanh()
    inner = with_grad(model.inner(x))
    F.cross_entropy(model.head(inner.tanh()), batch[1]).backward()
    assert_sizes(report, "inner", Y, inner.detach())
    assert_sizes(report, "inner", GRAD_X, inner.grad @ model.inner.weight.detach().T / 0.5)

    model.zero_grad()
    before = trained_once(model, plan, batch, torch.optim.AdamW, 0.01)
    assert_sizes(report, "inner", DY, x.detach() @ (model.inner.weight.detach() - before["inner.weight"]))


def test_change_of_y_is_zero_while_nothing_is_learned_and_counts_from_init():
    batches = batches_of(3)
    still = check(batches=batches, steps=3, optimizer=torch.optim.SGD, lr=0.0)
    changes = [reading for reading in still.readings if reading.quantity == CHANGE]
    assert {reading.step for reading in changes} == {1, 2, 3}
    assert {reading.rms for reading in changes} == {0.0}

    # Always on the first batch and against the untrained model, whatever batch was trained on last.
    report = check(batches=batches, steps=3, lr=0.01)
    model, plan = twin(Fork)
    with torch.no_grad():
        start = model(batches[0][0])
    stepper = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, weight_decay=0.0))
    for step, batch in enumerate(batches, 1):
        stepper.zero_grad()
        loss_of(model, batch).backward()
        stepper.step()
        with torch.no_grad():
            assert_sizes(report, "", CHANGE, model(batches[0][0]) - start, step=step)


def test_sizes_of_later_steps_are_those_of_their_own_batch_and_weights():
    batches = batches_of(2)
    report = check(batches=batches, steps=2, lr=0.01)
    model, plan = twin(Fork)
    stepper = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, weight_decay=0.0))
    loss_of(model, batches[0]).backward()
    stepper.step()
    stepper.zero_grad()
    loss_of(model, batches[1]).backward()
    shared, before = model.first(batches[1][0]).tanh().detach(), model.left.weight.detach().clone()
    assert_sizes(report, "left", Y, model.left(shared).detach(), step=2)
    assert_sizes(report, "left", GRAD_W, model.left.weight.grad, step=2)
    stepper.step()
    assert_sizes(report, "left", DY, shared @ (model.left.weight.detach() - before).T, step=2)


def test_sizes_do_not_depend_on_activations_in_place():
    batches = batches_of(2, (3, 8, 8), num_classes=10, size=8)
    plain = check(CNN, batches=batches, steps=2)
    inplace = check(lambda width: CNN(width, inplace=True), batches=batches, steps=2)
    assert plain.readings == inplace.readings


def test_blocks_and_logits_are_reported_beside_layers():
    report = check(lambda width: GPT(ModelConfig(width=width, depth=1, head_dim=8)), batches=token_batches(1, vocab=256))
    kinds = {(reading.place, reading.kind, reading.role) for reading in report.readings if reading.quantity == Y}
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
    assert {reading.place for reading in report.readings if reading.quantity == GRAD_X} >= {
        "blocks.0.attention",
        "blocks.0.mlp",
    }


def test_a_lookup_table_called_hidden_is_measured():
    # roles= may say so, wrongly or not; the check should tell, not crash.
    report = check(Tied, batches=token_batches(1), densities=(1,), widths=(8, 16), roles={"table.weight": "hidden"})
    assert any(found.cause == "embedding as hidden" for found in report.diagnoses)


@pytest.mark.parametrize("num_rows", [None, 5])
def test_a_layer_that_is_applied_twice_is_measured(num_rows):
    report = check(lambda width: Shared(width, num_rows), optimizer=torch.optim.SGD, lr=0.0)
    changes = [reading for reading in report.readings if reading.quantity == CHANGE and reading.place == "inner"]
    assert changes
    assert {reading.step for reading in changes} == {1}  # there is no change before the first step
    assert {reading.rms for reading in changes} == {0.0}  # nothing was learned: each call is compared with itself


@pytest.mark.parametrize(("num_sequences", "length"), [(512, 5), (64, 16), (300, 7)])
def test_a_large_batch_is_sampled_at_all_positions_alike(num_sequences, length):
    x = torch.arange(length).float()[None, :, None].expand(num_sequences, length, 6)  # 0 at the first position
    batch = x, torch.randint(3, (num_sequences, length), generator=torch.Generator().manual_seed(0))
    report = check(batches=[batch], lr=0.01)
    model, plan = twin(Fork)
    before = trained_once(model, plan, batch, torch.optim.AdamW, 0.01)
    effect = x @ (model.first.weight - before["first.weight"]).T
    assert size_of(report, "first", DY).rms == pytest.approx(effect.square().mean().sqrt().item(), rel=0.02)


def test_two_runs_give_identical_readings():
    first, second = (check(steps=2, seeds=2, batches=batches_of(2)) for _ in range(2))
    assert first.readings == second.readings
    assert (
        len({reading.rms for reading in first.readings if (reading.place, reading.quantity, reading.step) == ("left", Y, 1)})
        == 4
    )


def test_readings_do_not_depend_on_the_callers_random_state():
    torch.manual_seed(1)
    first = check()
    torch.manual_seed(2)
    assert check().readings == first.readings


def plain(width):
    return Fork(width)


def seeding(width):
    torch.manual_seed(7)
    return Fork(width)


def computing(width):
    model = Fork(width)
    model.constant = float(torch.rand(3).sum())  # not possible on the meta device
    return model


@pytest.mark.parametrize("make_model", [plain, seeding, computing])
def test_global_random_state_is_untouched(make_model):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check(make_model)
    assert torch.equal(torch.get_rng_state(), before)


def test_callers_batches_are_untouched():
    batches = batches_of(2)
    kept = [tuple(part.clone() for part in batch) for batch in batches]
    check(batches=batches, steps=2)
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

    check(make_model)
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
        return loss_of(model, batch)

    check(loss_fn=loss_fn, batches=endless(), steps=3)
    first, second, third = seen[1], seen[3], seen[5]
    # Before the first step and after each one the first batch is probed again.
    assert seen == [first, first, first, second, first, third, first] * 2
    assert len({first, second, third}) == 3


def test_recorder_keeps_as_many_tensors_after_ten_steps_as_after_one():
    model, plan = twin(Fork)
    stepper = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    recorder = SizeRecorder(model, plan)

    def held():
        values = [value for value in vars(recorder).values() if isinstance(value, dict)]
        return sum(tensor.numel() for value in values for tensor in value.values() if isinstance(tensor, torch.Tensor))

    counts, lengths = [], []
    with recorder.probe(), torch.no_grad():
        loss_of(model, batches_of(1)[0])
    for step, batch in enumerate(batches_of(10), 1):
        recorder.step = step
        loss_of(model, batch).backward()
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


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(20, width), nn.LSTM(width, width, batch_first=True), nn.Linear(width, 5)

    def forward(self, ids):
        return {"out": self.head(self.rnn(self.table(ids))[0][:, -1])}


def sequences(num):
    rng = torch.Generator().manual_seed(0)
    return [{"x": torch.randint(20, (16, 8), generator=rng), "y": torch.randint(5, (16,), generator=rng)} for _ in range(num)]


def popping_loss(model, batch):
    return F.cross_entropy(model(batch.pop("x"))["out"], batch.pop("y"))


def test_recurrent_layers_are_measured_as_blocks_and_their_matrices_as_parts(tmp_path):
    report = smupar.coord_check(
        Recurrent, popping_loss, sequences(2), base_width=16, widths=np.array([16, 64]), steps=2, seeds=1, progress=False
    )
    assert {reading.quantity for reading in report.readings if reading.place == "rnn"} >= {Y, GRAD_X}
    for name in ("rnn.weight_ih_l0", "rnn.weight_hh_l0"):
        (part,) = [reading for reading in report.readings if reading.place == name and (reading.width, reading.step) == (64, 1)]
        assert (part.kind, part.role, part.quantity) == ("part", "hidden", DY)
        assert part.rms > 0
    assert "unmeasured" not in {diagnosis.cause for diagnosis in report.diagnoses}
    report.plot(tmp_path / "rnn.png")
    report.to_html(tmp_path / "rnn.html")
    assert json.loads(report.to_json())["format"] == "smupar-coordinates/2"


def test_autocast_is_measured():
    def loss_fn(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, batch)

    usual, cast = check(), check(loss_fn=loss_fn)
    assert size_of(cast, "left", GRAD_X).rms == pytest.approx(size_of(usual, "left", GRAD_X).rms, rel=0.05)


def test_probe_leaves_running_statistics_and_dropout_alone():
    class Noisy(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.norm = nn.Linear(6, width), nn.BatchNorm1d(width)
            self.inner, self.head = nn.Linear(width, width), nn.Linear(width, 3)

        def forward(self, x):
            return self.head(F.dropout(self.inner(self.norm(self.first(x))), 0.5))

    models = []
    report = check(make_model=Noisy, prepare=lambda model, plan: models.append(model), lr=1e-12, steps=3)
    assert {int(model.norm.num_batches_tracked) for model in models} == {3}
    assert max(reading.rms for reading in report.readings if reading.quantity == CHANGE) < 1e-5
