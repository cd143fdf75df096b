"""The updates of the optimizers that a stack supports, as functions of tensors with a leading dimension of models.

torch's own optimizers take no vector of learning rates, so the updates are written out here. They give the same numbers as
torch.optim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from smupar.plan.facts.optimizers import MUON_COEFFICIENTS, MUON_EPS, MUON_STEPS, OptimizerFacts

State = list[Tensor]
Betas = tuple[float, float]

# These functions return what an optimizer subtracts from a weight, and change the optimizer's state in place.


def _adam(state: State, grad: Tensor, lr: Tensor, eps: Tensor, number: Tensor, betas: Betas, momentum: float) -> Tensor:
    (mean, square), (beta1, beta2) = state, betas
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    correction1, correction2 = 1 - beta1**number, 1 - beta2**number
    return lr / correction1 * mean / (square.sqrt() / correction2.sqrt() + eps)


def adam_in_place(
    param: Tensor,
    grad: Tensor,
    state: State,
    lr: Tensor,
    decay: Tensor,
    eps: Tensor,
    number: Tensor,
    alive: Tensor,
    betas: Betas,
    facts: OptimizerFacts,
) -> None:
    """Updates the weights of every model that is alive, decay included, by the kernel of torch's fused optimizers. This reads
    each tensor once, where ``_adam`` reads them a dozen times."""
    kernel: Callable[..., None] = torch._fused_adamw_ if facts.decoupled else torch._fused_adam_
    numbers = zip(lr.tolist(), decay.tolist(), eps.tolist(), alive.tolist(), strict=True)
    for model, (lr_of_model, decay_of_model, eps_of_model, is_alive) in enumerate(numbers):
        if is_alive:
            mean, square = (average[model] for average in state)
            kernel(
                [param[model]],
                [grad[model].contiguous()],
                [mean],
                [square],
                [],
                [number[model]],
                lr=lr_of_model,
                beta1=betas[0],
                beta2=betas[1],
                weight_decay=decay_of_model,
                eps=eps_of_model,
                amsgrad=False,
                maximize=False,
            )


def _sgd(state: State, grad: Tensor, lr: Tensor, eps: Tensor, number: Tensor, betas: Betas, momentum: float) -> Tensor:
    for mean in state:  # the state is empty without momentum
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
    return math.sqrt(max(1.0, grad.shape[-2] / grad.shape[-1])) * lr * _orthogonalised(grad.lerp(mean, momentum))


# Name of the optimizer -> function (state, gradient, LR, epsilon, step, betas, momentum) -> what to subtract from the weight
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
