"""Rules are told apart by their colours, with red-green blindness too, and are not taken for verdicts."""

import math
import re
from itertools import combinations

import pytest

from smupar.output.colours import RULE_STYLES, mixed, rule_colour
from smupar.output.page import page
from tests.support.browser import contrast

# How colours look with red-green blindness, in linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHTS = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}
# OKLab (Ottosson 2020): linear RGB to cones, and the cube roots of cones to lightness and two hues.
CONES = ((0.4122215, 0.5363325, 0.0514460), (0.2119035, 0.6806995, 0.1073970), (0.0883025, 0.2817188, 0.6299787))
LAB = ((0.2104543, 0.7936178, -0.0040720), (1.9779985, -2.4285922, 0.4505937), (0.0259040, 0.7827718, -0.8086758))


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def difference(one, other, sight="usual"):
    """The distance in OKLab in hundredths of that from black to white; 2 can just be seen."""
    return 100 * math.dist(lab(one, sight), lab(other, sight))


def lab(colour, sight):
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    seen = [min(max(v, 0.0), 1.0) for v in times(SIGHTS[sight], linear)]
    return times(LAB, [math.cbrt(cone) for cone in times(CONES, seen)])


def of_page(name):
    """A colour of the page in its light and its dark theme."""
    light, dark = re.findall(rf"--{name}: (#[0-9a-f]{{6}})", page([]))
    return {"light": light, "dark": dark}


def test_difference_is_that_of_the_eye():
    assert difference("#000000", "#ffffff") == pytest.approx(100, abs=0.01)
    assert difference("#d1495b", "#23853f", "deuteranopia") < 12 < 28 < difference("#d1495b", "#23853f")  # red and green


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_rules_are_told_apart_and_are_no_verdicts(theme):
    rules = [getattr(style, theme) for style in RULE_STYLES.values()]
    for sight in SIGHTS:
        assert min(difference(*pair, sight) for pair in combinations(rules, 2)) > 14
    verdicts = [of_page(name)[theme] for name in ("good", "bad", "unclear")]
    assert min(difference(rule, verdict) for rule in rules for verdict in verdicts) > 14
    places = [of_page(name)[theme] for name in ("bg", "surface", "raised")]
    assert min(contrast(rule, place) for rule in rules for place in places) >= 3
    assert len({style.dash for style in RULE_STYLES.values()} | {"dot"}) == len(rules) + 1  # dots are for diverged runs


def test_pictures_and_the_page_have_the_same_colours():
    assert f'"light":{{"SP":"{rule_colour("SP")}"' in page([])
    assert rule_colour("SmuPar, coupled decay") == RULE_STYLES["SmuPar"].light
    assert rule_colour("hidden layers") == "#777777"
    assert mixed("#000000", "#ff8000", 0.5) == "#804000"
