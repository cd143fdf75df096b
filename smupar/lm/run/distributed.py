"""Runs on one process or many: the rank of this process, and how a model is distributed. torchrun starts the processes and sets
the environment variables that this file reads. Without them nothing here has an effect."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from smupar.lm.config.run_config import Execution, RunConfig
from smupar.lm.model.gpt import GPT, on_meta, parameterized
from smupar.lm.run.signals import ended_by_sigint
from smupar.model.factors import no_broadcast
from smupar.plan.plan import Plan
from smupar.refusals import refuse


@dataclass(frozen=True)
class World:
    """The ranks of a run, as one of them sees them."""

    rank: int
    size: int
    device: torch.device
    parallel: Literal["ddp", "fsdp"]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        return self.size > 1 and self.parallel == "fsdp"

    def mean(self, values: Tensor) -> Tensor:
        """The mean over ranks."""
        if self.size > 1:
            dist.all_reduce(values)
            values = values / self.size
        return values

    def any(self, *flags: bool) -> list[bool]:
        """Whether each flag is raised on any rank. All ranks must leave a loop at the same step."""
        if self.size == 1:
            return list(flags)
        raised = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in raised.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def share_of(self, batch_size: int) -> tuple[int, int]:
        """The rows of a batch that belong to this rank, as (from, to)."""
        refuse(
            batch_size % self.size,
            f"batch_size {batch_size} does not divide among {self.size} ranks: choose a multiple of {self.size}",
        )
        num_rows = batch_size // self.size
        return self.rank * num_rows, (self.rank + 1) * num_rows


ALONE = World(0, 1, torch.device("cpu"), "ddp")


@contextlib.contextmanager
def join(how: Execution) -> Iterator[World]:
    """Joins the process group if torchrun started this process."""
    size, rank, local = (
        int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0))
    )
    device = pick_device(how.device, local)
    if size > 1 and not dist.is_initialized():
        with ended_by_sigint():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            yield World(rank, size, device, how.parallel)
            dist.barrier()  # a rank that leaves early would break the others' connections
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo/" in str(error):
                message = f"rank {rank} has lost another rank: see the output of that rank, then start again"
                raise ConnectionError(message) from error
            raise
        finally:
            dist.destroy_process_group()
    else:
        yield World(rank, size, device, how.parallel)


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError("torch sees no GPU")
            device = torch.device("cuda", local_rank if device.index is None else device.index)
            torch.cuda.set_device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} cannot be used here ({str(error).splitlines()[0]}): try --device auto") from error
    return device


def device_name(device: torch.device) -> str:
    """The name of the device in a run's record."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def build_on_device(config: RunConfig, world: World) -> tuple[GPT, Plan]:
    """The parameterized model of a run on this rank's device, sharded under FSDP2. Weights and masks are the same for any
    number of ranks. The model is built on meta, so that no rank ever holds more than its part."""
    model = on_meta(config.model)
    if world.sharded:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if config.dtype == "bf16" else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    try:
        model.to_empty(device=world.device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch has no class of its own for a CPU out of memory
        raise MemoryError(f"the model does not fit into memory ({str(error).splitlines()[0]}): choose a smaller one") from error
    model.tie()
    return model, parameterized(model, config)


def wrap(model: GPT, world: World) -> nn.Module:
    """The module to call in training: the model, or DDP around it if every rank has the whole model."""
    if world.size == 1 or world.sharded:
        return model
    # Buffers are equal on all ranks by construction, so they are not sent at each forward pass.
    no_broadcast(model, (name for name, _ in model.named_buffers()))
    device_ids = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


@contextlib.contextmanager
def accumulate(forward: nn.Module, *, last: bool) -> Iterator[None]:
    """The context for one micro-batch. Ranks exchange gradients only after the last micro-batch of a step."""
    if isinstance(forward, DistributedDataParallel) and not last:
        with forward.no_sync():
            yield
        return
    if isinstance(forward, FSDPModule):
        forward.set_requires_gradient_sync(last)
    yield


def reshard(model: nn.Module) -> None:
    """Restores the shards after a forward pass without a backward pass. FSDP2 leaves full parameters after such a pass."""
    if isinstance(model, FSDPModule):
        model.reshard()
