"""Relations between the parameters of a model: which come first and last, and which sizes layers read and write.

If model and base are equally wide, shapes do not show which dimensions scale. These dimensions are then inferred: a size that
one layer writes and another reads is taken as a width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from smupar.plan.facts.layers import IMAGES
from smupar.plan.roles.parameters import ParameterView, parent_path

RoleSetting = str | tuple[str, int | tuple[int, ...]]


class Neighbours:
    """Answers questions about the place of a parameter among the other parameters of the model. ``asked`` holds the roles that
    the user gave."""

    def __init__(self, tensors: list[ParameterView], asked: Mapping[str, RoleSetting]) -> None:
        self.asked = asked
        self.equal_widths = not any(tensor.scaling for tensor in tensors)
        # ``sizes`` holds the matrices whose scaling dimensions are inferred from sizes alone.
        self.tensors, self.sizes = with_inferred_scaling(tensors, asked) if self.equal_widths else (tensors, {})
        self.matrices = [tensor for tensor in self.tensors if tensor.layout == "matrix"]
        self.read_sizes = {tensor.read_size for tensor in self.matrices if not tensor.layer.is_lookup}
        self.readouts = [tensor for tensor in self.matrices if _may_be_readout(tensor, asked.get(tensor.name))]
        self.readouts += [
            tensor for tensor in self.tensors if tensor.layout != "matrix" and asked.get(tensor.name) == "unembedding"
        ]
        self.answers = [_as_answered(tensor, asked[tensor.name]) for tensor in self.tensors if tensor.name in asked]
        self.has_example = any(tensor.seen is not None for tensor in self.tensors)
        # whether the model says which layer makes its logits
        self.has_logits = any(tensor.is_output or tensor.is_tied_to_readout for tensor in self.matrices)
        self.inputs = _input_layers(self.matrices)
        self.linear = [tensor for tensor in self.matrices if not tensor.layer.is_lookup]
        self.has_table = any(tensor.is_input and tensor.writes_scaling for tensor in self.matrices)
        # whether some weight certainly reads the data: a table that scales, or a weight that the user names an embedding
        self.has_input = self.has_table or "embedding" in asked.values()

    def is_side_table(self, tensor: ParameterView) -> bool:
        """Whether the parameter is a lookup table whose output no layer reads, although layers read another table's output."""
        if not tensor.is_input or not tensor.layer.is_lookup or tensor.is_tied_to_readout:
            return False
        tables = [table for table in self.matrices if table.layer.is_lookup]
        if not any(table.written_size in self.read_sizes for table in tables):
            return False
        sums = {tensor.written_size}  # a layer may read the concatenated outputs of several tables
        for other in tables:
            if other is not tensor and len(sums) < 1000:
                sums |= {size + other.written_size for size in sums}
        return not sums & self.read_sizes

    def has_size_of_layer(self, tensor: ParameterView) -> bool:
        """Whether the dimensions of the tensor that scale have the sizes, in model and base, of a layer's inputs or outputs."""
        sizes = {_sizes(layer, dim) for layer in self.matrices for dim in (*layer.in_dims, *layer.out_dims)}
        return all(_sizes(tensor, dim) in sizes for dim in tensor.scaling)

    def is_last(self, tensor: ParameterView) -> bool:
        return tensor is self.matrices[-1]

    def is_normed(self, tensor: ParameterView) -> bool:
        """Whether a norm over this weight's outputs is registered after it. Such a norm may remove the size of the outputs."""
        later = self.tensors[self.tensors.index(tensor) + 1 :]
        norms = [other for other in later if len(other.shape) == 1 and other.layer.by_element and not other.scaling]
        return any(other.shape == (tensor.written_size,) for other in norms)

    def has_twin(self, tensor: ParameterView) -> bool:
        """Whether another layer also reads a size that scales and writes the fixed size that this weight writes. Layers whose
        role the user gave do not count."""
        same = [other for other in self.readouts if other.layout == "matrix" and other.written_size == tensor.written_size]
        return any(other is not tensor and other.name not in self.asked and not other.is_output for other in same)

    def is_beside_norm(self, tensor: ParameterView) -> bool:
        """Whether the module that contains this layer also contains a norm over the fixed number of values that it writes."""
        inside = parent_path(tensor.path)
        near = [other for other in self.tensors if other.path != tensor.path and parent_path(other.path) == inside]
        return any(other.layer.by_element and other.shape == (tensor.written_size,) and not other.scaling for other in near)

    def is_bottleneck(self, tensor: ParameterView) -> bool:
        """Whether the fixed size that a weight reads or writes may be a bottleneck inside the network: one layer narrows to
        this size, and another widens from it. A layer that narrows does not count if it is the only one and the model's only
        readout, and no weight certainly reads the data. Then it may make the outputs, and the layer that widens may read the
        data."""
        inner = [other for other in self.linear if self.asked.get(other.name) not in ("embedding", "unembedding", "router")]
        narrow = [other for other in inner if other.reads_scaling and not other.writes_scaling and not other.is_output]
        wide = [other for other in inner if other.writes_scaling and not other.reads_scaling]
        if not self.has_input and len(narrow) == 1 and self.readouts == narrow:
            narrow, wide = [], []
        if tensor.writes_scaling:
            sizes = {other.written_size for other in narrow}.union(*(written for read, written in self.answers if read))
            return tensor.read_size in sizes
        sizes = {other.read_size for other in wide}.union(*(read for read, written in self.answers))
        return tensor.written_size in sizes

    def may_read_data(self, tensor: ParameterView) -> bool:
        """Whether a weight of fixed input size seems to read the data: either no layer inside the network writes this size, or
        a lookup table writes it."""
        if tensor.layout != "matrix" or tensor.is_recurrent:
            return False
        size = tensor.read_size
        writers = [other for other in self.linear if other.written_size == size and not other.is_output]
        if not any(other.reads_scaling for other in writers if not (self.readouts == [other] and self.is_last(other))):
            return True
        return self.reads_table(tensor) and all(other.reads_scaling for other in writers)

    def reads_table(self, tensor: ParameterView) -> bool:
        """Whether a lookup table writes as many values as a weight reads."""
        return any(other.layer.is_lookup and other.written_size == tensor.read_size for other in self.matrices)

    def feeds_logits(self, tensor: ParameterView) -> bool:
        """Whether the layer that makes the logits reads the fixed size that this weight writes. False if a layer of fixed input
        writes this size too."""
        if tensor.layout != "matrix":
            return False
        size = tensor.written_size
        heads = [other for other in self.matrices if other.is_output and other.read_size == size and not other.reads_scaling]
        heads += [
            other
            for other in self.matrices
            if other.is_tied_to_readout and other.written_size == size and not other.writes_scaling
        ]
        writers = [other for other in self.linear if other.written_size == size and not other.is_output]
        return bool(heads) and all(other.reads_scaling for other in writers)

    def is_beside_experts(self, tensor: ParameterView) -> bool:
        """Whether the module that contains this matrix also contains as many experts as the matrix has fixed outputs. Experts
        are a list of layers, or tensors of three dimensions whose first dimension counts the experts. A module that contains
        no other matrix only wraps this one."""
        inside = f"{parent_path(tensor.path)}." if "." in tensor.path else ""
        while inside and all(other is tensor for other in self.matrices if other.name.startswith(inside)):
            inside = f"{parent_path(inside[:-1])}." if "." in inside[:-1] else ""
        prefix, sizes = f"{tensor.path}.", {size for dim, size in enumerate(tensor.shape) if dim not in tensor.scaling}
        others = [
            other
            for other in self.tensors
            if other.name.startswith(inside) and not other.name.startswith(prefix) and other.path
        ]
        stacks = {other.shape[0] for other in others if len(other.shape) > 2 and other.layout in ("raw", "seen")}
        lists: dict[str, set[str]] = {}
        for other in others:
            parts = other.name.removeprefix(inside).split(".")
            for place, part in enumerate(parts[:3]):
                if part.isdigit():
                    lists.setdefault(".".join(parts[:place]), set()).add(part)
        return bool(sizes & (stacks | {len(numbers) for numbers in lists.values()} - {1}))

    def partly_scaling(self) -> tuple[set[str], set[str]]:
        """(names of weights that read a size that grows like no layer's output, names of weights that write a size that grows
        like no layer's input). Such a size may be a concatenation of scaling and fixed parts."""
        if self.equal_widths or any(tensor.layout in ("raw", "seen") and tensor.scaling for tensor in self.tensors):
            return set(), set()
        read = {tensor.name: tensor.ratio(tensor.in_dims[:1]) for tensor in self.linear if tensor.reads_scaling}
        written = {tensor.name: tensor.ratio(tensor.out_dims) for tensor in self.matrices if tensor.writes_scaling}
        recurrent = {tensor.ratio(tensor.in_dims[:1]) for tensor in self.linear if tensor.is_recurrent}
        sources, sinks = {*written.values(), *recurrent}, {*read.values()}
        return (
            {name for name, ratio in read.items() if ratio not in sources},
            {name for name, ratio in written.items() if ratio not in sinks and name in read},
        )

    def is_guess(self, tensor: ParameterView) -> bool:
        """Whether only the sizes of other parameters suggest that this parameter's output scales."""
        return tensor.name in self.sizes and self.sizes[tensor.name].is_guess


