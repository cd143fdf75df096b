"""One kind of weight, kept in three ways: what is asked of it, and what becomes of it, is the same."""

import copy

import pytest
import torch
from torch import nn

import smupar
from smupar.execute.stack.gather import Hyperparameters
from smupar.execute.stack.stack import Stack
from smupar.execute.stack.weight import StackedWeight
from smupar.model.csr import compress_export, compress_state, expand_export, expand_state, row_index
from smupar.model.weights import CompressedWeight, DenseWeight, hidden_weights, weight_of
from tests.support.models import Conv1D

NAME = "1.weight"


def net(width=16):
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, width, bias=False), nn.Linear(width, 2))


def parameterized(seed):
    torch.manual_seed(0)
    model = net()
    return model, smupar.parameterize(model, base=net(8), density=0.25, seed=seed, reset=False)


def loss(model, batch):
    return model(batch[0]).square().mean()


@pytest.fixture
def kept():
    """A masked weight and a compressed one of seed 0 with their optimizers, and those of seeds 0 and 1 in a stack, after a step
    with the same batch."""
    batch = torch.randn(8, 4)
    singles = []
    for storage in ("dense", "csr"):
        model, plan = parameterized(0)
        smupar.sparsify_storage(model, plan, backend=storage)
        optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
        weight = weight_of(model, NAME, [optimizer])
        weight.dense_gradient.request(True)
        loss(model, [batch]).backward()
        optimizer.step()
        singles.append(weight)
    models, plans = zip(*(parameterized(seed) for seed in (0, 1)), strict=True)
    stack = Stack(models, plans, loss, [Hyperparameters(0.01)] * 2)
    stack.keep_gradients([batch])
    stack.step([batch])
    return *singles, stack.weights[NAME]


def same(kept, read):
    masked, *others = (read(weight) for weight in kept)
    for other in others:
        torch.testing.assert_close(other[:1], masked, rtol=1e-4, atol=1e-6)
    return masked


def state_of(weight, what):
    """Optimizer state as a matrix."""
    if isinstance(weight, StackedWeight):
        return weight.state[what].flatten(1)
    state = weight.optimizers[0].state[weight.parameter][("exp_avg", "exp_avg_sq")[what]]
    full = state if isinstance(weight, DenseWeight) else weight.module.expand(state)
    return full.flatten()[None]


def test_each_way_of_keeping_has_its_kind(kept):
    assert [type(weight) for weight in kept] == [DenseWeight, CompressedWeight, StackedWeight]
    assert {weight.shape for weight in kept} == {(16, 16)}
    assert {weight.name for weight in kept} == {NAME}


def test_all_kinds_tell_the_same_values_masks_gradients_and_products(kept):
    x = torch.randn(5, 16)
    mask = same(kept, lambda weight: weight.rows()[1])
    assert mask.sum() == 64
    assert not same(kept, lambda weight: weight.rows()[0])[~mask].any()
    assert same(kept, lambda weight: weight.dense_grad())[~mask].any()  # without a mask
    same(kept, lambda weight: weight.multiply(x).view(-1, 5, 16)[:1].reshape(1, -1))


@pytest.mark.parametrize("num_kept", [64, 40])
def test_a_new_mask_does_the_same_to_all_kinds(kept, num_kept):
    before, old = (part.clone() for part in kept[0].rows())
    new = torch.zeros_like(old)
    new[0, torch.randperm(256)[:num_kept]] = True
    others = kept[2].rows([1])
    with torch.no_grad():
        changes = [weight.set_mask(new) for weight in kept]
    assert torch.equal(same(kept, lambda weight: weight.rows()[1]), new)
    values = same(kept, lambda weight: weight.rows()[0])
    assert torch.equal(values, before * new)  # what stays keeps its value, what is new starts at 0
    for what in (0, 1):
        moment = same(kept, lambda weight, what=what: state_of(weight, what))
        assert moment[new & old].any()
        assert not moment[~(new & old)].any()
    assert [int(change.new_entries.sum()) for change in changes] == [int((new & ~old).sum())] * 3
    assert all(torch.equal(now, then) for now, then in zip(kept[2].rows([1]), others, strict=True))  # the other model stays


