"""Masks that move: which weights, how many, when, and what becomes of weights, optimizer state and learning rates."""

import copy
import io
import math
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lion_pytorch import Lion
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import smupar
from smupar.dynamic.policies import DropAndGrow, Pruning, Times, density_factor, key_of, largest, random_scores
from smupar.model.gradients import gradient_mask
from smupar.model.parameterize import add_masks, mask_of
from smupar.optim.layer_rates import group_of_weight, layer_rates

VOCAB = 11
SIZES = {"mix.weight": 256, "up.weight": 512, "down.weight": 512}
FAMILY_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd"}


class Net(nn.Module):
    """Hidden weights of 256, 512 and 512 entries at width 16."""

    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + F.gelu(self.mix(self.norm(x)))
        return self.head(x + self.down(F.gelu(self.up(x))))


def base():
    with torch.device("meta"):
        return Net(8)


def make(density=0.25, *, dtype=torch.float32, **settings):
    """A parameterized Net of twice the base width, and its plan."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    return model, smupar.parameterize(model, base=base(), density=density, **settings)


def make_adamw(model, plan, lr=0.01, weight_decay=0.1, **options):
    groups = smupar.param_groups(model, plan, lr=lr, weight_decay=weight_decay)
    return torch.optim.AdamW(groups, **options)


def used_lrs(optimizer):
    """The learning rates of hidden weights at the last step, by name: hooks of an optimizer run after the seam's."""
    used = {}
    optimizer.register_step_pre_hook(
        lambda *_: used.update({name: float(group["lr"]) for name, group in group_of_weight(optimizer).items()})
    )
    return used


def make_sign(model, plan, lr=0.01):
    """Adam without memory: a step is exactly the learning rate, times the sign of the gradient."""
    return torch.optim.Adam(smupar.param_groups(model, plan, lr=lr, optimizer="adam"), betas=(0.0, 0.0), eps=1e-30)


def make_all(name, model, plan):
    """Optimizers by name, as a user would make them."""
    if name == "muon":
        muon = torch.optim.Muon(smupar.param_groups(model, plan, lr=0.02, only="hidden", optimizer="muon"))
        rest = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, only="rest"))
        return [muon, rest]
    cls = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "lion": Lion}[name]
    groups = smupar.param_groups(model, plan, lr=0.05 if name == "sgd" else 0.005, weight_decay=0.1, optimizer=name)
    return [cls(groups, **({"momentum": 0.9} if name == "sgd" else {}))]


def batch(step, size=8):
    tokens = torch.randint(VOCAB, (size, 7), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, data):
    tokens, targets = data
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def optimize(model, optimizer, step):
    """One step of training without the sparsifier's; gradients stay."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for one in optimizers:
        one.zero_grad()
    loss_of(model, batch(step)).backward()
    for one in optimizers:
        one.step()


def train(model, optimizer, sparsifier, steps):
    """Whether masks moved, by step."""
    moved = []
    for step in steps:
        optimize(model, optimizer, step)
        moved.append(sparsifier.step())
    return moved


def masks_of(model):
    return {name: mask_of(model, name).clone() for name in SIZES if mask_of(model, name) is not None}


def weights_of(model):
    return {name: model.get_parameter(name).detach().clone() for name in SIZES}


def counts(model):
    return {name: int(mask.sum()) for name, mask in masks_of(model).items()}


def state_of(optimizer, parameter):
    """The tensors of an optimizer's state that have an entry for each weight."""
    return {key: value.clone() for key, value in optimizer.state[parameter].items() if value.shape == parameter.shape}


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def assert_nothing_off_mask(model, optimizers=()):
    for name, mask in masks_of(model).items():
        parameter = model.get_parameter(name)
        assert not parameter[~mask].any(), name
        for one in optimizers:
            for value in state_of(one, parameter).values() if parameter in one.state else ():
                assert not value[~mask].any(), name


def flat(*values):
    return torch.tensor([values])


def bits(text):
    return flat(*(bit == "1" for bit in text))


# Which


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


def test_rigl_drops_the_smallest_and_grows_where_the_gradient_is_largest_among_all_not_kept():
    weight = flat(0.0, 0.5, 0.0, -0.1, 0.0, 0.3, -0.9, 0.0)
    gradient = flat(0.2, 9.0, 0.7, 0.1, 0.3, 0.6, 9.0, 0.4)
    rule = DropAndGrow(Times(1, 10), "gradient", drop_fraction=0.5, decay="constant")
    # 3 and 5 are dropped; of 0, 2, 3, 4, 5, 7 the largest gradients are at 2 and, just dropped, at 5.
    assert torch.equal(rule.moved(weight, bits("01010110"), gradient, 1), bits("01100110"))
    gradient[0, 5] = 0.0
    assert torch.equal(rule.moved(weight, bits("01010110"), gradient, 1), bits("01100011"))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 40), st.floats(0.01, 0.99), st.integers(1, 20))
def test_dropping_and_growing_keeps_the_number_of_ones_and_the_largest(seed, size, fraction, step):
    rng = torch.Generator().manual_seed(seed)
    weight, gradient = torch.randn(3, size, generator=rng), torch.rand(3, size, generator=rng)
    mask = torch.rand(3, size, generator=rng) < 0.5
    new = DropAndGrow(Times(1, 20), "gradient", fraction).moved(weight * mask, mask, gradient, step)
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


# When and how many


def test_times_count_steps_made_from_start_to_stop_both_included():
    due = [step for step in range(30) if Times(every=4, start=3, stop=15).due(step)]
    assert due == [3, 7, 11, 15]
    assert [step for step in range(30) if Times(every=10, stop=25).due(step)] == [10, 20]


def test_the_last_pruning_is_due_at_stop_whatever_every_is():
    rule = Pruning(Times(every=10, stop=25))
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
    rule = DropAndGrow(Times(every=1, stop=100), "gradient", drop_fraction=0.3, decay=decay)
    for step, num in expected.items():
        new = rule.moved(torch.rand(1, 300) * mask, mask, (~mask).float(), step)
        assert int((new & ~mask).sum()) == int((mask & ~new).sum()) == num


def test_progress_of_the_drop_fraction_counts_from_start():
    mask = torch.arange(300)[None] < 100
    rule = DropAndGrow(Times(every=10, start=100, stop=200), "gradient", drop_fraction=0.3, decay="linear")
    moved = [int((rule.moved(mask.float(), mask, (~mask).float(), step) & ~mask).sum()) for step in (100, 150, 200)]
    assert moved == [30, 15, 0]


def test_cubic_curve_prunes_fast_at_first():
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan)
    gmp = smupar.GMP(model, plan, optimizer, density=0.5, every=5, stop=20)
    sparsity = {}
    for step in range(1, 24):
        train(model, optimizer, gmp, [step])
        sparsity[step] = {name: 1 - density for name, density in gmp.densities.items()}
        assert len(set(sparsity[step].values())) == 1
    expected = {1: 0, 4: 0, 5: 0.2890625, 9: 0.2890625, 10: 0.4375, 15: 0.4921875, 19: 0.4921875, 20: 0.5, 23: 0.5}
    assert {step: sparsity[step]["up.weight"] for step in expected} == expected


@pytest.mark.parametrize(("curve", "expected"), [("linear", 0.25), ("cosine", 0.25), ("cubic", 0.4375)])
def test_curves_half_way(curve, expected):
    rule = Pruning(Times(every=1, start=10, stop=30), curve)
    assert float(1 - rule.density(Fraction(1), Fraction(1, 2), 20)) == pytest.approx(expected)
    assert rule.density(Fraction(1), Fraction(1, 3), 10) == 1
    assert rule.density(Fraction(1), Fraction(1, 3), 30) == Fraction(1, 3)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["cubic", "linear", "cosine"]), st.integers(1, 7), st.integers(0, 5), st.integers(1, 30), st.integers(1, 99)
)
def test_density_falls_to_exactly_the_last(curve, every, start, length, percent):
    rule = Pruning(Times(every, start + length, start), curve)
    last = Fraction(percent, 100)
    densities = [rule.density(Fraction(1), last, step) for step in range(start, start + length + 1)]
    assert densities == sorted(densities, reverse=True)
    assert densities[-1] == last
    assert rule.due(start + length)


# (257/512 of 256 is 128.5, which is rounded up.)
@pytest.mark.parametrize(("density", "mix", "up"), [(0.3, 77, 154), (257 / 512, 129, 257), (0.01, 3, 5)])
def test_gmp_ends_at_the_rounded_count_where_stop_is_no_multiple_of_every(density, mix, up):
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan)
    gmp = smupar.GMP(model, plan, optimizer, density=density, every=3, start=2, stop=7)
    seen = [counts(model)]
    moved = []
    for step in range(9):
        moved += train(model, optimizer, gmp, [step])
        seen.append(counts(model))
        assert_nothing_off_mask(model, [optimizer])
    assert [step for step, one in enumerate(moved, 1) if one] == [2, 5, 7]
    for name in SIZES:
        falling = [one[name] for one in seen]
        assert falling == sorted(falling, reverse=True)
        assert falling[2] == SIZES[name] > falling[5] > falling[7]
    assert counts(model) == {"mix.weight": mix, "up.weight": up, "down.weight": up}


