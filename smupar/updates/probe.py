"""The probe of a layer keeps some of its inputs, and measures how an update changes the output for them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smupar.model.sharding import local
from smupar.model.weights import ModelWeight, Weight, weight_of
from smupar.plan.facts.layers import IMAGES, kind_of
from smupar.plan.plan import Plan
from smupar.refusals import refuse

NUM_TOKENS = 128


def some_rows(x: Tensor, num: int = NUM_TOKENS) -> Tensor:
    """A fixed number of tokens from the whole batch. If the batch has fewer, its tokens are repeated."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) < num:
        return rows.repeat(-(-num // max(1, len(rows))), 1)[:num]
    return rows[spread(len(rows), num, x.device)]


def spread(num_rows: int, most: int, device: torch.device) -> Tensor:
    """Up to ``most`` evenly spaced row numbers. The spacing has no factor in common with the number of rows. If it divided the
    length of the sequences, it would hit the same few positions of each sequence, such as the class token of every image."""
    if num_rows <= most:
        return torch.arange(num_rows, device=device)
    step = -(-num_rows // most)
    while math.gcd(step, num_rows) > 1:
        step += 1
    return torch.arange(most, device=device) * step % num_rows


@contextmanager
def exact() -> Iterator[None]:
    """A context without TF32 and autocast, because the small difference of two products needs full precision."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        matmul.fp32_precision = before


class Probe:
    """Measures the change of one layer's output by an update, in one model or in all models of a stack."""

    inputs: Tensor
    old_output: Tensor | None = None  # the output before the update, if it was looked at

    def __init__(self, weight: Weight, in_dim: int = 1) -> None:
        self.weight, self.in_dim = weight, in_dim

    def look(self) -> None:
        self.old_output = self.weight.multiply(self.inputs, in_dim=self.in_dim)

    def change(self, decayed: float | Tensor) -> Tensor:
        """The change of the output by the update, without weight decay, which removed the share ``decayed`` of the weight."""
        old, self.old_output = self.old_output, None
        assert old is not None
        return self.weight.multiply(self.inputs, in_dim=self.in_dim) - (1 - decayed) * old


class LayerProbe(Probe):
    """A probe that keeps some inputs of its layer in a buffer beside the weight."""

    weight: ModelWeight

    def __init__(self, name: str, model: nn.Module, plan: Plan, buffer: str) -> None:
        weight, in_dim = weight_of(model, name), plan[name].in_dims[0]
        super().__init__(weight, in_dim)
        self.name, self.module = name, weight.module
        self.is_conv = kind_of(self.module).reads == IMAGES
        self.buffer = f"{weight.leaf}_{buffer}"
        self.reader: weakref.ref[Any] | None = None  # the meter that reads this probe
        if not self.is_conv:
            self._make(torch.zeros(NUM_TOKENS, plan[name].shape[in_dim], device=local(weight.parameter).device))
        self.output_grad: Tensor | None = None  # gradient of the output for the kept inputs, if gradients are watched
        self._waits = False  # whether the first gradient of the last forward pass has yet to arrive
        self.hooks = [self.module.register_forward_pre_hook(self._keep, with_kwargs=True)]

    def watch_gradient(self) -> None:
        """Also keeps the gradient of the output for the kept inputs, at steps that the reader looks at."""
        self.hooks.append(self.module.register_forward_hook(self._watch))

    @property
    def inputs(self) -> Tensor:  # type: ignore[override]
        inputs: Tensor = getattr(self.module, self.buffer)
        if inputs.dtype != torch.float32:  # the model was converted, including its buffers
            self._make(inputs := inputs.float())
        return inputs

    def _make(self, value: Tensor) -> None:
        self.module.register_buffer(self.buffer, value, persistent=False)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args = args or tuple(kwargs.values())
        if not (args and torch.is_grad_enabled() and args[0].numel()):  # in validation, or for an expert without tokens
            return
        if not (torch.compiler.is_compiling() or self._is_due):  # compiled code must be the same for all steps
            return
        x = args[0].detach()
        some = x[: -(-NUM_TOKENS // math.prod(x.shape[2:]))].float() if self.is_conv else some_rows(x)
        if self.is_conv and (getattr(module, self.buffer, None) is None or self.inputs.shape != some.shape):
            self._make(torch.zeros_like(some))
        self.inputs.copy_(some)
        # In a backward pass, checkpointing runs the layer again, which is no new forward pass.
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() < 0:
            self._waits, self.output_grad = True, None

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        # A compiled layer has no hooks on its gradients.
        if torch.compiler.is_compiling() or not (isinstance(output, Tensor) and output.requires_grad and self._waits):
            return
        if self._is_due:
            output.register_hook(self._keep_gradient)

    @property
    def _is_due(self) -> bool:
        """Whether the reader looks at the current step."""
        meter = None if self.reader is None else self.reader()
        return meter is not None and bool(meter.is_due)

    def _keep_gradient(self, grad: Tensor) -> None:
        """Keeps the first gradient that arrives after a forward pass. If a layer is used twice, the inputs of its last use are
        kept, and their gradient arrives first."""
        if not self._waits:
            return
        self._waits = False
        shape = self.inputs.shape
        self.output_grad = grad[: shape[0]].float() if self.is_conv else some_rows(grad.detach()).float()

    def missed(self) -> bool:
        """Whether the layer was used, as its gradient shows, but no input was seen."""
        grad = self.weight.parameter.grad
        return grad is not None and bool(local(grad).any()) and not bool(self.inputs.any())

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        if hasattr(self.module, self.buffer):
            delattr(self.module, self.buffer)

    def __getstate__(self) -> dict[str, Any]:
        """Drops the reader, since no meter reads a probe that was copied or loaded."""
        return {**self.__dict__, "reader": None}


def refuse_measured(model: nn.Module, buffer: str, what: str) -> None:
    """Refuses a model with probes of this kind that a meter reads."""
    probes = (probe for _, _, probe in _probes(model) if probe.buffer.endswith(buffer))
    refuse(
        any(probe.reader is not None and probe.reader() is not None for probe in probes),
        f"the {what} already: call remove() on the object that measures them",
    )


def remove_copied_probes(model: nn.Module) -> None:
    """Removes probes that no meter reads, because they came with a deepcopy."""
    for module, key, probe in _probes(model):
        if probe.reader is None or probe.reader() is None:
            del module._forward_pre_hooks[key]
            module._forward_hooks.pop(_watching(module, probe), None)
            module._buffers.pop(probe.buffer, None)
            module._non_persistent_buffers_set.discard(probe.buffer)


def _watching(module: nn.Module, probe: LayerProbe) -> int:
    """The key of the hook with which a probe watches gradients; -1 if there is none."""
    return next((key for key, hook in module._forward_hooks.items() if getattr(hook, "__self__", None) is probe), -1)


def _probes(model: nn.Module) -> list[tuple[nn.Module, int, LayerProbe]]:
    """All probes of a model, each with its module and the key of its hook there."""
    hooks = ((module, key, hook) for module in model.modules() for key, hook in module._forward_pre_hooks.items())
    owners = ((module, key, getattr(hook, "__self__", None)) for module, key, hook in hooks)
    return [(module, key, owner) for module, key, owner in owners if isinstance(owner, LayerProbe)]
