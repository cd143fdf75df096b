"""The audit before step 0: compares a model and its optimizer with the plan, and names every difference with its remedy.

Everything is measured: init and density from the weights, forward factors by running the layer, and learning rates from the
optimizer's groups.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smupar.model.parameterize import BRANCH, FACTOR, has_branch_hook, has_factor_hook, masks_move, unwrapped
from smupar.model.seam import optimizers
from smupar.model.sharding import is_sharded, whole
from smupar.model.weights import ModelWeight, weight_of
from smupar.optim.guard import guard, num_steps, ratio_problem, wrong_groups
from smupar.plan.facts.layers import is_plain_lookup, kind_of, padding_row
from smupar.plan.facts.optimizers import FAMILIES, OPTIMIZERS, OptimizerFacts, facts_of, family_of, name_of
from smupar.plan.plan import Plan, PlanRow, PlanWarning
from smupar.plan.reminders import shows_scale

# The sample std of n weights has a relative standard error of 1 / sqrt(2 n). Chance never reaches six standard errors.
_SIGMAS = 6.0


@dataclass(frozen=True)
class Finding:
    """One difference, as a line for people, and as data for programs: the cause, the name, and the ratio to the plan."""

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


def audit(
    model: nn.Module, plan: Plan, optimizer: Any = None, *, lr: float | None = None, trained: bool | None = None
) -> list[str]:
    """Compares model and optimizer with the plan. Raises AuditError with every difference. Returns the reminders that are still
    open.

    Call it before the first step. Once training has begun, the std of weights is not checked; ``trained`` says whether it has,
    and by default the optimizer's state and the guard show it. With ``lr``, the base learning rate is checked too; without it,
    only ratios between parameters are. ``optimizer`` may be a list.

    The audit calls ``guard`` on the optimizers, which then watches schedulers that are made later.
    """
    findings = differences(model, plan, optimizer, lr=lr, trained=trained)
    if findings:
        raise AuditError(findings)
    guard(optimizer)
    left = [f"{name}: {text}" for name, text in unsettled(model, plan).items()]
    for line in left:
        warnings.warn(f"not set yet: {line}", PlanWarning, stacklevel=2)
    return left


def unsettled(model: nn.Module, plan: Plan) -> dict[str, str]:
    """The plan's open reminders, without the attention scale if the model shows that it is set."""
    seen = "attention_scale" in plan.pending and shows_scale(unwrapped(model), plan.attention_scale)
    return {name: text for name, text in plan.pending.items() if not (seen and name == "attention_scale")}


def differences(
    model: nn.Module, plan: Plan, optimizer: Any = None, *, lr: float | None = None, trained: bool | None = None
) -> list[Finding]:
    """The differences that ``audit`` would raise, as a list."""
    model, all_optimizers = unwrapped(model), optimizers(optimizer)
    parameters = dict(model.named_parameters())
    if trained is None:
        trained = any(num_steps(each) for each in all_optimizers)
    findings = list(_other_parameters(plan, parameters, all_optimizers))
    rows = [row for row in plan if row.name in parameters]
    for row in rows:
        findings += _weights(model, weight_of(model, row.name), row, check_std=not trained and not masks_move(model))
    for row in rows:
        for path, factor in row.forward:
            findings += _forward_factor(model.get_submodule(path), path, factor, row, parameters[row.name].dtype)
    for path, factor in plan.branches:
        findings += _branch_factor(model.get_submodule(path), path, factor)
    return [*findings, *_optimizers(model, plan, parameters, all_optimizers, lr)]


