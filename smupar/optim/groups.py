"""Optimizer groups from a plan, for any torch optimizer.

Each group's ``lr`` includes its factor of Table 1, so training loops need no change. Groups also have ``name``, ``lr_factor``,
``family`` and ``decay``, which the audit and the guard read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smupar.model.attached import check_parameterized, unwrapped
from smupar.model.parameterize import attach
from smupar.plan.facts.optimizers import OptimizerFacts, decouples_decay, facts_of, family_of, has_adamw_beside
from smupar.plan.globs import match_globs
from smupar.plan.plan import Plan, PlanRow, PlanWarning
from smupar.refusals import choice, finite, refuse
from smupar.rules import DECAYED

HELD = "held"  # the kind of decay of runs that use ``HeldSizes``
# If LR times decay is larger than this, a weight forgets within 20 steps what it learned.
_FORGETS = 0.05
NoDecay = Iterable[str] | Callable[[str, nn.Parameter], bool]


def param_groups(
    model: nn.Module,
    plan: Plan,
    *,
    lr: float | Tensor,
    weight_decay: float = 0.0,
    optimizer: str | type[torch.optim.Optimizer] = "adamw",
    decay: str = "independent",
    eps: str = "constant",
    eps_value: float | None = None,
    only: str | None = None,
    no_decay: NoDecay | None = None,
    extra: Iterable[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Optimizer groups with the learning rate of each parameter. Pass them to the optimizer in place of ``model.parameters()``.

    lr            base learning rate, a number or a tensor. The tensor is not changed
    optimizer     name or class of the optimizer that will get the groups. It decides which factors of Table 1 apply
    decay         "independent" divides decay by the LR factor, so that LR times decay stays as tuned.
                  "coupled" is the same decay everywhere, as in the paper's reference code
    eps           "constant", or "width": epsilon shrinks as the width grows, like gradients
    eps_value     base epsilon. By default the optimizer's own for "constant", and 1e-8 for "width"
    only          "hidden" | "rest", for two optimizers on one model, such as Muon for hidden weights and AdamW for the rest
    no_decay      parameters without weight decay: globs, or a function (name, parameter) -> bool
    extra         groups of your own, appended as copies. The plan's groups leave out their parameters
    """
    family, weight_decay = family_of(optimizer), float(weight_decay)
    if not isinstance(lr, Tensor):
        finite(lr, "lr")
    choice("decay", decay, ("independent", "coupled"))
    choice("eps", eps, ("constant", "width"))
    choice("only", only, (None, "hidden", "rest"))
    _refuse_without_rest(facts_of(optimizer), only)
    model = unwrapped(model)
    check_parameterized(model)
    attach(model, plan)
    users = _users_groups(extra)
    trained = _trained_parameters(model, plan, users)
    undecayed = _undecayed(no_decay, trained)
    members: dict[tuple[float, float, float], list[PlanRow]] = {}
    for name in trained:
        row = plan[name]
        if only in (None, "hidden" if row.role == "hidden" else "rest"):
            _refuse_shape(facts_of(optimizer), name, trained[name])
            wd = 0.0 if name in undecayed else weight_decay * (row.decay_factor(family) if decay == "independent" else 1)
            members.setdefault((row.lr_factor(family), wd, row.eps_factor if eps == "width" else 1.0), []).append(row)
    groups = []
    for (factor, wd, eps_factor), rows in members.items():
        group = {"name": "", "params": [trained[row.name] for row in rows], "lr": lr * factor, "weight_decay": wd}
        group |= {"lr_factor": factor, "family": family, "decay": decay}
        if eps == "width" or eps_value is not None:
            group["eps"] = (1e-8 if eps_value is None else eps_value) * eps_factor
        groups.append({**group, "name": _group_name(rows, group, weight_decay)})
    _warn_of_forgetting(groups, optimizer)
    if decay == "independent" and any(row.eps_factor != 1 for key, rows in members.items() if key[1] for row in rows):
        _warn_of_decay_in_gradient(optimizer)
    return _number_equal_names(groups) + users


def _refuse_without_rest(facts: OptimizerFacts, only: str | None) -> None:
    refuse(
        facts.hidden_only and only != "hidden",
        f"{facts.name} is for hidden matrices: use param_groups(..., optimizer={facts.name.lower()!r}, only='hidden') for "
        "it and param_groups(..., optimizer='adamw', only='rest') for the rest of the model",
    )


def _refuse_shape(facts: OptimizerFacts, name: str, parameter: nn.Parameter) -> None:
    if facts.hidden_only and parameter.ndim != 2:
        shape = tuple(parameter.shape)
        raise ValueError(f"torch's {facts.name} takes matrices only, {name!r} has shape {shape}: use AdamW or SGD")


def _users_groups(extra: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Copies of the user's own groups, with their parameters as lists."""
    if isinstance(extra, Mapping):
        raise ValueError("extra takes a list of groups: extra=[{'params': ..., 'lr': ...}]")
    users = [dict(group) for group in extra or ()]
    for group in users:
        group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    return users


def _trained_parameters(model: nn.Module, plan: Plan, users: list[dict[str, Any]]) -> dict[str, nn.Parameter]:
    taken = {id(parameter) for group in users for parameter in group["params"]}
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in taken}
    unplanned = [name for name in parameters if name not in plan]
    uses = {f"{path}.{row.name.rpartition('.')[2]}" for row in plan for path, _ in row.forward}
    untied = [name for name in unplanned if name in uses]
    if untied:
        raise ValueError(
            f"{untied[0]!r} was tied to another parameter when the plan was made, but no longer is "
            "(load_state_dict(assign=True) does that): tie the two again"
        )
    if unplanned:
        raise ValueError(f"the plan has no row for {', '.join(unplanned[:4])}: give them a group of their own with extra=[...]")
    return parameters


