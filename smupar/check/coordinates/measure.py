"""Measures sizes in one training run, by layer and step.

For a layer Y = X W these are the output Y, the gradient of X through this layer alone, and dY = X dW, the change of the output
that one update causes on the same inputs. All three are measured on up to ``MAX_ROWS`` rows of each batch, so memory does not
grow with the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smupar.model.parameterize import FACTOR
from smupar.plan.layers import IMAGES, kind_of
from smupar.plan.parameters import parent_path
from smupar.plan.plan import Plan
from smupar.updates.probe import spread

MAX_ROWS = 256
MAX_IMAGES = 8  # images measured for a convolution, whose rows are all positions of an image
Y, GRAD_X, DY, CHANGE, GRAD_W = "Y", "grad X", "dY", "change of Y", "weight gradient"
JUDGED = (Y, GRAD_X, DY)


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    rule: str
    width: int
    density: float
    seed: int


@dataclass(frozen=True)
class Reading(Cell):
    """The size of one quantity of a layer or block, at one step of a run; the first forward pass is step 1."""

    step: int
    place: str  # module path
    kind: str  # "layer" or "block"
    role: str  # role of the layer's weight; "block" or "logits" for blocks
    quantity: str
    rms: float
    mean_abs: float
    num_entries: int = 1

    @property
    def norm(self) -> float:
        """The norm over all entries. The norm of a weight's gradient is called the gradient flow."""
        return self.rms * math.sqrt(self.num_entries)


