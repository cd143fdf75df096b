"""Pictures of studies: what is drawn, and that it can be seen."""

import pytest

from smupar.study.curves.curves import Line, Panel, Point, chart_of, line_of
from smupar.study.curves.picture import draw_png, line_colour
from tests.study.curves.test_curves import parabola, seeded
from tests.support.browser import contrast


@pytest.fixture
def axes_of(tmp_path, monkeypatch):
    """Draws a panel, and returns the axes of its picture."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))

    def draw(panel):
        draw_png([panel], tmp_path / "x.png")
        return drawn[-1].axes

    return draw


def test_every_curve_of_a_picture_has_contrast_with_white():
    colours = [line_colour(Line("", (), number / 50)) for number in range(51)] + [line_colour(Line("", (), dashed=True))]
    assert min(contrast(colour, "#ffffff") for colour in colours) >= 3
    assert len(set(colours)) == len(colours)


def test_picture_explains_the_dots_of_seeds(axes_of):
    (axis,) = axes_of(Panel("", "x", "y", (line_of(seeded(), "x", 0.0),)))
    assert "single seeds; lines are means" in [text.get_text() for text in axis.get_legend().get_texts()]


def test_x_can_fall_from_left_to_right(axes_of):
    panel = Panel("", "density", "y", (Line("x", (Point(0.25, 2.0), Point(1.0, 1.0))),), falling_x=True)
    assert chart_of(panel)["falls"]
    left, right = axes_of(panel)[0].get_xlim()
    assert left > right


def test_picture_has_a_row_above_the_curves_for_each_optimum(axes_of):
    lines = (parabola(-6, range(-9, -3), "dense"), parabola(-8, range(-9, -3), "sparse"))
    rows, curves = axes_of(Panel("SP", "learning rate", "loss", lines, marked_x=2**-6))
    assert [text.get_text() for text in rows.get_yticklabels()] == ["dense", "sparse"]
    assert [text.get_text() for text in rows.texts] == ["", "\N{MINUS SIGN}2.0 octaves"]
    assert rows.get_xlim() == curves.get_xlim()
    assert curves.get_legend() is None
