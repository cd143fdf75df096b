"""Measures sizes in one training run, by layer and step.

For a layer Y = X W three sizes are measured: the output Y, the gradient of X through this layer alone, and dY = X dW. dY is the
change of the output that one update causes on the same inputs. Experts in one tensor, recurrent weights and the user's own
factors have a dY too: the change of the output of the module that uses them. ``calls`` keeps the calls for this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from statistics import fmean
from typing import Any, NamedTuple

from torch import Tensor, nn

from smupar.check.coordinates.calls import SampledCall, WholeCall, first_tensor, kept_call
from smupar.check.coordinates.depth import SAME_DEPTH, Layers
from smupar.model.attention_scale import QUERY_FACTOR
from smupar.plan.facts.layers import kind_of
from smupar.plan.plan import Plan, PlanRow
from smupar.plan.roles.parameters import parent_path

Y, GRAD_X, DY, CHANGE, GRAD_W = "Y", "grad X", "dY", "change of Y", "weight gradient"
JUDGED = (Y, GRAD_X, DY)
AXES = ("width", "density", "depth")
# Hidden weights with a partly fixed size on one side. If inputs are fixed in part, outputs grow more than inputs (widening). If
# outputs are, they grow less (narrowing).
WIDENING, NARROWING, ROUTER = "hidden, widening", "hidden, narrowing", "router"
# Inputs and outputs grow unevenly if their growth differs by this factor. Below it, a layer
# changes a gradient by at most 2^(1/4), which is a slope of 1/8 over two octaves.
UNEVEN = math.sqrt(2)
ROUNDING = 1e-8  # a gradient that is smaller than the largest of all layers by this factor consists of rounding errors
Growth = Mapping[str, Sequence[float]]  # parameter name -> how many times larger each dimension is at another width of the grid


class GridPoint(NamedTuple):
    """A point of the grid. Its runs differ only in their seed."""

    rule: str
    width: int
    density: float
    depth: int | None


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    rule: str
    width: int
    density: float
    seed: int
    depth: int | None = field(default=None, kw_only=True)  # None if the check does not vary the depth

    @property
    def point(self) -> GridPoint:
        return GridPoint(self.rule, self.width, self.density, self.depth)

    def __str__(self) -> str:
        return f"width {self.width}, density {self.density:g}" + ("" if self.depth is None else f", depth {self.depth}")


@dataclass(frozen=True)
class Reading(Cell):
    """The size of one quantity of a layer or block, at one step of a run; the first forward pass is step 1."""

    step: int
    place: str  # module path
    kind: str  # "layer", "block", or "part": a matrix inside a module; its ``place`` is the parameter's name
    role: str  # role of the weight; "block" or "logits" for blocks
    quantity: str
    rms: float
    mean_abs: float
    num_entries: int = 1

    @property
    def norm(self) -> float:
        """The norm over all entries. For a weight's gradient it is called gradient flow."""
        return self.rms * math.sqrt(self.num_entries)


