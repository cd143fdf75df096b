"""Layers next to sizes that do not scale with the width: bottlenecks, token mixers, projections, heads."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.check.coordinates.places import NARROWING, WIDENING
from smupar.check.coordinates.readings import CHANGE, DY, GRAD_X, OF_LOSS, Y
from smupar.check.coordinates.verdict import FAIL, PASS
from tests.check.grid import batches_of, check, size_of, slope_of, twin
from tests.support.architectures.architecture import settle_all
from tests.support.models import mixture

RANK = 32


class Bottleneck(nn.Module):
    """Linear layers width -> RANK -> width in a residual branch, as in latent attention."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(6, width, bias=False)
        self.down, self.up = nn.Linear(width, RANK, bias=False), nn.Linear(RANK, width, bias=False)
        self.inner, self.head = nn.Linear(width, width, bias=False), nn.Linear(width, 3, bias=False)

    def forward(self, x):
        x = self.first(x)
        x = x + self.up(self.down(x))
        return self.head(x + self.inner(x).tanh())


class Mixer(nn.Module):
    """``t1`` and ``t2`` read and write 4 tokens, for each of ``width`` channels."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.t1, self.t2 = nn.Linear(4, width), nn.Linear(width, 4)
        self.inner, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        x = x + self.t2(self.t1(x.mT).relu()).mT
        return self.head((x + self.inner(x).relu()).mean(1))


class Projection(nn.Module):
    """Ends in a hidden layer of RANK outputs, whose directions are compared, as in CLIP."""

    def __init__(self, width):
        super().__init__()
        self.first, self.inner = nn.Linear(6, width), nn.Linear(width, width)
        self.projection = nn.Linear(width, RANK, bias=False)

    def forward(self, x):
        x = F.normalize(self.projection(self.inner(self.first(x).tanh()).tanh()), dim=-1)
        return 4 * x @ x.roll(1, 0).T


MODELS = {
    "bottleneck": (Bottleneck, {"down.weight": "hidden", "up.weight": "hidden", "head.weight": "unembedding"}, (6,)),
    "mixer": (Mixer, {"t1.weight": "hidden", "t2.weight": "hidden", "head.weight": "unembedding"}, (4, 6)),
    "projection": (Projection, {"projection.weight": "hidden"}, (6,)),
}


def fixed_check(kind, **changes):
    make, roles, shape = MODELS[kind]
    settings = {"base_width": 64, "widths": (64, 256), "densities": (1,), "steps": 3, "seeds": 5, **changes}
    settings |= {} if "optimizer" in changes else {"lr": 2**-8}
    batches = batches_of(settings["steps"], shape, num_classes=16 if kind == "projection" else 3, size=16)
    return check(make, batches=batches, roles=roles, **{"prepare": settle_all, **settings})


@pytest.mark.parametrize("kind", MODELS)
def test_models_with_fixed_sizes_pass_over_width_where_sp_fails(kind):
    report = fixed_check(kind, rules=("smupar", "sp"))
    assert report.verdicts == {"smupar": PASS, "sp": FAIL}, report.explain()


@pytest.mark.parametrize("kind", ["bottleneck", "projection"])  # of the mixer's four tokens, two would be left
def test_models_with_fixed_sizes_pass_over_density_where_mup_fails(kind):
    report = fixed_check(kind, widths=(256,), densities=(1, 1 / 2), rules=("smupar", "mup"), seeds=8)
    assert report.verdicts == {"smupar": PASS, "mup": FAIL}, report.explain()


def test_gradient_through_a_layer_next_to_a_fixed_size_is_what_algebra_says():
    """W of independent entries of std s: the mean square of W^T g is s^2 n_out times that of g. With s^2 = 1 / fan-in this is
    n_out / n_in. The check divides by the size of g and by sqrt(m_out / m_in), so sqrt(n_out / n_in) of the base is left."""
    make, roles, _ = MODELS["bottleneck"]
    report = fixed_check("bottleneck", init_std="fan_in", steps=1, seeds=1)
    for width in (64, 256):
        down, up = (size_of(report, place, GRAD_X, width=width, density=1.0) for place in ("down", "up"))
        assert down.role == NARROWING
        assert up.role == WIDENING
        assert down.rms == pytest.approx(math.sqrt(RANK / 64), rel=0.25)
        assert up.rms == pytest.approx(math.sqrt(64 / RANK), rel=0.25)
    for place in ("down", "up"):
        assert slope_of(report, "smupar", place, GRAD_X, axis="width") == pytest.approx(0.0, abs=0.2)

    # The gradients themselves, as torch has them: 1/sqrt(m) in the bottleneck, 1/m outside of it.
    sizes = {}
    for width in (64, 1024):
        torch.manual_seed(0)
        model = make(width)
        smupar.parameterize(model, base=make(64), delta=make(128), init_std="fan_in", roles=roles)
        x = model.first(torch.randn(64, 6, generator=torch.Generator().manual_seed(0))).detach().requires_grad_()
        inside = model.down(x)
        inside.retain_grad()
        y = x + model.up(inside)
        F.cross_entropy(model.head(y + model.inner(y).tanh()), torch.arange(64) % 3).backward()
        sizes[width] = [float(grad.square().mean().sqrt()) for grad in (inside.grad, x.grad)]
    slopes = [math.log2(wide / narrow) / 4 for narrow, wide in zip(*sizes.values(), strict=True)]
    assert slopes == pytest.approx([-0.5, -1.0], abs=0.1)


def test_gradients_of_a_model_that_ends_in_a_projection_fall_as_the_root_of_the_width():
    make, roles, _ = MODELS["projection"]
    model, _ = twin(make, density=1.0, roles=roles)
    (batch,) = batches_of(1, num_classes=16, size=16)
    hidden = model.first(batch[0]).tanh().detach()
    inner = model.inner(hidden)
    inner.retain_grad()
    projected = model.projection(inner.tanh())
    projected.retain_grad()
    x = F.normalize(projected, dim=-1)
    F.cross_entropy(4 * x @ x.roll(1, 0).T, batch[1]).backward()
    grad = inner.grad @ model.inner.weight.detach()
    report = check(make, batches=[batch], roles=roles, densities=(1,), widths=(8, 16), prepare=settle_all)
    found = size_of(report, "inner", GRAD_X, density=1.0)
    # At twice the base width: sqrt(2), not the factor 2 of a readout, in proportion to the gradient that the norm sends back.
    arriving = float(projected.grad.square().mean().sqrt())
    assert found.rms == pytest.approx(math.sqrt(2) * float(grad.square().mean().sqrt()) / arriving, rel=1e-3)


def standard_init(place):
    """Leaves out the init's factor 1/sqrt(m_in)."""

    def plant(model, plan):
        settle_all(model, plan)
        row = plan[f"{place}.weight"]
        model.get_parameter(row.name).data.mul_(math.sqrt(row.width_in))

    return plant


