"""Models from disk: the last checkpoint of a run, one of its checkpoints, or an export."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from smupar.lm.config.run import ModelConfig, RunConfig
from smupar.lm.data.tokenizer import TOKENIZER_FILE, Tokenizer
from smupar.lm.model.gpt import GPT
from smupar.lm.run import checkpoint
from smupar.lm.run.distributed import World, place
from smupar.lm.run.folder import read_config, read_run_tokenizer
from smupar.model.csr import expand_export
from smupar.plan.plan import Plan, PlanWarning

EXPORT_FORMAT = "smupar-gpt/1"


@dataclass(frozen=True)
class LoadedRun:
    """A run's model as it was trained, with masks and factors, at one of its checkpoints."""

    folder: Path
    step: int
    config: RunConfig
    model: GPT
    plan: Plan


def load_run(folder: str | Path, *, device: torch.device | None = None, best: bool = False) -> LoadedRun:
    """The last checkpoint of a run, its best one, or, given the folder of a checkpoint, that one."""
    path = Path(folder).resolve()
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    config = read_config(run)
    chosen = path if run != path else checkpoint.latest(run / "checkpoints")
    if chosen is None or not (chosen / "state.json").exists():
        raise FileNotFoundError(f"{path} has no checkpoint yet: train on, or give the folder of another run")
    if best:
        step = checkpoint.read_state(chosen)["best_step"]
        chosen = chosen.with_name(checkpoint.folder_name(step)) if step is not None else chosen
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # said when it was trained
        model, plan = place(config, World(0, 1, device or torch.device("cpu"), "ddp"))
    checkpoint.load_weights(chosen, model)
    return LoadedRun(run, checkpoint.step_of(chosen), config, model, plan)


def load_model(folder: str | Path, *, device: torch.device | None = None) -> tuple[GPT, Tokenizer]:
    """A model that is ready to be called, and its tokenizer, from a run, a checkpoint or an export."""
    path = Path(folder)
    if _is_export(path):
        return load_export(path).to(device), _export_tokenizer(path)
    if not path.exists():
        raise FileNotFoundError(f"no folder {path}: give the folder of a run, which `smupar train` names in its last line")
    run = load_run(path, device=device)
    return run.model, read_run_tokenizer(run.folder)


# Exports


def _is_export(path: Path) -> bool:
    try:
        described = json.loads((path / "config.json").read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return isinstance(described, dict) and described.get("format") == EXPORT_FORMAT


def load_export(path: Path) -> GPT:
    """A plain GPT: the factors are inside the weights. Needs nothing of smupar but the model's code."""
    config = json.loads((path / "config.json").read_text())
    model = GPT(ModelConfig(**config["model"]))
    stored = load_file(path / "model.safetensors")
    expand_export(stored, {name: parameter.shape[-1] for name, parameter in model.named_parameters()})
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    return model


def _export_tokenizer(path: Path) -> Tokenizer:
    file, config = path / TOKENIZER_FILE, json.loads((path / "config.json").read_text())
    return Tokenizer(config["tokenizer"]["name"], file.read_text() if file.exists() else None)
