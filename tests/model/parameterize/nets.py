"""A net with every role, parameterized, and what was added to it."""

import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.lm.config.run_config import ModelConfig, RunConfig
from tests.support.loops import make_step, tokens_of
from tests.support.models import VOCAB, on_meta

HIDDEN = ("hidden.0.weight", "hidden.1.weight")


GPT_CONFIG = RunConfig(model=ModelConfig(width=32, depth=1, head_dim=8, vocab_size=VOCAB), base_width=16, sparsity=0.75)


class Net(nn.Module):
    """Every role with biases: lookup, pre-norm residual hidden layers, an untied head."""

    def __init__(self, width=32, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.hidden, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return self.head(x)


class Outer(nn.Module):
    """A model inside another one."""

    def __init__(self, width=32):
        super().__init__()
        self.inner = Net(width)

    def forward(self, tokens):
        return self.inner(tokens)


def make(*, model=None, global_seed=0, **settings):
    """A parameterized Net and its plan: width 32 against 16, a quarter of the hidden weights kept."""
    if model is None:
        torch.manual_seed(global_seed)
        model = Net()
    settings = {"base": on_meta(Net, 16), "density": 0.25, "alpha_input": 5.0, "alpha_output": 3.0, **settings}
    return model, smupar.parameterize(model, **settings)


def train(model, optimizers, steps, forward=None):
    """The losses; ``forward`` may be the model as it was compiled."""
    losses = [make_step(model if forward is None else forward, optimizers, tokens_of(step)) for step in range(steps)]
    model.zero_grad()
    return losses


def masks_of(model):
    return {key.removesuffix("_mask"): mask for key, mask in model.state_dict().items() if key.endswith("_mask")}


def off_mask(model, tensor_of):
    """Largest size of ``tensor_of(parameter)`` where the mask is False, over all sparse parameters."""
    parameters, masks = dict(model.named_parameters()), masks_of(model)
    assert masks
    return max(tensor_of(parameters[name])[~mask].abs().max().item() for name, mask in masks.items())


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def frozen_state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def hooks_of(model):
    """All hooks of all modules and parameters."""
    hooks = {
        (path, kind): list(found.values())
        for path, module in model.named_modules()
        for kind, found in vars(module).items()
        if kind.endswith("_hooks") and isinstance(found, dict)
    }
    for name, parameter in model.named_parameters():
        hooks[name, "gradient"] = list((parameter._post_accumulate_grad_hooks or {}).values())
    return hooks


def assert_close(found, expected, *, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def raw_memory(model):
    """to_empty, with worst-case leftovers in the memory; through .data, as the allocator leaves no trace on a tensor."""
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


class Tables(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(30, width, padding_idx=3)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 7)

    def forward(self, ids):
        return self.head(self.hidden(self.tokens(ids)).relu())
