"""Views of the parameters of model and base: their shapes at both widths, and what the module that owns a parameter does with
each of its dimensions."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from smupar.plan.depth.correspondence import Correspondence, correspond
from smupar.plan.facts.layers import (
    GROUPED_DIM,
    IMAGES,
    PARAMETRIZED,
    LayerKind,
    check_registered,
    is_depthwise,
    kind_of,
    num_groups,
)
from smupar.refusals import refuse

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    """How the forward pass of an example uses a parameter."""

    how: str  # "product": summed over in_dims; "lookup": an index chooses rows; "element": element by element; "unclear"
    in_dims: Shape = ()
    out_dims: Shape = ()
    reads_input: bool = False  # whether a product reads the example with no other scaling weight in between
    reads_inside: bool = False  # whether a product reads the output of another scaling weight
    makes_output: bool = False  # whether its output reaches the model's output with no other scaling weight in between
    makes_normed_output: bool = False  # the same, but the output is divided by its norm on the way
    is_inside: bool = False  # whether its output reaches another scaling weight
    is_factor: bool = False  # whether it makes the model's output in a product with the output of a later weight
    routes: bool = False  # whether a softmax, sigmoid or top-k of its output multiplies or chooses outputs of other layers
    why: str = ""  # why it is unclear


@dataclass(frozen=True, eq=False)
class ParameterView:
    """One parameter of the model, beside the same parameter of the base."""

    name: str
    path: str  # path of the module that uses the parameter
    module: nn.Module
    layer: LayerKind  # kind of the module
    tied: tuple[tuple[str, nn.Module], ...]  # (path, module) of each other module that holds the parameter
    shape: Shape
    base_shape: Shape
    scaling: tuple[int, ...]  # dimensions whose size follows the width
    # "matrix": the module's kind says which dimensions are inputs and outputs; "seen": an example shows it; "vector": the
    # parameter acts element by element; "raw": unknown
    layout: str
    in_dims: tuple[int, ...] = ()  # input dimensions, input channel first
    out_dims: tuple[int, ...] = ()
    groups: int = 1
    frozen: bool = False
    seen: Seen | None = None  # None without an example, or if its forward pass does not use this parameter
    declared: str = ""  # "input" or "output" if the model's own getters return the module, as in Hugging Face models

    @property
    def is_input(self) -> bool:
        return self.layout == "matrix" and (self.layer.is_lookup or self.declared == "input")

    @property
    def is_output(self) -> bool:
        """Whether the model declares that this weight makes the logits. A few models declare the layer before the logits
        instead. It is recognised because its outputs scale, or because in the example only other layers read them."""
        seen = self.seen
        is_before = self.writes_scaling or (seen is not None and seen.is_inside and not seen.makes_output)
        return self.declared == "output" and not self.layer.is_lookup and not is_before

    @property
    def is_recurrent(self) -> bool:
        """Whether this weight of an RNN reads the RNN's own state, or the output of a lower layer of the RNN."""
        return self.layer.outside is not None and not self.name.rpartition(".")[2].startswith(self.layer.outside)

    @property
    def is_tied_to_readout(self) -> bool:
        """Whether this is an embedding table that is tied to a readout."""
        return self.layer.is_lookup and any(not kind_of(module).is_lookup for _, module in self.tied)

    @property
    def reads_scaling(self) -> bool:
        return any(dim in self.scaling for dim in self.in_dims)

    @property
    def writes_scaling(self) -> bool:
        return any(dim in self.scaling for dim in self.out_dims)

    @property
    def read_size(self) -> int:
        """The number of channels in the layer's input."""
        return self._num_channels(self.in_dims[0])

    @property
    def written_size(self) -> int:
        """The number of channels in the layer's output."""
        return self._num_channels(self.out_dims[0]) if self.layer.written is None else self.layer.written(self.module)

    def _num_channels(self, dim: int) -> int:
        return self.shape[dim] * (self.groups if dim == GROUPED_DIM else 1)

    def ratio(self, dims: tuple[int, ...]) -> Fraction:
        """The product of the width multipliers of ``dims``."""
        return math.prod((Fraction(self.shape[dim], self.base_shape[dim]) for dim in dims), start=Fraction(1))

    def base_fan_in(self, in_dims: tuple[int, ...]) -> int:
        """The number of inputs of one output at base width, if ``in_dims`` are the input dimensions."""
        # If GROUPED_DIM is an input dimension, it already counts the channels of one group only.
        grouped = self.groups if GROUPED_DIM not in in_dims else 1
        return math.prod(self.base_shape[dim] for dim in in_dims) // grouped


