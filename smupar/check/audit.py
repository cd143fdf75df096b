"""The audit before step 0: compares a model and its optimizer with the plan, and names what differs and what to do.

Nothing is taken on trust: init and density are measured on the weights, forward factors by running the layer, learning
rates on the optimizer's groups.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smupar.model.parameterize import FACTOR, has_factor_hook, masks_move, unwrapped
from smupar.model.sharding import is_sharded, whole
from smupar.model.stepping import optimizers
from smupar.model.weights import MaskedWeight, weight_of
from smupar.optim.guard import guard, num_steps, ratio_problem, wrong_groups
from smupar.plan.layers import is_plain_lookup, kind_of
from smupar.plan.optimizers import OPTIMIZERS, OptimizerFacts, facts_of, family_of, name_of
from smupar.plan.plan import Plan, PlanRow, PlanWarning
from smupar.plan.reminders import shows_scale

# A sample std of n weights scatters by 1 / sqrt(2 n); six of those are never reached by chance.
_SIGMAS = 6.0


@dataclass(frozen=True)
class Finding:
    """A line for the reader, with what a program wants to know: the cause, the parameter, its ratio to the plan."""

    text: str
    cause: str
    name: str = ""
    ratio: float = math.nan  # what was measured over what was planned; nan where that means nothing

    def __str__(self) -> str:
        return self.text


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
    left = [f"{name}: {text}" for name, text in unsettled(model, plan).items()]
    for line in left:
        warnings.warn(f"not set yet: {line}", PlanWarning, stacklevel=2)
    return left


def unsettled(model: nn.Module, plan: Plan) -> dict[str, str]:
    """The plan's reminders without the attention scale, where the model shows that it is set."""
    seen = "attention_scale" in plan.pending and shows_scale(unwrapped(model), plan.attention_scale)
    return {name: text for name, text in plan.pending.items() if not (seen and name == "attention_scale")}


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
    if not has_factor_hook(module) or not hasattr(module, FACTOR):
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
    kind = kind_of(module)
    weight = getattr(module, kind.weights, None)
    if not isinstance(weight, Tensor) or is_sharded(weight):
        return None
    seen: list[Tensor] = []
    if kind.is_lookup:
        if not is_plain_lookup(module):
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


