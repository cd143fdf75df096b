"""How many runs are trained as one stack: as many as fit into memory, or one if that is faster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import torch

from smupar.execute.timing import seconds_of
from smupar.lm.config.run_config import RunConfig
from smupar.lm.data.batches import Corpus, open_text
from smupar.lm.model.cost import estimate
from smupar.lm.run.distributed import device_name
from smupar.lm.run.stack import GPTStack, fastest_attention
from smupar.study.config import EngineName
from smupar.study.stacks.division import Division

_USABLE = 0.8  # share of the free memory
MOST_STACKED = 64  # runs in a stack
_MEASURED_STEPS = 8
_LONG_SECONDS = 600.0


def divide(group: Sequence[RunConfig], engine: EngineName, device: torch.device) -> tuple[Division, GPTStack | None]:
    """Decides how runs are stacked. Also returns the stack of the first runs, if measuring has built it."""
    runs, num_fitting = tuple(config.id for config in group), largest_stack(group[0], device)
    if num_fitting < 1:
        return Division(runs, 0, own_batches=False, device=device_name(device)), None
    # Stacks of equal size, so that the last one does not consist mostly of copies.
    num_stacks = len(group) if engine == "serial" else -(-len(group) // num_fitting)
    stack, size = _faster_stack(group, open_text(group[0]), device, -(-len(group) // num_stacks), measure=engine == "auto")
    return Division(runs, size, stack.own_batches, device_name(device)), stack


def _faster_stack(
    group: Sequence[RunConfig], text: Corpus, device: torch.device, size: int, *, measure: bool
) -> tuple[GPTStack, int]:
    """A stack of ``size`` runs, or of one run if that is faster, and its number of runs."""
    if size == 1:
        return GPTStack(group[:1], text, device), 1
    stacked = GPTStack(group[:size], text, device, own_batches=len({config.seed for config in group}) > 1)
    if not measure:
        return stacked, size
    together = seconds_of_warm_step(stacked, device) / size
    # If steps are compiled, measuring a single run pays off only if the group takes longer than compiling.
    if device.type == "cuda" and sum(config.steps for config in group) * together < _LONG_SECONDS:
        return stacked, size
    single = GPTStack(group[:1], text, device)
    return (stacked, size) if together <= seconds_of_warm_step(single, device) else (single, 1)


def seconds_of_warm_step(stack: GPTStack, device: torch.device) -> float:
    steps = range(_MEASURED_STEPS if device.type == "cuda" else 3)
    return min(seconds_of(partial(stack.step, step), device=device) for step in steps)


def largest_stack(config: RunConfig, device: torch.device, *, share: float = _USABLE) -> int:
    """How many such runs fit into a share of the device's free memory; 0 if not even one does."""
    cost, model = estimate(config), config.model
    # Attention by products keeps its scores in every layer, in fp32 and as weights. On a CPU these scores are counted as well,
    # although fused attention does not keep them, so that stacks are as large as in older studies.
    keeps_scores = device.type == "cpu" or fastest_attention(config, device) == "products"
    scores = 8 * model.depth * model.num_heads * config.batch_size * config.seq_len**2 if keeps_scores else 0
    # Saving copies a stack's state twice in the host's memory.
    copies = 2 * cost.state_bytes if device.type == "cpu" else 0.0
    bytes_of_run = cost.state_bytes + cost.activation_bytes + scores + cost.num_parameters * 8 + copies
    return min(MOST_STACKED, int(share * _free_bytes(device) / bytes_of_run))


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
