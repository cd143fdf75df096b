"""What the check over a whole run says, about observations whose outcome is known by construction."""

import json
import math
from dataclasses import replace

import pytest

import smupar
from smupar.check.coordinates.readings import Cell, GridPoint
from smupar.check.whole_run.drift import Drift
from smupar.check.whole_run.long_run import readings_of
from smupar.check.whole_run.report import RunReport
from smupar.updates.observation import ALIGNMENT, DECAY, DY, LR, MOVED, Observation
from tests.support.models import MLP, on_meta

STEPS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 410, 512]
LAYERS = ("fc2.weight", "fc3.weight")
DENSITIES = (1.0, 1 / 32)


def seen(density, slope, *, decay=0.1, lr=None, moved=None, alignment=1.0):
    """An observation in which the update of fc3 depends on the density as ``slope(step)`` says."""
    lrs = lr or [1e-3 * (1 - step / 600) for step in STEPS]
    decays = decay if isinstance(decay, dict) else dict.fromkeys(LAYERS, decay)
    sizes = {
        DY: {"fc2.weight": [0.1 * density**-0.2] * len(STEPS), "fc3.weight": [0.1 * density ** slope(step) for step in STEPS]},
        LR: dict.fromkeys(LAYERS, lrs),
        DECAY: {
            name: [rate * share(step) if callable(share) else rate * share for rate, step in zip(lrs, STEPS, strict=True)]
            for name, share in decays.items()
        },
        MOVED: {name: moved or [0.0] * len(STEPS) for name in LAYERS},
        ALIGNMENT: {name: [alignment] * len(STEPS) for name in LAYERS},
    }
    return Observation(STEPS[-1], list(STEPS), sizes, dict.fromkeys(LAYERS, 512 * density))


def report(slope=lambda step: -0.2, **settings):
    plan = smupar.make_plan(on_meta(MLP, 64, 2), base=on_meta(MLP, 16, 2))
    cells = {density: Cell("smupar", 64, density, 0) for density in DENSITIES}
    observations = {
        cell: seen(density, slope, **(settings if density < 1 else {"decay": 0.1})) for density, cell in cells.items()
    }
    if "decay" in settings and not isinstance(settings["decay"], dict):
        observations[cells[1.0]] = seen(1.0, slope, decay=settings["decay"])
    readings = [reading for cell, own in observations.items() for reading in readings_of(own, cell, plan)]
    plans = {GridPoint("smupar", 64, density, None): plan for density in DENSITIES}
    return RunReport(readings, {}, plans, observations)


def late(to):
    """Flat for 32 steps, then on the way to a slope."""
    return lambda step: -0.1 + (to + 0.1) * max(0.0, math.log2(step / 32)) / 4


def test_flat_run_passes_and_says_nothing_else():
    found = report()
    assert found.ok
    assert found.explain().splitlines()[0] == "SmuPar: PASS over 512 steps of 2 runs"
    assert found.diagnoses == []


def test_late_drift_fails_from_the_step_at_which_it_begins_and_names_layer_and_cause():
    found = report(late(-1.6), decay=0.0)
    words = found.explain()
    assert not found.ok
    assert "right until step 128" in words
    assert "from step 256 to the end dY of fc3 grows with lower density" in words.replace("fc*", "fc3")
    assert "likely cause: decay missing" in words


def test_drift_of_the_random_part_remains_within_the_limits_and_is_said():
    found = report(late(-0.9))
    assert found.ok
    assert "a drift remains, within the limits: dY of fc3 grows with lower density" in found.explain().replace("fc*", "fc3")
    assert "drift" not in report(late(-0.5)).explain()


@pytest.mark.parametrize(
    ("slopes", "wrong"), [((-1.05,) * 4, []), ((-1.2,) * 4, [1, 2, 4, 8]), ((-1.2, 0, 0, 0), []), ((0.7,) * 4, [1, 2, 4, 8])]
)
def test_limits_hold_for_the_median_of_three_looks(slopes, wrong):
    drift = Drift("smupar", "density", "width 64", "fc3", DY, dict(zip((1, 2, 4, 8), slopes, strict=True)))
    assert drift.wrong == wrong


PLANTED = {
    "decay missing": {"decay": 0.0},
    "decay stopped": {"decay": lambda step: 0.1 if step <= 200 else 0.0},
    "decay uneven": {"decay": {"fc2.weight": 0.1, "fc3.weight": 3.2}},
    "masks move": {"moved": [0.0, *[1.0] * (len(STEPS) - 1)]},
    "schedule": {"lr": [1e-3] * len(STEPS)},
    "few weights": {"alignment": 1.1},
}


@pytest.mark.parametrize("cause", PLANTED)
def test_fault_is_named_and_is_no_news_where_it_is_absent(cause):
    failing = report(late(-1.6), **PLANTED[cause])
    assert cause in [diagnosis.cause for diagnosis in failing.diagnoses]
    assert cause not in [diagnosis.cause for diagnosis in report(late(-1.6), alignment=3.0).diagnoses]
    assert "likely cause" in failing.explain()
    passing = report(**PLANTED[cause])
    assert passing.ok  # sizes decide; what was seen is a note
    assert (cause in [diagnosis.cause for diagnosis in passing.diagnoses]) == (cause != "few weights")
    assert "likely cause" not in passing.explain()


def test_decay_that_stops_is_dated():
    (stopped,) = [diagnosis for diagnosis in report(**PLANTED["decay stopped"]).diagnoses if diagnosis.cause == "decay stopped"]
    assert "its weights stop decaying after step 128" in stopped.evidence


def test_run_whose_decay_differs_from_the_densest_is_coupled():
    found = report(decay={"fc2.weight": 3.2, "fc3.weight": 3.2})
    assert [diagnosis.cause for diagnosis in found.diagnoses] == ["decay"]
    assert "decay 32 times as fast as in the densest model" in found.explain()


def test_shorter_looks_of_a_run_that_ended_early_are_compared_as_far_as_they_go():
    found = report()
    cell, own = next(reversed(found.observations.items()))
    short = replace(own, at=own.at[:4], num_steps=9, sizes={q: {n: v[:4] for n, v in r.items()} for q, r in own.sizes.items()})
    kept = [reading for reading in found.readings if reading.density == 1 or reading.step <= 8]
    again = RunReport(kept, {}, found.plans, {**found.observations, cell: short})
    assert max(step for drift in again.drifts for step in drift.slopes) == 8


def test_report_has_json_a_page_and_a_picture(tmp_path):
    found = report(late(-1.6), decay=0.0)
    values = json.loads(found.to_json(tmp_path / "check.json"))
    assert values["verdicts"] == {"smupar": "fail"} == found.verdicts
    assert not values["ok"]
    found.to_html(tmp_path / "check.html")
    assert "does not pass" in (tmp_path / "check.html").read_text()
    found.plot(tmp_path / "check.png")