# Carrying it out


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion"])
def test_rigl_starts_grown_weights_at_zero_and_leaves_kept_ones_alone(name):
    model, plan = make()
    (optimizer,) = make_all(name, model, plan)
    rigl = smupar.RigL(model, plan, optimizer, every=3, stop=100, drop_fraction=0.5, decay="constant")
    train(model, optimizer, rigl, range(2))
    optimize(model, optimizer, 2)
    old_masks, old_weights = masks_of(model), weights_of(model)
    old_states = {name: state_of(optimizer, model.get_parameter(name)) for name in SIZES}
    assert rigl.step()
    for name, new in masks_of(model).items():
        grown, dropped, kept = new & ~old_masks[name], old_masks[name] & ~new, new & old_masks[name]
        assert grown.sum() == dropped.sum() > 10
        parameter = model.get_parameter(name)
        assert not parameter[grown | dropped].any()
        assert torch.equal(parameter[kept], old_weights[name][kept])
        assert not parameter.grad[~new].any()
        state = state_of(optimizer, parameter)
        assert state
        for key, value in state.items():
            assert not value[grown | dropped].any(), key
            assert torch.equal(value[kept], old_states[name][key][kept])
            assert value[kept].any()


def test_rigl_chooses_by_the_weights_and_the_dense_gradient_of_the_step():
    model, plan = make(dtype=torch.float64)
    optimizer = make_adamw(model, plan)
    rigl = smupar.RigL(model, plan, optimizer, every=2, stop=100, drop_fraction=0.3, decay="constant")
    train(model, optimizer, rigl, range(1))
    dense = torch.autograd.grad(loss_of(model, batch(1)), [model.get_parameter(name) for name in SIZES])
    optimize(model, optimizer, 1)
    before, weights = masks_of(model), weights_of(model)
    rigl.step()
    for (name, new), gradient in zip(masks_of(model).items(), dense, strict=True):
        num = int(before[name].sum())
        num_kept = num - int(0.3 * num + 0.5)
        kept = torch.zeros(SIZES[name], dtype=torch.bool)
        kept[weights[name].flatten().abs().topk(num_kept).indices] = True
        grown = gradient.flatten().abs().masked_fill(kept, -1).topk(num - num_kept).indices
        expected = kept.index_fill(0, grown, True)
        assert torch.equal(new.flatten(), expected)
        assert not torch.equal(new, before[name])


