"""Pages and pictures of studies: what they say about decay, and what they draw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smupar.lm.config.run import ModelConfig, RunConfig
from smupar.study.curves import Line, Panel, Point, chart_of, interval, line_of, octaves
from smupar.study.definition import curve_of
from smupar.study.picture import draw_png
from smupar.study.report import write_report
from smupar.study.store import Result, Study
from tests.study.tiny import summary

TINY = RunConfig(model=ModelConfig(width=32, depth=1, head_dim=16), base_width=32, steps=2)


@pytest.mark.parametrize(
    ("decays", "said"),
    [
        ([("independent", 0.1), ("coupled", 0.1), ("coupled", 0.2)], "(runs: coupled in 2, independent in 1)"),
        ([("independent", 0.1), ("coupled", 0.0)], None),  # without decay there is no convention
        ([("coupled", 0.1), ("coupled", 0.2)], None),
    ],
)
def test_study_that_mixes_decay_conventions_says_so_on_its_page(decays, said, tmp_path):
    with Study.open(tmp_path / "study", {"kind": "x"}, "smupar sweep") as study:
        for kind, amount in decays:
            config = replace(TINY, decay=kind, weight_decay=amount)
            study.add(config, summary(config, 4.0))
        found = str(write_report(study))
    page = (tmp_path / "study" / "report.html").read_text()
    assert ("mixes decay conventions" in found) is ("mixes decay conventions" in page) is (said is not None)
    assert said is None or said in page


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


def test_picture_explains_the_dots_of_seeds(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    draw_png([Panel("", "x", "y", (line_of(seeded(), "x", 0.0),))], tmp_path / "x.png")
    (axis,) = drawn[0].axes
    assert "single seeds; lines are means" in [text.get_text() for text in axis.get_legend().get_texts()]


def test_x_can_fall_from_left_to_right(tmp_path, monkeypatch):
    panel = Panel("", "density", "y", (Line("x", (Point(0.25, 2.0), Point(1.0, 1.0))),), falling_x=True)
    assert chart_of(panel)["falls"]
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    draw_png([panel], tmp_path / "x.png")
    left, right = drawn[0].axes[0].get_xlim()
    assert left > right


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


def test_picture_has_a_row_above_the_curves_for_each_optimum(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    lines = (parabola(-6, range(-9, -3), "dense"), parabola(-8, range(-9, -3), "sparse"))
    draw_png([Panel("SP", "learning rate", "loss", lines, marked_x=2**-6)], tmp_path / "x.png")
    rows, curves = drawn[0].axes
    assert [text.get_text() for text in rows.get_yticklabels()] == ["dense", "sparse"]
    assert [text.get_text() for text in rows.texts] == ["", "\N{MINUS SIGN}2.0 octaves"]
    assert rows.get_xlim() == curves.get_xlim()
    assert curves.get_legend() is None
