"""Infers the row of Table 1 that each parameter belongs to, and its width multipliers against a base model.

A dimension *scales* when its size differs between the model and the base (or a third model, ``delta``). The module that owns a
parameter says which dimensions it reads and writes. If shapes and modules do not decide a role, the user is asked. A
role is guessed in one case only, with a warning (``GUESSED``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from types import EllipsisType

from torch import nn

from smupar.plan.facts.layers import kind_of
from smupar.plan.forward.run_copy import Example
from smupar.plan.globs import layer_glob, match_globs
from smupar.plan.notes import Note
from smupar.plan.roles.evidence import Evidence, evidence_of
from smupar.plan.roles.neighbours import Neighbours, RoleSetting
from smupar.plan.roles.parameters import ParameterView, Shape, view_parameters
from smupar.plan.roles.table import ASK, Case, case_of
from smupar.refusals import refuse
from smupar.rules import ROLES

GUESSED = Note(
    "guessed",
    "taken as hidden, and made sparse, because the output size is a multiple of a size that layers read. A readout can look "
    "the same: pass delta=, the same model at any other width, to be sure",
)
FROZEN = Note("frozen", "frozen, so the model's values stay: give its role in roles= to initialise it anyway", False)
FROZEN_HIDDEN = Note("frozen", "frozen, but initialised anyway: pass the role 'fixed' to keep the model's values")
ORIGINAL = Note(
    "parametrized", "parametrized: these numbers are for the original tensor, from which the layer computes its weight"
)
MAY_READ_IN_PART = Note(
    "reads in part",
    "reading a size that grows unlike any layer's output. It may be a concatenation whose parts do not all follow the width, "
    "but one m_in is used for all parts: pass example= to be sure",
    is_caution=False,
)
MAY_WRITE_IN_PART = Note(
    "writes in part",
    "writing a size that grows unlike any layer's input. It may be several outputs that do not all follow the width, but one "
    "m_out is used for all, which matters only for SGD's learning rate",
    is_caution=False,
)


@dataclass(frozen=True)
class ParamRole:
    """The role of one parameter, with the numbers that follow from it."""

    name: str
    role: str
    shape: Shape
    in_dims: tuple[int, ...]  # input dimensions, input channel first; empty for vectors and fixed tensors
    scaling: tuple[int, ...]  # dimensions whose size follows the width
    width_in: Fraction
    width_out: Fraction
    base_fan_in: int  # 1 for an embedding table, since a lookup reads one row; for a tied table the fan-in of the logits
    uses: tuple[tuple[str, str], ...]  # (module path, role) of each module that gets a forward factor; two if tied
    note: Note | None


def infer_roles(
    model: nn.Module,
    base: nn.Module,
    *,
    delta: nn.Module | None = None,
    roles: Mapping[str, RoleSetting] | None = None,
    example: Example | None = None,
) -> tuple[list[ParamRole], Evidence]:
    """The role of every parameter, in the model's order, and what the example showed. Raises ValueError if roles cannot be
    inferred, with a ``roles={...}`` line to paste."""
    evidence = evidence_of(view_parameters(model, base, delta), model, base, delta, example)
    asked = match_globs(roles or {}, [tensor.name for tensor in evidence.tensors], setting="roles", among="parameters")
    for tensor in evidence.tensors:
        if tensor.name in asked:
            _check_setting(tensor, asked[tensor.name])
    neighbours = Neighbours(evidence.tensors, asked)
    decided = [(tensor, case_of(tensor, neighbours)) for tensor in neighbours.tensors]
    questions = [(tensor, case) for tensor, case in decided if case.role == ASK and tensor.name not in asked]
    if questions:
        raise ValueError(_question(neighbours, questions, evidence))
    about = evidence.about if evidence.usage else _may_scale_in_part(neighbours)
    inferred = [
        _as_asked(tensor, asked[tensor.name]) if tensor.name in asked else _as_decided(tensor, case, neighbours)
        for tensor, case in decided
    ]
    return [role if role.note else replace(role, note=about.get(role.name)) for role in inferred], evidence


def _may_scale_in_part(neighbours: Neighbours) -> dict[str, Note]:
    readers, writers = neighbours.partly_scaling()
    return {**dict.fromkeys(writers, MAY_WRITE_IN_PART), **dict.fromkeys(readers, MAY_READ_IN_PART)}


def _check_setting(tensor: ParameterView, setting: RoleSetting) -> None:
    refuse(
        isinstance(setting, EllipsisType),
        f"roles: put the role of {tensor.name!r} in the place of the dots: one of {', '.join(ROLES)}",
    )
    role, in_dims = _parsed(setting)
    names_dims = all(
        isinstance(dim, int) and not isinstance(dim, bool) and 0 <= dim < len(tensor.shape) for dim in in_dims or ()
    )
    has_outputs = in_dims is None or 0 < len(set(in_dims)) == len(in_dims) < len(tensor.shape)
    fits = in_dims is None or (role == "hidden" and names_dims and has_outputs)
    refuse(
        role not in ROLES or not fits,
        f"roles: {tensor.name!r} of shape {tensor.shape} got {setting!r}; use one of {', '.join(ROLES)}, or "
        "('hidden', in_dim), where in_dim may be a tuple of several dimensions",
    )
    refuse(
        role == "hidden" and len(tensor.shape) < 2,
        f"roles: {tensor.name!r} of shape {tensor.shape} is not a matrix and cannot be hidden",
    )
    refuse(
        role == "hidden" and in_dims is None and tensor.layout not in ("matrix", "seen"),
        f"roles: {tensor.name!r} of shape {tensor.shape} belongs to a {type(tensor.module).__name__}, "
        f"whose input dimension smupar does not know; write roles={{{tensor.name!r}: ('hidden', IN_DIM)}} "
        "with the dimension that is summed over",
    )


def _parsed(setting: RoleSetting) -> tuple[str, Shape | None]:
    """The role in a setting, and the input dimensions if the setting has them."""
    if isinstance(setting, str):
        return setting, None
    in_dims = setting[-1]
    return setting[0], in_dims if isinstance(in_dims, tuple) else (in_dims,)


# Asking


def _question(neighbours: Neighbours, questions: list[tuple[ParameterView, Case]], evidence: Evidence) -> str:
    """One error that lists all undecided parameters, with a ``roles=`` line that would decide them."""
    lines = [f"  {tensor.name} {tensor.shape}, base {tensor.base_shape}: {case.why(tensor)}" for tensor, case in questions[:12]]
    if len(questions) > 12:
        lines.append(f"  ... and {len(questions) - 12} more")
    guesses = {tensor.name: case.suggestion(tensor) for tensor, case in questions}  # None: the question suggests no role
    globs = {name: layer_glob(name) for name in guesses}
    # A glob replaces the names it matches only if all of them are undecided and have the same guess.
    fits = {
        glob: len({guesses.get(tensor.name, "is decided") for tensor in neighbours.tensors if fnmatchcase(tensor.name, glob)})
        == 1
        for glob in set(globs.values())
    }
    suggested = {globs[name] if fits[globs[name]] else name: role for name, role in guesses.items()}
    pairs = ", ".join(f"{name!r}: {'...' if role is None else repr(role)}" for name, role in suggested.items())
    dots = "Nothing suggests a role where there are dots: put yours there.\n" if None in suggested.values() else ""
    equal = (
        "\nThe model is as wide as its base. Instead of roles you may pass delta=, the same model at any other width, "
        "to show which dimensions scale."
    )
    example = (
        "\nOr pass example=, a batch for the model (a tensor, a tuple of arguments, or a dict of keyword arguments). Its "
        "forward pass shows which weights read the input, which make the output, and over which dimensions they sum."
    )
    failed = "".join(f"\n{note}" for note in evidence.notes if note.kind == "example")
    if not failed and any(tensor.seen is None for tensor, _ in questions):
        failed = "\nThe forward pass that was watched does not use all of them: pass example=, a batch that does."
    return (
        "the role of these parameters cannot be inferred:\n"
        + "\n".join(lines)
        + "\nSay what they are (embedding, hidden, unembedding, router, vector, fixed); if these guesses are right, pass:\n"
        + f"  roles={{{pairs}}}\n"
        + dots
        + "Hidden weights are scaled and made sparse; the unembedding makes the model's outputs; a "
        "router weights or chooses other layers' outputs, and stays dense."
        + (equal if neighbours.equal_widths else example if not evidence.is_given else failed)
    )


# From an answer or a decision to a role


def _as_asked(tensor: ParameterView, setting: RoleSetting) -> ParamRole:
    role, in_dims = _parsed(setting)
    if role in ("vector", "fixed"):
        return _param_role(tensor, role)
    is_known = tensor.layout in ("matrix", "seen")
    if in_dims is not None and (not is_known or set(in_dims) != set(tensor.in_dims[: len(in_dims)])):
        others = [dim for dim in range(len(tensor.shape)) if dim not in in_dims]
        outs = [dim for dim in others if dim in tensor.scaling] or others
        tensor = replace(tensor, in_dims=in_dims, out_dims=(outs[-1],))
    elif not is_known:
        tensor = _read_or_written(tensor, role)
    return _param_role(tensor, role)


def _read_or_written(tensor: ParameterView, role: str) -> ParameterView:
    """Gives an unknown tensor its dimensions. An embedding writes its scaling dimensions, and any other role reads them."""
    dims = tensor.scaling or (len(tensor.shape) - 1,)
    ins, outs = ((), dims[-1:]) if role == "embedding" else (dims, ())
    return replace(tensor, in_dims=ins, out_dims=outs)


def _as_decided(tensor: ParameterView, case: Case, neighbours: Neighbours) -> ParamRole:
    if case.role == "hidden" and tensor.layout == "raw":
        return _param_role(replace(tensor, in_dims=(1,), out_dims=(0,)), "hidden", Note("square", case.reason))
    if case.role == "embedding" and tensor.layout == "raw":
        tensor = _read_or_written(tensor, "embedding")
    # A frozen embedding or readout has its values on purpose (sines, pretrained vectors). A frozen matrix inside the network
    # may be trained later.
    if tensor.frozen and case.role in ("embedding", "hidden", "unembedding", "router"):
        return _param_role(tensor, case.role, FROZEN_HIDDEN if case.role in ("hidden", "router") else FROZEN)
    return _param_role(tensor, case.role, GUESSED if case.role == "hidden" and neighbours.is_guess(tensor) else None)


def _param_role(tensor: ParameterView, role: str, note: Note | None = None) -> ParamRole:
    if role == "embedding" and tensor.layer.is_lookup:  # a lookup reads one row; if tied, the logits sum over the row's entries
        base_fan_in = tensor.base_fan_in(tensor.out_dims if tensor.is_tied_to_readout else ())
    else:
        base_fan_in = tensor.base_fan_in(tensor.in_dims)
    written = {"hidden": tensor.out_dims, "embedding": tensor.out_dims, "vector": tensor.scaling}
    return ParamRole(
        name=tensor.name,
        role=role,
        shape=tensor.shape,
        in_dims=() if role in ("vector", "fixed") else tensor.in_dims,
        scaling=tensor.scaling,
        width_in=tensor.ratio(tensor.in_dims if role in ("hidden", "unembedding", "router") else ()),
        width_out=tensor.ratio(written.get(role, ())),
        base_fan_in=base_fan_in,
        uses=_uses(tensor, role),
        note=ORIGINAL if ".parametrizations." in f".{tensor.name}" else note,
    )


def _uses(tensor: ParameterView, role: str) -> tuple[tuple[str, str], ...]:
    """(module path, role) of each module whose forward factor would scale this weight and no other."""
    if role not in ("embedding", "unembedding") or tensor.layout != "matrix" or not tensor.layer.takes_factor:
        return ()
    tied = [(path, kind_of(module)) for path, module in tensor.tied]
    # A linear layer that is tied to a lookup table multiplies by the table's transpose, so it makes the logits.
    transposed = "unembedding" if tensor.layer.is_lookup else role
    return (
        (tensor.path, role),
        *((path, role if kind.is_lookup else transposed) for path, kind in tied if kind.is_linear),
    )
