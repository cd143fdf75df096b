"""Curves of studies: seeds, optima with their intervals, and the charts that pages draw of them."""

from __future__ import annotations

import pytest

from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.study.curves.curves import Line, Panel, Point, chart_of, interval, line_of, octaves
from smupar.study.definition import curve_of
from smupar.study.store import Result
from tests.study.tiny import summary

TINY = RunConfig(model=ModelConfig(width=32, depth=1, head_dim=16), base_width=32, steps=2)


def seeded():
    """A curve with two seeds at the first value and one at the second."""
    runs = {0.1: [4.0, 4.2], 0.2: [5.0]}
    results = {lr: [Result(TINY, summary(TINY, loss)) for loss in losses] for lr, losses in runs.items()}
    return curve_of(results, rule="sp", width=32, sparsity=0.5)


def test_curve_keeps_the_losses_of_its_seeds():
    curve = seeded()
    assert curve.losses == pytest.approx((4.1, 5.0))
    assert curve.seeds == ((4.0, 4.2), (5.0,))
    assert [point.seeds for point in line_of(curve, "x", 0.0).points] == [(4.0, 4.2), (5.0,)]


def test_page_draws_a_dot_for_each_of_several_seeds():
    (line,) = chart_of(Panel("", "x", "y", (line_of(seeded(), "x", 0.0),)))["lines"]
    assert [point["y"] for point in line["points"]] == pytest.approx([4.1, 5.0])
    assert [point.get("spread") for point in line["points"]] == [[4.0, 4.2], None]


def parabola(best, values, label):
    """A curve over learning rates 2^values with its vertex at 2^best, as a line."""
    points = tuple(Point(2.0**value, (value - best) ** 2) for value in values)
    nearest = 2.0 ** min(values, key=lambda value: abs(value - best))
    return Line(label, points, best=nearest, optimum=2.0**best)


@pytest.mark.parametrize(
    ("best", "found", "words"),
    [
        (-6.0, (2**-6, 2**-7, 2**-5, 0), ""),
        (-5.5, (2**-5.5, 2**-7, 2**-5, 0), "+0.5 octaves"),
        (-7.5, (2**-7.5, 2**-9, 2**-7, 0), "\N{MINUS SIGN}1.5 octaves"),
        (-2.0, (2**-4, 2**-5, 2**-4, 1), "+2.0 octaves or more"),  # beyond the right end, which is at 2^-4
        (-11.0, (2**-9, 2**-9, 2**-8, -1), "\N{MINUS SIGN}3.0 octaves or more"),
    ],
)
def test_optimum_has_an_interval_and_octaves_from_the_reference(best, found, words):
    line = parabola(best, range(-9, -3), "x")
    x, low, high, side = interval(line)
    assert (x, low, high, side) == pytest.approx(found)
    assert octaves(2.0**-6, x, side) == words
    (drawn,) = chart_of(Panel("", "x", "y", (line,)))["lines"]
    assert drawn["best"]["smooth"] == pytest.approx(x, rel=1e-5)
    assert (drawn["best"]["low"] is None) == (side != 0)
