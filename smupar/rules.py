"""Table 1 of the paper as data. All factors of init, learning rates and forward passes come from here.

A *rule* is a column of Table 1 (SP, muP, SmuPar and the two ablations of App. C). A *role* is the kind of tensor that a row is
about. Each entry is a product of powers of the tensor's own multipliers:

    m_in, m_out   width of the tensor's fan-in and fan-out, divided by the base model's (the paper's m_d if both are equal)
    m_rho         density divided by the base density

So the entry ``over(m_in=1)`` reads 1 / m_in.

``smupar-aligned`` is our own rule: SmuPar with a correction of hidden learning rates that is not a power (``two_terms``).

A *depth rule* is a column of a second table. Its entries are powers of m_depth, the number of residual blocks divided by the
base model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from smupar.refusals import near

ROLES = ("embedding", "hidden", "unembedding", "router", "vector", "fixed")


@dataclass(frozen=True)
class Power:
    """m_in^a m_out^b m_rho^c. The exponents are whole numbers, so the value is exact for fractions."""

    m_in: int = 0
    m_out: int = 0
    m_rho: int = 0

    def of(self, m_in: Any, m_out: Any, m_rho: Any) -> Any:
        """The value for one tensor's multipliers, in the type of the multipliers."""
        return m_in**self.m_in * m_out**self.m_out * m_rho**self.m_rho

    @property
    def inverse(self) -> Power:
        return Power(-self.m_in, -self.m_out, -self.m_rho)

    def times(self, symbol: str) -> str:
        """``symbol`` times this power, as a reader would write it: ``eta m_out / (m_in m_rho)``."""
        powers = [("m_in", self.m_in), ("m_out", self.m_out), ("m_rho", self.m_rho)]
        above = [symbol] + [_written(name, exponent) for name, exponent in powers if exponent > 0]
        below = [_written(name, -exponent) for name, exponent in powers if exponent < 0]
        divisor = f" / ({' '.join(below)})" if len(below) > 1 else f" / {below[0]}" if below else ""
        return " ".join(above) + divisor


def _written(name: str, exponent: int) -> str:
    return name if exponent == 1 else f"{name}^{exponent}"


ONE = Power()


def over(*, m_in: int) -> Power:
    return Power(m_in=-m_in)


@dataclass(frozen=True)
class Rule:
    """One column of Table 1: a factor for each role."""

    name: str
    title: str
    # role -> factor on sigma_base^2, the variance of the kept weights. Vectors and fixed tensors keep the model's own init.
    init_var: dict[str, Power]
    # optimizer family -> role -> factor on eta_base
    lr: dict[str, dict[str, Power]]
    # role -> factor on the output of the layer, next to alpha_input and alpha_output
    forward: dict[str, Power]
    has_alphas: bool
    # attention logits are q.k * d_head ** attention_exponent
    attention_exponent: float
    # role -> factor on Adam's epsilon, used if epsilon is to scale with the gradients
    eps: dict[str, Power] = field(default_factory=dict)
    # the default depth rule
    depth: str = "none"
    # optimizer families whose hidden learning rates are corrected by the function ``two_terms``
    two_terms: tuple[str, ...] = ()

    def decay(self, family: str, role: str) -> Power:
        """The factor on lambda, the weight decay. It keeps learning rate times decay at the tuned value for every role. Without
        it, hidden weights would decay too slowly in wide models and too fast in sparse ones. The paper has no such row."""
        return self.lr[family][role].inverse

    def attention_scale(self, head_dim: int) -> float:
        return float(head_dim**self.attention_exponent)


_FLAT = dict.fromkeys(ROLES, ONE)
# Muon sets the size of its updates itself (torch scales them by the shape of the matrix). It takes hidden matrices only.
_MUON = {"hidden": ONE}

SP = Rule(
    name="sp",
    title="SP",
    init_var={"embedding": ONE, "hidden": ONE, "unembedding": ONE, "router": ONE},
    lr={"adam": _FLAT, "sgd": _FLAT, "muon": _MUON},
    forward={"embedding": ONE, "unembedding": ONE},
    has_alphas=False,
    attention_exponent=-0.5,
    eps=_FLAT,
)

MUP = Rule(
    name="mup",
    title="muP",
    # A router is an output weight inside the network: it writes a fixed number of logits. It may be a bare parameter, without
    # a layer that a hook could scale. So the unembedding's forward factor 1 / m_in becomes a part of the router's init and
    # learning rates.
    init_var={"embedding": ONE, "hidden": over(m_in=1), "unembedding": ONE, "router": over(m_in=2)},
    lr={
        "adam": {**_FLAT, "hidden": over(m_in=1), "router": over(m_in=1)},
        "sgd": {
            "embedding": Power(m_out=1),
            "hidden": Power(m_out=1, m_in=-1),
            "unembedding": Power(m_in=1),
            "router": over(m_in=1),
            "vector": Power(m_out=1),
            "fixed": ONE,
        },
        "muon": _MUON,
    },
    forward={"embedding": ONE, "unembedding": over(m_in=1)},
    has_alphas=True,
    attention_exponent=-1,
    # The unembedding's 1 / m_d reaches the gradient of every tensor before it.
    eps={
        "embedding": Power(m_out=-1),
        "hidden": over(m_in=1),
        "unembedding": over(m_in=1),
        "router": ONE,  # an equal change of its logits changes the loss equally at every width
        "vector": Power(m_out=-1),
        "fixed": ONE,
    },
)


