"""Watches one forward pass and records how each parameter is used (``uses``).

torch reduces linear layers, matmul, einsum and convolutions to a few operations on views of the parameters. The watcher sees
these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from functools import reduce
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from smupar.plan.forward.flows import CONSTANT, Dims, Flow, Known, Label, Labels, aligned, by_name
from smupar.plan.forward.remembered import remembered
from smupar.plan.forward.run import Example, run_copy
from smupar.plan.forward.uses import Event, Output, Residual, Scalar, Usage, Use, WeightProduct


def watch(model: nn.Module, example: Example, *, scaling: Mapping[str, Dims], reads: Mapping[str, Dims]) -> Usage:
    """What one forward pass of a copy of the model does with each parameter. Raises ``CannotRunError``.

    ``scaling`` holds the dimensions of each parameter that follow the width, and ``reads`` its input dimensions if the kind of
    its module decides them.
    """

    def run(copied: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Usage:
        watcher = _Watcher(copied, scaling, reads)
        for tensor in _tensors((args, kwargs)):
            watcher.put(tensor, Flow(is_data=True))
        with watcher:
            output = copied(*args, **kwargs)
        watcher.end(output)
        return watcher.usage

    return remembered(model, (example, scaling, reads), lambda: run_copy(model, example, run))


# Operations that sum over a product: positions of the two factors among the arguments, and the summed dimension of each
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
_REDUCTIONS = {"sum": 1, "mean": 1, "amax": 1, "norm": 2, "linalg_vector_norm": 2}  # position of ``dim`` among the arguments
_NORMS = ("linalg_vector_norm", "norm")
_NORM_LAYERS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_KEEP_LENGTH = ("clone", "_to_copy", "clamp", "clamp_min", "add", "sqrt", "rsqrt", "reciprocal", "pow")
_SOFTMAX = ("_softmax", "_safe_softmax")
_CHOICES = (*_SOFTMAX, "sigmoid", "hardsigmoid", "topk", "sort", "argmax")
# multiplication by a factor, and copies
_KEEP_ENDS = ("mul", "div", "clone", "_to_copy", "native_dropout", "index", "index_select")


class _Watcher(TorchDispatchMode):
    def __init__(self, model: nn.Module, scaling: Mapping[str, Dims], reads: Mapping[str, Dims]) -> None:
        super().__init__()
        self.scaling, self.reads = scaling, reads
        self.usage = Usage({name: Use() for name, _ in model.named_parameters()})
        self._known: dict[StorageWeakRef, Known] = {}
        self._paths = [""]
        self._num_results = 0
        self._sums: list[tuple[Residual, int, int]] = []  # with the bits of the sum, and of its branch alone
        for name, parameter in model.named_parameters():
            self.put(parameter, CONSTANT, tuple(frozenset({(name, dim)}) for dim in range(parameter.ndim)))
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: self._paths.append(path), prepend=True)
            module.register_forward_hook(self._leave)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import torch's compiler, which takes seconds

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        """Marks the output of a module. If modules return another module's output, the innermost one made it."""
        path = self._paths.pop()
        for tensor in islice(_tensors(output), 1):
            known = self._of(tensor)
            if known.flow.ends:
                self.usage.same[path] = known.flow.ends
            elif known.flow.is_data:
                marked = replace(known, flow=replace(known.flow, ends=frozenset({path})))
                self._known[StorageWeakRef(tensor.untyped_storage())] = marked

    def put(self, tensor: Tensor, flow: Flow, labels: Labels = ()) -> None:
        known = Known(flow, tuple(tensor.shape), tensor.stride(), labels) if any(labels) else Known(flow)
        self._known[StorageWeakRef(tensor.untyped_storage())] = known

    def end(self, output: object) -> None:
        """Records which weights make the output. The loss comes first, then the logits: a weight that makes one of these is not
        judged by others."""
        for residual, bit, _ in self._sums:
            around = (other.path for other, _, own in self._sums if bit & own)  # sums whose branch contains this one
            if not any(_is_in(residual.path, path) for path in around):
                self.usage.residuals.append(residual)
        judged: set[str] = set()
        for part in _by_weight(output):
            made = [(tensor, self._of(tensor).flow) for tensor in _tensors(part) if self._of(tensor).flow.writers]
            self.usage.outputs = self.usage.outputs or [Output(tuple(tensor.shape), flow.is_normed) for tensor, flow in made]
            for _, flow in made:
                for use in (self.usage.uses[name] for name in flow.writers - judged):
                    use.makes_output |= not flow.is_normed
                    use.makes_normed_output |= flow.is_normed
            judged |= frozenset[str]().union(*(flow.writers for _, flow in made))
        for tensor in _tensors(output):
            self._use_numbers(self._of(tensor).flow)

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
        """Derives the facts about the results of one operation."""
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

    def _product(self, first: tuple[Tensor, Dims], second: tuple[Tensor, Dims], name: str) -> Flow:
        """Records a sum over the product of two tensors, each given with its summed dimensions."""
        factors = [(tensor, tuple(dim % tensor.ndim for dim in dims)) for tensor, dims in (first, second)]
        weight = self._which_is_weight(factors)
        if weight is None:
            return self._dot(*factors)
        (tensor, dims), (other, _) = factors[weight], factors[1 - weight]
        batch = {0} if tensor.ndim == 3 and name in ("bmm", "baddbmm", "_grouped_mm") else set()
        labels = self._labels(tensor)
        self._use(self._labels(other) if not self._of(other).flow.is_data else ())
        # A matrix for each of some heads or groups, whose number scales, writes as many outputs.
        batch -= {dim for dim in batch if any(at in self.scaling[name] for name, at in labels[dim])}
        outs = [labels[dim] for dim in range(tensor.ndim) if dim not in dims and dim not in batch]
        return self._weigh([labels[dim] for dim in dims], outs, self._of(other).flow)

    def _which_is_weight(self, factors: list[tuple[Tensor, Dims]]) -> int | None:
        """The position of the factor that is a weight. If both may be, it is the one that does not depend on the example, or
        the one that is summed like a weight of its layer."""
        named = [
            place
            for place, (tensor, _) in enumerate(factors)
            if self._of(tensor).flow.mark != "weighted" and any(self._labels(tensor))
        ]
        if len(named) == 2 and len({self._of(tensor).flow.is_data for tensor, _ in factors}) == 2:
            named = [place for place in named if not self._of(factors[place][0]).flow.is_data]
        elif len(named) == 2 and self._of(factors[0][0]).flow.is_data:
            # Both were looked up: rows of a table have one of its dimensions, chosen matrices have several.
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

    def _weigh(self, summed: list[frozenset[Label]], written: list[frozenset[Label]], read: Flow) -> Flow:
        """Records the product of a weight with something whose flow is ``read``."""
        ins, outs = by_name(summed), by_name(written)
        self._use_numbers(read)
        names = sorted(ins) or sorted(outs)  # a summed dimension of size 1 has no label
        scales = any(dim in self.scaling[name] for name in names for dim in (*ins.get(name, ()), *outs.get(name, ())))
        for name in names:
            reads, writes = ins.get(name, set()), outs.get(name, set())
            if reads & writes:
                self._unclear((frozenset({(name, 0)}),), "a product over a part of a dimension")
                continue
            product = WeightProduct(tuple(sorted(reads)), tuple(sorted(writes)), not read.is_inside, read.joins)
            self.usage.uses[name].products.append(product)
            self.usage.uses[name].reads_constant |= not read.is_data
        for name in outs.keys() - set(names):  # such as the lengths of weight norm
            self.usage.uses[name].by_element = True
        if not scales:
            return replace(read | CONSTANT, is_data=True, scores=frozenset(), shares=frozenset())
        for name in read.writers:
            self.usage.uses[name].is_inside = True
        writers = frozenset(names)
        return Flow(is_data=True, is_inside=True, writers=writers, logits=writers, past=read.past)

    def _dot(self, first: tuple[Tensor, Dims], second: tuple[Tensor, Dims]) -> Flow:
        """Records a sum over the product of two activations."""
        flows = [self._of(tensor).flow for tensor, _ in (first, second)]
        for number in flows[0].shares | flows[1].shares:
            self.usage.attention[number] = self.usage.events[number].path
        self._route(*flows)
        flow = replace(flows[0] | flows[1], is_data=True, shares=frozenset(), logits=frozenset())
        if all(each.is_data for each in flows):
            tensor, dims = first
            kind = "mix" if flows[0].shares or flows[1].shares else "dot"
            dot = self._event(kind, [tensor.shape[dim] for dim in dims], unit=all(each.mark == "unit" for each in flows))
            for number in flow.numbers:
                self.usage.numbers[number].dots.add(dot)
            flow = replace(flow, scores=frozenset({dot}), numbers=frozenset())
        return flow

    def _route(self, first: Flow, second: Flow) -> None:
        """Records which weights weight or choose the outputs of others, where one of two flows is a choice."""
        for choice, other in ((first, second), (second, first)):
            if choice.is_choice and not other.is_choice and other.is_data:
                for name in choice.writers:
                    self.usage.uses[name].routes = True

    def _convolution(self, args: Any) -> Flow:
        x, weight, transposed = args[0], args[1], args[6]
        kernel = tuple(range(2, weight.ndim))
        if weight.shape[1] == 1 and args[8] > 1:  # depthwise
            return self._mixed([x, weight])
        return self._product((x, (1,)), (weight, (0 if transposed else 1, *kernel)), "convolution")

    def _plus(self, flow: Flow, added: list[Tensor]) -> Flow:
        """The flow of a product after something, such as a bias, is added."""
        return flow | self._mixed(added) if added else flow

    # Everything else

    def _lookup(self, name: str, args: Any, inputs: list[Tensor], output: Tensor) -> tuple[Flow, Labels]:
        """A lookup: indices choose rows of a table, or entries of an activation."""
        indices = inputs[1:]
        labels = self._labels(args[0])
        if not any(labels) or self._of(args[0]).flow.is_data:
            for index in indices:
                self._route(self._of(args[0]).flow, self._of(index).flow)
            return reduce(Flow.__or__, (self._of(tensor).flow for tensor in inputs)), ()
        picked, rest = self._picked(name, args, labels, indices)
        rest = rest if len(rest) == output.ndim else ()
        is_layer = "embedding" in name
        if not is_layer and rest and not any(self._of(index).flow.is_data for index in indices):
            return CONSTANT, rest  # constants such as positions choose the rows
        chooses_inside = any(self._of(index).flow.writers for index in indices)
        for owner, dim in picked:
            if chooses_inside and not is_layer:
                self.usage.uses[owner].by_element = True
            else:
                self.usage.uses[owner].looked_up.add(dim)
        written = frozenset[Label]().union(*labels) - picked
        names = frozenset(owner for owner, dim in written if dim in self.scaling[owner])
        read = reduce(Flow.__or__, (self._of(index).flow for index in indices), CONSTANT)
        if names:
            for owner in read.writers:  # the weights that wrote the indices, such as a router's
                self.usage.uses[owner].is_inside = True
                self.usage.uses[owner].routes |= read.is_choice
            read = Flow(is_inside=True, writers=names, past=read.past)
        return replace(read, is_data=True), () if is_layer else rest

    @staticmethod
    def _picked(name: str, args: Any, labels: Labels, indices: list[Tensor]) -> tuple[frozenset[Label], Labels]:
        """The labels of the dimensions that are indexed, and the labels of the result."""
        places, num_new = [args[1] if name == "index_select" else 0], 1
        if name == "index":
            places = [place for place, index in enumerate(args[1]) if index is not None]
            num_new = max(index.ndim for index in indices)
        picked = frozenset[Label]().union(*(labels[place] for place in places))
        return picked, (*labels[: places[0]], *[frozenset[Label]()] * num_new, *labels[places[-1] + 1 :])

    def _activation(self, name: str, args: Any, inputs: list[Tensor], output: Tensor) -> tuple[Flow, Labels]:
        """An operation on activations, and perhaps parameters, that is neither a product nor a lookup."""
        flows = [self._of(tensor).flow for tensor in inputs]
        if name == "sum":
            return self._sum(args, inputs[0]), ()
        data = [tensor for tensor, each in zip(inputs, flows, strict=True) if each.is_data]
        flow = self._chosen(name, self._mixed(inputs), data)
        if name in _NORM_LAYERS or self._is_quotient_by_size(name, flows):
            flow = replace(flow, is_normed=True)
        if name == "cat":
            flow = replace(flow, joins=flow.joins | {self._join(args, inputs, output)})
        if name in _SOFTMAX:
            return replace(flow, shares=flow.scores, scores=frozenset()), ()
        if len(data) == 1 and name in ("mul", "div"):
            flow = self._times(flow, args[:2], data[0])
        if len(data) == 1 and name in _KEEP_ENDS:
            flow = replace(flow, ends=self._of(data[0]).flow.ends)
        if name == "add" and len(data) == 2 and data[0].shape == data[1].shape:
            return self._residual(flow, *(self._of(tensor).flow for tensor in data)), ()
        if name == "mul" and len(data) == 1 and len(inputs) == 2:
            labels = aligned([self._labels(tensor) for tensor in inputs if tensor is not data[0]], output.ndim)
            return replace(flow, mark="weighted" if any(labels) else flows[0].mark), labels
        return replace(flow, mark=self._mark(name, args, inputs, data)), ()

    def _chosen(self, name: str, flow: Flow, data: list[Tensor]) -> Flow:
        """Records what is weighted by a choice; returns the flow of the result with its logits and choices."""
        if name in _CHOICES:
            return replace(flow, choices=flow.choices | flow.logits)
        if name not in ("mul", "div") or len(data) != 2:
            return flow
        if name == "mul" and data[0].shape != data[1].shape:  # equal shapes gate each entry, as in a GLU
            self._route(*(self._of(tensor).flow for tensor in data))
        return replace(flow, logits=frozenset())

    def _join(self, args: Any, inputs: list[Tensor], output: Tensor) -> int:
        """Records a concatenation; returns the number of the event."""
        dim = args[1] if len(args) > 1 else 0
        return self._event("join", [tensor.shape[dim] for tensor in inputs if tensor.ndim == output.ndim])

    def _times(self, flow: Flow, args: Any, activation: Tensor) -> Flow:
        """The flow of an activation that is multiplied or divided by a number of the module."""
        factors = [arg for arg in args if arg is not activation]
        if len(factors) != 1 or (isinstance(factors[0], Tensor) and (factors[0].numel() != 1 or factors[0].is_meta)):
            return flow
        number = Scalar(self._paths[-1], float(factors[0]), set(flow.scores))
        self.usage.numbers.append(number)
        return flow if flow.scores else replace(flow, numbers=flow.numbers | {len(self.usage.numbers) - 1})

    def _use_numbers(self, flow: Flow) -> None:
        """Records that a weight or the output reads something that was multiplied by numbers."""
        for number in flow.numbers:
            self.usage.numbers[number].is_elsewhere = True

    def _mark(self, name: str, args: Any, inputs: list[Tensor], data: list[Tensor]) -> str:
        """The mark of a result, for finding dot products and norms: a length, a vector of length 1, a product and so on
        (``Flow.mark``)."""
        marks = [self._of(tensor).flow.mark for tensor in inputs]
        if name in _NORMS:
            return "norm"
        if name == "mean" and marks[0] == "square":
            return "rms"
        if (name == "pow" and args[1] == 2) or (name == "mul" and len(data) == 2 and self._is_same(*data)):
            return "square"
        if name in ("div", "mul") and len(inputs) == 2 and marks.count("norm") == 1:
            return "unit"
        if name == "mul" and len(data) == 2 and data[0].shape == data[1].shape:
            return "" if marks == ["unit", "unit"] else "product"
        return marks[0] if len(data) == 1 and marks[0] in ("norm", "rms", "unit") and name in _KEEP_LENGTH else ""

    def _is_quotient_by_size(self, name: str, flows: list[Flow]) -> bool:
        """Whether this divides something by its own length or rms."""
        sizes = [flow for flow in flows if flow.mark in ("norm", "rms")]
        return name in ("div", "mul") and len(flows) == 2 and len(sizes) == 1 and flows[0].writers == flows[1].writers

    def _is_same(self, first: Tensor, second: Tensor) -> bool:
        return StorageWeakRef(first.untyped_storage()) == StorageWeakRef(second.untyped_storage())

    def _sum(self, args: Any, tensor: Tensor) -> Flow:
        """A sum over an activation. It may complete a product that was computed element by element."""
        flow, labels = self._of(tensor).flow, self._labels(tensor)
        dims = {dim % tensor.ndim for dim in (args[1] if len(args) > 1 and args[1] else range(tensor.ndim))}
        if flow.mark == "weighted" and any(labels[dim] for dim in dims):
            rest = [labels[dim] for dim in range(tensor.ndim) if dim not in dims]
            return self._weigh([labels[dim] for dim in sorted(dims)], rest, flow)
        if flow.mark == "product":
            self._event("dot", [math.prod(tensor.shape[dim] for dim in dims)])
        return replace(flow | CONSTANT, mark="norm" if flow.mark == "square" else "")

    def _residual(self, flow: Flow, first: Flow, second: Flow) -> Flow:
        for stream, branch in ((first, second), (second, first)):
            if stream.stream & branch.past:
                residual = Residual(self._paths[-1], tuple(sorted(branch.ends)))
                self._sums.append((residual, 1 << self._num_results, branch.past & ~stream.past))
                return replace(flow, stream=stream.stream)
        both = first.ends and second.ends  # attention and MLP in parallel
        return replace(flow, ends=first.ends | second.ends) if both else flow

    def _of_weights(self, name: str, args: Any, inputs: list[Tensor], output: Tensor) -> tuple[Flow, Labels]:
        """An operation on parameters and constants alone. The result still counts as a weight if its dimensions can be
        followed."""
        labels = [self._labels(tensor) for tensor in inputs]
        if not any(map(any, labels)):
            return CONSTANT, ()
        if name == "stack":
            dim = (args[1] if len(args) > 1 else 0) % output.ndim
            labels = [(*each[:dim], frozenset(), *each[dim:]) for each in labels]
        elif name in _REDUCTIONS and len(args) > _REDUCTIONS[name] and args[_REDUCTIONS[name]]:
            gone = {dim % inputs[0].ndim for dim in args[_REDUCTIONS[name]]} if output.ndim < inputs[0].ndim else set()
            labels = [tuple(each for dim, each in enumerate(labels[0]) if dim not in gone)]
        if max(map(len, labels)) == output.ndim:
            found = aligned(labels, output.ndim)
            return CONSTANT, tuple(each if size > 1 else frozenset() for each, size in zip(found, output.shape, strict=True))
        for each in labels:
            self._unclear(each, name)
        return Flow(is_data=True, is_inside=True), ()

    def _mixed(self, tensors: list[Tensor]) -> Flow:
        """The flow of an operation that mixes these tensors element by element."""
        flow = reduce(Flow.__or__, (self._of(tensor).flow for tensor in tensors), CONSTANT)
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

    def _of(self, tensor: Tensor) -> Known:
        return self._known.get(StorageWeakRef(tensor.untyped_storage()), Known(CONSTANT))

    def _labels(self, tensor: Tensor) -> Labels:
        return self._of(tensor).labels_of(tensor)


def _is_in(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.") or not other


def _by_weight(output: Any) -> list[Any]:
    """The parts of an output: the loss, then the logits, then everything else, as transformers names them."""
    if not isinstance(output, Mapping):
        return [output]
    logits = [value for key, value in output.items() if str(key).startswith("logits")]
    return [output.get("loss"), logits, output]


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
