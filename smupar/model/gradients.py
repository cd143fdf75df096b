"""Masks the gradient of a sparse weight as soon as it is accumulated. On request, keeps the dense gradient (without the mask)
as well."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from smupar.model.sharding import in_process_group, local, num_ranks, zero_off_mask


class DenseGradient:
    """The gradient without the mask, summed over micro-batches, if it is ``wanted``. The sum starts again at 0 if the user
    drops a gradient, for example because it is not finite."""

    wanted = False
    value: Tensor | None = None

    def request(self, wanted: bool) -> None:
        self.wanted, self.value = wanted, None


class MaskGradient(DenseGradient):
    """A post-accumulate hook that masks a gradient. It reads the mask when it runs, so masks may move. The dense gradient is
    that of this rank's batch, or under FSDP2 this rank's shard of the sum over ranks."""

    def __init__(self, module: nn.Module, mask_leaf: str) -> None:
        self.module, self.mask_leaf = module, mask_leaf
        self._summed: Any = None  # weak reference to the gradient that ``value`` belongs to
        self._version = -1

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        mask = getattr(self.module, self.mask_leaf)
        if self.wanted:
            self._add(parameter.grad, mask)
        zero_off_mask(parameter.grad, mask)
        self._version = parameter.grad._version

    def _add(self, grad: Tensor, mask: Tensor) -> None:
        here, before = local(grad), None if self._is_fresh(grad) else self.value
        # On the mask, ``grad`` is the sum over micro-batches. Off the mask it has the last micro-batch alone, since earlier
        # ones were masked, so the sum is kept in ``value``.
        self.value = here.clone() if before is None else torch.where(local(mask), here, before + here)
        self._summed = weakref.ref(grad)

    def _is_fresh(self, grad: Tensor) -> bool:
        """Whether the user dropped the earlier micro-batches, so that the sum must start again. With several ranks, gradient
        tensors may be replaced at any time, so this cannot be told, and the answer is False."""
        if num_ranks() > 1:
            return False
        if self._summed is None or self._summed() is not grad:
            return True
        # zero_grad(set_to_none=False) writes to the gradient and raises its version. DDP and FSDP2 write to it too, even on one
        # rank, and FSDP2 does not raise the version.
        return not in_process_group() and grad._version != self._version + 1  # + 1 for this micro-batch


class PassGradient(DenseGradient):
    """The dense gradient of a compressed layer, which its backward pass computes. A layer may be called several times in one
    pass."""

    _last_pass = -1

    def add(self, part: Tensor, parameter: nn.Parameter) -> None:
        this_pass = torch._C._current_graph_task_id()
        if this_pass != self._last_pass and (parameter.grad is None or not bool(parameter.grad.any())):
            self.value = None
        self._last_pass = this_pass
        self.value = part if self.value is None else self.value + part


def gradient_mask(parameter: nn.Parameter) -> MaskGradient | None:
    """The hook that masks the gradient of a parameter; None if there is none."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return next((hook for hook in hooks.values() if isinstance(hook, MaskGradient)), None)


def mask_gradient(parameter: nn.Parameter, module: nn.Module, mask_leaf: str) -> None:
    """Makes sure that a parameter has the hook once."""
    if gradient_mask(parameter) is None:
        frozen = not parameter.requires_grad
        parameter.requires_grad_(True)  # torch adds no hook to a frozen parameter, but keeps one that is there
        parameter.register_post_accumulate_grad_hook(MaskGradient(module, mask_leaf))
        parameter.requires_grad_(not frozen)
    else:
        # After torch.__future__.set_swap_module_params_on_conversion Python's dict of hooks survives but autograd's does not.
        # Assigning the dict registers it again.
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
