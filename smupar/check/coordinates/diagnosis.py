"""Diagnoses a failed check: which layers, which quantity, from which step on, in which direction, the cause and the remedy.

Findings of the audit name the cause. Without such findings, the slopes suggest one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from smupar.check.audit.findings import Finding
from smupar.check.coordinates.readings import AXES, DY, GRAD_X, Cell, GridPoint, Y
from smupar.check.coordinates.verdict import FAIL, Slope, decides
from smupar.plan.globs import layer_glob
from smupar.plan.plan import Plan
from smupar.plan.roles.parameters import parent_path
from smupar.rules import DEPTH_MUP, get_rule

REMEDIES = {
    "init": "init not corrected: initialise before parameterize, not after, which would overwrite its init",
    "LR": "LR not corrected: build the optimizer from smupar.param_groups and leave the groups' rates alone",
    "scheduler": "LR erased by a scheduler: use one that multiplies (LambdaLR; CosineAnnealingLR with eta_min=0; OneCycleLR "
    "with a list of max_lr)",
    "attention scale": "attention scale missing: set your model's scale to plan.attention_scale(head_dim) in prepare, "
    "and plan.settle('attention_scale')",
    "output factor": "output factor missing: call smupar.attach(model, plan), or multiply the logits by plan.output_factor "
    "where your model computes them",
    "input factor": "input factor missing: call smupar.attach(model, plan), or multiply by alpha_input yourself",
    "multipliers": "a number of the model follows the width: pass multipliers='base' to coord_check, as to parameterize, or "
    "'own' if the number has to follow it",
    "embedding as hidden": "embedding scaled like a hidden weight: its init and Adam learning rate do not follow the width; "
    "give it the role 'embedding'",
    "mask density": "mask density differs from the plan: make the layer sparse through parameterize only",
    "mask missing": "mask missing: call smupar.attach(model, plan)",
    "off-mask weights": "off-mask weights moving: call smupar.attach(model, plan, optimizer), and write to no weight yourself",
    "decay": "decay coupled to the learning rate: use param_groups(..., decay='independent')",
    "decay missing": "decay missing: pass weight_decay to param_groups, such as 0.1, with the default decay='independent'",
    "decay stopped": "decay stopped: keep weight decay on until the end of the run",
    "decay uneven": "decay differs between layers: use param_groups(..., decay='independent') for all, and leave groups alone",
    "masks move": "masks move until the end: stop them before the last quarter of the run (stop=)",
    "masks moved": "masks moved, and the rule assumes random masks: follow measured updates, or lower the learning rate",
    "schedule": "the learning rate ends too high: let it decrease to a tenth of its peak, or to zero",
    "few weights": "the learning rate is too large for so few weights per neuron: lower it, keep more weights, or try "
    "rule='smupar-aligned'",
    "thin": "too few weights per neuron for the rule: use a higher density or a wider model",
    "too thin": "too few weights per neuron for the rule: leave such points out, or use a higher density or a wider model",
    "optimizer": "the optimizer does not hold what the plan expects: build it from smupar.param_groups",
    "another model": "the model is not the one that was planned: add nothing after parameterize",
    "diverged": "training diverged: lower the learning rate",
    "no updates": "nothing was trained: give coord_check a learning rate, and an optimizer with the model's parameters",
    "unmeasured": "not measured: these matrices belong to no module that can be called again with other weights",
    "uncalled": "factor not applied: the forward pass never calls these layers; call them, or multiply the products with their "
    "weights by the plan's factor yourself",
    "elsewhere": "the cause is not what smupar sets (init, rates, factors and masks are as planned): look at the forward and "
    "backward pass of these places",
    "branch factor": "the outputs of residual branches are not what the plan says: call smupar.attach(model, plan)",
    "no depth rule": "nothing divides the residual branches of deeper models: name them with branches=[...] and use "
    "depth='completep', the default of SmuPar's rules",
    "lazy": "with alpha 1/2, what layers learn inside a branch falls with the depth: use depth='completep' if they should "
    "learn as much at every depth",
    "branch missing": "the outputs of these layers in blocks reach the loss without passing a divided branch: unless they are "
    "shortcuts, add the module that ends their branch to branches=[...]",
    "branch twice": "residual branches are divided twice: the model scales them by its depth itself. Compute the model's "
    "factor from the base's depth, or pass depth='none'",
    "rule": "the rule itself does not correct for this axis: use rule='smupar'",
}


ENOUGH_WEIGHTS = 64  # weights per neuron with which the sizes of a layer hold


@dataclass(frozen=True)
class Diagnosis:
    """One cause, the places where it shows, and the remedy."""

    rule: str
    cause: str
    places: tuple[str, ...]  # layers or groups
    evidence: str

    @property
    def is_caution(self) -> bool:
        """Whether this is only a note: a check whose sizes are flat still passes."""
        return self.cause in ("decay", "thin", "unmeasured", "uncalled", "branch missing")

    def __str__(self) -> str:
        where = ", ".join(self.places[:4]) + (f" and {len(self.places) - 4} more" if len(self.places) > 4 else "")
        return f"{REMEDIES[self.cause]}" + (f" [{where}]" if where else "") + (f". {self.evidence}" if self.evidence else "")


def diagnose(
    rule: str, slopes: Iterable[Slope], faults: Mapping[Cell, list[Finding]], plans: Mapping[GridPoint, Plan]
) -> list[Diagnosis]:
    plans = {point: plan for point, plan in plans.items() if point.rule == rule}
    thin = _thin(rule, plans)
    diagnoses = _from_faults(rule, faults, plans) + thin
    failing = [slope for slope in slopes if slope.rule == rule and slope.verdict == FAIL and decides(slope)]
    if failing and all(diagnosis.is_caution for diagnosis in diagnoses):
        found = _from_slopes(rule, failing, plans)
        is_cause = any(diagnosis.cause == "too thin" for diagnosis in found)
        diagnoses = [diagnosis for diagnosis in diagnoses if not (is_cause and diagnosis in thin)] + found
    return diagnoses


def _from_faults(rule: str, faults: Mapping[Cell, list[Finding]], plans: Mapping[GridPoint, Plan]) -> list[Diagnosis]:
    lines: dict[str, dict[str, str]] = defaultdict(dict)  # cause -> place -> what was seen
    for cell, findings in faults.items():
        for finding in findings if cell.rule == rule else []:
            cause = _embedding_cause(finding, plans[cell.point]) or finding.cause
            lines[cause].setdefault(finding.name, f"Seen at {cell}: {finding}")
    return [
        Diagnosis(rule, cause, tuple(name for name in seen if name), next(iter(seen.values()))) for cause, seen in lines.items()
    ]


def _embedding_cause(finding: Finding, plan: Plan) -> str | None:
    """The cause "embedding as hidden" if an embedding's init or rate is off by exactly the factor of a hidden weight."""
    named = (plan[name] for name in finding.parameters or (finding.name,) if name in plan)
    row = next((row for row in named if row.role == "embedding"), None)
    if finding.cause not in ("init", "LR") or row is None:
        return None
    hidden = get_rule(plan.rule).init_var["hidden"] if finding.cause == "init" else get_rule(plan.rule).lr["adam"]["hidden"]
    factor = float(hidden.of(row.width_out, row.width_out, 1)) ** (0.5 if finding.cause == "init" else 1)
    return "embedding as hidden" if factor != 1 and abs(finding.ratio / factor - 1) < 0.05 else None


