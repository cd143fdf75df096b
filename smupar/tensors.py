"""Parameters as the models show them: names, shapes at two widths, and what the owning module does with each dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """One parameter of the model, beside the same one of the base."""

    name: str
    path: str  # of the module that uses it
    module: nn.Module
    tied: tuple[tuple[str, nn.Module], ...]  # the other modules that hold it, each once
    shape: Shape
    base_shape: Shape
    scaling: tuple[int, ...]  # dimensions whose size follows the width
    kind: str  # "matrix": its module says what it reads and writes; "vector": acts element by element; "raw": unknown
    in_dims: tuple[int, ...] = ()  # dimensions one output reads, input channel first
    out_dim: int = -1
    groups: int = 1
    frozen: bool = False

    @property
    def is_lookup(self) -> bool:
        return is_lookup(self.module)

    @property
    def is_recurrent(self) -> bool:
        """A weight of an RNN that reads the RNN's own state, or the layer below it."""
        leaf = self.name.rpartition(".")[2]
        cell = isinstance(self.module, nn.RNNCellBase) and leaf == "weight_hh"
        return cell or (isinstance(self.module, nn.RNNBase) and not leaf.startswith("weight_ih_l0"))

    @property
    def makes_logits(self) -> bool:
        """An embedding table that another module reads backwards."""
        return self.is_lookup and any(not is_lookup(module) for _, module in self.tied)

    @property
    def reads_scaling(self) -> bool:
        return any(dim in self.scaling for dim in self.in_dims)

    @property
    def writes_scaling(self) -> bool:
        return self.out_dim in self.scaling

    @property
    def read_size(self) -> int:
        """Channels of the layer's input."""
        grouped = self.groups if not getattr(self.module, "transposed", False) else 1
        return self.shape[self.in_dims[0]] * grouped

    @property
    def written_size(self) -> int:
        """Channels of the layer's output."""
        if isinstance(self.module, nn.RNNBase):
            return (self.module.proj_size or self.module.hidden_size) * (1 + self.module.bidirectional)
        if isinstance(self.module, nn.RNNCellBase):
            return self.module.hidden_size
        grouped = self.groups if getattr(self.module, "transposed", False) else 1
        return self.shape[self.out_dim] * grouped

    def ratio(self, dims: tuple[int, ...]) -> Fraction:
        """Width multiplier of a product of dimensions."""
        return math.prod((Fraction(self.shape[dim], self.base_shape[dim]) for dim in dims), start=Fraction(1))


def parent_path(name: str) -> str:
    return name.rpartition(".")[0]


def is_lookup(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def is_conv1d(module: nn.Module) -> bool:
    """Hugging Face's Linear with a transposed weight, (in, out); asked so, transformers need not be there."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_layer(module: nn.Module) -> bool:
    """Whether its output is linear in its ``weight``, so that a factor on what it reads or gives is one on the weight."""
    return is_lookup(module) or is_conv1d(module) or isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))


def read_tensors(model: nn.Module, base: nn.Module, delta: nn.Module | None) -> list[ModelTensor]:
    """Every parameter of ``model``, in its order, after checking that the models are one network at several widths."""
    names = _names(model)
    own = _shapes(model, "the model")
    base_shapes = _shapes_like(model, own, names, base, "base")
    other_shapes = [base_shapes] if delta is None else [base_shapes, _shapes_like(model, own, names, delta, "delta")]
    modules, parameters = dict(model.named_modules(remove_duplicate=False)), dict(model.named_parameters())
    tensors = []
    for name, shape in own.items():
        # A tied weight may be registered under its head's name first; its table is what it is. A module may have several names.
        holders: dict[int, tuple[str, nn.Module, str]] = {}
        for held in (_holder(modules, one) for one in (name, *names[name])):
            holders.setdefault(id(held[1]), held)
        (path, module, leaf), *others = sorted(holders.values(), key=lambda held: _how_unclear(held[1]))
        tied = tuple((other_path, other) for other_path, other, _ in others)
        scaling = tuple(dim for dim in range(len(shape)) if any(other[name][dim] != shape[dim] for other in other_shapes))
        kind, in_dims, out_dim = _layout(module, leaf, shape, scaling)
        groups = int(getattr(module, "groups", 1)) if kind == "matrix" else 1
        frozen = not parameters[name].requires_grad
        tensors.append(
            ModelTensor(name, path, module, tied, shape, base_shapes[name], scaling, kind, in_dims, out_dim, groups, frozen)
        )
    return tensors


def _how_unclear(module: nn.Module) -> int:
    return 0 if is_lookup(module) else 1 if is_layer(module) else 2


def _holder(modules: dict[str, nn.Module], name: str) -> tuple[str, nn.Module, str]:
    """(path, module, name there) of a parameter's user: fc.parametrizations.weight.original is fc's weight."""
    path, _, leaf = name.rpartition(".")
    if isinstance(modules[path], ParametrizationList) and leaf == "original":
        path, leaf = parent_path(parent_path(path)), path.rpartition(".")[2]
    return path, modules[path], leaf


def _shapes(model: nn.Module, what: str) -> dict[str, Shape]:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"{name!r} of {what} has no shape yet (a lazy module): run one forward pass through {what} first")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Canonical parameter name -> its other names."""
    first: dict[int, str] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(id(parameter), name)
        names[canonical] = (*names[canonical], name) if canonical in names else ()
    return names


def _all_names(names: dict[str, tuple[str, ...]]) -> set[str]:
    return {name for first, others in names.items() for name in (first, *others)}


def _shapes_like(
    model: nn.Module, own: dict[str, Shape], names: dict[str, tuple[str, ...]], other: nn.Module, what: str
) -> dict[str, Shape]:
    """Parameter shapes of ``other``, after checking that it is the same network at another width."""
    if not (isinstance(model, type(other)) or isinstance(other, type(model))):
        raise ValueError(f"{what} is a {type(other).__name__}, the model a {type(model).__name__}: both must be of one class")
    other_names, shapes = _names(other), _shapes(other, what)
    if _all_names(names) == _all_names(other_names) and set(names) != set(other_names):
        name = sorted(set(names) ^ set(other_names))[0]
        raise ValueError(
            f"{name!r} is tied to another parameter in one of model and {what} and not in the other: build both alike. "
            "to_empty unties weights: tie them again after it."
        )
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
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return "matrix", (1,), 0
    if isinstance(module, nn.MultiheadAttention):
        return ("matrix", (1,), 0) if leaf.endswith("_weight") else vector
    if isinstance(module, ParametrizationList):  # weight_norm and the like: several tensors make one weight
        return raw
    if leaf != "weight":  # not a layer's own: a raw parameter, or weight_orig and the like, which only make a weight
        return raw if sum(size > 1 for size in shape) > 1 else vector
    if is_lookup(module):
        return "matrix", (0,), 1
    if isinstance(module, nn.Linear):
        return "matrix", (1,), 0
    if isinstance(module, nn.modules.conv._ConvNd):
        kernel = tuple(range(2, len(shape)))
        if module.groups == module.in_channels > 1 or (module.groups > 1 and scaling == (0,)):
            return vector  # depthwise, or groups of fixed size: each output reads a fixed number of inputs at every width
        return ("matrix", (0, *kernel), 1) if module.transposed else ("matrix", (1, *kernel), 0)
    if is_conv1d(module):
        return "matrix", (0,), 1
    return raw if sum(size > 1 for size in shape) > 1 else vector
