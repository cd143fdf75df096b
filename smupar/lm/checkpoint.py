"""Checkpoints: a folder ``step-00000100`` with weights, masks and optimizer state as safetensors, and ``state.json``.

torch.distributed.checkpoint writes and reads them, each rank its own shards, so that a run saved on two ranks goes on with
one or four. Nothing in them is a pickle. A checkpoint is written under another name and renamed when complete: what has the
right name is whole, whenever the process was killed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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

from smupar.lm.distributed import World
from smupar.lm.files import sync_folder, write_atomic
from smupar.storage import COLUMNS, ROW_STARTS, Compressed, expand_state, scatter, shape_of

_PREFIX, _UNFINISHED = "step-", ".unfinished-"
_MASK = "_mask"
_AS_MATRIX, _AS_NONZEROS = ("", _MASK), ("", COLUMNS, ROW_STARTS)
"""What follows a weight's name in a checkpoint, by how the weight is kept."""


def save(
    folder: Path, step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer], state: dict[str, Any], world: World
) -> None:
    """Writes ``folder/step-<step>``, or nothing: on a full disk what is there already stays as it is. Of a checkpoint that is
    there, ``state`` alone is written."""
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
        _write(unfinished / "model", weights(model), world)
        _write(unfinished / "optimizer", optimizer_state(model, optimizers), world)
        if world.is_main:
            write_atomic(unfinished / "state.json", json.dumps({"step": step, **state}))
            unfinished.replace(final)
            sync_folder(folder)
    except (OSError, SafetensorError, CheckpointException) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        kept = latest(folder)
        raise OSError(
            f"the checkpoint of step {step} could not be written to {folder}: {_reason(error)}. "
            + (f"That of step {step_of(kept)} is intact" if kept else "There is none yet")
            + ": make room and start the same command again"
        ) from error
    world.wait()


def load(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Reads weights, masks and optimizer state into model and optimizers; returns ``state.json``."""
    with _named(path):
        state = read_state(path)
        _read_state(path / "optimizer", model, optimizers, _read_model(path / "model", model))
    return state


def load_weights(path: Path, model: nn.Module) -> None:
    with _named(path):
        _read_model(path / "model", model)


def read_state(path: Path) -> dict[str, Any]:
    with _named(path):
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        if not isinstance(state, dict) or state.get("step") != step_of(path):
            raise ValueError("state.json is not of this step")
    return state


class DamagedCheckpointError(ValueError):
    """A checkpoint that cannot be read; names it and the remedy."""


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Whatever goes wrong in reading a checkpoint, in one line with the remedy."""
    try:
        yield
    except DamagedCheckpointError:  # named already
        raise
    except (OSError, ValueError, KeyError, RuntimeError, AssertionError, SafetensorError, CheckpointException) as error:
        raise DamagedCheckpointError(
            f"the checkpoint {path} is damaged ({_reason(error)}): delete it, and the run goes on from the one before, or anew"
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


def weights(model: nn.Module) -> dict[str, Tensor]:
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


def _read_state(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], turned: dict[str, _Turned]) -> None:
    """Into optimizers that have made no step, laid out like the parameters."""
    parameters = dict(model.named_parameters())
    homes = {id(p): (o, g) for o in optimizers for g in o.param_groups for p in g["params"]}
    tensors = {}
    for key, entry in _metadata(folder).items():
        name, _, what = key.partition("/")
        parameter = parameters[name]
        optimizer, group = homes[id(parameter)]
        if name in turned and tuple(entry.size) == turned[name].stored:
            tensors[key] = _room(entry)
            continue
        if tuple(entry.size) == tuple(parameter.shape):
            value = torch.zeros_like(parameter, dtype=entry.properties.dtype, memory_format=torch.preserve_format).detach()
        else:  # a step count, which fused optimizers keep beside the parameter and others on the CPU
            beside = group.get("fused") or group.get("capturable")
            device = parameter.device if beside else torch.device("cpu")
            value = torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)
        optimizer.state[parameter][what] = value
    _read(folder, optimizer_state(model, optimizers) | tensors)
    for key, value in tensors.items():
        name, _, what = key.partition("/")
        optimizer, _ = homes[id(parameters[name])]
        optimizer.state[parameters[name]][what] = turned[name].turn(value.to(parameters[name].device))


# Files


def _write(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    if tensors:  # plain SGD has no state
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=world.size > 1)
        with _quiet():
            save_tensors(tensors, storage_writer=writer, no_dist=world.size == 1)
    elif world.is_main:
        folder.mkdir()


@dataclass(frozen=True)
class _Turned:
    """A weight that the checkpoint keeps as non-zeros and the model as a matrix, or the other way round."""

    stored: tuple[int, ...]
    """Shape in the checkpoint."""
    turn: Callable[[Tensor], Tensor]
    """Makes of a tensor laid out as there one laid out as here."""


def _read_model(folder: Path, model: nn.Module) -> dict[str, _Turned]:
    """Reads weights and masks; returns those that are kept another way here than there."""
    stored = _metadata(folder)
    layers = {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, Compressed)}
    kept = {key.removesuffix(COLUMNS) for key in stored if key.endswith(COLUMNS)}
    for name in kept & layers.keys():
        layers[name].make_room(stored[name].size.numel())
    tensors = weights(model)
    for name in kept ^ layers.keys():
        for suffix in _AS_NONZEROS if name in layers else _AS_MATRIX:
            del tensors[f"{name}{suffix}"]
        for suffix in _AS_MATRIX if name in layers else _AS_NONZEROS:
            tensors[f"{name}{suffix}"] = _room(stored[f"{name}{suffix}"])
    _read(folder, tensors)
    turned = {}
    for name in kept ^ layers.keys():
        parameter = model.get_parameter(name)
        if name in layers:
            layers[name].move(tensors[f"{name}{_MASK}"].to(parameter.device))
            turn = layers[name].gather
        else:
            expand_state(tensors, name, shape_of(model, name))
            mask = model.get_buffer(f"{name}{_MASK}")
            mask.copy_(tensors[f"{name}{_MASK}"])
            turn = partial(scatter, mask)
        values = tensors[name].to(parameter.device)
        with torch.no_grad():
            parameter.copy_(turn(values) if name in layers else values)
        turned[name] = _Turned(tuple(stored[name].size), turn)
    return turned


def _room(entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {key: entry for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def _read(folder: Path, tensors: dict[str, Tensor]) -> None:
    if tensors:
        with _quiet():
            load_tensors(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))


def _reason(error: BaseException) -> str:
    """The cause in one line, out of what torch wraps around it."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that it saves and loads in one process, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield
