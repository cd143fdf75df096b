"""The plan in a few lines, one for each kind of layer, for a terminal of 80 columns."""

from __future__ import annotations

import math
from collections.abc import Iterable

from smupar.output.tables import aligned
from smupar.plan.plan import Plan, PlanRow
from smupar.rules import get_rule


def summary_of(plan: Plan, family: str = "adam") -> str:
    """The rule, and the numbers of each kind of layer, as a range if they differ within a kind. ``family`` is the optimizer
    family whose learning-rate factors are shown."""
    kinds: dict[str, list[PlanRow]] = {}
    for row in plan:
        kinds.setdefault(row.role, []).append(row)
    branches = sorted({factor for _, factor in plan.branches})
    lines = [["kind", "tensors", "weights", "kept", "init std", f"LR {family.title()}", "forward"]]
    for role, rows in kinds.items():
        total = sum(math.prod(row.shape) for row in rows)
        kept = sum(math.prod(row.shape) * row.density for row in rows)
        factors = (row.lr_factors.get(family, row.lr_factors["adam"]) for row in rows)
        forward = [factor for row in rows for _, factor in row.forward]
        cells = [role, str(len(rows)), f"{total:,}", f"{float(kept / total):.4g}", _inits(rows)]
        lines.append([*cells, _range(factors), _range(forward, pair=" and ")])
    told = [
        f"rule {get_rule(plan.rule).title}, pattern {plan.pattern}, {plan.hidden_sparsity:.4g} of the hidden weights are zero"
    ]
    told += [aligned(lines)]
    told += [f"residual branches are multiplied by {', '.join(f'{factor:.4g}' for factor in branches)}"] if branches else []
    told += [f"TO DO {name}: {text}" for name, text in plan.pending.items()]
    # Cautions were already shown as warnings when the plan was made.
    return "\n".join([*told, *(f"note: {note}" for note in plan.notes if not note.is_caution)])


def _inits(rows: Iterable[PlanRow]) -> str:
    stds = [row.init_std for row in rows if row.init_std is not None]
    return _range(stds) if stds else "kept"


def _range(numbers: Iterable[float], *, pair: str = "-") -> str:
    """The number that all share, or the smallest and the largest with ``pair`` between them."""
    shown = list(dict.fromkeys(f"{number:.3g}" for number in sorted(numbers)))
    return pair.join(shown) if len(shown) < 3 else f"{shown[0]}-{shown[-1]}"
