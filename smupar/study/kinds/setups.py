"""The runs of a transfer study: a setup is one model under one rule, and a run is a setup at one value of the swept
hyperparameter."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

from smupar.lm.config.run_config import RunConfig
from smupar.refusals import refuse
from smupar.rules import get_rule
from smupar.study.config import TransferConfig
from smupar.study.conventions import as_rule, sp_init_std
from smupar.study.run_configs import with_fields

MEASURED, MOMENT = "measured", "moment"
OURS = {MEASURED: "measured updates", MOMENT: "SmuPar, density of the moment"}


def title_of(rule: str) -> str:
    return OURS[rule] if rule in OURS else get_rule(rule, beside=OURS).title


class Setup(NamedTuple):
    """One model under one rule: everything about the runs of a curve except the swept value and the seed."""

    rule: str
    width: int
    sparsity: float
    depth: int | None = None  # None if depths are not compared
    is_proxy: bool = False


def proxy_of(config: TransferConfig, rule: str) -> Setup:
    return Setup(rule, config.run.base_width, 0.0, config.base_depth, is_proxy=True)


def setups_of(config: TransferConfig) -> list[Setup]:
    """The setups of every rule, the proxy first."""
    setups = []
    for rule in config.rules:
        title = title_of(rule)  # refuses an unknown rule
        refuse(
            config.axis.startswith("alpha") and rule not in OURS and not get_rule(rule).has_alphas,
            f"{title} has no {config.axis} to sweep: leave it out of --rules",
        )
        setups.append(proxy_of(config, rule))
        depths = config.depths or ((None,) if config.base_depth is None else (config.run.model.depth,))
        setups += [Setup(rule, *target) for target in product(config.widths, config.sparsities, depths)]
    return setups


@lru_cache(maxsize=2**16)  # the page of a running study needs the same configurations again and again
def run_of(config: TransferConfig, setup: Setup, value: float, trace: str | None = None) -> RunConfig:
    """The run of a setup at one value of the axis."""
    run, rule = config.run, setup.rule
    if setup.is_proxy:
        fields = _proxy_fields(config, rule)
    elif setup.sparsity == 0:
        fields = _dense_fields(run.round_steps)
    else:
        fields = {"correction": "moment" if rule in OURS else "fixed"} if run.prunes else {}
    if rule == MEASURED and not setup.is_proxy:
        fields |= {"rule": "smupar", "follow": trace}
    else:
        fields["rule"] = as_rule("smupar" if rule in OURS else rule, setup.sparsity)
    if rule == "sp":
        fields["init_std"] = sp_init_std(run.init_std, run.base_width, setup.width)
    if setup.depth is not None:
        # At the base's depth the fields of depth are left out, so that the run has the same id as one without depths.
        is_deeper = setup.depth != config.base_depth
        fields |= {"depth": setup.depth, "base_depth": config.base_depth if is_deeper else None}
        fields |= {} if is_deeper else {"depth_rule": None}
    fields |= {"width": setup.width, "sparsity": setup.sparsity}
    return with_fields(run, fields | {config.axis: value})  # if init_std is swept, its value replaces SP's


def _proxy_fields(config: TransferConfig, rule: str) -> dict[str, object]:
    depth, steps = config.proxy_depth or config.run.model.depth, config.proxy_steps or config.run.round_steps
    return _dense_fields(steps) | {"depth": depth, "record": rule != "sp" and MEASURED in config.rules}


def _dense_fields(steps: int) -> dict[str, object]:
    """A dense model has no masks to move. So its run gets the fields, and the id, of a run with fixed masks."""
    return {"dynamic": "none", "mask_every": RunConfig.mask_every, "steps": steps}