def test_all_kinds_go_back_to_a_snapshot_where_the_mask_is_then(kept):
    old = kept[0].rows()[1].clone()
    first = [weight.snapshot() for weight in kept]
    new = old & (torch.arange(256) % 2 == 0)
    with torch.no_grad():
        for weight, values in zip(kept, first, strict=True):
            weight.set_mask(new)
            weight.scale(torch.tensor([3.0]))
            weight.restore(values)
    assert torch.equal(same(kept, lambda weight: weight.rows()[0]), first[0].flatten()[None] * new)


def test_state_of_the_other_layout_is_known_and_converted(kept):
    masked, compressed, _ = kept
    matrix = masked.full()
    values = compressed.parameter.detach()
    assert masked.is_foreign(values.shape)
    assert compressed.is_foreign(matrix.shape)
    torch.testing.assert_close(masked.converted(values), matrix)
    torch.testing.assert_close(compressed.converted(matrix), values)
    assert not any(weight.is_foreign(shape) for weight in (masked, compressed) for shape in ((), (1,), (7,)))
    assert not masked.is_foreign(matrix.shape)
    assert not compressed.is_foreign(values.shape)


@pytest.mark.parametrize("layer", [nn.Linear, Conv1D])
def test_gradient_of_the_input_is_the_same_dense_and_compressed(layer):
    def make(width):
        sizes = (2 * width, width) if layer is Conv1D else (width, 2 * width)  # Conv1D takes (out, in)
        return nn.Sequential(nn.Linear(4, width), layer(*sizes), nn.Linear(2 * width, 2))

    torch.manual_seed(0)
    model = make(8)
    plan = smupar.parameterize(model, base=make(4), density=0.25, reset=False)
    x, output_grad, in_dim = torch.randn(5, 8), torch.randn(5, 16), plan[NAME].in_dims[0]
    dense = weight_of(model, NAME).input_gradient(x, output_grad, in_dim=in_dim)
    smupar.sparsify_storage(model, plan, backend="csr")
    torch.testing.assert_close(weight_of(model, NAME).input_gradient(x, output_grad, in_dim=in_dim), dense)


def test_a_weight_without_a_mask_says_so():
    model = net()
    weight = weight_of(model, NAME)
    assert weight.mask is None
    assert not weight.is_masked
    assert weight.full_mask().all()
    assert not weight.is_foreign((256,))


def test_weights_follow_a_copy_and_a_replaced_parameter():
    model, plan = parameterized(0)
    weight = hidden_weights(model, plan)[NAME]
    clone = copy.deepcopy(model)
    model.load_state_dict({key: value.clone() for key, value in clone.state_dict().items()}, assign=True)
    assert weight.parameter is model.get_parameter(NAME)
    assert weight.masks_gradient
    assert not weight_of(clone, NAME).masks_gradient


def test_both_spellings_of_the_codec_give_the_matrix_back():
    mask = torch.rand(6, 10) < 0.3
    matrix = torch.randn(6, 10) * mask
    matrix[mask.nonzero()[0][0], mask.nonzero()[0][1]] = 0  # a kept weight that is 0 stays kept
    state = {"a": matrix.clone(), "a_mask": mask.clone(), "b": torch.ones(3)}
    compress_state(state, "a")
    assert sorted(state) == ["a", "a_columns", "a_row_starts", "b"]
    assert [state[key].dtype for key in ("a_columns", "a_row_starts")] == [torch.int32, torch.int64]
    expand_state(state, "a", (6, 10))
    assert torch.equal(state["a"], matrix)
    assert torch.equal(state["a_mask"], mask)
    exported = {"a": matrix.clone(), "b": torch.ones(3)}
    compress_export(exported, "a", mask)
    assert sorted(exported) == ["a.col_indices", "a.crow_indices", "a.values", "b"]
    assert len(exported["a.values"]) == int(mask.sum()) == int(row_index(mask)[0][-1])
    expand_export(exported, {"a": 10})
    assert torch.equal(exported["a"], matrix)
    assert sorted(exported) == ["a", "b"]