def _sizes(tensor: ParameterView, dim: int) -> tuple[int, int]:
    return tensor.shape[dim], tensor.base_shape[dim]


def _as_answered(tensor: ParameterView, setting: RoleSetting) -> tuple[set[int], set[int]]:
    """(input sizes, output sizes) of a tensor of an unknown module, if the user's role names its input dimensions."""
    if tensor.layout != "raw" or isinstance(setting, str):
        return set(), set()
    in_dims = setting[1] if isinstance(setting[1], tuple) else (setting[1],)
    size_of_dim = dict(enumerate(tensor.shape))
    return {size_of_dim[dim] for dim in in_dims}, {size for dim, size in size_of_dim.items() if dim not in in_dims}


def _may_be_readout(tensor: ParameterView, setting: RoleSetting | None) -> bool:
    if setting is not None:
        return setting == "unembedding"
    shaped = not tensor.layer.is_lookup and tensor.reads_scaling and not tensor.writes_scaling
    return shaped or tensor.is_output or tensor.is_tied_to_readout


def _input_layers(matrices: list[ParameterView]) -> set[str]:
    """Names of the weights that read a fixed size and write the width, with no hidden layer before them."""
    inputs: list[ParameterView] = []
    for tensor in matrices:
        same_layer = bool(inputs) and inputs[-1].module is tensor.module
        if not tensor.reads_scaling and tensor.writes_scaling:
            inputs.append(tensor)
        elif not tensor.layer.is_lookup and not same_layer:
            break
    return {tensor.name for tensor in inputs}