def _thin(rule: str, plans: Mapping[GridPoint, Plan]) -> list[Diagnosis]:
    seen = {
        f"width {point.width}, density {point.density:g}": note
        for point, plan in plans.items()
        for note in plan.notes
        if note.kind == "thin"
    }
    return [Diagnosis(rule, "thin", (), f"At {'; '.join(seen)}: {next(iter(seen.values()))}")] if seen else []


def _from_slopes(rule: str, failing: list[Slope], plans: Mapping[GridPoint, Plan]) -> list[Diagnosis]:
    by_axis: dict[str, list[Slope]] = defaultdict(list)
    for slope in failing:
        by_axis[slope.axis].append(slope)
    diagnoses = []
    for axis, slopes in by_axis.items():
        cause, evidence = _cause(rule, axis, slopes, plans.values()), _evidence(slopes)
        thin = _thin(rule, {point: plan for point, plan in plans.items() if any(_ran_at(slope, point) for slope in slopes)})
        few = _few_weights(slopes, plans)
        if cause == "elsewhere" and axis != "depth" and (thin or few):
            cause, evidence = "too thin", f"{evidence}. {few or thin[0].evidence}"
        diagnoses.append(Diagnosis(rule, cause, tuple(folded(slopes)), evidence))
    return diagnoses


