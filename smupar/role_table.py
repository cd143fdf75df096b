"""How roles are decided: one ordered table of conditions, of which the first that holds counts. docs/any_model.md prints it.

``Network`` has what conditions ask about: what the tensors of a model tell about each other. Where model and base are equally
wide, ``Sizes`` tells which dimensions would scale, and a second table says when sizes leave doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from smupar import layers
from smupar.layers import IMAGES, PARAMETRIZED
from smupar.tensors import ModelTensor

RoleSetting = str | tuple[str, int]


@dataclass(frozen=True)
class Case:
    """A line of a table: what a parameter is that meets the condition, and none of an earlier line."""

    when: str
    holds: Callable[..., bool]  # of (tensor, network), or of the sizes of a matrix
    role: str  # or ASK
    reason: str
    guess: str = ""  # the role that a question suggests
    guess_dim: Callable[[ModelTensor], int] | None = None  # the dimension that it reads, if the guess is a hidden weight

    def suggestion(self, tensor: ModelTensor) -> RoleSetting:
        return self.guess if self.guess_dim is None else (self.guess, self.guess_dim(tensor))

    def why(self, tensor: ModelTensor) -> str:
        owner = type(tensor.module).__name__
        return self.reason.format(owner=owner, groups=tensor.groups, size=tensor.read_size if tensor.in_dims else "")


ASK = "ask"


class Network:
    """The parameters of a model, and where each stands among the others."""

    def __init__(self, model: nn.Module, tensors: list[ModelTensor], asked: Mapping[str, RoleSetting]) -> None:
        self.asked = asked
        self.output_module = _embeddings(model, "get_output_embeddings")
        self.input_module = _embeddings(model, "get_input_embeddings")
        self.equal_widths = not any(tensor.scaling for tensor in tensors)
        self.guessed: set[str] = set()  # hidden, by their sizes alone
        self.doubts: dict[str, Case] = {}
        self.tensors = self._with_scaling(tensors) if self.equal_widths else tensors
        self.matrices = [tensor for tensor in self.tensors if tensor.kind == "matrix"]
        self.read_sizes = {tensor.read_size for tensor in self.matrices if not tensor.is_lookup}
        self.readouts = [tensor for tensor in self.matrices if self._may_be_readout(tensor)]
        self.inputs = self._inputs()

    def case_of(self, tensor: ModelTensor) -> Case:
        return self.doubts.get(tensor.name) or next(case for case in ROLE_TABLE if case.holds(tensor, self))

    def is_output(self, tensor: ModelTensor) -> bool:
        """The user's model says that this weight makes its logits."""
        return tensor.module is self.output_module is not self.input_module and not tensor.is_lookup

    def is_input(self, tensor: ModelTensor) -> bool:
        return tensor.kind == "matrix" and (tensor.is_lookup or tensor.module is self.input_module)

    def is_side_table(self, tensor: ModelTensor) -> bool:
        """A table no layer reads, beside one that layers read."""
        if not self.is_input(tensor) or not tensor.is_lookup or tensor.makes_logits:
            return False
        tables = [table for table in self.matrices if table.is_lookup]
        if not any(table.written_size in self.read_sizes for table in tables):
            return False
        sums = {tensor.written_size}  # side by side, it and others may be read together
        for other in tables:
            if other is not tensor and len(sums) < 1000:
                sums |= {size + other.written_size for size in sums}
        return not sums & self.read_sizes

    def is_last(self, tensor: ModelTensor) -> bool:
        return tensor is self.matrices[-1]

    def _may_be_readout(self, tensor: ModelTensor) -> bool:
        if tensor.name in self.asked:
            return self.asked[tensor.name] == "unembedding"
        shaped = not tensor.is_lookup and tensor.reads_scaling and not tensor.writes_scaling
        return shaped or self.is_output(tensor) or tensor.makes_logits

    def _inputs(self) -> set[str]:
        """Input layers: they read a fixed size and write the width, and no hidden layer comes before them."""
        inputs: list[ModelTensor] = []
        for tensor in self.matrices:
            same_layer = bool(inputs) and inputs[-1].module is tensor.module
            if not tensor.reads_scaling and tensor.writes_scaling:
                inputs.append(tensor)
            elif not tensor.is_lookup and not same_layer:
                break
        return {tensor.name for tensor in inputs}

    # Models as wide as their base

    def _with_scaling(self, tensors: list[ModelTensor]) -> list[ModelTensor]:
        """What would scale, read from sizes: an input that some layer writes is internal, and so is an output that some
        layer reads. Sizes that are related but not equal leave doubt."""
        matrices = [tensor for tensor in tensors if tensor.kind == "matrix"]
        linear = [tensor for tensor in matrices if not tensor.is_lookup]
        has_lookup = len(linear) < len(matrices)
        has_output = any(self.is_output(tensor) or tensor.makes_logits for tensor in matrices)
        first = linear[0] if linear and not has_lookup else None
        last = linear[-1] if linear and not has_output else None
        read = {tensor.read_size for tensor in linear[not has_lookup :]}
        written = {tensor.written_size for tensor in matrices}
        found = [
            self._matrix_scaling(Sizes(tensor, tensor is first, tensor is last, read, written))
            if tensor.kind == "matrix"
            else tensor
            for tensor in tensors
        ]
        known = {  # by module, for the biases that go with a weight
            id(module): tensor
            for tensor in found
            if tensor.kind == "matrix"
            for module in (tensor.module, *(tied for _, tied in tensor.tied))
        }
        return [tensor if tensor.kind == "matrix" else _vector_scaling(tensor, known) for tensor in found]

    def _matrix_scaling(self, sizes: Sizes) -> ModelTensor:
        tensor = sizes.tensor
        ins, outs = tensor.in_dims[:1], (tensor.out_dim,)
        if tensor.name in self.asked:
            setting = self.asked[tensor.name]
            role = setting if isinstance(setting, str) else setting[0]
            dims = {"hidden": (*ins, *outs), "embedding": outs, "unembedding": ins}.get(role, ())
        elif tensor.is_lookup or self.is_output(tensor):
            dims = outs if tensor.is_lookup else ins
        else:
            doubt = next((case for case in DOUBTS if case.holds(sizes)), None)
            if doubt is not None:
                self.doubts[tensor.name] = doubt
            if sizes.is_fused and not sizes.writes and not sizes.is_last:
                self.guessed.add(tensor.name)
            dims = (ins if sizes.reads else ()) + (outs if sizes.writes_width else ())
        return replace(tensor, scaling=tuple(sorted(dims)))


