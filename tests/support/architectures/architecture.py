"""What is known about an architecture that smupar is tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smupar.plan.plan import Plan

VOCAB = 64
HEAD_DIM = 16
LENGTH = 9  # two sequences: 16 tokens to predict
NUM_CLASSES = 8
FIXED = 320  # inner sizes that do not scale; a quarter of them is more than the 64 weights per neuron that the check needs


@dataclass(frozen=True)
class Architecture:
    """A model at any width that is a multiple of the head size, with a loss and batches of about 16 tokens."""

    name: str
    make: Callable[[int], nn.Module]
    batch: Callable[[int], Any]  # seed -> batch
    loss: Callable[[nn.Module, Any], Tensor]
    logits: Callable[[nn.Module, Any], Tensor]
    example: Callable[[Any], Any] = lambda batch: batch  # batch -> what the model is called with
    prepare: Callable[[nn.Module, Plan], None] | None = None  # sets what only the user can set
    roles: dict[str, Any] = field(default_factory=dict)  # answers that differ from what a question without example suggests


def tokens(seed: int, *, num: int = 2, length: int = LENGTH) -> Tensor:
    """Walks on a random graph: each token is followed by one of four others. Token 0, the padding, does not occur."""
    followers = torch.randint(1, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(1000 + seed)
    walk = [torch.randint(1, VOCAB, (num,), generator=rng)]
    for _ in range(length - 1):
        walk.append(followers[walk[-1], torch.randint(4, (num,), generator=rng)])
    return torch.stack(walk, 1)


def labels(seed: int, *shape: int, num_classes: int = NUM_CLASSES) -> Tensor:
    """Random labels, which cannot be learned within a few steps: gradients would vanish with the loss."""
    return torch.randint(num_classes, shape, generator=torch.Generator().manual_seed(2000 + seed))


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3000 + seed))


def settle_all(model: nn.Module, plan: Plan) -> None:
    """For models whose scale cannot be set, with heads of the same size at every width."""
    for reminder in tuple(plan.pending):
        plan.settle(reminder)
