"""The training loop: ``train(config)`` builds, trains and reports one run."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from smupar.auditing import audit
from smupar.lm import data
from smupar.lm.config import RunConfig
from smupar.lm.gpt import GPT, build
from smupar.optim import param_groups

_WARMUP_SHARE = 0.1
_FINAL_SHARE = 0.1  # linear decay to a tenth of the peak, as in the paper
_VALID_BATCHES = 20


@dataclass(frozen=True)
class Summary:
    sparsity: float  # of the hidden weights
    train_loss: float  # mean of the last 5 % of the steps, in nats per byte
    valid_loss: float
    seconds: float


def train(config: RunConfig) -> Summary:
    """Trains one GPT as configured; prints its plan, then a progress bar with the loss."""
    start = time.perf_counter()
    train_text, valid_text = data.split(data.standard_library())
    model, plan = build(config)
    print(plan)
    optimizer = torch.optim.AdamW(param_groups(model, plan, lr=config.lr, weight_decay=config.weight_decay), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, config.steps))
    audit(model, plan, optimizer)
    losses: list[float] = []
    steps = tqdm(
        range(config.steps), desc="training", unit="step", file=sys.stdout, mininterval=0.5 if sys.stdout.isatty() else 5
    )
    for step in steps:
        inputs, targets = data.batch(
            train_text, seed=config.seed, step=step, batch_size=config.batch_size, seq_len=config.seq_len
        )
        loss = next_token_loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss is {losses[-1]} at step {step}: lower --lr (now {config.lr:g})")
        steps.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    tail = losses[-max(1, config.steps // 20) :]
    return Summary(
        sparsity=plan.hidden_sparsity,
        train_loss=sum(tail) / len(tail),
        valid_loss=validate(model, valid_text, config),
        seconds=time.perf_counter() - start,
    )


def lr_share(step: int, steps: int) -> float:
    """Warm-up over the first tenth, then linear decay to a tenth."""
    warmup = max(1, int(_WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 1 - (1 - _FINAL_SHARE) * (step - warmup) / max(1, steps - warmup)


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def validate(model: GPT, text: Tensor, config: RunConfig) -> float:
    total = 0.0
    for step in range(_VALID_BATCHES):
        inputs, targets = data.batch(text, seed=0, step=step, batch_size=config.batch_size, seq_len=config.seq_len)
        total += next_token_loss(model, inputs, targets).item()
    return total / _VALID_BATCHES
