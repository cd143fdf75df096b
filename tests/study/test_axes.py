"""Grids of runs and their axes."""

import pytest

from smupar.study.axes import grid, parse_axis
from tests.study.tiny import AXES, TINY


def test_grid_is_every_combination():
    configs = list(grid(TINY, AXES))
    assert len(configs) == 16
    assert len({config.id for config in configs}) == 16
    assert {(c.rule, c.sparsity, c.lr, c.seed) for c in configs} >= {("sp", 0.75, 2.0**-6, 1)}


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("lr=2^-10..2^-8", "lr", [2.0**-10, 2.0**-9, 2.0**-8]),
        ("sparsity=0,0.75,none", "sparsity", [0.0, 0.75, None]),
        ("rule=sp,smupar", "rule", ["sp", "smupar"]),
        ("width=64,128", "width", [64, 128]),
        ("head-dim=16", "head_dim", [16]),
        ("biases=true,false", "biases", [True, False]),
        ("width=2^5..2^7", "width", [32, 64, 128]),
        ("seed=2^0,2^1", "seed", [1, 2]),
        ("lr=2^-6.5", "lr", [2**-6.5]),
        ("betas=0.9:0.95,0.9:0.99", "betas", [(0.9, 0.95), (0.9, 0.99)]),
    ],
)
def test_axis_is_read_with_the_type_of_its_field(text, name, values):
    assert parse_axis(text) == (name, values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=1", "a run has no field called 'speed'"),
        ("lr=", "the axis lr has no values"),
        ("lr=fast", "lr takes numbers, got 'fast'"),
        ("lr=1..2", "a range is written 2\\^-8..2\\^-4"),
        ("biases=maybe", "biases is true or false"),
        ("width=2^-1", "width cannot be 2\\^-1"),
        ("width=0.5", "width takes whole numbers, got '0.5'"),
        ("rule=2^3", "rule cannot be 2\\^3"),
        ("lr=2^5000", "2\\^5000 is not a number that floating point holds: powers go from 2\\^-1022 to 2\\^1023"),
        ("lr=2^-5000", "2\\^-5000 is not a number that floating point holds"),
        ("lr=2^-99999999..2^4", "2\\^-99999999 is not a number"),
        ("lr=2^nan", "2\\^nan is not a number"),
        ("lr=2^-7.5..2^-4", "from one whole power to another"),
        ("betas=0.9", "betas takes two numbers such as 0.9:0.95, got '0.9'"),
    ],
)
def test_bad_axis_raises_with_the_remedy(text, message):
    with pytest.raises(ValueError, match=message):
        parse_axis(text)


def test_axis_without_values_raises():
    with pytest.raises(ValueError, match="the axis lr has no values"):
        list(grid(TINY, {"lr": []}))
