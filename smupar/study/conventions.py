"""Conventions for comparing models: the paper's, beyond Table 1, and how a density is written."""

from __future__ import annotations

import math
from fractions import Fraction

from smupar.rules import get_rule


def as_rule(rule: str, sparsity: float) -> str:
    """The rule under which a model is run. A dense model is the same under muP, SmuPar and its ablations, so it is run once,
    under muP. "smupar-aligned" differs from muP even when dense."""
    return "mup" if sparsity == 0 and rule != "sp" and not get_rule(rule).two_terms else rule


def density_in_words(sparsity: float) -> str:
    """The density, as a fraction such as 1/8 if it is one."""
    density = 1 - sparsity
    fraction = Fraction(density).limit_denominator(10_000)
    return str(fraction) if fraction.numerator == 1 and math.isclose(fraction, density) else f"{density:.4g}"


def sp_init_std(init_std: float, base_width: int, width: int) -> float:
    """The init std of SP, which has no factors. By the paper's convention it is the std that muP gives hidden weights of that
    width: Table 4 prints 0.087 / sqrt(16) for width 4096 and base width 256."""
    variance = get_rule("mup").init_var["hidden"].of(m_in=Fraction(width, base_width), m_out=1, m_rho=1)
    return init_std * math.sqrt(variance)
