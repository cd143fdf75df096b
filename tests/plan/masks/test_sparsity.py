"""What is kept of each weight: densities, allocations, masks of the user's own, whole neurons."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from tests.plan.nets import ALPHA_OUTPUT, HIDDEN, MLP, SIGMA, Blocks, Conv, numbers, own_mask, plan_mlp
from tests.support.models import on_meta


def test_per_layer_densities_give_per_layer_corrections():
    plan = plan_mlp(256, 64, density={"fc1.weight": 1 / 4, "fc*.weight": 1 / 16}, init_std=1.0)
    first, second = plan["fc1.weight"], plan["fc2.weight"]
    assert (first.density, first.init_std, first.lr_factor("adam")) == (Fraction(1, 4), 1.0, 1.0)
    assert (second.density, second.init_std, second.lr_factor("adam")) == (Fraction(1, 16), 2.0, 4.0)


def test_layers_that_no_glob_names_stay_dense():
    plan = plan_mlp(256, 64, density={"fc2.weight": 1 / 16})
    assert plan["fc1.weight"].pattern is None
    assert plan["fc1.weight"].lr_factor("adam") == 0.25
    assert plan["fc2.weight"].pattern == "random"


def test_erk_gives_each_layer_its_own_correction():
    plan = plan_mlp(64, 64, expand=4, density=smupar.erk(1 / 8), roles={"head.weight": "unembedding"})
    # Both have (64 + 256) / (64 * 256): equal densities, 2048 of 16384 weights each.
    assert plan["fc1.weight"].num_kept == plan["fc2.weight"].num_kept == 2048
    blocks = smupar.make_plan(on_meta(Conv, 32), base=on_meta(Conv, 16), density=smupar.erk(1 / 8))
    for name in ("conv.weight", "up.weight"):
        row = blocks[name]
        assert row.lr_factor("adam") == float(1 / (row.width_in * row.density))


def test_plan_on_meta_uses_realised_densities():
    plan = plan_mlp(100, 50, density=1 / 3)
    row = plan["fc1.weight"]
    assert (row.num_kept, row.density, row.density_mult) == (3333, Fraction(3333, 10000), Fraction(3333, 10000))
    assert row.lr_factor("adam") == 10000 / 6666
    fan_in = plan_mlp(100, 50, density=1 / 3, pattern="fan_in")["fc1.weight"]
    assert (fan_in.num_kept, fan_in.density) == (3300, Fraction(33, 100))
    block = plan_mlp(96, 48, density=1 / 3, pattern="block-16")["fc1.weight"]
    assert (block.num_kept, block.density) == (12 * 256, Fraction(1, 3))


def test_bernoulli_uses_the_nominal_density():
    row = plan_mlp(100, 50, density=1 / 3, pattern="bernoulli")["fc1.weight"]
    assert (row.num_kept, row.density) == (None, Fraction(1, 3))
    assert row.lr_factor("adam") == 1.5


def test_nm_density_is_what_the_pattern_says():
    row = plan_mlp(128, 64, pattern="2:4")["fc1.weight"]
    assert (row.density, row.num_kept, row.lr_factor("adam")) == (Fraction(1, 2), 8192, 1.0)
    with pytest.raises(ValueError, match=r"'fc1.weight' of shape \(128, 128\): 2:4 keeps exactly 2/4"):
        plan_mlp(128, 64, pattern="2:4", density=0.25)


def test_only_hidden_weights_are_made_sparse():
    plan = plan_mlp(64, 16, density=0.25)
    assert [row.name for row in plan if row.masked] == list(HIDDEN)
    assert {row.density for row in plan if not row.masked} == {1}


@pytest.mark.parametrize("pattern", ["random", "bernoulli", "fan_in", "2:4", "2:4-transposable", "block-16"])
def test_draw_mask_has_the_planned_density(pattern):
    plan = plan_mlp(128, 64, density=0.5, pattern=pattern, seed=3)
    for name in HIDDEN:
        mask = plan.draw_mask(name)
        assert tuple(mask.shape) == plan[name].shape
        if pattern == "bernoulli":
            assert abs(int(mask.sum()) - 8192) < 6 * 64
        else:
            assert int(mask.sum()) == plan[name].num_kept == 8192
        assert torch.equal(mask, plan.draw_mask(name))
    assert not torch.equal(plan.draw_mask("fc1.weight"), plan.draw_mask("fc2.weight"))
    assert plan.draw_mask("head.weight") is None


def test_draw_mask_of_another_model_with_the_same_layer_is_the_same():
    # A mask is of (seed, name): neither depth, base nor the rule may change it.
    first = smupar.make_plan(on_meta(Blocks, 64, 2), base=on_meta(Blocks, 32, 2), density=0.25, seed=5)
    second = smupar.make_plan(on_meta(Blocks, 64, 6), base=on_meta(Blocks, 16, 6), density=0.25, seed=5, rule="mup")
    name = "blocks.1.fc.weight"
    assert torch.equal(first.draw_mask(name), second.draw_mask(name))


def test_draw_mask_follows_the_seed_of_the_plan():
    first, second = (plan_mlp(64, 16, density=0.25, seed=seed).draw_mask("fc1.weight") for seed in (0, 1))
    assert not torch.equal(first, second)


def test_density_without_hidden_weights_raises():
    class Shallow(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.embed = nn.Linear(7, width)
            self.head = nn.Linear(width, 5)

    with pytest.raises(ValueError, match="no hidden weight could be made sparse"):
        smupar.make_plan(on_meta(Shallow, 64), base=on_meta(Shallow, 16), density=0.5)


@pytest.mark.parametrize("key", ["fc1.weight", "fc1.weight_mask"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_given_masks_are_read_off(key, dtype):
    with pytest.warns(smupar.PlanWarning, match="assumes random masks"):
        plan = plan_mlp(64, 16, density=0.5, masks={key: own_mask(1024).to(dtype)})
    row = plan["fc1.weight"]
    assert (row.pattern, row.num_kept, row.density) == ("given", 1024, Fraction(1, 4))
    assert row.lr_factor("adam") == 1.0
    assert plan["fc2.weight"].density == Fraction(1, 2)
    assert any(note.kind == "given masks" and "assumes random masks" in note.text for note in plan.notes)


def test_given_mask_cannot_be_drawn_again():
    plan = plan_mlp(64, 16, masks={"fc1.weight": own_mask(1024)})
    with pytest.raises(ValueError, match=r"mask of 'fc1.weight' was given by the user"):
        plan.draw_mask("fc1.weight")


@pytest.mark.parametrize("base_width", [32, 64])
def test_neuron_multipliers_follow_the_live_widths(base_width):
    # Also where the model is as wide as its base and structure alone tells what scales.
    plan = plan_mlp(64, base_width, expand=2, pattern="neuron", density=3 / 8, init_std=SIGMA, alpha_output=ALPHA_OUTPUT)
    narrow = plan_mlp(24, base_width, expand=2, init_std=SIGMA, alpha_output=ALPHA_OUTPUT)
    assert plan["fc1.weight"].width_in == Fraction(24, base_width)
    assert plan["fc1.weight"].density == Fraction(9, 64)
    assert plan["fc1.weight"].density_mult == 1
    assert numbers(plan) == numbers(narrow)
    assert plan.output_factor == narrow.output_factor == ALPHA_OUTPUT * (base_width / 24)
    assert [(row.width_in, row.width_out) for row in plan] == [(row.width_in, row.width_out) for row in narrow]


def test_neuron_with_full_density_is_dense():
    plan = plan_mlp(64, 16, pattern="neuron", density=1.0)
    assert not [row.name for row in plan if row.masked]
    assert numbers(plan) == numbers(plan_mlp(64, 16))


def live_part(tensor, mask):
    """The entries of a masked tensor that are left, in the shape of the narrower one."""
    if mask is None:
        return tensor
    for dim in range(tensor.ndim):
        others = [other for other in range(tensor.ndim) if other != dim]
        tensor = tensor.index_select(dim, mask.any(others).nonzero().flatten() if others else mask.nonzero().flatten())
    return tensor


@pytest.mark.parametrize("activation", [F.gelu, torch.sigmoid])  # sigmoid(0) is not 0: what dead neurons send must not count
@pytest.mark.parametrize(("optimizer", "options"), [(torch.optim.AdamW, {"lr": 1e-2}), (torch.optim.SGD, {"lr": 1e-1})])
def test_neuron_trains_like_the_narrower_dense_network(optimizer, options, activation):
    base = on_meta(MLP, 32, 2)
    wide, narrow = MLP(64, 2, activation).double(), MLP(24, 2, activation).double()
    with torch.no_grad():  # dead biases must be removed as well, also where they start away from 0
        for parameter in wide.parameters():
            parameter.fill_(0.3)
    shared = {"init_std": 0.3, "alpha_input": 2.0, "alpha_output": 0.7}
    wide_plan = smupar.parameterize(wide, base=base, pattern="neuron", density=3 / 8, **shared)
    narrow_plan = smupar.parameterize(narrow, base=base, **shared)
    masks = {row.name: wide_plan.draw_mask(row.name) for row in wide_plan}

    def assert_same():
        for (name, big), small in zip(wide.named_parameters(), narrow.parameters(), strict=True):
            torch.testing.assert_close(live_part(big.detach(), masks[name]), small.detach(), rtol=1e-9, atol=1e-12)
            if masks[name] is not None:
                assert not big.detach()[~masks[name]].any()

    narrow.load_state_dict({name: live_part(p.detach(), masks[name]) for name, p in wide.named_parameters()})
    assert_same()
    optimizers = [
        optimizer(smupar.param_groups(model, plan, weight_decay=0.1, optimizer=optimizer, **options))
        for model, plan in ((wide, wide_plan), (narrow, narrow_plan))
    ]
    data = torch.Generator().manual_seed(0)
    first = narrow.head.weight.detach().clone()
    for _ in range(10):
        x = torch.randn(16, 7, generator=data, dtype=torch.float64)
        y = torch.randint(5, (16,), generator=data)
        losses = []
        for model, optim in zip((wide, narrow), optimizers, strict=True):
            optim.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optim.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)
        assert_same()
    assert (narrow.head.weight - first).abs().max() > 1e-3  # it did train


def test_base_density_may_be_spread_like_the_density():
    model, base = on_meta(MLP, 256), on_meta(MLP, 64)
    plan = smupar.make_plan(model, base=base, density=smupar.erk(0.25), base_density=smupar.erk(0.25))
    without = smupar.make_plan(model, base=base, rule="mup", density=smupar.erk(0.25))
    assert [row.density_mult for row in plan] == [1] * len(plan)
    assert [row.init_std for row in plan] == [row.init_std for row in without]


def test_positions_beside_a_tied_table_get_its_init():
    class Positions(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(50, width), nn.Embedding(9, width)
            self.inner, self.head = nn.Linear(width, width), nn.Linear(width, 50, bias=False)
            self.head.weight = self.tokens.weight

    plan = smupar.make_plan(on_meta(Positions, 256), base=on_meta(Positions, 64))
    assert plan["tokens.weight"].init_std == plan["positions.weight"].init_std == 0.125
