"""Prints the plan in a few lines, one for each role, for a terminal of 80 columns."""

from __future__ import annotations

import math
from collections.abc import Iterable

from smupar.output.tables import aligned
from smupar.plan.plan import Plan, PlanRow
from smupar.rules import get_rule


def summary_of(plan: Plan) -> str:
    """The rule, and the numbers of each role. Numbers that differ within a role are shown as a range.
    Factors of learning rates are those of the Adam family."""
    rows_of_role: dict[str, list[PlanRow]] = {}
    for row in plan:
        rows_of_role.setdefault(row.role, []).append(row)
    branches = sorted({factor for _, factor in plan.branches})
    lines = [["kind", "tensors", "weights", "kept", "init std", "LR Adam", "forward"]]
    for role, rows in rows_of_role.items():
        total = sum(math.prod(row.shape) for row in rows)
        kept = sum(math.prod(row.shape) * row.density for row in rows)
        factors = (row.lr_factors["adam"] for row in rows)
        forward = [factor for row in rows for _, factor in row.forward]
        cells = [role, str(len(rows)), f"{total:,}", f"{float(kept / total):.4g}", _inits(rows)]
        lines.append([*cells, _range(factors), _range(forward, pair=" and ")])
    parts = [
        f"rule {get_rule(plan.rule).title}, pattern {plan.pattern}, {plan.hidden_sparsity:.4g} of the hidden weights are zero"
    ]
    parts += [aligned(lines)]
    parts += [f"residual branches are multiplied by {', '.join(f'{factor:.4g}' for factor in branches)}"] if branches else []
    parts += [f"TO DO {name}: {text}" for name, text in plan.pending.items()]
    # Cautions were already shown as warnings when the plan was made.
    return "\n".join([*parts, *(f"note: {note}" for note in plan.notes if not note.is_caution)])


def _inits(rows: Iterable[PlanRow]) -> str:
    stds = [row.init_std for row in rows if row.init_std is not None]
    return _range(stds) if stds else "kept"


def _range(numbers: Iterable[float], *, pair: str = "-") -> str:
    """The common number, or the smallest and the largest with a dash between them. Exactly two numbers have ``pair`` between
    them."""
    shown = list(dict.fromkeys(f"{number:.3g}" for number in sorted(numbers)))
    return pair.join(shown) if len(shown) < 3 else f"{shown[0]}-{shown[-1]}"
