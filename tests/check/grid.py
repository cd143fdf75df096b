"""Small coordinate checks: models, batches, and readings by where they were taken."""

import math
from dataclasses import replace
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.check.coordinates.readings import Reading, Y
from smupar.check.coordinates.verdict import Slope
from tests.support.loops import loss_of
from tests.support.models import Conv1D


class Fork(nn.Module):
    """``left`` and ``right`` read the same input: the gradient of each through itself is not the gradient of that input."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        shared = self.first(x).tanh()
        return self.head(self.left(shared).tanh() + self.right(shared).tanh())


class Tied(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.inner = nn.Linear(width, width)
        self.readout = nn.Linear(width, 11, bias=False)
        self.readout.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        return self.readout(x + self.inner(x).tanh())


class Transposed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.inner = Conv1D(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.inner(self.first(x).tanh()).tanh())


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = F.relu(self.first(x))
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.head(x)


class CNN(nn.Module):
    def __init__(self, width, inplace=False):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.relu = nn.ReLU(inplace=inplace)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = F.avg_pool2d(self.relu(self.first(x)), 2)
        x = self.relu(self.conv2(self.relu(self.conv1(x))))
        return self.head(x.mean((2, 3)))


def batches_of(num, shape=(6,), *, num_classes=3, size=32):
    rng = torch.Generator().manual_seed(0)
    return [(torch.randn(size, *shape, generator=rng), torch.randint(num_classes, (size,), generator=rng)) for _ in range(num)]


def token_batches(num, *, vocab=11, shape=(4, 5)):
    rng = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(vocab, shape, generator=rng) for _ in range(2)) for _ in range(num)]


def check(make_model=Fork, loss_fn=loss_of, batches=None, **changes):
    """A check of seconds; every argument can be changed."""
    settings = {"base_width": 8, "widths": (16,), "densities": (1, 0.5), "steps": 1, "seeds": 1, "progress": False, **changes}
    if batches is None:
        batches = batches_of(max(1, settings["steps"]))
    return smupar.coord_check(make_model, loss_fn, batches, **settings)


def size_of(report, place, quantity, *, step=1, rule="smupar", density=0.5, width=16, seed=0):
    wanted = (place, quantity, step, rule, density, width, seed)
    fields = attrgetter("place", "quantity", "step", "rule", "density", "width", "seed")
    (found,) = [measured for measured in report.readings if fields(measured) == wanted]
    return found


def slope_of(report, rule, place, quantity=Y, *, step=1, axis="density"):
    fields = attrgetter("rule", "place", "quantity", "step", "axis")
    (found,) = [slope.slope for slope in report.slopes if fields(slope) == (rule, place, quantity, step, axis)]
    return found


def twin(make_model, *, density=0.5, **settings):
    """The model that coord_check built for seed 0 at width 16, base 8, and its plan."""
    torch.manual_seed(0)
    model = make_model(16)
    plan = smupar.parameterize(model, base=make_model(8), density=density, seed=0, reset=False, **settings)
    return model, plan


def trained_once(model, plan, batch, optimizer, lr):
    """One step; the weights before it."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    stepper = optimizer(smupar.param_groups(model, plan, lr=lr, weight_decay=0.0, optimizer=optimizer))
    loss_of(model, batch).backward()
    stepper.step()
    return before


def reading(density, rms, *, seed=0, place="layer", quantity=Y, kind="layer", role="hidden", width=64, step=1, rule="smupar"):
    return Reading(rule, width, density, seed, step, place, kind, role, quantity, rms, rms)


def power_law(exponent, *, xs=(1.0, 0.5, 0.25, 0.125), axis="density", **where):
    """Sizes 3 x ** exponent."""
    if axis == "width":
        return [replace(reading(1.0, 3 * x**exponent, **where), width=x) for x in xs]
    return [reading(x, 3 * x**exponent, **where) for x in xs]


def one_slope(exponent, ci=math.nan, **changes):
    made = Slope("smupar", "density", "layer", "layer", "hidden", Y, 1, width=64, slope=exponent, ci=ci, num_seeds=3)
    return replace(made, **changes)
