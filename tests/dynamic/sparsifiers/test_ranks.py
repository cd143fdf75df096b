"""Masks that move under DDP and FSDP2, on two gloo processes with different data: as in one process with all of it.

In float64, where sums in another order do not change which weights are chosen.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import smupar
from tests.support.models import VOCAB, TokenNet
from tests.support.ranks import built, full, on_two_ranks, share_of, wrapped

STEPS, WIDTH = 9, 15  # odd sizes, so that shards are uneven
LAYOUTS = ["ddp", "fsdp", "fsdp afterwards"]
RUNS = {
    "RigL": ("RigL", 0.25, {"every": 2, "stop": 8, "drop_fraction": 0.5}),
    "RigL, restarted": ("RigL", 0.25, {"every": 2, "stop": 8, "drop_fraction": 0.5, "restart_bias_correction": True}),
    "SET": ("SET", 0.25, {"every": 2, "stop": 8, "drop_fraction": 0.5}),
    "GMP": ("GMP", 1.0, {"density": smupar.erk(0.25), "every": 2, "stop": 7}),
    "GMP, global": ("GMP", 0.5, {"density": 0.25, "every": 2, "stop": 7, "pool": "global", "correction": "fixed"}),
    "IMP": ("IMP", 1.0, {"density": 0.25, "rounds": 2, "every": 3, "rewind": 1}),
}


class Net(TokenNet):
    def forward(self, tokens):
        return super().forward(tokens).log_softmax(-1)  # FSDP2 warns of outputs that are views, as a layer's are


def batch(step, rank=None):
    """The whole batch, or a rank's half of it, in two micro-batches."""
    tokens = torch.randint(VOCAB, (16, 7), generator=torch.Generator().manual_seed(step))
    return share_of(tokens, rank).chunk(2)


def sync(forward, needed):
    if isinstance(forward, DistributedDataParallel):
        forward.require_backward_grad_sync = needed  # what no_sync() sets
    elif hasattr(forward, "set_requires_gradient_sync"):
        forward.set_requires_gradient_sync(needed)


def run(name, layout, rank=None):
    """All masks after every step, and everything at the end."""
    kind, density, settings = RUNS[name]
    model, base = built(layout, lambda width: Net(width).double(), WIDTH, 5)
    plan = smupar.parameterize(model, base=base, density=density, seed=3, reset=True)
    if layout == "fsdp afterwards":
        fully_shard(model)
        smupar.attach(model, plan)
    forward = wrapped(layout, model)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=1e-2, weight_decay=0.1))
    sparsifier = getattr(smupar, kind)(forward, plan, optimizer, **settings)
    history, moved = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part, tokens in enumerate(batch(step, rank)):
            sync(forward, part == 1 or step % 4 == 1)  # gradients are reduced at the last micro-batch, or at every one
            (F.cross_entropy(forward(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        moved.append(sparsifier.step())
        history.append({key: full(mask) for key, mask in model.state_dict().items() if key.endswith("_mask")})
    weights = {key: full(parameter) for key, parameter in model.named_parameters()}
    return {"history": history, "moved": moved, "weights": weights, "densities": sparsifier.densities}


def work(rank):
    return {layout: {name: run(name, layout, rank) for name in RUNS} for layout in LAYOUTS}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each rank found: one start of two processes for all."""
    return on_two_ranks(work, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request, both):
    return [found[request.param] for found in both]


@pytest.fixture(scope="module")
def single():
    return {name: run(name, "one process") for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_ranks_choose_the_masks_of_one_process_with_all_data(ranks, single, name):
    expected = single[name]
    assert sum(expected["moved"]) > 1
    for seen in ranks:
        assert seen[name]["moved"] == expected["moved"]
        assert seen[name]["densities"] == expected["densities"]
        for step, (found, masks) in enumerate(zip(seen[name]["history"], expected["history"], strict=True)):
            assert found.keys() == masks.keys() == {"mix.weight_mask", "up.weight_mask", "down.weight_mask"}
            assert all(torch.equal(found[key], mask) for key, mask in masks.items()), step


@pytest.mark.parametrize("name", RUNS)
def test_ranks_train_as_one_process_and_nothing_leaves_the_mask(ranks, single, name):
    for seen in ranks:
        torch.testing.assert_close(seen[name]["weights"], single[name]["weights"], rtol=1e-6, atol=1e-9)
        for key, mask in seen[name]["history"][-1].items():
            assert not seen[name]["weights"][key.removesuffix("_mask")][~mask].any()
