"""Masks: exact counts, the structure each pattern promises, purity, and draws that are really uniform."""

import itertools
import math
import warnings
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import smupar
from smupar.plan.masks.allocations import as_density
from smupar.plan.masks.patterns import _exact_random, generator, parse_pattern
from tests.plan.nets import plan_mlp

LINEAR = ((24, 32), (1,))
TRANSPOSED = ((32, 24), (0,))  # Hugging Face's Conv1D: (in, out)
CONV = ((12, 16, 3, 3), (1, 2, 3))
CONV_TRANSPOSED = ((16, 12, 3, 3), (0, 2, 3))
RAW = ((16, 5, 3), (0,))  # a bare parameter with ("hidden", 0): moving its input to the end is no mere swap
MATRICES = (LINEAR, TRANSPOSED)
EVERY_SHAPE = (LINEAR, TRANSPOSED, CONV, CONV_TRANSPOSED, RAW)


def draw(pattern, shape, in_dims, density, *, seed=0, name="fc.weight"):
    return parse_pattern(pattern).draw(shape, in_dims, Fraction(density), generator(seed, "mask", name))


def count(pattern, shape, in_dims, density):
    return parse_pattern(pattern).count(shape, in_dims, Fraction(density))


def by_neuron(mask, in_dims):
    """(outputs, fan-in), with the input channel as the slowest index of the fan-in."""
    outs = [dim for dim in range(mask.ndim) if dim not in in_dims]
    return mask.permute(*outs, *in_dims).reshape(math.prod(mask.shape[dim] for dim in outs), -1)


def along_input(mask, in_dims, m):
    """(groups, m): every m consecutive entries along the input channel."""
    return mask.movedim(in_dims[0], -1).reshape(-1, m)


# Counts and structure


@pytest.mark.parametrize(("shape", "in_dims"), EVERY_SHAPE)
@pytest.mark.parametrize("density", [Fraction(1, 3), Fraction(1, 128), Fraction(9, 10)])
def test_random_keeps_the_exact_count(shape, in_dims, density):
    mask = draw("random", shape, in_dims, density)
    assert mask.dtype == torch.bool
    assert tuple(mask.shape) == shape
    assert (
        int(mask.sum()) == count("random", shape, in_dims, density) == math.floor(density * math.prod(shape) + Fraction(1, 2))
    )


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.fractions(0, 1), st.integers(0, 2**63))
def test_random_keeps_the_exact_count_of_any_shape(shape, density, seed):
    mask = draw("random", tuple(shape), (), density, seed=seed)
    assert int(mask.sum()) == count("random", tuple(shape), (), density)


@pytest.mark.parametrize(("shape", "sparsity", "num_kept"), [((30, 4), 0.5, 60), ((1, 2, 1, 4), 0.8, 2), ((30,), 0.1, 27)])
def test_random_count_agrees_with_peers(shape, sparsity, num_kept):
    density = as_density(1 - sparsity)
    assert count("random", shape, (0,), density) == num_kept
    assert int(draw("random", shape, (0,), density).sum()) == num_kept


def test_random_count_rounds_halves_up():
    # Python's round() would give 2 for both, and so lose a weight at one size and not at another.
    assert count("random", (5,), (), Fraction(1, 2)) == 3
    assert count("random", (3,), (), Fraction(1, 2)) == 2


def test_random_count_above_2_to_24_is_exact():
    # Above 2^24 a float32 sum can no longer count one by one.
    shape = (8193, 4097)
    num_kept = 2**24 + 1
    density = Fraction(num_kept, math.prod(shape))
    assert count("random", shape, (1,), density) == num_kept
    assert int(torch.count_nonzero(draw("random", shape, (1,), density))) == num_kept
    mostly = Fraction(math.prod(shape) - 3, math.prod(shape))
    assert int(torch.count_nonzero(draw("random", shape, (1,), mostly))) == 8193 * 4097 - 3


@pytest.mark.parametrize("pattern", ["fan_in", "block-16", "15:16", "15:16-transposable"])
def test_structured_count_above_2_to_24_is_exact(pattern):
    shape = (4096, 4400)
    assert count(pattern, shape, (1,), Fraction(15, 16)) == 16_896_000  # > 2^24 = 16,777,216
    assert int(torch.count_nonzero(draw(pattern, shape, (1,), Fraction(15, 16)))) == 16_896_000


