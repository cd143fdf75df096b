"""The check over depth: what it measures, what passes, and what it finds."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.check.coordinates.depth import compared_layers
from smupar.check.coordinates.readings import DY, GRAD_X, GridPoint, Y
from smupar.check.coordinates.report import Report
from tests.check.grid import reading, token_batches
from tests.support.loops import loss_of
from tests.support.models import Residual


class Block(nn.Module):
    def __init__(self, width, scaled):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scaled = scaled

    def forward(self, x):
        x = x + self.scaled(self.mix(self.norm1(x)))
        return x + self.scaled(self.down(F.relu(self.up(self.norm2(x)))))


def net(width, depth, twice=False):
    factor = 2 / depth if twice else 1.0  # not an attribute, which would be found
    return Residual(width, (Block(width, lambda branch: factor * branch) for _ in range(depth)))


ENDS = ["blocks.*.mix.2", "blocks.*.down"]


def check(make=net, *, branches=ENDS, **settings):
    batches = token_batches(4, shape=(2, 8))
    settings = {"depths": (2, 8, 32), "widths": (64,), "steps": 3, "seeds": 3, "lr": 2**-6, "progress": False, **settings}
    return smupar.coord_check(make, loss_of, batches, base_width=32, branches=branches, **settings)


@pytest.fixture(scope="module")
def completep():
    return check()


def test_completep_passes_over_depth(completep):
    assert completep.ok
    assert completep.explain().startswith("SmuPar: PASS over depth (at width 64; density 1)")
    assert {slope.axis for slope in completep.slopes} == {"depth"}


def test_the_same_places_are_measured_at_every_depth(completep):
    places = {depth: {measured.place for measured in completep.readings if measured.depth == depth} for depth in (2, 32)}
    assert places[2] == places[32]
    assert {"blocks.0", "blocks.1", "blocks.1.down"} <= places[32]
    assert {measured.kind for measured in completep.readings if measured.place == "blocks.1"} == {"block"}


def test_gradient_of_a_block_is_compared_where_the_first_of_its_blocks_begins():
    # With embeddings this small, the first block decides how large the residual stream is, and with it the gradients there.
    report = check(init_std={"embedding.weight": 0.02, "*": 0.18}, lr=2**-9)
    slopes = [slope for slope in report.slopes if (slope.place, slope.quantity, slope.step) == ("blocks.0", GRAD_X, 1)]
    assert [abs(slope.slope) < 0.2 for slope in slopes] == [True]


def test_no_factor_fails_and_the_remedy_is_a_depth_rule():
    report = check(depth="none", branches=None)
    assert not report.ok
    (cause,) = [diagnosis for diagnosis in report.diagnoses if not diagnosis.is_caution]
    assert cause.cause == "no depth rule"
    assert "depth='completep'" in report.explain()
    assert "with depth from step 1" in cause.evidence


def test_branch_that_is_not_divided_is_named():
    report = check(branches=["blocks.*.mix.2"])
    assert not report.ok
    found = {diagnosis.cause: diagnosis.places for diagnosis in report.diagnoses}
    assert {place.rpartition(".")[2] for place in found["branch missing"]} == {"up", "down"}
    assert "blocks.1" in {slope.place for slope in report.slopes if slope.verdict == "fail"}


def test_branches_that_are_divided_twice_are_found_by_their_gradients():
    report = check(lambda width, depth: net(width, depth, twice=True))
    assert [diagnosis.cause for diagnosis in report.diagnoses if not diagnosis.is_caution] == ["branch twice"]
    (slope,) = {
        round(slope.slope, 1)
        for slope in report.slopes
        if (slope.place, slope.quantity, slope.step) == ("blocks.1.up", GRAD_X, 1)
    }
    assert -1.1 < slope < -0.7  # one more power of the depth


def test_what_is_learned_less_under_alpha_one_half_is_its_doing():
    plan = smupar.make_plan(net(64, 8), base=net(32, 2), branches=ENDS, depth="depth-mup")
    found = reading(1.0, 1.0, place="blocks.0.down")
    readings = [replace(found, depth=x, step=step, rms=x**-0.5 if step > 1 else 1.0) for x in (2, 8, 32) for step in (1, 2, 3)]
    report = Report(readings, faults={}, plans={GridPoint("smupar", 64, 1.0, 32): plan})
    assert [diagnosis.cause for diagnosis in report.diagnoses] == ["lazy"]
    assert "depth='completep'" in report.explain()


@pytest.mark.parametrize(("rule", "alpha"), [("completep", 1), ("depth-mup", 0.5)])
def test_sizes_are_divided_by_the_plans_own_factors(rule, alpha):
    torch.manual_seed(0)
    model, base = net(64, 8), net(32, 2)
    plan = smupar.parameterize(model, base=base, branches=ENDS, depth=rule)
    batch = token_batches(1, shape=(2, 8))[0]
    layers = compared_layers(model, base, plan, lambda: loss_of(model, batch))
    inside, stream = "blocks.5.up", "blocks.7"
    assert layers.gradient(inside) == layers.output("blocks.5.down") == pytest.approx(4**-alpha)
    assert (layers.output(inside), layers.gradient(stream), layers.output(stream)) == (1, 1, 1)
    assert layers.effect(inside) == pytest.approx(4 ** (alpha - 1))
    assert layers.place("blocks.5.down") == "blocks.1.down"
    assert layers.place(stream) == "blocks.1"
    assert not layers.is_measured("blocks.6.down")
    # The first of the four blocks begins, and the last ends, at the same share of the depth as the base's second block.
    assert layers.firsts == {"blocks.0": "blocks.3", "blocks.4": "blocks.7"}
    assert layers.place("blocks.4") == layers.place(stream) == "blocks.1"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_depth_beside_width_and_density_has_slopes_over_each():
    report = check(depths=(2, 4), widths=(32, 64), densities=(1, 0.5), steps=1, seeds=1)
    assert {(slope.axis, slope.where) for slope in report.slopes} >= {
        ("depth", "width 64, density 0.5"),
        ("width", "density 1, depth 4"),
        ("density", "width 32, depth 2"),
    }
    assert {slope["depth"] for slope in json.loads(report.to_json())["slopes"]} == {None, 2, 4}
    assert {Y, GRAD_X, DY} <= {slope.quantity for slope in report.slopes}


REFUSALS = {
    "a depth below the base's": ({"depths": (2, 4), "base_depth": 3}, r"depths=\[2, 4\] must not be smaller than base_depth=3"),
    "a base depth alone": ({"depths": (), "base_depth": 2, "densities": (1, 0.5)}, "base_depth=2 is for depths"),
    "one point": ({"depths": (4,)}, "nothing to compare.*two depths"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSALS.values(), ids=REFUSALS)
def test_depths_that_make_no_check_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        check(**settings)


def test_make_model_that_ignores_its_depth_is_refused():
    with pytest.raises(ValueError, match=r"make_model\(32, 4\) and make_model\(32, 2\) have the same shapes.*use its depth"):
        check(lambda width, depth: net(width, 2), depths=(2, 4))
