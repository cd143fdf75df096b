"""Which row of Table 1 each parameter belongs to, and its width multipliers against a base model.

A dimension *scales* when its size differs between the model and the base (or a third model, ``delta``). The module that
owns a parameter tells which dimensions it reads and writes. What shapes and modules leave open is asked for, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from smupar.globs import match_globs
from smupar.rules import ROLES
from smupar.tensors import ModelTensor, Shape, is_layer, is_lookup, read_tensors

RoleSetting = str | tuple[str, int]


GUESSED = (
    "taken for hidden, and made sparse, because its outputs are a multiple of what layers read: a readout would look the same. "
    "Pass delta=, the same model at any other width, to be sure"
)


@dataclass(frozen=True)
class ParamRole:
    """Where one parameter stands in the network."""

    name: str
    role: str
    shape: Shape
    in_dims: tuple[int, ...]  # dimensions that one output reads, input channel first; empty for vectors and fixed tensors
    scaling: tuple[int, ...]  # dimensions whose size follows the width
    width_in: Fraction
    width_out: Fraction
    base_fan_in: int  # a lookup reads one row, so an embedding table counts 1 (a tied one: the fan-in of its logits)
    uses: tuple[tuple[str, str], ...]  # (module path, role) of each module whose output Table 1 multiplies; two if tied
    note: str


def infer_roles(
    model: nn.Module,
    base: nn.Module,
    *,
    delta: nn.Module | None = None,
    roles: Mapping[str, RoleSetting] | None = None,
) -> list[ParamRole]:
    """The role of every parameter, in the model's order. Raises ValueError with the ``roles={...}`` line that would help."""
    tensors = read_tensors(model, base, delta)
    asked = match_globs(roles or {}, [tensor.name for tensor in tensors], what="roles", among="parameters")
    for tensor in tensors:
        if tensor.name in asked:
            _check_setting(tensor, asked[tensor.name])
    return _Inference(model, tensors, asked).roles()


