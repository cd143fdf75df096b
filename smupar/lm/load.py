"""Models from disk: the last checkpoint of a run, one of its checkpoints, or an export."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from smupar.lm import checkpoint
from smupar.lm.config import ModelConfig, RunConfig
from smupar.lm.distributed import World, place
from smupar.lm.folder import read_config, read_run_tokenizer
from smupar.lm.gpt import GPT
from smupar.lm.tokenizer import TOKENIZER_FILE, Tokenizer
from smupar.plan import Plan
from smupar.planner import PlanWarning

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
    for name in [key.removesuffix(".values") for key in stored if key.endswith(".values")]:
        parts = [stored.pop(f"{name}.{part}") for part in ("crow_indices", "col_indices", "values")]
        stored[name] = from_csr(*parts, num_columns=model.get_parameter(name).shape[1])
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    return model


def _export_tokenizer(path: Path) -> Tokenizer:
    file, config = path / TOKENIZER_FILE, json.loads((path / "config.json").read_text())
    return Tokenizer(config["tokenizer"]["name"], file.read_text() if file.exists() else None)


def to_csr(weight: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Kept weights row by row, zeros among them too: the mask is part of the model."""
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
    index = torch.int32 if int(starts[-1]) < 2**31 else torch.int64
    return {"crow_indices": starts.to(index), "col_indices": mask.nonzero()[:, 1].to(index), "values": weight[mask]}


def from_csr(crow: torch.Tensor, col: torch.Tensor, values: torch.Tensor, *, num_columns: int) -> torch.Tensor:
    rows = torch.repeat_interleave(torch.arange(len(crow) - 1), crow.long().diff())
    dense = torch.zeros(len(crow) - 1, num_columns, dtype=values.dtype)
    dense[rows, col.long()] = values
    return dense
