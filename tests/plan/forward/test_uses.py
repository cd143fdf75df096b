"""A look at a forward pass: what it records, and that it changes nothing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.plan.forward.run_copy import CannotRunError
from smupar.plan.forward.watcher import watch
from smupar.plan.roles.evidence import evidence_of
from smupar.plan.roles.parameters import view_parameters
from tests.plan.roles.nets import TOKENS
from tests.support.models import VOCAB, TokenNet, on_meta

TEXT = TOKENS % VOCAB


def usage(make, example, width=32, base_width=8):
    tensors = view_parameters(make(width), make(base_width), None)
    found = evidence_of(tensors, make(width), make(base_width), None, example).usage
    assert found is not None
    return found


class Stateful(nn.Module):
    """Everything that a forward pass may leave behind: running averages, a counter, random numbers, a cache, a mode."""

    def __init__(self, width):
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.num_calls, self.cache = 0, []

    def forward(self, x):
        self.calls += 1
        self.num_calls += 1
        self.cache.append(x)
        return self.head(F.dropout(self.norm(self.stem(x)), 0.5)) + torch.rand(())


@pytest.mark.parametrize("training", [True, False])
def test_look_leaves_model_base_example_and_random_state_alone(training):
    model, base, x = Stateful(32).train(training), Stateful(8).train(training), torch.randn(4, 8)
    before = [copy.deepcopy(net.state_dict()) for net in (model, base)]
    versions = [parameter._version for parameter in (*model.parameters(), *base.parameters(), x)]
    state = torch.get_rng_state()
    smupar.make_plan(model, base=base, example=x)
    assert torch.equal(torch.get_rng_state(), state)
    for net, values in zip((model, base), before, strict=True):
        torch.testing.assert_close(net.state_dict(), values, rtol=0, atol=0)
        assert (net.num_calls, net.cache, net.training, net.norm.training) == (0, [], training, training)
        assert not net._forward_hooks
        assert not net._forward_pre_hooks
    assert [parameter._version for parameter in (*model.parameters(), *base.parameters(), x)] == versions
    assert torch.backends.mha.get_fastpath_enabled()


def test_plan_with_an_example_does_not_depend_on_values_or_device():
    plan = smupar.make_plan(TokenNet(32), base=TokenNet(8), example=TEXT)
    assert plan.rows == smupar.make_plan(TokenNet(32), base=TokenNet(8)).rows
    with_meta = smupar.make_plan(on_meta(TokenNet, 32), base=on_meta(TokenNet, 8), example=TEXT)
    assert plan.diff(with_meta) == []


class Keywords(TokenNet):
    def forward(self, tokens, *, scale=1.0, mask=None):
        return {"logits": super().forward(tokens * (mask if mask is not None else 1)) * scale}


EXAMPLES = {
    "a tensor": TEXT,
    "a tuple": (TEXT,),
    "a list": [TEXT],
    "a dict": {"tokens": TEXT, "scale": 2.0, "mask": TEXT > 0},
    "a tensor on meta": TEXT.to("meta"),
}


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_example_may_be_a_tensor_arguments_or_keyword_arguments(example):
    found = usage(Keywords, example)
    assert found.uses["head.weight"].makes_output
    assert found.uses["mix.weight"].is_inside
    assert not found.uses["mix.weight"].makes_output
    assert found.uses["embedding.weight"].looked_up == {0}


def test_large_model_is_looked_at_without_values():
    # More than fifty million entries: the copy has no memory.
    def make(width):
        return nn.Sequential(nn.Embedding(VOCAB, width), nn.Linear(width, width, bias=False), nn.Linear(width, VOCAB))

    scaling = {"0.weight": (1,), "1.weight": (0, 1), "2.weight": (1,), "2.bias": ()}
    found = watch(on_meta(make, 8192), TEXT, scaling=scaling, reads={})
    assert [product.in_dims for product in found.uses["1.weight"].products] == [(1,)]
    assert found.uses["2.weight"].makes_output
    with pytest.raises(CannotRunError, match="without values"):
        watch(on_meta(make, 8192), TEXT.float(), scaling=scaling, reads={})


# Residual sums


class PreNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.mix(self.norm(x))
        x += self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x)


class Parallel(PreNorm):
    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.norm(x)
        return self.head(x + self.mix(y) + self.down(F.gelu(self.up(y))))


class PostSum(PreNorm):
    """The branches are added to each other first."""

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head((self.mix(x) + self.down(F.gelu(self.up(x)))) + x)


class NoResidual(PreNorm):
    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.mix(x) + self.down(F.gelu(self.up(x))))


RESIDUALS = {
    "pre-norm": (PreNorm, [("mix",), ("down",)]),
    "parallel": (Parallel, [("mix",), ("down",)]),
    "branches summed first": (PostSum, [("down", "mix")]),
    "none": (NoResidual, []),
}


@pytest.mark.parametrize(("make", "branches"), RESIDUALS.values(), ids=RESIDUALS)
def test_residual_sums_name_the_modules_that_end_the_branch(make, branches):
    assert [residual.ends for residual in usage(make, TEXT).residuals] == branches


# Attention, by what is done and not by names


class Scores(nn.Module):
    def __init__(self, width, fused=False):
        super().__init__()
        self.embed, self.left, self.right = nn.Embedding(VOCAB, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, tokens):
        x = self.embed(tokens)
        return (self.left(x) @ self.right(x).mT).softmax(-1) @ x


def test_scores_whose_softmax_weighs_values_are_attention():
    found = usage(Scores, TEXT)
    assert [found.events[number].sizes for number in found.attention] == [(8,)]
    assert not usage(TokenNet, TEXT).attention


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_followed(layer):
    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.rnn, self.head = layer(8, width, batch_first=True), nn.Linear(width, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    found = usage(Net, torch.randn(2, 5, 8))
    assert {product.reads_input for product in found.uses["rnn.weight_ih_l0"].products} == {True}
    assert {product.in_dims for product in found.uses["rnn.weight_hh_l0"].products} == {(1,)}
    assert found.uses["head.weight"].makes_output
    assert found.uses["rnn.weight_ih_l0"].is_inside


def test_transformer_layers_of_torch_are_followed():
    def make(width):
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        return nn.Sequential(nn.Embedding(VOCAB, width), layer, nn.Linear(width, 3))

    found = usage(make, TEXT)
    weights = [name for name in found.uses if name.endswith("weight") and "norm" not in name and name != "0.weight"]
    assert all(found.uses[name].products for name in weights)
    assert {product.in_dims for product in found.uses["1.self_attn.in_proj_weight"].products} == {(1,)}
    assert [residual.ends for residual in found.residuals] == [("1.self_attn",), ("1.linear2",)]


class Spectral(nn.Module):
    """A complex matrix for each frequency, stored as real and imaginary parts, as in a Fourier neural operator."""

    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(2, width), nn.Linear(2 * width, 3)
        self.modes = nn.Parameter(torch.randn(width, 2 * width, 4, 2))

    def forward(self, x):
        waves = torch.fft.rfft(self.first(x), dim=1)
        waves = torch.einsum("bki,iok->bko", waves, torch.view_as_complex(self.modes))
        return self.last(torch.fft.irfft(waves, dim=1))


def test_complex_views_of_a_parameter_are_followed():
    plan = smupar.make_plan(Spectral(32), base=Spectral(8), example=torch.randn(2, 6, 2))
    assert plan["modes"].role == "hidden"
    assert plan["modes"].in_dims == (0,)
