"""Decides roles by an ordered table of conditions, ROLE_TABLE. The first condition that holds decides. docs/roles.md prints
the table.

The forward pass of an example shows how a parameter is used (``ParameterView.seen``). Without an example, shapes, modules and
the order of parameters decide. If they cannot, the user is asked.

For a model as wide as its base, the table DOUBTS is read first. It holds the cases in which sizes do not decide the role.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from smupar.plan.facts import layers
from smupar.plan.roles.neighbours import Neighbours, RoleSetting
from smupar.plan.roles.parameters import ParameterView, Seen, Shape


@dataclass(frozen=True)
class Case:
    """A line of a table: the role of a parameter that meets this condition and no earlier one."""

    when: str
    holds: Callable[..., bool]  # takes (parameter, neighbours), or the sizes of a matrix
    role: str  # the role, or ASK if the user must name it
    reason: str
    guess: str = ""  # the role that the question suggests; "" if nothing speaks for one
    # input dimensions that the question suggests, for a hidden weight
    guess_dims: Callable[[ParameterView], int | Shape] | None = None

    def suggestion(self, tensor: ParameterView) -> RoleSetting | None:
        if not self.guess:
            return None
        return self.guess if self.guess_dims is None else (self.guess, self.guess_dims(tensor))

    def why(self, tensor: ParameterView) -> str:
        owner = type(tensor.module).__name__
        size = tensor.read_size if tensor.in_dims else ""
        return self.reason.format(owner=owner, groups=tensor.groups, size=size, use=tensor.seen.why if tensor.seen else "")


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


def _is_unknown_weight(tensor: ParameterView, neighbours: Neighbours) -> bool:
    """Whether this is a ``weight`` with one scaling dimension, in a module that may sum over that dimension."""
    return _is_half_scaling(tensor, neighbours) and tensor.name.endswith(".weight")


def _is_half_scaling(tensor: ParameterView, neighbours: Neighbours) -> bool:
    """Whether this is a tensor with one scaling dimension, over which an unknown module may sum. A shape like (1, ..., d) does
    not count if d is the size of a layer's inputs or outputs, since then it only broadcasts, as positions do."""
    is_table = tensor.layout == "raw" and not tensor.layer.by_element and len(tensor.scaling) == 1
    if not is_table or tensor.name.endswith(".weight"):
        return is_table
    return tensor.shape[0] > 1 or not neighbours.has_size_of_layer(tensor)


def _inputs_of_linear(tensor: ParameterView) -> int | Shape:
    """The input dimensions of a weight that is stored as (out, in, kernel)."""
    return 1 if len(tensor.shape) == 2 else tuple(range(1, len(tensor.shape)))


def _input_dims(tensor: ParameterView) -> int | Shape:
    """The input dimensions, if they are known."""
    return tensor.in_dims[0] if len(tensor.in_dims) == 1 else tensor.in_dims


def _seen(tensor: ParameterView) -> Seen:
    """How an example uses the parameter in products; an empty record without an example."""
    return tensor.seen if tensor.seen is not None and tensor.seen.how == "product" else NOT_SEEN


NOT_SEEN = Seen("")
_POSITIONS = re.compile(r"^pos(ition|itional)?(_|$|s$|e?mb|_?enc)", re.IGNORECASE)
MAY_BE_INPUT = "may read the model's input (embedding) or the output of other layers (hidden): only the order of layers tells"

