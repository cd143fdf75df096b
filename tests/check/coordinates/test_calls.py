"""Layers and matrices that are measured by repeating a call as it was made."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from smupar.check.coordinates.calls import SampledCall, WholeCall
from smupar.check.coordinates.readings import DY, GRAD_X, Y
from smupar.check.coordinates.verdict import FAIL, PASS
from tests.check.grid import batches_of, check, size_of, slope_of, token_batches, trained_once, twin


class Positions(nn.Embedding):
    """As OPT's: the call has a mask, and positions follow from it."""

    def __init__(self, num, width):
        super().__init__(num + 2, width)

    def forward(self, mask, past=0):
        return super().forward(mask.cumsum(-1) + 1 + past)


class Scaled(nn.Linear):
    """As a layer that takes a gain beside its input."""

    def forward(self, gain, x):
        return gain * F.linear(x, self.weight, self.bias)


class Odd(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.positions = nn.Embedding(11, width), Positions(5, width)
        self.inner = Scaled(width, width)
        self.head = nn.Linear(width, 11, bias=False)

    def forward(self, tokens):
        x = self.table(tokens) + self.positions(torch.ones_like(tokens), past=0)
        return self.head(self.inner(2.0, x).tanh())


def test_layers_with_other_arguments_are_measured_as_they_were_called():
    (batch,) = token_batches(1)
    report = check(Odd, batches=[batch], lr=0.01)
    model, plan = twin(Odd)
    x = (model.table(batch[0]) + model.positions.weight[2:7]).detach()
    inner = model.inner(2.0, x)
    inner.retain_grad()
    F.cross_entropy(model.head(inner.tanh()).flatten(0, 1), batch[1].flatten()).backward()
    grad = 2 * inner.grad @ model.inner.weight.detach() / plan.output_factor
    assert size_of(report, "inner", GRAD_X).rms == pytest.approx(grad.square().mean().sqrt().item(), rel=1e-4)

    model.zero_grad()
    before = trained_once(model, plan, batch, torch.optim.AdamW, 0.01)
    change = {name: (parameter.detach() - before[name]) for name, parameter in model.named_parameters()}
    effects = {"positions": change["positions.weight"][2:7], "inner": 2 * x @ change["inner.weight"].T}
    for place, effect in effects.items():
        assert size_of(report, place, DY).rms == pytest.approx(effect.square().mean().sqrt().item(), rel=1e-3), place
    assert size_of(report, "positions", DY).kind == "layer"
    assert "unmeasured" not in {found.cause for found in report.diagnoses}


class LowRank(nn.Module):
    """Raw factors of fixed rank, on the right of their inputs."""

    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(width, 4) / width**0.5), nn.Parameter(torch.randn(4, width) / 2)

    def forward(self, x):
        return x + (x @ self.down).tanh() @ self.up


class Raw(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.inner = nn.Linear(6, width), nn.Linear(width, width)
        self.low, self.head = LowRank(width), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.low(self.inner(self.first(x).tanh()).tanh()))


RIGHT = {"low.down": ("hidden", 0), "low.up": ("hidden", 0)}


def test_raw_matrix_is_measured_by_what_its_update_does_to_the_output_of_its_module():
    (batch,) = batches_of(1)
    report = check(Raw, batches=[batch], roles=RIGHT, lr=0.01, densities=(1, 0.9))
    model, plan = twin(Raw, roles=RIGHT, density=0.9)
    x = model.inner(model.first(batch[0]).tanh()).tanh().detach()
    before = trained_once(model, plan, batch, torch.optim.AdamW, 0.01)
    with torch.no_grad():
        down, up = model.low.down, model.low.up
        effects = {
            "low.down": ((x @ down).tanh() - (x @ before["low.down"]).tanh()) @ up,
            "low.up": (x @ down).tanh() @ (up - before["low.up"]),
        }
    for name, effect in effects.items():
        found = size_of(report, name, DY, density=0.9)
        assert found.rms == pytest.approx(effect.square().mean().sqrt().item(), rel=1e-3)
        assert (found.kind, found.role) == ("part", "hidden")
    assert "unmeasured" not in {found.cause for found in report.diagnoses}


