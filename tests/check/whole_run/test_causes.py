"""Runs of 400 steps whose outcome is known: healthy ones raise no alarm, and late faults are named. Their numbers are in
docs/lab/coordinate-checks.md."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from tests.support.models import Residual

STEPS, LR, VOCAB, SIZE = 400, 2**-5, 64, 128
pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PairReader(Residual):
    """Three blocks, which read two tokens."""

    def __init__(self, width):
        super().__init__(width, (Block(width) for _ in range(3)), vocab=VOCAB)

    def embed(self, tokens):
        return self.embedding(tokens[:, 0]) + self.embedding(tokens[:, 1]).roll(1, -1)


def batches():
    """A random table of pairs of tokens, with 30 % of random answers."""
    table = torch.randint(VOCAB, (VOCAB, VOCAB), generator=torch.Generator().manual_seed(1))
    for step in range(STEPS):
        rng = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (SIZE, 2), generator=rng)
        is_random = torch.rand(SIZE, generator=rng) < 0.3
        yield tokens, torch.where(is_random, torch.randint(VOCAB, (SIZE,), generator=rng), table[tokens[:, 0], tokens[:, 1]])


def falling(optimizer, to=0.0):
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(10 * (step + 1) / STEPS, 1) * (1 - (1 - to) * step / STEPS)
    )


def check(**changes):
    settings = {"widths": [64], "densities": [1, 1 / 8], "lr": LR, "weight_decay": 0.2, "seeds": 1, "scheduler": falling}
    given = {"base_width": 32, "horizon": STEPS, "progress": False, **settings, **changes}
    return smupar.coord_check(PairReader, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batches(), **given)


HEALTHY = [
    *({"seeds": [seed], "weight_decay": decay, "densities": [1, density], "lr": lr}
      for seed in (0, 1) for decay in (0.2, 0.4) for density in (1 / 4, 1 / 8) for lr in (LR, LR / 2)),
    *({"seeds": [2], "weight_decay": decay, "lr": lr} for decay in (0.1, 0.2) for lr in (LR, LR / 2)),
]  # fmt: skip


@pytest.mark.parametrize("settings", HEALTHY, ids=str)
def test_healthy_run_passes(settings):
    report = check(**settings)
    assert report.ok, report.explain()
    assert all(diagnosis.cause == "thin" for diagnosis in report.diagnoses)


class StopsDecay(torch.optim.AdamW):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == STEPS // 2:
            for group in self.param_groups:
                group["weight_decay"] = 0.0
        return super().step(closure)


def groups(model, plan, **settings):
    return smupar.param_groups(model, plan, lr=LR, **{"weight_decay": 0.2, **settings})


def coupled_in_a_layer(model, plan):
    made, odd = groups(model, plan), model.blocks[1].down.weight
    (own,) = [group for group in made if any(parameter is odd for parameter in group["params"])]
    own["params"] = [parameter for parameter in own["params"] if parameter is not odd]
    return torch.optim.AdamW([*made, {**own, "params": [odd], "weight_decay": 0.2, "name": "odd"}])


# What is wrong -> (settings, the cause that is named, whether sizes are wrong within 400 steps)
PLANTED = {
    "no decay": ({"weight_decay": 0.0}, "decay missing", True),
    "decay off at half time": (
        {"optimizer": lambda model, plan: StopsDecay(groups(model, plan))}, "decay stopped", False,
    ),
    "decay of one layer coupled": ({"optimizer": coupled_in_a_layer}, "decay uneven", False),
    "decay of all layers coupled": (
        {"optimizer": lambda model, plan: torch.optim.AdamW(groups(model, plan, decay="coupled"))}, "decay", False,
    ),
    "learning rate that stays at its peak": ({"scheduler": partial(falling, to=1.0)}, "schedule", True),
    "masks that move to the end": (
        {"sparsifier": lambda *parts: smupar.RigL(*parts, every=20, stop=STEPS)}, "masks move", True,
    ),
    "masks that move": ({"sparsifier": lambda *parts: smupar.RigL(*parts, every=20, stop=STEPS // 2)}, "masks moved", True),
    "learning rate eight times too large": ({"lr": 8 * LR}, "few weights", True),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_named(name):
    settings, cause, is_wrong = PLANTED[name]
    report = check(**settings)
    assert next(iter(report.diagnoses)).cause == cause
    assert report.ok == (not is_wrong)
