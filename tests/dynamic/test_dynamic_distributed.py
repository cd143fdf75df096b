"""Masks that move under DDP and FSDP2, on two gloo processes with different data: as in one process with all of it.

In float64, where sums in another order do not change which weights are chosen.
"""

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import smupar

WORLD, STEPS, VOCAB, WIDTH = 2, 9, 11, 15
RUNS = {
    "RigL": ("RigL", 0.25, {"every": 2, "stop": 8, "drop_fraction": 0.5}),
    "RigL, restarted": ("RigL", 0.25, {"every": 2, "stop": 8, "drop_fraction": 0.5, "restart_bias_correction": True}),
    "SET": ("SET", 0.25, {"every": 2, "stop": 8, "drop_fraction": 0.5}),
    "GMP": ("GMP", 1.0, {"density": smupar.erk(0.25), "every": 2, "stop": 7}),
    "GMP, global": ("GMP", 0.5, {"density": 0.25, "every": 2, "stop": 7, "pool": "global", "correction": "fixed"}),
    "IMP": ("IMP", 1.0, {"density": 0.25, "rounds": 2, "every": 3, "rewind": 1}),
}


class Net(nn.Module):
    """Odd sizes, so that shards are uneven."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + F.gelu(self.mix(self.norm(x)))
        x = self.head(x + self.down(F.gelu(self.up(x))))
        return x.log_softmax(-1)  # FSDP2 warns of outputs that are views, as a layer's are


def batch(step, rank=None):
    """The whole batch, or a rank's half of it, in two micro-batches."""
    tokens = torch.randint(VOCAB, (16, 7), generator=torch.Generator().manual_seed(step))
    return (tokens if rank is None else tokens.chunk(WORLD)[rank]).chunk(2)


def full(tensor):
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def made(layout):
    """A model and its base."""
    with torch.device("meta"):
        model, base = Net().double(), Net(5).double()
    if layout == "fsdp":
        fully_shard(model)
    model.to_empty(device="cpu")
    return model, base


def sync(forward, needed):
    if isinstance(forward, DistributedDataParallel):
        forward.require_backward_grad_sync = needed  # what no_sync() sets
    elif hasattr(forward, "set_requires_gradient_sync"):
        forward.set_requires_gradient_sync(needed)


def run(name, layout, rank=None):
    """All masks after every step, and everything at the end."""
    kind, density, settings = RUNS[name]
    model, base = made(layout)
    plan = smupar.parameterize(model, base=base, density=density, seed=3, reset=True)
    if layout == "fsdp afterwards":
        fully_shard(model)
        smupar.attach(model, plan)
    forward = DistributedDataParallel(model) if layout == "ddp" else model
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


def work(rank, layout, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", smupar.PlanWarning)  # a tiny model has few weights per neuron
    torch.manual_seed(rank)  # each rank has a global RNG of its own
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        torch.save({name: run(name, layout, rank) for name in RUNS}, Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=["ddp", "fsdp", "fsdp afterwards"])
def ranks(request, tmp_path_factory):
    """One start of two processes for each layout."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        mp.spawn(work, args=(request.param, str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


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
