"""Facts about the tensors of a forward pass: where their values come from, and which dimensions of parameters their dimensions
range over.

Views share storage, so facts are kept per storage. Strides show which dimensions of a parameter a view ranges over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

Dims = tuple[int, ...]
Label = tuple[str, int]  # a parameter's name, and one of its dimensions
Labels = tuple[frozenset[Label], ...]  # for each dimension of a tensor, the dimensions of parameters that it ranges over


@dataclass(frozen=True)
class Flow:
    """Where the values of a tensor come from."""

    is_data: bool = False  # whether it depends on the example or is a product, and not just on weights and constants
    is_inside: bool = False  # whether it comes through a weight that scales
    writers: frozenset[str] = frozenset()  # the weights that scale and wrote it directly, with no other such weight in between
    logits: frozenset[str] = frozenset()  # those of the writers whose outputs were not multiplied with other activations
    choices: frozenset[str] = frozenset()  # weights whose softmax, sigmoid or largest entries it was computed from
    joins: frozenset[int] = frozenset()
    scores: frozenset[int] = frozenset()  # dot products that it was computed from, element by element
    shares: frozenset[int] = frozenset()  # dot products whose softmax it is
    # "norm" (a length), "rms", "unit" (divided by its length), "square", "product" or "weighted" (times a parameter)
    mark: str = ""
    is_normed: bool = False  # whether the output of ``writers`` has been divided by its own size
    past: int = 0  # one bit for each result that it was computed from, and for itself
    stream: int = 0  # bits of the results whose residual sum it is, and its own
    ends: frozenset[str] = frozenset()  # the modules whose outputs add up to it, up to factors
    numbers: frozenset[int] = frozenset()  # numbers (``Usage.numbers``) that it was multiplied by since the last weight

    def __or__(self, other: Flow) -> Flow:
        return Flow(
            self.is_data or other.is_data,
            self.is_inside or other.is_inside,
            self.writers | other.writers,
            self.logits | other.logits,
            self.choices | other.choices,
            self.joins | other.joins,
            self.scores | other.scores,
            self.shares | other.shares,
            past=self.past | other.past,
            is_normed=all(each.is_normed for each in (self, other) if each.writers),
            numbers=self.numbers | other.numbers,
        )

    @property
    def is_choice(self) -> bool:
        """Whether it is computed from nothing but the softmax, sigmoid or largest entries of what weights wrote."""
        return bool(self.choices) and self.writers <= self.choices


CONSTANT = Flow()


@dataclass(frozen=True)
class Known:
    """The facts about a storage: its flow, and the dimensions of the tensor that it was made for."""

    flow: Flow
    sizes: Dims = ()
    strides: Dims = ()
    labels: Labels = ()

    def labels_of(self, tensor: Tensor) -> Labels:
        return tuple(self._covered(*layout) for layout in zip(tensor.shape, tensor.stride(), strict=True))

    def _covered(self, size: int, stride: int) -> frozenset[Label]:
        """The labels that a view's dimension ranges over, given its stride."""
        reach = stride * (size - 1)
        dims = zip(self.sizes, self.strides, self.labels, strict=True)
        ranged = (labels for num, step, labels in dims if num > 1 and reach >= step and stride % (step * num))
        return frozenset().union(*ranged) if size > 1 else frozenset()


def by_name(labels: Iterable[frozenset[Label]]) -> dict[str, set[int]]:
    dims: dict[str, set[int]] = {}
    for name, dim in frozenset[Label]().union(*labels):
        dims.setdefault(name, set()).add(dim)
    return dims


def aligned(labels: list[Labels], ndim: int) -> Labels:
    """The labels of a result of broadcasting, which aligns the last dimensions of all operands."""
    padded = [(*[frozenset[Label]()] * (ndim - len(each)), *each) for each in labels]
    return tuple(frozenset[Label]().union(*dims) for dims in zip(*padded, strict=True))
