"""RigL and SET in a model: what becomes of weights, gradients and optimizer state."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import smupar
from smupar.model.gradients import gradient_mask
from tests.dynamic.moving import (
    SIZES,
    assert_nothing_off_mask,
    counts,
    hidden_of,
    make,
    masks_of,
    moving,
    optimize,
    share,
    train,
)
from tests.support.loops import adamw, assert_same_tensors, loss_of, optimizers_of, state_of, tokens_of
from tests.support.models import TokenNet, on_meta


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion"])
def test_rigl_starts_grown_weights_at_zero_and_leaves_kept_ones_alone(name):
    model, plan = make()
    (optimizer,) = optimizers_of(name, model, plan)
    rigl = smupar.RigL(model, plan, optimizer, every=3, stop=100, drop_fraction=0.5, decay="constant")
    train(model, optimizer, rigl, range(2))
    optimize(model, optimizer, 2)
    old_masks, old_weights = masks_of(model), hidden_of(model)
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
    model, optimizer, rigl = moving(
        "RigL", plan_settings={"dtype": torch.float64}, every=2, stop=100, drop_fraction=0.3, decay="constant"
    )
    train(model, optimizer, rigl, range(1))
    dense = torch.autograd.grad(loss_of(model, tokens_of(1)), [model.get_parameter(name) for name in SIZES])
    optimize(model, optimizer, 1)
    before, weights = masks_of(model), hidden_of(model)
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
    model, optimizer, sparsifier = moving("SET", every=1, stop=9)
    optimize(model, optimizer, 0)
    before = masks_of(model)
    with torch.no_grad():
        for name, mask in before.items():
            parameter = model.get_parameter(name)
            parameter[~mask] = 7.0
            optimizer.state[parameter]["exp_avg"][~mask] = 7.0
    with pytest.warns(smupar.PlanWarning, match="off its mask are not 0: it is trained by another optimizer"):
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
    optimizers = optimizers_of(name, model, plan)
    sparsifier = getattr(smupar, kind)(model, plan, optimizers, every=2, stop=8, drop_fraction=0.4)
    start, expected = masks_of(model), share(1 / 4)
    for step in range(10):
        before = masks_of(model)
        (moved,) = train(model, optimizers, sparsifier, [step])
        assert moved == (step + 1 in (2, 4, 6, 8))
        assert counts(model) == expected
        assert_nothing_off_mask(model, optimizers)
        if not moved:
            assert_same_tensors(masks_of(model), before)
        assert all(model.get_parameter(name).isfinite().all() for name in SIZES)
    assert all(not torch.equal(mask, start[name]) for name, mask in masks_of(model).items())
    assert sparsifier.densities == dict.fromkeys(SIZES, 0.25)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "lion"])
@pytest.mark.parametrize("kind", ["GMP", "IMP"])
def test_nothing_leaves_the_mask_while_it_shrinks(kind, name):
    model, plan = make(1.0)
    optimizers = optimizers_of(name, model, plan)
    own = {"stop": 6, "every": 2} if kind == "GMP" else {"rounds": 2, "every": 3}
    sparsifier = getattr(smupar, kind)(model, plan, optimizers, density=0.25, **own)
    before = masks_of(model)
    for step in range(8):
        train(model, optimizers, sparsifier, [step])
        assert_nothing_off_mask(model, optimizers)
        after = masks_of(model)
        assert all(not (after[name] & ~before[name]).any() for name in SIZES)
        before = after
    assert counts(model) == share(1 / 4)


def test_dense_gradient_of_micro_batches_is_that_of_the_whole_batch():
    chosen = {}
    for parts in (1, 2):
        model, optimizer, rigl = moving("RigL", plan_settings={"dtype": torch.float64}, every=2, stop=100)
        for step in range(2):
            tokens, targets = tokens_of(step)
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
        model = TokenNet()
        plan = smupar.parameterize(model, base=on_meta(TokenNet, 8), masks=masks, seed=seed)
        optimizer = adamw(model, plan)
        train(model, optimizer, smupar.SET(model, plan, optimizer, every=1, stop=9), range(3))
        torch.manual_seed(seed)  # growth must not read the global generator
        return masks_of(model)

    assert_same_tensors(grown(1), grown(1))
    others = grown(2)
    assert all(not torch.equal(mask, others[name]) for name, mask in grown(1).items())


def test_set_grows_other_weights_in_each_layer_and_step():
    model, optimizer, sparsifier = moving("SET", every=1, stop=99, drop_fraction=0.5, decay="constant")
    grown = []
    for step in range(2):
        before = masks_of(model)
        train(model, optimizer, sparsifier, [step])
        grown += [masks_of(model)[name] & ~before[name] for name in ("up.weight", "down.weight")]
    positions = [set(mask.flatten().nonzero().flatten().tolist()) for mask in grown]
    for index, grown_here in enumerate(positions):
        assert len(grown_here) > 30
        assert all(len(grown_here & other) < len(grown_here) / 2 for other in positions[:index])


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
    optimizer = adamw(model, plan)
    rigl = smupar.RigL(model, plan, optimizer, every=2, stop=8)
    before = [expert.weight_mask.clone() for expert in model.experts]
    for step in range(2):
        model(torch.randn(16, 8), 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.warns(smupar.PlanWarning, match="keep their masks: experts.0.weight") if step else nullcontext():
            rigl.step()
    assert torch.equal(before[0], model.experts[0].weight_mask)
    assert not torch.equal(before[1], model.experts[1].weight_mask)
    assert model.experts[1].weight_mask.sum() == before[1].sum()
