"""Measures sizes in one training run, by layer and step.

For a layer Y = X W three sizes are measured: the output Y, the gradient of X through this layer alone, and dY = X dW. dY is the
change of the output that one update causes on the same inputs. Experts in one tensor, recurrent weights and the user's own
factors have a dY too: the change of the output of the module that uses them. ``calls`` keeps the calls for this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from smupar.check.coordinates.calls import SampledCall, WholeCall, first_tensor, kept_call
from smupar.check.coordinates.depth import SAME_DEPTH, ComparedLayers
from smupar.check.coordinates.gradient_sizes import ExpectedGradients, rms
from smupar.check.coordinates.places import Growth, Places, is_matrix
from smupar.check.coordinates.readings import CHANGE, DY, GRAD_W, GRAD_X, OF_LOSS, Cell, Reading, Y
from smupar.model.attention_scale import QUERY_FACTOR
from smupar.plan.plan import Plan
from smupar.plan.roles.parameters import parent_path

ROUNDING = 1e-8  # a gradient that is smaller than the largest of all layers by this factor consists of rounding errors


class SeenSize(NamedTuple):
    step: int
    place: str
    quantity: str
    rms: Tensor  # stays on the device until the readings are made
    mean_abs: Tensor
    num_entries: int


class SizeRecorder:
    """Measures sizes with hooks on the layers and blocks of a model. ``readings`` returns the sizes of the finished steps."""

    def __init__(self, model: nn.Module, plan: Plan, growth: Growth | None = None, depth: ComparedLayers = SAME_DEPTH) -> None:
        self.model, self.plan, self.depth = model, plan, depth
        self.places = Places(model, plan, growth or {}, depth)
        self.expected = ExpectedGradients(plan, self.places, depth)
        self.sizes: list[SeenSize] = []
        self.step = 0
        self._calls: dict[str, SampledCall | WholeCall] = {}
        self._first_outputs: dict[str, Tensor] = {}
        self._taken: set[tuple[str, str]] = set()  # (path, quantity) measured in this pass
        self._called: dict[str, None] = {}  # paths in the order of their calls in the first pass
        self._probing = self._repeating = False
        modules, watched = dict(model.named_modules()), self.places.watched
        # The queries may be only a part of a layer's output, so the output is measured before they are scaled.
        self._handles = [
            modules[path].register_forward_hook(
                partial(self._after_forward, path), with_kwargs=True, prepend=hasattr(modules[path], QUERY_FACTOR)
            )
            for path in modules
            if path in watched
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    # Hooks

    def _after_forward(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        y = first_tensor(output)
        if self._repeating or y is None or not y.is_floating_point():
            return
        if self._probing:
            self._called.setdefault(path)
            if path in self.places:
                self._compare(path, y.detach())
            return
        if path in self.places:
            self._watch(path, module, (args, kwargs), y)
        # Activation checkpointing runs a layer twice, first without and then with gradients.
        is_part = path not in self.places.layers and path in self.places.parts.values()
        if is_part and y.requires_grad and path not in self._calls:
            self._keep_call(path, WholeCall(module, args, kwargs), y)

    def _watch(self, path: str, module: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], y: Tensor) -> None:
        if self.depth.shows_output(path) and self._is_first(path, Y):
            self._note(path, Y, y.detach() / self.depth.output(path))
            self.places.see_output(path, y.shape)
        if not y.requires_grad or not self.depth.shows_gradient(path) or not self._is_first(path, GRAD_X):
            return
        x = first_tensor((*arguments[0], *arguments[1].values()))
        if path in self.places.layers:
            if (call := kept_call(module, *arguments)) is not None:
                self._keep_call(path, call, y)
        elif x is not None and x.is_floating_point() and x.requires_grad:
            x.register_hook(lambda grad: self._note(path, GRAD_X, grad / self.expected.of_block(path, self._calls)))

    def _keep_call(self, path: str, call: SampledCall | WholeCall, y: Tensor) -> None:
        self._calls[path] = call
        y.register_hook(call.keep_gradient)

    def _is_first(self, path: str, quantity: str) -> bool:
        """Whether a quantity is measured for the first time in this pass. Only the first use of a layer counts."""
        if (path, quantity) in self._taken:
            return False
        self._taken.add((path, quantity))
        return True

    def _compare(self, path: str, y: Tensor) -> None:
        if not self.depth.shows_output(path) or not self._is_first(path, CHANGE):
            return
        y = y.flatten()[:: max(1, y.numel() // 65536)].clone()
        if path not in self._first_outputs:
            self._first_outputs[path] = y
        elif y.shape == self._first_outputs[path].shape:  # an expert may get other tokens
            self._note(path, CHANGE, y - self._first_outputs[path])

    def _note(self, path: str, quantity: str, values: Tensor) -> None:
        if not values.numel():  # an expert that got no tokens
            return
        values = values.float()
        root_mean_square, mean_abs = values.square().mean().sqrt(), values.abs().mean()
        self.sizes.append(SeenSize(self.step, path, quantity, root_mean_square, mean_abs, values.numel()))

    # A step, in three parts

    @contextmanager
    def probe(self) -> Iterator[None]:
        """A context for a forward pass on a fixed batch. Outputs are compared with those of the first probe, which also shows
        which modules are called, and in which order."""
        is_first = not self._called
        self._probing = True
        try:
            yield
        finally:
            self._probing = False
            self._taken.clear()
        if is_first:
            self.places.find_users(self._called)
            self.expected.read_order(self._called)

    def before_update(self) -> dict[str, Tensor]:
        """Measures the sizes of gradients after the backward pass. Returns the weights, for ``after_update``."""
        parameters, without_gradient = dict(self.model.named_parameters()), self._without_gradient()
        for path in self.expected.readouts:
            if path in self._calls and (arriving := self._calls[path].output_grad) is not None:
                self._note(path, OF_LOSS, arriving)
        weights = {name: parameters[name].detach().clone() for name in self.places.parts}
        for path, (name, _) in self.places.layers.items():
            weight_grad = parameters[name].grad
            if weight_grad is not None:
                self._note(path, GRAD_W, weight_grad)
            weights[name] = parameters[name].detach().clone()
            call = self._calls.get(path)
            if call is not None:
                with self._repeated():
                    grad = call.input_gradient(parameters[name])
                if grad is not None:
                    expected = self.expected.of_layer(path, self._calls)
                    self._note(path, GRAD_X, grad * (path not in without_gradient) / expected)
        return weights

    def _without_gradient(self) -> set[str]:
        """Modules whose outputs get no gradient but rounding errors, such as queries and keys if all values of an attention are
        equal. Adam makes large updates of such gradients, but no rule is about them, so their sizes count as 0."""
        grads = ((path, call.output_grad) for path, call in self._calls.items())
        sizes = {path: rms(grad) for path, grad in grads if grad is not None}
        return {path for path, size in sizes.items() if size < ROUNDING * max(sizes.values())}

    def after_update(self, weights: dict[str, Tensor]) -> None:
        """Measures, after the optimizer's step, how much the update of each weight alone changes the output of its module."""
        parameters, without_gradient = dict(self.model.named_parameters()), self._without_gradient()
        places = [(path, name, path) for path, (name, _) in self.places.layers.items()]
        places += [(name, name, path) for name, path in self.places.parts.items()]
        for place, name, path in places:
            if path in self._calls:
                with self._repeated():
                    effect = self._calls[path].effect(parameters[name], weights[name])
                if effect is not None:
                    self._note(place, DY, effect * (path not in without_gradient) / self.depth.effect(path))
        self._calls.clear()
        self._taken.clear()

    @contextmanager
    def _repeated(self) -> Iterator[None]:
        """A context for repeated calls, which are not measured."""
        self._repeating = True
        try:
            yield
        finally:
            self._repeating = False

    def unmeasured(self) -> list[str]:
        """Matrices whose update was not seen, and layers whose output was not seen. Their module is never called, or the call
        cannot be repeated."""
        seen = {(size.place, size.quantity) for size in self.sizes}
        measured = {name for path, (name, _) in self.places.layers.items() if {(path, Y), (path, DY)} <= seen}
        measured |= {name for name in self.places.parts if (name, DY) in seen}
        frozen = {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}
        watched = [row for row in self.plan if is_matrix(row) and self.depth.is_measured(parent_path(row.name))]
        return [row.name for row in watched if row.name not in measured | frozen]

    def uncalled(self) -> list[str]:
        """Layers that have a forward factor but are never called. If the model uses their weights directly, the factor is
        missing."""
        uses = [(path, factor) for row in self.plan for path, factor in row.forward if path in self.places.layers]
        called = {size.place for size in self.sizes if size.quantity == Y}
        return [path for path, factor in uses if factor != 1 and path not in called]

    def saw_updates(self) -> bool:
        """Whether any update changed an output."""
        return any(float(size.rms) > 0 for size in self.sizes if size.quantity in (DY, CHANGE))

    def readings(self, cell: Cell) -> list[Reading]:
        return [self._reading(cell, size) for size in self.sizes]

    def _reading(self, cell: Cell, size: SeenSize) -> Reading:
        kind, role = self.places.kind_and_role(size.place)
        return Reading(
            **vars(cell),
            step=size.step,
            place=self.depth.place(size.place),
            kind=kind,
            role=role,
            quantity=size.quantity,
            rms=float(size.rms),
            mean_abs=float(size.mean_abs),
            num_entries=size.num_entries,
        )
