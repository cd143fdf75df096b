"""smupar: tune a small dense model, then train wide sparse ones with the same hyperparameters.

The public names, found on first use so that ``smupar --help`` does not have to wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smupar.apply import attach, parameterize
    from smupar.auditing import AuditError, audit
    from smupar.coordinates.check import coord_check
    from smupar.coordinates.report import Report
    from smupar.dynamic.at_init import fan_in_init, magnitude_masks, snip_masks
    from smupar.dynamic.pruning import GMP, IMP
    from smupar.dynamic.sparsifiers import SET, RigL
    from smupar.layers import register_layer
    from smupar.masks import er, erk, uniform
    from smupar.optim import LRRatioWarning, guard, param_groups
    from smupar.plan import Plan
    from smupar.planner import PlanWarning, make_plan
    from smupar.sparse.convert import StorageReport, dense_state_dict, sparsify_storage
    from smupar.sparse.products import SparseWarning
    from smupar.stacked import train_stacked
    from smupar.updates.meter import UpdatesWarning, follow_updates, record_updates
    from smupar.updates.trace import Trace

__version__ = "0.1.0"

_WHERE = {
    "parameterize": "apply",
    "attach": "apply",
    "make_plan": "planner",
    "Plan": "plan",
    "PlanWarning": "planner",
    "register_layer": "layers",
    "uniform": "masks",
    "er": "masks",
    "erk": "masks",
    "param_groups": "optim",
    "guard": "optim",
    "LRRatioWarning": "optim",
    "train_stacked": "stacked",
    "RigL": "dynamic.sparsifiers",
    "SET": "dynamic.sparsifiers",
    "GMP": "dynamic.pruning",
    "IMP": "dynamic.pruning",
    "magnitude_masks": "dynamic.at_init",
    "snip_masks": "dynamic.at_init",
    "fan_in_init": "dynamic.at_init",
    "sparsify_storage": "sparse.convert",
    "dense_state_dict": "sparse.convert",
    "StorageReport": "sparse.convert",
    "SparseWarning": "sparse.products",
    "record_updates": "updates.meter",
    "follow_updates": "updates.meter",
    "Trace": "updates.trace",
    "UpdatesWarning": "updates.meter",
    "audit": "auditing",
    "AuditError": "auditing",
    "coord_check": "coordinates.check",
    "Report": "coordinates.report",
}

__all__ = [
    "GMP",
    "IMP",
    "SET",
    "AuditError",
    "LRRatioWarning",
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
    "param_groups",
    "parameterize",
    "record_updates",
    "register_layer",
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
