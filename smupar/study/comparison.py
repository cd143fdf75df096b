"""How the paper compares rules, beyond Table 1."""

from __future__ import annotations

import math
from fractions import Fraction

from smupar.rules import get_rule


def as_rule(rule: str, sparsity: float) -> str:
    """The rule that a model is run under: a dense model under SmuPar, or an ablation of it, is the one under muP."""
    return "mup" if sparsity == 0 and rule != "sp" else rule


def sp_init_std(init_std: float, base_width: int, width: int) -> float:
    """The paper's convention for SP, which has no factors of its own: its init std is the one that muP gives to hidden weights
    of that width. Table 4 prints 0.087 / sqrt(16) at width 4096, where the base width is 256."""
    variance = get_rule("mup").init_var["hidden"].of(m_in=Fraction(width, base_width), m_out=1, m_rho=1)
    return init_std * math.sqrt(variance)
