"""Settings for single weights, by globs."""

import pytest

from smupar.plan.globs import match_globs

NAMES = ["blocks.0.fc.weight", "blocks.1.fc.weight", "blocks.1.proj.weight"]


def match(settings_by_glob):
    return match_globs(settings_by_glob, NAMES, setting="density", among="hidden weights")


def test_globs_first_match_wins():
    assert match({"blocks.0.*": 1, "*.fc.weight": 2, "*": 3}) == {
        "blocks.0.fc.weight": 1,
        "blocks.1.fc.weight": 2,
        "blocks.1.proj.weight": 3,
    }


def test_globs_leave_out_what_none_matches():
    assert match({"*.proj.weight": 1}) == {"blocks.1.proj.weight": 1}
    assert match({}) == {}


@pytest.mark.parametrize(
    ("globs", "message"),
    [
        ({"*": 1, "blocks.0.*": 2}, r"density: 'blocks.0\.\*' has no effect, earlier globs take all its matches"),
        ({"layers.*": 1, "*": 2}, r"density: 'layers\.\*' matches none of the hidden weights: blocks.0.fc.weight, "),
        ({"Blocks.*": 1}, "matches none"),
    ],
    ids=["taken by earlier ones", "no match", "another case"],
)
def test_globs_without_effect_are_refused(globs, message):
    with pytest.raises(ValueError, match=message):
        match(globs)


def test_glob_without_a_match_is_refused_with_the_first_of_many_names():
    with pytest.raises(ValueError, match=r"blocks\.7\.weight, \.\.\. \(20 in all\)$"):
        match_globs({"x": 1}, [f"blocks.{i}.weight" for i in range(20)], setting="roles", among="parameters")
