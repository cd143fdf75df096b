"""Learning-rate schedules of Table 4."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smupar.lm.config.presets import preset
from smupar.lm.config.run_config import RunConfig
from smupar.lm.run.schedule import lr_share

FIGURE_6 = RunConfig(steps=1169, warmup=116, schedule="linear")  # "10x linear"


def test_610m_schedule_warms_up_for_1175_steps_and_ends_at_zero():
    config = preset("paper-610m")
    assert lr_share(0, config) == pytest.approx(1 / 1175)
    assert lr_share(587, config) == pytest.approx(588 / 1175)
    assert lr_share(1174, config) == lr_share(1175, config) == 1.0
    assert lr_share(1176, config) == pytest.approx(10576 / 10577)  # 11752 - 1175 = 10577 steps of decay
    assert lr_share(11751, config) == pytest.approx(1 / 10577)
    assert lr_share(11752, config) == 0.0  # where the step after the last would be


def test_figure_6_schedule_warms_up_for_116_steps_and_ends_at_a_tenth():
    assert lr_share(0, FIGURE_6) == pytest.approx(1 / 116)
    assert lr_share(115, FIGURE_6) == lr_share(116, FIGURE_6) == 1.0
    assert lr_share(117, FIGURE_6) == pytest.approx(1 - 0.9 / 1053)
    assert lr_share(1168, FIGURE_6) == pytest.approx(0.1 + 0.9 / 1053)
    assert lr_share(1169, FIGURE_6) == pytest.approx(0.1)


def test_figure_7_schedule_is_constant_without_warm_up():
    config = RunConfig(steps=100, warmup=0, schedule="constant")
    assert {lr_share(step, config) for step in range(100)} == {1.0}


def test_constant_schedule_may_warm_up():
    config = RunConfig(steps=100, warmup=4, schedule="constant")
    assert [lr_share(step, config) for step in (0, 1, 2, 3, 4, 99)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_schedule_goes_through_the_middle_to_a_tenth():
    config = RunConfig(steps=200, warmup=0, schedule="cosine")
    assert lr_share(0, config) == 1.0
    assert lr_share(50, config) == pytest.approx(0.1 + 0.9 * (1 + 0.5**0.5) / 2)
    assert lr_share(100, config) == pytest.approx(0.55)
    assert lr_share(200, config) == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "warmup"), [(11752, 1175), (1169, 116), (1907, 190)])
def test_default_warm_up_is_that_of_table_4(steps, warmup):
    assert RunConfig(steps=steps).warmup_steps == warmup


@pytest.mark.parametrize("schedule", ["linear", "linear-to-zero", "constant", "cosine"])
@given(steps=st.integers(1, 200), share=st.floats(0, 1))
def test_share_rises_to_one_and_never_again_and_is_never_zero(schedule, steps, share):
    config = replace(FIGURE_6, steps=steps, warmup=round(share * steps), schedule=schedule)
    shares = [lr_share(step, config) for step in range(steps)]
    rise, fall = shares[: config.warmup_steps], shares[config.warmup_steps :]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert min(shares) > 0
    assert max(shares) == 1.0
