"""Pictures of studies: what is drawn, and that it can be seen."""

import pytest

from smupar.study.curves.curves import Line, Panel, Point, chart_of, line_of
from smupar.study.curves.picture import draw_png, line_colour
from tests.study.curves.test_curves import parabola, seeded
from tests.support.browser import contrast


@pytest.fixture
def axes_of(tmp_path, monkeypatch):
    """Draws panels, and returns the axes of their picture."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))

    def draw(*panels):
        draw_png(panels, tmp_path / "x.png")
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


def test_triangles_and_levels_are_explained(axes_of):
    points = tuple(Point(float(x), y) for x, y in enumerate([1.0, *[1.01] * 30, 9.0]))
    (axis,) = axes_of(Panel("", "x", "y", (Line("a", points),), level=(1.0, "as when dense")))
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "above the range", "as when dense"]
    (axis,) = axes_of(Panel("", "x", "y", (Line("a", points[:-1]),)))
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a"]


def test_linear_panels_share_the_range_of_x(axes_of):
    panels = [Panel("", "x", "y", (Line("a", (Point(0.0, 1.0), Point(end, 2.0))),), log_x=False) for end in (1.0, 4.0)]
    assert [axis.get_xlim() for axis in axes_of(*panels)] == [(-0.2, 4.2)] * 2
