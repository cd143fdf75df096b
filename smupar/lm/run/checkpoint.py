"""Checkpoints: a folder ``step-00000100`` with weights, masks and optimizer state as safetensors, and ``state.json``.

torch.distributed.checkpoint writes and reads them. Each rank handles its own shards, so a run that was saved on two ranks can
go on with one or four. Nothing in them is a pickle. A checkpoint is written under another name and renamed when it is complete,
so a checkpoint with the right name is whole even if the process was killed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from smupar.lm.run.distributed import World
from smupar.model.csr import COLUMNS, MASK, ROW_STARTS, expand_state, is_compressed
from smupar.model.relayout import watch_optimizers
from smupar.model.weights import ModelWeight, weight_of
from smupar.output.files import sync_folder, write_atomic

_PREFIX, _UNFINISHED = "step-", ".unfinished-"


def save(
    folder: Path, step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer], state: dict[str, Any], world: World
) -> None:
    """Writes ``folder/step-<step>``. If this fails, as on a full disk, earlier checkpoints stay as they are. If this step has a
    checkpoint already, only ``state`` is written."""
    final, unfinished = folder / folder_name(step), folder / f"{_UNFINISHED}{step:08d}"
    if final.exists():  # the run stopped before it had looked at these weights
        if world.is_main:
            write_atomic(final / "state.json", json.dumps({"step": step, **state}))
        return
    try:
        if world.is_main:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        world.wait()
        _write(unfinished / "model", saved_tensors(model), world)
        _write(unfinished / "optimizer", optimizer_state(model, optimizers), world)
        if world.is_main:
            write_atomic(unfinished / "state.json", json.dumps({"step": step, **state}))
            unfinished.replace(final)
            sync_folder(folder)
    except (OSError, SafetensorError, CheckpointException) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        last = latest(folder)
        raise OSError(
            f"the checkpoint of step {step} could not be written to {folder}: {_reason(error)}. "
            + (f"That of step {step_of(last)} is intact" if last else "There is none yet")
            + ": make room and start the same command again"
        ) from error
    world.wait()


def load(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Reads weights, masks and optimizer state into model and optimizers; returns ``state.json``."""
    state = read_state(path)
    load_weights(path, model)
    with _named(path):
        _read_optimizer_state(path / "optimizer", model, optimizers)
    return state


def load_weights(path: Path, model: nn.Module) -> None:
    """Reads weights and masks, also of weights that the checkpoint keeps in another form than the model: as non-zeros, or as
    matrices."""
    with _named(path):
        stored = _metadata(path / "model")
        every = [weight_of(model, name) for name, _ in model.named_parameters()]
        foreign = [weight for weight in every if weight.is_masked and is_compressed(stored, weight.name) == weight.stores_zeros]
        for weight in every:
            if weight.name in stored and weight not in foreign:
                weight.make_room(stored[weight.name].size.numel())
        elsewhere = {name for weight in foreign for name in (weight.name, *weight.mask_buffers)}
        _read(path / "model", {name: tensor for name, tensor in saved_tensors(model).items() if name not in elsewhere})
        _read_through_matrices(path / "model", foreign, stored)


def _read_through_matrices(folder: Path, foreign: Sequence[ModelWeight], stored: Mapping[str, TensorStorageMetadata]) -> None:
    """Reads weights in the form that the checkpoint has, and converts them to the form that the model has."""
    names = [f"{weight.name}{part}" for weight in foreign for part in ("", MASK, COLUMNS, ROW_STARTS)]
    tensors = {n: torch.empty(stored[n].size, dtype=stored[n].properties.dtype) for n in names if n in stored}
    _read(folder, tensors)
    for weight in foreign:
        if is_compressed(tensors, weight.name):
            expand_state(tensors, weight.name, weight.shape)
        weight.load(tensors[weight.name], tensors[f"{weight.name}{MASK}"])


def read_state(path: Path) -> dict[str, Any]:
    with _named(path):
        state = json.loads((path / "state.json").read_text())
        if not isinstance(state, dict) or state.get("step") != step_of(path):
            raise ValueError("state.json is not of this step")
    return state


class DamagedCheckpointError(ValueError):
    """A checkpoint cannot be read. The error names it and the remedy."""


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turns whatever goes wrong in reading a checkpoint into one line with the remedy."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, AssertionError, SafetensorError, CheckpointException) as error:
        raise DamagedCheckpointError(
            f"the checkpoint {path} is damaged ({_reason(error)}): delete it, and the run goes on from the one before, or from "
            "its start"
        ) from error


def latest(folder: Path) -> Path | None:
    return max(_complete(folder), key=step_of, default=None)


def folder_name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def prune(folder: Path, *, keep: int, best: int | None) -> None:
    """Removes all but the last ``keep`` and the best, and what was left unfinished by a killed process."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in sorted(_complete(folder), key=step_of)[:-keep]:
        if step_of(path) != best:
            # Renamed first: a half-removed folder must not look like a checkpoint.
            doomed = path.with_name(f"{_UNFINISHED}{path.name.removeprefix(_PREFIX)}")
            path.replace(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _complete(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]


# What is in a checkpoint


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and persistent buffers, which are the masks. The tensors themselves, not copies."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())
    return parameters | {name: buffers[name] for name in model.state_dict() if name in buffers}


def optimizer_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """``<parameter>/<what>``, such as ``norm.weight/exp_avg``. Learning rates and the like follow from the configuration."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{what}": value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for what, value in state.items()
        if value is not None
    }


def _read_optimizer_state(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Reads into optimizers that have made no step. If the checkpoint keeps a weight in another form than the model, its state
    is converted at the first step."""
    homes = {id(p): (o, g) for o in optimizers for g in o.param_groups for p in g["params"]}
    for key, entry in _metadata(folder).items():
        name, _, what = key.partition("/")
        weight = weight_of(model, name)
        optimizer, group = homes[id(weight.parameter)]
        optimizer.state[weight.parameter][what] = _state_room(entry, weight.parameter, group)
        if weight.is_foreign(entry.size):
            watch_optimizers(model, replaced=())
    _read(folder, optimizer_state(model, optimizers))


def _state_room(entry: TensorStorageMetadata, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
    dtype = entry.properties.dtype
    if tuple(entry.size) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format).detach()
    # A step count is kept beside the parameter by fused optimizers and on the CPU by others.
    beside = entry.size or group.get("fused") or group.get("capturable")
    return torch.zeros(entry.size, dtype=dtype, device=parameter.device if beside else torch.device("cpu"))


# Files


def _write(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    if tensors:  # plain SGD has no state
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=world.size > 1)
        with _quiet():
            save_tensors(tensors, storage_writer=writer, no_dist=world.size == 1)
    elif world.is_main:
        folder.mkdir()


def _metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {key: entry for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def _read(folder: Path, tensors: dict[str, Tensor]) -> None:
    if tensors:
        with _quiet():
            load_tensors(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))


def _reason(error: BaseException) -> str:
    """The cause in one line, without what torch wraps around it."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's warning that it saves and loads in one process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield
