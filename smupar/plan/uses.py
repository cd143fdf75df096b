"""Watches one forward pass and records how it uses each parameter: over which dimensions products sum, which products read the
model's input or make its output, which tables are looked up, and what acts element by element.

torch reduces linear layers, matmul, einsum and convolutions to a few operations on views of the parameters, and these are
watched. Views share storage, so what is known about a tensor is kept by storage, and strides tell which dimensions of a parameter
a view ranges over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from smupar.plan.forward import Example, run_copy

Dims = tuple[int, ...]
Label = tuple[str, int]  # a parameter's name, and one of its dimensions
Labels = tuple[frozenset[Label], ...]  # for each dimension of a tensor, the dimensions of parameters that it ranges over


# What is recorded


@dataclass(frozen=True)
class Product:
    """A parameter multiplied with something and summed over ``in_dims``."""

    in_dims: Dims
    out_dims: Dims
    reads_input: bool  # what it multiplies comes from the example through no weight that scales
    joins: frozenset[int]  # events: concatenations that made what it multiplies


@dataclass
class Use:
    """Everything that one forward pass does with a parameter."""

    products: list[Product] = field(default_factory=list)
    looked_up: set[int] = field(default_factory=set)  # dimensions that an index selects from
    by_element: bool = False
    unclear: str = ""  # an operation that is not understood
    makes_output: bool = False  # what it writes reaches the output through no other weight that scales
    is_inside: bool = False  # what it writes reaches another weight that scales


@dataclass(frozen=True)
class Event:
    """Something whose meaning depends on which sizes follow the width.

    join   a concatenation; ``sizes`` are the parts'
    part   a part of what ``weights`` wrote; ``sizes`` are (whole, part)
    dot    a sum of products of two activations; ``sizes`` is the number of summands
    """

    kind: str
    path: str  # the module in which it happened
    sizes: Dims
    weights: frozenset[str] = frozenset()
    is_normalised: bool = False  # both factors of a dot product have length 1


@dataclass(frozen=True)
class Residual:
    """A sum x + f(x): ``weights`` wrote f(x), and the sum is taken in the module at ``path``."""

    path: str
    weights: tuple[str, ...]


@dataclass
class Usage:
    """What one forward pass shows."""

    uses: dict[str, Use]
    events: list[Event] = field(default_factory=list)
    residuals: list[Residual] = field(default_factory=list)
    attention: dict[int, str] = field(default_factory=dict)  # the dot products that are attention scores, and their modules


def watch(model: nn.Module, example: Example, *, scaling: Mapping[str, Dims], reads: Mapping[str, Dims]) -> Usage:
    """What one forward pass of a copy of the model does with each parameter. Raises ``CannotRun``.

    ``scaling`` holds the dimensions of each parameter that follow the width, ``reads`` the input dimensions where the module's
    kind tells them.
    """

    def run(copied: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Usage:
        watcher = _Watcher(copied, scaling, reads)
        for tensor in _tensors((args, kwargs)):
            watcher.put(tensor, _Flow(is_data=True))
        with watcher:
            output = copied(*args, **kwargs)
        watcher.end(output)
        return watcher.usage

    return run_copy(model, example, run)


# What is known about tensors


@dataclass(frozen=True)
class _Flow:
    """Where the values of a tensor come from."""

    is_data: bool = False  # depends on the example, or is a product; weights alone and constants do not
    is_inside: bool = False  # comes through a weight that scales
    writers: frozenset[str] = frozenset()  # weights that scale and wrote it, through no other such weight
    joins: frozenset[int] = frozenset()
    scores: frozenset[int] = frozenset()  # dot products from which it was computed element by element
    shares: frozenset[int] = frozenset()  # dot products of which it is a softmax
    mark: str = ""  # "norm": a length; "unit": divided by it; "square"; "product"; "weighted": times a parameter
    past: int = 0  # a bit for each result from which it was computed, and for itself
    stream: int = 0  # bits of the results of which it is a residual sum, and its own

    def __or__(self, other: _Flow) -> _Flow:
        return _Flow(
            self.is_data or other.is_data,
            self.is_inside or other.is_inside,
            self.writers | other.writers,
            self.joins | other.joins,
            self.scores | other.scores,
            self.shares | other.shares,
            past=self.past | other.past,
        )


_CONSTANT = _Flow()


@dataclass(frozen=True)
class _Known:
    """What is known about a storage: its flow, and the dimensions of the tensor that it was made for."""

    flow: _Flow
    sizes: Dims = ()
    strides: Dims = ()
    labels: Labels = ()

    def labels_of(self, tensor: Tensor) -> Labels:
        return tuple(self._covered(*layout) for layout in zip(tensor.shape, tensor.stride(), strict=True))

    def _covered(self, size: int, stride: int) -> frozenset[Label]:
        """The labels over which a view's dimension ranges, if its steps are ``stride`` entries long."""
        reach = stride * (size - 1)
        dims = zip(self.sizes, self.strides, self.labels, strict=True)
        ranged = (labels for num, step, labels in dims if num > 1 and reach >= step and stride % (step * num))
        return frozenset().union(*ranged) if size > 1 else frozenset()


