"""Slopes, confidence intervals and verdicts, on made-up sizes."""

import math
from dataclasses import replace

import pytest
import torch

from smupar.check.coordinates.places import WIDENING
from smupar.check.coordinates.readings import CHANGE, DY, GRAD_W, GRAD_X, OF_LOSS, Y
from smupar.check.coordinates.verdict import DRIFT, EXCEPTION, FAIL, PASS, UNCLEAR, Slope, judge, overall, slopes
from tests.check.grid import MLP, batches_of, check, one_slope, power_law, reading


@pytest.mark.parametrize("exponent", [-1.5, -0.31, 0.0, 0.5, 2.0])
@pytest.mark.parametrize("axis", ["density", "width"])
def test_slope_of_a_power_is_its_exponent(exponent, axis):
    (found,) = slopes(power_law(exponent, axis=axis, xs=(64, 128, 512) if axis == "width" else (1.0, 0.3, 0.01)))
    assert found.slope == pytest.approx(exponent, abs=1e-9)
    assert found.axis == axis
    assert found.where == ("density 1" if axis == "width" else "width 64")
    assert math.isnan(found.ci)
    assert found.num_seeds == 1


def test_slope_of_scattered_sizes_is_least_squares():
    # log2 sizes 0, 2, 1 at log2 densities 0, -1, -2: slope = sum (x - mean)(y - mean) / sum (x - mean)^2 = -1 / 2.
    (found,) = slopes([reading(1.0, 1.0), reading(0.5, 4.0), reading(0.25, 2.0)])
    assert found.slope == pytest.approx(-0.5)


