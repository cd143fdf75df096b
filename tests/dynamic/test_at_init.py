"""Masks that are chosen before training, and init by fan-in."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import smupar
from smupar.model.attached import mask_of
from tests.dynamic.moving import SIZES, assert_nothing_off_mask, counts, hidden_of, make, masks_of, train
from tests.support.loops import adamw, assert_same_tensors, loss_of, tokens_of
from tests.support.models import TokenNet, on_meta


def test_magnitude_masks_keep_the_largest_of_each_layer_and_leave_the_model():
    model, plan = make(1.0)
    loss_of(model, tokens_of(0)).backward()
    before = hidden_of(model), [parameter.grad.clone() for parameter in model.parameters()], list(model.state_dict())
    masks = smupar.magnitude_masks(model, plan, density=0.3)
    assert counts(masks) == {"mix.weight": 77, "up.weight": 154, "down.weight": 154}
    for name, weight in before[0].items():
        assert (masks[name].dtype, masks[name].shape) == (torch.bool, weight.shape)
        assert weight[masks[name]].abs().min() >= weight[~masks[name]].abs().max()
    assert_same_tensors(hidden_of(model), before[0])
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before[1], strict=True))
    assert list(model.state_dict()) == before[2]


def test_magnitude_masks_follow_an_allocation():
    model, plan = make(1.0)
    masks = smupar.magnitude_masks(model, plan, density=smupar.erk(0.25))
    wanted = smupar.erk(0.25).densities({name: mask.shape for name, mask in masks.items()})
    assert counts(masks) == {name: math.floor(wanted[name] * size + Fraction(1, 2)) for name, size in SIZES.items()}


@pytest.mark.parametrize("way", ["magnitude", "snip"])
def test_chosen_masks_go_into_parameterize_with_a_warning(way):
    dense, plan = make(1.0)
    if way == "magnitude":
        masks = smupar.magnitude_masks(dense, plan, density=0.25)
    else:
        masks = smupar.snip_masks(dense, plan, loss_of, [tokens_of(0)], density=0.25)
    model = TokenNet()
    with pytest.warns(smupar.PlanWarning, match="the rule assumes random masks"):
        sparse = smupar.parameterize(model, base=on_meta(TokenNet, 8), masks=masks)
    assert_same_tensors(masks_of(model), masks)
    assert_nothing_off_mask(model)
    assert all(sparse[name].density == Fraction(int(mask.sum()), mask.numel()) for name, mask in masks.items())
    optimizer = adamw(model, sparse)
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
    loss_of(model, tokens_of(0)).backward()
    weights, grads = hidden_of(model), [parameter.grad.clone() for parameter in model.parameters()]
    batches = [tokens_of(step) for step in range(3)]
    together = smupar.snip_masks(model, plan, loss_of, batches, density=0.3)
    assert sum(int(mask.sum()) for mask in together.values()) == 77 + 154 + 154
    by_layer = smupar.snip_masks(model, plan, loss_of, batches, density=0.3, pool="layer")
    assert counts(by_layer) == {"mix.weight": 77, "up.weight": 154, "down.weight": 154}
    assert_same_tensors(hidden_of(model), weights)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))


def test_snip_ranks_all_layers_by_one_score():
    model, plan = make(1.0, dtype=torch.float64)
    masks = smupar.snip_masks(model, plan, loss_of, [tokens_of(0)], density=0.25)
    parameters = [model.get_parameter(name) for name in SIZES]
    grads = torch.autograd.grad(loss_of(model, tokens_of(0)), parameters)
    scores = {n: (p.detach() * g).abs() for n, p, g in zip(SIZES, parameters, grads, strict=True)}
    kept = torch.cat([scores[name][mask] for name, mask in masks.items()])
    lost = torch.cat([scores[name][~mask] for name, mask in masks.items()])
    assert kept.min() >= lost.max()


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
    before = hidden_of(model)
    smupar.fan_in_init(model, plan)
    assert_same_tensors(hidden_of(model), before)
