"""smupar: tune a small dense model, then train wide sparse ones with the same hyperparameters.

Public names are imported on first use, so that ``smupar --help`` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smupar.check.audit.audit import audit
    from smupar.check.audit.findings import AuditError
    from smupar.check.coord_check import coord_check
    from smupar.check.coordinates.report import Report
    from smupar.dynamic.at_init import fan_in_init, magnitude_masks, snip_masks
    from smupar.dynamic.methods import GMP, IMP, SET, RigL
    from smupar.execute.sparse.convert import StorageReport, dense_state_dict, sparsify_storage
    from smupar.execute.sparse.library import SparseWarning
    from smupar.execute.stack.stack import train_stacked
    from smupar.model.attention_scale import set_attention_scale
    from smupar.model.parameterize import attach, parameterize
    from smupar.optim.groups import param_groups
    from smupar.optim.guard import LRRatioWarning, guard
    from smupar.plan.facts.layers import register_layer
    from smupar.plan.make import make_plan
    from smupar.plan.masks.allocations import er, erk, uniform
    from smupar.plan.plan import Plan, PlanWarning
    from smupar.updates.meter import UpdatesWarning, follow_updates, record_updates
    from smupar.updates.observation import Observation
    from smupar.updates.observer import observe
    from smupar.updates.trace import Trace

__version__ = "0.2.0"

_WHERE = {
    "parameterize": "model.parameterize",
    "attach": "model.parameterize",
    "set_attention_scale": "model.attention_scale",
    "make_plan": "plan.make",
    "Plan": "plan.plan",
    "PlanWarning": "plan.plan",
    "register_layer": "plan.facts.layers",
    "uniform": "plan.masks.allocations",
    "er": "plan.masks.allocations",
    "erk": "plan.masks.allocations",
    "param_groups": "optim.groups",
    "guard": "optim.guard",
    "LRRatioWarning": "optim.guard",
    "train_stacked": "execute.stack.stack",
    "RigL": "dynamic.methods",
    "SET": "dynamic.methods",
    "GMP": "dynamic.methods",
    "IMP": "dynamic.methods",
    "magnitude_masks": "dynamic.at_init",
    "snip_masks": "dynamic.at_init",
    "fan_in_init": "dynamic.at_init",
    "sparsify_storage": "execute.sparse.convert",
    "dense_state_dict": "execute.sparse.convert",
    "StorageReport": "execute.sparse.convert",
    "SparseWarning": "execute.sparse.library",
    "record_updates": "updates.meter",
    "follow_updates": "updates.meter",
    "Trace": "updates.trace",
    "UpdatesWarning": "updates.meter",
    "observe": "updates.observer",
    "Observation": "updates.observation",
    "audit": "check.audit.audit",
    "AuditError": "check.audit.findings",
    "coord_check": "check.coord_check",
    "Report": "check.coordinates.report",
}

__all__ = [
    "GMP",
    "IMP",
    "SET",
    "AuditError",
    "LRRatioWarning",
    "Observation",
    "Plan",
    "PlanWarning",
    "Report",
    "RigL",
    "SparseWarning",
    "StorageReport",
    "Trace",
    "UpdatesWarning",
    "attach",
    "audit",
    "coord_check",
    "dense_state_dict",
    "er",
    "erk",
    "fan_in_init",
    "follow_updates",
    "guard",
    "magnitude_masks",
    "make_plan",
    "observe",
    "param_groups",
    "parameterize",
    "record_updates",
    "register_layer",
    "set_attention_scale",
    "snip_masks",
    "sparsify_storage",
    "train_stacked",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'smupar' has no attribute {name!r}")
    return getattr(import_module(f"smupar.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