def layer_glob(name: str) -> str:
    """The name with layer numbers as stars, so that one line serves every block."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _check_setting(tensor: ModelTensor, setting: RoleSetting) -> None:
    role, in_dim = (setting, None) if isinstance(setting, str) else (setting[0], setting[-1])
    fits = in_dim is None or (role == "hidden" and isinstance(in_dim, int) and 0 <= in_dim < len(tensor.shape))
    if role not in ROLES or not fits:
        raise ValueError(
            f"roles: {tensor.name!r} of shape {tensor.shape} got {setting!r}; "
            f"use one of {', '.join(ROLES)}, or ('hidden', in_dim)"
        )
    if role == "hidden" and len(tensor.shape) < 2:
        raise ValueError(f"roles: {tensor.name!r} of shape {tensor.shape} is no matrix and cannot be hidden")
    if role == "hidden" and in_dim is None and tensor.kind != "matrix":
        raise ValueError(
            f"roles: {tensor.name!r} of shape {tensor.shape} belongs to a {type(tensor.module).__name__}, "
            f"which does not tell its inputs; write roles={{{tensor.name!r}: ('hidden', IN_DIM)}} "
            "with the dimension that is summed over"
        )


class _Inference:
    """Roles from what the models show; collects what stays open, so that one error can list it all."""

    def __init__(self, model: nn.Module, tensors: list[ModelTensor], asked: Mapping[str, RoleSetting]) -> None:
        self.asked = asked
        self.unresolved: dict[str, tuple[ModelTensor, str, RoleSetting]] = {}  # what is unclear, and the suggested role
        self.output_module = _embeddings(model, "get_output_embeddings")
        self.input_module = _embeddings(model, "get_input_embeddings")
        self.guessed: set[str] = set()  # hidden, by their sizes alone
        self.equal_widths = not any(tensor.scaling for tensor in tensors)
        self.tensors = self._with_scaling(tensors) if self.equal_widths else tensors
        self.matrices = [tensor for tensor in self.tensors if tensor.kind == "matrix"]
        self.read_sizes = {tensor.read_size for tensor in self.matrices if not tensor.is_lookup}
        self.readouts = [tensor for tensor in self.matrices if self._may_be_readout(tensor)]
        self.inputs = self._inputs()

    def roles(self) -> list[ParamRole]:
        found = [self._place(tensor) for tensor in self.tensors]
        if self.unresolved:
            raise ValueError(self._question())
        return [role for role in found if role is not None]

    def _place(self, tensor: ModelTensor) -> ParamRole | None:
        if tensor.name in self.asked:
            return _as_asked(tensor, self.asked[tensor.name])
        if tensor.name in self.unresolved:
            return None
        if tensor.kind == "raw":
            return self._raw(tensor)
        role = self._matrix(tensor) if tensor.kind == "matrix" else "vector" if tensor.scaling else "fixed"
        # What is frozen may hold values on purpose: sines, pretrained weights.
        anew = "frozen and initialised anew all the same: give it the role 'fixed' if it is to keep its values"
        overwritten = tensor.frozen and role in ("embedding", "hidden", "unembedding")
        note = anew if overwritten else GUESSED if role == "hidden" and tensor.name in self.guessed else ""
        return None if role is None else _param_role(tensor, role, note=note)

    def _matrix(self, tensor: ModelTensor) -> str | None:
        if self._is_output(tensor):
            return "unembedding"
        if tensor.is_lookup or tensor.module is self.input_module:
            if not tensor.writes_scaling:
                return "fixed"
            # A table no layer reads, beside one that layers read: relative position biases for the heads.
            return "vector" if tensor.is_lookup and self._is_side_table(tensor) else "embedding"
        if tensor.reads_scaling and tensor.writes_scaling:
            if tensor is self.matrices[-1] and not self.readouts and tensor.written_size not in self.read_sizes:
                why = "is the last layer and writes what no layer reads: do the outputs of model and base differ in number?"
                return self._ask(tensor, why, "unembedding")
            return "hidden"
        if tensor.reads_scaling:
            last = tensor is self.matrices[-1]
            if self.readouts == [tensor] and last:
                return "unembedding"
            return self._ask(tensor, "reads a scaling input and writes a fixed output", "unembedding" if last else "hidden")
        if tensor.writes_scaling:
            if tensor.name in self.inputs:
                return "embedding"
            return self._ask(tensor, "reads a fixed input and writes a scaling output, after hidden layers", "hidden")
        return "fixed"

    def _raw(self, tensor: ModelTensor) -> ParamRole | None:
        owner = type(tensor.module).__name__
        square = len(tensor.shape) == 2 and tensor.shape[0] == tensor.shape[1] and tensor.base_shape[0] == tensor.base_shape[1]
        if isinstance(tensor.module, (ParametrizationList, nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)):
            self._ask(
                tensor, "is one of several tensors that make a weight; better remove that parametrization first", "vector"
            )
        elif self.equal_widths:
            self._ask(tensor, f"belongs to a {owner}, which does not tell its inputs", ("hidden", 1) if square else "vector")
        elif len(tensor.scaling) == 1 and tensor.name.endswith(".weight") and not _acts_by_element(tensor.module):
            some: RoleSetting = "embedding" if tensor is self.tensors[0] else "unembedding"
            if some == "unembedding" and self.readouts:  # of which there is one already: a router
                some = ("hidden", tensor.scaling[0])
            self._ask(tensor, f"belongs to a {owner}, which does not tell whether it reads or writes what scales", some)
        elif len(tensor.scaling) < 2:
            return _param_role(tensor, "vector" if tensor.scaling else "fixed")
        elif square:
            return _param_role(tensor, "hidden", in_dims=(1,), out_dim=0, note="square, read as (out, in)")
        else:
            self._ask(tensor, f"belongs to a {owner}, which does not tell its inputs", ("hidden", tensor.scaling[-1]))
        return None

    def _is_side_table(self, tensor: ModelTensor) -> bool:
        tables = [table for table in self.matrices if table.is_lookup]
        if not any(table.written_size in self.read_sizes for table in tables) or tensor.makes_logits:
            return False
        sums = {tensor.written_size}  # side by side, it and others may be read together
        for other in tables:
            if other is not tensor and len(sums) < 1000:
                sums |= {size + other.written_size for size in sums}
        return not sums & self.read_sizes

    def _is_output(self, tensor: ModelTensor) -> bool:
        """The user's model says that this weight makes its logits."""
        return tensor.module is self.output_module is not self.input_module and not tensor.is_lookup

    def _may_be_readout(self, tensor: ModelTensor) -> bool:
        if tensor.name in self.asked:
            return self.asked[tensor.name] == "unembedding"
        shaped = not tensor.is_lookup and tensor.reads_scaling and not tensor.writes_scaling
        return shaped or self._is_output(tensor) or tensor.makes_logits

    def _inputs(self) -> set[str]:
        """Matrices from a fixed input to a scaling output with nothing but such inputs, or their own layer, before them."""
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
        layers = [tensor for tensor in matrices if not tensor.is_lookup]
        has_lookup = len(layers) < len(matrices)
        has_output = any(self._is_output(tensor) or tensor.makes_logits for tensor in matrices)
        read = {tensor.read_size for tensor in layers[not has_lookup :]}
        written = {tensor.written_size for tensor in matrices}
        known: dict[int, ModelTensor] = {}  # by module, for the biases that go with a weight
        found = []
        for tensor in tensors:
            if tensor.kind == "matrix":
                first = not has_lookup and tensor is layers[0]
                last = not has_output and bool(layers) and tensor is layers[-1]
                tensor = self._matrix_scaling(tensor, read, written, first=first, last=last)
                for module in (tensor.module, *(tied for _, tied in tensor.tied)):
                    known[id(module)] = tensor
            found.append(tensor)
        return [tensor if tensor.kind == "matrix" else self._vector_scaling(tensor, known) for tensor in found]

    def _matrix_scaling(
        self, tensor: ModelTensor, read: set[int], written: set[int], *, first: bool, last: bool
    ) -> ModelTensor:
        ins, outs = tensor.in_dims[:1], (tensor.out_dim,)
        if tensor.name in self.asked:
            setting = self.asked[tensor.name]
            role = setting if isinstance(setting, str) else setting[0]
            dims = {"hidden": (*ins, *outs), "embedding": outs, "unembedding": ins}.get(role, ())
            return replace(tensor, scaling=tuple(sorted(dims)))
        if tensor.is_lookup:
            return replace(tensor, scaling=outs)
        if self._is_output(tensor):
            return replace(tensor, scaling=ins)
        if first and last:
            self._ask(tensor, "is the only layer", "unembedding")
        if tensor.groups > 1:
            self._ask(tensor, f"has {tensor.groups} groups, of which number or size may scale", "hidden")
        reads = tensor.is_recurrent or (not first and tensor.read_size in written)
        if not reads and not first and any(_related(tensor.read_size, size) for size in written):
            why = f"reads {tensor.read_size}, which may be part of a layer's output or an input"
            self._ask(tensor, why, "unembedding" if last else "hidden")
        writes = tensor.written_size in read
        if writes and last:
            self._ask(tensor, "is the last layer, and may write outputs or features", "unembedding")
        fused = any(tensor.written_size % size == 0 for size in read)  # qkv, gate and up, the gates of an LSTM
        if fused and not writes and not last:
            self.guessed.add(tensor.name)
        writes = writes or isinstance(tensor.module, (nn.RNNBase, nn.RNNCellBase)) or (fused and not last)
        return replace(tensor, scaling=tuple(sorted((ins if reads else ()) + (outs if writes else ()))))

    def _vector_scaling(self, tensor: ModelTensor, known: dict[int, ModelTensor]) -> ModelTensor:
        if not tensor.shape:
            return tensor
        weight = known.get(id(tensor.module))
        if weight is not None and len(tensor.shape) == 1:
            is_bias_of_logits = weight.makes_logits and tensor.module is not weight.module
            return replace(tensor, scaling=(0,) if weight.writes_scaling and not is_bias_of_logits else ())
        channels_first = len(tensor.shape) == 1 or isinstance(tensor.module, nn.modules.conv._ConvNd)
        return replace(tensor, scaling=(0,) if channels_first else (len(tensor.shape) - 1,))

    # Asking

    def _ask(self, tensor: ModelTensor, why: str, suggestion: RoleSetting) -> str | None:
        """Notes an open question; its role is None."""
        self.unresolved.setdefault(tensor.name, (tensor, why, suggestion))
        return None

    def _question(self) -> str:
        questions = list(self.unresolved.values())
        lines = [f"  {tensor.name} {tensor.shape}, base {tensor.base_shape}: {why}" for tensor, why, _ in questions[:12]]
        if len(questions) > 12:
            lines.append(f"  ... and {len(questions) - 12} more")
        guesses = {tensor.name: role for tensor, _, role in questions}
        suggested: dict[str, RoleSetting] = {}
        exact: dict[str, bool] = {}
        for name, role in guesses.items():
            glob = layer_glob(name)
            if glob not in exact:
                matched = [other.name for other in self.tensors if fnmatchcase(other.name, glob)]
                exact[glob] = all(guesses.get(other) == role for other in matched)
            suggested[glob if exact[glob] else name] = role
        equal = (
            "\nThe model is as wide as its base. Instead of roles you may pass delta=, the same model at any other width, "
            "to show which dimensions scale."
        )
        return (
            "the role of these parameters cannot be inferred:\n"
            + "\n".join(lines)
            + "\nSay what they are (embedding, hidden, unembedding, vector, fixed); if these guesses are right, pass:\n"
            + f"  roles={suggested!r}\n"
            + "Hidden weights are scaled and made sparse; the unembedding makes the model's outputs."
            + (equal if self.equal_widths else "")
        )