def parent_path(name: str) -> str:
    return name.rpartition(".")[0]


def view_parameters(model: nn.Module, base: nn.Module, delta: nn.Module | None) -> list[ParameterView]:
    """Views of all parameters of ``model``, in the model's order. Raises if the models are not one network at several widths or
    depths."""
    _refuse_without_parameters(model)
    names = _names(model)
    shapes = _shapes(model, "the model")
    base_shapes = _shapes_like(model, shapes, names, base, "base")
    other_shapes = [base_shapes] if delta is None else [base_shapes, _shapes_like(model, shapes, names, delta, "delta")]
    modules, parameters = dict(model.named_modules(remove_duplicate=False)), dict(model.named_parameters())
    declared = {id(_embeddings(model, f"get_{end}_embeddings")): end for end in ("output", "input")}
    for module in model.modules():
        check_registered(module)
    # The modules that hold each parameter, without repetition. The first name of a tied weight may be the head's, but the sort
    # below makes its lookup table the parameter's module.
    holders: dict[str, dict[int, tuple[str, nn.Module, str]]] = defaultdict(dict)
    for alias, name in names.items():
        holder = _holder(modules, alias)
        holders[name].setdefault(id(holder[1]), holder)
    views = []
    for name, shape in shapes.items():
        (path, module, leaf), *others = sorted(holders[name].values(), key=lambda holder: _rank_of_holder(holder[1]))
        scaling = tuple(dim for dim in range(len(shape)) if any(other[name][dim] != shape[dim] for other in other_shapes))
        layout, in_dims, out_dims = _layout(module, leaf, shape, scaling)
        views.append(
            ParameterView(
                name=name,
                path=path,
                module=module,
                layer=kind_of(module),
                tied=tuple((other_path, other) for other_path, other, _ in others),
                shape=shape,
                base_shape=base_shapes[name],
                scaling=scaling,
                layout=layout,
                in_dims=in_dims,
                out_dims=out_dims,
                groups=num_groups(module) if layout == "matrix" else 1,
                frozen=not parameters[name].requires_grad,
                declared=declared.get(id(module), ""),
            )
        )
    return views


def _refuse_without_parameters(model: nn.Module) -> None:
    """Refuses scripted models, which hide their modules, quantized ones, whose weights are not parameters, and complex weights,
    for which there is no rule."""
    refuse(
        isinstance(model, torch.jit.ScriptModule),
        f"the model is a {type(model).__name__}, which hides its modules: parameterize the model before it is scripted",
    )
    for path, module in model.named_modules():
        refuse(
            "quantized" in type(module).__module__.split("."),
            f"{path!r} is a quantized {type(module).__name__}, whose weight is no parameter and cannot follow a rule: use the "
            "model as it was before it was quantized",
        )
    for name, parameter in model.named_parameters():
        refuse(
            parameter.is_complex(),
            f"{name!r} is complex, but rules are about real numbers: store its real and imaginary parts, as torch.view_as_real "
            "gives them, and use torch.view_as_complex in the forward pass",
        )


def _embeddings(model: nn.Module, getter: str) -> nn.Module | None:
    """The module that a Hugging Face getter returns; None if the getter or the module does not exist."""
    try:
        module = getattr(model, getter)()
    except (NotImplementedError, AttributeError):  # every Hugging Face model has the getter, even without the module
        return None
    return module if isinstance(module, nn.Module) else None


def _rank_of_holder(module: nn.Module) -> int:
    kind = kind_of(module)
    return 0 if kind.is_lookup else 1 if kind.is_linear else 2


def _holder(modules: dict[str, nn.Module], name: str) -> tuple[str, nn.Module, str]:
    """(path, module, name in the module) of the module that uses a parameter. For fc.parametrizations.weight.original the
    module is fc and the name is weight."""
    path, _, leaf = name.rpartition(".")
    if kind_of(modules[path]) is PARAMETRIZED and leaf == "original":
        path, leaf = parent_path(parent_path(path)), path.rpartition(".")[2]
    return path, modules[path], leaf


