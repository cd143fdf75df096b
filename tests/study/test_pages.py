"""Pages and pictures of studies: what they say about decay, and what they draw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smupar.lm.config.run import ModelConfig, RunConfig
from smupar.study.curves import Line, Panel, Point, chart_of, line_of
from smupar.study.definition import curve_of
from smupar.study.picture import draw_png
from smupar.study.report import write_report
from smupar.study.store import Result, Study
from tests.study.test_study import summary

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
