"""Models from disk: the last checkpoint of a run, one of its checkpoints, or an export."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from smupar.lm.config.run import ModelConfig, RunConfig
from smupar.lm.data.tokenizer import Tokenizer, read_tokenizer
from smupar.lm.model.gpt import GPT
from smupar.lm.run import checkpoint
from smupar.lm.run.distributed import World, build_on_device
from smupar.lm.run.folder import read_config, read_facts
from smupar.model.csr import expand_export
from smupar.plan.plan import Plan, PlanWarning

EXPORT_FORMAT = "smupar-gpt/1"


@dataclass(frozen=True)
class LoadedRun:
    """A run's model at one of its checkpoints, with masks and factors."""

    folder: Path
    step: int
    config: RunConfig
    model: GPT
    plan: Plan

    @property
    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.folder, read_facts(self.folder).tokenizer["name"])


def load_run(folder: str | Path, *, device: torch.device | None = None, best: bool = False) -> LoadedRun:
    """Loads the last checkpoint of a run, its best checkpoint, or the checkpoint whose folder is given."""
    path = Path(folder).resolve()
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    config = read_config(run)
    chosen = path if run != path else checkpoint.latest(run / "checkpoints")
    if chosen is None or not (chosen / "state.json").exists():
        raise FileNotFoundError(f"{path} has no checkpoint yet: train on, or give the folder of another run")
    if best:
        step = checkpoint.read_state(chosen)["best_step"]
        chosen = chosen.with_name(checkpoint.folder_name(step)) if step is not None else chosen
    with warnings.catch_warnings(action="ignore", category=PlanWarning):  # training has already shown these warnings
        model, plan = build_on_device(config, World(0, 1, device or torch.device("cpu"), "ddp"))
    checkpoint.load_weights(chosen, model)
    return LoadedRun(run, checkpoint.step_of(chosen), config, model, plan)


def load_model(folder: str | Path, *, device: torch.device | None = None) -> tuple[GPT, Tokenizer]:
    """Model and tokenizer from a run, a checkpoint or an export."""
    path = Path(folder)
    if is_export(path):
        return load_export(path).to(device), read_tokenizer(path, read_description(path)["tokenizer"]["name"])
    if not path.exists():
        raise FileNotFoundError(f"no folder {path}: give the folder of a run, which `smupar train` names in its last line")
    run = load_run(path, device=device)
    return run.model, run.tokenizer


# Exports


def is_export(path: Path) -> bool:
    return read_description(path).get("format") == EXPORT_FORMAT


def read_description(path: Path) -> dict[str, Any]:
    """The content of config.json of a run, an export or a model of transformers; empty if there is no such file."""
    try:
        described = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return described if isinstance(described, dict) else {}


def load_export(path: Path) -> GPT:
    """Loads an export as a plain GPT. Its factors are folded into the weights, so no plan is needed."""
    model = GPT(ModelConfig(**read_description(path)["model"]))
    stored = load_file(path / "model.safetensors")
    expand_export(stored, {name: parameter.shape[-1] for name, parameter in model.named_parameters()})
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    return model
