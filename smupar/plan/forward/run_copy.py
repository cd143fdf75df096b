"""Runs one forward pass of a copy of a model on an example, without changing the model, its buffers or the random state.

A small model runs on the CPU. A large model runs on the meta device, where a pass needs no memory and hardly any time. Such a
pass fails if control flow depends on values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
R = TypeVar("R")

# Models with up to this many parameters run on the CPU. Models with up to ten times as many run there if the meta device fails.
SMALL = 5_000_000


class CannotRunError(Exception):
    """The forward pass of a copy failed; the message says why."""


def run_copy(model: nn.Module, example: Example, run: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], R]) -> R:
    """Calls ``run(copy of the model, args, kwargs)`` in evaluation mode without gradients. Raises ``CannotRunError``."""
    num_values = sum(parameter.numel() for parameter in model.parameters())
    devices = ["cpu"] if num_values <= SMALL else ["meta", "cpu"] if num_values <= 10 * SMALL else ["meta"]
    failures: list[str] = []
    for device in devices:
        try:
            args, kwargs = _arguments(example, device)
            with _plain_pass(device):
                return run(_copy(model, device), args, kwargs)
        except Exception as error:  # whatever is raised, a plan can be made without this pass
            failures.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    more = "; it is large, so it was run without values" if devices == ["meta"] else ""
    raise CannotRunError(failures[-1][:300] + more)


def _arguments(example: Example, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    copied = copied_to(example, device)
    if isinstance(copied, dict):
        return (), copied
    return (tuple(copied) if isinstance(copied, (tuple, list)) else (copied,)), {}


def copied_to(value: Any, device: str) -> Any:
    """A copy of nested tuples, lists and mappings, with their tensors copied to a device."""
    if isinstance(value, Tensor):
        return _copied_tensor(value, device)
    if isinstance(value, Mapping):
        return {key: copied_to(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [copied_to(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _copied_tensor(tensor: Tensor, device: str) -> Tensor:
    if tensor.is_meta:  # gets small random values, or zeros for indices and masks
        empty = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        return empty.normal_(std=0.1) if tensor.is_floating_point() and device != "meta" else empty
    return tensor.detach().to(device, copy=True)


def _copy(model: nn.Module, device: str) -> nn.Module:
    """A copy of the model on the device, in evaluation mode. Tensors are copied first, so that deepcopy has only the modules
    to copy."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]:
            if isinstance(value, Tensor) and id(value) not in memo:
                copied = copied_to(value, device)
                is_parameter = isinstance(value, nn.Parameter)
                memo[id(value)] = nn.Parameter(copied, requires_grad=False) if is_parameter else copied
    return copy.deepcopy(model, memo).eval()


@contextmanager
def _plain_pass(device: str) -> Iterator[None]:
    """Switches off gradients and fused kernels, and restores the random state. Fused kernels hide what torch's layers and
    attention do, and differ between the CPU and the meta device."""
    fused = torch.backends.mha.get_fastpath_enabled()
    plain = sdpa_kernel(SDPBackend.MATH)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device(device), plain:
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