def _few_weights(slopes: list[Slope], plans: Mapping[GridPoint, Plan]) -> str:
    """Says how many weights per neuron the failing layers have where they have fewest; "" if some failing place has enough."""
    fewest: list[tuple[float, str, GridPoint]] = []
    for slope in slopes:
        points = [(point, plan) for point, plan in plans.items() if _ran_at(slope, point)]
        rows = [
            (point, row)
            for point, plan in points
            for row in plan
            if row.role == "hidden" and parent_path(row.name) == slope.place
        ]
        kept = [(math.prod(row.shape[dim] for dim in row.in_dims) * float(row.density), row.name, point) for point, row in rows]
        if not kept or min(kept)[0] >= ENOUGH_WEIGHTS:
            return ""
        fewest.append(min(kept))
    number, name, point = min(fewest)
    where = f"width {point.width}, density {point.density:g}"
    return f"{name!r} has {number:g} weights per neuron at {where}, and needs {ENOUGH_WEIGHTS}"


def _ran_at(slope: Slope, point: GridPoint) -> bool:
    """Whether the point is one of those that the slope was fitted to."""
    return all(value in (None, getattr(point, axis)) for axis, value in zip(AXES, slope.at, strict=True))


def folded(slopes: Iterable[Slope]) -> list[str]:
    """The places of slopes. The same place in several blocks is listed once, as a glob."""
    places = dict.fromkeys(slope.place for slope in slopes)
    globs = {place: layer_glob(place) for place in places}
    return list(dict.fromkeys((globs[place] if globs[place].strip("*.") else place) or "logits" for place in places))


def _cause(rule: str, axis: str, failing: list[Slope], plans: Collection[Plan]) -> str:
    """The likely cause if sizes are not flat although the audit found nothing."""
    if axis == "depth":
        return _cause_over_depth(failing, plans)
    has_readout = any(len(row.forward) > 1 or row.role == "unembedding" for plan in plans for row in plan)
    power = get_rule(rule).init_var["hidden"]
    if not (power.m_rho if axis == "density" else power.m_in):
        return "rule"
    first = [slope for slope in failing if slope.step == 1]
    # If the model computes logits without their forward factor, every gradient is off by one power of the width from step 1 on.
    if axis == "width" and not has_readout and any(slope.quantity == GRAD_X or slope.role == "logits" for slope in first):
        return "output factor"
    return "elsewhere"


def _cause_over_depth(failing: list[Slope], plans: Collection[Plan]) -> str:
    """The likely cause over depth. Sums over blocks grow if nothing divides their branches. If branches are divided twice, the
    gradients inside fall by one more power of the depth than planned."""
    if all(not plan.branches for plan in plans):
        return "no depth rule"
    first = [slope for slope in failing if slope.step == 1 and slope.quantity == GRAD_X]
    if first and all(slope.slope < 0 for slope in first):
        return "branch twice"
    shrinks = all(slope.slope < 0 and slope.quantity in (Y, DY) and slope.is_mean for slope in failing)
    return "lazy" if shrinks and any(plan.depth == DEPTH_MUP.name for plan in plans) else "elsewhere"


def _evidence(failing: list[Slope]) -> str:
    first = min(failing, key=lambda slope: (slope.is_mean, -abs(slope.slope)))
    grows = first.slope < 0 if first.axis == "density" else first.slope > 0
    towards = f"{'grows' if grows else 'shrinks'} with {'sparsity' if first.axis == 'density' else first.axis}"
    since = "after step 1" if first.is_mean else "from step 1"
    others = {slope.quantity for slope in failing} - {first.quantity}
    return (
        f"{first.quantity} of {first.place or 'the logits'} {towards} {since} (slope {first.slope:+.2f}"
        + ("" if math.isnan(first.ci) else f" +- {first.ci:.2f}")
        + f" at {first.where})"
        + (f"; also {', '.join(sorted(others))}" if others else "")
    )
