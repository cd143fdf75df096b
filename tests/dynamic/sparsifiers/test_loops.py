"""Masks that move in other people's loops: scalers, wrappers, micro-batches, steps that were skipped."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import smupar
from smupar.model.attached import mask_of
from smupar.model.gradients import gradient_mask
from smupar.optim.layer_rates import layer_rates
from tests.dynamic.moving import SIZES, assert_nothing_off_mask, counts, make, masks_of, moving, optimize, ready, share
from tests.support.loops import adamw, assert_same_tensors, loss_of, tokens_of, used_lrs, weights_of
from tests.support.models import VOCAB


def backward(model, step, scale=1.0):
    (scale * loss_of(model, tokens_of(step))).backward()


def sgd(model, plan, lr=0.01):
    return torch.optim.SGD(smupar.param_groups(model, plan, lr=lr, optimizer="sgd"))


@pytest.mark.parametrize("discarded", [math.nan, 100.0])
def test_rigl_grows_as_if_gradients_that_were_thrown_away_had_never_been(discarded):
    masks = []
    for discards in (False, True):
        model, optimizer, rigl = moving("RigL", every=1, stop=3)
        if discards:
            backward(model, 99, discarded)
            optimizer.zero_grad()
        backward(model, 0)
        optimizer.step()
        rigl.step()
        masks.append(model.mix.weight_mask.clone())
    assert torch.equal(*masks)


def test_masks_stay_where_gradients_are_not_finite():
    model, optimizer, rigl = moving("RigL", every=1, stop=3, optimizer=partial(sgd, lr=0.0))
    before = model.mix.weight_mask.clone()
    backward(model, 0, math.nan)
    optimizer.step()
    for module in (model.mix, model.up, model.down):
        module.weight.data.masked_fill_(~module.weight_mask, 0)
    with pytest.warns(smupar.PlanWarning, match="the gradient of 'mix.weight' is not finite, so its mask stays"):
        rigl.step()
    assert torch.equal(model.mix.weight_mask, before)


def test_steps_count_only_if_the_optimizer_made_them():
    model, optimizer, rigl = moving("RigL", every=2, stop=4)
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
    model, _, static = ready(density)
    backward(model, 0)
    static.step()
    used = []
    for loads in (False, True):
        model, optimizer, gmp = moving("GMP", start_from=density, density=1 / 32, every=1, stop=2)
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
        model, plan, optimizer = ready()
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
    rest = adamw(model, plan, only="rest")
    rates = layer_rates(model, plan, hidden)
    assert layer_rates(model, plan, [rest, hidden]) is rates
    backward(model, 0)
    rest.step()
    hidden.step()


def test_optimizer_of_weights_that_storage_replaced_refuses_to_step():
    model, plan, optimizer = ready()
    smupar.sparsify_storage(model, plan, backend="csr")
    backward(model, 0)
    with pytest.raises(ValueError, match="holds weights that sparsify_storage has replaced"):
        optimizer.step()


def test_weights_of_a_checkpoint_are_not_scaled_a_second_time():
    options = {"density": 0.1, "every": 2, "stop": 8, "correction": "fixed"}
    model, plan = make(0.5)
    smupar.GMP(model, plan, adamw(model, plan), **options)
    state = copy.deepcopy(model.state_dict())
    model, plan = make(0.5)
    model.load_state_dict(state)
    with pytest.raises(ValueError, match="make the sparsifier before a checkpoint is loaded"):
        smupar.GMP(model, plan, adamw(model, plan), **options)
    assert torch.equal(model.mix.weight, state["mix.weight"])


def test_masks_from_weights_that_are_kept_alone_are_those_of_the_dense_ones():
    model, plan = make(0.5)
    dense = smupar.magnitude_masks(model, plan, density=0.25)
    smupar.sparsify_storage(model, plan, backend="csr")
    sparse = smupar.magnitude_masks(model, plan, density=0.25)
    assert all(torch.equal(dense[name], sparse[name]) for name in SIZES)
    with pytest.raises(ValueError, match="keeps only its non-zeros: SNIP needs a dense model"):
        smupar.snip_masks(model, plan, lambda model, batch: model(batch).sum(), [tokens_of(0)[0]], density=0.25)


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
    def wrapper(model, plan):
        return SharpnessAware(smupar.param_groups(model, plan, lr=0.01))

    model, optimizer, rigl = moving("RigL", every=2, stop=8, optimizer=wrapper)
    before = masks_of(model)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, tokens_of(step)).backward()
        optimizer.step(lambda step=step: loss_of(model, tokens_of(step)))
        rigl.step()
    assert rigl.num_steps == 10
    assert any(not torch.equal(mask, before[name]) for name, mask in masks_of(model).items())
    assert_nothing_off_mask(model)


def test_sparsifier_of_an_optimizer_that_never_steps_says_so():
    model, plan, optimizer = ready()
    rigl = smupar.RigL(model, plan, optimizer, every=2, stop=8)
    optimize(model, adamw(model, plan), 0)
    for _ in range(999):
        rigl.step()
    with pytest.warns(smupar.PlanWarning, match="was called 1000 times, but its optimizer made no step"):
        rigl.step()


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_do_not_count(fused):
    model, plan = make()
    optimizer = adamw(model, plan, fused=fused)
    rigl = smupar.RigL(model, plan, optimizer, every=2, stop=8)
    recorder = smupar.record_updates(model, plan, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, tokens_of(step)) * (math.inf if step in (0, 3) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        rigl.step()
    assert rigl.num_steps == 4
    assert recorder.trace.num_steps == 4
    assert all(effect > 0 for effects in recorder.trace.effects.values() for effect in effects)


def test_scheduler_scales_the_tensor_lr_of_each_group_once():
    _, optimizer, _ = moving("GMP", density=0.25, every=2, stop=8, optimizer=partial(adamw, lr=torch.tensor(0.01)))
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
    optimizer = adamw(model, plan)
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
    with pytest.raises(ValueError, match=r"'up\.weight' is frozen, but SNIP needs its gradient"):
        smupar.snip_masks(model, plan, loss_of, [tokens_of(0)], density=0.5)
    model.up.weight.requires_grad_(True)
    masks = smupar.snip_masks(
        model, plan, lambda net, data: net.mix(net.embedding(data[0])).sum(), [tokens_of(0)], density=0.5, pool="layer"
    )
    assert counts(masks) == share(1 / 2)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # in torch's own import
@pytest.mark.usefixtures("one_process_group")
def test_optimizer_that_keeps_its_state_on_other_ranks_is_refused():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, plan = make()
    optimizer = ZeroRedundancyOptimizer(smupar.param_groups(model, plan, lr=0.01), torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"ZeroRedundancyOptimizer keeps most state on other ranks.*use FSDP2"):
        smupar.RigL(model, plan, optimizer, every=2, stop=8)


@pytest.mark.parametrize("num_steps", [2, 3], ids=["after a move", "later"])
def test_restart_leaves_weights_alone_where_a_fused_step_overflowed(num_steps):
    fused = partial(adamw, fused=True)
    model, optimizer, sparsifier = moving("SET", optimizer=fused, every=2, stop=4, restart_bias_correction=True)
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
    before = weights_of(model)
    step(math.inf)
    assert_same_tensors(weights_of(model), before)


def test_rates_of_two_models_in_one_optimizer_are_refused():
    (model, plan), (other, others) = make(1.0), make(1.0, seed=1)
    groups = [smupar.param_groups(model, plan, lr=0.01) for model, plan in ((model, plan), (other, others))]
    optimizer = torch.optim.AdamW(groups[0] + groups[1])
    smupar.GMP(model, plan, optimizer, density=1 / 2, every=1, stop=2)
    with pytest.raises(ValueError, match="give each model its own optimizer"):
        smupar.GMP(other, others, optimizer, density=1 / 16, every=1, stop=2)


def _grown(backend, *, thrown_away, set_to_none=True, num_parts=1):
    """The mask after a move, after a gradient that was thrown away or not."""
    model, plan = make()
    smupar.sparsify_storage(model, plan, backend=backend)
    optimizer = sgd(model, plan)
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
@pytest.mark.usefixtures("one_process_group")
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
        smupar.RigL(model, plan, sgd(model, plan), every=1, stop=3)
        tokens = torch.randint(VOCAB, (16, 4), generator=torch.Generator().manual_seed(2))
        for part in tokens.chunk(num_parts):
            (wrapped(part).square().mean() / num_parts).backward()
        return gradient_mask(model.up.weight).value

    torch.testing.assert_close(dense(4), dense(1))
