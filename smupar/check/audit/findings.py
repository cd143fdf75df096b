"""What the audit raises: one finding for each difference from the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One difference from the plan. ``text`` is for people; the other fields are for programs."""

    text: str
    cause: str
    name: str = ""  # name of the parameter, layer or groups
    ratio: float = math.nan  # measured value divided by planned value; NaN if there is no such ratio
    parameters: tuple[str, ...] = ()  # the parameters with this ratio, if ``name`` is not a parameter

    def __str__(self) -> str:
        return self.text


class AuditError(ValueError):
    """The model or its optimizer differs from the plan; ``findings`` has one line for each difference."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        shown = "\n".join(f"  - {line}" for line in findings[:20])
        more = f"\n  ... and {len(findings) - 20} more" if len(findings) > 20 else ""
        differ = "difference" if len(findings) == 1 else "differences"
        super().__init__(f"{len(findings)} {differ} from the plan:\n{shown}{more}")
