"""Decides the density of every weight, from the user's own masks, the layers' densities, or pattern "neuron", which removes
whole neurons."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction

import torch
from torch import Tensor, nn

from smupar.plan.facts.layers import IMAGES, ROWS, kind_of
from smupar.plan.masks.allocations import Allocation, allocate, as_density
from smupar.plan.masks.patterns import Pattern, num_live_neurons
from smupar.plan.roles.infer import ParamRole
from smupar.plan.roles.parameters import parent_path
from smupar.refusals import refuse

MASKED = ("hidden", "router")  # roles of weights that may have a mask

DensitySetting = float | Mapping[str, float] | Allocation


@dataclass(frozen=True)
class Sparsity:
    """The density of each parameter, as an exact fraction."""

    pattern: Pattern
    given: Mapping[str, Tensor]  # the user's own masks
    densities: Mapping[str, Fraction]  # of each parameter that gets a mask
    base_densities: Mapping[str, Fraction]  # of the base's hidden weights
    live_neurons: tuple[int, int] = (1, 1)  # (live neurons in each period, period)

    @property
    def live(self) -> Fraction:
        return Fraction(*self.live_neurons)

    def density(self, role: ParamRole) -> Fraction:
        return self.densities.get(role.name, Fraction(1))

    def num_kept(self, role: ParamRole) -> int | None:
        """The number of weights that the mask keeps; None if the pattern makes the number random."""
        density = self.density(role)
        if role.name not in self.given and density != 1 and self.pattern.count(role.shape, role.in_dims, density) is None:
            return None
        return int(density * math.prod(role.shape))

    def pattern_of(self, role: ParamRole) -> str | None:
        if role.name not in self.densities:
            return None
        return "given" if role.name in self.given else self.pattern.name

    def multipliers(self, role: ParamRole) -> tuple[Fraction, Fraction, Fraction]:
        """m_in, m_out and m_rho. Removed neurons count as a smaller width, so m_rho is the density among the live neurons."""
        reads = any(dim in role.scaling for dim in role.in_dims)
        writes = any(dim not in role.in_dims for dim in role.scaling)
        width_in = role.width_in * (self.live if reads else 1)
        width_out = role.width_out * (self.live if writes else 1)
        density_mult = self._inner_density(role) / self._base_density(role) if role.role in MASKED else Fraction(1)
        return width_in, width_out, density_mult

    def weights_per_neuron(self, role: ParamRole) -> float:
        """The number of inputs that a live neuron keeps."""
        live = self.live ** sum(dim in role.scaling for dim in role.in_dims)
        return float(self._inner_density(role) * live * math.prod(role.shape[dim] for dim in role.in_dims))

    def _inner_density(self, role: ParamRole) -> Fraction:
        return self.density(role) / self.live ** len(role.scaling)

    def _base_density(self, role: ParamRole) -> Fraction:
        """The base density, rounded to a whole number of this tensor's weights, so that rho = rho_base gives exactly muP."""
        base = self.base_densities.get(role.name, Fraction(1))  # routers are dense in the base
        if base == 1 or not self.pattern.takes_any_density:  # an N:M pattern has no masks of other densities
            return base
        pattern = Pattern() if role.name in self.given else self.pattern
        count = pattern.count(role.shape, role.in_dims, base)
        refuse(
            count == 0, f"at base_density {float(base):g}, {role.name!r} of shape {role.shape} would have no weights: raise it"
        )
        return base if count is None else Fraction(count, math.prod(role.shape))


def decide_sparsity(
    model: nn.Module,
    roles: list[ParamRole],
    pattern: Pattern,
    density: DensitySetting,
    base: Allocation,
    masks: Mapping[str, Tensor],
) -> Sparsity:
    """Decides the density of every weight.

    Hidden weights get ``density``; the same weights of the base have the densities ``base``. Routers stay dense, unless a mask
    or a glob of ``density`` names them. A glob names routers only if it matches no hidden weight.
    """
    hidden = {role.name: role for role in roles if role.role == "hidden"}
    base_densities = base.densities({name: role.shape for name, role in hidden.items()})
    given = _given_masks(model, roles, masks)
    if pattern.whole_neurons:
        if given or isinstance(density, (Mapping, Allocation)) or as_density(base.density) != 1:
            raise ValueError(
                "pattern 'neuron' narrows the whole network: it takes one float as density, base_density 1, "
                "and no masks of your own"
            )
        return _without_neurons(model, roles, pattern, as_density(density), base_densities)
    refuse(
        not hidden and density != 1,
        "no hidden weight could be made sparse: every matrix of this model reads or writes a fixed size",
    )
    settings = density if isinstance(density, Mapping) else {}
    globs = [glob for glob in settings if not any(fnmatchcase(name, glob) for name in hidden)]
    named = {role.name: role for role in roles if role.role == "router" and any(fnmatchcase(role.name, glob) for glob in globs)}
    open_shapes = {name: role.shape for name, role in (hidden | named).items() if name not in given}
    nominal = {name: share for name, share in allocate(density, open_shapes).items() if share < 1}
    densities = {name: _realised(pattern, (hidden | named)[name], share) for name, share in nominal.items()}
    densities |= {name: Fraction(int(torch.count_nonzero(mask)), mask.numel()) for name, mask in given.items()}
    return Sparsity(pattern, given, densities, base_densities)


