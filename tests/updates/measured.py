"""A small net with measured updates, and the trace of a proxy."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import smupar
from tests.support.loops import adamw, make_step, optimizers_of
from tests.support.models import CLASSES, on_meta


class Net(nn.Module):
    """Hidden weights ``blocks.0.weight``, ``blocks.1.weight``, ..., all of one kind."""

    def __init__(self, width=32, depth=2, *, saves=False):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, CLASSES)
        self.saves = saves

    def forward(self, x):
        x = F.relu(self.first(x))
        for block in self.blocks:
            y = checkpoint(block, x, use_reentrant=False) if self.saves else block(x)
            x = x + F.relu(y)
        return self.last(x)


class Attending(nn.Module):
    """Attention that uses its weights without calling their layers, beside a plain layer."""

    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.attention = nn.MultiheadAttention(width, width // 8, batch_first=True)
        self.mix = nn.Linear(width, width)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.first(x)[:, None].expand(-1, 3, -1)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(F.relu(self.mix(x)))[:, 0]


def make(kind=Net, density=0.5, *, width=32, seed=0, rule="smupar", **options):
    """A parameterized model of twice the base width, and its plan."""
    torch.manual_seed(seed)
    model, base = kind(width, **options), on_meta(kind, 16, **options)
    settings = {"delta": kind(64, **options)} if width == 16 else {}
    return model, smupar.parameterize(model, base=base, density=density, seed=seed, rule=rule, **settings)


def ready(*args, **settings):
    """A model, its plan, and an AdamW without decay."""
    model, plan = make(*args, **settings)
    return model, plan, adamw(model, plan, weight_decay=0.0)


def start(model, plan, optimizer, trace=None):
    """Records, or follows a trace."""
    if trace is None:
        return smupar.record_updates(model, plan, optimizer)
    return smupar.follow_updates(model, plan, optimizer, trace=trace)


def started(trace=None, *args, **settings):
    """A model, its plan, its AdamW, and what records its updates or follows a trace."""
    model, plan, optimizer = ready(*args, **settings)
    return model, plan, optimizer, start(model, plan, optimizer, trace)


def batch(step, size=40, shape=(6,)):
    rng = torch.Generator().manual_seed(step)
    return torch.randn(size, *shape, generator=rng), torch.randint(CLASSES, (size,), generator=rng)


def train(model, optimizer, steps, **options):
    for number in steps:
        make_step(model, optimizer, batch(number, **options))


def recorded(steps=6, *, name="adamw", width=16):
    """The trace of a dense proxy of base width."""
    model, plan = make(Net, 1.0, width=width)
    optimizers = optimizers_of(name, model, plan, weight_decay=0.0)
    with smupar.record_updates(model, plan, optimizers) as trace:
        train(model, optimizers, range(steps))
    return trace


def assert_untouched(model):
    """Nothing of this package but what parameterize puts there."""
    assert not [name for name, _ in model.named_buffers() if "smupar_input" in name]
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    assert not [hook for hook in hooks if type(getattr(hook, "__self__", None)).__name__.endswith("Probe")]


def inputs_of(model, names, x):
    """What every layer gets, seen from outside."""
    seen, hooks = {}, []
    for name in names:
        keep = lambda module, args, name=name: seen.__setitem__(name, args[0].detach().double())  # noqa: E731
        hooks.append(model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(keep))
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return seen


def used_rows(x):
    """128 of a layer's inputs: of a batch of 200 every third one, round and round, since 2 divides 200."""
    rows = x.flatten(0, -2)
    return rows[torch.arange(128) * (3 if len(rows) == 200 else 1) % len(rows)]


def rms(x):
    return x.square().mean().sqrt().item()