def test_grown_weights_start_at_zero_whatever_was_left_off_the_mask():
    model, plan = make()
    optimizer = make_adamw(model, plan)
    sparsifier = smupar.SET(model, plan, optimizer, every=1, stop=9)
    optimize(model, optimizer, 0)
    before = masks_of(model)
    with torch.no_grad():
        for name, mask in before.items():
            parameter = model.get_parameter(name)
            parameter[~mask] = 7.0
            optimizer.state[parameter]["exp_avg"][~mask] = 7.0
    with pytest.warns(smupar.PlanWarning, match="off its mask are not 0: another optimizer"):
        sparsifier.step()
    for name, mask in masks_of(model).items():
        grown, parameter = mask & ~before[name], model.get_parameter(name)
        assert grown.any()
        assert not parameter[grown].any()
        assert not optimizer.state[parameter]["exp_avg"][grown].any()


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "muon", "lion"])
@pytest.mark.parametrize("kind", ["RigL", "SET"])
def test_number_of_ones_is_constant_and_nothing_leaves_the_mask(kind, name):
    model, plan = make()
    optimizers = make_all(name, model, plan)
    sparsifier = getattr(smupar, kind)(model, plan, optimizers, every=2, stop=8, drop_fraction=0.4)
    start, expected = masks_of(model), {name: size // 4 for name, size in SIZES.items()}
    for step in range(10):
        before = masks_of(model)
        (moved,) = train(model, optimizers, sparsifier, [step])
        assert moved == (step + 1 in (2, 4, 6, 8))
        assert counts(model) == expected
        assert_nothing_off_mask(model, optimizers)
        if not moved:
            assert_same_tensors(masks_of(model), before)
        assert all(model.get_parameter(one).isfinite().all() for one in SIZES)
    assert all(not torch.equal(mask, start[one]) for one, mask in masks_of(model).items())
    assert sparsifier.densities == dict.fromkeys(SIZES, 0.25)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lion"])
@pytest.mark.parametrize("kind", ["GMP", "IMP"])
def test_nothing_leaves_the_mask_while_it_shrinks(kind, name):
    model, plan = make(1.0)
    optimizers = make_all(name, model, plan)
    own = {"stop": 6, "every": 2} if kind == "GMP" else {"rounds": 2, "every": 3}
    sparsifier = getattr(smupar, kind)(model, plan, optimizers, density=0.25, **own)
    before = masks_of(model)
    for step in range(8):
        train(model, optimizers, sparsifier, [step])
        assert_nothing_off_mask(model, optimizers)
        after = masks_of(model)
        assert all(not (after[one] & ~before[one]).any() for one in SIZES)
        before = after
    assert counts(model) == {name: size // 4 for name, size in SIZES.items()}


def test_dense_gradient_of_micro_batches_is_that_of_the_whole_batch():
    chosen = {}
    for parts in (1, 2):
        model, plan = make(dtype=torch.float64)
        optimizer = make_adamw(model, plan)
        rigl = smupar.RigL(model, plan, optimizer, every=2, stop=100)
        for step in range(2):
            tokens, targets = batch(step)
            parameters = [model.get_parameter(name) for name in SIZES]
            expected = torch.autograd.grad(loss_of(model, (tokens, targets)), parameters)
            optimizer.zero_grad()
            for part in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
                (loss_of(model, part) / parts).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            assert norm > 0.01
            optimizer.step()
            hooks = [gradient_mask(parameter) for parameter in parameters]
            if step == 1:
                torch.testing.assert_close([hook.value for hook in hooks], list(expected), rtol=1e-10, atol=1e-14)
                assert all(hook.value[~mask].any() for hook, mask in zip(hooks, masks_of(model).values(), strict=True))
            else:
                assert all(hook.value is None for hook in hooks)
            assert rigl.step() == (step == 1)
            assert all(hook.value is None and hook.wanted == (step == 0) for hook in hooks)
        chosen[parts] = masks_of(model)
    assert_same_tensors(chosen[2], chosen[1])


def test_set_grows_by_the_seed_of_the_plan():
    def grown(seed):
        given, _ = make()
        masks = masks_of(given)
        torch.manual_seed(0)
        model = Net()
        plan = smupar.parameterize(model, base=base(), masks=masks, seed=seed)
        optimizer = make_adamw(model, plan)
        train(model, optimizer, smupar.SET(model, plan, optimizer, every=1, stop=9), range(3))
        torch.manual_seed(seed)  # growth must not read the global generator
        return masks_of(model)

    assert_same_tensors(grown(1), grown(1))
    others = grown(2)
    assert all(not torch.equal(mask, others[name]) for name, mask in grown(1).items())


def test_set_grows_other_weights_in_each_layer_and_step():
    model, plan = make()
    optimizer = make_adamw(model, plan)
    sparsifier = smupar.SET(model, plan, optimizer, every=1, stop=99, drop_fraction=0.5, decay="constant")
    grown = []
    for step in range(2):
        before = masks_of(model)
        train(model, optimizer, sparsifier, [step])
        grown += [masks_of(model)[name] & ~before[name] for name in ("up.weight", "down.weight")]
    positions = [set(one.flatten().nonzero().flatten().tolist()) for one in grown]
    for index, one in enumerate(positions):
        assert len(one) > 30
        assert all(len(one & other) < len(one) / 2 for other in positions[:index])


# The learning rate of GMP


def test_gmp_starts_from_the_init_of_the_dense_plan():
    model, plan = make(1.0)
    before = weights_of(model)
    smupar.GMP(model, plan, make_adamw(model, plan), density=0.25, every=2, stop=8)
    assert_same_tensors(weights_of(model), before)
    assert counts(model) == SIZES


def test_gmp_moves_weights_by_the_learning_rate_of_the_density_of_the_moment():
    model, plan = make(1.0, dtype=torch.float64)
    optimizer = make_sign(model, plan)
    gmp = smupar.GMP(model, plan, optimizer, density=0.25, every=2, stop=6)
    densities, used = [], used_lrs(optimizer)
    for step in range(8):
        density = gmp.densities["up.weight"]
        before = weights_of(model)
        optimize(model, optimizer, step)
        for name in SIZES:
            parameter, group = model.get_parameter(name), group_of_weight(optimizer)[name]
            moving = parameter.grad != 0
            sizes = (parameter.detach() - before[name])[moving].abs()
            # Table 1: eta / (m_in m_rho), at twice the base width.
            torch.testing.assert_close(sizes, torch.full_like(sizes, 0.01 / 2 / gmp.densities[name]), rtol=1e-9, atol=1e-15)
            assert used[name] == pytest.approx(0.01 / 2 / gmp.densities[name])
            assert group["lr"] == pytest.approx(0.01 / 2)
        gmp.step()
        densities.append(density)
    assert (densities[0], densities[-1], len(set(densities))) == (1, 0.25, 4)


@pytest.mark.parametrize(
    ("rule", "family", "expected"),
    [
        ("smupar", "adam", 4),
        ("smupar", "sgd", 4),
        ("smupar-lr-only", "adam", 4),
        ("smupar-init-only", "adam", 1),
        ("mup", "adam", 1),
        ("mup", "sgd", 1),
        ("sp", "adam", 1),
        ("sp", "sgd", 1),
    ],
)
def test_density_corrects_the_learning_rate_by_table_1(rule, family, expected):
    model, plan = make(1.0, rule=rule)
    name = FAMILY_OPTIMIZERS[family]
    groups = smupar.param_groups(model, plan, lr=0.01, optimizer=name)
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](groups)
    gmp = smupar.GMP(model, plan, optimizer, density=0.25, every=1, stop=1)
    used = used_lrs(optimizer)
    train(model, optimizer, gmp, range(2))
    assert used.keys() == SIZES.keys()
    for name, lr in used.items():
        assert lr == pytest.approx(0.01 * plan[name].lr_factor(family) * expected)
        assert density_factor(plan, plan[name], Fraction(1, 4), family) == expected
    assert any("hidden_weight" not in group for group in optimizer.param_groups)


def test_muon_needs_no_correction():
    model, plan = make(1.0)
    optimizers = make_all("muon", model, plan)
    gmp = smupar.GMP(model, plan, optimizers, density=0.25, every=1, stop=1)
    used = used_lrs(optimizers[0])
    train(model, optimizers, gmp, range(2))
    assert used == dict.fromkeys(SIZES, 0.02)


# Allocations and rounded counts differ from tensor to tensor, the overall base density does not.
@pytest.mark.parametrize("base_density", [1.0, 0.5, 0.3, smupar.erk(0.5)])
@pytest.mark.parametrize("density", [1.0, 0.5])
def test_gmp_ends_with_the_learning_rates_of_a_plan_for_the_last_density(base_density, density):
    model, plan = make(density, base_density=base_density)
    optimizer = make_adamw(model, plan)
    gmp = smupar.GMP(model, plan, optimizer, density=0.125, every=1, stop=1)
    used = used_lrs(optimizer)
    optimize(model, optimizer, 0)
    assert used == pytest.approx({name: 0.01 * plan[name].lr_factor("adam") for name in SIZES})
    gmp.step()
    optimize(model, optimizer, 1)
    _, last = make(0.125, base_density=base_density)
    assert used == pytest.approx({name: 0.01 * last[name].lr_factor("adam") for name in SIZES})


@pytest.mark.parametrize("base_density", [1.0, smupar.erk(0.5)])
def test_fixed_correction_starts_with_the_init_of_a_plan_for_the_last_density(base_density):
    model, plan = make(1.0, base_density=base_density)
    before = weights_of(model)
    smupar.GMP(model, plan, make_adamw(model, plan), density=0.125, every=1, stop=1, correction="fixed")
    _, last = make(0.125, base_density=base_density)
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(weight, before[name] * (last[name].init_std / plan[name].init_std))


def test_scheduler_made_after_gmp_never_sees_the_correction():
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan)
    gmp = smupar.GMP(model, plan, optimizer, density=0.25, every=2, stop=6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    used = used_lrs(optimizer)
    for step in range(8):
        density = gmp.densities["up.weight"]
        optimize(model, optimizer, step)
        group = group_of_weight(optimizer)["up.weight"]
        assert used["up.weight"] == pytest.approx(0.005 / (1 + step) / density)
        assert group["lr"] == pytest.approx(0.005 / (1 + step))
        gmp.step()
        scheduler.step()
        assert group["lr"] == pytest.approx(0.005 / (2 + step))
        assert group["initial_lr"] == pytest.approx(0.005)
        assert "scheduled_lr" not in group


@pytest.mark.parametrize(
    ("rule", "init", "rate"),
    [("smupar", 2, 4), ("smupar-init-only", 2, 1), ("smupar-lr-only", 1, 4), ("mup", 1, 1), ("sp", 1, 1)],
)
def test_fixed_correction_uses_init_and_learning_rate_of_the_last_density_from_the_start(rule, init, rate):
    model, plan = make(1.0, rule=rule)
    before = weights_of(model)
    optimizer = make_adamw(model, plan)
    gmp = smupar.GMP(model, plan, optimizer, density=0.25, every=2, stop=4, correction="fixed")
    assert_same_tensors(weights_of(model), {name: weight * init for name, weight in before.items()})
    assert counts(model) == SIZES
    used = used_lrs(optimizer)
    for step in range(6):
        optimize(model, optimizer, step)
        assert used == pytest.approx({name: 0.01 * plan[name].lr_factor("adam") * rate for name in SIZES})
        gmp.step()
    assert gmp.densities == dict.fromkeys(SIZES, 0.25)


def test_every_hidden_weight_gets_a_group_of_its_own_with_the_settings_of_the_old_one():
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan)
    before = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    rates = layer_rates(model, plan, optimizer)
    assert layer_rates(model, plan, optimizer) is rates
    after = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert after.keys() == before.keys()
    for key, group in after.items():
        assert {k: v for k, v in group.items() if k in before[key]} | {"params": 0, "name": 0} == before[key] | {
            "params": 0,
            "name": 0,
        }
    assert {name: group["params"] for name, group in group_of_weight(optimizer).items()} == {
        name: [model.get_parameter(name)] for name in SIZES
    }
    names = [group["name"] for group in optimizer.param_groups]
    assert len(set(names)) == len(names)


def test_measured_factor_replaces_the_plan_and_corrections():
    model, plan = make(1.0, dtype=torch.float64)
    optimizer = make_sign(model, plan)
    rates = layer_rates(model, plan, optimizer)
    rates.corrections.update({"up.weight": 3.0, "down.weight": 3.0})
    rates.measured["down.weight"] = 7.0
    before = weights_of(model)
    optimize(model, optimizer, 0)
    for name, expected in {"mix.weight": 0.005, "up.weight": 0.015, "down.weight": 0.07}.items():
        change = (model.get_parameter(name).detach() - before[name])[model.get_parameter(name).grad != 0].abs()
        torch.testing.assert_close(change, torch.full_like(change, expected), rtol=1e-9, atol=1e-15)


# GMP: to which densities


@pytest.mark.parametrize("start", [1.0, 0.5])
def test_gmp_prunes_the_smallest_of_what_the_plan_starts_with(start):
    model, plan = make(start)
    optimizer = make_adamw(model, plan)
    gmp = smupar.GMP(model, plan, optimizer, density=0.125, every=2, stop=4)
    assert counts(model) == {name: int(size * start) for name, size in SIZES.items()}
    train(model, optimizer, gmp, range(3))
    optimize(model, optimizer, 3)
    before, weights = masks_of(model), weights_of(model)
    gmp.step()
    for name, mask in masks_of(model).items():
        assert mask.sum() == SIZES[name] // 8
        assert not (mask & ~before[name]).any()
        assert weights[name][mask].abs().min() >= weights[name][before[name] & ~mask].abs().max()
        assert torch.equal(model.get_parameter(name).detach(), weights[name] * mask)


def test_gmp_prunes_to_an_allocation():
    shapes = {name: tuple(Net().get_parameter(name).shape) for name in SIZES}
    wanted = smupar.erk(0.25).densities(shapes)
    assert wanted["mix.weight"] > wanted["up.weight"]
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan)
    gmp = smupar.GMP(model, plan, optimizer, density=smupar.erk(0.25), every=2, stop=3)
    used = used_lrs(optimizer)
    train(model, optimizer, gmp, range(4))
    assert counts(model) == {name: math.floor(wanted[name] * size + Fraction(1, 2)) for name, size in SIZES.items()}
    assert used == pytest.approx({name: 0.005 / density for name, density in gmp.densities.items()})


def test_gmp_leaves_layers_that_no_glob_names_dense():
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan)
    gmp = smupar.GMP(model, plan, optimizer, density={"up.*": 0.5}, every=1, stop=1)
    train(model, optimizer, gmp, range(1))
    assert counts(model) == {**SIZES, "up.weight": 256}


