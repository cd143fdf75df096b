"""Collects what an example shows about the roles of parameters.

A forward pass at base width shows how each parameter is used. A second pass, at another width, shows which sizes of activations
follow the width (``two_widths``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from smupar.plan.depth.correspondence import correspond
from smupar.plan.forward.flows import Dims
from smupar.plan.forward.run_copy import CannotRunError, Example
from smupar.plan.forward.uses import Usage, Use, WeightProduct
from smupar.plan.forward.watcher import watch
from smupar.plan.globs import layer_glob
from smupar.plan.notes import Note
from smupar.plan.roles.parameters import ParameterView, Seen
from smupar.plan.roles.two_widths import (
    EventPair,
    about_distances,
    about_dots,
    about_sums,
    dot_products,
    numbers_in_sums,
    partly_scaling,
    pass_at_other_width,
    unit_vectors,
    unscaled_products,
)
from smupar.plan.scales.find_attention import find_attentions, is_inside


@dataclass(frozen=True)
class Evidence:
    """What an example showed. ``notes`` are about the whole plan, and ``about`` maps parameters to their notes."""

    tensors: list[ParameterView]
    notes: list[Note] = field(default_factory=list)
    about: dict[str, Note] = field(default_factory=dict)
    usage: Usage | None = None  # parameters have the model's names, but module paths are the base's
    is_given: bool = True  # whether the user passed an example
    in_sums: frozenset[tuple[str, float]] = frozenset()  # (module path, a number that multiplies only sums over the width)
    unscaled: frozenset[int] = frozenset()  # dot products that need no scale at any width
    has_normed_outputs: bool = False  # the model divides all its outputs by their norm, at both widths


def evidence_of(
    tensors: list[ParameterView], model: nn.Module, base: nn.Module, delta: nn.Module | None, example: Example | None
) -> Evidence:
    """Runs the base on the example, and adds to each parameter of the model how the pass uses it."""
    if example is None:
        return Evidence(tensors, is_given=False)
    if not any(tensor.scaling for tensor in tensors):
        text = "the example was not used: model and base are equally wide. Pass delta=, the same model at any other width"
        return Evidence(tensors, [Note("example", text)])
    names = correspond(model, base).names  # parameter of the model -> of the base; names differ if the model is deeper
    scaling = dict.fromkeys((name for name, _ in base.named_parameters()), ()) | {
        names[tensor.name]: tensor.scaling for tensor in tensors
    }
    known = [tensor for tensor in tensors if tensor.layout == "matrix" and not tensor.layer.is_lookup]
    reads = {names[tensor.name]: tensor.in_dims for tensor in known}
    try:
        usage = watch(base, example, scaling=scaling, reads=reads)
    except CannotRunError as error:
        text = f"the example could not be run through base, so roles come from shapes and modules alone ({error})"
        return Evidence(tensors, [Note("example", text)])
    usage = replace(usage, uses={tensor.name: usage.uses.get(names[tensor.name], Use()) for tensor in tensors})
    seen = _from_siblings([_with_evidence(tensor, usage) for tensor in tensors])
    notes = list(_about_the_pass(seen, usage))
    wider, note = pass_at_other_width(usage, base, model if delta is None else delta, example, scaling, reads)
    if wider is None:
        return Evidence(seen, [*notes, *([] if note is None else [note])], usage=usage)
    pairs = [EventPair(*events) for events in zip(usage.events, wider.events, strict=True)]
    is_normed = wider.outputs == usage.outputs and bool(usage.outputs) and all(output.is_normed for output in usage.outputs)
    dots = dot_products(usage, pairs)
    about = partly_scaling(seen, usage, pairs, names)
    notes += [*([_NORMED_OUTPUT] if is_normed else ()), *about_dots(usage, dots), *about_sums(pairs), *about_distances(pairs)]
    return Evidence(
        seen,
        notes,
        about,
        usage,
        in_sums=numbers_in_sums(usage, dots | unit_vectors(pairs)),
        unscaled=unscaled_products(usage, pairs),
        has_normed_outputs=is_normed,
    )


# How each parameter is used


def _with_evidence(tensor: ParameterView, usage: Usage) -> ParameterView:
    seen = _seen(tensor, usage.uses[tensor.name])
    # other layouts, such as depthwise convolutions, are left alone
    is_known = tensor.layout == "matrix" or tensor.layer.owns(tensor.name.rpartition(".")[2])
    if seen is not None and seen.how == "product" and not is_known and len(tensor.shape) > 1:
        return replace(tensor, seen=seen, layout="seen", in_dims=seen.in_dims, out_dims=seen.out_dims)
    return replace(tensor, seen=seen)


def _seen(tensor: ParameterView, use: Use) -> Seen | None:
    """Sums up the uses of one parameter; None if the pass did not use it."""
    if tensor.layer.is_lookup and tensor.layout == "matrix":
        return Seen("lookup") if use != Use() else None
    if use.products:
        return _seen_product(tensor, use)
    if use.unclear:
        return Seen("unclear", why=f"is used in {use.unclear}, which smupar does not follow")
    if use.looked_up:
        return Seen("lookup")
    return Seen("element") if use.by_element else None


def _seen_product(tensor: ParameterView, use: Use) -> Seen:
    ways = {_way(tensor, product) for product in use.products}
    first = use.products[0]
    known = _way(tensor, replace(first, in_dims=tensor.in_dims))[0]
    if use.looked_up & set(tensor.scaling) or use.unclear:
        why = f"is used in {use.unclear or 'a lookup'} and in a product"
    elif len(ways) > 1 and not _is_same_either_way(tensor):
        why = "is used in products that sum over different dimensions"
    elif tensor.layout == "matrix" and known != _way(tensor, first)[0] and not _is_same_either_way(tensor):
        why = f"is summed over a different dimension than in a {type(tensor.module).__name__}"
    elif tensor.layout == "raw" and any(tensor.base_shape[dim] == 1 for dim in tensor.scaling):
        why = "has a scaling dimension of size 1 in base, where its use cannot be followed"
    else:
        ones = tuple(dim for dim, size in enumerate(tensor.shape) if size == 1 and dim not in first.out_dims)
        return Seen(
            "product",
            in_dims=first.in_dims or ones[:1],
            out_dims=first.out_dims,
            reads_input=any(product.reads_input for product in use.products),
            reads_inside=any(not product.reads_input for product in use.products),
            makes_output=use.makes_output,
            makes_normed_output=use.makes_normed_output,
            is_inside=use.is_inside,
            is_factor=use.is_factor,
            routes=use.routes,
        )
    return Seen("unclear", why=why)


def _way(tensor: ParameterView, product: WeightProduct) -> tuple[Dims, Dims]:
    """The scaling dimensions that a product reads and writes, without dimensions of size 1 in the base, whose use is not
    seen."""
    followed = [dim for dim in tensor.scaling if tensor.base_shape[dim] > 1]
    ins, outs = (tuple(dim for dim in dims if dim in followed) for dims in (product.in_dims, product.out_dims))
    return ins, outs


def _is_same_either_way(tensor: ParameterView) -> bool:
    """Whether a square matrix gets the same numbers no matter which dimension it sums over."""
    return tensor.scaling == (0, 1) and len(tensor.shape) == 2 and len({*tensor.shape}) == len({*tensor.base_shape}) == 1


def _from_siblings(tensors: list[ParameterView]) -> list[ParameterView]:
    """Completes the views of parameters that the pass did not use, such as those of an expert that no token chose. They get
    what was seen of the same parameter in another block."""
    examples = {_kin(tensor): tensor for tensor in tensors if tensor.seen is not None}
    return [
        replace(tensor, seen=kin.seen, layout=kin.layout, in_dims=kin.in_dims, out_dims=kin.out_dims)
        if tensor.seen is None and (kin := examples.get(_kin(tensor))) is not None
        else tensor
        for tensor in tensors
    ]


def _kin(tensor: ParameterView) -> tuple[str, Dims, Dims, str]:
    return layer_glob(tensor.name), tensor.shape, tensor.base_shape, type(tensor.module).__name__


def _about_the_pass(tensors: list[ParameterView], usage: Usage) -> Iterator[Note]:
    """Notes on parameters that the pass did not use or could not follow, and on vectors that it sums over."""
    matrices = [tensor for tensor in tensors if tensor.scaling and sum(size > 1 for size in tensor.shape) > 1]
    unused = [tensor.name for tensor in matrices if tensor.seen is None]
    if unused:
        shown = ", ".join(map(repr, unused[:4])) + (f" and {len(unused) - 4} more" if len(unused) > 4 else "")
        yield Note("unused", f"the example's forward pass does not use {shown}: roles there come from shapes and modules alone")
    uses = [(tensor.name, usage.uses[tensor.name]) for tensor in matrices]
    lost = [name for name, use in uses if use.products and not use.is_inside and not use.reaches_output]
    blind = [name for name, use in uses if use.reads_constant]
    if lost and blind:
        yield Note(
            "lost",
            f"smupar cannot follow the output of {lost[0]!r}, nor say where the input of {blind[0]!r} comes from: an operation "
            "that is not torch's may lie between them. Say with roles= what the weights around it are",
        )
    for tensor in tensors:
        if len(tensor.shape) == 1 and tensor.scaling and any(product.in_dims for product in usage.uses[tensor.name].products):
            yield Note(
                "summed vector",
                f"{tensor.name!r} is multiplied with a layer's output and summed, so it is a matrix with one output: store it "
                f"with shape (1, {tensor.shape[0]}), as nn.Linear does, to get the numbers of a matrix",
            )


# Attention


def without_scores(model: nn.Module, evidence: Evidence, paths: Mapping[str, str], scaling: Collection[str]) -> tuple[str, ...]:
    """Paths of the modules that are named like attention but need no attention scale. In the example they multiply no two
    activations, as in RWKV, or only vectors of length 1, as in Swin 2, or they make no logits, as in linear attention and in
    indexers, whose dot products only choose tokens.

    An operation that cannot be watched might hide such a product. So a module counts only if the outputs of all its weights
    were followed, to other weights or to the model's output.

    paths    module path of the model -> of the base; ``usage`` has the paths of the base
    scaling  names of the parameters that scale
    """
    usage = evidence.usage
    if usage is None:
        return ()
    products = [
        event
        for number, event in enumerate(usage.events)
        if event.kind == "dot" and not event.is_normalised and number not in evidence.unscaled
    ]
    unscored = []
    for attention in find_attentions(model):
        path = paths.get(attention.path, attention.path)
        named = attention.module.named_parameters(prefix=attention.path)
        tables = [name for name, parameter in named if name in scaling and sum(n > 1 for n in parameter.shape) > 1]
        # what acts element by element, such as a depthwise convolution, makes no queries
        uses = [use for use in (usage.uses[name] for name in tables) if use.products or not use.by_element]
        followed = [use.is_inside or use.reaches_output for use in uses if use.products]
        own = {f"{path}{name.removeprefix(attention.path)}".lstrip(".") for name in tables}
        near = any(is_inside(product.path, path) or own & product.weights for product in products)
        if followed and all(followed) and len(followed) == len(uses) and not near:
            unscored.append(attention.path)
    return tuple(unscored)


_NORMED_OUTPUT = Note(
    "normed output",
    "the model divides its outputs by their norm, so they need no factor",
    is_caution=False,
)