def rate_of(place):
    """An optimizer that leaves out the learning rate's factor 1/m_in."""

    def make(model, plan):
        groups = smupar.param_groups(model, plan, lr=2**-8, weight_decay=0.0)
        weight = model.get_parameter(f"{place}.weight")
        kept = [{**group, "params": [p for p in group["params"] if p is not weight]} for group in groups]
        return torch.optim.AdamW([*(group for group in kept if group["params"]), {"params": [weight], "lr": 2**-8}])

    return make


def failing(report):
    return {(slope.place, slope.quantity) for slope in report.slopes if slope.verdict == FAIL and slope.step == 1}


@pytest.mark.parametrize(("kind", "place"), [("bottleneck", "down"), ("mixer", "t2"), ("projection", "projection")])
def test_faults_next_to_a_fixed_size_show_in_sizes(kind, place):
    # The audit sees these too; here the sizes themselves must show them.
    assert {(place, Y), (place, GRAD_X)} <= failing(fixed_check(kind, prepare=standard_init(place)))
    assert (place, DY) in failing(fixed_check(kind, optimizer=rate_of(place)))


def test_missing_output_factor_shows_in_the_gradients_of_a_model_with_a_bottleneck():
    def optimizer(model, plan):
        made = torch.optim.AdamW(smupar.param_groups(model, plan, lr=2**-8, weight_decay=0.0))
        model.head._forward_pre_hooks.clear()
        return made

    report = fixed_check("bottleneck", optimizer=optimizer)
    assert ("inner", GRAD_X) in failing(report)
    assert slope_of(report, "smupar", "inner", GRAD_X, axis="width") == pytest.approx(1.0, abs=0.2)


class Head(nn.Module):
    """As RoBERTa's: a hidden layer and the readout."""

    def __init__(self, width):
        super().__init__()
        self.dense, self.decoder = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x):
        return self.decoder(self.dense(x).tanh())


