"""Derives what is known about the results of torch's basic operations from what is known about their inputs.

torch reduces linear layers, matmul, einsum and convolutions to a few operations on views of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from smupar.plan.forward.flows import CONSTANT, Dims, Flow, Label, Labels, aligned
from smupar.plan.forward.recorder import UsageRecorder
from smupar.plan.forward.uses import Residual, Scalar

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
_REDUCTIONS = {"sum": 1, "mean": 1, "amax": 1, "norm": 2, "linalg_vector_norm": 2}  # position of ``dim`` among the arguments
_NORMS = ("linalg_vector_norm", "norm")
_DISTANCES = ("_cdist_forward", "_euclidean_dist")
_SQUARES = frozenset({"square", "norm", "distance"})  # marks of squared entries, or of their sums
_NORM_LAYERS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_KEEP_LENGTH = ("clone", "_to_copy", "clamp", "clamp_min", "add", "sqrt", "rsqrt", "reciprocal", "pow")
_SOFTMAX = ("_softmax", "_safe_softmax")
_CHOICES = (*_SOFTMAX, "sigmoid", "hardsigmoid", "topk", "sort", "argmax")
_FROM_LOGITS = (*_SOFTMAX, "sigmoid", "hardsigmoid", "exp", "exp2")  # their results depend on the size of their inputs
# multiplication by a factor, and copies
_KEEP_ENDS = ("mul", "div", "clone", "_to_copy", "native_dropout", "index", "index_select")


class Operations(UsageRecorder):
    """Derives what is known from the operations of one pass, in the order in which they run."""

    def __init__(self, model: nn.Module, scaling: Mapping[str, Dims], reads: Mapping[str, Dims]) -> None:
        super().__init__(model, scaling, reads)
        self._num_results = 0
        self._sums: list[tuple[Residual, int, int]] = []  # (residual sum, bit of the sum, bits of its branch alone)

    def record(self, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Derives what is known about the results of one operation."""
        labels: Labels = ()
        if name in _PRODUCTS and not self._is_for_each_neuron(name, inputs):
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
        elif any(self.known_of(tensor).flow.is_data for tensor in inputs):
            flow, labels = self._activation(name, args, inputs, outputs[0])
        else:
            flow, labels = self._of_weights(name, args, inputs, outputs[0])
        if flow.is_data:
            bit = 1 << self._num_results
            self._num_results += 1
            flow = replace(flow, past=flow.past | bit, stream=flow.stream | bit)
        for output in outputs:
            # Indices and comparisons choose, but are no longer the numbers that were compared.
            is_number = output.is_floating_point() or output.is_complex()
            known = flow if is_number else replace(flow, scores=frozenset(), mixed=frozenset())
            self.put(output, known, labels if output is outputs[0] else ())

    def slice(self, whole: Tensor, parts: list[Tensor]) -> None:
        """Records a slice, if weights made the sliced tensor."""
        writers = self.known_of(whole).flow.writers
        for part in parts if writers else ():
            for size, size_of_part in zip(whole.shape, part.shape, strict=True):
                if size != size_of_part:
                    self.add_event("part", (size, size_of_part), weights=writers)

    # Products

    def _product(self, first: tuple[Tensor, Dims], second: tuple[Tensor, Dims], name: str) -> Flow:
        """Records a sum over the product of two tensors, each given with its summed dimensions."""
        factors = [(tensor, tuple(dim % tensor.ndim for dim in dims)) for tensor, dims in (first, second)]
        weight = self._which_is_weight(factors)
        if weight is None:
            return self._dot(*factors)
        (tensor, dims), (other, _) = factors[weight], factors[1 - weight]
        batch = {0} if tensor.ndim == 3 and name in ("bmm", "baddbmm", "_grouped_mm") else set()
        labels = self.labels_of(tensor)
        self.use(self.labels_of(other) if not self.known_of(other).flow.is_data else ())
        # A batch has one matrix for each head or group. If the number of matrices scales, each writes outputs of its own.
        batch -= {dim for dim in batch if any(at in self.scaling[name] for name, at in labels[dim])}
        outs = [labels[dim] for dim in range(tensor.ndim) if dim not in dims and dim not in batch]
        return self.weigh([labels[dim] for dim in dims], outs, self.known_of(other).flow)

    def _is_for_each_neuron(self, name: str, inputs: list[Tensor]) -> bool:
        """Whether parameters are multiplied for each neuron alone, as when a filter of each neuron is computed: only the number
        of their products scales."""
        labels = [self.labels_of(tensor) for tensor in inputs]
        if name != "bmm" or not all(map(any, labels)) or any(self.known_of(tensor).flow.is_data for tensor in inputs):
            return False
        scaling = [{dim for dim in range(3) if any(at in self.scaling[name] for name, at in dims[dim])} for dims in labels]
        return scaling == [{0}, {0}]

    def _which_is_weight(self, factors: list[tuple[Tensor, Dims]]) -> int | None:
        """The position of the factor that is a weight; None if this is unclear. If both factors may be weights, the weight is
        the factor that does not depend on the example, or the factor that is summed over its own input dimensions."""
        named = [
            place
            for place, (tensor, _) in enumerate(factors)
            if self.known_of(tensor).flow.mark != "weighted" and any(self.labels_of(tensor))
        ]
        if len(named) == 2 and len({self.known_of(tensor).flow.is_data for tensor, _ in factors}) == 2:
            named = [place for place in named if not self.known_of(factors[place][0]).flow.is_data]
        elif len(named) == 2 and self.known_of(factors[0][0]).flow.is_data:
            # Both were looked up. A row of an embedding table has one labelled dimension; a chosen matrix, the weight, has
            # more.
            named = [place for place in named if sum(map(bool, self.labels_of(factors[place][0]))) > 1]
        if len(named) == 2:
            summed = [frozenset().union(*(self.labels_of(tensor)[dim] for dim in dims)) for tensor, dims in factors]
            named = [place for place in named if any(dim in self.reads.get(name, ()) for name, dim in summed[place])]
        if len(named) == 1:
            return named[0]
        for tensor, _ in factors:
            if not self.known_of(tensor).flow.is_data:
                self.mark_unclear(self.labels_of(tensor), "a product with another parameter")
        return None

    def _dot(self, first: tuple[Tensor, Dims], second: tuple[Tensor, Dims]) -> Flow:
        """Records a sum over the product of two activations."""
        flows = [self.known_of(tensor).flow for tensor, _ in (first, second)]
        for number in flows[0].shares | flows[1].shares:
            self.usage.attention[number] = self.usage.events[number].path
        self.route(*flows)
        self.multiply(*flows)
        flow = replace(flows[0] | flows[1], is_data=True, shares=frozenset(), logits=frozenset())
        if all(factor.is_data for factor in flows):
            tensor, dims = first
            kind = "mix" if flows[0].shares or flows[1].shares else "dot"
            is_unit = all(factor.mark == "unit" for factor in flows)
            writers = flows[0].writers | flows[1].writers
            dot = self.add_event(kind, [tensor.shape[dim] for dim in dims], weights=writers, unit=is_unit)
            for number in flow.numbers:
                self.usage.numbers[number].dots.add(dot)
            flow = replace(flow, scores=frozenset({dot}), mixed=frozenset(), numbers=frozenset())
        return flow

    def _convolution(self, args: Any) -> Flow:
        x, weight, transposed = args[0], args[1], args[6]
        kernel = tuple(range(2, weight.ndim))
        if weight.shape[1] == 1 and args[8] > 1:  # depthwise
            return self._mixed([x, weight])
        return self._product((x, (1,)), (weight, (0 if transposed else 1, *kernel)), "convolution")

    def _plus(self, flow: Flow, added: list[Tensor]) -> Flow:
        """The flow of a product to which tensors such as a bias are added."""
        return flow | self._mixed(added) if added else flow

    # Everything else

    def _lookup(self, name: str, args: Any, inputs: list[Tensor], output: Tensor) -> tuple[Flow, Labels]:
        """The flow and labels of a lookup, in which indices choose rows of a table or entries of an activation."""
        indices = inputs[1:]
        labels = self.labels_of(args[0])
        if not any(labels) or self.known_of(args[0]).flow.is_data:
            for index in indices:
                self.route(self.known_of(args[0]).flow, self.known_of(index).flow)
            return reduce(Flow.__or__, (self.known_of(tensor).flow for tensor in inputs)), ()
        picked, rest = self._picked(name, args, labels, indices)
        rest = rest if len(rest) == output.ndim else ()
        is_layer = "embedding" in name
        if not is_layer and rest and not any(self.known_of(index).flow.is_data for index in indices):
            return CONSTANT, rest  # the indices are constants, such as positions
        chooses_inside = any(self.known_of(index).flow.writers for index in indices)
        for owner, dim in picked:
            if chooses_inside and not is_layer:
                self.usage.uses[owner].by_element = True
            else:
                self.usage.uses[owner].looked_up.add(dim)
        written = frozenset[Label]().union(*labels) - picked
        names = frozenset(owner for owner, dim in written if dim in self.scaling[owner])
        read = reduce(Flow.__or__, (self.known_of(index).flow for index in indices), CONSTANT)
        if names:
            for owner in read.writers:  # the weights that wrote the indices, such as a router's
                self.usage.uses[owner].is_inside = True
                self.usage.uses[owner].routes |= read.is_choice
            read = Flow(is_inside=True, writers=names, past=read.past)
        return replace(read, is_data=True), () if is_layer else rest

    @staticmethod
    def _picked(name: str, args: Any, labels: Labels, indices: list[Tensor]) -> tuple[frozenset[Label], Labels]:
        """The labels of the indexed dimensions, and the labels of the result."""
        places, num_new = [args[1] if name == "index_select" else 0], 1
        if name == "index":
            places = [place for place, index in enumerate(args[1]) if index is not None]
            num_new = max(index.ndim for index in indices)
        picked = frozenset[Label]().union(*(labels[place] for place in places))
        return picked, (*labels[: places[0]], *[frozenset[Label]()] * num_new, *labels[places[-1] + 1 :])

    def _activation(self, name: str, args: Any, inputs: list[Tensor], output: Tensor) -> tuple[Flow, Labels]:
        """The flow and labels of an operation on activations that is neither a product nor a lookup."""
        flows = [self.known_of(tensor).flow for tensor in inputs]
        if name == "sum":
            return self._sum(args, inputs[0]), ()
        self._see_distance(name, inputs, output)
        data = [tensor for tensor, input_flow in zip(inputs, flows, strict=True) if input_flow.is_data]
        flow = self._with_choices(name, self._mixed(inputs), data)
        if name in _NORM_LAYERS or self._is_quotient_by_size(name, flows):
            flow = replace(flow, is_normed=True)
        if name == "cat":
            flow = replace(flow, joins=flow.joins | {self._join(args, inputs, output)})
        if name in _SOFTMAX:
            return replace(flow, shares=flow.scores | flow.mixed, scores=frozenset(), mixed=frozenset()), ()
        if len(data) == 1 and name in ("mul", "div"):
            flow = self._times(name, flow, args[:2], data[0])
        if len(data) == 1 and name in _KEEP_ENDS:
            flow = replace(flow, ends=self.known_of(data[0]).flow.ends)
        if name == "add" and len(data) == 2 and data[0].shape == data[1].shape:
            return self._residual(flow, *(self.known_of(tensor).flow for tensor in data)), ()
        if name == "mul" and len(data) == 1 and len(inputs) == 2:
            labels = aligned([self.labels_of(tensor) for tensor in inputs if tensor is not data[0]], output.ndim)
            return replace(flow, mark="weighted" if any(labels) else self.known_of(data[0]).flow.mark), labels
        mark = self._mark(name, args, inputs, data)
        return replace(flow, mark=mark, lengths=self._lengths(mark, inputs, output)), ()

    def _lengths(self, mark: str, inputs: list[Tensor], output: Tensor) -> frozenset[int]:
        """Records that vectors are divided by their lengths, if they are; returns the number of the event."""
        lengths = next((tensor for tensor in inputs if self.known_of(tensor).flow.mark == "norm"), None)
        if mark != "unit" or lengths is None:
            return frozenset()
        num_lengths = lengths.untyped_storage().nbytes() // lengths.element_size()  # before they were expanded
        return frozenset({self.add_event("length", [output.numel() // max(num_lengths, 1)])})

    def _see_distance(self, name: str, inputs: list[Tensor], output: Tensor) -> None:
        """Records the distances that torch's own operations compute."""
        if name in _DISTANCES:
            self.add_event("distance", inputs[0].shape[-1:])
        elif name in _NORMS and self.known_of(inputs[0]).flow.mark == "difference":
            self.add_event("distance", [inputs[0].numel() // output.numel()])

    def _with_choices(self, name: str, flow: Flow, data: list[Tensor]) -> Flow:
        """Completes a flow with its logits and choices, and records which outputs a choice multiplies and which dot products
        are logits."""
        if name in _FROM_LOGITS:
            self.usage.logits |= flow.scores | flow.mixed
        if name in _CHOICES:
            return replace(flow, choices=flow.choices | flow.logits)
        if name not in ("mul", "div") or len(data) != 2:
            return flow
        if name == "mul" and data[0].shape != data[1].shape:  # a product of equal shapes is a gate on each entry, as in a GLU
            self.route(*(self.known_of(tensor).flow for tensor in data))
        if name == "mul":
            self.multiply(*(self.known_of(tensor).flow for tensor in data))
        return replace(flow, logits=frozenset())

    def _join(self, args: Any, inputs: list[Tensor], output: Tensor) -> int:
        """Records a concatenation; returns the number of the event."""
        dim = args[1] if len(args) > 1 else 0
        return self.add_event("join", [tensor.shape[dim] for tensor in inputs if tensor.ndim == output.ndim])

    def _times(self, name: str, flow: Flow, args: Any, activation: Tensor) -> Flow:
        """The flow of an activation that is multiplied or divided by a number of the module."""
        factors = [arg for arg in args if arg is not activation]
        if len(factors) != 1 or (isinstance(factors[0], Tensor) and (factors[0].numel() != 1 or factors[0].is_meta)):
            return flow
        value, lengths = float(factors[0]), self.known_of(activation).flow.lengths
        # sqrt(n) times a unit vector of n entries is a norm by the root mean square: its entries have a size of 1.
        is_rms = name == "mul" and any(math.isclose(value**2, self.usage.events[place].sizes[0]) for place in lengths)
        number = Scalar(self.paths[-1], value, set(flow.scores | lengths if is_rms else flow.scores))
        self.usage.numbers.append(number)
        return flow if number.dots else replace(flow, numbers=flow.numbers | {len(self.usage.numbers) - 1})

    def _mark(self, name: str, args: Any, inputs: list[Tensor], data: list[Tensor]) -> str:
        """The mark of a result (``Flow.mark``), which helps to recognise dot products and norms."""
        marks = [self.known_of(tensor).flow.mark for tensor in inputs]
        if name in _NORMS:
            return "norm"
        if _is_difference(name, inputs, marks):
            return "difference"
        if name == "mean" and marks[0] == "square":
            return "rms"
        if (name == "pow" and args[1] == 2) or (name == "mul" and len(data) == 2 and self._is_same(*data)):
            return "distance" if marks[0] == "difference" else "square"
        if name in ("div", "mul") and len(inputs) == 2 and marks.count("norm") == 1:
            return "unit"
        if _is_product(name, marks, data):
            return "product"
        return marks[0] if len(data) == 1 and marks[0] in ("norm", "rms", "unit", "difference") and name in _KEEP_LENGTH else ""

    def _is_quotient_by_size(self, name: str, flows: list[Flow]) -> bool:
        """Whether the operation divides a tensor by its own length or rms."""
        sizes = [flow for flow in flows if flow.mark in ("norm", "rms")]
        return name in ("div", "mul") and len(flows) == 2 and len(sizes) == 1 and flows[0].writers == flows[1].writers

    def _is_same(self, first: Tensor, second: Tensor) -> bool:
        return StorageWeakRef(first.untyped_storage()) == StorageWeakRef(second.untyped_storage())

    def _sum(self, args: Any, tensor: Tensor) -> Flow:
        """The flow of a sum over an activation, which may complete a product that was computed element by element."""
        flow, labels = self.known_of(tensor).flow, self.labels_of(tensor)
        dims = {dim % tensor.ndim for dim in (args[1] if len(args) > 1 and args[1] else range(tensor.ndim))}
        if flow.mark == "weighted" and any(labels[dim] for dim in dims):
            rest = [labels[dim] for dim in range(tensor.ndim) if dim not in dims]
            return self.weigh([labels[dim] for dim in sorted(dims)], rest, flow)
        size = math.prod(tensor.shape[dim] for dim in dims)
        if flow.mark == "product":
            self.add_event("dot", [size], weights=flow.writers)
        elif flow.mark == "distance":
            self.add_event("distance", [size])
        elif flow.mark != "square" and flow.is_inside:
            self.add_event("sum", [size])
        return replace(flow | CONSTANT, mark="norm" if flow.mark == "square" else "")

    def _residual(self, flow: Flow, first: Flow, second: Flow) -> Flow:
        for stream, branch in ((first, second), (second, first)):
            if stream.stream & branch.past:
                residual = Residual(self.paths[-1], tuple(sorted(branch.ends)))
                self._sums.append((residual, 1 << self._num_results, branch.past & ~stream.past))
                return replace(flow, stream=stream.stream)
        both = first.ends and second.ends  # attention and MLP in parallel
        return replace(flow, ends=first.ends | second.ends) if both else flow

    def _of_weights(self, name: str, args: Any, inputs: list[Tensor], output: Tensor) -> tuple[Flow, Labels]:
        """The flow and labels of an operation on parameters and constants alone. The result still counts as a weight if its
        labels are known."""
        labels = [self.labels_of(tensor) for tensor in inputs]
        if not any(map(any, labels)):
            return CONSTANT, ()
        if name in _PRODUCTS:  # for each neuron
            labels = [(tensor_labels[0], frozenset(), frozenset()) for tensor_labels in labels]
        elif name == "stack":
            dim = (args[1] if len(args) > 1 else 0) % output.ndim
            labels = [(*tensor_labels[:dim], frozenset(), *tensor_labels[dim:]) for tensor_labels in labels]
        elif name in _REDUCTIONS and len(args) > _REDUCTIONS[name] and args[_REDUCTIONS[name]]:
            summed = {dim % inputs[0].ndim for dim in args[_REDUCTIONS[name]]} if output.ndim < inputs[0].ndim else set()
            labels = [tuple(dim_labels for dim, dim_labels in enumerate(labels[0]) if dim not in summed)]
        if max(map(len, labels)) == output.ndim:
            pairs = zip(aligned(labels, output.ndim), output.shape, strict=True)
            return CONSTANT, tuple(dim_labels if size > 1 else frozenset() for dim_labels, size in pairs)
        for tensor_labels in labels:
            self.mark_unclear(tensor_labels, name)
        return Flow(is_data=True, is_inside=True), ()

    def _mixed(self, tensors: list[Tensor]) -> Flow:
        """The flow of an operation that mixes these tensors element by element."""
        flow = reduce(Flow.__or__, (self.known_of(tensor).flow for tensor in tensors), CONSTANT)
        for tensor in tensors:
            if not self.known_of(tensor).flow.is_data and self.use(self.labels_of(tensor)):
                flow = replace(flow, is_inside=True)
        return flow

    def end_residuals(self) -> None:
        """Records the residual sums, without those inside the branch of another sum."""
        for residual, bit, _ in self._sums:
            around = (other.path for other, _, branch in self._sums if bit & branch)  # sums whose branch contains this sum
            if not any(_is_in(residual.path, path) for path in around):
                self.usage.residuals.append(residual)


def _is_difference(name: str, inputs: list[Tensor], marks: list[str]) -> bool:
    """Whether the result is a difference of vectors, and not of a vector and its mean or of squares."""
    return name == "sub" and all(tensor.ndim and tensor.shape[-1] > 1 for tensor in inputs) and not _SQUARES & set(marks)


def _is_product(name: str, marks: list[str], data: list[Tensor]) -> bool:
    """Whether the result has products of entries of two activations, which are not both of length 1."""
    if name == "mul" and len(data) == 2:
        return data[0].shape == data[1].shape and marks != ["unit", "unit"]
    if name == "sub" and len(data) == 2:  # of squares, as in factorization machines
        return set(marks) <= _SQUARES
    return name in ("mul", "div", "neg") and marks == ["product"]


def _is_in(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.") or not other
