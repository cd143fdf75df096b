"""Turns typed flags into a configuration, in pure functions that are called once, after parsing.

Tuned hyperparameters (``--hps``) override the preset, and flags override both. `train` refuses flags that would have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from smupar.lm.config.fields import changed
from smupar.lm.config.mask_methods import MASK_METHODS
from smupar.lm.config.presets import preset
from smupar.lm.config.run_config import RunConfig, padded_vocab
from smupar.plan.facts.optimizers import has_adamw_beside, names_with
from smupar.refusals import refuse
from smupar.study.config import SHORT, TUNED, TransferConfig, TuneConfig

Kind = TypeVar("Kind", RunConfig, TransferConfig, TuneConfig)

# Fields that `transfer` sets itself, with the flags to use instead.
SET_BY_TRANSFER = {
    "width": "name the targets' widths with --widths, the proxy's with --base-width",
    "sparsity": "name the targets' sparsities with --sparsities",
    "rule": "name the rules to compare with --rules",
    "correction": "compare --rules smupar (as in the paper) and moment",
    "follow": "a trace of the proxy is recorded and followed by --rules measured",
    "record": "a trace of the proxy is recorded and followed by --rules measured",
    "law": "other laws are compared by `smupar reproduce controls`",
}
# Fields that have an effect only if another field has one of these values.
_NEEDS = {
    **{
        name: ("dynamic", tuple(dynamic for dynamic, method in MASK_METHODS.items() if name in method.fields))
        for name in ("mask_every", "mask_stop", "drop_fraction", "rounds", "correction")
    },
    "momentum": ("optimizer", names_with("momentum")),
    "betas": ("optimizer", names_with("betas") + names_with("hidden_only")),  # with muon, AdamW trains the rest
    "context": ("positions", ("learned",)),
}


@dataclass(frozen=True)
class Request:
    """The typed flags, and the contents of the files that they name."""

    fields: Mapping[str, Any] = field(default_factory=dict)  # fields of the configuration whose flags were typed
    preset: str = "demo"
    vocab_size: int = 0  # vocabulary size of the text's tokenizer
    hps: Mapping[str, float] | None = None  # tuned hyperparameters, and the width and depth at which they were tuned
    hps_file: str | None = None


def start(kind: type[Kind], request: Request) -> Kind:
    """The configuration before flags change it; help shows its values as defaults."""
    origin, values = _origin(kind, request)
    return changed(origin, values)


def resolve(kind: type[Kind], request: Request) -> Kind:
    if kind is TransferConfig:
        _refuse_what_transfer_sets(request.fields)
    if kind is TuneConfig:
        for name in TUNED:
            refuse(name in request.fields, f"tune does not take {_flag(name)}: it is searched, within {_flag(name)}-range")
    origin, values = _origin(kind, request)
    return changed(origin, {**values, **request.fields}).normalised


def resolve_training(request: Request, *, dry_run: bool = False, machine: Mapping[str, Any] | None = None) -> RunConfig:
    """The run to train. With ``dry_run``, ``machine`` may describe the machine for the cost estimate."""
    preset_run, _ = _origin(RunConfig, request)
    _refuse_what_does_nothing(request.fields, preset_run)
    for name in machine or {}:
        refuse(
            not dry_run,
            f"{_flag(name)} only changes the estimate of --dry-run. To train on several GPUs: torchrun --nproc-per-node 8 "
            "-m smupar train ...",
        )
    return resolve(RunConfig, request)


def _origin(kind: type[Kind], request: Request) -> tuple[Kind, dict[str, Any]]:
    """Two things: the preset for this rule and width, as a configuration of this kind, and the values of ``--hps`` and of the
    tokenizer, which replace the preset's. Flags come after both."""
    typed, values = request.fields, dict[str, Any]()
    run = preset(request.preset, typed.get("rule", "smupar"), typed.get("width"))
    if request.vocab_size > run.model.vocab_size:
        values["vocab_size"] = padded_vocab(request.vocab_size)
    if request.hps:
        for name in ("base_width", "base_depth"):
            tuned = request.hps.get(name)
            asked = typed.get(name, tuned)
            refuse(
                tuned is not None and asked != tuned,
                f"{request.hps_file} was tuned at {_flag(name)} {tuned}, not {asked}: leave the flag out",
            )
        values |= request.hps
        if values.get("base_depth") == typed.get("depth", run.model.depth) and not typed.get("depths"):
            values["base_depth"] = None  # all depth factors are 1: the same run, and so the same id, as without a base depth
    if issubclass(kind, RunConfig):
        return run, values
    if issubclass(kind, TransferConfig):
        return TransferConfig(run=run), SHORT | values
    width = typed.get("base_width", run.base_width)
    return TuneConfig(run=run), SHORT | {"sparsity": 0.0, "base_width": width, "width": width} | values


def _refuse_what_transfer_sets(typed: Mapping[str, Any]) -> None:
    swept = {typed.get("axis", "lr"): "it is the swept field, give its values with --values"}
    for name, remedy in (SET_BY_TRANSFER | swept).items():
        refuse(name in typed, f"transfer does not take {_flag(name)}: {remedy}")


def _refuse_what_does_nothing(typed: Mapping[str, Any], before: RunConfig) -> None:
    chosen = {"dynamic": before.dynamic, "optimizer": before.optimizer, "positions": before.model.positions, **typed}
    for name, (other, values) in _NEEDS.items():
        value = chosen[other].lower()
        beside = other == "optimizer" and has_adamw_beside(value, typed.get("rest_lr"))
        refuse(
            name in typed and value not in values and not beside,
            f"{_flag(name)} does nothing with {_flag(other)} {value}: it is for {', '.join(values)}",
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
