"""The updates of torch.optim written out for a stack, number for number: torch's own take no vector of learning rates.

Each function says what an optimizer takes from a weight, and changes the optimizer's state in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from smupar.plan.optimizers import MUON_COEFFICIENTS, MUON_EPS, MUON_STEPS

State = list[Tensor]
Betas = tuple[float, float]


def _adam(state: State, grad: Tensor, lr: Tensor, eps: Tensor, number: Tensor, betas: Betas, momentum: float) -> Tensor:
    (mean, square), (beta1, beta2) = state, betas
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    correction1, correction2 = 1 - beta1**number, 1 - beta2**number
    return lr / correction1 * mean / (square.sqrt() / correction2.sqrt() + eps)


def _sgd(state: State, grad: Tensor, lr: Tensor, eps: Tensor, number: Tensor, betas: Betas, momentum: float) -> Tensor:
    for mean in state:  # none without momentum
        grad = mean.mul_(momentum).add_(grad)
    return lr * grad


def _lion(state: State, grad: Tensor, lr: Tensor, eps: Tensor, number: Tensor, betas: Betas, momentum: float) -> Tensor:
    (mean,), (beta1, beta2) = state, betas
    update = (beta1 * mean + (1 - beta1) * grad).sign()
    mean.mul_(beta2).add_(grad, alpha=1 - beta2)
    return lr * update


def _muon(state: State, grad: Tensor, lr: Tensor, eps: Tensor, number: Tensor, betas: Betas, momentum: float) -> Tensor:
    (mean,) = state
    mean.lerp_(grad, 1 - momentum)
    update = _orthogonalised(grad.lerp(mean, momentum))
    return math.sqrt(max(1.0, grad.shape[-2] / grad.shape[-1])) * lr * update


# By the name of the optimizer: (state, gradient, LR, epsilon, step, betas, momentum) -> what is taken from the weight
CHANGES: dict[str, Callable[[State, Tensor, Tensor, Tensor, Tensor, Betas, float], Tensor]] = {
    "AdamW": _adam,
    "Adam": _adam,
    "SGD": _sgd,
    "Lion": _lion,
    "Muon": _muon,
}


def _orthogonalised(update: Tensor) -> Tensor:
    """The quintic Newton-Schulz iteration of torch.optim.Muon, on a stack of matrices."""
    a, b, c = MUON_COEFFICIENTS
    x = update.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=MUON_EPS).view(-1, 1, 1)
    for _ in range(MUON_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(update.dtype)
