"""Roles are decided by an ordered table of conditions: the first line that holds decides. docs/any_model.md prints it.

A second table comes first. It is for models that are as wide as their base, and says when sizes leave doubt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from smupar.plan import layers
from smupar.plan.neighbours import Neighbours, RoleSetting
from smupar.plan.parameters import ParameterView


@dataclass(frozen=True)
class Case:
    """A line of a table: the role of a parameter that meets this condition and no earlier one."""

    when: str
    holds: Callable[..., bool]  # takes (parameter, neighbours), or the sizes of a matrix
    role: str  # or ASK
    reason: str
    guess: str = ""  # the role that a question suggests
    guess_dim: Callable[[ParameterView], int] | None = None  # the dimension that it reads, if the guess is a hidden weight

    def suggestion(self, tensor: ParameterView) -> RoleSetting:
        return self.guess if self.guess_dim is None else (self.guess, self.guess_dim(tensor))

    def why(self, tensor: ParameterView) -> str:
        owner = type(tensor.module).__name__
        return self.reason.format(owner=owner, groups=tensor.groups, size=tensor.read_size if tensor.in_dims else "")


ASK = "ask"


def case_of(tensor: ParameterView, neighbours: Neighbours) -> Case:
    """The line of the tables that decides the role of a parameter, unless the user gave it."""
    sizes = neighbours.sizes.get(tensor.name)
    doubts = (case for case in DOUBTS if sizes is not None and case.holds(sizes))
    return next(doubts, None) or next(case for case in ROLE_TABLE if case.holds(tensor, neighbours))


def _is_part_of_weight(tensor: ParameterView) -> bool:
    layer = tensor.layer
    return tensor.layout == "raw" and (layer is layers.PARAMETRIZED or (layer.is_linear and not layer.is_registered))


def _is_square(tensor: ParameterView) -> bool:
    shapes = (tensor.shape, tensor.base_shape)
    return tensor.layout == "raw" and all(len(shape) == 2 and shape[0] == shape[1] for shape in shapes)


def _is_unknown_weight(tensor: ParameterView) -> bool:
    """Whether it is a ``weight`` with one scaling dimension, of a module that may sum over it."""
    named = tensor.name.endswith(".weight") and not tensor.layer.by_element
    return tensor.layout == "raw" and named and len(tensor.scaling) == 1


ROLE_TABLE = (
    Case(
        "belongs to the layer that `get_output_embeddings` returns",
        lambda t, n: t.layout == "matrix" and t.is_output,
        "unembedding",
        "the model says that it makes the logits",
    ),
    Case(
        "is a lookup table, or belongs to what `get_input_embeddings` returns, and its rows do not scale",
        lambda t, n: t.is_input and not t.writes_scaling,
        "fixed",
        "nothing scales",
    ),
    Case(
        "is a lookup table that no layer reads, beside one that layers read",
        lambda t, n: n.is_side_table(t),
        "vector",
        "such as relative position biases for the heads",
    ),
    Case(
        "is any other lookup table, or belongs to what `get_input_embeddings` returns",
        lambda t, n: t.is_input,
        "embedding",
        "it reads the data",
    ),
    Case(
        "reads and writes what scales, in the last layer of a model without a readout, and no layer reads as many features",
        lambda t, n: (
            t.reads_scaling and t.writes_scaling and n.is_last(t) and not n.readouts and t.written_size not in n.read_sizes
        ),
        ASK,
        "is the last layer and writes what no layer reads: do the outputs of model and base differ in number?",
        "unembedding",
    ),
    Case(
        "reads and writes what scales", lambda t, n: t.reads_scaling and t.writes_scaling, "hidden", "it is inside the network"
    ),
    Case(
        "reads what scales and writes a fixed size, as the last layer and the only such one",
        lambda t, n: t.reads_scaling and n.is_last(t) and n.readouts == [t],
        "unembedding",
        "it makes the outputs",
    ),
    Case(
        "reads what scales and writes a fixed size, as the last layer",
        lambda t, n: t.reads_scaling and n.is_last(t),
        ASK,
        "reads a scaling input and writes a fixed output",
        "unembedding",
    ),
    Case(
        "reads what scales and writes a fixed size",
        lambda t, n: t.reads_scaling,
        ASK,
        "reads a scaling input and writes a fixed output",
        "hidden",
    ),
    Case(
        "reads a fixed size and writes what scales, after lookup tables and layers of the same kind only",
        lambda t, n: t.writes_scaling and t.name in n.inputs,
        "embedding",
        "it reads the data",
    ),
    Case(
        "reads a fixed size and writes what scales",
        lambda t, n: t.writes_scaling,
        ASK,
        "reads a fixed input and writes a scaling output, after hidden layers",
        "hidden",
    ),
    Case(
        "is a tensor of a layer whose weight is made of several",
        lambda t, n: _is_part_of_weight(t),
        ASK,
        "is one of several tensors that make a weight; better remove that parametrization first",
        "vector",
    ),
    Case(
        "is a square matrix of an unknown module, and model and base are equally wide",
        lambda t, n: _is_square(t) and n.equal_widths,
        ASK,
        "belongs to a {owner}, which does not tell its inputs",
        "hidden",
        lambda tensor: 1,
    ),
    Case(
        "belongs to an unknown module, and model and base are equally wide",
        lambda t, n: t.layout == "raw" and n.equal_widths,
        ASK,
        "belongs to a {owner}, which does not tell its inputs",
        "vector",
    ),
    Case(
        "is the `weight` of an unknown module, has one dimension that scales, and is the model's first parameter",
        lambda t, n: _is_unknown_weight(t) and t is n.tensors[0],
        ASK,
        "belongs to a {owner}, which does not tell whether it reads or writes what scales",
        "embedding",
    ),
    Case(
        "is the `weight` of an unknown module, has one dimension that scales, and a readout was found: a router, say",
        lambda t, n: _is_unknown_weight(t) and bool(n.readouts),
        ASK,
        "belongs to a {owner}, which does not tell whether it reads or writes what scales",
        "hidden",
        lambda tensor: tensor.scaling[0],
    ),
    Case(
        "is the `weight` of an unknown module and has one dimension that scales",
        lambda t, n: _is_unknown_weight(t),
        ASK,
        "belongs to a {owner}, which does not tell whether it reads or writes what scales",
        "unembedding",
    ),
    Case(
        "is a square matrix of an unknown module, and both dimensions scale",
        lambda t, n: t.layout == "raw" and len(t.scaling) > 1 and _is_square(t),
        "hidden",
        "square, read as (out, in)",
    ),
    Case(
        "belongs to an unknown module and has several dimensions that scale",
        lambda t, n: t.layout == "raw" and len(t.scaling) > 1,
        ASK,
        "belongs to a {owner}, which does not tell its inputs",
        "hidden",
        lambda tensor: tensor.scaling[-1],
    ),
    Case(
        "has a dimension that scales and no layer that sums over it",
        lambda t, n: t.layout != "matrix" and bool(t.scaling),
        "vector",
        "norms, biases, class tokens, positions, depthwise convolutions",
    ),
    Case("is anything else", lambda t, n: True, "fixed", "nothing scales"),
)

DOUBTS = (
    Case("is the only layer", lambda s: s.is_first and s.is_last, ASK, "is the only layer", "unembedding"),
    Case(
        "is a convolution with groups",
        lambda s: s.tensor.groups > 1,
        ASK,
        "has {groups} groups, of which number or size may scale",
        "hidden",
    ),
    Case(
        "is the last layer, and reads a multiple or a part of what some layer writes",
        lambda s: s.reads_a_part and s.is_last,
        ASK,
        "reads {size}, which may be part of a layer's output or an input",
        "unembedding",
    ),
    Case(
        "reads a multiple or a part of what some layer writes",
        lambda s: s.reads_a_part,
        ASK,
        "reads {size}, which may be part of a layer's output or an input",
        "hidden",
    ),
    Case(
        "is the last layer, and writes as much as layers read",
        lambda s: s.writes and s.is_last,
        ASK,
        "is the last layer, and may write outputs or features",
        "unembedding",
    ),
)
