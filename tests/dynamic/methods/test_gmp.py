"""GMP: to which densities a model is pruned, when, and with what becomes of its weights."""

import copy
import math
from fractions import Fraction

import pytest
import torch

import smupar
from smupar.model.attached import mask_of
from smupar.model.gradients import gradient_mask
from smupar.model.parameterize import add_masks
from tests.dynamic.moving import (
    SIZES,
    assert_nothing_off_mask,
    counts,
    hidden_of,
    make,
    masks_of,
    moving,
    optimize,
    ready,
    train,
)
from tests.support.loops import adamw, assert_same_tensors, loss_of, tokens_of, used_lrs
from tests.support.models import TokenNet


def test_cubic_curve_prunes_fast_at_first():
    model, optimizer, gmp = moving("GMP", density=0.5, every=5, stop=20)
    sparsity = {}
    for step in range(1, 24):
        train(model, optimizer, gmp, [step])
        sparsity[step] = {name: 1 - density for name, density in gmp.densities.items()}
        assert len(set(sparsity[step].values())) == 1
    expected = {1: 0, 4: 0, 5: 0.2890625, 9: 0.2890625, 10: 0.4375, 15: 0.4921875, 19: 0.4921875, 20: 0.5, 23: 0.5}
    assert {step: sparsity[step]["up.weight"] for step in expected} == expected


# (257/512 of 256 is 128.5, which is rounded up.)
@pytest.mark.parametrize(("density", "mix", "up"), [(0.3, 77, 154), (257 / 512, 129, 257), (0.01, 3, 5)])
def test_gmp_ends_at_the_rounded_count_where_stop_is_no_multiple_of_every(density, mix, up):
    model, optimizer, gmp = moving("GMP", density=density, every=3, start=2, stop=7)
    seen = [counts(model)]
    moved = []
    for step in range(9):
        moved += train(model, optimizer, gmp, [step])
        seen.append(counts(model))
        assert_nothing_off_mask(model, [optimizer])
    assert [step for step, has_moved in enumerate(moved, 1) if has_moved] == [2, 5, 7]
    for name in SIZES:
        falling = [record[name] for record in seen]
        assert falling == sorted(falling, reverse=True)
        assert falling[2] == SIZES[name] > falling[5] > falling[7]
    assert counts(model) == {"mix.weight": mix, "up.weight": up, "down.weight": up}


@pytest.mark.parametrize("start", [1.0, 0.5])
def test_gmp_prunes_the_smallest_of_what_the_plan_starts_with(start):
    model, optimizer, gmp = moving("GMP", start_from=start, density=0.125, every=2, stop=4)
    assert counts(model) == {name: int(size * start) for name, size in SIZES.items()}
    train(model, optimizer, gmp, range(3))
    optimize(model, optimizer, 3)
    before, weights = masks_of(model), hidden_of(model)
    gmp.step()
    for name, mask in masks_of(model).items():
        assert mask.sum() == SIZES[name] // 8
        assert not (mask & ~before[name]).any()
        assert weights[name][mask].abs().min() >= weights[name][before[name] & ~mask].abs().max()
        assert torch.equal(model.get_parameter(name).detach(), weights[name] * mask)


def test_gmp_prunes_to_an_allocation():
    shapes = {name: tuple(TokenNet().get_parameter(name).shape) for name in SIZES}
    wanted = smupar.erk(0.25).densities(shapes)
    assert wanted["mix.weight"] > wanted["up.weight"]
    model, optimizer, gmp = moving("GMP", density=smupar.erk(0.25), every=2, stop=3)
    used = used_lrs(optimizer)
    train(model, optimizer, gmp, range(4))
    assert counts(model) == {name: math.floor(wanted[name] * size + Fraction(1, 2)) for name, size in SIZES.items()}
    assert used == pytest.approx({name: 0.005 / density for name, density in gmp.densities.items()})


def test_gmp_leaves_layers_that_no_glob_names_dense():
    model, optimizer, gmp = moving("GMP", density={"up.*": 0.5}, every=1, stop=1)
    train(model, optimizer, gmp, range(1))
    assert counts(model) == {**SIZES, "up.weight": 256}


def test_global_pool_ranks_all_hidden_weights_together():
    model, plan = make(1.0)
    with torch.no_grad():
        model.mix.weight.mul_(3)
    optimizer = adamw(model, plan, lr=1e-4)
    gmp = smupar.GMP(model, plan, optimizer, density=0.3, every=2, stop=3, pool="global")
    train(model, optimizer, gmp, range(2))
    optimize(model, optimizer, 2)
    before, weights = masks_of(model), hidden_of(model)
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
    optimizer = adamw(model, plan, lr=1e-9)
    gmp = smupar.GMP(model, plan, optimizer, density=0.25, every=1, stop=1, pool="global")
    with pytest.raises(ValueError, match=r"every weight of 'mix.weight' would be dropped: prune less, or with pool='layer'"):
        train(model, optimizer, gmp, range(1))


def test_copy_of_a_gmp_model_masks_gradients_again_after_attach():
    model, plan, optimizer = ready(1.0)
    gmp = smupar.GMP(model, plan, optimizer, density=0.25, every=1, stop=1)
    train(model, optimizer, gmp, range(1))
    clone = copy.deepcopy(model)
    assert not any(gradient_mask(clone.get_parameter(name)) for name in SIZES)
    smupar.attach(clone, plan)
    assert_same_tensors(masks_of(clone), masks_of(model))
    clone.zero_grad()
    loss_of(clone, tokens_of(1)).backward()
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
    loss_of(model, tokens_of(0)).backward()
    assert all(model.get_parameter(name).grad.any() and gradient_mask(model.get_parameter(name)) for name in SIZES)
    assert {key for key in model.state_dict() if key.endswith("_mask")} == {f"{name}_mask" for name in SIZES}


def test_muon_is_pruned_without_further_ado():
    model, plan = make(1.0)
    muon = torch.optim.Muon(smupar.param_groups(model, plan, lr=0.02, only="hidden", optimizer="muon"))
    both = [muon, torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, only="rest"))]
    train(model, both, smupar.GMP(model, plan, both, density=1 / 8, every=2, stop=4), range(1, 7))
    assert {name: torch.count_nonzero(weight).item() for name, weight in hidden_of(model).items()} == {
        name: size // 8 for name, size in SIZES.items()
    }


def test_audit_sees_hooks_that_a_pruned_model_has_lost():
    model, plan, optimizer = ready(1.0)
    train(model, optimizer, smupar.GMP(model, plan, optimizer, density=1 / 8, every=2, stop=4), range(1, 7))
    assert smupar.audit(model, plan, optimizer) == []
    with pytest.raises(smupar.AuditError) as error:
        smupar.audit(copy.deepcopy(model), plan, trained=True)
    assert [finding.name for finding in error.value.findings] == list(SIZES)
    assert all("its gradient is not masked, the hook is lost" in str(finding) for finding in error.value.findings)
