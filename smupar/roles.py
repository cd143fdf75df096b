"""Which row of Table 1 each parameter belongs to, and its width multipliers against a base model.

A dimension *scales* when its size differs between the model and the base (or a third model, ``delta``). The module that
owns a parameter tells which dimensions it reads and writes. What shapes and modules leave open is asked for, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from smupar.globs import match_globs
from smupar.rules import ROLES

Shape = tuple[int, ...]
RoleSetting = str | tuple[str, int]


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


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A parameter as the models show it."""

    name: str
    path: str  # of the module that uses it
    module: nn.Module
    tied: tuple[tuple[str, nn.Module], ...]  # the other modules that hold it
    shape: Shape
    base_shape: Shape
    scaling: tuple[int, ...]
    kind: str  # "matrix": its module says what it reads and writes; "vector": acts element by element; "raw": unknown
    in_dims: tuple[int, ...]
    out_dim: int

    @property
    def is_lookup(self) -> bool:
        return _is_lookup(self.module)

    @property
    def makes_logits(self) -> bool:
        """An embedding table that another module reads backwards."""
        return self.is_lookup and any(not _is_lookup(module) for _, module in self.tied)

    @property
    def reads_scaling(self) -> bool:
        return any(dim in self.scaling for dim in self.in_dims)

    @property
    def writes_scaling(self) -> bool:
        return self.out_dim in self.scaling

    def ratio(self, dims: tuple[int, ...]) -> Fraction:
        return math.prod((Fraction(self.shape[dim], self.base_shape[dim]) for dim in dims), start=Fraction(1))


def parent_path(name: str) -> str:
    return name.rpartition(".")[0]


def _is_lookup(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def infer_roles(
    model: nn.Module,
    base: nn.Module,
    *,
    delta: nn.Module | None = None,
    roles: Mapping[str, RoleSetting] | None = None,
) -> list[ParamRole]:
    """The role of every parameter, in the model's order. Raises ValueError with the ``roles={...}`` line that would help."""
    tensors = _read(model, base, delta)
    asked = match_globs(roles or {}, [t.name for t in tensors], what="roles", among="parameters")
    inference = _Inference(model, tensors, asked)
    found = [inference.place(tensor) for tensor in tensors]
    inference.raise_unresolved()
    return [role for role in found if role is not None]


# Reading the models


def _read(model: nn.Module, base: nn.Module, delta: nn.Module | None) -> list[_Tensor]:
    names = _names(model)
    own = {name: tuple(parameter.shape) for name, parameter in _parameters(model)}
    base_shapes = _shapes_like(model, own, names, base, "base")
    other_shapes = [base_shapes] if delta is None else [base_shapes, _shapes_like(model, own, names, delta, "delta")]
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = []
    for name, shape in own.items():
        # A tied weight may be registered under its head's name first; its table is what it is.
        holders = sorted((name, *names[name]), key=lambda held: not _is_lookup(modules[parent_path(held)]))
        path, _, leaf = holders[0].rpartition(".")
        tied = tuple((parent_path(held), modules[parent_path(held)]) for held in holders[1:])
        if isinstance(modules[path], ParametrizationList):  # fc.parametrizations.weight.original acts as fc.weight
            path, leaf = parent_path(parent_path(path)), path.rpartition(".")[2]
        scaling = tuple(dim for dim in range(len(shape)) if any(other[name][dim] != shape[dim] for other in other_shapes))
        kind, in_dims, out_dim = _layout(modules[path], leaf, shape, scaling)
        tensors.append(_Tensor(name, path, modules[path], tied, shape, base_shapes[name], scaling, kind, in_dims, out_dim))
    return tensors


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    parameters = list(model.named_parameters())
    for name, parameter in parameters:
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"{name!r} has no shape yet (a lazy module): run one forward pass first")
    return parameters


