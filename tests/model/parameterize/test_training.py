"""Gradients, optimizers and compilers: nothing leaves the masks."""

import copy

import pytest
import torch
from torch import nn

import smupar
from smupar.lm.model.gpt import build
from smupar.model.hooks import mask_updates
from smupar.model.seam import seam_of
from tests.model.parameterize.nets import (
    GPT_CONFIG,
    HIDDEN,
    Net,
    assert_close,
    frozen_state,
    gradients,
    make,
    masks_of,
    off_mask,
    train,
)
from tests.support.loops import adamw, assert_same_tensors, loss_of, optimizers_of, tokens_of


def test_off_mask_gradients_are_exactly_zero_and_others_are_plain():
    model, _ = make()
    loss_of(model, tokens_of()).backward()
    assert off_mask(model, lambda p: p.grad) == 0
    parameters = dict(model.named_parameters())
    plain = torch.autograd.grad(loss_of(model, tokens_of()), list(parameters.values()))
    for (name, parameter), expected in zip(parameters.items(), plain, strict=True):
        masked = expected * masks_of(model)[name] if name in HIDDEN else expected
        assert torch.equal(parameter.grad, masked), name
    assert plain[list(parameters).index("hidden.0.weight")].ne(0).all()  # so there was something to mask


def test_gradient_accumulation_equals_one_big_batch():
    model, _ = make()
    tokens, targets = tokens_of(size=8)
    loss_of(model, (tokens, targets)).backward()
    whole = gradients(model)
    model.zero_grad()
    for start in range(0, 8, 2):
        (loss_of(model, (tokens[start : start + 2], targets[start : start + 2])) / 4).backward()
        assert off_mask(model, lambda p: p.grad) == 0
    assert_close(gradients(model), whole)


def test_clip_grad_norm_sees_masked_gradients_only():
    model, _ = make()
    plain = torch.autograd.grad(loss_of(model, tokens_of()), list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    masks = masks_of(model)
    kept = [g[masks[name]] if name in masks else g.flatten() for name, g in zip(names, plain, strict=True)]
    expected, dense = (torch.cat([g.flatten() for g in some]).norm().item() for some in (kept, plain))
    loss_of(model, tokens_of()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), expected / 2)
    assert norm.item() == pytest.approx(expected, rel=1e-5)
    assert dense > 1.02 * expected  # the test can tell the two apart
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert clipped == pytest.approx(expected / 2, rel=1e-4)


def test_double_backward_keeps_off_mask_gradients_zero():
    model, _ = make()
    # torch warns that create_graph makes a reference cycle between parameter and gradient; zero_grad below breaks it.
    with pytest.warns(UserWarning, match="create_graph=True"):
        loss_of(model, tokens_of()).backward(create_graph=True)
    penalty = sum(p.grad.pow(2).sum() for p in model.parameters())
    penalty.backward()
    assert off_mask(model, lambda p: p.grad) == 0
    model.zero_grad()


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion", "muon"])
def test_off_mask_weights_stay_exactly_zero_for_50_steps(kind):
    model, plan = make()
    masks = {name: mask.clone() for name, mask in masks_of(model).items()}
    start = frozen_state(model)
    optimizers = optimizers_of(kind, model, plan, lr=0.01 if kind == "sgd" else None)
    smupar.audit(model, plan, optimizers)
    losses = train(model, optimizers, 50)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert off_mask(model, lambda p: p) == 0
    assert_same_tensors(masks_of(model), masks)
    for name in HIDDEN:  # every kept weight did train
        moved = model.get_parameter(name) != start[name]
        assert torch.equal(moved, masks[name])
    smupar.audit(model, plan, optimizers)


@pytest.mark.parametrize(("kind", "moments"), [("adamw", ("exp_avg", "exp_avg_sq")), ("sgd", ("momentum_buffer",))])
def test_optimizer_state_off_mask_is_exactly_zero(kind, moments):
    model, plan = make()
    [optimizer] = optimizers_of(kind, model, plan, lr=0.01 if kind == "sgd" else None)
    train(model, optimizer, 50)
    for moment in moments:
        assert off_mask(model, lambda p, moment=moment: optimizer.state[p][moment]) == 0
        kept = [optimizer.state[model.get_parameter(name)][moment][mask] for name, mask in masks_of(model).items()]
        assert all(values.ne(0).all() for values in kept)


def test_attach_masks_the_weights_of_any_optimizer_once():
    model, plan = make()
    for optimizer in (optimizers_of("muon", model, plan)[0], optimizers_of("adamw", model, plan)[0]):
        smupar.attach(model, plan, optimizer)
        smupar.attach(model, plan, [optimizer])
        assert seam_of(optimizer).owners("mask") == [mask_updates]


def check_compiled(model, plan, forward, steps=3):
    """The same loss, gradients and training as the eager twin."""
    twin = copy.deepcopy(model)
    smupar.attach(twin, plan)
    loss, eager = loss_of(forward, tokens_of()), loss_of(twin, tokens_of())
    loss.backward()
    eager.backward()
    assert_close(loss, eager)
    assert_close(gradients(model), gradients(twin), rtol=1e-4)
    assert off_mask(model, lambda p: p.grad) == 0
    model.zero_grad()
    twin.zero_grad()
    run, eager_run = (train(net, adamw(net, plan), steps, forward=call) for net, call in ((model, forward), (twin, twin)))
    assert run == pytest.approx(eager_run, rel=1e-4)
    assert off_mask(model, lambda p: p) == 0


# torch's own: importing inductor defines script methods, which torch has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_model_trains_as_eager(backend):
    torch._dynamo.reset()
    model, plan = make()
    check_compiled(model, plan, torch.compile(model, fullgraph=True, backend=backend))


def test_compiled_gpt_trains_as_eager():
    torch._dynamo.reset()
    model, plan = build(GPT_CONFIG)
    check_compiled(model, plan, torch.compile(model, fullgraph=True, backend="aot_eager"))


def test_compiled_model_keeps_its_factors_beside_a_plain_twin_that_was_compiled_before():
    torch._dynamo.reset()
    tokens = tokens_of()[0]
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):  # torch's default
        torch.compile(Net(), backend="eager")(tokens)
        model, _ = make()
        assert_close(torch.compile(model, backend="eager")(tokens), model(tokens))


def test_attach_and_param_groups_take_a_compiled_model():
    torch._dynamo.reset()
    model, plan = make()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = compiled(tokens_of()[0])
    smupar.attach(compiled, plan)  # rebuilds the factors, which the compiled forward must still apply
    assert torch.equal(compiled(tokens_of()[0]), before)
    groups, plain = (smupar.param_groups(net, plan, lr=1e-2) for net in (compiled, model))
    assert [group["lr"] for group in groups] == [group["lr"] for group in plain]
    assert [list(map(id, group["params"])) for group in groups] == [list(map(id, group["params"])) for group in plain]


def test_gradients_stay_masked_where_conversions_swap_parameters():
    model, plan = make()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    optimizer = adamw(model, plan)
    train(model, optimizer, 2)
    assert off_mask(model, lambda parameter: parameter) == 0