def _acts_by_element(module: nn.Module) -> bool:
    """torch's own modules with a weight of several dimensions that are no layers: norms. nn.Bilinear sums over its inputs."""
    return type(module).__module__.startswith("torch.") and not isinstance(module, nn.Bilinear)


def _related(size: int, other: int) -> bool:
    return size % other == 0 or other % size == 0


# Building the answer


def _as_asked(tensor: ModelTensor, setting: RoleSetting) -> ParamRole:
    role, in_dim = (setting, None) if isinstance(setting, str) else setting
    if role in ("vector", "fixed"):
        return _param_role(tensor, role)
    if in_dim is not None and (tensor.kind != "matrix" or in_dim != tensor.in_dims[0]):
        others = [dim for dim in range(len(tensor.shape)) if dim != in_dim]
        outs = [dim for dim in others if dim in tensor.scaling] or others
        return _param_role(tensor, role, in_dims=(in_dim,), out_dim=outs[-1])
    if tensor.kind == "matrix":
        return _param_role(tensor, role)
    dims = tensor.scaling or (len(tensor.shape) - 1,)
    ins, out = ((), dims[-1]) if role == "embedding" else (dims, -1)
    return _param_role(tensor, role, in_dims=ins, out_dim=out)


def _param_role(
    tensor: ModelTensor, role: str, *, in_dims: tuple[int, ...] | None = None, out_dim: int | None = None, note: str = ""
) -> ParamRole:
    in_dims = tensor.in_dims if in_dims is None else in_dims
    out_dim = tensor.out_dim if out_dim is None else out_dim
    width_in, width_out = Fraction(1), Fraction(1)
    base_fan_in = math.prod(tensor.base_shape[dim] for dim in in_dims)
    if getattr(tensor.module, "transposed", False):
        base_fan_in //= tensor.groups
    uses: tuple[tuple[str, str], ...] = ()
    if role == "hidden":
        width_in, width_out = tensor.ratio(in_dims), tensor.ratio((out_dim,))
    elif role == "unembedding":
        width_in = tensor.ratio(in_dims)
        uses = ((tensor.path, role), *((path, role) for path, module in tensor.tied if is_layer(module)))
    elif role == "embedding":
        width_out = tensor.ratio((out_dim,))
        if tensor.is_lookup:
            base_fan_in = tensor.base_shape[out_dim] if tensor.makes_logits else 1
        backwards = "unembedding" if tensor.is_lookup else role  # a table that a layer reads
        tied = [(path, role if is_lookup(module) else backwards) for path, module in tensor.tied if is_layer(module)]
        uses = ((tensor.path, role), *tied)
    elif role == "vector":
        width_out = tensor.ratio(tensor.scaling)
    if ".parametrizations." in f".{tensor.name}":
        note = "parametrized: these numbers are the original's, the layer uses what is computed from it"
    if tensor.kind != "matrix" or isinstance(tensor.module, nn.MultiheadAttention):
        uses = ()  # no module whose input or output could be multiplied for this weight alone
    return ParamRole(
        name=tensor.name,
        role=role,
        shape=tensor.shape,
        in_dims=in_dims if role in ("embedding", "hidden", "unembedding") else (),
        scaling=tensor.scaling,
        width_in=width_in,
        width_out=width_out,
        base_fan_in=base_fan_in,
        uses=uses,
        note=note,
    )


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