# Masks of the user's own


def _given_masks(model: nn.Module, all_roles: list[ParamRole], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The user's own masks by parameter name. The keys of ``masks`` may be names, or ``<name>_mask`` as in a state dict."""
    roles = {role.name: role for role in all_roles}
    given: dict[str, Tensor] = {}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    for key, mask in masks.items():
        name = key if key in roles else key.removesuffix("_mask")
        first_name = aliases.get(name, name)
        if first_name != name and any(other in masks for other in (first_name, f"{first_name}_mask")):
            continue  # a state dict has the mask of a shared layer under each of its names
        refuse(name in given, f"masks: {name!r} is given twice, as {name!r} and as {name + '_mask'!r}")
        refuse(name not in roles, f"masks: {key!r} is not a parameter of this model; are these the masks of another model?")
        refuse(
            tuple(mask.shape) != roles[name].shape,
            f"masks: {key!r} has shape {tuple(mask.shape)}, the parameter {roles[name].shape}; "
            "are these the masks of another model?",
        )
        refuse(
            mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()),
            f"masks: {key!r} holds values other than 0 and 1",
        )
        refuse(not mask.any(), f"masks: {key!r} keeps no weight at all")
        refuse(
            roles[name].role not in MASKED,
            f"masks: {name!r} is {roles[name].role}, but only hidden weights and routers may be sparse; "
            f"if it is a hidden weight, pass roles={{{name!r}: 'hidden'}}",
        )
        given[name] = mask.bool()
    return given


# Densities


def _realised(pattern: Pattern, role: ParamRole, nominal: Fraction) -> Fraction:
    try:
        count = pattern.count(role.shape, role.in_dims, nominal)
    except ValueError as error:
        raise ValueError(f"{role.name!r} of shape {role.shape}: {error}") from None
    refuse(
        count == 0,
        f"{role.name!r} of shape {role.shape} would lose every weight at density {float(nominal):g}; "
        f"raise it, or keep this layer denser: density={{{role.name!r}: ..., '*': ...}}",
    )
    return nominal if count is None else Fraction(count, math.prod(role.shape))


# Whole neurons


def _without_neurons(
    model: nn.Module, roles: list[ParamRole], pattern: Pattern, density: Fraction, base_densities: Mapping[str, Fraction]
) -> Sparsity:
    if density == 1:
        return Sparsity(pattern, {}, {}, base_densities)
    _refuse_flattened(model, roles)
    period = math.gcd(*(role.shape[dim] for role in roles for dim in role.scaling))
    live_neurons = num_live_neurons(period, density), period
    densities = {role.name: Fraction(*live_neurons) ** len(role.scaling) for role in roles if role.scaling}
    return Sparsity(pattern, {}, densities, base_densities, live_neurons)


def _refuse_flattened(model: nn.Module, roles: list[ParamRole]) -> None:
    """Refuses a layer that reads a flattened image. Several inputs of such a layer come from one channel, and shapes do not
    show which."""
    modules = dict(model.named_modules(remove_duplicate=False))
    channels: set[int] = set()  # written by convolutions
    features: set[int] = set()  # written by linear layers
    readers: list[tuple[str, int]] = []
    for role in roles:
        module = modules.get(parent_path(role.name)) if role.scaling and role.in_dims else None
        kind = None if module is None else kind_of(module)
        if kind is None or not kind.is_linear or kind.is_lookup:
            continue
        (channels if kind.reads == IMAGES else features).add(role.shape[kind.out_dim])
        if kind.reads == ROWS and role.in_dims[0] in role.scaling:
            readers.append((role.name, role.shape[kind.in_dims[0]]))
    for name, size in readers:
        num_channels = next((num for num in channels if size % num == 0), None)
        if num_channels is not None and size not in features | channels:
            raise ValueError(
                f"{name!r} reads {size} values. If they are a flattened image, each of {num_channels} channels has "
                f"{size // num_channels} of them, and pattern 'neuron' cannot tell which values are alive. Average over the "
                "image first, or choose another pattern"
            )
