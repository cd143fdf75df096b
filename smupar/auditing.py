"""The audit before step 0: compares a model and its optimizer with the plan, and names what differs and what to do.

Nothing is taken on trust: init and density are measured on the weights, forward factors by running the layer, learning
rates on the optimizer's groups.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from smupar.apply import (
    FACTOR,
    masks_move,
    masks_updates,
    optimizers,
    scales_output,
    unwrapped,
)
from smupar.optim import guard, num_steps, ratio_problem, wrong_groups
from smupar.plan import Plan, PlanRow
from smupar.planner import PlanWarning
from smupar.rules import FAMILIES, family_of
from smupar.tensors import is_lookup
from smupar.values import is_sharded, whole
from smupar.weights import MaskedWeight, weight_of

# A sample std of n weights scatters by 1 / sqrt(2 n); six of those are never reached by chance.
_SIGMAS = 6.0
# Optimizers of other packages whose updates stay where the gradient is.
_BY_ELEMENT = {"fusedadam", "deepspeedcpuadam", "adam8bit", "adamw8bit", "adamwschedulefree", "sgdschedulefree", "prodigy"}


class Finding(str):
    """A line for the reader, with what a program wants to know: the cause, the parameter, its ratio to the plan."""

    cause: str
    name: str
    ratio: float  # what was measured over what was planned; nan where that means nothing

    def __new__(cls, text: str, cause: str, name: str = "", ratio: float = math.nan) -> Finding:
        finding = super().__new__(cls, text)
        finding.cause, finding.name, finding.ratio = cause, name, ratio
        return finding


class AuditError(ValueError):
    """The model or its optimizer is not what the plan says; ``findings`` has one line for each difference."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        shown = "\n".join(f"  - {line}" for line in findings[:20])
        more = f"\n  ... and {len(findings) - 20} more" if len(findings) > 20 else ""
        super().__init__(f"{len(findings)} differences from the plan:\n{shown}{more}")


def audit(
    model: nn.Module, plan: Plan, optimizer: Any = None, *, lr: float | None = None, trained: bool | None = None
) -> list[str]:
    """Raises AuditError with every difference between model, optimizer and plan; returns what is left to the user.

    Call it before the first step: once training has begun the std of the weights is no longer checked (seen from the
    optimizer's state and the guard; ``trained`` says it outright). ``lr`` also checks the base learning rate itself;
    without it only ratios between parameters are. ``optimizer`` may be a list. Leaves ``guard`` on the optimizers, for
    schedulers that come later.
    """
    findings = differences(model, plan, optimizer, lr=lr, trained=trained)
    if findings:
        raise AuditError(findings)
    guard(optimizer)
    for kind in _may_mix(unwrapped(model), optimizers(optimizer)):
        warnings.warn(
            f"{kind} is not known to update each weight by its own gradient alone; if it does not (preconditioners, centred "
            "gradients, noise), weights off the mask are trained: call smupar.attach(model, plan, optimizer), which masks them",
            PlanWarning,
            stacklevel=2,
        )
    left = [f"{name}: {text}" for name, text in plan.pending.items()]
    for line in left:
        warnings.warn(f"not set yet: {line}", PlanWarning, stacklevel=2)
    return left


def _may_mix(model: nn.Module, all_: list[torch.optim.Optimizer]) -> list[str]:
    """Optimizers nothing is known about that train masked weights and leave their updates unmasked."""
    weights = [weight_of(model, name) for name, _ in model.named_parameters()]
    masked = {id(weight.parameter) for weight in weights if weight.is_masked and weight.stores_zeros}
    return [
        type(one).__name__
        for one in all_
        if type(one).__name__.lower() not in FAMILIES.keys() | _BY_ELEMENT
        and any(id(p) in masked for group in one.param_groups for p in group["params"])
        and not masks_updates(one, model)
    ]


def differences(
    model: nn.Module, plan: Plan, optimizer: Any = None, *, lr: float | None = None, trained: bool | None = None
) -> list[Finding]:
    """What ``audit`` would raise, as a list."""
    model = unwrapped(model)
    parameters = dict(model.named_parameters())
    findings = [
        Finding(f"{row.name!r} is not in the model: the plan is of another one, make a new plan", "another model", row.name)
        for row in plan
        if row.name not in parameters
    ]
    own = {id(p) for one in optimizers(optimizer) for g in one.param_groups if "lr_factor" not in g for p in g["params"]}
    findings += [
        Finding(
            f"{name!r} is not in the plan: add it before parameterize, or give it a group with param_groups(extra=[...])",
            "another model",
            name,
        )
        for name, parameter in parameters.items()
        if name not in plan and id(parameter) not in own
    ]
    rows = [row for row in plan if row.name in parameters]
    if trained is None:
        trained = any(num_steps(one) for one in optimizers(optimizer))
    for row in rows:
        findings += _weights(model, weight_of(model, row.name), row, check_std=not trained and not masks_move(model))
    for row in rows:
        for path, factor in row.forward:
            findings += _forward_factor(model.get_submodule(path), path, factor, row, parameters[row.name].dtype)
    return findings + _optimizers(model, plan, parameters, optimizers(optimizer), lr)


