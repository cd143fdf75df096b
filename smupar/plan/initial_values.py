"""Decides the initial values of parameters: the std of weights that Table 1 initialises, the weights that stay zero, and a
factor for biases whose size follows the width.

A rule wants biases and other vectors to have the same size at every width. Torch draws biases from U(-b, b) with b = 1 /
sqrt(fan-in), so the biases of a wide model are too small. The plan has a factor that gives them the base's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from smupar.plan.depth.correspondence import Correspondence
from smupar.plan.globs import match_globs
from smupar.plan.notes import Note
from smupar.plan.roles.infer import FROZEN, ORIGINAL, ParamRole
from smupar.refusals import finite, refuse
from smupar.rules import SP, Rule

InitStdSetting = float | str | Mapping[str, float | str]

# Powers of the width that an initial size may follow, the likeliest first. Other powers are reported, not corrected.
_EXPONENTS = (0.5, 1.0, -0.5, -1.0)
_SEQUENCE = 4  # as many values or more that all rise, or all fall, count as a sequence
_SIGMAS = 4.0  # sizes count as equal if they differ by less than this many standard errors
# A model has hundreds of biases, and one that is mistaken gets another size than the others. At 6 standard errors that happens
# to fewer than one draw in ten million, whatever the number of values.
_SIGMAS_OF_TORCH = 6.0
_ROUNDING = 2.0**-8  # how far a rounded value may exceed its bound, in bf16


@dataclass(frozen=True)
class InitialValues:
    """The initial values of parameters."""

    stds: Mapping[str, float]  # sigma_base of each parameter that Table 1 initialises; 0 if it stays zero
    factors: Mapping[str, float]  # factors other than 1, for parameters that keep their values
    notes: list[Note]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        base: nn.Module,
        roles: list[ParamRole],
        depth: Correspondence,
        rule: Rule,
        init_std: InitStdSetting,
        *,
        has_values: bool,
    ) -> InitialValues:
        stds = _base_stds(roles, rule, init_std)
        about_sp = list(_about_sp(roles, rule, init_std))
        if not has_values:
            return cls(stds, {}, about_sp)
        named = [glob for glob in init_std if glob != "*"] if isinstance(init_std, Mapping) else []
        zero = all_zero(model, {role.name: role for role in roles if role.name in stds})
        zero = {name for name in zero if not any(fnmatchcase(name, glob) for glob in named)}
        # SP is what models do by default, so it leaves their own values alone.
        factors, notes = ({}, []) if rule is SP else kept_factors(model, base, roles, depth.names)
        notes = [*about_sp, *notes]
        if zero:
            shown = ", ".join(map(repr, sorted(zero)[:4])) + (f" and {len(zero) - 4} more" if len(zero) > 4 else "")
            text = f"{shown}: the model sets these weights to zero, and they stay zero; name them in init_std to draw them"
            notes = [*notes, Note("zero", text, False)]
        return cls({name: 0.0 if name in zero else std for name, std in stds.items()}, factors, notes)


def _base_stds(roles: list[ParamRole], rule: Rule, init_std: InitStdSetting) -> dict[str, float]:
    """sigma_base of each parameter that Table 1 initialises."""
    matrices = {role.name: role for role in roles if role.role in rule.init_var and role.note is not FROZEN}
    if isinstance(init_std, Mapping):
        among = "weights that get an init (embedding, hidden, unembedding)"
        named = match_globs(init_std, matrices, setting="init_std", among=among)
    else:
        named = dict.fromkeys(matrices, init_std)
    missing = [name for name in matrices if name not in named]
    refuse(missing, f"init_std does not cover {', '.join(missing[:6])}; add a last line '*': ...")
    # Tables that are added to a tied table, such as positions, get the std of the tied table.
    tied = [role.base_fan_in for role in roles if role.role == "embedding" and len({use for _, use in role.uses}) > 1]
    return {name: _base_std(role, named[name], max(tied, default=1)) for name, role in matrices.items()}


def _about_sp(roles: list[ParamRole], rule: Rule, init_std: InitStdSetting) -> Iterator[Note]:
    """A note if SP gives hidden weights of another width than the base's the base's fan-in std, which other SPs do not."""
    if rule is SP and init_std == "fan_in" and any(role.role == "hidden" and role.width_in != 1 for role in roles):
        text = (
            "SP has no factors, so init_std='fan_in' gives hidden weights 1 / sqrt(base fan-in) at this width too; torch's own "
            "init follows the model's fan-in: for an SP that fits this width, pass init_std as a number"
        )
        yield Note("init", text, is_caution=False)


def _base_std(role: ParamRole, setting: float | str, tied_fan_in: int) -> float:
    if setting == "fan_in":
        is_plain_table = role.role == "embedding" and role.base_fan_in == 1
        return 1 / math.sqrt(tied_fan_in if is_plain_table else role.base_fan_in)
    if isinstance(setting, str):
        raise ValueError(f"init_std must be a number or 'fan_in', got {setting!r}")
    std = finite(setting, "init_std")
    refuse(std < 0, f"init_std must not be negative, got {setting!r} for {role.name!r}")
    return std


def kept_factors(
    model: nn.Module, base: nn.Module, roles: Iterable[ParamRole], names: Mapping[str, str]
) -> tuple[dict[str, float], list[Note]]:
    """(parameter -> factor that gives its initial values their size in the base, notes on unclear sizes). Parameters are left
    out if their size does not change or their values are unknown. ``names`` maps parameters of the model to those of the base.

    A bias on the meta device has no values, but its init is known if only torch's own layer wrote it. Models with an
    ``_init_weights``, as in transformers, write biases later.
    """
    parameters, of_base = dict(model.named_parameters()), dict(base.named_parameters(remove_duplicate=False))
    narrow = {name: of_base[names[name]] for name in parameters}
    widths = _widths(parameters, narrow)
    writes_later = any(hasattr(module, "_init_weights") for module in model.modules())
    factors: dict[str, float] = {}
    unclear: list[str] = []
    unknown: list[str] = []
    for role in roles:
        value = _values(parameters[role.name])
        if role.role not in ("vector", "fixed") or _says_nothing(value) or role.note is ORIGINAL:
            continue  # weight norm's lengths (ORIGINAL) belong to the weight that the model drew
        bound, base_bound = _torch_bound(model, role.name), _torch_bound(base, names[role.name])
        if value is None:
            if bound != base_bound and _is_written_once(parameters[role.name]) and not writes_later:
                factors[role.name] = base_bound / bound
            elif bound != base_bound:
                unknown.append(role.name)
            continue
        other = _values(narrow[role.name])
        if bound and _is_uniform(value, bound) and (other is None or _is_uniform(other, base_bound)):
            factors[role.name] = base_bound / bound
        elif other is not None and other.numel() > 1:
            factor = _by_size(value, other, widths)
            if factor is None:
                unclear.append(role.name)
            else:
                factors[role.name] = factor
    notes = list(_about(unknown, unclear))
    return {name: factor for name, factor in factors.items() if factor != 1}, notes


def _about(unknown: list[str], unclear: list[str]) -> Iterator[Note]:
    if unknown:
        shown = ", ".join(map(repr, unknown[:4])) + (f" and {len(unknown) - 4} more" if len(unknown) > 4 else "")
        text = f"the values of {shown} are not loaded here, so it is not known whether they follow the width and need a factor"
        yield Note("kept", text, is_caution=False)
    if unclear:
        yield Note(
            "kept",
            f"the initial values of {', '.join(map(repr, unclear[:4]))}{' and more' if len(unclear) > 4 else ''} differ in "
            "size from the base's, and no power of the width explains it: initialise them alike at every width",
        )


def all_zero(model: nn.Module, roles: Mapping[str, ParamRole]) -> set[str]:
    """The weight matrices that the model set to zero on purpose. Zeros that were allocated by torch.empty or torch.zeros and
    never written again do not count, since they wait for an init."""
    parameters = dict(model.named_parameters())
    known = {name: parameters[name].detach() for name in roles if not _is_elsewhere(parameters[name])}
    # The first entries almost always decide, and are cheap to read.
    zero = {name for name, value in known.items() if not (value.reshape(-1)[:64].any() or value.any())}
    return {name for name in zero if parameters[name]._version > 0}


def _values(parameter: Tensor) -> Tensor | None:
    """The values of a parameter in double precision; None if they are on meta or sharded."""
    return None if _is_elsewhere(parameter) else parameter.detach().double().flatten()


def _is_elsewhere(parameter: Tensor) -> bool:
    """Whether a parameter has no values here, or only a shard of them."""
    return parameter.is_meta or hasattr(parameter, "full_tensor")


def _says_nothing(value: Tensor | None) -> bool:
    """Whether known values show no size that could follow the width: zeros, ones, or a single number."""
    return value is not None and (value.numel() < 2 or bool((value == value[0]).all()))


def _is_written_once(parameter: Tensor) -> bool:
    """Whether a parameter on the meta device was written only by the init of its own layer."""
    return parameter.is_meta and parameter._version == 1


def _widths(own: Mapping[str, Tensor], narrow: Mapping[str, Tensor]) -> set[float]:
    """The width multipliers of the model's dimensions."""
    pairs = ((a, b) for name in own for a, b in zip(own[name].shape, narrow[name].shape, strict=True) if a != b)
    return {a / b for a, b in pairs}