def _other_parameters(
    plan: Plan, parameters: dict[str, nn.Parameter], all_optimizers: list[torch.optim.Optimizer]
) -> Iterator[Finding]:
    """Findings about parameters that only the plan or only the model has. Parameters in the user's own groups are fine."""
    for row in plan:
        if row.name not in parameters:
            yield Finding(
                f"{row.name!r} is not in the model: the plan is for another model, make a new plan", "another model", row.name
            )
    groups = [group for each in all_optimizers for group in each.param_groups if "lr_factor" not in group]
    given_a_group = {id(parameter) for group in groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        if name not in plan and id(parameter) not in given_a_group:
            yield Finding(
                f"{name!r} is not in the plan: add it before parameterize, or give it a group with param_groups(extra=[...])",
                "another model",
                name,
            )


# The weights


def _weights(model: nn.Module, kept: ModelWeight, row: PlanRow, *, check_std: bool) -> Iterator[Finding]:
    weight = kept.full()
    if tuple(weight.shape) != row.shape:
        yield Finding(
            f"{row.name!r} has shape {tuple(weight.shape)}, the plan {row.shape}: make a plan for this model",
            "another model",
            row.name,
        )
        return
    if row.masked and not kept.is_masked:
        yield Finding(f"{row.name!r} has no mask: call smupar.attach(model, plan)", "mask missing", row.name)
        return
    if kept.is_masked:  # by the plan, or by a sparsifier
        yield from _mask(model, kept, weight, row)
    if not bool(torch.isfinite(weight).all()):
        yield Finding(
            f"{row.name!r} holds values that are not finite: initialise it (after to_empty: parameterize(reset=True))",
            "init",
            row.name,
        )
    elif check_std and row.init_std is not None:
        padding = padding_row(kept.module)
        if padding is not None:
            weight = torch.cat([weight[:padding], weight[padding + 1 :]])
        yield from _std(weight[kept.full_mask()] if row.masked else weight.flatten(), row, row.init_std)


def _mask(model: nn.Module, kept: ModelWeight, weight: Tensor, row: PlanRow) -> Iterator[Finding]:
    mask, expected = kept.full_mask(), float(row.density)
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
    num_stray = int(torch.count_nonzero(weight.masked_fill(mask, 0)))
    if num_stray:
        yield Finding(
            f"{row.name!r}: {num_stray} weights off the mask are not 0; something wrote to them after parameterize, "
            "or an optimizer mixes entries: call smupar.attach(model, plan, optimizer) and multiply the weight by its mask",
            "off-mask weights",
            row.name,
        )
    if kept.parameter.requires_grad and not kept.masks_gradient:
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
                f"{row.name!r} is masked, but the weight that its parametrization computes is not: remove it, or keep it dense",
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


# The forward pass


def _forward_factor(module: nn.Module, path: str, factor: float, row: PlanRow, dtype: torch.dtype) -> Iterator[Finding]:
    layer, remedy = f"{path!r} ({row.name!r})", "call smupar.attach(model, plan)"
    cause = "input factor" if row.role == "embedding" and path == row.forward[0][0] else "output factor"
    if not has_factor_hook(module) or not hasattr(module, FACTOR):
        yield Finding(f"{layer} does not apply its forward factor {factor:.6g}: {remedy}", cause, path)
        return
    applied, tolerance = float(getattr(module, FACTOR)), 1e-6
    # a larger difference means that .bfloat16() rounded the buffer, or that somebody changed it
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


def _branch_factor(module: nn.Module, path: str, factor: float) -> Iterator[Finding]:
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
    except Exception:  # a hook of the user may need a real input; then the buffer is trusted
        return None
    finally:
        module.training = training


def _probe_lookup(module: nn.Module, weight: Tensor) -> float | None:
    """The factor that a lookup applies, measured on the largest row of its table."""
    index = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).argmax()[None]
    row = weight[index].double().flatten()
    return float(row @ module(index).double().flatten() / (row @ row)) if row.any() else None


def _probe_input(module: nn.Module, weight: Tensor) -> float:
    """The value of an input of 1 after the hooks before the forward pass."""
    seen: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise StopIteration  # stops here, since the layer cannot compute an output from the probe

    with module.register_forward_pre_hook(stop), suppress(StopIteration):
        module(torch.ones(1, dtype=weight.dtype, device=weight.device))
    return float(seen[0].double())


# The optimizer


@dataclass(frozen=True)
class _Held:
    optimizer: torch.optim.Optimizer
    family: str
    facts: OptimizerFacts  # facts about its family, which users may name for their own optimizer
    planned: list[tuple[PlanRow, dict[str, Any]]]  # (row of the plan, group) of each parameter
    is_masked: bool  # whether any parameter is masked
    lr: float | None


