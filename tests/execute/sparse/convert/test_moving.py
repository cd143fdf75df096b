"""Masks that move and updates that are measured, as in the dense model."""

from functools import partial

import pytest
import torch
from torch import nn

import smupar
from smupar.model.attached import mask_of
from tests.execute.sparse.kept import (
    HIDDEN,
    adamw,
    assert_same_products,
    assert_same_weights,
    layer_pair,
    loss_of,
    net,
    pair,
    parameterized,
    train,
)


def run_both(start_density, steps, act, **settings):
    """The same run of the dense model and of its non-zeros, their losses alike: the models, and what acted in each."""
    dense, sparse, plan = pair(start_density)
    losses, acted = [], []
    for model in (dense, sparse):
        optimizer = adamw(model, plan)
        acts = act(model, plan, optimizer, **settings)
        losses.append(train(model, optimizer, steps, after=acts.step if callable(acts.step) else lambda: None))
        acted.append(acts)
    torch.testing.assert_close(*losses, rtol=0, atol=1e-4)
    return (dense, sparse), acted


MOVES = {"every": 3, "stop": 20, "restart_bias_correction": True}
PRUNES = {"density": 0.1, "every": 3, "stop": 15}
# name -> (the density at the start, the number of steps, what moves the masks)
MOVING = {
    "RigL": (0.25, 25, partial(smupar.RigL, **MOVES)),
    "SET": (0.25, 25, partial(smupar.SET, **MOVES)),
    "GMP": (0.5, 20, partial(smupar.GMP, **PRUNES, pool="layer")),
    "GMP, global": (0.5, 20, partial(smupar.GMP, **PRUNES, pool="global")),
}


@pytest.mark.parametrize(("density", "steps", "act"), MOVING.values(), ids=MOVING)
def test_masks_that_move_are_those_of_the_dense_model(density, steps, act):
    (dense, sparse), _ = run_both(density, steps, act)
    start = parameterized(density)[0]
    for name in HIDDEN:
        assert torch.equal(mask_of(dense, name), mask_of(sparse, name))
        assert not torch.equal(mask_of(sparse, name), mask_of(start, name))
        if density == 0.25:  # each layer keeps as many weights as it had
            assert mask_of(sparse, name).sum() == mask_of(start, name).sum()
    num_kept = sum(len(sparse.get_parameter(name)) for name in HIDDEN)
    assert num_kept == pytest.approx(act.keywords.get("density", density) * 5120, abs=2)


def test_iterative_pruning_goes_back_to_the_same_weights():
    models, _ = run_both(0.5, 8, smupar.IMP, density=0.1, rounds=2, every=4, rewind=1)
    assert_same_weights(*models, rtol=0, atol=1e-6)


def test_measured_updates_are_those_of_the_dense_model():
    _, (dense, sparse) = run_both(0.25, 6, smupar.record_updates)
    for name in HIDDEN:
        assert dense.trace.shapes[name] == sparse.trace.shapes[name]
        assert sparse.trace.effects[name] == pytest.approx(dense.trace.effects[name], rel=1e-3)


def test_following_a_trace_gives_the_run_of_the_dense_model():
    proxy = net(16)
    plan = smupar.parameterize(proxy, base=net(8), reset=False)
    optimizer = adamw(proxy, plan)
    with smupar.record_updates(proxy, plan, optimizer) as trace:
        train(proxy, optimizer, 12)
    run_both(0.25, 12, smupar.follow_updates, trace=trace)


@pytest.mark.parametrize("kind", ["RigL", "SET"])
def test_moved_masks_keep_values_and_state_of_what_stays(kind):
    _, sparse, plan = pair()
    optimizer = adamw(sparse, plan)
    sparsifier = getattr(smupar, kind)(sparse, plan, optimizer, every=4, stop=20)
    train(sparse, optimizer, 3, after=sparsifier.step)
    optimizer.zero_grad()
    loss_of(sparse, 3).backward()
    optimizer.step()
    layer = sparse.up
    tensors = {"weight": layer.weight.detach(), **{k: v for k, v in optimizer.state[layer.weight].items() if v.ndim}}
    before, old = {name: layer.expand(tensor) for name, tensor in tensors.items()}, layer.weight_mask
    assert sparsifier.step()
    new = layer.weight_mask
    assert not torch.equal(old, new)
    state = optimizer.state[layer.weight]
    for name, matrix_before in before.items():
        now = layer.expand(layer.weight.detach() if name == "weight" else state[name])
        assert torch.equal(now, matrix_before.masked_fill(~(old & new), 0))


def test_dense_gradient_is_made_only_in_steps_that_need_it():
    _, sparse, plan = pair()
    optimizer = adamw(sparse, plan)
    sparsifier = smupar.RigL(sparse, plan, optimizer, every=2, stop=4)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(sparse, step).backward()
        seen.append(sparse.up.dense.value is not None)
        optimizer.step()
        sparsifier.step()
    assert seen == [False, True, False, True, False, False]


def test_products_after_a_mask_change_are_those_of_the_dense_layer():
    """The columns must move along."""
    torch.manual_seed(0)
    for density in (0.3, 0.1, 0.8):
        _, sparse = layer_pair(torch.rand(40, 30) < 0.3)
        sparse(torch.randn(4, 30))
        mask = torch.rand(40, 30) < density
        sparse.move_nonzeros(mask)
        with torch.no_grad():
            sparse.weight.normal_()
        dense = nn.Linear(30, 40)
        dense.load_state_dict({"weight": sparse.expand(sparse.weight.detach()), "bias": sparse.bias.detach()})
        assert_same_products(dense, sparse, mask, torch.randn(20, 30), 1e-5)


def test_masks_given_to_attach_are_taken():
    _, sparse, plan = pair(masks={name: torch.rand(64, 32) < 0.3 for name in ["up.weight"]}, density=None)
    mask = torch.rand(64, 32) < 0.3
    smupar.attach(sparse, plan, masks={"up.weight": mask})
    assert torch.equal(sparse.up.weight_mask, mask)


def test_fan_in_init_scales_as_in_the_dense_model():
    dense, sparse, plan = pair()
    for model in (dense, sparse):
        smupar.fan_in_init(model, plan)
    assert_same_weights(dense, sparse)