class SizeRecorder:
    """Measures sizes with hooks on the layers and blocks of a model. ``readings`` returns the sizes of the finished steps."""

    def __init__(self, model: nn.Module, plan: Plan, growth: Growth | None = None, depth: Layers = SAME_DEPTH) -> None:
        self.model, self.plan, self.depth = model, plan, depth
        modules = dict(model.named_modules())
        layers = {path: (name, role) for path, name, role in _layers(model, plan, growth or {})}
        hidden_parents = {parent_path(path) for path, (_, role) in layers.items() if _is_hidden(role) or role == ROUTER}
        # Modules with weights that are not layers (recurrent, attention, the user's own) are measured as blocks.
        owners = {next(_ancestors(row.name)) for row in plan if row.role == "hidden"} - layers.keys()
        blocks = {*hidden_parents, *owners, *depth.blocks}
        self.layers = {path: found for path, found in layers.items() if depth.is_measured(path)}
        self.blocks = {path: "block" for path in modules if path in blocks and path and depth.is_block_measured(path)}
        self.blocks[""] = "logits"
        parts = _parts(plan, {name for name, _ in layers.values()})
        self.parts = {name: path for name, path in parts.items() if depth.is_measured(path)}
        self.gradient_factor = plan.output_factor
        self.inner: set[str] = set()  # readouts after which other layers come
        self.ends: list[str] = []  # the last layers, if they are hidden weights with outputs of fixed size
        self.sizes: list[tuple[int, str, str, Tensor, Tensor, int]] = []
        self.step = 0
        self._calls: dict[str, SampledCall | WholeCall] = {}
        self._first_outputs: dict[str, Tensor] = {}
        self._taken: set[tuple[str, str]] = set()  # (path, quantity) measured in this pass
        self._called: dict[str, None] = {}  # paths in the order of their calls in the first pass
        self._probing = self._repeating = False
        watched = {*self.layers, *self.blocks, *(path for row in plan if _is_matrix(row) for path in _ancestors(row.name))}
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
            if path in self.layers or path in self.blocks:
                self._compare(path, y.detach())
            return
        if path in self.layers or path in self.blocks:
            self._watch(path, module, (args, kwargs), y)
        # Activation checkpointing runs a layer twice, first without and then with gradients.
        if path not in self.layers and path in self.parts.values() and y.requires_grad and path not in self._calls:
            self._keep_call(path, WholeCall(module, args, kwargs), y)

    def _watch(self, path: str, module: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], y: Tensor) -> None:
        if self.depth.shows_output(path) and self._is_first(path, Y):
            self._note(path, Y, y.detach() / self.depth.output(path))
            if path in self.blocks and y.shape[-1:] in self._readouts_in(path):
                self.blocks[path] = "logits"
        if not y.requires_grad or not self.depth.shows_gradient(path) or not self._is_first(path, GRAD_X):
            return
        x = first_tensor((*arguments[0], *arguments[1].values()))
        if path in self.layers:
            if (call := kept_call(module, *arguments)) is not None:
                self._keep_call(path, call, y)
        elif x is not None and x.is_floating_point() and x.requires_grad:
            expected = self.gradient_factor * self.depth.gradient(path)
            x.register_hook(lambda grad: self._note(path, GRAD_X, grad / (expected * self._arriving())))

    def _keep_call(self, path: str, call: SampledCall | WholeCall, y: Tensor) -> None:
        self._calls[path] = call
        y.register_hook(call.keep_gradient)

    def _is_first(self, path: str, quantity: str) -> bool:
        """Whether a quantity is measured for the first time in this pass. Only the first use of a layer counts."""
        if (path, quantity) in self._taken:
            return False
        self._taken.add((path, quantity))
        return True

    def _readouts_in(self, block: str) -> list[tuple[int, ...]]:
        """The output sizes of the readouts inside a block. A block whose own output has one of these sizes is a head, which
        makes logits; a block that only contains a router is not a head."""
        inside = [path for path, (_, role) in self.layers.items() if role == "unembedding" and path.startswith(f"{block}.")]
        names = [self.layers[path][0] for path in inside]
        return [
            (size,) for name in names for dim, size in enumerate(self.plan[name].shape) if dim not in self.plan[name].scaling
        ]

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
        rms, mean_abs = values.square().mean().sqrt(), values.abs().mean()
        self.sizes.append((self.step, path, quantity, rms, mean_abs, values.numel()))

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
            self._find_users()
            self._read_order()

    def _find_users(self) -> None:
        """For each matrix that is not a layer's weight, finds the innermost module that contains it and is called. If a layer
        is never called, because the model uses its weight directly, the weight counts as such a matrix.

        A readout that no hook can scale gets its factor from the model, possibly after its module. So the whole model counts as
        its module."""
        called = {name for path, (name, _) in self.layers.items() if path in self._called}
        uncalled = [name for name, _ in self.layers.values() if name not in called]
        users = {name: next(filter(self._called.__contains__, _ancestors(name)), None) for name in (*self.parts, *uncalled)}
        self.parts = {
            name: "" if self.plan[name].role == "unembedding" and not self.plan[name].forward else path
            for name, path in users.items()
            if path is not None
        }

    def _read_order(self) -> None:
        """Finds out how gradients depend on the width, from the order of the layers.

        Usually the readout is the last layer. Gradients of the logits do not depend on the width, and all other gradients have
        passed the readout, with its factor 1/m_d. A readout that other layers follow, such as a router, makes no logits.

        The last layer may instead be a hidden weight from n inputs to a fixed number of outputs, as in CLIP's projection or
        ELECTRA's head. Its init variance is 1/n, so the gradients of its inputs, and of all layers before it, fall as
        1/sqrt(n). They are also proportional to the gradient that arrives at its outputs. If a norm follows, that gradient is
        inversely proportional to the size of the outputs. The size of the outputs is judged on its own. So that it does not
        count twice, gradients are divided by the arriving gradient.
        """
        called = [path for path in self._called if path in self.layers]
        roles = [self.layers[path][1] for path in called]
        later = [number for number, role in enumerate(roles) if role != "unembedding"]
        self.inner = {path for path, role in zip(called[: max(later, default=0)], roles, strict=False) if role == "unembedding"}
        if roles and roles[-1] == NARROWING and "unembedding" not in roles:
            self.ends = list(takewhile(lambda path: self.layers[path][1] == NARROWING, reversed(called)))
            row = self.plan[self.layers[called[-1]][0]]
            self.gradient_factor = math.sqrt(row.width_out / row.width_in)

    def _arriving(self) -> float:
        """The size of the gradient that arrives at the layers of ``ends``; 1 if there are none."""
        calls = [self._calls[path] for path in self.ends if path in self._calls]
        grads = [call.output_grad for call in calls if call.output_grad is not None]
        squares = [float(grad.float().square().mean()) for grad in grads]
        return math.sqrt(fmean(squares)) or 1.0 if squares else 1.0

    def before_update(self) -> dict[str, Tensor]:
        """Measures the sizes of gradients after the backward pass. Returns the weights, for ``after_update``."""
        parameters, without_gradient = dict(self.model.named_parameters()), self._without_gradient()
        weights = {name: parameters[name].detach().clone() for name in self.parts}
        for path, (name, role) in self.layers.items():
            weight_grad = parameters[name].grad
            if weight_grad is not None:
                self._note(path, GRAD_W, weight_grad)
            weights[name] = parameters[name].detach().clone()
            call = self._calls.get(path)
            if call is not None:
                with self._repeated():
                    grad = call.input_gradient(parameters[name])
                if grad is not None:
                    expected = self._expected(path, self.plan[name], role, call.output_grad)
                    self._note(path, GRAD_X, grad * (path not in without_gradient) / expected)
        return weights

    def _without_gradient(self) -> set[str]:
        """Modules whose outputs get no gradient but rounding errors, such as queries and keys if all values of an attention are
        equal. Adam makes large updates of such gradients, but no rule is about them, so their sizes count as 0."""
        grads = {path: call.output_grad for path, call in self._calls.items() if call.output_grad is not None}
        sizes = {path: float(grad.float().square().mean().sqrt()) for path, grad in grads.items()}
        return {path for path, size in sizes.items() if size < ROUNDING * max(sizes.values())}

    def _expected(self, path: str, row: PlanRow, role: str, output_grad: Tensor | None) -> float:
        """The size to which the gradient of a layer's input should be proportional.

        If the inputs and outputs of a layer scale alike, this size is the same as for all other gradients in the network. Other
        layers inside the network have a fixed size on one side, so the gradient grad Y that arrives at their output is not
        known in advance, and is measured. For independent weights of std s, the mean square of grad X = W^T grad Y is s^2 n_out
        times that of grad Y. In a hidden layer s^2 is proportional to 1/m_in and n_out to m_out, so the size of grad X is that
        of grad Y times sqrt(m_out / m_in). In a readout inside the network neither s nor n_out scales, but it has a forward
        factor. In a router s^2 is proportional to 1/m_in^2, and n_out does not scale.
        """
        if output_grad is None or not (role in (NARROWING, WIDENING, ROUTER) or path in self.inner):
            return self.gradient_factor * self._arriving() * self.depth.gradient(path)
        through = self.plan.output_factor if path in self.inner else math.sqrt(row.width_out / row.width_in)
        through = 1 / float(row.width_in) if role == ROUTER else through
        return through * self.depth.output(path) * (float(output_grad.float().square().mean().sqrt()) or 1.0)

    def after_update(self, weights: dict[str, Tensor]) -> None:
        """Measures, after the optimizer's step, how much the update of each weight alone changes the output of its module."""
        parameters, without_gradient = dict(self.model.named_parameters()), self._without_gradient()
        places = [(path, name, path) for path, (name, _) in self.layers.items()]
        places += [(name, name, path) for name, path in self.parts.items()]
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
        seen = {(path, quantity) for _, path, quantity, *_ in self.sizes}
        measured = {name for path, (name, _) in self.layers.items() if (path, Y) in seen and (path, DY) in seen}
        measured |= {name for name in self.parts if (name, DY) in seen}
        frozen = {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}
        watched = [row for row in self.plan if _is_matrix(row) and self.depth.is_measured(parent_path(row.name))]
        return [row.name for row in watched if row.name not in measured | frozen]

    def uncalled(self) -> list[str]:
        """Layers that have a forward factor but are never called. If the model uses their weights directly, the factor is
        missing."""
        uses = [(path, factor) for row in self.plan for path, factor in row.forward if path in self.layers]
        called = {path for _, path, quantity, *_ in self.sizes if quantity == Y}
        return [path for path, factor in uses if factor != 1 and path not in called]

    def saw_updates(self) -> bool:
        """Whether any update changed an output."""
        return any(float(rms) > 0 for _, _, quantity, rms, *_ in self.sizes if quantity in (DY, CHANGE))

    def readings(self, cell: Cell) -> list[Reading]:
        places = {path: ("block", role) for path, role in self.blocks.items()}
        places |= {name: ("part", self.plan[name].role) for name in self.parts}
        places |= {path: ("layer", role) for path, (_, role) in self.layers.items()}
        return [
            Reading(
                **vars(cell),
                step=step,
                place=self.depth.place(place),
                kind=places[place][0],
                role=places[place][1],
                quantity=quantity,
                rms=float(rms),
                mean_abs=float(mean_abs),
                num_entries=num_entries,
            )
            for step, place, quantity, rms, mean_abs, num_entries in self.sizes
        ]


