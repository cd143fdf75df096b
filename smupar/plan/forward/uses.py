"""The record of how a forward pass uses each parameter, which ``watcher`` makes.

It says which dimensions products sum over, and which products read the model's input or make its output. It also lists
lookup tables, and parameters that act element by element. A weight *scales* if one of its dimensions
follows the width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from smupar.plan.forward.flows import Dims


@dataclass(frozen=True)
class WeightProduct:
    """The product of a parameter with another tensor, summed over ``in_dims`` of the parameter."""

    in_dims: Dims
    out_dims: Dims
    reads_input: bool  # whether the other factor comes from the example, with no scaling weight in between
    joins: frozenset[int]  # places in ``Usage.events`` of the concatenations from which the other factor was computed


@dataclass
class Use:
    """Everything that one forward pass does with a parameter."""

    products: list[WeightProduct] = field(default_factory=list)
    looked_up: set[int] = field(default_factory=set)  # dimensions that an index selects from
    by_element: bool = False  # also a table whose rows are chosen by a scaling weight's output, such as experts' biases
    unclear: str = ""  # name of an operation that is not understood
    makes_output: bool = False  # its output reaches the model's output with no other scaling weight in between
    makes_normed_output: bool = False  # the same, but the output is divided by its norm on the way
    is_inside: bool = False  # its output reaches another scaling weight
    routes: bool = False  # a softmax, sigmoid or top-k of its output multiplies or chooses what other weights wrote
    multiplied_by: set[str] = field(default_factory=set)  # weights whose outputs its own output was multiplied by
    is_factor: bool = False  # its output, times the output of a weight registered later, reaches the model's output
    reads_constant: bool = False  # in some product, the other factor does not depend on the example

    @property
    def reaches_output(self) -> bool:
        """Whether its output reaches the model's output."""
        return self.makes_output or self.makes_normed_output


@dataclass(frozen=True)
class Event:
    """An operation whose meaning depends on which sizes follow the width.

    join   a concatenation; ``sizes`` are the sizes of the parts
    part   a slice of the output of ``weights``; ``sizes`` are (whole, part)
    dot    a sum of products of two activations that ``weights`` wrote; ``sizes`` is the number of summands
    sum    a sum of entries of an activation that weights made; ``sizes`` is the number of summands
    length  a vector is divided by its length; ``sizes`` is the number of its entries
    distance  a sum of squares of differences between two activations, or its root; ``sizes`` is the number of summands
    mix    a dot product of which one factor is a softmax of dot products: attention's sum over values
    """

    kind: str
    path: str  # the module in which it happened
    sizes: Dims
    weights: frozenset[str] = frozenset()
    is_normalised: bool = False  # both factors of a dot product have length 1


@dataclass
class Scalar:
    """A number by which a module multiplies or divides activations."""

    path: str
    value: float
    dots: set[int] = field(
        default_factory=set
    )  # places in ``Usage.events`` of the dot products or unit vectors that it multiplies
    is_elsewhere: bool = False  # it also multiplies a weight's input or the model's output


@dataclass(frozen=True)
class Residual:
    """A sum x + f(x) in the module at ``path``. ``ends`` are the modules whose outputs, times factors, add up to f(x). It is
    empty if f(x) does not consist of outputs of modules."""

    path: str
    ends: tuple[str, ...]


@dataclass(frozen=True)
class Output:
    """A tensor that the model returns."""

    sizes: Dims
    is_normed: bool  # divided by its norm


@dataclass
class Usage:
    """Everything that one forward pass shows."""

    uses: dict[str, Use]
    events: list[Event] = field(default_factory=list)
    residuals: list[Residual] = field(default_factory=list)
    same: dict[str, frozenset[str]] = field(default_factory=dict)  # module -> the modules whose output it returns
    # the outputs that weights make: the loss if there is one, else the logits, else everything
    outputs: list[Output] = field(default_factory=list)
    numbers: list[Scalar] = field(default_factory=list)
    attention: dict[int, str] = field(default_factory=dict)  # dot products that are attention scores -> their module
    logits: set[int] = field(default_factory=set)  # dot products of which a softmax, a sigmoid or an exponential is taken