@pytest.mark.parametrize(("shape", "in_dims"), EVERY_SHAPE)
def test_bernoulli_leaves_the_count_to_chance(shape, in_dims):
    num = math.prod(shape)
    assert count("bernoulli", shape, in_dims, Fraction(1, 4)) is None
    sizes = [int(draw("bernoulli", shape, in_dims, Fraction(1, 4), seed=seed).sum()) for seed in range(50)]
    assert len(set(sizes)) > 10
    assert abs(sum(sizes) - 50 * num / 4) < 6 * math.sqrt(50 * num * 3 / 16)


@pytest.mark.parametrize(("shape", "in_dims"), EVERY_SHAPE)
@pytest.mark.parametrize("density", [Fraction(1, 16), Fraction(1, 3), Fraction(1)])
def test_fan_in_keeps_the_same_number_for_every_neuron(shape, in_dims, density):
    mask = draw("fan_in", shape, in_dims, density)
    rows = by_neuron(mask, in_dims)
    num_kept = math.floor(density * rows.shape[1] + Fraction(1, 2))
    assert tuple(mask.shape) == shape
    assert set(rows.sum(1).tolist()) == {num_kept}
    assert int(mask.sum()) == count("fan_in", shape, in_dims, density) == num_kept * len(rows)
    assert mask.is_contiguous()


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.fractions(0, 1), st.booleans(), st.integers(0, 2**32))
def test_fan_in_holds_for_any_convolution(num_out, num_in, kernel, density, transposed, seed):
    shape, in_dims = ((num_in, num_out, kernel), (0, 2)) if transposed else ((num_out, num_in, kernel), (1, 2))
    mask = draw("fan_in", shape, in_dims, density, seed=seed)
    assert set(by_neuron(mask, in_dims).sum(1).tolist()) == {math.floor(density * num_in * kernel + Fraction(1, 2))}
    assert int(mask.sum()) == count("fan_in", shape, in_dims, density)


@pytest.mark.parametrize(("shape", "in_dims"), EVERY_SHAPE)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (1, 8), (7, 8), (1, 16)])
def test_nm_keeps_n_of_every_m_along_the_input(shape, in_dims, n, m):
    mask = draw(f"{n}:{m}", shape, in_dims, Fraction(n, m))
    assert tuple(mask.shape) == shape
    assert set(along_input(mask, in_dims, m).sum(1).tolist()) == {n}
    assert int(mask.sum()) == count(f"{n}:{m}", shape, in_dims, Fraction(n, m)) == math.prod(shape) * n // m


@settings(deadline=None)
@given(st.data())
def test_nm_structure_holds_for_any_n_m_and_size(data):
    m = data.draw(st.integers(2, 9))
    n = data.draw(st.integers(1, m - 1))
    groups, num_out = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    shape, in_dims = data.draw(st.sampled_from([((num_out, groups * m), (1,)), ((groups * m, num_out), (0,))]))
    mask = draw(f"{n}:{m}", shape, in_dims, Fraction(n, m), seed=data.draw(st.integers(0, 2**32)))
    assert set(along_input(mask, in_dims, m).sum(1).tolist()) == {n}
    assert int(mask.sum()) == count(f"{n}:{m}", shape, in_dims, Fraction(n, m))


@pytest.mark.parametrize(("shape", "in_dims"), MATRICES)
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 8), (1, 2)])
def test_transposable_nm_holds_along_inputs_and_outputs(shape, in_dims, n, m):
    pattern = f"{n}:{m}-transposable"
    mask = draw(pattern, shape, in_dims, Fraction(n, m))
    assert tuple(mask.shape) == shape
    assert set(mask.reshape(-1, m).sum(1).tolist()) == {n}
    assert set(mask.T.reshape(-1, m).sum(1).tolist()) == {n}
    assert int(mask.sum()) == count(pattern, shape, in_dims, Fraction(n, m)) == math.prod(shape) * n // m


@pytest.mark.parametrize(("shape", "in_dims"), [((48, 64), (1,)), ((64, 48), (0,))])
@pytest.mark.parametrize(("size", "num_blocks"), [(16, 12), (4, 192), (1, 3072)])
def test_block_keeps_whole_blocks(shape, in_dims, size, num_blocks):
    density = Fraction(1, 3)
    mask = draw(f"block-{size}", shape, in_dims, density)
    blocks = mask.view(shape[0] // size, size, shape[1] // size, size).sum((1, 3))
    assert blocks.numel() == num_blocks
    assert set(blocks.flatten().tolist()) == {0, size**2}
    assert int((blocks > 0).sum()) == num_blocks // 3
    assert int(mask.sum()) == count(f"block-{size}", shape, in_dims, density) == num_blocks // 3 * size**2


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.fractions(0, 1), st.integers(0, 2**32))
def test_block_structure_holds_for_any_size(rows, cols, size, density, seed):
    shape = (rows * size, cols * size)
    mask = draw(f"block-{size}", shape, (1,), density, seed=seed)
    blocks = mask.view(rows, size, cols, size).sum((1, 3))
    assert set(blocks.flatten().tolist()) <= {0, size**2}
    assert int(mask.sum()) == count(f"block-{size}", shape, (1,), density)