def _layers(model: nn.Module, plan: Plan, growth: Growth) -> Iterator[tuple[str, str, str]]:
    """(module path, weight name, role) of the layers that are linear in their weight."""
    for row in plan:
        uses = [path for path, _ in row.forward] or [parent_path(row.name)]
        kinds = {path: kind_of(model.get_submodule(path)) for path in uses}
        for path, kind in kinds.items():
            # A layer's other parameters do not count, only the one that it multiplies by.
            is_other = parent_path(row.name) == path and not kind.owns(row.name.rpartition(".")[2])
            if row.role in ("embedding", "hidden", "unembedding", ROUTER) and kind.is_measured and not is_other:
                tied_readout = row.role == "embedding" and kinds[uses[0]].is_lookup and not kind.is_lookup
                yield path, row.name, "unembedding" if tied_readout else _role(row, growth)


def _role(row: PlanRow, growth: Growth) -> str:
    """The role of a weight. Hidden weights are told apart by how much their inputs and outputs grow along the grid. Rounded
    sizes, such as an MLP of 8/3 times the width, may grow slightly unevenly, which is ignored."""
    if row.role != "hidden":
        return row.role
    # Without a grid, all dimensions that scale are assumed to grow by the same factor.
    factors = growth.get(row.name) or [2.0 if dim in row.scaling else 1.0 for dim in range(len(row.shape))]
    grown = [
        math.prod(factor for dim, factor in enumerate(factors) if (dim in row.in_dims) is inside) for inside in (True, False)
    ]
    ratio = grown[1] / grown[0]
    return WIDENING if ratio > UNEVEN else NARROWING if ratio < 1 / UNEVEN else row.role


def _is_hidden(role: str) -> bool:
    return role in ("hidden", WIDENING, NARROWING)


def _is_matrix(row: PlanRow) -> bool:
    return sum(size > 1 for size in row.shape) > 1


def _parts(plan: Plan, layers: set[str]) -> dict[str, str]:
    """Matrices of any role that are not the weight of a layer, with the module that owns them."""
    return {row.name: parent_path(row.name) for row in plan if _is_matrix(row) and row.name not in layers}


def _ancestors(name: str) -> Iterator[str]:
    """The paths of the modules around a parameter, from the inside out. Parametrizations are left out, since they are not
    called with the layer's input."""
    while name:
        name = parent_path(name)
        if "parametrizations" not in name.split("."):
            yield name
