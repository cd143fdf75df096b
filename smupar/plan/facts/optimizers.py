"""All facts about optimizers, one row for each.

A row says which family of learning rates in Table 1 an optimizer belongs to, and how it applies weight decay. It also says how
much state the optimizer keeps for each weight, and how it can be run. For an unknown optimizer ``facts_of`` assumes no family,
and updates that mix the entries of a matrix. This file imports only the standard library, not torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class OptimizerFacts:
    name: str  # name of the class
    family: str | None = None  # family of learning rates in Table 1: "adam", "sgd" or "muon"
    num_states: int = 0  # number of state tensors of a weight's size
    decoupled: bool = False  # whether weight decay is kept apart from the gradient
    eps: bool = False
    betas: bool = False
    momentum: bool = False
    mixes_entries: bool = False  # a weight's update depends on other weights' gradients, so weights off the mask would move
    hidden_only: bool = False  # takes hidden matrices only, so a second optimizer has to train the rest
    fused: bool = False  # torch has a fused kernel for it, on CPUs and GPUs
    capturable: bool = False  # a step with it is captured as a CUDA graph
    stackable: bool = False  # ``Stack`` implements its update
    restartable: bool = False  # its bias correction can restart for single weights
    no_rule: str = ""  # why no factor of Table 1 fits it
    no_moves: str = ""  # why masks cannot move under it

    def num_states_with(self, momentum: float) -> int:
        """The number of state tensors for each weight; 0 for SGD without momentum."""
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
    # Optimizers of other packages whose updates do not mix entries. Users have to name their family.
    *map(OptimizerFacts, ("FusedAdam", "DeepSpeedCPUAdam", "Adam8bit", "SGDScheduleFree", "Prodigy")),
    *(OptimizerFacts(name, decoupled=True) for name in ("AdamW8bit", "AdamWScheduleFree")),
)
OPTIMIZERS = {row.name.lower(): row for row in _ROWS}  # by lower-case name
# by lower-case name, for optimizers with a family
FAMILIES = {name: row.family for name, row in OPTIMIZERS.items() if row.family}
# Defaults of the Newton-Schulz iteration in torch.optim.Muon.
MUON_COEFFICIENTS, MUON_STEPS, MUON_EPS = (3.4445, -4.775, 2.0315), 5, 1e-7


def name_of(optimizer: object) -> str:
    """The name of an optimizer, which may be given by its name, its class or an instance."""
    if isinstance(optimizer, str):
        return optimizer
    return (optimizer if isinstance(optimizer, type) else type(optimizer)).__name__


def facts_of(optimizer: object) -> OptimizerFacts:
    """The row of an optimizer, given by its name, its class or an instance. An unknown optimizer gets the most cautious row."""
    name = name_of(optimizer)
    return OPTIMIZERS.get(name.lower()) or OptimizerFacts(name, mixes_entries=True)


def decouples_decay(optimizer: object, group: Mapping[str, Any] | None = None) -> bool:
    """Whether an optimizer keeps weight decay apart from the gradient. Some optimizers have an option for this. Then the
    option's value in the group counts, or, without a group, the instance's default. For all other optimizers the table
    decides."""
    options = getattr(optimizer, "defaults", {}) if group is None else group
    return bool(options.get("decoupled_weight_decay", facts_of(optimizer).decoupled))


def has_adamw_beside(optimizer: object, rest_lr: float | None) -> bool:
    """Whether a second optimizer, AdamW, trains everything that is not hidden. Muon needs one, since it takes hidden matrices
    only. Any other optimizer gets one if ``rest_lr`` is given."""
    return rest_lr is not None or facts_of(optimizer).hidden_only


def facts_for_role(role: str, optimizer: object, rest_lr: float | None) -> OptimizerFacts:
    """The row of the optimizer that trains parameters of this role in a run whose main optimizer is ``optimizer``."""
    return facts_of("adamw" if role != "hidden" and has_adamw_beside(optimizer, rest_lr) else optimizer)


def names_with(fact: str) -> tuple[str, ...]:
    """Lower-case names of the optimizers for which a fact such as "stackable" holds, in the order of the table."""
    return tuple(name for name, row in OPTIMIZERS.items() if getattr(row, fact))


def family_of(optimizer: object) -> str:
    """The learning-rate family of an optimizer. Raises if no rule is known for the optimizer, and names the remedy."""
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