@pytest.mark.parametrize("pattern", ["random", "fan_in", "block-8"])
def test_full_density_keeps_everything(pattern):
    assert draw(pattern, (24, 32), (1,), 1).all()


# Where a pattern does not fit


def test_nm_with_a_fan_out_that_is_not_divisible_fits():
    assert count("2:4", (30, 24), (1,), Fraction(1, 2)) == 360


# A pure function of (seed, name)

PATTERNS = [
    ("random", Fraction(1, 4)),
    ("bernoulli", Fraction(1, 4)),
    ("fan_in", Fraction(1, 4)),
    ("2:4", Fraction(1, 2)),
    ("2:4-transposable", Fraction(1, 2)),
    ("block-4", Fraction(1, 4)),
]


@pytest.mark.parametrize(("pattern", "density"), PATTERNS)
def test_mask_depends_on_seed_and_name_only(pattern, density):
    first = draw(pattern, *LINEAR, density, seed=3, name="a.weight")
    torch.manual_seed(12345)
    draw(pattern, *LINEAR, density, seed=8, name="c.weight")
    assert torch.equal(first, draw(pattern, *LINEAR, density, seed=3, name="a.weight"))
    assert not torch.equal(first, draw(pattern, *LINEAR, density, seed=4, name="a.weight"))
    assert not torch.equal(first, draw(pattern, *LINEAR, density, seed=3, name="b.weight"))


@pytest.mark.parametrize(("pattern", "density"), PATTERNS)
def test_drawing_leaves_the_global_rng_alone(pattern, density):
    before = torch.get_rng_state()
    draw(pattern, *LINEAR, density)
    assert torch.equal(torch.get_rng_state(), before)


def test_generator_seed_is_the_same_in_every_process():
    # Of sha256("0/mask/fc.weight"), not of Python's hash(), which differs from process to process.
    assert generator(0, "mask", "fc.weight").initial_seed() == 5708485983057730072
    assert generator(0, "init", "fc.weight").initial_seed() != generator(0, "mask", "fc.weight").initial_seed()


def test_masks_of_two_layers_overlap_as_independent_ones():
    first = draw("random", (256, 256), (1,), Fraction(1, 2), name="blocks.0.fc.weight")
    second = draw("random", (256, 256), (1,), Fraction(1, 2), name="blocks.1.fc.weight")
    # Hypergeometric: mean n / 4, std sqrt(n) / 4.
    assert abs(int((first & second).sum()) - 16384) < 6 * 64


# Uniformity. Fixed seeds, so these never flicker; 5.5 standard deviations leave room for every position tested.


def assert_frequencies(num_kept, num_draws, density):
    """``num_kept``: how often each position was kept. Checks each position, and the spread of all of them."""
    p = float(density)
    z = (num_kept.double() - num_draws * p) / math.sqrt(num_draws * p * (1 - p))
    assert z.abs().max() < 5.5
    # Much too even would be as wrong as too uneven.
    assert abs((z**2).mean() - 1) < 8 * math.sqrt(2 / z.numel())


def kept_counts(draw_one, num_draws):
    """How often each position is kept in ``draw_one(seed)`` over that many seeds."""
    return sum(draw_one(seed).to(torch.int64) for seed in range(num_draws))


@pytest.mark.parametrize(("shape", "in_dims"), [((12, 16), (1,)), ((16, 12), (0,)), ((4, 8, 3, 3), (1, 2, 3))])
@pytest.mark.parametrize(
    ("pattern", "density"),
    [
        ("random", Fraction(1, 4)),
        ("bernoulli", Fraction(1, 4)),
        ("fan_in", Fraction(1, 4)),
        ("2:4", Fraction(1, 2)),
        ("1:4", Fraction(1, 4)),
    ],
)
def test_every_position_is_kept_equally_often(pattern, density, shape, in_dims):
    total = kept_counts(lambda seed: draw(pattern, shape, in_dims, density, seed=seed), 1000)
    assert_frequencies(total, 1000, density)


@pytest.mark.parametrize(("shape", "in_dims"), [((12, 16), (1,)), ((16, 12), (0,))])
@pytest.mark.parametrize(("pattern", "density"), [("1:4-transposable", Fraction(1, 4)), ("2:4-transposable", Fraction(1, 2))])
def test_transposable_keeps_every_position_equally_often(pattern, density, shape, in_dims):
    total = kept_counts(lambda seed: draw(pattern, shape, in_dims, density, seed=seed), 1000)
    assert_frequencies(total, 1000, density)