def test_raw_matrix_whose_learning_rate_ignores_the_width_fails():
    # As a vector, x @ down is moved by lr * n at width n, where it should be moved by lr.
    batches = batches_of(1, size=8)
    settings = {"base_width": 64, "widths": (64, 256), "densities": (1,), "seeds": 8, "lr": 2**-10, "batches": batches}
    wrong = check(Raw, roles={"low.down": "vector", "low.up": "vector"}, **settings)
    assert slope_of(wrong, "smupar", "low.down", DY, axis="width") == pytest.approx(1.0, abs=0.2)
    assert wrong.verdicts == {"smupar": FAIL}
    right = check(Raw, roles=RIGHT, **settings)
    assert slope_of(right, "smupar", "low.down", DY, axis="width") == pytest.approx(0.0, abs=0.2)
    assert right.verdicts == {"smupar": PASS}, right.explain()


class Readout(nn.Module):
    """A layer of fixed inputs or outputs, as a raw matrix."""

    def __init__(self, num_in, num_out):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(num_in, num_out) / num_in**0.5)

    def forward(self, x):
        return x @ self.matrix


class FactorOutside(nn.Module):
    """No hook can scale the readout, and the model applies its factor outside of the readout's module."""

    def __init__(self, width):
        super().__init__()
        self.first, self.inner, self.readout = nn.Linear(6, width), nn.Linear(width, width), Readout(width, 3)
        self.factor = 1.0

    def forward(self, x):
        return self.factor * self.readout(self.inner(self.first(x).tanh()).tanh())


def scale_logits(model, plan):
    model.factor = plan.output_factor
    plan.settle("output_factor")


def test_raw_readout_is_measured_with_the_factor_that_the_model_applies_later():
    batches = batches_of(1, size=8)
    settings = {"base_width": 64, "widths": (64, 256), "densities": (1,), "seeds": 8, "lr": 2**-10, "batches": batches}
    settings["roles"] = {"readout.matrix": "unembedding"}
    right = check(FactorOutside, prepare=scale_logits, **settings)
    assert slope_of(right, "smupar", "readout.matrix", DY, axis="width") == pytest.approx(0.0, abs=0.2)
    assert right.verdicts == {"smupar": PASS}, right.explain()
    wrong = check(FactorOutside, prepare=lambda model, plan: plan.settle("output_factor"), **settings)
    assert slope_of(wrong, "smupar", "readout.matrix", DY, axis="width") == pytest.approx(1.0, abs=0.2)
    assert wrong.verdicts == {"smupar": FAIL}


class ByHand(nn.Module):
    """Uses the weights of ``low`` without calling it, and has a table that is not trained."""

    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(4, width)
        self.table.requires_grad_(False)
        self.first, self.low, self.head = nn.Linear(6, width), nn.Linear(width, width, bias=False), nn.Linear(width, 3)

    def forward(self, x):
        return self.head((self.first(x).tanh() @ self.low.weight.T).tanh() + self.table.weight[0])


def test_layer_whose_weight_is_used_by_hand_is_measured_through_the_module_that_uses_it():
    (batch,) = batches_of(1)
    report = check(ByHand, batches=[batch], lr=0.01)
    model, plan = twin(ByHand)
    x = model.first(batch[0]).tanh().detach()
    before = trained_once(model, plan, batch, torch.optim.AdamW, 0.01)
    with torch.no_grad():
        made = [0.5 * (x @ weight.T).tanh() @ model.head.weight.T for weight in (model.low.weight, before["low.weight"])]
    effect = made[0] - made[1]
    assert size_of(report, "low.weight", DY).kind == "part"
    # The other weights have moved as well by then; the first layer's part in that is small.
    assert size_of(report, "low.weight", DY).rms == pytest.approx(effect.square().mean().sqrt().item(), rel=0.1)
    assert "unmeasured" not in {found.cause for found in report.diagnoses}


class Forgetful(Raw):
    """Keeps what it has seen, so that no call is like the one before."""

    def __init__(self, width):
        super().__init__(width)
        self.seen = 0.0
        self.scores = nn.Parameter(torch.randn(2, width))

    def forward(self, x):
        self.seen += 1.0
        return super().forward(x) + self.seen * self.scores.mean()


def test_matrix_that_cannot_be_measured_is_named_whatever_its_role():
    report = check(Forgetful, roles={**RIGHT, "scores": "vector"}, densities=(1,), widths=(8, 16))
    (note,) = [found for found in report.diagnoses if found.cause == "unmeasured"]
    assert report.plans["smupar", 16, 1.0, None]["scores"].role == "vector"
    assert note.places == ("scores",)
    assert note.is_caution
    assert "not measured" in report.explain()