def _vector_scaling(tensor: ModelTensor, known: dict[int, ModelTensor]) -> ModelTensor:
    if not tensor.shape:
        return tensor
    weight = known.get(id(tensor.module))
    if weight is not None and len(tensor.shape) == 1:
        is_bias_of_logits = weight.makes_logits and tensor.module is not weight.module
        return replace(tensor, scaling=(0,) if weight.writes_scaling and not is_bias_of_logits else ())
    channels_first = len(tensor.shape) == 1 or tensor.layer.reads == IMAGES
    return replace(tensor, scaling=(0,) if channels_first else (len(tensor.shape) - 1,))


def _embeddings(model: nn.Module, getter: str) -> nn.Module | None:
    """What a Hugging Face style getter returns, where the model has it."""
    method = getattr(model, getter, None)
    if method is None:
        return None
    try:
        module = method()
    except (NotImplementedError, AttributeError):  # the getter exists on every Hugging Face model, also on those without one
        return None
    return module if isinstance(module, nn.Module) else None


def _is_part_of_weight(tensor: ModelTensor) -> bool:
    layer = tensor.layer
    return tensor.kind == "raw" and (layer is PARAMETRIZED or (layer.is_linear and not layer.is_registered))


def _is_square(tensor: ModelTensor) -> bool:
    shapes = (tensor.shape, tensor.base_shape)
    return tensor.kind == "raw" and all(len(shape) == 2 and shape[0] == shape[1] for shape in shapes)