class Routed(nn.Module):
    """A router of four parts, which the user may call a readout."""

    def __init__(self, width):
        super().__init__()
        self.router, self.inner = nn.Linear(width, 4), nn.Linear(width, width)

    def forward(self, x):
        return x + self.router(x).softmax(-1).amax(-1, keepdim=True) * self.inner(x)


def test_block_that_makes_the_logits_is_judged_as_logits_and_a_block_with_a_router_is_not():
    report = check(
        lambda width: nn.Sequential(nn.Linear(16, width), nn.Tanh(), Routed(width), Head(width)),
        batches=batches_of(3, (16,), num_classes=10),
        base_width=64,
        widths=(64, 256),
        densities=(1,),
        steps=3,
        seeds=5,
        lr=2**-8,
        roles={"2.router.weight": "unembedding", "3.decoder.weight": "unembedding"},
    )
    roles = {reading.place: reading.role for reading in report.readings if reading.kind == "block"}
    assert roles == {"2": "block", "3": "logits", "": "logits"}
    assert slope_of(report, "smupar", "3", Y, axis="width") == pytest.approx(-0.5, abs=0.2)  # a sum of random terms over m_d
    assert report.verdicts == {"smupar": PASS}, report.explain()


class ConvolutionalHead(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.decoder = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 5, 1)

    def forward(self, x):
        return F.interpolate(self.decoder(self.inner(x).tanh()), scale_factor=2)


class Gate(nn.Module):
    """A module around a router and nothing else."""

    def __init__(self, width):
        super().__init__()
        self.wg = nn.Conv2d(width, 4, 1)

    def forward(self, x):
        return self.wg(x)


class GatedPicture(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem, self.gate, self.inner = nn.Conv2d(3, width, 1), Gate(width), nn.Conv2d(width, width, 1)
        self.head = ConvolutionalHead(width)

    def forward(self, x):
        x = self.stem(x).tanh()
        x = x + self.gate(x).softmax(1).amax(1, keepdim=True) * self.inner(x)
        return self.head(x).mean((-2, -1))


def test_blocks_of_images_are_judged_by_what_they_make():
    report = check(
        GatedPicture,
        batches=batches_of(3, (3, 4, 4), num_classes=5),
        base_width=64,
        widths=(64, 256),
        densities=(1,),
        steps=3,
        seeds=3,
        lr=2**-8,
        example=torch.randn(2, 3, 4, 4),
    )
    assert {reading.place: reading.role for reading in report.readings if reading.kind == "block"} == {
        "gate": "router",
        "head": "logits",
        "": "logits",
    }
    assert report.verdicts == {"smupar": PASS}, report.explain()


@pytest.mark.parametrize(("roles", "expected"), [({"*.gate.weight": "hidden"}, 0.5), ({}, 0)])
def test_changes_of_a_routers_logits_grow_with_width_only_in_role_hidden(roles, expected):
    """The gradient that a hidden router of 4 outputs passes on outgrows all others like sqrt(n). The features below follow it,
    and with them the logits. A router's initial logits also shrink, which shows in the first steps."""
    report = check(
        mixture,
        batches=batches_of(8, (8,), num_classes=5),
        base_width=64,
        widths=(64, 256),
        densities=(1 / 4,),
        steps=8,
        seeds=3,
        lr=2**-6,
        roles=roles,
        example=torch.randn(16, 8),
    )
    assert slope_of(report, "smupar", "2.gate", CHANGE, axis="width", step=7) == pytest.approx(expected, abs=0.25)
    assert {reading.role for reading in report.readings if reading.place == "2.gate"} == {
        "hidden, narrowing" if roles else "router"
    }
    assert report.verdicts["smupar"] != FAIL, report.explain()


def test_a_squared_error_passes_although_its_gradient_shrinks_with_the_random_outputs():
    batches = [(x, 0.3 * F.one_hot(targets, 3).float()) for x, targets in batches_of(3, (16,), size=8)]
    report = check(
        lambda width: nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=batches,
        base_width=64,
        widths=(64, 256),
        densities=(1,),
        steps=3,
        seeds=8,
        lr=2**-8,
        alpha_output=4.0,
    )
    assert slope_of(report, "smupar", "4", OF_LOSS, axis="width") < -0.35
    assert report.verdicts == {"smupar": PASS}, report.explain()
