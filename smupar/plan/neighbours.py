"""What the tensors of a model tell about each other: which come first and last, which sizes layers read and write.

Where model and base are equally wide, no dimension shows that it scales; then sizes tell, as well as they can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from smupar.plan.layers import IMAGES
from smupar.plan.parameters import ParameterView

RoleSetting = str | tuple[str, int]


class Neighbours:
    """The parameters of a model, and where each stands among the others."""

    def __init__(self, model: nn.Module, tensors: list[ParameterView], asked: Mapping[str, RoleSetting]) -> None:
        self.asked = asked
        self.output_module = _embeddings(model, "get_output_embeddings")
        self.input_module = _embeddings(model, "get_input_embeddings")
        self.equal_widths = not any(tensor.scaling for tensor in tensors)
        self.guessed: set[str] = set()  # hidden, by their sizes alone
        self.sizes: dict[str, Sizes] = {}  # of matrices whose scaling dimensions follow from sizes alone
        self.tensors = self._with_scaling(tensors) if self.equal_widths else tensors
        self.matrices = [tensor for tensor in self.tensors if tensor.kind == "matrix"]
        self.read_sizes = {tensor.read_size for tensor in self.matrices if not tensor.is_lookup}
        self.readouts = [tensor for tensor in self.matrices if self._may_be_readout(tensor)]
        self.inputs = self._inputs()

    def is_output(self, tensor: ParameterView) -> bool:
        """The user's model says that this weight makes its logits."""
        return tensor.module is self.output_module is not self.input_module and not tensor.is_lookup

    def is_input(self, tensor: ParameterView) -> bool:
        return tensor.kind == "matrix" and (tensor.is_lookup or tensor.module is self.input_module)

    def is_side_table(self, tensor: ParameterView) -> bool:
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

    def is_last(self, tensor: ParameterView) -> bool:
        return tensor is self.matrices[-1]

    def _may_be_readout(self, tensor: ParameterView) -> bool:
        if tensor.name in self.asked:
            return self.asked[tensor.name] == "unembedding"
        shaped = not tensor.is_lookup and tensor.reads_scaling and not tensor.writes_scaling
        return shaped or self.is_output(tensor) or tensor.makes_logits

    def _inputs(self) -> set[str]:
        """Input layers: they read a fixed size and write the width, and no hidden layer comes before them."""
        inputs: list[ParameterView] = []
        for tensor in self.matrices:
            same_layer = bool(inputs) and inputs[-1].module is tensor.module
            if not tensor.reads_scaling and tensor.writes_scaling:
                inputs.append(tensor)
            elif not tensor.is_lookup and not same_layer:
                break
        return {tensor.name for tensor in inputs}

    # Models as wide as their base

    def _with_scaling(self, tensors: list[ParameterView]) -> list[ParameterView]:
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

    def _matrix_scaling(self, sizes: Sizes) -> ParameterView:
        tensor = sizes.tensor
        ins, outs = tensor.in_dims[:1], (tensor.out_dim,)
        if tensor.name in self.asked:
            setting = self.asked[tensor.name]
            role = setting if isinstance(setting, str) else setting[0]
            dims = {"hidden": (*ins, *outs), "embedding": outs, "unembedding": ins}.get(role, ())
        elif tensor.is_lookup or self.is_output(tensor):
            dims = outs if tensor.is_lookup else ins
        else:
            self.sizes[tensor.name] = sizes
            if sizes.is_fused and not sizes.writes and not sizes.is_last:
                self.guessed.add(tensor.name)
            dims = (ins if sizes.reads else ()) + (outs if sizes.writes_width else ())
        return replace(tensor, scaling=tuple(sorted(dims)))


def _vector_scaling(tensor: ParameterView, known: dict[int, ParameterView]) -> ParameterView:
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


@dataclass(frozen=True)
class Sizes:
    """A matrix of a model that is as wide as its base, beside the sizes that layers read and write."""

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