# The weights


def _weights(model: nn.Module, kept: MaskedWeight, row: PlanRow, *, check_std: bool) -> list[Finding]:
    weight = kept.full()
    if tuple(weight.shape) != row.shape:
        text = f"{row.name!r} has shape {tuple(weight.shape)}, the plan {row.shape}: make a plan for this model"
        return [Finding(text, "another model", row.name)]
    if row.masked and not kept.is_masked:
        return [Finding(f"{row.name!r} has no mask: call smupar.attach(model, plan)", "mask missing", row.name)]
    findings = _masked(model, kept, weight, row) if kept.is_masked else []  # by the plan, or added for masks that move
    if not bool(torch.isfinite(weight).all()):
        text = f"{row.name!r} holds values that are not finite: initialise it (after to_empty: parameterize(reset=True))"
        findings.append(Finding(text, "init", row.name))
    elif check_std and row.init_std is not None:
        padding = getattr(kept.module, "padding_idx", None)
        if padding is not None:  # that row is 0
            weight = torch.cat([weight[:padding], weight[padding + 1 :]])
        findings += _std(weight[kept.full_mask()] if row.masked else weight.flatten(), row)
    return findings


def _masked(model: nn.Module, kept: MaskedWeight, weight: Tensor, row: PlanRow) -> list[Finding]:
    mask = kept.full_mask()
    findings = _mask(weight, mask, row, check_density=not masks_move(model))
    if kept.parameter.requires_grad and not kept.masks_gradient:
        text = f"{row.name!r}: its gradient is not masked, the hook is lost; call smupar.attach(model, plan)"
        findings.append(Finding(text, "off-mask weights", row.name))
    path, made, _ = row.name.partition(".parametrizations.")
    if made:
        used = whole(getattr(model.get_submodule(path), row.name.split(".")[-2]).detach())
        if used.shape == mask.shape and used.masked_fill(mask, 0).count_nonzero():
            text = f"{row.name!r} is masked, but what its parametrization makes of it is not: remove that, or keep it dense"
            findings.append(Finding(text, "off-mask weights", row.name))
    return findings


def _mask(weight: Tensor, mask: Tensor, row: PlanRow, *, check_density: bool) -> list[Finding]:
    num_kept, size = int(torch.count_nonzero(mask)), mask.numel()
    expected = float(row.density)
    slack = 0.0 if row.num_kept is not None else _SIGMAS * math.sqrt(expected * (1 - expected) / size)
    findings = []
    if check_density and abs(num_kept / size - expected) > slack + 1e-12:
        text = (
            f"{row.name!r}: its mask keeps {num_kept / size:.6g} of the weights, the plan says {expected:.6g}; "
            "parameterize with that density, or draw the masks again"
        )
        findings.append(Finding(text, "mask density", row.name, num_kept / size / expected))
    stray = int(torch.count_nonzero(weight.masked_fill(mask, 0)))
    if stray:
        text = (
            f"{row.name!r}: {stray} weights off the mask are not 0; something wrote to them after parameterize, "
            "or an optimizer mixes entries: call smupar.attach(model, plan, optimizer) and multiply the weight by its mask"
        )
        findings.append(Finding(text, "off-mask weights", row.name))
    return findings