def _is_unknown_weight(tensor: ModelTensor) -> bool:
    """Called ``weight``, with one dimension that scales, of a module that may sum over it."""
    named = tensor.name.endswith(".weight") and not tensor.layer.by_element
    return tensor.kind == "raw" and named and len(tensor.scaling) == 1


ROLE_TABLE = (
    Case(
        "belongs to the layer that `get_output_embeddings` returns",
        lambda t, n: t.kind == "matrix" and n.is_output(t),
        "unembedding",
        "the model says that it makes the logits",
    ),
    Case(
        "is a lookup table, or belongs to what `get_input_embeddings` returns, and its rows do not scale",
        lambda t, n: n.is_input(t) and not t.writes_scaling,
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
        lambda t, n: n.is_input(t),
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
        "reads a fixed size and writes what scales, with only tables and such layers before it",
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
        lambda t, n: t.kind == "raw" and n.equal_widths,
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
        lambda t, n: t.kind == "raw" and len(t.scaling) > 1 and _is_square(t),
        "hidden",
        "square, read as (out, in)",
    ),
    Case(
        "belongs to an unknown module and has several dimensions that scale",
        lambda t, n: t.kind == "raw" and len(t.scaling) > 1,
        ASK,
        "belongs to a {owner}, which does not tell its inputs",
        "hidden",
        lambda tensor: tensor.scaling[-1],
    ),
    Case(
        "has a dimension that scales and no layer that sums over it",
        lambda t, n: t.kind != "matrix" and bool(t.scaling),
        "vector",
        "norms, biases, class tokens, positions, depthwise convolutions",
    ),
    Case("is anything else", lambda t, n: True, "fixed", "nothing scales"),
)


@dataclass(frozen=True)
class Sizes:
    """A matrix of a model that is as wide as its base, beside the sizes that layers read and write."""

    tensor: ModelTensor
    is_first: bool
    is_last: bool
    read: set[int]
    written: set[int]

    @cached_property
    def reads(self) -> bool:
        return self.tensor.is_recurrent or (not self.is_first and self.tensor.read_size in self.written)

    @cached_property
    def writes(self) -> bool:
        return self.tensor.written_size in self.read

    @cached_property
    def is_fused(self) -> bool:
        """Several outputs side by side: qkv, gate and up, the gates of an LSTM."""
        return any(self.tensor.written_size % size == 0 for size in self.read)

    @property
    def writes_width(self) -> bool:
        return self.writes or self.tensor.layer.outside is not None or (self.is_fused and not self.is_last)

    @property
    def reads_a_part(self) -> bool:
        own = self.tensor.read_size
        related = any(own % size == 0 or size % own == 0 for size in self.written)
        return not self.reads and not self.is_first and related


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


def fill(page: str) -> str:
    """docs/any_model.md with the tables between its markers as they are here."""
    for name, table in (("layers", layers.markdown()), ("roles", _markdown(ROLE_TABLE)), ("doubts", _markdown(DOUBTS))):
        before, start, rest = page.partition(f"<!-- table of {name} -->\n")
        _, end, after = rest.partition("<!-- end of the table -->")
        page = f"{before}{start}\n{table}\n\n{end}{after}"
    return page


def _markdown(cases: tuple[Case, ...]) -> str:
    lines = ["| | a parameter that ... | is | why |", "|---|---|---|---|"]
    for number, case in enumerate(cases, 1):
        role = f"asked for ({case.guess}?)" if case.role == ASK else case.role
        reason = case.reason.format(owner="module", groups="several", size="a size")
        lines.append(f"| {number} | {case.when} | {role} | {reason} |")
    return "\n".join(lines)