def test_global_pool_ranks_all_hidden_weights_together():
    model, plan = make(1.0)
    with torch.no_grad():
        model.mix.weight.mul_(3)
    optimizer = make_adamw(model, plan, lr=1e-4)
    gmp = smupar.GMP(model, plan, optimizer, density=0.3, every=2, stop=3, pool="global")
    train(model, optimizer, gmp, range(2))
    optimize(model, optimizer, 2)
    before, weights = masks_of(model), weights_of(model)
    gmp.step()
    masks = masks_of(model)
    assert sum(counts(model).values()) == 77 + 154 + 154
    assert gmp.densities["mix.weight"] > 0.5 > gmp.densities["up.weight"]
    kept = torch.cat([weights[name][masks[name]].abs() for name in SIZES])
    lost = torch.cat([weights[name][before[name] & ~masks[name]].abs() for name in SIZES])
    assert kept.min() >= lost.max()
    used = used_lrs(optimizer)
    optimize(model, optimizer, 3)
    assert used == pytest.approx({name: 1e-4 / 2 / density for name, density in gmp.densities.items()})


def test_global_pool_that_would_empty_a_layer_is_refused():
    model, plan = make(1.0)
    with torch.no_grad():
        model.mix.weight.mul_(1e-6)
    optimizer = make_adamw(model, plan, lr=1e-9)
    gmp = smupar.GMP(model, plan, optimizer, density=0.25, every=1, stop=1, pool="global")
    with pytest.raises(ValueError, match=r"every weight of 'mix.weight' would be dropped: prune less, or with pool='layer'"):
        train(model, optimizer, gmp, range(1))


def test_copy_of_a_gmp_model_masks_gradients_again_after_attach():
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan)
    gmp = smupar.GMP(model, plan, optimizer, density=0.25, every=1, stop=1)
    train(model, optimizer, gmp, range(1))
    clone = copy.deepcopy(model)
    assert not any(gradient_mask(clone.get_parameter(name)) for name in SIZES)
    smupar.attach(clone, plan)
    assert_same_tensors(masks_of(clone), masks_of(model))
    clone.zero_grad()
    loss_of(clone, batch(1)).backward()
    for name, mask in masks_of(clone).items():
        gradient = clone.get_parameter(name).grad
        assert not gradient[~mask].any()
        assert gradient[mask].any()


def test_add_masks_gives_dense_hidden_weights_full_masks_and_leaves_others():
    model, plan = make({"up.*": 0.25, "*": 1.0})
    before = masks_of(model)
    assert list(before) == ["up.weight"]
    add_masks(model, plan)
    assert torch.equal(mask_of(model, "up.weight"), before["up.weight"])
    assert counts(model) == {**SIZES, "up.weight": 128}
    loss_of(model, batch(0)).backward()
    assert all(model.get_parameter(name).grad.any() and gradient_mask(model.get_parameter(name)) for name in SIZES)
    assert {key for key in model.state_dict() if key.endswith("_mask")} == {f"{name}_mask" for name in SIZES}


# IMP


@pytest.mark.parametrize("rewind", [0, 3])
def test_imp_goes_back_to_the_weights_of_the_rewind_step(rewind):
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan)
    imp = smupar.IMP(model, plan, optimizer, density=0.125, rounds=3, every=5, rewind=rewind)
    remembered, rounds = None, []
    for step in range(21):
        if imp.num_steps == rewind:
            remembered = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimize(model, optimizer, step)
        before = weights_of(model)
        if not imp.step():
            continue
        rounds.append((step + 1, counts(model)))
        masks = masks_of(model)
        for name, parameter in model.named_parameters():
            mask = masks.get(name, torch.ones_like(parameter, dtype=torch.bool))
            assert torch.equal(parameter[mask], remembered[name][mask]), name
            assert not parameter[~mask].any()
        for name, mask in masks.items():
            assert before[name][mask].abs().min() >= before[name][~mask].abs().max()
        assert not optimizer.state
    halves = [{name: size // 2**turn for name, size in SIZES.items()} for turn in (1, 2, 3)]
    assert rounds == [(5, halves[0]), (10, halves[1]), (15, halves[2])]


def test_imp_shrinks_geometrically_to_exactly_the_last_density():
    model, plan = make(0.5)
    optimizer = make_adamw(model, plan)
    imp = smupar.IMP(model, plan, optimizer, density=0.1, rounds=2, every=1)
    seen = []
    for step in range(3):
        train(model, optimizer, imp, [step])
        seen.append(counts(model)["up.weight"])
    # 512 * 0.5 * sqrt(0.2) = 114.5 and 512 * 0.1 = 51.2
    assert seen == [114, 51, 51]


def test_imp_learning_rate_follows_the_density_of_the_round():
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan)
    imp = smupar.IMP(model, plan, optimizer, density=0.25, rounds=2, every=2)
    rates, used = [], used_lrs(optimizer)
    for step in range(6):
        train(model, optimizer, imp, [step])
        rates.append(used["up.weight"])
    assert rates == pytest.approx([0.005, 0.005, 0.01, 0.01, 0.02, 0.02])


def test_imp_with_fixed_correction_goes_back_to_the_corrected_init():
    model, plan = make(1.0)
    before = weights_of(model)
    optimizer = make_adamw(model, plan)
    imp = smupar.IMP(model, plan, optimizer, density=0.25, rounds=1, every=2, correction="fixed")
    train(model, optimizer, imp, range(2))
    for name, mask in masks_of(model).items():
        assert torch.equal(model.get_parameter(name).detach(), before[name] * 2 * mask)


@pytest.mark.parametrize(
    ("rewind", "expected"), [(0, [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]), (2, [0, 1, 2, 3, 2, 3, 4, 5, 2, 3, 4, 5])]
)
def test_round_step_is_the_step_that_the_weights_are_at(rewind, expected):
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan)
    imp = smupar.IMP(model, plan, optimizer, density=0.25, rounds=2, every=4, rewind=rewind)
    seen = []
    for step in range(12):
        seen.append(imp.round_step)
        train(model, optimizer, imp, [step])
    assert seen == expected


# Adam's bias correction for grown weights

GROW_AT, BETAS = 6, (0.9, 0.999)


def grown_run(restart, steps, *, make_optimizer=torch.optim.AdamW):
    """Weights and gradients after every step, and what grew after step ``GROW_AT``."""
    model, plan = make(dtype=torch.float64)
    groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1)
    optimizer = make_optimizer(groups, betas=BETAS, eps=1e-10)
    rigl = smupar.RigL(
        model, plan, optimizer, every=GROW_AT, stop=1000, drop_fraction=0.5, decay="constant", restart_bias_correction=restart
    )
    weights, gradients, masks = [], [], []
    for step in range(steps):
        optimize(model, optimizer, step)
        gradients.append({name: model.get_parameter(name).grad.clone() for name in SIZES})
        rigl.step()
        weights.append(weights_of(model))
        masks.append(masks_of(model))
    grown = {name: masks[GROW_AT - 1][name] & ~masks[GROW_AT - 2][name] for name in SIZES}
    assert all(one.sum() > 20 for one in grown.values())
    hidden = next(g for g in optimizer.param_groups if any(p is model.up.weight for p in g["params"]))
    return weights, gradients, grown, hidden


def test_without_restart_the_first_update_of_a_grown_weight_is_too_large():
    weights, gradients, grown, group = grown_run(False, GROW_AT + 1)
    t = GROW_AT + 1
    size = (1 - BETAS[0]) / math.sqrt(1 - BETAS[1]) * math.sqrt(1 - BETAS[1] ** t) / (1 - BETAS[0] ** t)
    for name, mask in grown.items():
        mask = mask & (gradients[-1][name].abs() > 1e-6)
        update = weights[-1][name][mask]
        torch.testing.assert_close(update, -group["lr"] * size * gradients[-1][name][mask].sign(), rtol=1e-3, atol=0)


def test_with_restart_the_first_update_of_a_grown_weight_is_the_learning_rate():
    weights, gradients, grown, group = grown_run(True, GROW_AT + 1)
    for name, mask in grown.items():
        mask = mask & (gradients[-1][name].abs() > 1e-6)
        update = weights[-1][name][mask]
        torch.testing.assert_close(update, -group["lr"] * gradients[-1][name][mask].sign(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, torch.optim.Adam])
def test_with_restart_grown_weights_train_as_in_an_adam_of_their_own(make_optimizer):
    weights, gradients, grown, group = grown_run(True, GROW_AT + 5, make_optimizer=make_optimizer)
    for name, mask in grown.items():
        alone = nn.Parameter(torch.zeros(int(mask.sum()), dtype=torch.float64))
        own = make_optimizer([alone], lr=group["lr"], weight_decay=group["weight_decay"], betas=BETAS, eps=1e-10)
        for step in range(GROW_AT, GROW_AT + 5):
            alone.grad = gradients[step][name][mask]
            own.step()
            torch.testing.assert_close(weights[step][name][mask], alone.detach(), rtol=1e-5, atol=1e-7)


