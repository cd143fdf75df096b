"""Allocations: what density each weight gets. The expected numbers are sparsities, as others print them."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smupar.plan.masks.allocations import allocate, as_density, er, erk, uniform


def test_as_density_is_the_fraction_that_was_meant():
    assert as_density(0.1) == Fraction(1, 10)
    assert as_density(1 / 3) == Fraction(1, 3)
    assert as_density(256 / 1088) == Fraction(4, 17)
    assert as_density(1 - 0.992188) == Fraction(7812, 10**6)
    assert as_density(1) == 1
    # Far below any tensor's size, but not 0.
    assert as_density(1e-12) > 0


@pytest.mark.parametrize("value", [0, -0.5, 1.0000001, 2, float("nan"), float("inf"), True, "0.5", None])
def test_as_density_refuses_what_is_no_density(value):
    with pytest.raises(ValueError, match=r"density\['fc'\] must lie in \(0, 1\].*1 - sparsity"):
        as_density(value, "density['fc']")


SHAPES = {"a": (2, 4), "b": (3, 6), "c": (6, 4, 2)}


@pytest.mark.parametrize(
    ("allocation", "shapes", "sparsities"),
    [
        (erk(0.5), SHAPES, [0, 0.309524, 0.654762]),
        (er(0.5), SHAPES, [0.207143, 0.471429, 0.559524]),
        (erk(1 - 0.8), SHAPES, [0.555556, 0.703704, 0.851852]),
        (erk(0.5), {"a": (2, 4), "c": (3, 6, 7), "d": (7, 4)}, [0, 0.642857, 0]),
    ],
)
def test_er_and_erk_agree_with_peers(allocation, shapes, sparsities):
    found = allocate(allocation, shapes)
    assert [float(1 - found[name]) for name in shapes] == pytest.approx(sparsities, abs=5e-7)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 300), min_size=2, max_size=4), min_size=1, max_size=6),
    st.fractions(Fraction(1, 1000), 1, max_denominator=10**6),
    st.sampled_from([uniform, er, erk]),
)
def test_allocation_spends_the_whole_budget(shapes, density, allocation):
    named = {f"layer{i}": tuple(shape) for i, shape in enumerate(shapes)}
    found = allocate(allocation(density), named)
    assert list(found) == list(named)
    assert all(0 <= value <= 1 for value in found.values())
    budget = density * sum(math.prod(shape) for shape in named.values())
    # Peers count the budget in whole weights of each tensor, hence half a weight of room for each.
    assert abs(sum(found[name] * math.prod(shape) for name, shape in named.items()) - budget) <= Fraction(len(named), 2)


def test_erk_below_saturation_is_proportional_to_its_shares():
    found = allocate(erk(1 / 64), {"small": (64, 64), "large": (256, 128)})
    # (64 + 64) / 64^2 against (256 + 128) / (256 * 128)
    assert found["small"] / found["large"] == Fraction(1, 32) / Fraction(3, 256)


def test_uniform_and_plain_float_are_the_same():
    assert allocate(0.1, SHAPES) == allocate(uniform(0.1), SHAPES) == dict.fromkeys(SHAPES, Fraction(1, 10))


@pytest.mark.parametrize("density", [0, 1.5, float("nan"), True])
def test_allocate_bad_density_raises(density):
    for setting in (density, erk(density), {"a": density}):
        with pytest.raises(ValueError, match=r"must lie in \(0, 1\]"):
            allocate(setting, {"a": (4, 4)})


def test_allocate_by_glob_leaves_the_others_dense():
    found = allocate({"a": 0.25}, SHAPES)
    assert found == {"a": Fraction(1, 4), "b": 1, "c": 1}
