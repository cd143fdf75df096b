"""What is known about the tensors of a forward pass.

A *flow* says where the values of a tensor come from. *Labels* say, for each dimension of a tensor, to which dimensions of
parameters it corresponds. For example, the transpose of a weight has the weight's labels in reverse order. A weight *scales* if
one of its dimensions follows the width.

Views share storage, so this is kept for each storage. A view's strides show which dimensions of the storage's tensor it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

Dims = tuple[int, ...]
Label = tuple[str, int]  # a parameter's name, and one of its dimensions
Labels = tuple[frozenset[Label], ...]  # for each dimension of a tensor, the dimensions of parameters that it stands for


@dataclass(frozen=True)
class Flow:
    """Where the values of a tensor come from."""

    is_data: bool = False  # whether it depends on the example, or is a product of weights or constants
    is_inside: bool = False  # whether its values come through a weight that scales
    writers: frozenset[str] = frozenset()  # the last scaling weights that its values came through
    logits: frozenset[str] = frozenset()  # the writers whose outputs were not multiplied with other activations
    choices: frozenset[str] = frozenset()  # writers whose outputs reached it only through a softmax, sigmoid or sort
    joins: frozenset[int] = frozenset()  # events: the concatenations from which it was computed
    scores: frozenset[int] = frozenset()  # events: the dot products from which it was computed element by element
    mixed: frozenset[int] = frozenset()  # events: dot products that a weight has summed since, as one that mixes heads does
    shares: frozenset[int] = frozenset()  # events: the dot products whose softmax it is
    lengths: frozenset[int] = frozenset()  # events: the length by which it was divided, if its mark is "unit"
    # "norm" (a length), "rms", "unit" (divided by its length), "square", "product", "difference", "distance" (its square) or
    # "weighted" (times a parameter)
    mark: str = ""
    is_normed: bool = False  # whether the output of ``writers`` has been divided by its norm
    past: int = 0  # a bit for every result from which the tensor was computed, and a bit for the tensor itself
    stream: int = 0  # if it is a residual sum x + branch: the bits of x and of the tensor itself
    ends: frozenset[str] = frozenset()  # the modules whose outputs, times factors, add up to the tensor
    numbers: frozenset[int] = frozenset()  # numbers (``Usage.numbers``) by which it was multiplied since the last weight

    def __or__(self, other: Flow) -> Flow:
        return Flow(
            self.is_data or other.is_data,
            self.is_inside or other.is_inside,
            self.writers | other.writers,
            self.logits | other.logits,
            # An RNN's state comes from its weights through sigmoids and past them.
            (self.choices - (other.writers - other.choices)) | (other.choices - (self.writers - self.choices)),
            self.joins | other.joins,
            self.scores | other.scores,
            self.mixed | other.mixed,
            self.shares | other.shares,
            past=self.past | other.past,
            is_normed=all(flow.is_normed for flow in (self, other) if flow.writers),
            numbers=self.numbers | other.numbers,
        )

    @property
    def is_choice(self) -> bool:
        """Whether the tensor is computed only from the softmax, sigmoid or largest entries of what weights wrote."""
        return bool(self.choices) and self.writers <= self.choices


CONSTANT = Flow()


@dataclass(frozen=True)
class Known:
    """What is known about a storage: its flow, and the layout and labels of the tensor for which it was allocated."""

    flow: Flow
    sizes: Dims = ()
    strides: Dims = ()  # in bytes, since complex and real views of one storage count in different units
    labels: Labels = ()

    def labels_of(self, tensor: Tensor) -> Labels:
        return tuple(self._covered(*layout) for layout in zip(tensor.shape, strides_of(tensor), strict=True))

    def _covered(self, size: int, stride: int) -> frozenset[Label]:
        """The labels of one dimension of a view, given its size and stride."""
        reach = stride * (size - 1)
        dims = zip(self.sizes, self.strides, self.labels, strict=True)
        ranged = (labels for num, step, labels in dims if num > 1 and reach >= step and stride % (step * num))
        return frozenset().union(*ranged) if size > 1 else frozenset()


def strides_of(tensor: Tensor) -> Dims:
    """The strides in bytes."""
    return tuple(stride * tensor.element_size() for stride in tensor.stride())


def by_name(labels: Iterable[frozenset[Label]]) -> dict[str, set[int]]:
    dims: dict[str, set[int]] = {}
    for name, dim in frozenset[Label]().union(*labels):
        dims.setdefault(name, set()).add(dim)
    return dims


def aligned(labels: list[Labels], ndim: int) -> Labels:
    """The labels of a broadcast result. Broadcasting aligns the last dimensions of all operands."""
    padded = [(*[frozenset[Label]()] * (ndim - len(operand)), *operand) for operand in labels]
    return tuple(frozenset[Label]().union(*dims) for dims in zip(*padded, strict=True))