def _shapes(model: nn.Module, model_name: str) -> dict[str, Shape]:
    for name, parameter in model.named_parameters():
        refuse(
            isinstance(parameter, UninitializedParameter),
            f"{name!r} of {model_name} has no shape yet (a lazy module): run one forward pass through {model_name} first",
        )
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _names(model: nn.Module) -> dict[str, str]:
    """Maps every name of every parameter to the parameter's first name."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(parameter), name) for name, parameter in model.named_parameters(remove_duplicate=False)}


def _shapes_like(
    model: nn.Module, shapes: dict[str, Shape], names: dict[str, str], other: nn.Module, other_name: str
) -> dict[str, Shape]:
    """The parameter shapes of ``other``. Raises if it is not the same network at another width or
    depth."""
    refuse(
        not (isinstance(model, type(other)) or isinstance(other, type(model))),
        f"{other_name} is a {type(other).__name__}, the model a {type(model).__name__}: both must be of one class",
    )
    other_names, other_shapes = _in_names_of(
        correspond(model, other, other_name), names, _names(other), _shapes(other, other_name)
    )
    if names.keys() == other_names.keys() and shapes.keys() != other_shapes.keys():
        name = min(shapes.keys() ^ other_shapes.keys())
        raise ValueError(
            f"{name!r} is tied to another parameter in only one of model and {other_name}: build both alike. "
            "to_empty unties weights: tie them again after it."
        )
    if shapes.keys() != other_shapes.keys():
        sides = [
            ("the model", sorted(shapes.keys() - other_shapes.keys())),
            (other_name, sorted(other_shapes.keys() - shapes.keys())),
        ]
        shown = "; ".join(f"only in {side}: {', '.join(extra[:4])}" for side, extra in sides if extra)
        raise ValueError(
            f"{other_name} has {len(other_shapes)} parameters and the model {len(shapes)} ({shown}). "
            f"Build {other_name} with the same options; only widths, and the number of blocks in a list, may differ."
        )
    tied_otherwise = {first for _, first in names.items() ^ other_names.items()}
    for name, shape in shapes.items():
        refuse(
            name in tied_otherwise,
            f"{name!r} is tied in only one of model and {other_name}: build both alike",
        )
        refuse(
            len(other_shapes[name]) != len(shape),
            f"{name!r} has shape {shape} in the model and {other_shapes[name]} in {other_name}: only sizes may differ",
        )
    return other_shapes


def _in_names_of(
    depth: Correspondence, names: dict[str, str], other_names: dict[str, str], other_shapes: dict[str, Shape]
) -> tuple[dict[str, str], dict[str, Shape]]:
    """The names and shapes of a model of another depth, translated to the names in ``names``. Parameters without a counterpart
    keep their names."""
    if not depth.lists:
        return other_names, other_shapes
    counterparts = {name: depth.names[name] for name in names if depth.names[name] in other_names}
    # If the base is deeper, some of its blocks have no counterpart.
    inside = tuple(f"{block}." for block in depth.base_blocks)
    unmatched = {name for name in other_names.keys() - counterparts.values() if not name.startswith(inside)}
    renamed = {name: other_names[name] for name in unmatched}
    for name, other in counterparts.items():
        first = other_names[other]
        is_tied_alike = first != other and depth.names[names[name]] == first
        renamed[name] = name if first == other else names[name] if is_tied_alike else first
    shapes = {name: other_shapes[name] for name in unmatched if name in other_shapes}
    return renamed, shapes | {
        name: other_shapes[other_names[other]] for name, other in counterparts.items() if renamed[name] == name
    }


def _layout(
    module: nn.Module, leaf: str, shape: Shape, scaling: tuple[int, ...]
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """(layout, input dimensions, output dimensions) of a parameter, decided by its module's kind."""
    layer = kind_of(module)
    if len(shape) < 2 or (layer.owns(leaf) and is_depthwise(module, scaling)):
        return "vector", (), ()
    if layer.owns(leaf):
        kernel = range(2, len(shape)) if layer.reads == IMAGES else ()
        return "matrix", (*layer.in_dims, *kernel), (layer.out_dim,)
    return layer.rest or ("raw" if sum(size > 1 for size in shape) > 1 else "vector"), (), ()