def _corrected(powers: dict[str, Power]) -> dict[str, Power]:
    """SmuPar's change of muP: in factors of weights that may have a mask, m_in becomes m_in m_rho. A router has m_rho = 1
    unless the user makes it sparse."""
    return {**powers, **{role: replace(powers[role], m_rho=powers[role].m_in) for role in ("hidden", "router")}}


_SMUPAR_INIT = _corrected(MUP.init_var)
_SMUPAR_LR = {**MUP.lr, "adam": _corrected(MUP.lr["adam"]), "sgd": _corrected(MUP.lr["sgd"])}

SMUPAR = replace(MUP, name="smupar", title="SmuPar", init_var=_SMUPAR_INIT, lr=_SMUPAR_LR, depth="completep")
SMUPAR_INIT_ONLY = replace(SMUPAR, name="smupar-init-only", title="muP + SmuPar init only", lr=MUP.lr)
SMUPAR_LR_ONLY = replace(SMUPAR, name="smupar-lr-only", title="muP + SmuPar LR only", init_var=MUP.init_var)

# The derivation assumes updates of equal size for all weights, which optimizers of the Adam family make.
SMUPAR_ALIGNED = replace(SMUPAR, name="smupar-aligned", title="SmuPar, two terms", two_terms=("adam",))

TABLE_1 = (SP, MUP, SMUPAR, SMUPAR_INIT_ONLY, SMUPAR_LR_ONLY)
RULES = {rule.name: rule for rule in (*TABLE_1, SMUPAR_ALIGNED)}


def two_terms(m: float, per_neuron: float, kappa: float) -> float:
    """The correction by which smupar-aligned multiplies SmuPar's hidden learning rate eta / m, where m = m_in m_rho.

    An update of a neuron's n weights moves its output. The part of the move on which the weights agree grows like n. The part
    on which they do not agree grows like sqrt(n). Together both are proportional to sqrt(n (n + kappa)), and they are equally
    large at n = kappa. The proxy has n = N0 weights per neuron, the model m N0. Both models move equally far if the learning
    rate is divided by m and multiplied by this correction. The two factors together are 1 / m if all weights agree (kappa = 0),
    and 1 / sqrt(m) if none do.

    per_neuron  N0, the number of kept weights per neuron of this layer in the proxy
    kappa       the proxy's kappa, as measured by ``smupar.observe``
    """
    return math.sqrt((per_neuron + kappa) / (per_neuron + kappa / m))


# Which roles get weight decay, by the run's choice. "all" is our rule; the others are for comparison.
DECAYED = {
    "all": ROLES,
    "matrices": ("embedding", "hidden", "unembedding", "router"),
    "hidden": ("hidden",),
    "vectors": ("vector",),
}


@dataclass(frozen=True)
class DepthRule:
    """One column of the table of depth rules, for a model of residual blocks ``x + branch(x)``. All exponents follow from
    alpha.

    A branch is divided by m_depth^alpha. Each of m_depth blocks may change the residual stream by 1 / m_depth, so an update of
    a weight may change its branch by m_depth^(alpha - 1). Updates of Adam and Muon have the size of their learning rate.
    Updates of SGD also follow the gradient, which is divided by m_depth^alpha like the branch.
    """

    name: str
    title: str
    alpha: Fraction | None  # None: no factor depends on the depth

    @property
    def branch(self) -> Fraction:
        """The exponent of m_depth in the factor on the output of a residual branch."""
        return Fraction(0) if self.alpha is None else -self.alpha

    def lr(self, family: str) -> Fraction:
        """The exponent of m_depth in the learning rate of parameters inside residual blocks."""
        if self.alpha is None:
            return Fraction(0)
        return 2 * self.alpha - 1 if family == "sgd" else self.alpha - 1

    @property
    def eps(self) -> Fraction:
        """The exponent of m_depth in Adam's epsilon inside residual blocks, if epsilon is to scale with the gradients."""
        return self.branch


NO_DEPTH = DepthRule("none", "none", None)
COMPLETEP = DepthRule("completep", "CompleteP (alpha 1)", Fraction(1))
DEPTH_MUP = DepthRule("depth-mup", "depth-muP (alpha 1/2)", Fraction(1, 2))
DEPTH_RULES = {rule.name: rule for rule in (NO_DEPTH, COMPLETEP, DEPTH_MUP)}


def get_depth_rule(name: str) -> DepthRule:
    if name not in DEPTH_RULES:
        raise ValueError(f"unknown depth rule {name!r}: choose one of {', '.join(DEPTH_RULES)}")
    return DEPTH_RULES[name]


def depth_factor(m_depth: Fraction, exponent: Fraction) -> float:
    """m_depth^exponent, exact if the exponent is a whole number."""
    return float(m_depth ** int(exponent) if exponent.denominator == 1 else float(m_depth) ** float(exponent))


def get_rule(name: str, *, beside: Iterable[str] = ()) -> Rule:
    """The rule of this name. ``beside`` are names of other things that the caller takes as well, for the error."""
    if name not in RULES:
        known = [*RULES, *beside]
        meant = f"choose one of {', '.join(known)}; {near(str(name), known)}".removesuffix("; ")
        raise ValueError(f"unknown rule {name!r}: {f'write {name.lower()!r}' if str(name).lower() in RULES else meant}")
    return RULES[name]