def _std(kept: Tensor, row: PlanRow) -> list[Finding]:
    assert row.init_std is not None
    num_zero = kept.numel() - int(torch.count_nonzero(kept))
    if row.init_std > 0 and num_zero > max(8, 1e-2 * kept.numel()) and num_zero < kept.numel():
        text = (
            f"{row.name!r}: {num_zero} of its {kept.numel()} kept weights are 0, as if masked a second time; "
            "make it sparse through smupar alone"
        )
        return [Finding(text, "mask density", row.name, 1 - num_zero / kept.numel())]
    # In parts: the whole in double precision takes twice the memory, and in single precision a sum of so many drifts.
    squares = torch.stack([part.double().square().sum() for part in kept.split(2**22)])
    measured = math.sqrt(squares.sum().item() / kept.numel())
    rounding = torch.finfo(kept.dtype).eps
    tolerance = row.init_std * (_SIGMAS / math.sqrt(2 * kept.numel()) + rounding)
    if abs(measured - row.init_std) <= tolerance:
        return []
    text = (
        f"{row.name!r}: init std is {measured:.4g}, the plan says {row.init_std:.4g}; "
        "initialise before parameterize, not after; pass trained=True if training has begun"
    )
    return [Finding(text, "init", row.name, measured / row.init_std if row.init_std else math.inf)]


# The forward pass


def _forward_factor(module: nn.Module, path: str, factor: float, row: PlanRow, dtype: torch.dtype) -> list[Finding]:
    remedy = "call smupar.attach(model, plan)"
    cause = "input factor" if row.role == "embedding" and path == row.forward[0][0] else "output factor"
    if not scales_output(module) or not hasattr(module, FACTOR):
        return [Finding(f"{path!r} ({row.name!r}) does not apply its forward factor {factor:.6g}: {remedy}", cause, path)]
    held = getattr(module, FACTOR)
    measured = _measured_factor(module)
    if not math.isclose(float(held), factor, rel_tol=1e-6):
        measured = float(held)  # rounded by .bfloat16() or changed
    elif measured is None or math.isclose(measured, factor, rel_tol=max(1e-3, torch.finfo(dtype).eps)):
        return []
    text = f"{path!r} ({row.name!r}) multiplies its output by {measured:.8g}, the plan says {factor:.8g}: {remedy}"
    return [Finding(text, cause, path, measured / factor)]


class _Probed(Exception):  # noqa: N818  # leaves a forward pass as soon as its hooks have spoken
    pass


