"""Curves of pictures can be seen."""

from smupar.study.curves import Line
from smupar.study.picture import line_colour
from tests.browser import contrast


def test_every_curve_of_a_picture_has_contrast_with_white():
    colours = [line_colour(Line("", (), number / 50)) for number in range(51)] + [line_colour(Line("", (), dashed=True))]
    assert min(contrast(colour, "#ffffff") for colour in colours) >= 3
    assert len(set(colours)) == len(colours)