# Operations that sum over a product: places of the two factors among the arguments, and the dimension of each that is summed
_PRODUCTS = {
    "mm": (0, 1, -1, -2),
    "addmm": (1, 2, -1, -2),
    "_addmm_activation": (1, 2, -1, -2),
    "bmm": (0, 1, -1, -2),
    "baddbmm": (1, 2, -1, -2),
    "_grouped_mm": (0, 1, -1, -2),
    "mv": (0, 1, -1, -1),
    "addmv": (1, 2, -1, -1),
    "dot": (0, 1, -1, -1),
    "vdot": (0, 1, -1, -1),
    "linear": (0, 1, -1, -1),
}
_SLICES = ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "slice")
_NORMS = ("linalg_vector_norm", "norm")
_KEEP_LENGTH = ("clone", "_to_copy", "clamp", "clamp_min", "add", "sqrt", "rsqrt", "reciprocal", "pow")
_SOFTMAX = ("_softmax", "_safe_softmax")


class _Watcher(TorchDispatchMode):
    def __init__(self, model: nn.Module, scaling: Mapping[str, Dims], reads: Mapping[str, Dims]) -> None:
        super().__init__()
        self.scaling, self.reads = scaling, reads
        self.usage = Usage({name: Use() for name, _ in model.named_parameters()})
        self._known: dict[StorageWeakRef, _Known] = {}
        self._paths = [""]
        self._num_results = 0
        for name, parameter in model.named_parameters():
            self.put(parameter, _CONSTANT, tuple(frozenset({(name, dim)}) for dim in range(parameter.ndim)))
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: self._paths.append(path), prepend=True)
            module.register_forward_hook(self._leave)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import torch's compiler, which takes seconds

    def _leave(self, *_: object) -> None:
        self._paths.pop()

    def put(self, tensor: Tensor, flow: _Flow, labels: Labels = ()) -> None:
        known = _Known(flow, tuple(tensor.shape), tensor.stride(), labels) if any(labels) else _Known(flow)
        self._known[StorageWeakRef(tensor.untyped_storage())] = known

    def end(self, output: object) -> None:
        for tensor in _tensors(output):
            for name in self._of(tensor).flow.writers:
                self.usage.uses[name].makes_output = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = list(_tensors(result))
        inputs = list(_tensors((args, kwargs)))
        name = func._schema.name.removeprefix("aten::")
        if outputs and inputs:
            if name in _SLICES:
                self._slice(inputs[0], outputs)
            if func._schema.is_mutable or not self._are_views(outputs, inputs):
                self._record(name.removesuffix("_") if func._schema.is_mutable else name, args, inputs, outputs)
        return result

    @staticmethod
    def _are_views(outputs: list[Tensor], inputs: list[Tensor]) -> bool:
        storages = {StorageWeakRef(tensor.untyped_storage()) for tensor in inputs}
        return all(StorageWeakRef(tensor.untyped_storage()) in storages for tensor in outputs)

    def _record(self, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Works out what is known about the results of one operation."""
        labels: Labels = ()
        if name in _PRODUCTS:
            first, second, *dims = _PRODUCTS[name]
            flow = self._product((args[first], (dims[0],)), (args[second], (dims[1],)), name)
            flow = self._plus(flow, list(args[:first]))
        elif name == "mkldnn_rnn_layer":
            state = self._product((args[5], (-1,)), (args[2], (1,)), name)
            flow = self._plus(state | self._product((args[0], (-1,)), (args[1], (1,)), name), list(args[3:5]))
        elif name == "convolution":
            flow = self._plus(self._convolution(args), inputs[2:])
        elif name in ("embedding", "_embedding_bag", "_embedding_bag_forward_only", "index", "index_select"):
            flow, labels = self._lookup(name, args, inputs, outputs[0])
        elif any(self._of(tensor).flow.is_data for tensor in inputs):
            flow, labels = self._activation(name, args, inputs, outputs[0])
        else:
            flow, labels = self._of_weights(name, args, inputs, outputs[0])
        if flow.is_data:
            own = 1 << self._num_results
            self._num_results += 1
            flow = replace(flow, past=flow.past | own, stream=flow.stream | own)
        for output in outputs:
            self.put(output, flow, labels if output is outputs[0] else ())

    # Products

    def _product(self, first: tuple[Tensor, Dims], second: tuple[Tensor, Dims], name: str) -> _Flow:
        """Records a sum over the product of two tensors, each given with the dimensions that are summed."""
        factors = [(tensor, tuple(dim % tensor.ndim for dim in dims)) for tensor, dims in (first, second)]
        weight = self._which_is_weight(factors)
        if weight is None:
            return self._dot(*factors)
        (tensor, dims), (other, _) = factors[weight], factors[1 - weight]
        batch = {0} if tensor.ndim == 3 and name in ("bmm", "baddbmm", "_grouped_mm") else set()
        labels = self._labels(tensor)
        self._use(self._labels(other) if not self._of(other).flow.is_data else ())
        outs = [labels[dim] for dim in range(tensor.ndim) if dim not in dims and dim not in batch]
        return self._weigh([labels[dim] for dim in dims], outs, self._of(other).flow)

    def _which_is_weight(self, factors: list[tuple[Tensor, Dims]]) -> int | None:
        """The factor that is a weight. Of two, the one that does not depend on the example, or is summed as its layer does."""
        named = [
            place
            for place, (tensor, _) in enumerate(factors)
            if self._of(tensor).flow.mark != "weighted" and any(self._labels(tensor))
        ]
        if len(named) == 2 and len({self._of(tensor).flow.is_data for tensor, _ in factors}) == 2:
            named = [place for place in named if not self._of(factors[place][0]).flow.is_data]
        elif len(named) == 2 and self._of(factors[0][0]).flow.is_data:
            # Both were looked up: rows of a table have one dimension of it, chosen matrices have several.
            named = [place for place in named if sum(map(bool, self._labels(factors[place][0]))) > 1]
        if len(named) == 2:
            summed = [frozenset().union(*(self._labels(tensor)[dim] for dim in dims)) for tensor, dims in factors]
            named = [place for place in named if any(dim in self.reads.get(name, ()) for name, dim in summed[place])]
        if len(named) == 1:
            return named[0]
        for tensor, _ in factors:
            if not self._of(tensor).flow.is_data:
                self._unclear(self._labels(tensor), "a product with another parameter")
        return None

    def _weigh(self, summed: list[frozenset[Label]], written: list[frozenset[Label]], read: _Flow) -> _Flow:
        """Records the product of a weight with something whose flow is ``read``."""
        ins, outs = _by_name(summed), _by_name(written)
        names = sorted(ins) or sorted(outs)  # a weight of which one entry is summed has no label there
        scales = any(dim in self.scaling[name] for name in names for dim in (*ins.get(name, ()), *outs.get(name, ())))
        for name in names:
            reads, writes = ins.get(name, set()), outs.get(name, set())
            if reads & writes:
                self._unclear((frozenset({(name, 0)}),), "a product over a part of a dimension")
                continue
            product = Product(tuple(sorted(reads)), tuple(sorted(writes)), not read.is_inside, read.joins)
            self.usage.uses[name].products.append(product)
        for name in outs.keys() - set(names):  # such as the lengths of weight norm
            self.usage.uses[name].by_element = True
        if not scales:
            return replace(read | _CONSTANT, is_data=True, scores=frozenset(), shares=frozenset())
        for name in read.writers:
            self.usage.uses[name].is_inside = True
        return _Flow(is_data=True, is_inside=True, writers=frozenset(names), past=read.past)

    def _dot(self, first: tuple[Tensor, Dims], second: tuple[Tensor, Dims]) -> _Flow:
        """Records a sum over the product of two activations."""
        flows = [self._of(tensor).flow for tensor, _ in (first, second)]
        for number in flows[0].shares | flows[1].shares:
            self.usage.attention[number] = self.usage.events[number].path
        flow = replace(flows[0] | flows[1], is_data=True, shares=frozenset())
        if all(each.is_data for each in flows):
            tensor, dims = first
            number = self._event("dot", [tensor.shape[dim] for dim in dims], unit=all(each.mark == "unit" for each in flows))
            flow = replace(flow, scores=frozenset({number}))
        return flow

    def _convolution(self, args: Any) -> _Flow:
        x, weight, transposed = args[0], args[1], args[6]
        kernel = tuple(range(2, weight.ndim))
        if weight.shape[1] == 1 and args[8] > 1:  # depthwise
            return self._mixed([x, weight])
        return self._product((x, (1,)), (weight, (0 if transposed else 1, *kernel)), "convolution")

    def _plus(self, flow: _Flow, added: list[Tensor]) -> _Flow:
        """The flow of a product to which something is added, such as a bias."""
        return flow | self._mixed(added) if added else flow

    # Everything else

    def _lookup(self, name: str, args: Any, inputs: list[Tensor], output: Tensor) -> tuple[_Flow, Labels]:
        table = self._of(args[0])
        labels = self._labels(args[0])
        indices = inputs[1:]
        if not any(labels) or table.flow.is_data:
            return reduce(_Flow.__or__, (self._of(tensor).flow for tensor in inputs)), ()
        if name == "index":
            places = [place for place, index in enumerate(args[1]) if index is not None]
            num_new = max(index.ndim for index in indices) if indices else 0
        else:
            places, num_new = [args[1] if name == "index_select" else 0], 1
        picked = frozenset().union(*(labels[place] for place in places))
        by_example = any(self._of(index).flow.is_data for index in indices)
        rest = (*labels[: places[0]], *[frozenset[Label]()] * num_new, *labels[places[-1] + 1 :])
        if by_example or "embedding" in name:
            for owner, dim in picked:
                self.usage.uses[owner].looked_up.add(dim)
        elif len(rest) == output.ndim:
            return _CONSTANT, rest  # constants choose the rows, such as positions
        if "embedding" in name or len(rest) != output.ndim:
            rest = ()
        names = {owner for each in labels for owner, dim in each if (owner, dim) not in picked and dim in self.scaling[owner]}
        read = reduce(_Flow.__or__, (self._of(index).flow for index in indices), _CONSTANT)
        if not names:
            return replace(read, is_data=True), rest
        for owner in read.writers:  # such as a router, which chooses experts
            self.usage.uses[owner].is_inside = True
        return _Flow(is_data=True, is_inside=True, writers=frozenset(names), past=read.past), rest

    def _activation(self, name: str, args: Any, inputs: list[Tensor], output: Tensor) -> tuple[_Flow, Labels]:
        """An operation on activations, maybe with parameters, that is neither a product nor a lookup."""
        flows = [self._of(tensor).flow for tensor in inputs]
        if name == "sum":
            return self._sum(args, inputs[0]), ()
        flow = self._mixed(inputs)
        if name == "cat":
            dim = args[1] if len(args) > 1 else 0
            sizes = [tensor.shape[dim] for tensor in inputs if tensor.ndim == output.ndim]
            flow = replace(flow, joins=flow.joins | {self._event("join", sizes)})
        if name in _SOFTMAX:
            return replace(flow, shares=flow.scores, scores=frozenset()), ()
        data = [tensor for tensor, each in zip(inputs, flows, strict=True) if each.is_data]
        if name == "add" and len(data) == 2 and data[0].shape == data[1].shape:
            return self._residual(flow, *(self._of(tensor).flow for tensor in data)), ()
        if name == "mul" and len(data) == 1 and len(inputs) == 2:
            labels = _aligned([self._labels(tensor) for tensor in inputs if tensor is not data[0]], output.ndim)
            return replace(flow, mark="weighted" if any(labels) else flows[0].mark), labels
        return replace(flow, mark=self._mark(name, args, inputs, data)), ()

    def _mark(self, name: str, args: Any, inputs: list[Tensor], data: list[Tensor]) -> str:
        """What a result is made of, as far as dot products are concerned: lengths, vectors of length 1, products."""
        marks = [self._of(tensor).flow.mark for tensor in inputs]
        if name in _NORMS:
            return "norm"
        if (name == "pow" and args[1] == 2) or (name == "mul" and len(data) == 2 and self._is_same(*data)):
            return "square"
        if name in ("div", "mul") and len(inputs) == 2 and marks.count("norm") == 1:
            return "unit"
        if name == "mul" and len(data) == 2 and data[0].shape == data[1].shape:
            return "" if marks == ["unit", "unit"] else "product"
        return marks[0] if len(data) == 1 and marks[0] in ("norm", "unit") and name in _KEEP_LENGTH else ""

    def _is_same(self, first: Tensor, second: Tensor) -> bool:
        return StorageWeakRef(first.untyped_storage()) == StorageWeakRef(second.untyped_storage())

    def _sum(self, args: Any, tensor: Tensor) -> _Flow:
        """A sum over an activation. It may complete a product that was taken element by element."""
        flow, labels = self._of(tensor).flow, self._labels(tensor)
        dims = {dim % tensor.ndim for dim in (args[1] if len(args) > 1 and args[1] else range(tensor.ndim))}
        if flow.mark == "weighted" and any(labels[dim] for dim in dims):
            rest = [labels[dim] for dim in range(tensor.ndim) if dim not in dims]
            return self._weigh([labels[dim] for dim in sorted(dims)], rest, flow)
        if flow.mark == "product":
            self._event("dot", [math.prod(tensor.shape[dim] for dim in dims)])
        return replace(flow | _CONSTANT, mark="norm" if flow.mark == "square" else "")

    def _residual(self, flow: _Flow, first: _Flow, second: _Flow) -> _Flow:
        for stream, branch in ((first, second), (second, first)):
            if stream.stream & branch.past and branch.writers:
                self.usage.residuals.append(Residual(self._paths[-1], tuple(sorted(branch.writers))))
                return replace(flow, stream=stream.stream)
        return flow

    def _of_weights(self, name: str, args: Any, inputs: list[Tensor], output: Tensor) -> tuple[_Flow, Labels]:
        """An operation on parameters and constants alone. The result is still a weight, if dimensions can be followed."""
        labels = [self._labels(tensor) for tensor in inputs]
        if not any(map(any, labels)):
            return _CONSTANT, ()
        dim = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        if name == "stack":
            dim %= output.ndim
            labels = [(*each[:dim], frozenset(), *each[dim:]) for each in labels]
        if all(len(each) <= output.ndim for each in labels) and any(len(each) == output.ndim for each in labels):
            found = _aligned(labels, output.ndim)
            return _CONSTANT, tuple(each if size > 1 else frozenset() for each, size in zip(found, output.shape, strict=True))
        reduced = args[1] if name == "sum" or name == "mean" else args[2] if name in _NORMS and len(args) > 2 else None
        if reduced and len(inputs) == 1:
            gone = {each % inputs[0].ndim for each in reduced}
            return _CONSTANT, tuple(each for place, each in enumerate(labels[0]) if place not in gone)
        for each in labels:
            self._unclear(each, name)
        return _Flow(is_data=True, is_inside=True), ()

    def _mixed(self, tensors: list[Tensor]) -> _Flow:
        """The flow of an operation that mixes these tensors element by element."""
        flow = reduce(_Flow.__or__, (self._of(tensor).flow for tensor in tensors), _CONSTANT)
        for tensor in tensors:
            if not self._of(tensor).flow.is_data and self._use(self._labels(tensor)):
                flow = replace(flow, is_inside=True)
        return flow

    def _use(self, labels: Iterable[frozenset[Label]]) -> bool:
        """Records that parameters act element by element; returns whether one of them scales."""
        used = {label for each in labels for label in each}
        for name, _ in used:
            self.usage.uses[name].by_element = True
        return any(dim in self.scaling[name] for name, dim in used)

    def _unclear(self, labels: Iterable[frozenset[Label]], why: str) -> None:
        for name in {name for each in labels for name, _ in each}:
            self.usage.uses[name].unclear = why

    def _slice(self, whole: Tensor, parts: list[Tensor]) -> None:
        writers = self._of(whole).flow.writers
        for part in parts if writers else ():
            for size, size_of_part in zip(whole.shape, part.shape, strict=True):
                if size != size_of_part:
                    self._event("part", (size, size_of_part), weights=writers)

    def _event(self, kind: str, sizes: Iterable[int], *, weights: frozenset[str] = frozenset(), unit: bool = False) -> int:
        self.usage.events.append(Event(kind, self._paths[-1], tuple(sizes), weights, unit))
        return len(self.usage.events) - 1

    def _of(self, tensor: Tensor) -> _Known:
        return self._known.get(StorageWeakRef(tensor.untyped_storage()), _Known(_CONSTANT))

    def _labels(self, tensor: Tensor) -> Labels:
        return self._of(tensor).labels_of(tensor)


def _by_name(labels: Iterable[frozenset[Label]]) -> dict[str, set[int]]:
    dims: dict[str, set[int]] = {}
    for name, dim in frozenset[Label]().union(*labels):
        dims.setdefault(name, set()).add(dim)
    return dims


def _aligned(labels: list[Labels], ndim: int) -> Labels:
    """The labels of a result whose last dimensions correspond to the last dimensions of each operand."""
    padded = [(*[frozenset[Label]()] * (ndim - len(each)), *each) for each in labels]
    return tuple(frozenset[Label]().union(*dims) for dims in zip(*padded, strict=True))


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (tuple, list)):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = vars(value).values()
    for item in items:
        yield from _tensors(item)