@dataclass(frozen=True)
class _Held:
    """An optimizer with what the plan says about its parameters."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    family: str
    names: list[str]  # all parameters of the model that it holds
    planned: list[tuple[PlanRow, dict[str, Any]]]  # those of the plan, with their groups
    lr: float | None

    @property
    def facts(self) -> OptimizerFacts:
        """Those of the optimizer that the family is called after: the user may have named it for one of their own."""
        return OPTIMIZERS[self.family]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


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
        owned = [(names[id(p)], group) for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        owners.update(name for name, _ in owned)
        family = _family(optimizer)
        if isinstance(family, Finding):
            findings.append(family)
            continue
        planned = [(plan[name], group) for name, group in owned if name in plan]
        held = _Held(model, optimizer, family, [name for name, _ in owned], planned, lr)
        findings += (finding for check in _CHECKS for finding in check(held))
    return [*findings, *_ownership(parameters, owners)]


def _family(optimizer: torch.optim.Optimizer) -> str | Finding:
    try:
        return family_of(optimizer)
    except ValueError as error:
        labels = {str(group["family"]) for group in optimizer.param_groups if "family" in group}
        if len(labels) != 1 or facts_of(optimizer).no_rule:
            return Finding(str(error), "optimizer")
        return labels.pop()  # an optimizer of the user's own, whose family they named in param_groups


def _ownership(parameters: dict[str, nn.Parameter], owners: Counter[str]) -> Iterator[Finding]:
    for name, parameter in parameters.items():
        if parameter.requires_grad and not owners[name]:
            text = (
                f"{name!r} is trained but in no optimizer group: build the groups with smupar.param_groups, "
                "give it a group with extra=[...], or freeze it"
            )
            yield Finding(text, "optimizer", name)
        if owners[name] > 1:
            text = (
                f"{name!r} is in {owners[name]} groups and would be stepped as often: "
                "with two optimizers use param_groups(..., only='hidden') for one and only='rest' for the other"
            )
            yield Finding(text, "optimizer", name)


def _learning_rates(held: _Held) -> Iterator[Finding]:
    """What the first of these has to say: what comes later would follow from it."""
    checks = (_other_family, _not_hidden, _ratios, _rates)
    yield from next(filter(None, (list(check(held)) for check in checks)), [])


def _other_family(held: _Held) -> Iterator[Finding]:
    others = [group["family"] for group in held.groups if group.get("family", held.family) != held.family]
    if others:
        kind = name_of(held.optimizer)
        text = (
            f"the groups were made for the {others[0]} family but given to {kind}: "
            f"pass optimizer={kind.lower()!r} to param_groups"
        )
        yield Finding(text, "LR")


def _not_hidden(held: _Held) -> Iterator[Finding]:
    if held.facts.hidden_only and any(row.role != "hidden" for row, _ in held.planned):
        kind = held.facts.name
        remedy = f"use param_groups(..., optimizer={kind.lower()!r}, only='hidden')"
        yield Finding(f"{kind} was given parameters that are not hidden weights: {remedy}", "optimizer")


def _ratios(held: _Held) -> Iterator[Finding]:
    problem = ratio_problem(held.optimizer)
    if problem:
        scheduled = any("initial_lr" in group for _, group in held.planned)
        base, wrong = wrong_groups(held.optimizer)
        ratio = float(wrong[0]["lr"]) / (base * wrong[0]["lr_factor"]) if base else math.nan
        yield Finding(problem, "scheduler" if scheduled else "LR", " | ".join(group["name"] for group in wrong), ratio)


def _rates(held: _Held) -> Iterator[Finding]:
    ours = [(row, group) for row, group in held.planned if "lr_factor" in group]
    # Beside groups of ours, others are the user's own choice. A scheduler keeps the rate it started from as initial_lr, also
    # while a warm-up holds lr at 0; OneCycleLR as max_lr.
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
            text = (
                f"{name!r}: learning rate is {rate:.4g}, the plan says {base * factor:.4g} "
                f"(base {base:.4g} x {factor:.6g}, {held.family} family); "
                "build the optimizer from smupar.param_groups(model, plan, lr=...)"
            )
            yield Finding(text, "LR", name, rate / (base * factor))


def _unused_decay(held: _Held) -> Iterator[Finding]:
    """Groups have a decay of their own, so one that is given to the optimizer does nothing."""
    kind, given = type(held.optimizer), held.optimizer.defaults.get("weight_decay")
    default = inspect.signature(kind).parameters.get("weight_decay")
    ours = [group for group in held.groups if "lr_factor" in group]
    if given is None or default is None or given == default.default or not ours:
        return
    used = [decay for group in ours for decay in (group["weight_decay"], group["weight_decay"] * group["lr_factor"])]
    if not any(math.isclose(given, decay, rel_tol=1e-6) for decay in used):
        text = (
            f"weight_decay={given:g} was given to {kind.__name__}, where it does nothing, since every group has its own: "
            "pass it to param_groups(..., weight_decay=...)"
        )
        yield Finding(text, "optimizer")


def _no_epsilon(held: _Held) -> Iterator[Finding]:
    masked = any(weight_of(held.model, name).is_masked for name in held.names)
    if masked and any(group.get("eps") == 0 for group in held.groups):
        text = "an epsilon of 0 divides 0 by 0 where weights are off the mask, and they become no numbers: leave it at 1e-8"
        yield Finding(text, "optimizer")


def _other_size(held: _Held) -> Iterator[Finding]:
    if held.facts.hidden_only and any(group.get("adjust_lr_fn") == "match_rms_adamw" for group in held.groups):
        text = "with adjust_lr_fn='match_rms_adamw' sizes its update in another way than the rule: use the default"
        yield Finding(f"{held.facts.name} {text}", "LR")


_CHECKS = (_learning_rates, _unused_decay, _no_epsilon, _other_size)
"""What is looked at in an optimizer, each a function from it to findings."""