def test_slopes_over_both_axes_hold_the_other_one_fixed():
    readings = [
        reading(density, width**1.0 * density**-0.5, width=width) for width in (64, 128, 256) for density in (1.0, 0.25)
    ]
    found = {(slope.axis, slope.where): slope.slope for slope in slopes(readings)}
    assert found == pytest.approx(
        {
            ("width", "density 1"): 1.0,
            ("width", "density 0.25"): 1.0,
            ("density", "width 64"): -0.5,
            ("density", "width 128"): -0.5,
            ("density", "width 256"): -0.5,
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
    assert judge(one_slope(sign * size, ci)) == verdict


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
    assert judge(one_slope(size, ci, **changes)) == verdict


@pytest.mark.parametrize("quantity", [CHANGE, GRAD_W])
def test_gradient_flow_and_change_of_activations_are_not_judged(quantity):
    assert judge(one_slope(2.0, quantity=quantity)) == ""
    (found,) = slopes(power_law(2.0, quantity=quantity))
    assert (found.slope, found.verdict) == (pytest.approx(2.0), "")


def test_overall_is_the_worst_verdict():
    made = {name: one_slope(0.0, verdict=name) for name in (PASS, UNCLEAR, DRIFT, FAIL, EXCEPTION, "")}
    assert overall([made[PASS], made[EXCEPTION], made[""]]) == PASS
    assert overall([made[PASS], made[UNCLEAR]]) == UNCLEAR
    assert overall([made[UNCLEAR], made[PASS], made[FAIL]]) == FAIL
    assert overall([made[UNCLEAR], made[DRIFT], made[PASS]]) == DRIFT  # more seeds do not make it pass


def test_later_steps_are_judged_by_their_mean():
    # Step 3 alone is steep, as one chaotic gradient is; the mean of steps 2 to 4 is (0.1 + 1.0 + 0.1) / 3.
    readings = [
        measured for step, exponent in ((1, 0.0), (2, 0.1), (3, 1.0), (4, 0.1)) for measured in power_law(exponent, step=step)
    ]
    found = {slope.when: slope for slope in slopes(readings)}
    assert found["step 3"].verdict == FAIL
    assert found["mean of later steps"].slope == pytest.approx(0.4)
    assert found["mean of later steps"].verdict == PASS
    assert overall(found.values()) == PASS


@pytest.mark.parametrize(("last", "verdict"), [(3, PASS), (5, PASS), (6, UNCLEAR), (10, UNCLEAR)])
def test_logits_that_go_on_shrinking_are_no_exception(last, verdict):
    where = {"axis": "width", "xs": (64, 128, 256), "role": "logits", "kind": "block", "place": ""}
    found = slopes([measured for step in range(1, last + 1) for measured in power_law(-0.6, step=step, **where)])
    later = next(slope for slope in found if slope.is_mean)
    assert later.slope == pytest.approx(-0.6)
    # Three steps may be too few for a readout to learn, and up to step 5 they are half of the mean. Between 0.5 and 0.8 is
    # neither flat nor a power.
    assert later.verdict == (EXCEPTION if last <= 5 else UNCLEAR)
    assert overall(found) == verdict


@pytest.mark.parametrize(("ci", "verdict"), [(math.nan, FAIL), (0.02, FAIL), (0.05, UNCLEAR)])
def test_logits_whose_interval_reaches_into_the_exception_ask_for_more_seeds(ci, verdict):
    # -0.68 is steeper than the exception allows, which is -0.65.
    logits = Slope("smupar", "width", "head", "layer", "unembedding", Y, step=1, density=1, slope=-0.68, ci=ci, num_seeds=8)
    assert judge(logits) == verdict
    assert judge(replace(logits, quantity=DY)) == FAIL


def test_confidence_interval_of_three_seeds_is_students():
    # Slopes 0.1, 0.2, 0.3: standard deviation 0.1, two degrees of freedom, t = 4.30.
    (found,) = slopes([measured for seed in range(3) for measured in power_law(0.1 * (seed + 1), seed=seed)])
    assert found.slope == pytest.approx(0.2)
    assert found.ci == pytest.approx(4.30 * 0.1 / math.sqrt(3), abs=1e-6)
    assert found.num_seeds == 3
    assert found.verdict == UNCLEAR


def test_confidence_interval_counts_no_more_than_three_places_as_independent():
    readings = [
        measured for place in "abcdef" for seed in range(3) for measured in power_law(0.1 * (seed + 1), seed=seed, place=place)
    ]
    # Slopes 0.1, 0.2, 0.3 in all six places: standard deviation 0.1; 3 x 2 degrees of freedom, t = 2.45, not 12 and 2.18.
    for slope in slopes(readings):
        assert slope.ci == pytest.approx(2.45 * 0.1 / math.sqrt(3), abs=1e-6)


def test_confidence_interval_pools_places_of_one_kind_and_no_others():
    readings = [
        measured
        for seed in range(3)
        for measured in (
            *power_law(0.1 * (seed + 1), seed=seed, place="a"),
            *power_law(0.0, seed=seed, place="b"),
            *power_law(0.5 * seed, seed=seed, place="c", kind="block", role="block"),
            *power_law(0.05 * seed, seed=seed, place="a", quantity=DY),
        )
    ]
    found = {(slope.place, slope.quantity): slope.ci for slope in slopes(readings)}
    # Squares 0.02 of a and 0 of b over 2 + 2 degrees of freedom: variance 0.005, t = 2.78.
    pooled = 2.78 * math.sqrt(0.005) / math.sqrt(3)
    assert found == pytest.approx(
        {("a", Y): pooled, ("b", Y): pooled, ("c", Y): 4.30 * 0.5 / math.sqrt(3), ("a", DY): 4.30 * 0.05 / math.sqrt(3)},
        abs=1e-6,
    )


@pytest.mark.parametrize("role", ["unembedding", "logits"])
@pytest.mark.parametrize("rule", ["mup", "smupar"])
def test_logits_that_shrink_like_the_root_of_width_are_a_known_exception(rule, role):
    logits = one_slope(-0.5, 0.1, rule=rule, axis="width", width=None, density=1.0, role=role)
    assert judge(logits) == EXCEPTION
    assert judge(replace(logits, rule="sp")) == FAIL
    assert judge(replace(logits, axis="density", width=64, density=None)) == FAIL
    assert judge(replace(logits, role="hidden")) == FAIL
    assert judge(replace(logits, quantity=DY)) == FAIL
    assert judge(replace(logits, slope=0.5)) == FAIL
    assert judge(replace(logits, slope=-1.0)) == FAIL
    assert judge(replace(logits, slope=-1.0, step=10)) == FAIL  # by then the readout has learned


def test_zero_and_infinite_sizes_are_skipped():
    assert slopes([reading(x, 0.0) for x in (1.0, 0.5, 0.25)]) == []
    some = [reading(1.0, 0.0), reading(0.5, 2.0), reading(0.25, 1.0), reading(0.125, math.inf), reading(0.1, math.nan)]
    (found,) = slopes(some)
    assert found.slope == pytest.approx(1.0)
    assert slopes([reading(1.0, 0.0), reading(0.5, 2.0)]) == []  # one point has no slope


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("axis", [{"widths": (64, 128, 256)}, {"widths": (256,), "densities": (1, 1 / 4, 1 / 16)}])
def test_zero_initialised_readout_raises_no_alarm(axis, optimizer):
    report = check(
        MLP,
        batches=batches_of(3, (16,), num_classes=10),
        init_std={"head.weight": 0.0, "*": "fan_in"},
        optimizer=optimizer,
        lr=2**-8 if optimizer is torch.optim.AdamW else 0.1,
        **{"base_width": 64, "densities": (1,), "steps": 3, "seeds": 3, **axis},
    )
    first = [slope for slope in report.slopes if slope.step == 1 and slope.place == "hidden.0"]
    assert {slope.quantity for slope in first} == {Y}  # nothing flows back through zeros
    assert FAIL not in {slope.verdict for slope in report.slopes}
    assert report.verdicts["smupar"] != FAIL
    report.explain()


def test_slope_whose_interval_lies_between_the_thresholds_is_a_drift():
    drift = one_slope(-0.28, 0.05)
    assert judge(drift) == DRIFT
    assert judge(replace(drift, ci=0.1)) == UNCLEAR  # down to 0.18, which would pass
    assert judge(replace(drift, slope=-0.34)) == UNCLEAR  # up to 0.39, which would fail
    assert judge(replace(drift, ci=math.nan)) == UNCLEAR  # one seed is certain about nothing


def test_drift_has_a_verdict_and_a_remedy_that_agree():
    readings = [measured for seed in range(5) for measured in power_law(-0.28, seed=seed)]
    report = check(seeds=2)
    report.readings, report.slopes, report.diagnoses = readings, slopes(readings), []
    words = report.explain()
    assert report.verdicts == {"smupar": DRIFT}
    assert words.startswith("SmuPar: DRIFT over density")
    assert "more seeds will not change the verdict" in words
    assert "smaller batches" in words
    assert "MORE SEEDS" not in words
    assert not report.ok


@pytest.mark.parametrize(
    ("slope", "step", "verdict"),
    [
        (0.15, 1, PASS),
        (0.5, 1, FAIL),  # the terms of the sum are independent at step 1
        (0.5, 2, PASS),  # all aligned
        (0.9, 2, PASS),  # 0.4 above what aligned terms give
        (1.4, 2, FAIL),
        (-0.4, 2, PASS),
        (-0.9, 2, FAIL),
    ],
)
def test_gradient_into_a_fixed_size_may_align_after_step_1(slope, step, verdict):
    found = one_slope(slope, axis="width", width=None, density=1.0, role=WIDENING, quantity=GRAD_X, step=step)
    assert judge(found) == verdict


@pytest.mark.parametrize("changes", [{"role": "hidden"}, {"axis": "density"}, {"quantity": DY}])
def test_only_gradients_into_a_fixed_size_over_width_may_align(changes):
    found = one_slope(0.9, axis="width", width=None, density=1.0, role=WIDENING, quantity=GRAD_X, step=2)
    assert judge(found) == PASS
    assert judge(replace(found, **changes)) == FAIL


@pytest.mark.parametrize(("num_entries", "slope", "verdict"), [((8, 8, 8), 0.0, PASS), ((8, 16, 32), 0.5, UNCLEAR)])
def test_gradient_of_a_block_that_reads_a_fixed_size_may_grow_like_a_random_sum(num_entries, slope, verdict):
    sizes = power_law(0.5, axis="width", xs=(64, 128, 256), kind="block", role="block", quantity=GRAD_X)
    (found,) = slopes([replace(measured, num_entries=num) for measured, num in zip(sizes, num_entries, strict=True)])
    assert found.slope == pytest.approx(slope, abs=1e-9)
    assert found.verdict == verdict


def test_gradients_are_judged_relative_to_the_gradient_that_arrives_at_the_outputs():
    xs, where = (64, 128, 256), {"axis": "width", "quantity": GRAD_X}
    inside = power_law(-0.5, xs=xs, place="inside", **where)
    beside = power_law(-0.5, xs=xs, place="beside", role="router", **where)  # was divided by what arrives at itself
    of_loss = power_law(-0.5, xs=xs, place="head", role="unembedding", axis="width", quantity=OF_LOSS)
    alone = {slope.place: slope.slope for slope in slopes([*inside, *beside]) if slope.step == 1}
    together = {slope.place: slope.slope for slope in slopes([*inside, *beside, *of_loss]) if slope.step == 1}
    assert alone == pytest.approx({"inside": -0.5, "beside": -0.5})
    assert together == pytest.approx({"inside": 0.0, "beside": -0.5, "head": -0.5}, abs=1e-9)