def test_weights_that_did_not_grow_are_untouched_by_the_restart():
    plain, _, _, _ = grown_run(False, GROW_AT + 1)
    restarted, _, grown, _ = grown_run(True, GROW_AT + 1)
    for step in range(GROW_AT):
        assert_same_tensors(restarted[step], plain[step])
    for name, mask in grown.items():
        assert torch.equal(restarted[GROW_AT][name][~mask], plain[GROW_AT][name][~mask])
        assert not torch.equal(restarted[GROW_AT][name][mask], plain[GROW_AT][name][mask])


def test_restart_leaves_weights_alone_in_steps_without_their_gradient():
    model, plan = make()
    optimizer = make_adamw(model, plan)
    rigl = smupar.RigL(model, plan, optimizer, every=2, stop=99, drop_fraction=0.5, restart_bias_correction=True)
    train(model, optimizer, rigl, range(2))
    before = weights_of(model)
    optimizer.zero_grad()
    optimizer.step()
    assert_same_tensors(weights_of(model), before)
    rigl.step()
    optimize(model, optimizer, 3)
    before = weights_of(model)
    optimizer.zero_grad()
    optimizer.step()
    assert_same_tensors(weights_of(model), before)


@pytest.mark.parametrize("corrected", ["before", "after"])
def test_restart_uses_the_learning_rate_that_was_applied(corrected):
    """A scheduler's and a correction's, whichever hook came first."""
    model, plan = make(dtype=torch.float64)
    optimizer = make_adamw(model, plan, weight_decay=0.0, eps=1e-12)
    if corrected == "before":
        layer_rates(model, plan, optimizer)
    rigl = smupar.RigL(model, plan, optimizer, every=4, stop=99, drop_fraction=0.5, restart_bias_correction=True)
    layer_rates(model, plan, optimizer).corrections["up.weight"] = 3.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        old = masks_of(model)
        optimize(model, optimizer, step)
        rigl.step()
        scheduler.step()
    grown = masks_of(model)["up.weight"] & ~old["up.weight"]
    optimize(model, optimizer, 4)
    update, gradient = model.up.weight.detach()[grown], model.up.weight.grad[grown]
    expected = -0.01 * plan["up.weight"].lr_factor("adam") * 3 / 5 * gradient.sign()
    torch.testing.assert_close(update, expected, rtol=1e-3, atol=0)


# Stopping and going on

RUNS = {
    "RigL": ("RigL", 0.25, {"every": 5, "stop": 20}),
    "SET": ("SET", 0.25, {"every": 5, "stop": 20}),
    "RigL, restarted": ("RigL", 0.25, {"every": 3, "stop": 20, "restart_bias_correction": True}),
    "GMP": ("GMP", 1.0, {"density": 0.25, "every": 5, "stop": 12}),
    "GMP, fixed": ("GMP", 1.0, {"density": 0.25, "every": 5, "stop": 12, "correction": "fixed"}),
    "GMP, global": ("GMP", 0.5, {"density": smupar.erk(0.25), "every": 5, "stop": 12, "pool": "global"}),
    "IMP": ("IMP", 1.0, {"density": 0.25, "rounds": 2, "every": 5, "rewind": 2}),
}


def start_run(name, **settings):
    kind, density, own = RUNS[name]
    model, plan = make(density, seed=3, **settings)
    optimizer = make_adamw(model, plan)
    return model, optimizer, getattr(smupar, kind)(model, plan, optimizer, **own)


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_resumes(name, stop, steps=13, **settings):
    """As if it had never stopped after ``stop`` steps."""
    model, optimizer, sparsifier = start_run(name, **settings)
    train(model, optimizer, sparsifier, range(stop))
    saved = through_a_file([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()])
    moved = train(model, optimizer, sparsifier, range(stop, steps))

    again, other, fresh = start_run(name, **settings)
    for part, state in zip((again, other, fresh), saved, strict=True):
        part.load_state_dict(state)
    assert train(again, other, fresh, range(stop, steps)) == moved
    assert_same_tensors(again.state_dict(), model.state_dict())
    for key in SIZES:
        assert_same_tensors(state_of(other, again.get_parameter(key)), state_of(optimizer, model.get_parameter(key)))
    assert fresh.num_steps == sparsifier.num_steps == steps
    assert fresh.densities == sparsifier.densities


# Updates are after 5 and 10 steps (3, 6, 9, 12 with restarts; GMP's last at 12): right before, right after, in between.
@pytest.mark.parametrize("stop", [1, 4, 5, 6, 9, 10])
@pytest.mark.parametrize("name", RUNS)
def test_stopped_run_goes_on_bit_for_bit(name, stop):
    assert_resumes(name, stop)


@pytest.mark.parametrize("settings", [{"base_density": smupar.erk(0.5)}, {"pattern": "bernoulli"}])
@pytest.mark.parametrize("stop", [1, 6])
def test_stopped_gmp_goes_on_with_its_learning_rates(stop, settings):
    assert_resumes("GMP, global", stop, **settings)


def test_state_dict_holds_no_masks_of_its_own():
    _, _, sparsifier = start_run("RigL")
    assert sparsifier.state_dict() == {"num_steps": 0, "born": {}}


# Masks before training


def test_magnitude_masks_keep_the_largest_of_each_layer_and_leave_the_model():
    model, plan = make(1.0)
    loss_of(model, batch(0)).backward()
    before = weights_of(model), [parameter.grad.clone() for parameter in model.parameters()], list(model.state_dict())
    masks = smupar.magnitude_masks(model, plan, density=0.3)
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"mix.weight": 77, "up.weight": 154, "down.weight": 154}
    for name, weight in before[0].items():
        assert (masks[name].dtype, masks[name].shape) == (torch.bool, weight.shape)
        assert weight[masks[name]].abs().min() >= weight[~masks[name]].abs().max()
    assert_same_tensors(weights_of(model), before[0])
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before[1], strict=True))
    assert list(model.state_dict()) == before[2]


def test_magnitude_masks_follow_an_allocation():
    model, plan = make(1.0)
    masks = smupar.magnitude_masks(model, plan, density=smupar.erk(0.25))
    wanted = smupar.erk(0.25).densities({name: mask.shape for name, mask in masks.items()})
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {
        name: math.floor(wanted[name] * size + Fraction(1, 2)) for name, size in SIZES.items()
    }


@pytest.mark.parametrize("way", ["magnitude", "snip"])
def test_chosen_masks_go_into_parameterize_with_a_warning(way):
    dense, plan = make(1.0)
    if way == "magnitude":
        masks = smupar.magnitude_masks(dense, plan, density=0.25)
    else:
        masks = smupar.snip_masks(dense, plan, loss_of, [batch(0)], density=0.25)
    model = Net()
    with pytest.warns(smupar.PlanWarning, match="the rule assumes random masks"):
        sparse = smupar.parameterize(model, base=base(), masks=masks)
    assert_same_tensors(masks_of(model), masks)
    assert_nothing_off_mask(model)
    assert all(sparse[name].density == Fraction(int(mask.sum()), mask.numel()) for name, mask in masks.items())
    optimizer = make_adamw(model, sparse)
    assert train(model, optimizer, smupar.RigL(model, sparse, optimizer, every=1, stop=2), range(1)) == [True]