def _optimizers(
    model: nn.Module,
    plan: Plan,
    parameters: dict[str, nn.Parameter],
    all_: list[torch.optim.Optimizer],
    lr: float | None,
) -> Iterator[Finding]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    owners: Counter[str] = Counter()
    for optimizer in all_:
        owned = [(names[id(p)], group) for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        owners.update(name for name, _ in owned)
        try:
            family = _family(optimizer)
        except ValueError as error:
            yield Finding(str(error), "optimizer")
            continue
        facts = next(row for row in OPTIMIZERS.values() if row.family == family)
        planned = [(plan[name], group) for name, group in owned if name in plan]
        masked = any(weight_of(model, name).is_masked for name, _ in owned)
        for check in (_learning_rates, _unused_decay, _other_options):
            yield from check(_Held(optimizer, family, facts, planned, masked, lr))
    if all_:
        yield from _ownership(parameters, owners)


def _family(optimizer: torch.optim.Optimizer) -> str:
    try:
        return family_of(optimizer)
    except ValueError:
        labels = {str(group["family"]) for group in optimizer.param_groups if "family" in group}
        if len(labels) != 1 or not labels <= set(FAMILIES.values()) or facts_of(optimizer).no_rule:
            raise
        return labels.pop()  # an unknown optimizer, whose family the user named in param_groups


def _ownership(parameters: dict[str, nn.Parameter], owners: Counter[str]) -> Iterator[Finding]:
    for name, parameter in parameters.items():
        if parameter.requires_grad and not owners[name]:
            yield Finding(
                f"{name!r} is trained but in no optimizer group: build the groups with smupar.param_groups, "
                "give it a group with extra=[...], or freeze it",
                "optimizer",
                name,
            )
        if owners[name] > 1:
            yield Finding(
                f"{name!r} is in {owners[name]} groups, so it would be updated {owners[name]} times per step: with two "
                "optimizers use param_groups(..., only='hidden') for one and only='rest' for the other",
                "optimizer",
                name,
            )


def _learning_rates(held: _Held) -> Iterator[Finding]:
    """The findings of the first check that has any. Later findings would only be its consequences."""
    yield from next(filter(None, (list(check(held)) for check in (_other_family, _not_hidden, _ratios, _rates))), [])


def _other_family(held: _Held) -> Iterator[Finding]:
    others = [group["family"] for group in held.optimizer.param_groups if group.get("family", held.family) != held.family]
    if others:
        name = name_of(held.optimizer)
        yield Finding(
            f"the groups were made for the {others[0]} family but given to {name}: "
            f"pass optimizer={name.lower()!r} to param_groups",
            "LR",
        )


def _not_hidden(held: _Held) -> Iterator[Finding]:
    if held.facts.hidden_only and any(row.role != "hidden" for row, _ in held.planned):
        yield Finding(
            f"{held.facts.name} was given parameters that are not hidden weights: use param_groups(..., "
            f"optimizer={held.facts.name.lower()!r}, only='hidden')",
            "optimizer",
        )


def _ratios(held: _Held) -> Iterator[Finding]:
    if problem := ratio_problem(held.optimizer):
        scheduled = any("initial_lr" in group for _, group in held.planned)
        base, wrong = wrong_groups(held.optimizer)
        ratio = float(wrong[0]["lr"]) / (base * wrong[0]["lr_factor"]) if base else math.nan
        names = " | ".join(group["name"] for group in wrong)
        members = tuple(row.name for row, group in held.planned if group is wrong[0])
        yield Finding(problem, "scheduler" if scheduled else "LR", names, ratio, members)


def _rates(held: _Held) -> Iterator[Finding]:
    ours = [(row, group) for row, group in held.planned if "lr_factor" in group]
    # If some groups come from param_groups, the rates of other groups are the user's choice. A scheduler stores its initial
    # rate as initial_lr, even while a warm-up holds lr at 0; OneCycleLR stores it as max_lr.
    started = [
        (row.name, row.lr_factor(held.family), float(group.get("max_lr", group.get("initial_lr", group["lr"]))))
        for row, group in ours or held.planned
    ]
    bases = Counter(float(f"{rate / factor:.5g}") for _, factor, rate in started if rate)
    if not bases:
        return
    flat = [rate for _, factor, rate in started if factor == 1 and rate]
    base = held.lr if held.lr is not None else flat[0] if flat else bases.most_common(1)[0][0]
    for name, factor, rate in started:
        if not math.isclose(rate, base * factor, rel_tol=1e-3):
            yield Finding(
                f"{name!r}: learning rate is {rate:.4g}, the plan says {base * factor:.4g} "
                f"(base {base:.4g} x {factor:.6g}, {held.family} family); "
                "build the optimizer from smupar.param_groups(model, plan, lr=...)",
                "LR",
                name,
                rate / (base * factor),
            )


def _unused_decay(held: _Held) -> Iterator[Finding]:
    """Finds weight decay that was passed to the optimizer itself. It has no effect, since every group has its own."""
    given = held.optimizer.defaults.get("weight_decay")
    default = inspect.signature(type(held.optimizer)).parameters.get("weight_decay")
    ours = [group for group in held.optimizer.param_groups if "lr_factor" in group]
    if given is None or default is None or given == default.default or not ours:
        return
    used = [decay for group in ours for decay in (group["weight_decay"], group["weight_decay"] * group["lr_factor"])]
    if not any(math.isclose(given, decay, rel_tol=1e-6) for decay in used):
        yield Finding(
            f"weight_decay={given:g} was given to {name_of(held.optimizer)}, where it has no effect because every group has "
            "its own: pass it to param_groups(..., weight_decay=...)",
            "optimizer",
        )


def _other_options(held: _Held) -> Iterator[Finding]:
    if held.is_masked and any(group.get("eps") == 0 for group in held.optimizer.param_groups):
        yield Finding(
            "with an epsilon of 0, the update of a weight off the mask is 0 / 0, which is NaN: leave epsilon at 1e-8",
            "optimizer",
        )
    if held.facts.hidden_only and any(group.get("adjust_lr_fn") == "match_rms_adamw" for group in held.optimizer.param_groups):
        yield Finding(
            f"{held.facts.name} with adjust_lr_fn='match_rms_adamw' scales its updates differently from the rule: use the "
            "default",
            "LR",
        )