# Torch's own layers


def _torch_bound(model: nn.Module, name: str) -> float:
    """The bound of torch's uniform init for a bias; 0 for other parameters."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if not leaf.startswith("bias"):
        return 0.0
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return 1 / math.sqrt(module.hidden_size)
    weight = getattr(module, "weight", None)
    if isinstance(module, (nn.Linear, _ConvNd)) and isinstance(weight, Tensor) and weight.numel():
        return 1 / math.sqrt(math.prod(weight.shape[1:]))
    return 0.0


def _is_uniform(value: Tensor, bound: float) -> bool:
    """Whether these values may come from U(-bound, bound): none is larger, and their rms is bound / sqrt(3)."""
    rms = float(value.square().mean().sqrt())
    error = _SIGMAS_OF_TORCH / math.sqrt(5 * value.numel())  # the relative standard error of this rms is 1 / sqrt(5 n)
    return float(value.abs().max()) <= bound * (1 + _ROUNDING) and abs(rms * math.sqrt(3) / bound - 1) < error


# Everything else


def _by_size(value: Tensor, base: Tensor, widths: set[float]) -> float | None:
    """The power of a width multiplier that gives the values the rms of the base's values; 1 if both are equal, None if no power
    fits."""
    sizes = [float(values.square().mean().sqrt()) for values in (value, base)]
    if min(sizes) == 0 or not all(map(math.isfinite, sizes)):
        return None if max(sizes) > 0 else 1.0
    error = _SIGMAS * math.hypot(*(_relative_error(values) for values in (value, base)))
    wanted = sizes[1] / sizes[0]
    if abs(math.log(wanted)) <= max(error, math.log(1.1)):
        return 1.0
    powers = (width**exponent for exponent in _EXPONENTS for width in sorted(widths))
    return next((power for power in powers if abs(math.log(wanted / power)) <= error), None)


def _relative_error(value: Tensor) -> float:
    """The relative standard error of the rms of some values: 0 for values in a sequence, such as 1, 2, 3, which nothing drew at
    random."""
    steps, squares = value.diff(), value.square()
    if len(value) >= _SEQUENCE and (bool((steps > 0).all()) or bool((steps < 0).all())):
        return 0.0
    return float(squares.std() / (2 * squares.mean() * math.sqrt(value.numel())))
