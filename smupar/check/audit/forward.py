"""Audits the forward factors of a model, by running its layers on probes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn

from smupar.check.audit.findings import Finding
from smupar.model.factors import BRANCH, FACTOR, has_branch_hook, has_factor_hook
from smupar.model.sharding import is_sharded
from smupar.plan.facts.layers import is_plain_lookup, kind_of
from smupar.plan.plan import PlanRow


def factor_findings(module: nn.Module, path: str, factor: float, row: PlanRow, dtype: torch.dtype) -> Iterator[Finding]:
    layer, remedy = f"{path!r} ({row.name!r})", "call smupar.attach(model, plan)"
    cause = "input factor" if row.role == "embedding" and path == row.forward[0][0] else "output factor"
    if not has_factor_hook(module) or not hasattr(module, FACTOR):
        yield Finding(f"{layer} does not apply its forward factor {factor:.6g}: {remedy}", cause, path)
        return
    applied, tolerance = float(getattr(module, FACTOR)), 1e-6
    # A larger difference means that .bfloat16() rounded the buffer, or that other code changed it.
    if math.isclose(applied, factor, rel_tol=tolerance):
        measured = _measured_factor(module)
        applied, tolerance = factor if measured is None else measured, max(1e-3, torch.finfo(dtype).eps)
    if not math.isclose(applied, factor, rel_tol=tolerance):
        yield Finding(
            f"{layer} multiplies its output by {applied:.8g}, the plan says {factor:.8g}: {remedy}",
            cause,
            path,
            applied / factor,
        )


def branch_findings(module: nn.Module, path: str, factor: float) -> Iterator[Finding]:
    applied = float(getattr(module, BRANCH)) if has_branch_hook(module) and hasattr(module, BRANCH) else 1.0
    if not math.isclose(applied, factor, rel_tol=1e-6):
        yield Finding(
            f"{path!r} ends a residual branch and multiplies its output by {applied:.6g}, the plan says {factor:.6g}: call "
            "smupar.attach(model, plan)",
            "branch factor",
            path,
            applied / factor,
        )


@torch.no_grad()
def _measured_factor(module: nn.Module) -> float | None:
    """Measures the factor that a layer's hooks apply to its input, or to the row that a lookup returns."""
    kind = kind_of(module)
    weight = getattr(module, kind.weights, None)
    if not isinstance(weight, Tensor) or is_sharded(weight) or (kind.is_lookup and not is_plain_lookup(module)):
        return None
    training, module.training = module.training, False  # a hook may add noise in training
    try:
        return _probe_lookup(module, weight) if kind.is_lookup else _probe_input(module, weight)
    except Exception:  # a hook of the user may need a real input; the buffer's value is then taken as the factor
        return None
    finally:
        module.training = training


def _probe_lookup(module: nn.Module, weight: Tensor) -> float | None:
    """The factor that a lookup applies, measured on the largest row of its table."""
    index = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).argmax()[None]
    row = weight[index].double().flatten()
    return float(row @ module(index).double().flatten() / (row @ row)) if row.any() else None


def _probe_input(module: nn.Module, weight: Tensor) -> float:
    """The factor on a layer's input: what the hooks before the forward pass make of an input of 1."""
    seen: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise StopIteration  # stops here, since the layer cannot compute an output from the probe

    with module.register_forward_pre_hook(stop), suppress(StopIteration):
        module(torch.ones(1, dtype=weight.dtype, device=weight.device))
    return float(seen[0].double())