# Models as wide as their base


@dataclass(frozen=True)
class Sizes:
    """A matrix in a model that is as wide as its base, with the sizes that all layers read and write."""

    tensor: ParameterView
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
    def is_guess(self) -> bool:
        """Whether the matrix seems to write several outputs at once, such as qkv, gate and up, or the gates of an LSTM."""
        is_multiple = any(self.tensor.written_size % size == 0 for size in self.read)
        return is_multiple and not self.writes and not self.is_last

    @property
    def writes_width(self) -> bool:
        return self.writes or self.tensor.layer.outside is not None or self.is_guess

    @property
    def reads_a_part(self) -> bool:
        read_size = self.tensor.read_size
        related = any(read_size % size == 0 or size % read_size == 0 for size in self.written)
        return not self.reads and not self.is_first and related


def with_inferred_scaling(
    tensors: list[ParameterView], asked: Mapping[str, RoleSetting]
) -> tuple[list[ParameterView], dict[str, Sizes]]:
    """The parameters with their inferred scaling dimensions, and the matrices whose dimensions were inferred from sizes alone.

    An input dimension scales if some layer writes its size, and an output dimension if some layer reads its size. If sizes are
    related but not equal, the role is in doubt (``table.DOUBTS``).
    """
    matrices = [tensor for tensor in tensors if tensor.layout == "matrix"]
    linear = [tensor for tensor in matrices if not tensor.layer.is_lookup]
    has_lookup = len(linear) < len(matrices)
    has_output = any(tensor.is_output or tensor.is_tied_to_readout for tensor in matrices)
    first = linear[0] if linear and not has_lookup else None  # the first layer reads the data, unless a lookup table does
    last = linear[-1] if linear and not has_output else None
    read = {tensor.read_size for tensor in linear if tensor is not first}
    written = {tensor.written_size for tensor in matrices}
    sizes = {
        tensor.name: Sizes(tensor, tensor is first, tensor is last, read, written)
        for tensor in linear
        if tensor.name not in asked and not tensor.is_output
    }
    scaled = {
        tensor.name: replace(tensor, scaling=_matrix_scaling(tensor, asked.get(tensor.name), sizes.get(tensor.name)))
        for tensor in matrices
    }
    weights = {  # the matrix of each module, by the module's id; a bias scales like the output of its module's matrix
        id(module): tensor for tensor in scaled.values() for module in (tensor.module, *(tied for _, tied in tensor.tied))
    }
    return [scaled.get(tensor.name) or _vector_scaling(tensor, weights.get(id(tensor.module))) for tensor in tensors], sizes


def _matrix_scaling(tensor: ParameterView, setting: RoleSetting | None, sizes: Sizes | None) -> tuple[int, ...]:
    """The scaling dimensions of a matrix, from its sizes or the user's role. Without sizes or a role, a lookup scales in its
    output, and the layer that makes the logits scales in its input."""
    ins, outs = tensor.in_dims[:1], tensor.out_dims
    if sizes is not None:
        dims = (ins if sizes.reads else ()) + (outs if sizes.writes_width else ())
    elif setting is None:
        dims = outs if tensor.layer.is_lookup else ins
    else:
        role = setting if isinstance(setting, str) else setting[0]
        dims = {"hidden": (*ins, *outs), "embedding": outs, "unembedding": ins, "router": ins}.get(role, ())
    return tuple(sorted(dims))


def _vector_scaling(tensor: ParameterView, weight: ParameterView | None) -> ParameterView:
    """Sets the scaling dimension of a parameter that is not a matrix. ``weight`` is the matrix of its module, if it has one."""
    if not tensor.shape:
        return tensor
    if weight is not None and len(tensor.shape) == 1:
        is_bias_of_logits = weight.is_tied_to_readout and tensor.module is not weight.module
        return replace(tensor, scaling=(0,) if weight.writes_scaling and not is_bias_of_logits else ())
    channels_first = len(tensor.shape) == 1 or tensor.layer.reads == IMAGES
    return replace(tensor, scaling=(0,) if channels_first else (len(tensor.shape) - 1,))
