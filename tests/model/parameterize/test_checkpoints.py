"""Checkpoints with masks and without, of layers in several places, and through pickles."""

import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from tests.model.parameterize.nets import Net, Outer, frozen_state, gradients, make, masks_of, off_mask, train
from tests.support.loops import adamw, assert_same_tensors, loss_of, tokens_of
from tests.support.models import VOCAB


def test_state_dict_restores_masks_and_logits_over_another_seed():
    model, plan = make(seed=0)
    train(model, adamw(model, plan), 3)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh, _ = make(seed=1, global_seed=1)
    assert not torch.equal(fresh.hidden[0].weight_mask, model.hidden[0].weight_mask)
    result = fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert result.missing_keys == result.unexpected_keys == []
    assert_same_tensors(fresh.state_dict(), model.state_dict())
    assert torch.equal(fresh(tokens_of()[0]), model(tokens_of()[0]))
    loss_of(fresh, tokens_of()).backward()
    loss_of(model, tokens_of()).backward()
    assert_same_tensors(gradients(fresh), gradients(model))


def test_checkpoint_of_a_dense_model_loads_with_a_warning():
    model, _ = make()
    masks = {name: mask.clone() for name, mask in masks_of(model).items()}
    checkpoint = Net().state_dict()
    copied = {key: value.clone() for key, value in checkpoint.items()}
    with pytest.warns(smupar.PlanWarning, match=r"no mask for 2 sparse parameters \('hidden.0.weight'"):
        result = model.load_state_dict(checkpoint, strict=True)
    assert result.missing_keys == result.unexpected_keys == []
    assert_same_tensors(checkpoint, copied)
    assert_same_tensors(masks_of(model), masks)
    for key, value in copied.items():
        assert torch.equal(model.state_dict()[key], value * masks[key] if key in masks else value), key
    loss_of(model, tokens_of()).backward()
    assert off_mask(model, lambda p: p.grad) == 0


def test_warning_about_a_dense_checkpoint_points_at_the_callers_line():
    model, _ = make()
    with pytest.warns(smupar.PlanWarning, match="no mask") as caught:
        model.load_state_dict(Net().state_dict())
    assert [item.filename for item in caught] == [__file__]


def test_off_mask_weights_become_zero_whatever_was_loaded():
    model, _ = make()
    checkpoint = Net().state_dict()
    checkpoint["hidden.0.weight"] = torch.full((32, 32), float("inf"))  # 0 * inf is nan: a product would not do
    with pytest.warns(smupar.PlanWarning):
        model.load_state_dict(checkpoint)
    mask = model.hidden[0].weight_mask
    assert model.hidden[0].weight[~mask].eq(0).all()
    assert model.hidden[0].weight[mask].isinf().all()


def test_checkpoint_through_a_wrapper_loads_alike():
    model = Outer()
    make(model=model.inner)
    with pytest.warns(smupar.PlanWarning, match="no mask"):
        result = model.load_state_dict(Outer().state_dict())
    assert result.missing_keys == result.unexpected_keys == []
    assert off_mask(model, lambda p: p) == 0


def test_partial_load_leaves_the_rest():
    model, _ = make()
    before = frozen_state(model)
    model.load_state_dict({"head.bias": torch.ones(VOCAB)}, strict=False)
    assert_same_tensors(model.state_dict(), {**before, "head.bias": torch.ones(VOCAB)})


def test_load_with_assign_keeps_gradient_masking():
    source, _ = make(seed=1)
    model, plan = make(seed=0)
    model.load_state_dict(frozen_state(source), assign=True)
    assert_same_tensors(model.state_dict(), source.state_dict())
    loss_of(model, tokens_of()).backward()
    assert off_mask(model, lambda p: p.grad) == 0
    optimizer = adamw(model, plan)
    smupar.audit(model, plan, optimizer)
    train(model, optimizer, 5)
    assert off_mask(model, lambda p: p) == 0


def test_dense_checkpoint_with_assign_keeps_masks_and_masking():
    model, _ = make()
    masks = {name: mask.clone() for name, mask in masks_of(model).items()}
    with pytest.warns(smupar.PlanWarning, match="no mask"):
        model.load_state_dict(Net().state_dict(), assign=True)
    assert_same_tensors(masks_of(model), masks)
    assert off_mask(model, lambda p: p) == 0
    loss_of(model, tokens_of()).backward()
    assert off_mask(model, lambda p: p.grad) == 0


def test_plan_from_json_attaches_to_a_fresh_model_with_a_checkpoint():
    model, plan = make()
    fresh = Net()
    smupar.attach(fresh, smupar.Plan.from_json(plan.to_json()))
    fresh.load_state_dict(model.state_dict())
    smupar.audit(fresh, plan)
    assert torch.equal(fresh(tokens_of()[0]), model(tokens_of()[0]))
    loss_of(fresh, tokens_of()).backward()
    assert off_mask(fresh, lambda p: p.grad) == 0


@pytest.mark.parametrize("way", ["torch.save", "pickle"])
def test_pickled_model_keeps_logits_and_masks_gradients_after_attach(way):
    model, plan = make()
    if way == "pickle":
        loaded = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(tokens_of()[0]), model(tokens_of()[0]))
    smupar.attach(loaded, plan)
    smupar.audit(loaded, plan)
    loss_of(loaded, tokens_of()).backward()
    assert off_mask(loaded, lambda p: p.grad) == 0


class Repeated(nn.Module):
    """One layer in three places: a state dict has it, and its mask, under three names."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width)] * 3)
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = F.relu(block(x))
        return self.last(x)


def make_repeated(seed=0):
    model = Repeated(32)
    return model, smupar.parameterize(model, base=Repeated(16), density=0.25, seed=seed)


def test_checkpoint_without_masks_loads_into_a_layer_in_several_places():
    model, _ = make_repeated()
    with pytest.warns(smupar.PlanWarning, match="no mask"):
        model.load_state_dict(Repeated(32).state_dict())
    assert not model.blocks[0].weight.detach()[~model.blocks[0].weight_mask].any()


def test_checkpoint_of_non_zeros_loads_into_a_layer_in_several_places():
    (sparse, plan), (dense, _) = make_repeated(), make_repeated(1)
    smupar.sparsify_storage(sparse, plan, backend="csr")
    dense.load_state_dict(sparse.state_dict())
    x = torch.randn(4, 8)
    torch.testing.assert_close(dense(x), sparse(x))


def test_masks_of_a_state_dict_are_taken_for_a_layer_in_several_places():
    model, _ = make_repeated()
    masks = {name: mask for name, mask in model.state_dict().items() if name.endswith("_mask")}
    assert len(masks) == 3
    again = Repeated(32)
    with pytest.warns(smupar.PlanWarning, match="masks of your own"):
        smupar.parameterize(again, base=Repeated(16), masks=masks)
    assert torch.equal(again.blocks[2].weight_mask, model.blocks[0].weight_mask)


def test_other_zeros_than_those_of_the_drawn_mask_are_warned_of():
    model, plan = make()
    moved = {name: mask.roll(1, 1) for name, mask in masks_of(model).items()}
    with torch.no_grad():
        for name, mask in moved.items():
            model.get_parameter(name).copy_(mask.float())
    fresh = Net()
    fresh.load_state_dict(model.state_dict(), strict=False)
    with pytest.warns(smupar.PlanWarning, match="has other zeros than the mask that the plan draws"):
        smupar.attach(fresh, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error", smupar.PlanWarning)
        smupar.attach(Net(), plan)  # to be loaded afterwards
        given = Net()
        given.load_state_dict(model.state_dict(), strict=False)
        smupar.attach(given, plan, masks=moved)
