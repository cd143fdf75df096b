"""A small net with its plan and optimizer, and what the audit says about them."""

import pytest
import torch

import smupar
from tests.support.models import MLP

RULES = ("sp", "mup", "smupar", "smupar-init-only", "smupar-lr-only")
PATTERNS = {
    "random": 1 / 4,
    "bernoulli": 1 / 4,
    "fan_in": 1 / 4,
    "2:4": 1 / 2,
    "2:4-transposable": 1 / 2,
    "block-16": 1 / 2,
    "neuron": 1 / 2,
}


def mlp(density=1 / 2, dtype=torch.float32, width=64, **settings):
    torch.manual_seed(0)  # biases keep the values they were built with
    model = MLP(width, 2).to(dtype)
    settings = {"alpha_input": 9.17, "alpha_output": 1.5, **settings}
    return model, smupar.parameterize(model, base=MLP(16, 2), density=density, **settings)


def adamw(model, plan, lr=0.01, **options):
    return torch.optim.AdamW(smupar.param_groups(model, plan, lr=lr, weight_decay=0.1, **options))


def ready(*args, **settings):
    model, plan = mlp(*args, **settings)
    return model, plan, adamw(model, plan)


def train(model, *optimizers):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    model(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def findings(model, plan, optimizer=None, **options):
    with pytest.raises(smupar.AuditError) as error:
        smupar.audit(model, plan, optimizer, **options)
    assert isinstance(error.value, ValueError)
    lines = [str(finding) for finding in error.value.findings]
    assert all(line in str(error.value) for line in lines[:20])
    return lines


def only_finding(model, plan, optimizer=None, **options):
    (line,) = findings(model, plan, optimizer, **options)
    return line