class SizeRecorder:
    """Measures through hooks on the layers and blocks of a model; ``readings`` gives the sizes of the finished steps."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model, self.plan = model, plan
        modules = dict(model.named_modules())
        self.layers = {path: (name, role) for path, name, role in _layers(model, plan)}
        hidden_parents = {parent_path(path) for path, (_, role) in self.layers.items() if role == "hidden"}
        # Modules whose weights are not layers of their own (recurrent, attention, the user's) are measured as blocks too.
        owners = {parent_path(row.name) for row in plan if row.role == "hidden"} - self.layers.keys()
        self.blocks = {path: "block" for path in (*hidden_parents, *owners) if path and path in modules}
        self.blocks[""] = "logits"
        self.sizes: list[tuple[int, str, str, Tensor, Tensor, int]] = []
        self.step = 0
        self._inputs: dict[str, Tensor] = {}
        self._output_grads: dict[str, Tensor] = {}
        self._first_outputs: dict[str, Tensor] = {}
        self._taken: set[tuple[str, str]] = set()  # (path, quantity) measured in this pass
        self._probing = False
        self._handles = [
            modules[path].register_forward_hook(partial(self._after_forward, path), with_kwargs=True)
            for path in (*self.layers, *(path for path in self.blocks if path not in self.layers))
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    # Hooks

    def _after_forward(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x, y = _first_tensor((*args, *kwargs.values())), _first_tensor(output)
        if y is None or not y.is_floating_point():
            return
        if self._probing:
            if self._is_first(path, CHANGE):
                self._compare(path, y.detach())
            return
        if self._is_first(path, Y):
            self._note(path, Y, y.detach())
        # Activation checkpointing runs a layer twice, first without gradients and then with them.
        if y.requires_grad and self._is_first(path, GRAD_X) and x is not None:
            self._watch_gradient(path, module, x, y)

    def _is_first(self, path: str, quantity: str) -> bool:
        """Whether a quantity is measured for the first time in this pass. If a layer is used several times, its first use
        counts."""
        if (path, quantity) in self._taken:
            return False
        self._taken.add((path, quantity))
        return True

    def _watch_gradient(self, path: str, module: nn.Module, x: Tensor, y: Tensor) -> None:
        if path in self.layers:
            self._inputs[path] = _rows(module, x.detach())
            y.register_hook(lambda grad: self._output_grads.__setitem__(path, _rows(module, grad, output=True)))
        elif x.is_floating_point() and x.requires_grad:
            x.register_hook(lambda grad: self._note(path, GRAD_X, grad / self.plan.output_factor))

    def _compare(self, path: str, y: Tensor) -> None:
        y = y.flatten()[:: max(1, y.numel() // 65536)].clone()
        if path not in self._first_outputs:
            self._first_outputs[path] = y
        else:
            self._note(path, CHANGE, y - self._first_outputs[path])

    def _note(self, path: str, quantity: str, values: Tensor) -> None:
        if not values.numel():  # an expert that got no tokens
            return
        values = values.float()
        rms, mean_abs = values.square().mean().sqrt(), values.abs().mean()
        self.sizes.append((self.step, path, quantity, rms, mean_abs, values.numel()))

    # A step, in three parts

    @contextmanager
    def probe(self) -> Iterator[None]:
        """A forward pass whose outputs are compared with the outputs of the first such pass."""
        self._probing = True
        try:
            yield
        finally:
            self._probing = False
            self._taken.clear()

    def before_update(self) -> dict[str, Tensor]:
        """Measures the sizes of gradients, after the backward pass. Returns the weights, for ``after_update``."""
        parameters = dict(self.model.named_parameters())
        weights = {}
        for path, (name, _) in self.layers.items():
            module = self.model.get_submodule(path)
            kind = kind_of(module)
            weight_grad = parameters[name].grad
            if weight_grad is not None:
                self._note(path, GRAD_W, weight_grad)
            weights[name] = parameters[name].detach().clone()
            if path in self._inputs and path in self._output_grads and not kind.is_lookup:
                dtype = parameters[name].dtype  # autocast may have run the layer in another dtype
                with torch.enable_grad():
                    x = self._inputs[path].to(dtype).requires_grad_()
                    (grad,) = torch.autograd.grad(kind.output(module, x), x, self._output_grads[path].to(dtype))
                self._inputs[path] = x.detach()
                self._note(path, GRAD_X, grad * getattr(module, FACTOR, 1.0) / self.plan.output_factor)
        return weights

    @torch.no_grad()
    def after_update(self, weights: dict[str, Tensor]) -> None:
        """Measures how the update changes the layers' outputs, through the weights alone, after the optimizer's step."""
        parameters = dict(self.model.named_parameters())
        for path, (name, _) in self.layers.items():
            if path in self._inputs:
                module = self.model.get_submodule(path)
                kind, change = kind_of(module), parameters[name].detach() - weights[name]
                effect = kind.effect(module, parameters[name], change, self._inputs[path])
                self._note(path, DY, effect * getattr(module, FACTOR, 1.0) if kind.is_lookup else effect)
        self._inputs.clear()
        self._output_grads.clear()
        self._taken.clear()

    def unmeasured(self) -> list[str]:
        """Hidden weights whose output or update was not seen, because the layer is unknown or is used without being called."""
        seen = {(path, quantity) for _, path, quantity, *_ in self.sizes}
        measured = {name for path, (name, _) in self.layers.items() if (path, Y) in seen and (path, DY) in seen}
        return [row.name for row in self.plan if row.role == "hidden" and row.name not in measured]

    def uncalled(self) -> list[str]:
        """Layers with a forward factor that the model never calls. If the model uses their weights, the factor is missing."""
        uses = [(path, factor) for row in self.plan for path, factor in row.forward if path in self.layers]
        called = {path for _, path, quantity, *_ in self.sizes if quantity == Y}
        return [path for path, factor in uses if factor != 1 and path not in called]

    def moved(self) -> bool:
        return any(float(rms) > 0 for _, _, quantity, rms, *_ in self.sizes if quantity in (DY, CHANGE))

    def readings(self, cell: Cell) -> list[Reading]:
        roles = {path: ("block", role) for path, role in self.blocks.items()}
        roles |= {path: ("layer", role) for path, (_, role) in self.layers.items()}
        return [
            Reading(
                **vars(cell),
                step=step,
                place=path,
                kind=roles[path][0],
                role=roles[path][1],
                quantity=quantity,
                rms=float(rms),
                mean_abs=float(mean_abs),
                num_entries=num_entries,
            )
            for step, path, quantity, rms, mean_abs, num_entries in self.sizes
        ]


def _layers(model: nn.Module, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(module path, weight name, role) of the layers that are linear in their weight."""
    for row in plan:
        uses = [path for path, _ in row.forward] or [parent_path(row.name)]
        kinds = {path: kind_of(model.get_submodule(path)) for path in uses}
        for path, kind in kinds.items():
            # The layer multiplies by its weight only, so its other parameters are skipped.
            is_other = parent_path(row.name) == path and not kind.owns(row.name.rpartition(".")[2])
            if row.role in ("embedding", "hidden", "unembedding") and kind.is_measured and not is_other:
                tied_readout = row.role == "embedding" and kinds[uses[0]].is_lookup and not kind.is_lookup
                yield path, row.name, "unembedding" if tied_readout else row.role


def _rows(module: nn.Module, values: Tensor, *, output: bool = False) -> Tensor:
    """Up to MAX_ROWS rows of a layer's input or output. The same rows are taken from both."""
    kind = kind_of(module)
    if kind.reads == IMAGES:
        batched = values.ndim == module.weight.ndim  # a single image has no batch dimension
        return values[:MAX_IMAGES].clone() if batched else values.clone()
    rows = values.flatten() if kind.is_lookup and not output else values.reshape(-1, values.shape[-1])
    return rows[spread(len(rows), MAX_ROWS, rows.device)]


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "logits"):
        return _first_tensor(value.logits)
    if isinstance(value, Mapping):
        return _first_tensor(tuple(value.values()))
    if isinstance(value, (tuple, list)):
        return next((tensor for item in value if (tensor := _first_tensor(item)) is not None), None)
    return None