def _names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Canonical parameter name -> its other names."""
    first: dict[int, str] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(id(parameter), name)
        names[canonical] = (*names[canonical], name) if canonical in names else ()
    return names


def _shapes_like(
    model: nn.Module, own: dict[str, Shape], names: dict[str, tuple[str, ...]], other: nn.Module, what: str
) -> dict[str, Shape]:
    """Parameter shapes of ``other``, after checking that it is the same network at another width."""
    if not (isinstance(model, type(other)) or isinstance(other, type(model))):
        raise ValueError(f"{what} is a {type(other).__name__}, the model a {type(model).__name__}: both must be of one class")
    other_names = _names(other)
    shapes = {name: tuple(parameter.shape) for name, parameter in _parameters(other)}
    if own.keys() != shapes.keys():
        sides = [("the model", sorted(own.keys() - shapes.keys())), (what, sorted(shapes.keys() - own.keys()))]
        shown = "; ".join(f"only in {side}: {', '.join(extra[:4])}" for side, extra in sides if extra)
        raise ValueError(
            f"{what} has {len(shapes)} parameters and the model {len(own)} ({shown}). "
            f"Build {what} with the same depth and options; only widths may differ."
        )
    for name, shape in own.items():
        if set(names[name]) != set(other_names[name]):
            raise ValueError(f"{name!r} is tied in one of model and {what} and not in the other: build both alike")
        if len(shapes[name]) != len(shape):
            raise ValueError(f"{name!r} has shape {shape} in the model and {shapes[name]} in {what}: only sizes may differ")
    return shapes


def _layout(module: nn.Module, leaf: str, shape: Shape, scaling: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    """(kind, dimensions read, dimension written) of a parameter, from the module that owns it."""
    vector, raw = ("vector", (), -1), ("raw", (), -1)
    if len(shape) < 2:
        return vector
    if _is_lookup(module):
        return "matrix", (0,), 1
    if isinstance(module, (nn.Linear, nn.RNNBase)):
        return "matrix", (1,), 0
    if isinstance(module, nn.MultiheadAttention):
        return ("matrix", (1,), 0) if leaf.endswith("_weight") else vector
    if isinstance(module, nn.modules.conv._ConvNd):
        kernel = tuple(range(2, len(shape)))
        if module.groups == module.in_channels > 1 or (module.groups > 1 and scaling == (0,)):
            return vector  # depthwise, or groups of fixed size: each output reads a fixed number of inputs at every width
        return ("matrix", (0, *kernel), 1) if module.transposed else ("matrix", (1, *kernel), 0)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # Hugging Face's Linear with a transposed weight
        return "matrix", (0,), 1
    return raw if sum(size > 1 for size in shape) > 1 else vector


# Deciding


class _Inference:
    """Roles from what the models show; collects what stays open, so that one error can list it all."""

    def __init__(self, model: nn.Module, tensors: list[_Tensor], asked: Mapping[str, RoleSetting]) -> None:
        self.asked = asked
        self.names = [tensor.name for tensor in tensors]
        # Nothing differs where a model is as wide as its base: then structure must tell what scales.
        self.compared = any(tensor.scaling for tensor in tensors)
        self.matrices = [t for t in tensors if t.kind == "matrix"]
        self.output_weight = _embeddings(model, "get_output_embeddings")
        self.input_weight = _embeddings(model, "get_input_embeddings")
        self.has_lookup = self.input_weight is not None or any(t.is_lookup for t in self.matrices)
        self.has_output = self.output_weight is not None or any(t.makes_logits for t in self.matrices)
        self.readouts = [t for t in self.matrices if self._may_be_readout(t)]
        self.leading = self._leading_inputs()
        self.unresolved: list[tuple[_Tensor, str, RoleSetting]] = []  # tensor, what is unclear, suggested role

    def place(self, tensor: _Tensor) -> ParamRole | None:
        if tensor.name in self.asked:
            return self._as_asked(tensor, self.asked[tensor.name])
        if tensor.kind == "matrix":
            role = self._matrix_role(tensor)
            return None if role is None else self._param_role(tensor, role)
        if tensor.kind == "raw":
            return self._raw_role(tensor)
        return self._param_role(tensor, self._vector_role(tensor))

    def _matrix_role(self, tensor: _Tensor) -> str | None:
        if self._is_known_output(tensor):
            return "unembedding"
        if tensor.is_lookup or self._is(tensor, self.input_weight):
            return "embedding" if tensor.writes_scaling or not self.compared else "fixed"
        if not self.compared:
            return self._structural_role(tensor)
        if tensor.reads_scaling and tensor.writes_scaling:
            return "hidden"
        if tensor.reads_scaling:
            if self.readouts == [tensor] and tensor is self.matrices[-1]:
                return "unembedding"
            last = tensor is self.readouts[-1] and tensor is self.matrices[-1]
            return self._ask(tensor, "reads a scaling input and writes a fixed output", "unembedding" if last else "hidden")
        if tensor.writes_scaling:
            if tensor in self.leading:
                return "embedding"
            return self._ask(tensor, "reads a fixed input and writes a scaling output, after hidden layers", "hidden")
        return "fixed"

    def _structural_role(self, tensor: _Tensor) -> str | None:
        """Roles where model and base have equal widths: inputs come first, the readout last, hidden weights between."""
        if not self.has_lookup and tensor is self.matrices[0]:
            if len(self.matrices) > 1:
                return "embedding"
            return self._ask(tensor, "is the only matrix of a model as wide as its base", "unembedding")
        if self.has_output or tensor is not self.matrices[-1]:
            return "hidden"
        read_sizes = {t.shape[t.in_dims[0]] for t in self.matrices if not t.is_lookup}
        if tensor.shape[tensor.out_dim] in read_sizes:
            return self._ask(
                tensor,
                "is the last matrix of a model as wide as its base, and may write logits or features",
                "unembedding",
            )
        return "unembedding"

    def _raw_role(self, tensor: _Tensor) -> ParamRole | None:
        if not self.compared:
            self._ask(tensor, f"belongs to a {type(tensor.module).__name__} of a model as wide as its base", "vector")
            return None
        if len(tensor.scaling) < 2:
            return self._param_role(tensor, "vector" if tensor.scaling else "fixed")
        if len(tensor.shape) == 2 and tensor.shape[0] == tensor.shape[1] and tensor.base_shape[0] == tensor.base_shape[1]:
            return self._param_role(tensor, "hidden", in_dims=(1,), out_dim=0, note="square, read as (out, in)")
        self._ask(
            tensor,
            f"belongs to a {type(tensor.module).__name__}, which does not tell its inputs",
            ("hidden", tensor.scaling[-1]),
        )
        return None

    def _vector_role(self, tensor: _Tensor) -> str:
        if self.compared:
            return "vector" if tensor.scaling else "fixed"
        weight = next((t for t in self.matrices if t.module is tensor.module), None)
        return "fixed" if weight is not None and self._matrix_role(weight) == "unembedding" else "vector"

    def _may_be_readout(self, tensor: _Tensor) -> bool:
        """Reads a scaling input and writes a fixed output, or is known to make the logits; and the user has not said."""
        if tensor.name in self.asked:
            return self.asked[tensor.name] == "unembedding"
        shaped = not tensor.is_lookup and tensor.reads_scaling and not tensor.writes_scaling
        return shaped or self._is_known_output(tensor) or tensor.makes_logits

    def _leading_inputs(self) -> list[_Tensor]:
        """Matrices from a fixed input to a scaling output with nothing but such inputs before them."""
        leading: list[_Tensor] = []
        for tensor in self.matrices:
            if tensor.reads_scaling or not tensor.writes_scaling:
                if tensor.is_lookup:
                    continue
                break
            leading.append(tensor)
        return leading

    def _is_known_output(self, tensor: _Tensor) -> bool:
        return self._is(tensor, self.output_weight) and not tensor.is_lookup and not self._is(tensor, self.input_weight)

    @staticmethod
    def _is(tensor: _Tensor, module: nn.Module | None) -> bool:
        return module is not None and tensor.module is module

    # Building the answer

    def _as_asked(self, tensor: _Tensor, setting: RoleSetting) -> ParamRole:
        role, in_dim = (setting, None) if isinstance(setting, str) else (setting[0], setting[1])
        if role not in ROLES or (in_dim is not None and (role != "hidden" or not 0 <= in_dim < len(tensor.shape))):
            raise ValueError(
                f"roles: {tensor.name!r} of shape {tensor.shape} got {setting!r}; "
                f"use one of {', '.join(ROLES)}, or ('hidden', in_dim)"
            )
        if role in ("vector", "fixed"):
            return self._param_role(tensor, role)
        if in_dim is not None and (tensor.kind != "matrix" or in_dim != tensor.in_dims[0]):
            outs = [dim for dim in tensor.scaling if dim != in_dim] or [
                dim for dim in range(len(tensor.shape)) if dim != in_dim
            ]
            return self._param_role(tensor, role, in_dims=(in_dim,), out_dim=outs[-1])
        if tensor.kind == "matrix":
            return self._param_role(tensor, role)
        if role == "hidden":
            raise ValueError(
                f"roles: {tensor.name!r} of shape {tensor.shape} belongs to a {type(tensor.module).__name__}, "
                f"which does not tell its inputs; write roles={{{tensor.name!r}: ('hidden', IN_DIM)}} "
                "with the dimension that is summed over"
            )
        dims = tensor.scaling or (len(tensor.shape) - 1,)
        ins, out = ((), dims[-1]) if role == "embedding" else (dims, -1)
        return self._param_role(tensor, role, in_dims=ins, out_dim=out)

    def _param_role(
        self,
        tensor: _Tensor,
        role: str,
        *,
        in_dims: tuple[int, ...] | None = None,
        out_dim: int | None = None,
        note: str = "",
    ) -> ParamRole:
        in_dims = tensor.in_dims if in_dims is None else in_dims
        out_dim = tensor.out_dim if out_dim is None else out_dim
        width_in, width_out = Fraction(1), Fraction(1)
        base_fan_in = math.prod(tensor.base_shape[dim] for dim in in_dims)
        uses: tuple[tuple[str, str], ...] = ()
        if role == "hidden":
            width_in, width_out = tensor.ratio(in_dims), tensor.ratio((out_dim,))
        elif role == "unembedding":
            width_in = tensor.ratio(in_dims)
            uses = ((tensor.path, role), *((path, role) for path, _ in tensor.tied))
        elif role == "embedding":
            width_out = tensor.ratio((out_dim,))
            if tensor.is_lookup:
                base_fan_in = tensor.base_shape[out_dim] if tensor.makes_logits else 1
            tied = ((path, role if _is_lookup(module) else "unembedding") for path, module in tensor.tied)
            uses = ((tensor.path, role), *tied)
        elif role == "vector":
            width_out = tensor.ratio(tensor.scaling)
        if tensor.kind != "matrix":
            uses = ()  # no module whose output could be multiplied
        scaling = tensor.scaling
        if not self.compared:  # what would scale, told by the role
            outs = (out_dim,) if role in ("hidden", "embedding") else ()
            ins = in_dims[:1] if role in ("hidden", "unembedding") else ()
            scaling = tuple(sorted({*ins, *outs}))
            if role == "vector" and tensor.shape:
                scaling = (max(range(len(tensor.shape)), key=tensor.shape.__getitem__),)
        kept_dims = in_dims if role in ("embedding", "hidden", "unembedding") else ()
        return ParamRole(tensor.name, role, tensor.shape, kept_dims, scaling, width_in, width_out, base_fan_in, uses, note)

    def _ask(self, tensor: _Tensor, why: str, suggestion: RoleSetting) -> str | None:
        """Notes an open question; its role is None."""
        if all(open_tensor is not tensor for open_tensor, _, _ in self.unresolved):
            self.unresolved.append((tensor, why, suggestion))
        return None

    def raise_unresolved(self) -> None:
        if not self.unresolved:
            return
        lines = [f"  {t.name} {t.shape}, base {t.base_shape}: {why}" for t, why, _ in self.unresolved[:12]]
        if len(self.unresolved) > 12:
            lines.append(f"  ... and {len(self.unresolved) - 12} more")
        guesses = {tensor.name: role for tensor, _, role in self.unresolved}
        suggested: dict[str, RoleSetting] = {}
        for name, role in guesses.items():
            glob = layer_glob(name)
            exact = all(guesses.get(other) == role for other in self.names if fnmatchcase(other, glob))
            suggested[glob if exact else name] = role
        width = "" if self.compared else " Or pass delta=, the same model at any other width, to show which dimensions scale."
        raise ValueError(
            "the role of these parameters cannot be inferred:\n"
            + "\n".join(lines)
            + "\nSay what they are (embedding, hidden, unembedding, vector, fixed); if these guesses are right, pass:\n"
            + f"  roles={suggested!r}\n"
            + "Hidden weights are scaled and made sparse; the unembedding makes the model's outputs."
            + width
        )


def layer_glob(name: str) -> str:
    """The name with layer numbers as stars, so that one line serves every block."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _embeddings(model: nn.Module, getter: str) -> nn.Module | None:
    """What a Hugging Face style getter returns, where the model has it."""
    method = getattr(model, getter, None)
    if method is None:
        return None
    try:
        module = method()
    except (
        NotImplementedError,
        AttributeError,
    ):  # the getter exists on every Hugging Face model, also on those without one
        return None
    return module if isinstance(module, nn.Module) else None
