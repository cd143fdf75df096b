"""Two processes with gloo, as torchrun would start them."""

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import smupar

WORLD = 2


def on_two_ranks(work, folder, *args):
    """What ``work(rank, *args)`` returns, on rank 0 and on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        mp.spawn(_on_a_rank, args=(work, str(folder), args), nprocs=WORLD)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD)]


def _on_a_rank(rank, work, folder, args):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", smupar.PlanWarning)  # a tiny model has few weights per neuron
    torch.manual_seed(rank)  # each rank has a global RNG of its own
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        torch.save(work(rank, *args), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def full(tensor):
    """A copy of the whole tensor, however it is sharded."""
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def share_of(rows, rank):
    """All rows of a batch, or a rank's part of them."""
    return rows if rank is None else rows.chunk(WORLD)[rank]


def built(layout, make, width, base_width):
    """A model in a layout, with memory in which nothing is initialised, and its base."""
    with torch.device("meta"):
        model, base = make(width), make(base_width)
    if layout == "fsdp":
        fully_shard(model)
    return model.to_empty(device="cpu"), base


def wrapped(layout, model):
    """What a loop calls forward on."""
    return DistributedDataParallel(model) if layout == "ddp" else model
