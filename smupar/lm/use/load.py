"""Loads models from disk: the last checkpoint of a run, a given checkpoint, or an export."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.data.tokenizer import Tokenizer, read_tokenizer
from smupar.lm.model.gpt import GPT
from smupar.lm.run import checkpoint
from smupar.lm.run.distributed import ALONE, World, build_on_device
from smupar.lm.run.folder import read_config, read_corpus_info
from smupar.model.csr import expand_export
from smupar.output.checksums import SUMS, UncheckedWarning, check_sums
from smupar.output.files import resolved
from smupar.output.json_files import DamagedFileError, is_sealed, read_object, read_record
from smupar.output.optional import first_line, optional
from smupar.plan.plan import PLAN_FILE, Plan, PlanWarning
from smupar.refusals import refuse

EXPORT_FORMAT = "smupar-gpt/1"
_EXPORT_AGAIN = "export the run again, or restore it from a copy"


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
        info = read_corpus_info(self.folder).tokenizer
        return read_tokenizer(self.folder, info["name"], sha256=info["sha256"])


def load_run(folder: str | Path, *, device: torch.device | None = None, best: bool = False) -> LoadedRun:
    """Loads the last or the best checkpoint of a run, or the checkpoint whose folder is given."""
    path = resolved(Path(folder))
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    config = read_config(run)
    chosen = path if run != path else checkpoint.latest(run / "checkpoints")
    if chosen is None or not chosen.is_dir():
        raise FileNotFoundError(f"{path} has no checkpoint yet: continue the run, or give the folder of another run")
    if best:
        step = checkpoint.read_state(chosen).get("best_step")
        chosen = chosen.with_name(checkpoint.folder_name(step)) if step is not None else chosen
    with warnings.catch_warnings(action="ignore", category=PlanWarning):  # training has already shown these warnings
        model, plan = build_on_device(config, World(0, 1, device or torch.device("cpu"), "ddp"))
    checkpoint.check(chosen, ALONE, only=checkpoint.MODEL)
    checkpoint.refuse_other_run(chosen, checkpoint.read_state(chosen).get("run"), config.id)
    checkpoint.load_weights(chosen, model)
    return LoadedRun(run, checkpoint.step_of(chosen), config, model, plan)


def load_model(folder: str | Path, *, device: torch.device | None = None) -> tuple[GPT, Tokenizer]:
    """Model and tokenizer from a run, a checkpoint or an export."""
    path = Path(folder)
    if is_export(path):
        _check_export(path)
        described = read_export(path)
        return _exported_model(path, described).to(device), read_tokenizer(path, described.tokenizer["name"])
    if not path.exists():
        raise FileNotFoundError(f"no folder {path}: give the folder of a run, which `smupar train` names in its last line")
    run = load_run(path, device=device)
    return run.model, run.tokenizer


def load_transformers(path: Path) -> tuple[Any, Any]:
    """A causal model of transformers in fp32 on the CPU, and its tokenizer."""
    transformers = optional("transformers", f"the model {path}", "eval")
    # transformers would load this folder without its factors, and without an error.
    refuse((path / PLAN_FILE).exists(), f"{path} needs the factors of its plan: smupar export {path} OUT, then use OUT")
    try:
        # Without the last argument transformers would ask at the terminal whether to run code from the folder.
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, **local)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **local)
    except Exception as error:  # missing or damaged files and unknown architectures may raise any type
        raise ValueError(
            f"transformers cannot read {path} ({first_line(error)}): give a causal model and its tokenizer"
        ) from error
    return model.eval(), tokenizer


def is_of_transformers(path: Path) -> bool:
    return "model_type" in read_description(path)


def num_positions(model: Any) -> int | None:
    """The number of positions of a transformers model; None if its config does not say."""
    names = ("n_positions", "max_position_embeddings", "n_ctx")
    return next((getattr(model.config, name) for name in names if getattr(model.config, name, None)), None)


# Exports


def is_export(path: Path) -> bool:
    return read_description(path).get("format") == EXPORT_FORMAT


def read_description(path: Path) -> dict[str, Any]:
    """The content of config.json in the folder of a run, an export or a model of transformers; empty without that file."""
    try:
        return read_object(path / "config.json", remedy="")
    except ValueError:
        return {}


@dataclass(frozen=True)
class ExportDescription:
    """The content of an export's config.json."""

    format: str
    storage: str
    model: ModelConfig
    tokenizer: dict[str, Any]


def _check_export(path: Path) -> None:
    if not check_sums(path, remedy=_EXPORT_AGAIN):
        if is_sealed(path / "config.json"):
            raise DamagedFileError(f"{path} is damaged ({SUMS} is missing): {_EXPORT_AGAIN}")
        warnings.warn(
            f"{path} has no checksums, since an older version exported it: it is loaded without a check",
            UncheckedWarning,
            stacklevel=3,
        )


def read_export(path: Path) -> ExportDescription:
    file = path / "config.json"
    try:
        return read_record(ExportDescription, file, remedy=_EXPORT_AGAIN)
    except DamagedFileError:
        raise
    except ValueError as error:  # a model that cannot be built
        raise DamagedFileError(f"{file} is damaged ({error}): {_EXPORT_AGAIN}") from error


def _exported_model(path: Path, described: ExportDescription) -> GPT:
    model, file = GPT(described.model), path / "model.safetensors"
    try:
        stored = load_file(file)
        expand_export(stored, {name: parameter.shape[-1] for name, parameter in model.named_parameters()})
        model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise DamagedFileError(f"{file} is damaged ({str(error).strip().splitlines()[-1].strip()}): {_EXPORT_AGAIN}") from error
    return model