def _warn_of_forgetting(groups: list[dict[str, Any]], optimizer: object) -> None:
    """Warns of the group that forgets fastest, and names the factor that causes it."""
    shrinks = [float(group["lr"]) * group["weight_decay"] for group in groups]
    if not groups or max(shrinks) <= _FORGETS or not decouples_decay(optimizer):
        return
    largest = max(shrinks)
    group = groups[shrinks.index(largest)]
    is_coupled = group["decay"] == "coupled" and group["lr_factor"] > 1
    remedy = "decay='independent', which takes the factor out of the decay, or a lower" if is_coupled else "a lower lr or"
    warnings.warn(
        f"weight decay shrinks {group['name']!r} by {largest:.2g} of its size at each step: learning rate "
        f"{float(group['lr']):.3g}, which includes the factor {group['lr_factor']:.3g}, times decay "
        f"{group['weight_decay']:.3g}. It forgets within {math.ceil(1 / largest)} steps. Pass {remedy} weight_decay",
        PlanWarning,
        stacklevel=3,
    )


def _warn_of_decay_in_gradient(optimizer: object) -> None:
    """Warns about optimizers that add weight decay to the gradient, and then normalise the gradient's size away."""
    facts = facts_of(optimizer)
    if facts.eps and not decouples_decay(optimizer):
        warnings.warn(
            f"{facts.name.lower()} adds weight decay to the gradient. Gradients shrink with width, so the decay that was "
            "tuned on the base is too large here. Use AdamW, which keeps the two apart. If your optimizer sets "
            "decoupled_weight_decay=True, pass optimizer='adamw' here",
            PlanWarning,
            stacklevel=3,
        )


def groups_by_optimizer(
    model: nn.Module,
    plan: Plan,
    optimizer: str,
    *,
    lr: float | Tensor,
    rest_lr: float | None = None,
    eps: str = "constant",
    eps_value: float | None = None,
    decay: str = "independent",
    decayed: str = "all",
    **settings: Any,
) -> list[tuple[str, list[dict[str, Any]]]]:
    """(optimizer name, its groups) for every optimizer of a run.

    With a ``rest_lr``, ``optimizer`` trains the hidden weights, and AdamW trains the rest at that learning rate. Muon takes
    hidden matrices only, so its ``rest_lr`` is ``lr`` by default. ``decay`` may also be "held": then hidden weights do not
    decay, because ``HeldSizes`` holds their size. ``decayed`` is a key of ``DECAYED``, which holds the roles that get weight
    decay. ``settings`` are passed to ``param_groups``.
    """
    choice("decayed", decayed, DECAYED)
    held = {"hidden"} if decay == HELD else set()
    settings["decay"] = "independent" if decay == HELD else decay
    if decayed != "all" or held:
        settings["no_decay"] = lambda name, _: plan[name].role not in {*DECAYED[decayed]} - held

    def groups(name: str, lr: float | Tensor, only: str | None = None) -> list[dict[str, Any]]:
        epsilon = {"eps": eps, "eps_value": eps_value} if facts_of(name).eps else {}
        return param_groups(model, plan, lr=lr, optimizer=name, only=only, **epsilon, **settings)  # type: ignore[arg-type]

    if not has_adamw_beside(optimizer, rest_lr):
        return [(optimizer, groups(optimizer, lr))]
    return [
        (optimizer, groups(optimizer, lr, "hidden")),
        ("adamw", groups("adamw", lr if rest_lr is None else rest_lr, "rest")),
    ]


def _undecayed(no_decay: NoDecay | None, parameters: Mapping[str, nn.Parameter]) -> set[str]:
    if no_decay is None:
        return set()
    if callable(no_decay):
        return {name for name, parameter in parameters.items() if no_decay(name, parameter)}
    globs = [no_decay] if isinstance(no_decay, str) else list(no_decay)
    # Globs are matched one by one, since overlapping globs are allowed here.
    matched = (match_globs({glob: True}, parameters, setting="no_decay", among="trained parameters") for glob in globs)
    return {name for names in matched for name in names}


def _group_name(rows: list[PlanRow], group: Mapping[str, Any], weight_decay: float) -> str:
    """A name from the group's roles and factors, such as ``hidden, LR x 4, width 4, density 0.0625``."""
    parts = ["+".join(dict.fromkeys(row.role for row in rows))]
    if group["lr_factor"] != 1:
        parts.append(f"LR x {group['lr_factor']:.6g}")
    widths = {row.width_in if row.role in ("hidden", "unembedding", "router") else row.width_out for row in rows}
    if len(widths) == 1 and widths != {1}:
        parts.append(f"width {float(widths.pop()):g}")
    densities = {row.density for row in rows}
    if len(densities) == 1 and densities != {1}:
        parts.append(f"density {float(densities.pop()):.4g}")
    if weight_decay and not group["weight_decay"]:
        parts.append("no decay")
    return ", ".join(parts)


def _number_equal_names(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    seen: dict[str, int] = {}
    for group in groups:
        seen[group["name"]] = count = seen.get(group["name"], 0) + 1
        if count > 1:
            group["name"] += f" ({count})"
    return groups