@torch.no_grad()
def _measured_factor(module: nn.Module) -> float | None:
    """What the layer's hooks do to a probe: to the input a layer gets, or to the row that a lookup returns."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or is_sharded(weight):
        return None
    seen: list[Tensor] = []
    if is_lookup(module):
        if type(module) is not nn.Embedding or module.max_norm is not None:  # a forward pass of its own, or one that writes
            return None
        row = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).argmax()[None]
        probe, plain = row, weight[row]
        handle = module.register_forward_hook(lambda _, args, output: seen.append(output))
    else:
        probe = plain = torch.ones(1, dtype=weight.dtype, device=weight.device)

        def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0])
            raise _Probed

        handle = module.register_forward_pre_hook(stop)
    training, module.training = module.training, False  # noise that a hook adds in training is no factor
    try:
        module(probe)
    except Exception as error:
        if not isinstance(error, _Probed):  # a hook of the user's that wants a real input: then the buffer must do
            seen.clear()
    finally:
        module.training = training
        handle.remove()
    if not seen or not plain.any():
        return None
    plain, hooked = plain.double().flatten(), seen[0].double().flatten()
    return float(plain @ hooked / (plain @ plain))


# The optimizer


def _optimizers(
    model: nn.Module,
    plan: Plan,
    parameters: dict[str, nn.Parameter],
    all_: list[torch.optim.Optimizer],
    lr: float | None,
) -> list[Finding]:
    if not all_:
        return []
    names = {id(parameter): name for name, parameter in parameters.items()}
    findings: list[Finding] = []
    owners: Counter[str] = Counter()
    for optimizer in all_:
        groups = optimizer.param_groups
        owners.update(names[id(p)] for group in groups for p in group["params"] if id(p) in names)
        try:
            family = family_of(type(optimizer).__name__)
        except ValueError as error:
            labels = {str(group["family"]) for group in groups if "family" in group}
            if len(labels) != 1 or type(optimizer).__name__ == "Adafactor":
                findings.append(Finding(str(error), "optimizer"))
                continue
            family = labels.pop()  # an optimizer of the user's own, whose family they named in param_groups
        findings += _group_lrs(plan, optimizer, family, names, lr)
        findings += _unused_decay(optimizer)
        owned = [names[id(p)] for group in groups for p in group["params"] if id(p) in names]
        masked = any(weight_of(model, name).is_masked for name in owned)
        if masked and any(group.get("eps") == 0 for group in groups):
            text = "an epsilon of 0 divides 0 by 0 where weights are off the mask, and they become no numbers: leave it at 1e-8"
            findings.append(Finding(text, "optimizer"))
        if family == "muon" and any(group.get("adjust_lr_fn") == "match_rms_adamw" for group in groups):
            text = "Muon with adjust_lr_fn='match_rms_adamw' sizes its update in another way than the rule: use the default"
            findings.append(Finding(text, "LR"))
        if family == "muon" and masked and not masks_updates(optimizer, model):
            text = "Muon mixes entries, so its updates must be masked as well: call smupar.attach(model, plan, optimizer)"
            findings.append(Finding(text, "off-mask weights"))
    for name, parameter in parameters.items():
        if parameter.requires_grad and not owners[name]:
            text = (
                f"{name!r} is trained but in no optimizer group: build the groups with smupar.param_groups, "
                "give it a group with extra=[...], or freeze it"
            )
            findings.append(Finding(text, "optimizer", name))
        if owners[name] > 1:
            text = (
                f"{name!r} is in {owners[name]} groups and would be stepped as often: "
                "with two optimizers use param_groups(..., only='hidden') for one and only='rest' for the other"
            )
            findings.append(Finding(text, "optimizer", name))
    return findings


def _unused_decay(optimizer: torch.optim.Optimizer) -> list[Finding]:
    """Groups have a decay of their own, so one that is given to the optimizer does nothing."""
    kind, given = type(optimizer), optimizer.defaults.get("weight_decay")
    default = inspect.signature(kind).parameters.get("weight_decay")
    ours = [group for group in optimizer.param_groups if "lr_factor" in group]
    if given is None or default is None or given == default.default or not ours:
        return []
    used = [decay for group in ours for decay in (group["weight_decay"], group["weight_decay"] * group["lr_factor"])]
    if any(math.isclose(given, decay, rel_tol=1e-6) for decay in used):
        return []
    text = (
        f"weight_decay={given:g} was given to {kind.__name__}, where it does nothing, since every group has its own: "
        "pass it to param_groups(..., weight_decay=...)"
    )
    return [Finding(text, "optimizer")]


def _group_lrs(
    plan: Plan, optimizer: torch.optim.Optimizer, family: str, owned: dict[int, str], lr: float | None
) -> list[Finding]:
    kind = type(optimizer).__name__
    planned: list[tuple[PlanRow, dict[str, Any]]] = []
    for group in optimizer.param_groups:
        made_for = group.get("family", family)
        if made_for != family:
            text = (
                f"the groups were made for the {made_for} family but given to {kind}: "
                f"pass optimizer={kind.lower()!r} to param_groups"
            )
            return [Finding(text, "LR")]
        planned += [(plan[owned[id(p)]], group) for p in group["params"] if owned.get(id(p)) in plan]
    if family == "muon" and any(row.role != "hidden" for row, _ in planned):
        text = "Muon was given parameters that are not hidden weights: use param_groups(..., optimizer='muon', only='hidden')"
        return [Finding(text, "optimizer")]
    problem = ratio_problem(optimizer)
    if problem:
        scheduled = any("initial_lr" in group for _, group in planned)
        base, wrong = wrong_groups(optimizer)
        ratio = float(wrong[0]["lr"]) / (base * wrong[0]["lr_factor"]) if base else math.nan
        names = " | ".join(group["name"] for group in wrong)
        return [Finding(problem, "scheduler" if scheduled else "LR", names, ratio)]
    if any("lr_factor" in group for _, group in planned):  # beside groups of ours, others are the user's own choice
        planned = [(row, group) for row, group in planned if "lr_factor" in group]
    # A scheduler keeps the rate it started from as initial_lr, also while a warm-up holds lr at 0; OneCycleLR as max_lr.
    rates = [(row, float(group.get("max_lr", group.get("initial_lr", group["lr"])))) for row, group in planned]
    bases = Counter(float(f"{rate / row.lr_factor(family):.5g}") for row, rate in rates if rate)
    if not bases:
        return []
    flat = [rate for row, rate in rates if row.lr_factor(family) == 1 and rate]
    base = lr if lr is not None else flat[0] if flat else bases.most_common(1)[0][0]
    return [
        Finding(
            f"{row.name!r}: learning rate is {rate:.4g}, the plan says {base * row.lr_factor(family):.4g} "
            f"(base {base:.4g} x {row.lr_factor(family):.6g}, {family} family); "
            "build the optimizer from smupar.param_groups(model, plan, lr=...)",
            "LR",
            row.name,
            rate / (base * row.lr_factor(family)),
        )
        for row, rate in rates
        if not math.isclose(rate, base * row.lr_factor(family), rel_tol=1e-3)
    ]
