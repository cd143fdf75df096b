"""Audits the weights of a model: their shapes, masks and initial values."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from smupar.check.audit.findings import Finding
from smupar.model.attached import masks_move
from smupar.model.sharding import whole
from smupar.model.weights import ModelWeight
from smupar.plan.facts.layers import padding_row
from smupar.plan.plan import PlanRow

# The std of a sample of n weights has a relative standard error of 1 / sqrt(2 n). A difference of six standard errors is not
# due to chance.
_SIGMAS = 6.0


def weight_findings(model: nn.Module, weight: ModelWeight, row: PlanRow, *, check_std: bool) -> Iterator[Finding]:
    values = weight.full()
    if tuple(values.shape) != row.shape:
        yield Finding(
            f"{row.name!r} has shape {tuple(values.shape)}, the plan {row.shape}: make a plan for this model",
            "another model",
            row.name,
        )
        return
    if row.masked and not weight.is_masked:
        yield Finding(f"{row.name!r} has no mask: call smupar.attach(model, plan)", "mask missing", row.name)
        return
    if weight.is_masked:  # by the plan, or by a sparsifier
        yield from _mask(model, weight, values, row)
    if not bool(torch.isfinite(values).all()):
        yield Finding(
            f"{row.name!r} holds values that are not finite: initialise it (after to_empty: parameterize(reset=True))",
            "init",
            row.name,
        )
    elif check_std and row.init_std is not None:
        padding = padding_row(weight.module)
        if padding is not None:
            values = torch.cat([values[:padding], values[padding + 1 :]])
        yield from _std(values[weight.full_mask()] if row.masked else values.flatten(), row, row.init_std)


def _mask(model: nn.Module, weight: ModelWeight, values: Tensor, row: PlanRow) -> Iterator[Finding]:
    mask, expected = weight.full_mask(), float(row.density)
    density = int(torch.count_nonzero(mask)) / mask.numel()
    slack = 0.0 if row.num_kept is not None else _SIGMAS * math.sqrt(expected * (1 - expected) / mask.numel())
    if not masks_move(model) and abs(density - expected) > slack + 1e-12:
        yield Finding(
            f"{row.name!r}: its mask keeps {density:.6g} of the weights, the plan says {expected:.6g}; "
            "parameterize with that density, or draw the masks again",
            "mask density",
            row.name,
            density / expected,
        )
    num_stray = int(torch.count_nonzero(values.masked_fill(mask, 0)))
    if num_stray:
        yield Finding(
            f"{row.name!r}: {num_stray} weights off the mask are not 0; something wrote to them after parameterize, "
            "or an optimizer mixes entries: call smupar.attach(model, plan, optimizer) and multiply the weight by its mask",
            "off-mask weights",
            row.name,
        )
    if weight.parameter.requires_grad and not weight.masks_gradient:
        yield Finding(
            f"{row.name!r}: its gradient is not masked, the hook is lost; call smupar.attach(model, plan)",
            "off-mask weights",
            row.name,
        )
    path, is_parametrized, _ = row.name.partition(".parametrizations.")
    if is_parametrized:
        used = whole(getattr(model.get_submodule(path), row.name.split(".")[-2]).detach())
        if used.shape == mask.shape and used.masked_fill(mask, 0).count_nonzero():
            yield Finding(
                f"{row.name!r} has a mask, but its parametrization computes a weight with entries off the mask: remove the "
                "parametrization, or keep the weight dense",
                "off-mask weights",
                row.name,
            )


def _std(kept: Tensor, row: PlanRow, planned: float) -> Iterator[Finding]:
    size = kept.numel()
    num_zero = size - int(torch.count_nonzero(kept))
    if planned > 0 and max(8, 1e-2 * size) < num_zero < size:
        yield Finding(
            f"{row.name!r}: {num_zero} of its {size} kept weights are 0, as if it was masked a second time; make it sparse "
            "with smupar only",
            "mask density",
            row.name,
            1 - num_zero / size,
        )
        return
    # Squares are summed in parts: a copy in double precision would need twice the memory, and a long sum in single precision
    # would be inaccurate.
    squares = torch.stack([part.double().square().sum() for part in kept.split(2**22)])
    measured = math.sqrt(squares.sum().item() / size)
    if abs(measured - planned) > planned * (_SIGMAS / math.sqrt(2 * size) + torch.finfo(kept.dtype).eps):
        yield Finding(
            f"{row.name!r}: init std is {measured:.4g}, the plan says {planned:.4g}; "
            "initialise before parameterize, not after; pass trained=True if training has begun",
            "init",
            row.name,
            measured / planned if planned else math.inf,
        )
