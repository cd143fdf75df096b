"""Everything that the package knows about optimizers, with one row for each.

A row says which family of learning rates in Table 1 an optimizer belongs to, how it uses weight decay, what it keeps for each
weight and how it can be run. ``facts_of`` also answers for an unknown optimizer: it has no family, and its updates may mix the
entries of a matrix. This file imports nothing outside of the standard library, not even torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class OptimizerFacts:
    name: str  # name of the class
    family: str | None = None  # which learning rates of Table 1 it gets: "adam", "sgd" or "muon"
    num_states: int = 0  # tensors of a weight's size that it keeps
    decoupled: bool = False  # weight decay is not added to the gradient
    eps: bool = False
    betas: bool = False
    momentum: bool = False
    mixes_entries: bool = False  # a weight's update depends on other weights' gradients, so weights off the mask would move
    hidden_only: bool = False  # takes hidden matrices only, so a second optimizer has to train the rest
    fused: bool = False  # torch has a fused kernel for it, on CPUs and GPUs
    capturable: bool = False  # torch can put its step into a CUDA graph
    stackable: bool = False  # ``Stack`` implements its update
    restartable: bool = False  # its bias correction can restart for single weights
    no_rule: str = ""  # why no factor of Table 1 fits it
    no_moves: str = ""  # why masks cannot move under it

    def num_states_with(self, momentum: float) -> int:
        """How many state tensors it keeps for each weight; none for SGD without momentum."""
        return 0 if self.family == "sgd" and momentum == 0 else self.num_states


_ADAM = OptimizerFacts("Adam", "adam", 2, eps=True, betas=True, fused=True, capturable=True, stackable=True, restartable=True)
_ROWS = (
    replace(_ADAM, name="AdamW", decoupled=True),
    _ADAM,
    OptimizerFacts("Adamax", "adam", 2, eps=True, betas=True),
    OptimizerFacts("NAdam", "adam", 2, eps=True, betas=True),
    OptimizerFacts("RAdam", "adam", 2, eps=True, betas=True),
    OptimizerFacts("SGD", "sgd", 1, momentum=True, fused=True, stackable=True),
    OptimizerFacts("Lion", "adam", 1, decoupled=True, betas=True, stackable=True),
    OptimizerFacts("Muon", "muon", 1, decoupled=True, momentum=True, mixes_entries=True, hidden_only=True, stackable=True),
    OptimizerFacts("RMSprop", "adam", 1, eps=True),
    OptimizerFacts("Adagrad", "adam", 1, eps=True, fused=True),
    OptimizerFacts(
        "Adafactor",
        no_rule="Adafactor scales its step by the size of the parameter and caps the learning rate, so no factor of Table 1 "
        "fits it. Use AdamW or SGD, or set the learning rate of each layer from measured updates.",
    ),
    OptimizerFacts(
        "ZeroRedundancyOptimizer",
        no_moves="ZeroRedundancyOptimizer keeps most state on other ranks, where grown weights cannot be started again: use "
        "FSDP2 (fully_shard), or the optimizer alone",
    ),
    # Optimizers of other packages whose updates do not mix entries. The user has to name their family.
    *map(OptimizerFacts, ("FusedAdam", "DeepSpeedCPUAdam", "Adam8bit", "AdamW8bit")),
    *map(OptimizerFacts, ("AdamWScheduleFree", "SGDScheduleFree", "Prodigy")),
)
OPTIMIZERS = {row.name.lower(): row for row in _ROWS}  # by lower-case name
FAMILIES = {name: row.family for name, row in OPTIMIZERS.items() if row.family}  # by lower-case name, where there is one
# Defaults of the Newton-Schulz iteration in torch.optim.Muon.
MUON_COEFFICIENTS, MUON_STEPS, MUON_EPS = (3.4445, -4.775, 2.0315), 5, 1e-7


def name_of(optimizer: object) -> str:
    """The name of an optimizer, which may be given by its name, its class or an instance."""
    if isinstance(optimizer, str):
        return optimizer
    return (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__


def facts_of(optimizer: object) -> OptimizerFacts:
    """The row of an optimizer, which is given by its name, its class or an instance. For an unknown optimizer the worst is
    assumed."""
    name = name_of(optimizer)
    return OPTIMIZERS.get(name.lower()) or OptimizerFacts(name, mixes_entries=True)


def decouples_decay(optimizer: object, group: Mapping[str, Any] | None = None) -> bool:
    """Whether an optimizer keeps weight decay separate from the gradient. If torch has an option for it, the group's option
    counts, or without a group the instance's default. Otherwise the row in the table counts."""
    options = getattr(optimizer, "defaults", {}) if group is None else group
    return bool(options.get("decoupled_weight_decay", facts_of(optimizer).decoupled))


def has_adamw_beside(optimizer: object, rest_lr: float | None) -> bool:
    """Whether a second optimizer, AdamW, trains everything that is not hidden. Muon needs one, since it takes hidden matrices
    only. Any other optimizer gets one if ``rest_lr`` is given."""
    return rest_lr is not None or facts_of(optimizer).hidden_only


def facts_for_role(role: str, optimizer: object, rest_lr: float | None) -> OptimizerFacts:
    """The row of the optimizer that trains parameters of a role, in a run whose optimizer is ``optimizer``."""
    return facts_of("adamw" if role != "hidden" and has_adamw_beside(optimizer, rest_lr) else optimizer)


def names_with(fact: str) -> tuple[str, ...]:
    """Lower-case names of the optimizers that have a fact, such as "stackable" or "momentum", in the order of the table."""
    return tuple(name for name, row in OPTIMIZERS.items() if getattr(row, fact))


def family_of(optimizer: object) -> str:
    """The LR family of an optimizer. An optimizer without a rule is refused, and the error names the remedy."""
    facts = facts_of(optimizer)
    if facts.no_rule:
        raise ValueError(facts.no_rule)
    if facts.family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(
            f"no learning-rate rule is known for optimizer {name_of(optimizer)!r} (known: {known}). If its update has "
            "a fixed size per weight whatever the gradient's size, pass optimizer='adamw'; if it is proportional to the "
            "gradient, 'sgd'."
        )
    return facts.family