def test_repeated_call_leaves_buffers_and_random_numbers_alone():
    norm = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    call = WholeCall(norm, (x,), {})
    torch.manual_seed(1)
    state = torch.get_rng_state()
    before = norm[0].weight.detach().clone()
    with torch.no_grad():
        norm[0].weight.add_(1.0)
    effect = call.effect(norm[0].weight, before)
    assert effect.abs().max() > 0.1
    assert int(norm[0].num_batches_tracked) == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(norm[0].weight, before + 1)


def test_parametrized_weight_is_measured_by_the_output_of_its_layer():
    def make(width):
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), weight_norm(nn.Linear(width, width)), nn.Linear(width, 3))

    roles = {"*.original0": "vector", "*.original1": ("hidden", 1)}
    name = "2.parametrizations.weight.original1"
    (batch,) = batches_of(1)
    report = check(make, batches=[batch], roles=roles, lr=0.01, densities=(1, 0.9))
    model, plan = twin(make, roles=roles, density=0.9)
    x = model[0](batch[0]).tanh().detach()
    before = trained_once(model, plan, batch, torch.optim.AdamW, 0.01)[name]
    with torch.no_grad():
        after = model[2](x)
        model.get_parameter(name).copy_(before)
        effect = after - model[2](x)
    assert size_of(report, name, DY, density=0.9).rms == pytest.approx(effect.square().mean().sqrt().item(), rel=1e-3)


def test_rows_that_the_loss_does_not_depend_on_do_not_count_for_the_effect():
    class LastRow(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.inner, self.head = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3)

        def forward(self, x):
            return self.head(self.inner(self.first(x).tanh())[:, -1:])

    x = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0))
    batch = x, torch.randint(3, (4, 1), generator=torch.Generator().manual_seed(0))
    report = check(LastRow, batches=[batch], lr=0.01)
    model, plan = twin(LastRow)
    read = model.first(x).tanh().detach()[:, -1]
    before = trained_once(model, plan, batch, torch.optim.AdamW, 0.01)
    effect = read @ (model.inner.weight.detach() - before["inner.weight"]).T
    assert size_of(report, "inner", DY).rms == pytest.approx(effect.square().mean().sqrt().item(), rel=1e-4)
    assert size_of(report, "inner", Y).num_entries == 4 * 8 * 16


class EqualValues(nn.Module):
    """Attends to values that are all equal, as the first layer of DETR's decoder. So its scores get no gradient."""

    def __init__(self, width):
        super().__init__()
        self.first, self.scores, self.head = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x).tanh()
        shares = self.scores(x).softmax(-1)
        return self.head(x + 0.1 * shares @ torch.ones(len(shares.mT), 1))


def test_updates_that_are_made_of_rounding_errors_do_not_count():
    batches = batches_of(2, size=8)
    settings = {"base_width": 64, "widths": (64, 256), "densities": (1,), "seeds": 8, "steps": 2, "lr": 2**-10}
    report = check(EqualValues, batches=batches, **settings)
    assert all(reading.rms == 0 for reading in report.readings if (reading.place, reading.quantity) == ("scores", DY))
    assert report.verdicts == {"smupar": PASS}, report.explain()
    assert "unmeasured" not in {found.cause for found in report.diagnoses}


@pytest.mark.parametrize(("shape", "sums_to_zero"), [((2, 5), True), ((5,), True), ((5,), False)])
def test_shift_of_all_rows_of_a_sequence_counts_only_if_the_loss_depends_on_it(shape, sums_to_zero):
    """A shift of all keys of an attention changes nothing."""
    torch.manual_seed(0)
    keys, x, grad = nn.Linear(6, 4), torch.randn(*shape, 6), torch.randn(*shape, 4)
    call, before = SampledCall(keys, x), keys.weight.detach().clone()
    call.keep_gradient(grad - grad.mean(-2, keepdim=True) if sums_to_zero else grad)
    with torch.no_grad():
        keys.weight.add_(1.0)
    change = x.sum(-1, keepdim=True).expand(*shape, 4)
    expected = change - change.mean(-2, keepdim=True) if sums_to_zero else change
    torch.testing.assert_close(call.effect(keys.weight, before), expected.flatten(0, -2))
