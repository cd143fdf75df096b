"""Fused attention, alone and for the models of a stack, against the formula in double precision."""

from __future__ import annotations

import pytest
import torch

from smupar.execute.attention_kernels import fused_alibi, fused_attention
from smupar.execute.stack.loss import gradients_of_sum
from smupar.lm.model.gpt import alibi_slopes

MODELS, BATCH, HEADS, SIZE = 3, 2, 6, 16


def heads(length, *leading):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*leading, BATCH, HEADS, length, SIZE, generator=rng) for _ in range(3))
    return q / SIZE**0.5, k, v


def bias_of(length, dtype=torch.float64):
    position = torch.arange(length, dtype=dtype)
    distance = position[None, :] - position[:, None]
    return (alibi_slopes(HEADS).to(dtype)[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))


def exact(q, k, v, bias):
    return torch.softmax(q.double() @ k.double().mT + bias, -1) @ v.double()


def distance(ours, theirs):
    return ((ours.double() - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("length", [1, 40, 129, 300])
def test_alibi_in_the_heads_is_alibi_in_the_bias(length):
    q, k, v = heads(length)
    ours = fused_alibi(q, k, v, alibi_slopes(HEADS))
    assert ours.shape == v.shape
    assert distance(ours, exact(q, k, v, bias_of(length))) < 1e-5


def test_alibi_in_bf16_is_as_exact_as_a_bias_in_bf16():
    length = 1000  # distances beyond 256 have no place in bf16
    q, k, v = (tensor.bfloat16() for tensor in heads(length))
    theirs = exact(q, k, v, bias_of(length))
    with_bias = distance(fused_attention(q, k, v, bias_of(length, torch.bfloat16)), theirs)
    assert distance(fused_alibi(q, k, v, alibi_slopes(HEADS)), theirs) < max(1.1 * with_bias, 4e-3)


def fused(kind, length):
    slopes = alibi_slopes(HEADS)
    return {
        "causal": lambda q, k, v: fused_attention(q, k, v, None),
        "bias": lambda q, k, v: fused_attention(q, k, v, bias_of(length, torch.float32)),
        "heads": lambda q, k, v: fused_alibi(q, k, v, slopes),
    }[kind]


@pytest.mark.parametrize("kind", ["causal", "bias", "heads"])
@pytest.mark.parametrize("how", ["alone", "stack", "stack, compiled"])
def test_values_and_gradients_are_those_of_the_formula(kind, how):
    length = 40
    names, tensors = ("q", "k", "v"), heads(length, MODELS)
    bias = bias_of(length).masked_fill(bias_of(length) > float("-inf"), 0) if kind == "causal" else bias_of(length)
    weights = torch.randn(BATCH, HEADS, length, SIZE, generator=torch.Generator().manual_seed(1))

    def loss(q, k, v):
        return (fused(kind, length)(q, k, v) * weights).sum()

    def losses(leaves):
        ordered = tuple(leaves[name] for name in names)
        if how == "alone":
            return torch.stack([loss(*own) for own in zip(*ordered, strict=True)])
        return torch.vmap(loss)(*ordered)

    def ours(*inputs):
        return gradients_of_sum(losses, dict(zip(names, inputs, strict=True)))

    grads, values = (torch.compile(ours, backend="aot_eager", fullgraph=True) if "compiled" in how else ours)(*tensors)
    exactly = [tensor.double().requires_grad_() for tensor in tensors]
    theirs = (exact(*exactly, bias) * weights).sum((1, 2, 3, 4))
    assert distance(values, theirs) < 1e-5
    for name, grad in zip(names, torch.autograd.grad(theirs.sum(), exactly), strict=True):
        assert distance(grads[name], grad) < 1e-5


def test_models_of_a_stack_may_share_keys_and_values():
    q, k, v = heads(10, MODELS)
    ours = torch.vmap(lambda q, v: fused_attention(q, k[0], v, None), in_dims=(0, 1))(q, v.movedim(0, 1))
    theirs = torch.stack([fused_attention(q[i], k[0], v[i], None) for i in range(MODELS)])
    torch.testing.assert_close(ours, theirs)
