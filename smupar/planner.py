"""Rules x roles x densities -> Plan. Pure: nothing here touches a model, and both models may live on the meta device."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from fractions import Fraction
from numbers import Real
from operator import index
from os import PathLike
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from smupar.globs import match_globs
from smupar.masks import NM, Allocation, Neuron, Pattern, allocate, as_density, parse_pattern, read_masks, uniform
from smupar.plan import Plan, PlanRow
from smupar.roles import GUESSED, ParamRole, RoleSetting, infer_roles
from smupar.rules import Rule, get_rule

DensitySetting = float | Mapping[str, float] | Allocation
MaskSetting = Mapping[str, Tensor] | str | PathLike[str] | None
InitStdSetting = float | str | Mapping[str, float | str]

# Under about 16 kept weights per neuron the law of large numbers behind the rule gets thin.
MIN_WEIGHTS_PER_NEURON = 16
_ATTENTION = re.compile(r"att(ention|n)|qkv|query|q_proj|(^|_)(to_)?w?q$", re.IGNORECASE)


class PlanWarning(UserWarning):
    """The plan is valid, but something about it deserves a look."""


class Settings(TypedDict, total=False):
    """Keyword arguments of ``make_plan`` and ``parameterize``; ``make_plan`` says what each means."""

    rule: str
    density: DensitySetting | None
    base_density: float | Allocation
    pattern: str
    seed: int
    init_std: InitStdSetting
    alpha_input: float
    alpha_output: float
    masks: MaskSetting
    roles: Mapping[str, RoleSetting] | None
    delta: nn.Module | None


def make_plan(model: nn.Module, *, base: nn.Module, **settings: Unpack[Settings]) -> Plan:
    """The plan of ``parameterize``, without touching the model.

    base          the same class at base width, where hyperparameters were tuned
    rule          "sp" | "mup" | "smupar" (default) | "smupar-init-only" | "smupar-lr-only"
    density       share of hidden weights kept: a float, {"glob": float} (first match wins) or an allocation such as
                  erk(1 / 16); default 1, or what an N:M pattern says
    base_density  density at which hyperparameters were tuned, default 1
    pattern       "random" (default) | "bernoulli" | "fan_in" | "2:4" | "2:4-transposable" | "block-16" | "neuron"
    seed          of masks and weights; both depend on (seed, parameter name) only
    init_std      base init std: a float, "fan_in" (default: each tensor's 1 / sqrt(base fan-in)), or {"glob": either}
    alpha_input   tuned factor on the embedding's output
    alpha_output  tuned factor on the unembedding's output
    masks         {"name": bool tensor}, or a file of them or of a state dict: masks of your own; densities are read off them
    roles         {"glob": role or ("hidden", in_dim)} where inference needs help
    delta         the same class at any third width: shows which dimensions scale where model and base are equally wide
    """
    plan, cautions = plan_with_cautions(model, base, settings)
    warn(cautions, stacklevel=3)
    return plan


def plan_with_cautions(model: nn.Module, base: nn.Module, settings: Settings) -> tuple[Plan, list[str]]:
    """The plan, and what its maker should hear as warnings at the line that asked for it."""
    unknown = settings.keys() - Settings.__annotations__.keys()
    if unknown:
        known = ", ".join(Settings.__annotations__)
        raise TypeError(f"unknown setting {sorted(unknown)[0]!r}; settings are {known} (density is 1 - sparsity)")
    planner = _Planner(model, base, **settings)
    return planner.plan(), planner.cautions


def warn(cautions: list[str], *, stacklevel: int) -> None:
    for text in cautions:
        warnings.warn(text, PlanWarning, stacklevel=stacklevel)


class _Planner:
    def __init__(
        self,
        model: nn.Module,
        base: nn.Module,
        *,
        rule: str = "smupar",
        density: DensitySetting | None = None,
        base_density: float | Allocation = 1.0,
        pattern: str = "random",
        seed: int = 0,
        init_std: InitStdSetting = "fan_in",
        alpha_input: float = 1.0,
        alpha_output: float = 1.0,
        masks: MaskSetting = None,
        roles: Mapping[str, RoleSetting] | None = None,
        delta: nn.Module | None = None,
    ) -> None:
        self.model = model
        self.rule: Rule = get_rule(rule)
        self.pattern: Pattern = parse_pattern(pattern)
        if density is None:
            density = self.pattern.n / self.pattern.m if isinstance(self.pattern, NM) else 1.0
        base_spread = base_density if isinstance(base_density, Allocation) else uniform(base_density)
        self.base_density = as_density(base_spread.density, "base_density")
        self.alphas = {
            "embedding": _finite(alpha_input, "alpha_input"),
            "unembedding": _finite(alpha_output, "alpha_output"),
        }
        self.seed = _whole(seed, "seed")
        self.notes: list[str] = []
        self.cautions: list[str] = []  # notes that are also worth a warning
        self.roles = infer_roles(model, base, delta=delta, roles=roles)
        self.hidden = {role.name: role for role in self.roles if role.role == "hidden"}
        # What the base density means for each tensor, spread as the user spread it.
        shapes = {name: role.shape for name, role in self.hidden.items()}
        self.base_densities = base_spread.densities(shapes)
        self.given = self._given_masks(read_masks(masks))
        self.live_neurons = (1, 1)
        # The kept share of each parameter that gets a mask.
        self.densities = self._neurons(density) if isinstance(self.pattern, Neuron) else self._densities(density)
        self.base_stds = self._base_stds(init_std)

    def plan(self) -> Plan:
        rows = tuple(self._row(role) for role in self.roles)
        self._warn_thin(rows)
        noted: dict[str, list[str]] = {}
        for role in self.roles:
            if role.note and (role.note != GUESSED or role.name in self.densities):
                noted.setdefault(role.note, []).append(repr(role.name))
        for note, names in noted.items():
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            self._caution(f"{', '.join(names[:4])}{more} {'is' if len(names) == 1 else 'are'} {note}")
        if not self.rule.has_alphas and any(alpha != 1 for alpha in self.alphas.values()):
            self.notes.append(f"{self.rule.title} has no alpha_input and alpha_output: they are not used")
        output_factor = self._forward("unembedding", self._output_width())
        return Plan(
            rule=self.rule.name,
            rows=rows,
            pattern=self.pattern.name,
            seed=self.seed,
            base_density=self.base_density,
            alpha_input=self.alphas["embedding"],
            alpha_output=self.alphas["unembedding"],
            output_factor=output_factor,
            live_neurons=self.live_neurons,
            notes=self.notes,
            pending=self._pending(output_factor),
        )

    # Densities

    def _given_masks(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The user's own masks by parameter name; keys may be those of a state dict (``<name>_mask``)."""
        roles = {role.name: role for role in self.roles}
        given: dict[str, Tensor] = {}
        first = {id(parameter): name for name, parameter in self.model.named_parameters()}
        aliases = {name: first[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False)}
        for key, mask in masks.items():
            name = key if key in roles else key.removesuffix("_mask")
            own = aliases.get(name, name)
            if own != name and any(other in masks for other in (own, f"{own}_mask")):
                continue  # a state dict has the mask of a shared layer under each of its names
            if name in given:
                raise ValueError(f"masks: {name!r} is there twice, as {name!r} and as {name + '_mask'!r}")
            if name not in roles:
                raise ValueError(f"masks: {key!r} is no parameter of this model; are these the masks of another model?")
            if tuple(mask.shape) != roles[name].shape:
                raise ValueError(
                    f"masks: {key!r} has shape {tuple(mask.shape)}, the parameter {roles[name].shape}; "
                    "are these the masks of another model?"
                )
            if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
                raise ValueError(f"masks: {key!r} holds values other than 0 and 1")
            if not mask.any():
                raise ValueError(f"masks: {key!r} keeps no weight at all")
            if name not in self.hidden:
                raise ValueError(
                    f"masks: {name!r} is {roles[name].role}, but only hidden weights are made sparse (Table 1); "
                    f"if it is one, pass roles={{{name!r}: 'hidden'}}"
                )
            given[name] = mask.bool()
        if given:
            self._caution(
                "masks of your own: the rule assumes random masks, so check the model's coordinates "
                "if they come from magnitudes or gradients"
            )
        return given

    def _densities(self, density: DensitySetting) -> dict[str, Fraction]:
        open_shapes = {name: role.shape for name, role in self.hidden.items() if name not in self.given}
        if not self.hidden and density != 1:
            raise ValueError("no hidden weight could be made sparse: every matrix of this model reads or writes a fixed size")
        densities = {}
        for name, nominal in allocate(density, open_shapes).items():
            if nominal < 1:
                densities[name] = self._realised(self.hidden[name], nominal)
        for name, mask in self.given.items():
            densities[name] = Fraction(int(torch.count_nonzero(mask)), mask.numel())
        return densities

    def _realised(self, role: ParamRole, nominal: Fraction) -> Fraction:
        try:
            count = self.pattern.count(role.shape, role.in_dims, nominal)
        except ValueError as error:
            raise ValueError(f"{role.name!r} of shape {role.shape}: {error}") from None
        if count == 0:
            raise ValueError(
                f"{role.name!r} of shape {role.shape} would lose every weight at density {float(nominal):g}; "
                f"raise it, or keep this layer denser: density={{{role.name!r}: ..., '*': ...}}"
            )
        return nominal if count is None else Fraction(count, math.prod(role.shape))

    def _base_density(self, role: ParamRole) -> Fraction:
        """The base density as this tensor would realise it, so that rho = rho_base gives exactly muP."""
        base = self.base_densities[role.name]
        if base == 1 or isinstance(self.pattern, NM):
            return base
        pattern = Pattern() if role.name in self.given else self.pattern
        count = pattern.count(role.shape, role.in_dims, base)
        if count == 0:
            raise ValueError(f"at base_density {float(base):g} {role.name!r} of shape {role.shape} has no weight")
        return base if count is None else Fraction(count, math.prod(role.shape))

    def _neurons(self, density: DensitySetting) -> dict[str, Fraction]:
        if self.given or isinstance(density, (Mapping, Allocation)) or self.base_density != 1:
            raise ValueError(
                "pattern 'neuron' narrows the whole network: it takes one float as density, base_density 1, "
                "and no masks of your own"
            )
        exact = as_density(density)
        if exact == 1:
            return {}
        self._refuse_flattened()
        assert isinstance(self.pattern, Neuron)
        period = math.gcd(*(role.shape[dim] for role in self.roles for dim in role.scaling))
        self.live_neurons = (self.pattern.num_live(period, exact), period)
        live = Fraction(*self.live_neurons)
        return {role.name: live ** len(role.scaling) for role in self.roles if role.scaling}

    def _refuse_flattened(self) -> None:
        modules = dict(self.model.named_modules(remove_duplicate=False))
        owners = [(role, modules.get(role.name.rpartition(".")[0])) for role in self.roles if role.scaling and role.in_dims]
        channels = {role.shape[0] for role, owner in owners if isinstance(owner, nn.modules.conv._ConvNd)}
        written = {role.shape[0] for role, owner in owners if isinstance(owner, nn.Linear)}
        for role, owner in owners:
            read = role.shape[1]
            if isinstance(owner, nn.Linear) and role.in_dims[0] in role.scaling and read not in written | channels:
                flat = next((size for size in channels if read % size == 0), None)
                if flat is not None:
                    raise ValueError(
                        f"{role.name!r} reads {read} values, {read // flat} of each of {flat} channels if an image was "
                        "flattened: pattern 'neuron' cannot tell which of them are alive. Average over the image first, or "
                        "choose another pattern"
                    )

    # Init

    def _base_stds(self, init_std: InitStdSetting) -> dict[str, float]:
        """sigma_base of each parameter that Table 1 initialises."""
        matrices = {role.name: role for role in self.roles if role.role in self.rule.init_var}
        if isinstance(init_std, Mapping):
            among = "weights that get an init (embedding, hidden, unembedding)"
            named = match_globs(init_std, matrices, what="init_std", among=among)
        else:
            named = dict.fromkeys(matrices, init_std)
        missing = [name for name in matrices if name not in named]
        if missing:
            raise ValueError(f"init_std says nothing about {', '.join(missing[:6])}; add a last line '*': ...")
        return {name: self._base_std(role, named[name]) for name, role in matrices.items()}

    def _base_std(self, role: ParamRole, setting: float | str) -> float:
        if setting == "fan_in":
            return 1 / math.sqrt(self._tied_fan_in() if self._is_plain_table(role) else role.base_fan_in)
        if isinstance(setting, str):
            raise ValueError(f"init_std must be a number or 'fan_in', got {setting!r}")
        std = _finite(setting, "init_std")
        if std < 0:
            raise ValueError(f"init_std must not be negative, got {setting!r} for {role.name!r}")
        return std

    def _is_plain_table(self, role: ParamRole) -> bool:
        return role.role == "embedding" and role.base_fan_in == 1

    def _tied_fan_in(self) -> int:
        """Tables that are added to a tied one, such as positions, get its size: 1 where none is tied."""
        tied = [r.base_fan_in for r in self.roles if r.role == "embedding" and len({use for _, use in r.uses}) > 1]
        return max(tied, default=1)

    # Rows

    def _row(self, role: ParamRole) -> PlanRow:
        masked = role.name in self.densities
        density = self.densities.get(role.name, Fraction(1))
        width_in, width_out, density_mult = role.width_in, role.width_out, Fraction(1)
        if isinstance(self.pattern, Neuron):  # whole neurons change the widths; what is left is dense
            live = Fraction(*self.live_neurons)
            width_in *= live if any(dim in role.scaling for dim in role.in_dims) else 1
            width_out *= live if any(dim not in role.in_dims for dim in role.scaling) else 1
        elif role.role == "hidden":
            density_mult = density / self._base_density(role)
        multipliers = (width_in, width_out, density_mult)
        std = None
        if role.name in self.base_stds:
            std = self.base_stds[role.name] * math.sqrt(self.rule.init_var[role.role].of(*multipliers))
        m_d = width_out if role.role == "embedding" else width_in
        return PlanRow(
            name=role.name,
            role=role.role,
            shape=role.shape,
            in_dims=role.in_dims,
            scaling=role.scaling,
            width_in=width_in,
            width_out=width_out,
            pattern=("given" if role.name in self.given else self.pattern.name) if masked else None,
            density=density,
            num_kept=self._num_kept(role, density),
            density_mult=density_mult,
            init_std=std,
            lr_factors={
                family: float(powers[role.role].of(*multipliers))
                for family, powers in self.rule.lr.items()
                if role.role in powers
            },
            eps_factor=float(self.rule.eps[role.role].of(*multipliers)),
            forward=tuple((path, self._forward(use, m_d)) for path, use in role.uses),
            note=role.note,
        )

    def _num_kept(self, role: ParamRole, density: Fraction) -> int | None:
        kept = density * math.prod(role.shape)
        exact = role.name in self.given or density == 1 or isinstance(self.pattern, Neuron)
        return int(kept) if exact or self.pattern.count(role.shape, role.in_dims, density) is not None else None

    def _forward(self, use: str, m_d: Fraction) -> float:
        alpha = self.alphas[use] if self.rule.has_alphas else 1.0
        return alpha * float(self.rule.forward[use].of(m_d, 1, 1))

    def _output_width(self) -> Fraction:
        """m_d of the logits: of the unembedding, or of the embedding where a model makes its logits out of our sight."""
        live = Fraction(*self.live_neurons)
        for wanted in ("unembedding", "embedding"):
            for role in self.roles:
                if role.role == wanted:
                    return (role.width_in if wanted == "unembedding" else role.width_out) * live
        return max((role.width_out for role in self.roles), default=Fraction(1)) * live

    # What the user should know

    def _caution(self, text: str) -> None:
        self.notes.append(text)
        self.cautions.append(text)

    def _warn_thin(self, rows: tuple[PlanRow, ...]) -> None:
        per_neuron = {}
        for row in rows:
            if row.masked and row.role == "hidden":
                share = Fraction(*self.live_neurons) if isinstance(self.pattern, Neuron) else row.density
                per_neuron[row.name] = float(share * math.prod(row.shape[dim] for dim in row.in_dims))
        thin = [name for name, kept in per_neuron.items() if kept < MIN_WEIGHTS_PER_NEURON]
        if thin:
            fewest = min(thin, key=per_neuron.__getitem__)
            self._caution(
                f"{len(thin)} hidden weights keep fewer than {MIN_WEIGHTS_PER_NEURON} weights per neuron ({fewest!r}: "
                f"{per_neuron[fewest]:.3g}); the rule is a law of large numbers and gets thin there"
            )

    def _pending(self, output_factor: float) -> dict[str, str]:
        pending = {}
        uses = {use for role in self.roles for _, use in role.uses}
        named = [(path.rpartition(".")[2], type(module).__name__) for path, module in self.model.named_modules()]
        attention = any(_ATTENTION.search(leaf) or _ATTENTION.search(kind) for leaf, kind in named)
        if attention and isinstance(self.pattern, Neuron) and self.densities:
            self._caution("whole neurons are cut inside attention heads: scale q.k by the live part of head_dim")
        own = any(not type(module).__module__.startswith("torch.nn") for module in self.model.modules())
        if not attention and own and self.rule.attention_exponent == -1:
            self.notes.append("no attention was recognised; if there is some, scale its q.k by plan.attention_scale(head_dim)")
        if attention and self.rule.attention_exponent == -1:
            pending["attention_scale"] = (
                "attention logits are q.k / d_head under this rule: set your model's scale to plan.attention_scale(head_dim). "
                "Where it cannot be set (nn.MultiheadAttention) and head_dim stays the same at every width, "
                "plan.waive('attention_scale')."
            )
        unreached = [role.name for role in self.roles if role.role == "unembedding" and not role.uses]
        if ("unembedding" not in uses or unreached) and output_factor != 1:
            found = (
                f"no layer of {', '.join(unreached)} could be scaled:"
                if unreached
                else "no module that makes the outputs was found. If the model does so itself (F.linear with the embedding),"
            )
            pending["output_factor"] = (
                f"{found} multiply its logits by plan.output_factor = {output_factor:g}, in training and evaluation; "
                "then plan.waive('output_factor')."
            )
        unreached = [role.name for role in self.roles if role.role == "embedding" and not role.uses]
        if ("embedding" not in uses or unreached) and self._forward("embedding", Fraction(1)) != 1:
            found = (
                f"{', '.join(unreached)} belongs to no layer that could be scaled: multiply what the model reads from it by"
                if unreached
                else "no layer that reads the inputs was found, so nothing applies it: multiply what the model makes of them by"
            )
            pending["input_factor"] = f"{found} alpha_input = {self.alphas['embedding']:g}; then plan.waive('input_factor')."
        return pending


def _whole(value: int, what: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"{what} must be a whole number, got {value!r}") from None


def _finite(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, got {value!r}")
    return float(value)