def test_block_keeps_every_block_equally_often():
    total = kept_counts(lambda seed: draw("block-2", (32, 48), (1,), Fraction(1, 4), seed=seed), 1000)
    assert_frequencies(total[::2, ::2], 1000, Fraction(1, 4))


@pytest.mark.parametrize(("pattern", "density"), PATTERNS)
@pytest.mark.parametrize(("shape", "in_dims"), [((16, 32), (1,)), ((32, 16), (0,))])
def test_neurons_choose_their_inputs_independently(pattern, density, shape, in_dims):
    # Neurons 4 apart: tiles and blocks tie nearer ones together.
    both, num_draws = 0, 300
    for seed in range(num_draws):
        rows = by_neuron(draw(pattern, shape, in_dims, density, seed=seed), in_dims)
        both += int((rows & rows.roll(4, 0)).sum())
    size = 16 if pattern == "block-4" else 1  # weights that come and go together
    p = float(density) ** 2
    blocks, kept = 32, 8
    if pattern == "block-4":  # few blocks, drawn without replacement
        p = kept * (kept - 1) / (blocks * (blocks - 1))
    total = num_draws * math.prod(shape)
    assert abs(both - total * p) < 6 * math.sqrt(total * size * p)


def test_random_makes_all_masks_equally_likely():
    # 3 of 6: all 20 masks, not only their marginals.
    seen = dict.fromkeys(itertools.combinations(range(6), 3), 0)
    for seed in range(4000):
        seen[tuple(draw("random", (6,), (), Fraction(1, 2), seed=seed).nonzero().flatten().tolist())] += 1
    chi2 = sum((times - 200) ** 2 / 200 for times in seen.values())
    assert chi2 < 19 + 6 * math.sqrt(2 * 19)
    assert min(seen.values()) > 0


def test_random_of_a_large_tensor_is_uniform():
    # Large enough that the repair guesses positions instead of listing them.
    num, density = 32768, Fraction(1, 2)
    total = kept_counts(lambda seed: draw("random", (num,), (), density, seed=seed), 500)
    assert_frequencies(total, 500, density)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 256])
def test_random_neighbours_are_independent(lag):
    # Four positions share one 64-bit random number: lags below 4 would show what they have in common.
    num, num_draws = 32768, 100
    pairs = 0
    for seed in range(num_draws):
        mask = draw("random", (num,), (), Fraction(1, 2), seed=seed)
        pairs += int((mask & mask.roll(lag)).sum())
    k = num // 2
    expected = num_draws * num * k * (k - 1) / (num * (num - 1))
    assert abs(pairs - expected) < 6 * math.sqrt(num_draws * num / 16)