class Chain(nn.Module):
    """Three linear layers; the middle one is hidden."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(2, width, bias=False)
        self.middle = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def chain():
    model = Chain(3)
    with torch.device("meta"):
        small = Chain(2)
    plan = smupar.make_plan(model, base=small)
    with torch.no_grad():
        model.first.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        model.middle.weight.copy_(torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, -1.0], [-1.0, 0.25, 1.0]]))
        model.last.weight.copy_(torch.tensor([[1.0, -2.0, 4.0]]))
    return model, plan


def test_snip_scores_are_weight_times_gradient_by_hand():
    # Input (1, 2) becomes (1, 2, 3); the gradient of W[i, j] is last[i] * that[j]; |W * gradient| is
    # 1 4 1.5 | 6 4 6 | 4 2 12
    model, plan = chain()
    x = torch.tensor([[1.0, 2.0]])
    masks = smupar.snip_masks(model, plan, lambda model, x: model(x).sum(), [x], density=3 / 9)
    assert masks["middle.weight"].tolist() == [[False] * 3, [True, False, True], [False, False, True]]
    masks = smupar.snip_masks(model, plan, lambda model, x: model(x).sum(), [x], density=7 / 9)
    assert masks["middle.weight"].tolist() == [[False, True, False], [True] * 3, [True, True, True]]


def test_snip_sums_over_batches():
    # (3, 0) and (1, 2) make (3, 0, 3) and (1, 2, 3), together (4, 2, 6): 4 4 3 | 24 4 12 | 16 2 24
    model, plan = chain()
    batches = [torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 2.0]])]
    masks = smupar.snip_masks(model, plan, lambda model, x: model(x).sum(), iter(batches), density=4 / 9)
    assert masks["middle.weight"].tolist() == [[False] * 3, [True, False, True], [True, False, True]]


def test_snip_masks_have_exact_counts_and_leave_the_model():
    model, plan = make(1.0)
    loss_of(model, batch(0)).backward()
    weights, grads = weights_of(model), [parameter.grad.clone() for parameter in model.parameters()]
    batches = [batch(step) for step in range(3)]
    together = smupar.snip_masks(model, plan, loss_of, batches, density=0.3)
    assert sum(int(mask.sum()) for mask in together.values()) == 77 + 154 + 154
    each = smupar.snip_masks(model, plan, loss_of, batches, density=0.3, pool="layer")
    assert {name: int(mask.sum()) for name, mask in each.items()} == {"mix.weight": 77, "up.weight": 154, "down.weight": 154}
    assert_same_tensors(weights_of(model), weights)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))


def test_snip_ranks_all_layers_by_one_score():
    model, plan = make(1.0, dtype=torch.float64)
    masks = smupar.snip_masks(model, plan, loss_of, [batch(0)], density=0.25)
    parameters = [model.get_parameter(name) for name in SIZES]
    grads = torch.autograd.grad(loss_of(model, batch(0)), parameters)
    scores = {n: (p.detach() * g).abs() for n, p, g in zip(SIZES, parameters, grads, strict=True)}
    kept = torch.cat([scores[name][mask] for name, mask in masks.items()])
    lost = torch.cat([scores[name][~mask] for name, mask in masks.items()])
    assert kept.min() >= lost.max()


# Init by fan-in


@pytest.mark.parametrize("pattern", ["random", "bernoulli"])
def test_fan_in_init_scales_each_neuron_to_its_own_number_of_inputs(pattern):
    model, plan = make(0.25, pattern=pattern)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    smupar.fan_in_init(model, plan)
    for name, parameter in model.named_parameters():
        if name not in SIZES:
            assert torch.equal(parameter, before[name])
            continue
        fan_in = mask_of(model, name).sum(1).double()
        assert len(fan_in.unique()) > 1
        for neuron, (row, old) in enumerate(zip(parameter.detach(), before[name], strict=True)):
            scale = math.sqrt(fan_in.mean() / fan_in[neuron]) if fan_in[neuron] else 1.0
            torch.testing.assert_close(row, old * scale)
    assert_nothing_off_mask(model)


@pytest.mark.parametrize(("pattern", "density"), [("fan_in", 0.25), ("random", 1.0)])
def test_fan_in_init_changes_nothing_where_all_neurons_have_as_many_inputs(pattern, density):
    model, plan = make(density, pattern=pattern)
    before = weights_of(model)
    smupar.fan_in_init(model, plan)
    assert_same_tensors(weights_of(model), before)


# Bad input


def build(kind, *, start_from=0.25, optimizer=None, **settings):
    model, plan = make(start_from)
    optimizer = make_adamw(model, plan) if optimizer is None else optimizer(model, plan)
    return getattr(smupar, kind)(model, plan, optimizer, **settings)


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
@pytest.mark.parametrize("kind", ["RigL", "SET"])
def test_drop_fraction_must_lie_between_0_and_1(kind, fraction):
    with pytest.raises(ValueError, match=rf"drop_fraction must lie in \(0, 1\), got {fraction}"):
        build(kind, stop=10, drop_fraction=fraction)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("RigL", {"start": 10, "stop": 10}),
        ("SET", {"start": 10, "stop": 5}),
        ("GMP", {"density": 0.1, "start": 10, "stop": 5}),
        ("RigL", {"start": -1, "stop": 5}),
        ("RigL", {"every": 0, "stop": 5}),
    ],
)
def test_schedules_must_have_a_beginning_before_their_end(kind, settings):
    with pytest.raises(ValueError, match=r"every must be at least 1, and stop after start"):
        build(kind, **settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("RigL", {"stop": 11}),
        ("SET", {"stop": 11}),
        ("GMP", {"density": 0.1, "stop": 11}),
        ("IMP", {"density": 0.1, "rounds": 3, "every": 4}),
    ],
)
def test_schedule_behind_the_end_of_the_run_is_refused(kind, settings):
    with pytest.raises(ValueError, match=r"masks would move until step 1[12], but the run ends at 10: choose an earlier stop"):
        build(kind, steps=10, **settings)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("RigL", {"decay": "step"}, "decay must be one of 'cosine', 'linear', 'constant', got 'step'"),
        ("GMP", {"density": 0.1, "curve": "square"}, "curve must be one of 'cubic', 'linear', 'cosine', got 'square'"),
        ("GMP", {"density": 0.1, "pool": "all"}, "pool must be one of 'layer', 'global', got 'all'"),
        ("GMP", {"density": 0.1, "correction": "none"}, "correction must be one of 'moment', 'fixed', got 'none'"),
    ],
)
def test_unknown_choices_are_refused_with_those_there_are(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        build(kind, stop=10, **settings)


def test_snip_refuses_an_unknown_pool_and_no_batches():
    model, plan = make(1.0)
    with pytest.raises(ValueError, match="pool must be one of 'layer', 'global', got 'all'"):
        smupar.snip_masks(model, plan, loss_of, [batch(0)], density=0.5, pool="all")
    with pytest.raises(ValueError, match="SNIP needs at least one batch"):
        smupar.snip_masks(model, plan, loss_of, [], density=0.5)


@pytest.mark.parametrize(("rounds", "rewind", "said"), [(0, 0, "at least one round"), (2, 5, r"\[0, 5\)"), (2, -1, "got -1")])
def test_imp_refuses_no_rounds_and_a_rewind_outside_of_the_first(rounds, rewind, said):
    with pytest.raises(ValueError, match=said):
        build("IMP", density=0.1, rounds=rounds, every=5, rewind=rewind)


@pytest.mark.parametrize(("kind", "settings"), [("RigL", {}), ("SET", {}), ("GMP", {"density": 0.1})])
def test_model_must_be_parameterized(kind, settings):
    _, plan = make()
    other = Net()
    with pytest.raises(ValueError, match=r"this model is not parameterized: call smupar\.parameterize before masks move"):
        getattr(smupar, kind)(other, plan, torch.optim.AdamW(other.parameters()), stop=10, **settings)


@pytest.mark.parametrize("kind", ["RigL", "SET"])
def test_masks_that_would_never_move_are_refused(kind):
    with pytest.raises(ValueError, match="masks would never move: no multiple of every=100 lies between 0 and stop=75"):
        build(kind, stop=75)


@pytest.mark.parametrize(("kind", "settings"), [("RigL", {}), ("GMP", {"density": 0.1})])
def test_optimizer_of_another_model_is_refused(kind, settings):
    other, other_plan = make()
    with pytest.raises(ValueError, match=r"'mix\.weight' is in none of the optimizers"):
        build(kind, optimizer=lambda model, plan: make_adamw(other, other_plan), stop=100, **settings)


@pytest.mark.parametrize(("decay", "share"), [("independent", 1), ("coupled", 8)])
@pytest.mark.parametrize("correction", ["moment", "fixed"])
def test_decay_that_is_independent_of_the_learning_rate_stays_so_while_masks_are_pruned(decay, share, correction):
    model, plan = make(1.0)
    groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, decay=decay)
    optimizer = torch.optim.AdamW(groups)
    sparsifier = smupar.GMP(model, plan, optimizer, density=1 / 8, every=1, stop=2, correction=correction)
    train(model, optimizer, sparsifier, range(1, 4))
    planned = {name: (group["lr"], group["weight_decay"]) for name, group in group_of_weight(optimizer).items()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        optimizer.state[parameter]["exp_avg"].zero_()
    before = weights_of(model)
    optimizer.step()
    for name, weight in weights_of(model).items():
        lr, weight_decay = planned[name]
        kept = before[name] != 0
        lost = 1 - weight[kept].double() / before[name][kept].double()
        torch.testing.assert_close(lost.mean().item(), share * lr * weight_decay, rtol=1e-3, atol=0)
    assert {name: (group["lr"], group["weight_decay"]) for name, group in group_of_weight(optimizer).items()} == planned


def test_muon_is_pruned_without_further_ado():
    model, plan = make(1.0)
    muon = torch.optim.Muon(smupar.param_groups(model, plan, lr=0.02, only="hidden", optimizer="muon"))
    both = [muon, torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, only="rest"))]
    train(model, both, smupar.GMP(model, plan, both, density=1 / 8, every=2, stop=4), range(1, 7))
    assert {name: torch.count_nonzero(weight).item() for name, weight in weights_of(model).items()} == {
        name: size // 8 for name, size in SIZES.items()
    }


def test_audit_sees_hooks_that_a_pruned_model_has_lost():
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan)
    train(model, optimizer, smupar.GMP(model, plan, optimizer, density=1 / 8, every=2, stop=4), range(1, 7))
    assert smupar.audit(model, plan, optimizer) == []
    with pytest.raises(smupar.AuditError) as error:
        smupar.audit(copy.deepcopy(model), plan, trained=True)
    assert [finding.name for finding in error.value.findings] == list(SIZES)
    assert all("its gradient is not masked, the hook is lost" in str(finding) for finding in error.value.findings)


@pytest.mark.parametrize("kind", ["RigL", "SET"])
def test_dense_model_has_no_mask_to_move(kind):
    with pytest.raises(ValueError, match="no hidden weight is sparse, so no mask can move: pass a density below 1"):
        build(kind, start_from=1.0, stop=10)


@pytest.mark.parametrize(("kind", "settings"), [("RigL", {}), ("SET", {}), ("GMP", {"density": 0.1})])
@pytest.mark.parametrize("pattern", ["2:4", "fan_in"])
def test_structure_would_be_lost_and_is_refused(kind, settings, pattern):
    model, plan = make(0.5, pattern=pattern)
    with pytest.raises(ValueError, match=rf"masks that move are unstructured, pattern '{pattern}' would be lost"):
        getattr(smupar, kind)(model, plan, make_adamw(model, plan), stop=10, **settings)


def test_gmp_to_more_than_there_is_is_refused():
    with pytest.raises(ValueError, match=r"'mix.weight' has density 0\.25 already and would be pruned to 0\.5"):
        build("GMP", stop=10, density=0.5)


def test_density_that_leaves_nothing_of_a_layer_is_refused():
    message = r"density 0\.001 would drop every weight of 'mix.weight', of shape \(16, 16\): raise it"
    with pytest.raises(ValueError, match=message):
        build("GMP", start_from=1.0, stop=10, density=0.001)
    with pytest.raises(ValueError, match=message):
        smupar.magnitude_masks(*make(1.0), density=0.001)


def test_gmp_needs_an_optimizer_made_from_param_groups():
    with pytest.raises(
        ValueError, match=r"group with '.*weight' was not made by smupar\.param_groups: build the optimizer from"
    ):
        build("GMP", stop=10, density=0.1, optimizer=lambda model, plan: torch.optim.AdamW(model.parameters()))


def test_scheduler_made_before_gmp_is_refused():
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match=r"a scheduler was made for this optimizer already.*make the scheduler afterwards"):
        smupar.GMP(model, plan, optimizer, density=0.1, stop=10)


@pytest.mark.parametrize("kind", ["RigL", "SET"])
def test_restart_of_the_bias_correction_is_for_adam_only(kind):
    def sgd(model, plan):
        return torch.optim.SGD(smupar.param_groups(model, plan, lr=0.1, optimizer="sgd"))

    with pytest.raises(
        ValueError, match="restart_bias_correction is for Adam and AdamW without amsgrad, not SGD: leave it out"
    ):
        build(kind, stop=10, restart_bias_correction=True, optimizer=sgd)


def test_restart_of_the_bias_correction_refuses_amsgrad():
    with pytest.raises(ValueError, match="without amsgrad, not AdamW"):
        build("RigL", stop=10, restart_bias_correction=True, optimizer=lambda m, p: make_adamw(m, p, amsgrad=True))


def test_rigl_without_a_gradient_says_so():
    model, plan = make()
    optimizer = make_adamw(model, plan)
    rigl = smupar.RigL(model, plan, optimizer, every=1, stop=10)
    optimizer.step()
    with pytest.raises(
        ValueError, match=r"'mix.weight' got no gradient that RigL could look at: call sparsifier\.step\(\) after"
    ):
        rigl.step()


class Routed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.read = nn.Linear(8, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x, expert):
        return self.head(self.experts[expert](self.read(x)).relu())


def test_rigl_leaves_layers_alone_that_had_no_part_in_the_step():
    model = Routed(64)
    plan = smupar.parameterize(model, base=Routed(16), density=0.25)
    optimizer = make_adamw(model, plan)
    rigl = smupar.RigL(model, plan, optimizer, every=2, stop=8)
    before = [expert.weight_mask.clone() for expert in model.experts]
    for step in range(2):
        model(torch.randn(16, 8), 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.warns(smupar.PlanWarning, match="their masks stay: experts.0.weight") if step else nullcontext():
            rigl.step()
    assert torch.equal(before[0], model.experts[0].weight_mask)
    assert not torch.equal(before[1], model.experts[1].weight_mask)
    assert model.experts[1].weight_mask.sum() == before[1].sum()


# In other people's loops


def tokens_of(step):
    return torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(step))


def backward(model, step, scale=1.0):
    tokens = tokens_of(step)
    (scale * F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())).backward()


@pytest.mark.parametrize("discarded", [math.nan, 100.0])
def test_rigl_grows_as_if_gradients_that_were_thrown_away_had_never_been(discarded):
    masks = []
    for discards in (False, True):
        model, plan = make()
        optimizer = make_adamw(model, plan)
        rigl = smupar.RigL(model, plan, optimizer, every=1, stop=3)
        if discards:
            backward(model, 99, discarded)
            optimizer.zero_grad()
        backward(model, 0)
        optimizer.step()
        rigl.step()
        masks.append(model.mix.weight_mask.clone())
    assert torch.equal(*masks)


def test_masks_stay_where_gradients_are_not_finite():
    model, plan = make()
    optimizer = torch.optim.SGD(smupar.param_groups(model, plan, lr=0.0, optimizer="sgd"))
    rigl = smupar.RigL(model, plan, optimizer, every=1, stop=3)
    before = model.mix.weight_mask.clone()
    backward(model, 0, math.nan)
    optimizer.step()
    for module in (model.mix, model.up, model.down):
        module.weight.data.masked_fill_(~module.weight_mask, 0)
    with pytest.warns(smupar.PlanWarning, match="the gradient of 'mix.weight' is not finite, so its mask stays"):
        rigl.step()
    assert torch.equal(model.mix.weight_mask, before)


def test_steps_count_only_if_the_optimizer_made_them():
    model, plan = make()
    optimizer = make_adamw(model, plan)
    rigl = smupar.RigL(model, plan, optimizer, every=2, stop=4)
    moved = []
    for step in range(8):  # two micro-batches to a step
        backward(model, step)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        moved.append(rigl.step())
    assert moved == [False, False, False, True, False, False, False, True]
    assert rigl.num_steps == 4


def test_correction_survives_the_optimizer_state_of_a_run_without_it():
    density = {"mix.*": 1 / 4, "up.*": 1 / 8, "down.*": 1 / 16}  # so that each hidden weight has its own group already
    model, plan = make(density)
    static = make_adamw(model, plan)
    backward(model, 0)
    static.step()
    used = []
    for loads in (False, True):
        model, plan = make(density)
        optimizer = make_adamw(model, plan)
        gmp = smupar.GMP(model, plan, optimizer, density=1 / 32, every=1, stop=2)
        if loads:
            optimizer.load_state_dict(static.state_dict())
        used.append(used_lrs(optimizer))
        for step in range(3):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            gmp.step()
    assert used[0] == used[1] != {}


def test_second_sparsifier_does_not_correct_again():
    masks = []
    for twice in (False, True):
        model, plan = make()
        optimizer = make_adamw(model, plan)
        options = {"every": 2, "stop": 20, "decay": "constant", "restart_bias_correction": True}
        rigl = smupar.RigL(model, plan, optimizer, **options)
        for step in range(20):
            if twice and step == 10:
                state = rigl.state_dict()
                rigl = smupar.RigL(model, plan, optimizer, **options)
                rigl.load_state_dict(state)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            rigl.step()
        masks.append(model.up.weight_mask.clone())
    assert torch.equal(*masks)


def test_optimizers_share_rates_in_whichever_order_they_come():
    model, plan = make()
    hidden = torch.optim.SGD(smupar.param_groups(model, plan, lr=0.1, optimizer="sgd", only="hidden"))
    rest = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, only="rest"))
    rates = layer_rates(model, plan, hidden)
    assert layer_rates(model, plan, [rest, hidden]) is rates
    backward(model, 0)
    rest.step()
    hidden.step()


def test_optimizer_of_weights_that_storage_replaced_refuses_to_step():
    model, plan = make()
    optimizer = make_adamw(model, plan)
    smupar.sparsify_storage(model, plan, backend="csr")
    backward(model, 0)
    with pytest.raises(ValueError, match="holds weights that sparsify_storage has replaced"):
        optimizer.step()


def test_weights_of_a_checkpoint_are_not_scaled_a_second_time():
    options = {"density": 0.1, "every": 2, "stop": 8, "correction": "fixed"}
    model, plan = make(0.5)
    smupar.GMP(model, plan, make_adamw(model, plan), **options)
    state = copy.deepcopy(model.state_dict())
    model, plan = make(0.5)
    model.load_state_dict(state)
    with pytest.raises(ValueError, match="make the sparsifier before a checkpoint is loaded"):
        smupar.GMP(model, plan, make_adamw(model, plan), **options)
    assert torch.equal(model.mix.weight, state["mix.weight"])


def test_masks_from_weights_that_are_kept_alone_are_those_of_the_dense_ones():
    model, plan = make(0.5)
    dense = smupar.magnitude_masks(model, plan, density=0.25)
    smupar.sparsify_storage(model, plan, backend="csr")
    sparse = smupar.magnitude_masks(model, plan, density=0.25)
    assert all(torch.equal(dense[name], sparse[name]) for name in SIZES)
    with pytest.raises(ValueError, match="keeps only its non-zeros: SNIP looks at a dense model"):
        smupar.snip_masks(model, plan, lambda model, batch: model(batch).sum(), [tokens_of(0)], density=0.25)


class SharpnessAware(torch.optim.Optimizer):
    """As such optimizers are written: a step up, in its own, and then the step of another one from where it was."""

    def __init__(self, params, **options):
        self.base_optimizer = torch.optim.AdamW(params, **options)
        super().__init__(self.base_optimizer.param_groups, {})
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in every]
        for p in every:
            p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            self.zero_grad()
            loss = closure()
            loss.backward()
        for p, old in zip(every, before, strict=True):
            p.copy_(old)
        self.base_optimizer.step()
        return loss


def test_masks_move_under_an_optimizer_that_wraps_another():
    model, plan = make()
    optimizer = SharpnessAware(smupar.param_groups(model, plan, lr=0.01))
    rigl = smupar.RigL(model, plan, optimizer, every=2, stop=8)
    before = masks_of(model)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step(lambda step=step: loss_of(model, batch(step)))
        rigl.step()
    assert rigl.num_steps == 10
    assert any(not torch.equal(mask, before[name]) for name, mask in masks_of(model).items())
    assert_nothing_off_mask(model)


def test_sparsifier_of_an_optimizer_that_never_steps_says_so():
    model, plan = make()
    optimizer, other = make_adamw(model, plan), make_adamw(model, plan)
    rigl = smupar.RigL(model, plan, optimizer, every=2, stop=8)
    optimize(model, other, 0)
    for _ in range(999):
        rigl.step()
    with pytest.warns(smupar.PlanWarning, match="called 1000 times, but no step of the optimizer was seen"):
        rigl.step()


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_do_not_count(fused):
    model, plan = make()
    optimizer = make_adamw(model, plan, fused=fused)
    rigl = smupar.RigL(model, plan, optimizer, every=2, stop=8)
    recorder = smupar.record_updates(model, plan, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch(step)) * (math.inf if step in (0, 3) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        rigl.step()
    assert rigl.num_steps == 4
    assert recorder.trace.num_steps == 4
    assert all(effect > 0 for effects in recorder.trace.effects.values() for effect in effects)


def test_scheduler_scales_the_tensor_lr_of_each_group_once():
    model, plan = make(1.0)
    optimizer = make_adamw(model, plan, lr=torch.tensor(0.01))
    smupar.GMP(model, plan, optimizer, density=0.25, every=2, stop=8)
    before = [float(group["lr"]) for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    scheduler.step(1.0)
    scheduler.step(2.0)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([rate / 2 for rate in before])


def test_imp_rewinds_running_statistics():
    def make_normed(width):
        return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, width), nn.Linear(width, 2))

    model = make_normed(16)
    plan = smupar.parameterize(model, base=make_normed(8))
    optimizer = make_adamw(model, plan)
    imp = smupar.IMP(model, plan, optimizer, density=0.5, rounds=1, every=2)
    for micro_batch in range(6):  # three to a step
        model(torch.randn(8, 4) + 3).sum().backward()
        if micro_batch % 3 == 2:
            optimizer.step()
        imp.step()
    assert model[1].running_mean.abs().max() == 0
    assert model[1].num_batches_tracked == 0


def test_snip_of_a_frozen_weight_is_refused_and_an_unused_one_counts_as_useless():
    model, plan = make(1.0)
    model.up.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'up\.weight' is frozen, and SNIP needs its gradient"):
        smupar.snip_masks(model, plan, loss_of, [batch(0)], density=0.5)
    model.up.weight.requires_grad_(True)
    masks = smupar.snip_masks(
        model, plan, lambda net, data: net.mix(net.embedding(data[0])).sum(), [batch(0)], density=0.5, pool="layer"
    )
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {name: size // 2 for name, size in SIZES.items()}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # in torch's own import
def test_optimizer_that_keeps_its_state_on_other_ranks_is_refused():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, plan = make()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizer = ZeroRedundancyOptimizer(smupar.param_groups(model, plan, lr=0.01), torch.optim.AdamW)
        with pytest.raises(ValueError, match=r"ZeroRedundancyOptimizer keeps most state on other ranks.*use FSDP2"):
            smupar.RigL(model, plan, optimizer, every=2, stop=8)
    finally:
        dist.destroy_process_group()


# Steps that were skipped, gradients that were thrown away, models that share an optimizer


@pytest.mark.parametrize("num_steps", [2, 3], ids=["after a move", "later"])
def test_restart_leaves_weights_alone_where_a_fused_step_overflowed(num_steps):
    model, plan = make()
    optimizer = make_adamw(model, plan, fused=True)
    sparsifier = smupar.SET(model, plan, optimizer, every=2, stop=4, restart_bias_correction=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(factor):
        tokens = torch.arange(VOCAB)[None]
        scaler.scale(factor * F.cross_entropy(model(tokens)[0], tokens[0])).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        sparsifier.step()

    for _ in range(num_steps):
        step(1.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step(math.inf)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_rates_of_two_models_in_one_optimizer_are_refused():
    (one, its), (other, others) = make(1.0), make(1.0, seed=1)
    groups = [smupar.param_groups(model, plan, lr=0.01) for model, plan in ((one, its), (other, others))]
    optimizer = torch.optim.AdamW(groups[0] + groups[1])
    smupar.GMP(one, its, optimizer, density=1 / 2, every=1, stop=2)
    with pytest.raises(ValueError, match="give each model an optimizer of its own"):
        smupar.GMP(other, others, optimizer, density=1 / 16, every=1, stop=2)


def _grown(backend, *, thrown_away, set_to_none=True, num_parts=1):
    """The mask after a move, behind a gradient that was thrown away or not."""
    model, plan = make()
    smupar.sparsify_storage(model, plan, backend=backend)
    optimizer = torch.optim.SGD(smupar.param_groups(model, plan, lr=0.01, optimizer="sgd"))
    sparsifier = smupar.RigL(model, plan, optimizer, every=1, stop=3, drop_fraction=0.5)
    rng = torch.Generator().manual_seed(1)
    if thrown_away:
        (1e3 * model(torch.randint(VOCAB, (16, 4), generator=rng)).square().mean()).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
    tokens = torch.randint(VOCAB, (16, 4), generator=rng.manual_seed(2))
    for part in tokens.chunk(num_parts):
        (model(part).square().mean() / num_parts).backward()
    optimizer.step()
    sparsifier.step()
    return mask_of(model, "up.weight")


@pytest.mark.parametrize("backend", ["csr", "dense"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_rigl_grows_as_if_a_gradient_that_was_thrown_away_had_never_been(backend, set_to_none):
    wanted = _grown("dense", thrown_away=False)
    for num_parts in (1, 4):
        found = _grown(backend, thrown_away=True, set_to_none=set_to_none, num_parts=num_parts)
        assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped")
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_rigl_sums_micro_batches_in_a_process_group_of_one(wrap):
    def dense(num_parts):
        model, plan = make()
        wrapped = model
        if wrap == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            smupar.attach(model, plan)
        optimizer = torch.optim.SGD(smupar.param_groups(model, plan, lr=0.01, optimizer="sgd"))
        smupar.RigL(model, plan, optimizer, every=1, stop=3)
        tokens = torch.randint(VOCAB, (16, 4), generator=torch.Generator().manual_seed(2))
        for part in tokens.chunk(num_parts):
            (wrapped(part).square().mean() / num_parts).backward()
        return gradient_mask(model.up.weight).value

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.testing.assert_close(dense(4), dense(1))
    finally:
        dist.destroy_process_group()
