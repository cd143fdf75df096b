"""How a forward pass uses each parameter: over which dimensions products sum, which products read the model's input or make its
output, which tables are looked up, and what acts element by element. ``watcher`` fills it in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from smupar.plan.flows import Dims


@dataclass(frozen=True)
class WeightProduct:
    """A parameter multiplied with something and summed over ``in_dims``."""

    in_dims: Dims
    out_dims: Dims
    reads_input: bool  # what it multiplies comes from the example through no weight that scales
    joins: frozenset[int]  # events: concatenations that made what it multiplies


@dataclass
class Use:
    """Everything that one forward pass does with a parameter."""

    products: list[WeightProduct] = field(default_factory=list)
    looked_up: set[int] = field(default_factory=set)  # dimensions that an index selects from
    by_element: bool = False  # also where what a weight that scales wrote chooses rows, such as biases of experts
    unclear: str = ""  # an operation that is not understood
    makes_output: bool = False  # what it writes reaches the output through no other weight that scales
    makes_normed_output: bool = False  # likewise, but divided by its own size on the way
    is_inside: bool = False  # what it writes reaches another weight that scales
    reads_constant: bool = False  # a product reads what depends neither on the example nor on another weight

    @property
    def reaches_output(self) -> bool:
        """Whether what it writes reaches the output."""
        return self.makes_output or self.makes_normed_output


@dataclass(frozen=True)
class Event:
    """Something whose meaning depends on which sizes follow the width.

    join   a concatenation; ``sizes`` are the parts'
    part   a part of what ``weights`` wrote; ``sizes`` are (whole, part)
    dot    a sum of products of two activations; ``sizes`` is the number of summands
    mix    a dot product of which one factor is a softmax of dot products: attention's sum over values
    """

    kind: str
    path: str  # the module in which it happened
    sizes: Dims
    weights: frozenset[str] = frozenset()
    is_normalised: bool = False  # both factors of a dot product have length 1


@dataclass
class Number:
    """A number by which a module multiplies or divides activations."""

    path: str
    value: float
    dots: set[int] = field(default_factory=set)  # events: the dot products that it multiplies
    is_elsewhere: bool = False  # it multiplies something else too: what a weight reads, or the output


@dataclass(frozen=True)
class Residual:
    """A sum x + f(x), which is taken in the module at ``path``. Up to factors f(x) is the sum of the outputs of ``ends``; there
    are none if it is no module's output."""

    path: str
    ends: tuple[str, ...]


@dataclass(frozen=True)
class Output:
    """A tensor that the model returns."""

    sizes: Dims
    is_normed: bool  # divided by its own size


@dataclass
class Usage:
    """What one forward pass shows."""

    uses: dict[str, Use]
    events: list[Event] = field(default_factory=list)
    residuals: list[Residual] = field(default_factory=list)
    same: dict[str, frozenset[str]] = field(default_factory=dict)  # modules that return other modules' outputs
    outputs: list[Output] = field(default_factory=list)  # the first of these that depend on weights: loss, logits, all others
    numbers: list[Number] = field(default_factory=list)
    attention: dict[int, str] = field(default_factory=dict)  # the dot products that are attention scores, and their modules
