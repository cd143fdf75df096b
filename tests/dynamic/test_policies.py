"""Which weights move, how many, and when: the arithmetic, without a model."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smupar.dynamic.policies import DropAndGrow, MoveSchedule, Pruning, key_of, largest, random_scores


def flat(*values):
    return torch.tensor([values])


def bits(text):
    return flat(*(bit == "1" for bit in text))


def test_largest_takes_equal_scores_by_position():
    chosen = largest(flat(1.0, 3.0, 3.0, 3.0, 2.0), bits("11011"), torch.tensor([2]))
    assert torch.equal(chosen, bits("01010"))
    many = torch.arange(5000)[None]
    chosen = largest((many % 2).float(), many % 3 > 0, torch.tensor([1000]))  # 1667 odd candidates, all equal
    assert torch.equal(chosen.nonzero()[:, 1], many[(many % 2 == 1) & (many % 3 > 0)][:1000])


def test_largest_counts_each_row_for_itself():
    score = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    chosen = largest(score, torch.ones(3, 3, dtype=torch.bool), torch.tensor([0, 1, 3]))
    assert chosen.tolist() == [[False] * 3, [True, False, False], [True] * 3]


@st.composite
def choices(draw):
    num_rows, size = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    score = [[draw(st.integers(0, 4)) / 2 for _ in range(size)] for _ in range(num_rows)]
    candidates = [[draw(st.booleans()) for _ in range(size)] for _ in range(num_rows)]
    num = [draw(st.integers(0, sum(row))) for row in candidates]
    return torch.tensor(score), torch.tensor(candidates), torch.tensor(num)


@settings(max_examples=60, deadline=None)
@given(choices())
def test_largest_takes_exactly_so_many_candidates_and_none_better_is_left(choice):
    score, candidates, num = choice
    chosen = largest(score, candidates, num)
    assert torch.equal(chosen.sum(1), num)
    assert not (chosen & ~candidates).any()
    for row_score, row_chosen, row_candidates in zip(score, chosen, candidates, strict=True):
        left = row_candidates & ~row_chosen
        if row_chosen.any() and left.any():
            assert row_score[row_chosen].min() >= row_score[left].max()
            tied = row_score == row_score[row_chosen].min()
            last, first = (row_chosen & tied).nonzero().max(), (left & tied).nonzero()
            assert not len(first) or last < first.min()


def test_rigl_drops_the_smallest_and_may_grow_them_again():
    weight = flat(0.0, 0.5, 0.0, -0.1, 0.0, 0.3, -0.9, 0.0)
    gradient = flat(0.2, 9.0, 0.7, 0.1, 0.3, 0.6, 9.0, 0.4)
    rule = DropAndGrow(MoveSchedule(1, 10), "gradient", drop_fraction=0.5, decay="constant")
    # 3 and 5 are dropped; of 0, 2, 3, 4, 5, 7 the largest gradients are at 2 and, just dropped, at 5.
    assert torch.equal(rule.next_mask(weight, bits("01010110"), gradient, 1), bits("01100110"))
    gradient[0, 5] = 0.0
    assert torch.equal(rule.next_mask(weight, bits("01010110"), gradient, 1), bits("01100011"))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 40), st.floats(0.01, 0.99), st.integers(1, 20))
def test_dropping_and_growing_keeps_the_number_of_ones_and_the_largest(seed, size, fraction, step):
    rng = torch.Generator().manual_seed(seed)
    weight, gradient = torch.randn(3, size, generator=rng), torch.rand(3, size, generator=rng)
    mask = torch.rand(3, size, generator=rng) < 0.5
    new = DropAndGrow(MoveSchedule(1, 20), "gradient", fraction).next_mask(weight * mask, mask, gradient, step)
    assert torch.equal(new.sum(1), mask.sum(1))
    share = fraction * (1 + math.cos(math.pi * step / 20)) / 2
    for row, row_mask, row_new in zip(weight, mask, new, strict=True):
        num_kept = int(row_mask.sum()) - int(share * int(row_mask.sum()) + 0.5)
        kept = row.abs().masked_fill(~row_mask, -1).topk(num_kept).indices
        assert row_new[kept].all()


def test_pruning_keeps_the_largest_of_those_that_are_left():
    weight = flat(9.0, 0.1, -0.5, 0.3)
    assert torch.equal(largest(weight.abs(), bits("0111"), torch.tensor([2])), bits("0011"))
    assert torch.equal(largest(weight.abs(), bits("0111"), torch.tensor([4])), bits("0111"))


def test_random_scores_are_uniform_and_the_same_each_time():
    scores = random_scores(100_000, torch.tensor([key_of(0, 1, "a")]))
    assert torch.equal(scores, random_scores(100_000, torch.tensor([key_of(0, 1, "a")])))
    assert scores.min() >= 0
    assert scores.max() < 2**24
    # 10 standard errors of a uniform mean are 0.009 of the range; of a tenth's share, 0.0095.
    assert scores.mean().item() / 2**24 == pytest.approx(0.5, abs=0.01)
    shares = torch.histc(scores / 2**24, bins=10, min=0, max=1) / 100_000
    assert (shares - 0.1).abs().max() < 0.01
    neighbours = torch.corrcoef(torch.cat([scores[:, :-1], scores[:, 1:]]))
    assert abs(neighbours[0, 1]) < 0.03


def test_random_scores_of_other_seeds_steps_and_names_are_unrelated():
    keys = [key_of(0, 1, "a"), key_of(1, 1, "a"), key_of(0, 2, "a"), key_of(0, 1, "b")]
    scores = random_scores(50_000, torch.tensor(keys))
    assert (torch.corrcoef(scores) - torch.eye(4)).abs().max() < 0.03
    assert torch.equal(scores[2:3], random_scores(50_000, torch.tensor(keys[2:3])))


def test_times_count_steps_made_from_start_to_stop_both_included():
    due = [step for step in range(30) if MoveSchedule(every=4, start=3, stop=15).due(step)]
    assert due == [3, 7, 11, 15]
    assert [step for step in range(30) if MoveSchedule(every=10, stop=25).due(step)] == [10, 20]


def test_the_last_pruning_is_due_at_stop_whatever_every_is():
    rule = Pruning(MoveSchedule(every=10, stop=25))
    assert [step for step in range(40) if rule.due(step)] == [10, 20, 25]


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("cosine", {0: 30, 25: 26, 50: 15, 75: 4, 100: 0}),
        ("linear", {0: 30, 20: 24, 50: 15, 80: 6, 100: 0}),
        ("constant", {0: 30, 50: 30, 100: 30}),
    ],
)
def test_number_of_moved_weights_decays(decay, expected):
    mask = torch.arange(300)[None] < 100
    rule = DropAndGrow(MoveSchedule(every=1, stop=100), "gradient", drop_fraction=0.3, decay=decay)
    for step, num in expected.items():
        new = rule.next_mask(torch.rand(1, 300) * mask, mask, (~mask).float(), step)
        assert int((new & ~mask).sum()) == int((mask & ~new).sum()) == num


def test_progress_of_the_drop_fraction_counts_from_start():
    mask = torch.arange(300)[None] < 100
    rule = DropAndGrow(MoveSchedule(every=10, start=100, stop=200), "gradient", drop_fraction=0.3, decay="linear")
    moved = [int((rule.next_mask(mask.float(), mask, (~mask).float(), step) & ~mask).sum()) for step in (100, 150, 200)]
    assert moved == [30, 15, 0]


@pytest.mark.parametrize(("curve", "expected"), [("linear", 0.25), ("cosine", 0.25), ("cubic", 0.4375)])
def test_curves_half_way(curve, expected):
    rule = Pruning(MoveSchedule(every=1, start=10, stop=30), curve)
    assert float(1 - rule.density(Fraction(1), Fraction(1, 2), 20)) == pytest.approx(expected)
    assert rule.density(Fraction(1), Fraction(1, 3), 10) == 1
    assert rule.density(Fraction(1), Fraction(1, 3), 30) == Fraction(1, 3)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["cubic", "linear", "cosine"]), st.integers(1, 7), st.integers(0, 5), st.integers(1, 30), st.integers(1, 99)
)
def test_density_falls_to_exactly_the_last(curve, every, start, length, percent):
    rule = Pruning(MoveSchedule(every, start + length, start), curve)
    last = Fraction(percent, 100)
    densities = [rule.density(Fraction(1), last, step) for step in range(start, start + length + 1)]
    assert densities == sorted(densities, reverse=True)
    assert densities[-1] == last
    assert rule.due(start + length)
