"""Forward passes are looked at once, as long as nothing that decides them changes."""

import torch
from torch import nn

import smupar
from tests.support.models import on_meta

TOKENS = torch.arange(12).reshape(2, 6)
PASSES = []  # the widths of all forward passes


class Net(nn.Module):
    def __init__(self, width, *, is_gated=False):
        super().__init__()
        self.is_gated = is_gated
        self.table, self.gate, self.mix = nn.Embedding(40, width), nn.Linear(width, 1), nn.Linear(width, width)
        self.head = nn.Linear(width, 40)

    def forward(self, tokens):
        x = self.table(tokens)
        PASSES.append(x.shape[-1])
        return self.head(self.mix(x) * torch.sigmoid(self.gate(x)) if self.is_gated else self.mix(x) + self.gate(x))


def passes_of(model, base, example=TOKENS):
    """The passes that a plan needs, and the plan."""
    PASSES.clear()
    plan = smupar.make_plan(model, base=base, example=example)
    return list(PASSES), plan


def test_second_plan_of_equal_models_runs_no_forward_pass():
    first = passes_of(on_meta(Net, 64), on_meta(Net, 16))
    again = passes_of(on_meta(Net, 64), on_meta(Net, 16))
    assert (first[0], again[0]) == ([16, 64], [])
    assert again[1].diff(first[1]) == []


def test_whatever_may_change_a_pass_is_looked_at_again():
    model, base = Net(64), Net(16)
    passes_of(model, base)
    assert passes_of(model, base)[0] == []
    assert passes_of(model, base, TOKENS + 1)[0] == [16, 64]
    with torch.no_grad():
        base.mix.bias[0] += 1
    assert passes_of(model, base)[0] == [16]
    base.is_gated = True
    assert passes_of(model, base)[0] == [16]
    base.mix.register_forward_hook(lambda *_: None)
    assert passes_of(model, base)[0] == passes_of(model, base)[0] == [16]
    for own, again in ((lambda: lambda x: x, [16]), (closure, [16, 64])):
        model.own = own()
        passes_of(model, base)
        model.own = own()
        assert passes_of(model, base)[0] == again


def closure(size=3):
    return lambda x: x + size


def test_coordinate_check_looks_once():
    PASSES.clear()
    batches = [TOKENS] * 2
    settings = {"base_width": 16, "widths": [16, 32], "steps": 2, "progress": False}

    def loss(model, batch):
        return model(batch).square().mean()

    def count(seeds, **more):
        PASSES.clear()
        smupar.coord_check(Net, loss, batches, seeds=seeds, **settings, **more)
        return len(PASSES)

    looks = [count(seeds, example=TOKENS + 2) - count(seeds, roles={"gate.weight": "hidden"}) for seeds in (1, 3)]
    assert looks == [2, 0]