ROLE_TABLE = (
    Case(
        "belongs to the layer that `get_output_embeddings` returns",
        lambda t, n: t.layout == "matrix" and t.is_output,
        "unembedding",
        "the model says that this layer makes the logits",
    ),
    Case(
        "is a lookup table, or belongs to the module that `get_input_embeddings` returns, and its output does not scale",
        lambda t, n: t.is_input and not t.writes_scaling,
        "fixed",
        "nothing scales",
    ),
    Case(
        "is a lookup table whose output no layer reads, in a model where layers read another table's output",
        lambda t, n: n.is_side_table(t),
        "vector",
        "it may hold relative position biases for the heads",
    ),
    Case(
        "is any other lookup table, or belongs to the module that `get_input_embeddings` returns",
        lambda t, n: t.is_input,
        "embedding",
        "it reads the data",
    ),
    Case(
        "is used by the example in a way that smupar does not follow, and its dimensions scale",
        lambda t, n: t.layout != "vector" and bool(t.scaling) and t.seen is not None and t.seen.how == "unclear",
        ASK,
        "{use}",
    ),
    Case(
        "has a scaling input and output, is the last layer of a model without a readout, and no layer reads its output size",
        lambda t, n: (
            t.layout == "matrix"
            and t.reads_scaling
            and t.writes_scaling
            and n.is_last(t)
            and not n.readouts
            and t.written_size not in n.read_sizes
            and not _seen(t).is_inside
        ),
        ASK,
        "is the last layer, and no layer reads its output size: do model and base have different numbers of outputs?",
        "unembedding",
    ),
    Case(
        "has a scaling input and a scaling output",
        lambda t, n: t.reads_scaling and t.writes_scaling,
        "hidden",
        "it is inside the network",
    ),
    Case(
        "has a scaling input and a fixed output, and a softmax, sigmoid or top-k of its output multiplies or chooses "
        "other layers' outputs in the example",
        lambda t, n: t.reads_scaling and _seen(t).routes,
        "router",
        "it writes a fixed number of logits inside the network",
    ),
    Case(
        "has a scaling input and a fixed output, from which the example makes both the model's output and what layers read",
        lambda t, n: t.reads_scaling and _seen(t).makes_output and _seen(t).is_inside,
        ASK,
        "makes a part of the model's output (unembedding), as the layers of a flow do, but other layers read it too (hidden)",
        "unembedding",
    ),
    Case(
        "has a scaling input and a fixed output; in the example, its output times the output of a later weight makes the "
        "model's output",
        lambda t, n: t.reads_scaling and _seen(t).makes_output and _seen(t).is_factor,
        ASK,
        "is multiplied by another weight's output to make the model's output. Only one of these weights may be the "
        "unembedding, or the product vanishes as the width grows; name the others hidden",
        "hidden",
        _input_dims,
    ),
    Case(
        "has a scaling input and a fixed output, from which the example makes the model's output both with and without a norm",
        lambda t, n: t.reads_scaling and _seen(t).makes_output and _seen(t).makes_normed_output,
        ASK,
        "makes the model's output both as it is (unembedding) and divided by its norm (hidden)",
        "unembedding",
    ),
    Case(
        "has a scaling input and a fixed output, which the example divides by its norm to make the model's output",
        lambda t, n: t.reads_scaling and _seen(t).makes_normed_output,
        "hidden",
        "a norm after it removes the size of its outputs, so an unembedding's factor would have no effect",
    ),
    Case(
        "has a scaling input and a fixed output, from which the example makes the model's output",
        lambda t, n: t.reads_scaling and _seen(t).makes_output,
        "unembedding",
        "it makes the outputs",
    ),
    Case(
        "has a scaling input and a fixed output, from which the example makes what other layers read",
        lambda t, n: t.reads_scaling and _seen(t).is_inside,
        "hidden",
        "it is inside the network",
    ),
    Case(
        "has a scaling input and a fixed output, from which the example makes neither the model's output nor what others read",
        lambda t, n: t.reads_scaling and _seen(t).how == "product",
        ASK,
        "makes neither the example's output nor what another layer reads: pass an example that makes the loss too, such as a "
        "batch with labels",
    ),
    Case(
        "has a scaling input and a single output, and the model says that another layer makes its logits",
        lambda t, n: t.reads_scaling and t.written_size == 1 and n.has_logits,
        ASK,
        "has a scaling input and a single output, which may weight other layers' outputs",
        "router",
    ),
    Case(
        "has a scaling input and a fixed output, and is the last layer, with a norm of this size after it or beside it",
        lambda t, n: t.reads_scaling and n.is_last(t) and (n.is_normed(t) or n.is_beside_norm(t)),
        ASK,
        "makes the outputs, but a norm over them may remove their size, and then an unembedding's factor has no effect",
        "hidden",
    ),
    Case(
        "has a scaling input and a fixed output, and is the last layer and the only such layer",
        lambda t, n: t.reads_scaling and n.is_last(t) and n.readouts == [t] and not n.is_bottleneck(t),
        "unembedding",
        "it makes the outputs",
    ),
    Case(
        "has a scaling input and a fixed output, and is the last layer, and another layer of unknown role writes this size too",
        lambda t, n: t.reads_scaling and n.is_last(t) and n.has_twin(t),
        ASK,
        "makes outputs of the same size as another layer: each may be a readout (unembedding), or be divided by its norm "
        "(hidden)",
    ),
    Case(
        "has a scaling input and a fixed output, and is the last layer",
        lambda t, n: t.reads_scaling and n.is_last(t),
        ASK,
        "has a scaling input and a fixed output",
        "unembedding",
    ),
    Case(
        "has a scaling input and a fixed output, and stands beside as many experts as it has outputs",
        lambda t, n: t.reads_scaling and n.is_beside_experts(t),
        ASK,
        "has a scaling input and a fixed output, one for each expert beside it",
        "router",
    ),
    Case(
        "has a scaling input and a fixed output, is read by the layer that makes the logits, and stands beside a norm of its "
        "output size",
        lambda t, n: t.reads_scaling and n.feeds_logits(t) and n.is_beside_norm(t),
        ASK,
        "has a scaling input and a fixed output, and a norm beside it may remove the size of its outputs before the logits' "
        "layer reads them",
        "hidden",
    ),
    Case(
        "has a scaling input and a fixed output, which the layer that makes the logits reads",
        lambda t, n: t.reads_scaling and n.feeds_logits(t),
        ASK,
        "has a scaling input and a fixed output, which the logits' layer reads",
        "unembedding",
    ),
    Case(
        "has a scaling input and a fixed output, and another layer reads this size, or the model says that another makes its "
        "logits",
        lambda t, n: t.reads_scaling and (n.is_bottleneck(t) or n.has_logits),
        ASK,
        "has a scaling input and a fixed output",
        "hidden",
    ),
    Case(
        "has a scaling input and a fixed output",
        lambda t, n: t.reads_scaling,
        ASK,
        "has a scaling input and a fixed output, which no other layer reads: it may make outputs (unembedding), or be inside "
        "the network (hidden)",
    ),
    Case(
        "has a fixed input and a scaling output, and the example reaches it both directly and through other layers",
        lambda t, n: t.writes_scaling and _seen(t).reads_input and _seen(t).reads_inside,
        ASK,
        "reads both the model's input and the output of other layers",
        "hidden",
        _input_dims,
    ),
    Case(
        "has a fixed input and a scaling output, and reads the example through no other weight that scales",
        lambda t, n: t.writes_scaling and _seen(t).reads_input,
        "embedding",
        "it reads the data",
    ),
    Case(
        "has a fixed input and a scaling output, and the example reaches it through other weights that scale",
        lambda t, n: t.writes_scaling and _seen(t).reads_inside,
        "hidden",
        "it is inside the network",
    ),
    Case(
        "has a fixed input, which no layer writes, and a scaling output; only lookup tables and other layers like it come "
        "before it",
        lambda t, n: t.writes_scaling and t.name in n.inputs and not n.is_bottleneck(t),
        "embedding",
        "it reads the data",
    ),
    Case(
        "has a fixed input, which no layer writes, and a scaling output, and comes after layers that scale, in a model with a "
        "lookup table that scales",
        lambda t, n: (
            t.writes_scaling and n.may_read_data(t) and n.has_table and not n.reads_table(t) and t.name not in n.inputs
        ),
        ASK,
        "has a fixed input and a scaling output: it " + MAY_BE_INPUT,
    ),
    Case(
        "has a scaling output, and a fixed input that comes from a lookup table or that no layer writes",
        lambda t, n: t.writes_scaling and n.may_read_data(t),
        ASK,
        "has a fixed input and a scaling output: it " + MAY_BE_INPUT,
        "embedding",
    ),
    Case(
        "has a fixed input, which another layer writes, and a scaling output, and is the first matrix",
        lambda t, n: t.writes_scaling and t is n.matrices[0],
        ASK,
        "has a fixed input and a scaling output: it " + MAY_BE_INPUT,
    ),
    Case(
        "has a fixed input and a scaling output",
        lambda t, n: t.writes_scaling,
        ASK,
        "has a fixed input and a scaling output: it " + MAY_BE_INPUT,
        "hidden",
    ),
    Case(
        "is not a layer's weight, and acts element by element in the example",
        lambda t, n: t.layout == "raw" and bool(t.scaling) and t.seen is not None and t.seen.how == "element",
        "vector",
        "it multiplies or adds element by element",
    ),
    Case(
        "is not a layer's weight, and the example chooses rows of it",
        lambda t, n: t.layout == "raw" and bool(t.scaling) and t.seen is not None and t.seen.how == "lookup",
        "embedding",
        "it reads the data",
    ),
    Case(
        "is one of several tensors from which a layer computes its weight, and as large as the weight",
        lambda t, n: _is_part_of_weight(t) and sum(size > 1 for size in t.shape) > 1 and (bool(t.scaling) or n.equal_widths),
        ASK,
        "is one of several tensors from which a weight is computed: it is better to remove the parametrization first",
        "hidden",
        _inputs_of_linear,
    ),
    Case(
        "is one of several tensors from which a layer computes its weight",
        lambda t, n: _is_part_of_weight(t) and (bool(t.scaling) or n.equal_widths),
        ASK,
        "is one of several tensors from which a weight is computed: it is better to remove the parametrization first",
        "vector",
    ),
    Case(
        "is a square matrix of an unknown module, and model and base are equally wide",
        lambda t, n: _is_square(t) and n.equal_widths,
        ASK,
        "belongs to a {owner}, whose input dimension smupar does not know",
        "hidden",
        lambda tensor: 1,
    ),
    Case(
        "belongs to an unknown module, and model and base are equally wide",
        lambda t, n: t.layout == "raw" and n.equal_widths,
        ASK,
        "belongs to a {owner}, whose input dimension smupar does not know",
        "vector",
    ),
    Case(
        "belongs to an unknown module, has one dimension that scales, and the example's forward pass does not use it",
        lambda t, n: _is_half_scaling(t, n) and n.has_example and t.seen is None,
        ASK,
        "is not used by the example's forward pass",
    ),
    Case(
        "is the `weight` of an unknown module, has one dimension that scales, and is the model's first parameter",
        lambda t, n: _is_unknown_weight(t, n) and t is n.tensors[0],
        ASK,
        "belongs to a {owner}, which may use the scaling dimension as input or as output",
        "embedding",
    ),
    Case(
        "is the `weight` of an unknown module, has one dimension that scales, and stands beside as many experts as its other "
        "dimension counts",
        lambda t, n: _is_unknown_weight(t, n) and n.is_beside_experts(t),
        ASK,
        "belongs to a {owner}, which may use the scaling dimension as input or as output",
        "router",
    ),
    Case(
        "is the `weight` of an unknown module and has one dimension that scales",
        lambda t, n: _is_unknown_weight(t, n),
        ASK,
        "belongs to a {owner}, which may use the scaling dimension as input or as output",
    ),
    Case(
        "belongs to an unknown module, has one dimension that scales, and is called positions",
        lambda t, n: _is_half_scaling(t, n) and bool(_POSITIONS.search(t.name.rpartition(".")[2])),
        ASK,
        "belongs to a {owner}, which may add it to what a layer wrote (vector) or multiply with it (hidden, embedding)",
        "vector",
    ),
    Case(
        "belongs to an unknown module, has one dimension that scales, and does not just broadcast like (1, ..., d), where d is "
        "the size of a layer",
        lambda t, n: _is_half_scaling(t, n),
        ASK,
        "belongs to a {owner}, which may sum over the scaling dimension (hidden, unembedding), write it (hidden, embedding), "
        "or act element by element (vector)",
    ),
    Case(
        "is a square matrix of an unknown module, and both dimensions scale",
        lambda t, n: t.layout == "raw" and len(t.scaling) > 1 and _is_square(t),
        "hidden",
        "square, taken as (out, in)",
    ),
    Case(
        "belongs to an unknown module and has several dimensions that scale",
        lambda t, n: t.layout == "raw" and len(t.scaling) > 1,
        ASK,
        "belongs to a {owner}, whose input dimension smupar does not know: it is the first in x @ W and the last in W @ x",
    ),
    Case(
        "has a dimension that scales, which no layer sums over",
        lambda t, n: t.layout not in ("matrix", "seen") and bool(t.scaling),
        "vector",
        "it is a norm, a bias, a class token, positions or a depthwise convolution",
    ),
    Case("is anything else", lambda t, n: True, "fixed", "nothing scales"),
)

DOUBTS = (
    Case("is the only layer", lambda s: s.is_first and s.is_last, ASK, "is the only layer", "unembedding"),
    Case(
        "is a convolution with groups",
        lambda s: s.tensor.groups > 1,
        ASK,
        "has {groups} groups: either their number or their size may scale",
        "hidden",
    ),
    Case(
        "is the last layer, and its input size is a multiple or a divisor of a layer's output size",
        lambda s: s.reads_a_part and s.is_last,
        ASK,
        "reads {size} values, which may be part of a layer's output or an input of the model",
        "unembedding",
    ),
    Case(
        "has an input size that is a multiple or a divisor of a layer's output size",
        lambda s: s.reads_a_part,
        ASK,
        "reads {size} values, which may be part of a layer's output or an input of the model",
        "hidden",
    ),
    Case(
        "is the last layer, and its output size is the input size of a layer",
        lambda s: s.writes and s.is_last,
        ASK,
        "is the last layer, and may write the model's outputs or features",
        "unembedding",
    ),
)
