"""Which sizes of activations follow the width, from two passes: at base width and at another width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from torch import nn

from smupar.plan.depth.correspondence import correspond
from smupar.plan.forward.flows import Dims
from smupar.plan.forward.run_copy import CannotRunError, Example
from smupar.plan.forward.uses import Event, Usage
from smupar.plan.forward.watcher import watch
from smupar.plan.notes import Note
from smupar.plan.roles.parameters import ParameterView

PART_READ = Note(
    "reads in part",
    "reading a concatenation whose parts do not all follow the width. One m_in is used for all parts, so the numbers are too "
    "small for the fixed part. A layer for each part would be exact",
)
PART_WRITTEN = Note(
    "writes in part",
    "writing several outputs at once, which do not all follow the width. One m_out is used for all, which matters only for "
    "SGD's learning rate",
    is_caution=False,
)


@dataclass(frozen=True)
class EventPair:
    """One event at base width and at another width."""

    base: Event
    other: Event

    @property
    def is_one_event(self) -> bool:
        first, second = ((event.kind, event.path, len(event.sizes)) for event in (self.base, self.other))
        return first == second

    def ratio(self, place: int) -> Fraction:
        return Fraction(self.other.sizes[place], max(self.base.sizes[place], 1))

    @property
    def ratios(self) -> set[Fraction]:
        return {self.ratio(place) for place in range(len(self.base.sizes))}


def pass_at_other_width(
    usage: Usage, base: nn.Module, other: nn.Module, example: Example, scaling: Mapping[str, Dims], reads: Mapping[str, Dims]
) -> tuple[Usage | None, Note | None]:
    """The record of a pass at another width. If its events do not match those of the base's pass one by one: None, and a
    note."""
    if correspond(other, base).lists:
        text = "model and base differ in depth, so concatenations and dot products over the width were not looked for"
        return None, Note("example", f"{text}; pass delta=, base at any other width", is_caution=False)
    try:
        wider = watch(other, example, scaling=scaling, reads=reads)
    except CannotRunError as error:
        text = f"the example could not be run at a second width, so sizes of activations were not compared ({error})"
        return None, Note("example", text)
    pairs = (EventPair(*events) for events in zip(usage.events, wider.events, strict=False))
    if len(usage.events) == len(wider.events) and all(pair.is_one_event for pair in pairs):
        return wider, None
    text = (
        "the example takes different paths through model and base, so sizes of activations were not compared: concatenations "
        "and dot products over the width were not looked for"
    )
    return None, Note("example", text)


def dot_products(usage: Usage, pairs: list[EventPair]) -> set[int]:
    """The numbers of the events that are dot products over the width, outside of attention."""
    return {
        number
        for number, pair in enumerate(pairs)
        if pair.base.kind == "dot" and pair.ratios != {1} and not pair.base.is_normalised and number not in usage.attention
    }


def unit_vectors(pairs: list[EventPair]) -> set[int]:
    """The numbers of the events that divide a vector as long as the width by its length."""
    return {number for number, pair in enumerate(pairs) if pair.base.kind == "length" and pair.ratios != {1}}


def unscaled_products(usage: Usage, pairs: list[EventPair]) -> frozenset[int]:
    """The numbers of the dot products that do not grow with the width and are no logits, as those of linear attention with
    heads of fixed size."""
    return frozenset(
        number
        for number, pair in enumerate(pairs)
        if pair.base.kind == "dot" and pair.ratios == {1} and number not in usage.logits
    )


def numbers_in_sums(usage: Usage, sums: set[int]) -> frozenset[tuple[str, float]]:
    """(module path, number) of each number that multiplies only ``sums``, the numbers of dot products over the width and of
    vectors that were divided by their length."""
    numbers = {(number.path, number.value) for number in usage.numbers}
    others = (number for number in usage.numbers if number.is_elsewhere or not number.dots or not number.dots <= sums)
    return frozenset(numbers - {(number.path, number.value) for number in others})


def about_dots(usage: Usage, dots: set[int]) -> Iterator[Note]:
    paths = [usage.events[number].path for number in sorted(dots)]
    if paths:
        yield Note(
            "dot product",
            f"two layers' outputs are multiplied and summed over the width in {_shown(paths)}. This sum grows with the width, "
            "and no layer's factor corrects it: multiply it by the base's width over the model's, as plan.output_factor does "
            "for logits, and by the base's own factor, if there is one",
        )


def about_sums(pairs: list[EventPair]) -> Iterator[Note]:
    paths = [pair.base.path for pair in pairs if pair.base.kind == "sum" and pair.ratios != {1}]
    if paths:
        yield Note(
            "sum",
            f"outputs of a layer are summed over the width in {_shown(paths)}. This sum grows with the width, and no layer's "
            "factor corrects it: take the mean instead, or multiply the sum by the base's width over the model's",
        )


def about_distances(pairs: list[EventPair]) -> Iterator[Note]:
    paths = [pair.base.path for pair in pairs if pair.base.kind == "distance" and pair.ratios != {1}]
    if paths:
        yield Note(
            "distance",
            f"distances between vectors as long as the width are computed in {_shown(paths)}. They grow with the width, and no "
            "layer's factor corrects it: take the mean of the squares instead of the sum, or multiply squared distances by the "
            "base's width over the model's",
        )


def _shown(paths: list[str]) -> str:
    return ", ".join(dict.fromkeys(repr(path) if path else "the model itself" for path in paths))


def partly_scaling(
    tensors: list[ParameterView], usage: Usage, pairs: list[EventPair], names: Mapping[str, str]
) -> dict[str, Note]:
    """Notes on weights that read or write a concatenation of which only some parts follow the width."""
    notes = {}
    for tensor in tensors:
        if tensor.seen is None or tensor.seen.how != "product":
            continue
        read, written = tensor.ratio(tensor.in_dims), tensor.ratio(tensor.out_dims)
        joins = frozenset[int]().union(*(product.joins for product in usage.uses[tensor.name].products))
        if read != 1 and any(_is_mixed(pairs[number], read) for number in joins):
            notes[tensor.name] = PART_READ
        parts = (pair for pair in pairs if pair.base.kind == "part" and pair.base.weights == {names[tensor.name]})
        if written != 1 and any(pair.ratio(0) == written != pair.ratio(1) for pair in parts):
            notes.setdefault(tensor.name, PART_WRITTEN)
    return notes


def _is_mixed(pair: EventPair, ratio: Fraction) -> bool:
    """Whether a concatenation grows by ``ratio`` as a whole, while its parts grow by different ratios."""
    return len(pair.ratios) > 1 and Fraction(sum(pair.other.sizes), max(sum(pair.base.sizes), 1)) == ratio
