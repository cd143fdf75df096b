"""The Plan: one row for each parameter, with every number that parameterization will use. A plan can be printed, saved and
compared.

``make.make_plan`` makes a plan, and ``parameterize`` carries it out. Optimizer groups, audits and reports read it.
Multipliers and densities are exact fractions, so that identities of Table 1 hold bit for bit at any width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from typing import Any

from torch import Tensor

from smupar.output.json_files import DamagedFileError, as_record, parse_object, sealed_json
from smupar.output.tables import aligned
from smupar.plan.globs import layer_glob
from smupar.plan.masks.patterns import parse_pattern
from smupar.plan.notes import Note
from smupar.plan.reminders import REMINDERS
from smupar.plan.roles.parameters import parent_path
from smupar.plan.scales.find_attention import AttentionChange
from smupar.plan.scales.multipliers import Multiplier
from smupar.refusals import refuse
from smupar.rules import get_rule

FORMAT = "smupar-plan/1"
_SETTINGS = ("rule", "depth", "pattern", "seed", "base_density", "alpha_input", "alpha_output", "output_factor", "branches")
_FRACTIONS = ("width_in", "width_out", "density", "density_mult", "depth_mult", "base_density")  # in JSON as "17/4"


class PlanWarning(UserWarning):
    """The plan is valid, but the user should know something about it."""


PLAN_FILE = "smupar_plan.json"  # beside the weights of a Hugging Face model, which cannot be loaded without the plan


@dataclass(frozen=True)
class PlanRow:
    """Everything that the plan says about one parameter."""

    name: str
    role: str
    shape: tuple[int, ...]
    in_dims: tuple[int, ...]
    scaling: tuple[int, ...]
    width_in: Fraction
    width_out: Fraction
    pattern: str | None  # None if dense, "given" if the user passed the mask
    density: Fraction  # share of kept weights: realised for exact counts, nominal for Bernoulli
    num_kept: int | None  # None if the pattern makes the number random
    density_mult: Fraction
    init_std: float | None  # std of the kept weights; None if the model's own values stay
    lr_factors: dict[str, float]  # optimizer family -> factor on the base learning rate
    eps_factor: float
    forward: tuple[tuple[str, float], ...]  # (module path, factor on its input; for lookup tables on its output)
    note: str = ""
    depth_mult: Fraction = Fraction(1)  # number of layers in the list around it / the base's number
    kept_factor: float = 1.0  # factor on the model's own values if they stay

    def lr_factor(self, family: str) -> float:
        refuse(
            family not in self.lr_factors, f"{self.name!r} is {self.role}: the {family} family has no learning-rate rule for it"
        )
        return self.lr_factors[family]

    def decay_factor(self, family: str) -> float:
        """The factor on weight decay that keeps learning rate times decay at the value that the user tuned."""
        return 1 / self.lr_factor(family)

    @property
    def masked(self) -> bool:
        return self.pattern is not None


@dataclass
class Plan:
    """All rows, and the settings that they come from. ``pending`` holds reminders of what only the user can set, and ``settle``
    removes a reminder."""

    rule: str
    rows: tuple[PlanRow, ...]
    pattern: str
    seed: int
    base_density: Fraction
    alpha_input: float
    alpha_output: float
    output_factor: float  # factor on the logits
    live_neurons: tuple[int, int] = (1, 1)  # (live neurons in each period, period), for pattern "neuron"
    depth: str = "none"  # the depth rule, where model and base differ in depth
    branches: tuple[tuple[str, float], ...] = ()  # (module path, factor on its output) for each end of a residual branch
    notes: list[Note] = field(default_factory=list)
    pending: dict[str, str] = field(default_factory=dict)
    multipliers: tuple[Multiplier, ...] = ()  # numbers of the model that follow its width
    attention: list[AttentionChange] = field(default_factory=list)  # how ``set_attention_scale`` set the scale of q.k
    unscored: tuple[str, ...] = ()  # modules that are named like attention, but need no scale of q.k

    def __post_init__(self) -> None:
        self._by_name = {row.name: row for row in self.rows}

    def __getitem__(self, name: str) -> PlanRow:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def hidden_sparsity(self) -> float:
        """The share of zeros among all hidden weights."""
        return self.hidden_sparsity_with({})

    def hidden_sparsity_with(self, densities: Mapping[str, float]) -> float:
        """The share of zeros among all hidden weights, if those that are named have other densities than planned."""
        hidden = [row for row in self if row.role == "hidden"]
        total = sum(math.prod(row.shape) for row in hidden)
        kept: list[float | Fraction] = [densities.get(row.name, row.density) * math.prod(row.shape) for row in hidden]
        return 1 - float(sum(kept) / total) if total else 0.0

    def attention_scale(self, head_dim: int) -> float:
        """The number by which q.k must be multiplied (Table 1). Put it into your model, then call
        ``settle("attention_scale")``."""
        refuse(head_dim < 1, f"head_dim must be a positive whole number, got {head_dim!r}")
        return get_rule(self.rule).attention_scale(int(head_dim))

    def settle(self, reminder: str) -> None:
        """Removes a reminder, after you have done what it asks for, or if your model does not need it. ``reminder`` is
        "attention_scale", "output_factor", "input_factor" or "multipliers". Without such a reminder nothing happens, so one
        script works for every rule."""
        refuse(reminder not in REMINDERS, f"no plan has a reminder called {reminder!r}: choose one of {', '.join(REMINDERS)}")
        self.pending.pop(reminder, None)

    def draw_mask(self, name: str) -> Tensor | None:
        """The mask of a parameter on the CPU, from (seed, name) alone; None if it is dense."""
        row = self[name]
        if row.pattern is None:
            return None
        refuse(
            row.pattern == "given",
            f"the mask of {name!r} was given by the user and cannot be drawn again; pass it as masks={{...}}",
        )
        mask = parse_pattern(row.pattern).mask(row, self.live_neurons, self.seed)
        refuse(
            not mask.any(), f"the {row.pattern} mask of {name!r} keeps no weight at density {float(row.density):g}; raise it"
        )
        return mask

    # Reading and writing

    def to_json(self) -> str:
        return sealed_json(self.as_json)

    @property
    def as_json(self) -> dict[str, Any]:
        """The plan as the plain values of its JSON."""
        values: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **asdict(self)}, default=str))
        return values  # Fractions have become "17/4"

    @classmethod
    def from_json(cls, text: str, *, source: str = "this text") -> Plan:
        """Reads the text that ``to_json`` wrote. ``source`` names the text in errors."""
        remedy = "write it again with plan.to_json()"
        data = parse_object(text, source=source, remedy=remedy, may_be_edited=True)
        refuse(data.pop("format", None) != FORMAT, f"{source} is not a plan in format {FORMAT!r}: {remedy}")
        try:
            for part in (data, *data["rows"]):
                part |= {name: Fraction(part[name]) for name in _FRACTIONS if name in part}
            # Plans written by the first version have notes without a kind, and their reminders call settle by its old name.
            data["notes"] = [
                {"kind": "older", "text": note, "is_caution": False} if isinstance(note, str) else note
                for note in data.get("notes", [])
            ]
            data["pending"] = {name: text.replace("plan.waive(", "plan.settle(") for name, text in data["pending"].items()}
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise DamagedFileError(f"{source} is incomplete or damaged ({error}): {remedy}") from error
        return as_record(cls, data, source=source, remedy=remedy)

    def diff(self, other: Plan) -> list[str]:
        """One line for each difference; empty if the plans are equal."""
        lines = [
            f"{name}: {getattr(self, name)} -> {getattr(other, name)}"
            for name in _SETTINGS
            if getattr(self, name) != getattr(other, name)
        ]
        lines += [f"{row.name}: only in the first" for row in self if row.name not in other]
        lines += [f"{row.name}: only in the second" for row in other if row.name not in self]
        for row in self:
            if row.name in other:
                pairs = ((item.name, getattr(row, item.name), getattr(other[row.name], item.name)) for item in fields(row))
                lines += [f"{row.name}: {field_name} {_shown(a)} -> {_shown(b)}" for field_name, a, b in pairs if a != b]
        return lines

    def __str__(self) -> str:
        # Parameters of several blocks share a line if their numbers are equal: ``blocks.*.fc (4x)`` stands for 4 parameters.
        deeper, branches = any(row.depth_mult != 1 for row in self), dict(self.branches)
        cells = {row.name: _cells(row, deeper, branches.get(parent_path(row.name))) for row in self}
        blocks: dict[str, list[str]] = {}
        for name in cells:
            blocks.setdefault(layer_glob(name), []).append(name)
        alike = {glob for glob, names in blocks.items() if len(names) > 1 and len({cells[name] for name in names}) == 1}
        titles = {blocks[glob][0]: f"{glob} ({len(blocks[glob])}x)" for glob in alike}
        multipliers = ["m_in", "m_out", "m_rho", *(["m_depth"] if deeper else [])]
        factors = ["init std", "LR Adam", "LR SGD", "decay Adam", "forward"]
        lines = [["parameter", "role", "shape", "density", *multipliers, *factors]]
        lines += [[titles.get(name, name), *cells[name]] for name in cells if name in titles or layer_glob(name) not in alike]
        total = sum(math.prod(row.shape) for row in self)
        kept = sum(math.prod(row.shape) * row.density for row in self)
        summary = (
            f"rule {get_rule(self.rule).title}, pattern {self.pattern}, base density {_shown(self.base_density)}, seed "
            f"{self.seed}; {total:,} parameters, {round(kept):,} kept"
        )
        extra = [f"TO DO {name}: {text}" for name, text in self.pending.items()] + [f"note: {text}" for text in self.notes]
        return "\n".join([summary, aligned(lines), *extra])


# Printing


def _shown(value: Any) -> str:
    if isinstance(value, (Fraction, float)):
        return f"{float(value):.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    return str(value)


def _forward_cell(row: PlanRow, branch: float | None) -> str:
    if branch is not None:
        return f"branch {_shown(branch)}"
    if len(row.forward) < 2:
        return "".join(_shown(factor) for _, factor in row.forward)
    return ", ".join(f"{path.rpartition('.')[2]} {_shown(factor)}" for path, factor in row.forward)


def _init_cell(row: PlanRow) -> str:
    if row.init_std is None:
        return "kept" if row.kept_factor == 1 else f"kept x {row.kept_factor:.3g}"
    return "zero" if row.init_std == 0 else _shown(row.init_std)


def _cells(row: PlanRow, deeper: bool, branch: float | None) -> tuple[str, ...]:
    """The cells of a row.

    deeper  whether the table has a column of depth multipliers
    branch  factor on the output of the parameter's module, if the module ends a residual branch
    """
    return (
        row.role,
        "x".join(map(str, row.shape)) or "1",
        *map(_shown, (row.density, row.width_in, row.width_out, row.density_mult)),
        *((_shown(row.depth_mult),) if deeper else ()),
        _init_cell(row),
        _shown(row.lr_factors["adam"]),
        _shown(row.lr_factors["sgd"]),
        _shown(row.decay_factor("adam")),
        _forward_cell(row, branch),
    )