@pytest.mark.parametrize(
    ("num", "num_kept"),
    [
        (40_000, 1),
        (40_000, 3),
        (40_000, 60),
        (40_000, 39_940),
        (40_000, 39_999),
        (2**18, 1),  # below 2^-17: the 16-bit draw keeps nothing, all of it is repair
        (2**18, 2**18 - 1),  # and here it keeps everything
        (2**18, 20),
        (2**18, 2**18 - 20),
    ],
)
def test_random_at_extreme_densities_is_uniform(num, num_kept):
    num_draws = 300
    rare_is_kept = num_kept < num / 2
    rare = min(num_kept, num - num_kept)
    positions = []
    for seed in range(num_draws):
        mask = _exact_random(num, num_kept, generator(seed, "mask", "extreme"))
        where = (mask if rare_is_kept else ~mask).nonzero().flatten()
        assert len(where) == rare
        positions.append(where)
    where = torch.cat(positions)
    # By place in the tensor, and by place within a 64-bit word.
    for bucket, num_buckets in ((where * 8 // num, 8), (where % 4, 4)):
        times = torch.bincount(bucket, minlength=num_buckets).double()
        p = 1 / num_buckets
        z = (times - len(where) * p) / math.sqrt(len(where) * p * (1 - p))
        assert z.abs().max() < 5


@pytest.mark.parametrize("num_kept", [0, 1, 5, 8])
def test_exact_random_reaches_both_ends(num_kept):
    assert int(_exact_random(8, num_kept, generator(0, "mask", "w")).sum()) == num_kept


# Whole neurons


def neuron_masks(seed, density=3 / 8):
    """Layers have two widths, so that one set of live neurons must serve both."""
    plan = plan_mlp(64, 32, expand=2, pattern="neuron", density=density, seed=seed)
    return plan, {row.name: plan.draw_mask(row.name) for row in plan}


def test_neuron_removes_rows_and_columns_of_the_same_neurons():
    plan, masks = neuron_masks(0)
    live = masks["embed.bias"]
    assert int(live.sum()) == 24
    assert plan.live_neurons == (24, 64)
    wide = live.repeat(2)
    assert torch.equal(masks["embed.weight"], live[:, None].expand(64, 7))
    assert torch.equal(masks["fc1.weight"], wide[:, None] & live[None])
    assert torch.equal(masks["fc1.bias"], wide)
    assert torch.equal(masks["fc2.weight"], live[:, None] & wide[None])
    assert torch.equal(masks["fc2.bias"], live)
    assert torch.equal(masks["head.weight"], live[None].expand(5, 64))
    assert masks["head.bias"] is None


def test_neuron_counts_are_those_of_the_plan():
    plan, masks = neuron_masks(0)
    for row in plan:
        if row.masked:
            assert int(masks[row.name].sum()) == row.num_kept == row.density * math.prod(row.shape)


def test_neuron_choice_follows_the_seed_and_not_the_global_rng():
    before = torch.get_rng_state()
    live = neuron_masks(0)[1]["embed.bias"]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(live, neuron_masks(0)[1]["embed.bias"])
    assert not torch.equal(live, neuron_masks(1)[1]["embed.bias"])


def test_neuron_keeps_every_neuron_equally_often():
    pattern = parse_pattern("neuron")
    total = kept_counts(lambda seed: pattern.draw_live(24, 64, seed), 1000)
    assert_frequencies(total, 1000, Fraction(3, 8))


def test_neuron_density_that_the_widths_cannot_give_is_not_silent():
    # 64 and 171 have no common period: half of one neuron rounds to a whole one, and nothing would be removed.
    class Odd(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.embed = nn.Linear(7, width)
            self.up = nn.Linear(width, 8 * width // 3 + 1)
            self.down = nn.Linear(8 * width // 3 + 1, width)
            self.head = nn.Linear(width, 5)

    with torch.device("meta"):
        model, base = Odd(64), Odd(32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", smupar.PlanWarning)
        with pytest.raises((ValueError, smupar.PlanWarning)):
            smupar.make_plan(model, base=base, pattern="neuron", density=0.5)


# Settings


def test_parse_pattern_reads_every_spelling():
    assert parse_pattern("2:4").n == 2
    assert parse_pattern("2:4").m == 4
    assert parse_pattern("1:16-transposable").m == 16
    assert parse_pattern("block-32").size == 32
    for text in ("random", "bernoulli", "fan_in", "neuron", "2:4", "2:4-transposable", "block-16"):
        assert parse_pattern(text).name == text


# Refusals

UNKNOWN = r'unknown pattern .*choose one of "random" \| "bernoulli" \| "fan_in"'
HALF = Fraction(1, 2)
REFUSED = [
    (lambda: count("2:4", (24, 30), (1,), HALF), r"2:4 needs dimensions divisible by 4, this one is 30"),
    (lambda: count("2:4", (24, 32), (1,), Fraction(1, 4)), r"2:4 keeps exactly 2/4 of the weights, not 0.25"),
    (lambda: count("2:4-transposable", (30, 32), (1,), HALF), "divisible by 4, this one is 30"),
    (lambda: count("2:4-transposable", (32, 30), (1,), HALF), "divisible by 4, this one is 30"),
    (lambda: count("2:4-transposable", (30, 32), (0,), HALF), "divisible by 4, this one is 30"),
    (lambda: count("2:4-transposable", *CONV, HALF), r"for matrices.*\(12, 16, 3, 3\)"),
    (lambda: count("block-16", (48, 60), (1,), HALF), "both dimensions divisible by 16"),
    (lambda: count("block-16", (60, 48), (1,), HALF), "both dimensions divisible by 16"),
    (lambda: count("block-16", (32, 32, 3, 3), (1,), HALF), "both dimensions divisible by 16"),
    (lambda: neuron_masks(0, density=1 / 256), "leaves none of 64 neurons"),
    *(
        (partial(parse_pattern, text), UNKNOWN)
        for text in ("", "Random", "nm", "2:", ":4", "2:4-x", "2:4-", "-2:4", "block", "block-0", "block-x")
    ),
    *((partial(parse_pattern, text), "0 < N < M") for text in ("0:4", "4:4", "5:4")),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_does_not_fit_is_refused_with_the_choices(call, message):
    with pytest.raises(ValueError, match=message):
        call()
