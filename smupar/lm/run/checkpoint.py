"""Checkpoints: a folder ``step-00000100`` with weights, masks and optimizer state as safetensors, ``state.json``, and
``sums.json``, the checksums of all tensors.

Each rank handles its own shards (tensor_files.py), so a run that was saved on two ranks can continue on one or four. Nothing is
pickled. A checkpoint is written under another name and renamed when it is complete, so one with the right name is complete even
if the process was killed. Its checksums find later damage, on the disk or in a copy.
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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from smupar.lm.run.distributed import World
from smupar.lm.run.tensor_files import read_tensors, stored_tensors, write_tensors
from smupar.model.csr import COLUMNS, MASK, ROW_STARTS, expand_state, is_compressed
from smupar.model.relayout import watch_optimizers
from smupar.model.weights import ModelWeight, weight_of
from smupar.output.checksums import SUMS, Parts, UncheckedWarning, read_sums, refuse_lost_seal, write_sums, wrong_parts
from smupar.output.files import sync_folder, write_atomic
from smupar.output.json_files import DamagedFileError, is_sealed, read_object, sealed_json

STATE, MODEL, OPTIMIZER = "state.json", "model", "optimizer"
# What torch and others raise if a file is damaged.
_READING = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, AssertionError)
_PREFIX, _UNFINISHED, _DAMAGED = "step-", ".unfinished-", "damaged-"


def save(
    folder: Path, step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer], state: dict[str, Any], world: World
) -> None:
    """Writes ``folder/step-<step>``. If this fails, for example on a full disk, earlier checkpoints stay intact. If this step
    already has a checkpoint, only ``state`` is written."""
    final, unfinished = folder / folder_name(step), folder / f"{_UNFINISHED}{step:08d}"
    if final.exists():  # the run stopped at this step before, in the middle of its validation
        if world.is_main:
            _write_state(final, {"step": step, **state})
        return
    try:
        if world.is_main:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        world.wait()
        sums: dict[str, Parts] = {}
        for part, tensors in ((MODEL, saved_tensors(model)), (OPTIMIZER, optimizer_state(model, optimizers))):
            for of_rank in world.gather(write_tensors(unfinished / part, tensors, world)):
                sums |= {f"{part}/{name}": parts for name, parts in of_rank.items()}
        if world.is_main:
            written = [path.relative_to(unfinished).as_posix() for path in unfinished.glob("*/*")]
            write_sums(unfinished, written, known=sums)
            _write_state(unfinished, {"step": step, **state})
            unfinished.replace(final)
            sync_folder(folder)
    except (OSError, SafetensorError, CheckpointException) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        last = latest(folder)
        raise OSError(
            f"the checkpoint of step {step} could not be written to {folder}: {_reason(error)}. "
            + (f"The checkpoint of step {step_of(last)} is intact" if last else "There is no earlier checkpoint")
            + ": make room and start the same command again"
        ) from error
    world.wait()


def _write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes state.json. If it has a seal, the tensors have checksums. Older versions wrote neither seal nor checksums."""
    sealed = (path / SUMS).exists()
    write_atomic(path / STATE, sealed_json(state, indent=None) if sealed else json.dumps(state))


def load(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Reads weights, masks and optimizer state into model and optimizers; returns ``state.json``."""
    state = read_state(path)
    load_weights(path, model)
    with named(path):
        _read_optimizer_state(path / OPTIMIZER, model, optimizers)
    return state


def load_weights(path: Path, model: nn.Module) -> None:
    """Reads weights and masks. The checkpoint may keep weights in another form than the model: as non-zeros, or as matrices."""
    with named(path):
        stored = stored_tensors(path / MODEL)
        every = [weight_of(model, name) for name, _ in model.named_parameters()]
        foreign = [weight for weight in every if weight.is_masked and is_compressed(stored, weight.name) == weight.stores_zeros]
        for weight in every:
            if weight.name in stored and weight not in foreign:
                weight.make_room(stored[weight.name].size.numel())
        elsewhere = {name for weight in foreign for name in (weight.name, *weight.mask_buffers)}
        read_tensors(path / MODEL, {name: tensor for name, tensor in saved_tensors(model).items() if name not in elsewhere})
        _read_through_matrices(path / MODEL, foreign, stored)


def _read_through_matrices(folder: Path, foreign: Sequence[ModelWeight], stored: Mapping[str, TensorStorageMetadata]) -> None:
    """Reads weights in the checkpoint's form and converts them to the model's."""
    names = [f"{weight.name}{part}" for weight in foreign for part in ("", MASK, COLUMNS, ROW_STARTS)]
    tensors = {n: torch.empty(stored[n].size, dtype=stored[n].properties.dtype) for n in names if n in stored}
    read_tensors(folder, tensors)
    for weight in foreign:
        if is_compressed(tensors, weight.name):
            expand_state(tensors, weight.name, weight.shape)
        weight.load(tensors[weight.name], tensors[f"{weight.name}{MASK}"])


def read_state(path: Path) -> dict[str, Any]:
    with named(path):
        state = read_object(path / STATE, remedy="its checkpoint cannot be used")
        if state.get("step") != step_of(path):
            raise ValueError(f"{STATE} is not of this step")
        refuse_lost_seal(path / STATE, path, remedy="its checkpoint cannot be used")
    return state


def refuse_other_run(path: Path, saved: str | None, run: str) -> None:
    """Raises if a checkpoint belongs to another run, for example because folders were mixed up. Older checkpoints do not name
    their run."""
    if saved not in (None, run):
        raise DamagedCheckpointError(path, f"it belongs to another run, {saved}")


# Damage


class DamagedCheckpointError(ValueError):
    """A checkpoint cannot be read. The message names the checkpoint, the ``reason`` and the remedy."""

    def __init__(self, path: Path, reason: str) -> None:
        earlier = max((step for step in steps_in(path.parent) if step < step_of(path)), default=None)
        remedy = "then the run starts from its first step" if earlier is None else f"then the run continues from step {earlier}"
        super().__init__(f"the checkpoint {path} is damaged ({reason}): delete it, {remedy}")
        self.reason = reason


def check(path: Path, world: World, *, only: str = "") -> None:
    """Compares a checkpoint with its checksums before any of it is loaded. ``only`` limits the check to files whose names
    start with it. The ranks divide the tensors among them, and all raise DamagedCheckpointError if one of them finds damage."""
    sums = read_checksums(path)
    if sums is None:
        if world.is_main:
            warnings.warn(
                f"the checkpoint {path} has no checksums, since an older version wrote it: it is loaded without a check",
                UncheckedWarning,
                stacklevel=2,
            )
        wrong = missing_files(path)
    else:
        needed = {name: parts for name, parts in sums.items() if name.startswith(only)}
        wrong = wrong_parts(path, needed, share=(world.rank, world.size))
    found = list(dict.fromkeys(complaint for of_rank in world.gather(wrong) for complaint in of_rank))
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise DamagedCheckpointError(path, f"{found[0]}{more}")


def read_checksums(path: Path) -> dict[str, Parts] | None:
    """The checksums of a checkpoint's files; None if an older version wrote it. Raises if its state or its checksums cannot be
    read."""
    read_state(path)
    with named(path):
        if not (path / SUMS).exists() and not is_sealed(path / STATE):
            return None
        return read_sums(path, remedy="restore it")


def missing_files(path: Path) -> list[str]:
    """Files that are missing in a checkpoint without checksums, according to its indices."""
    wrong = [f"{part} is missing" for part in (MODEL, OPTIMIZER) if not (path / part).is_dir()]
    for index in sorted(path.glob("*/*.index.json")):
        with named(path):
            files = set(read_object(index, remedy="restore it").get("weight_map", {}).values())
        wrong += [f"{index.parent.name}/{file} is missing" for file in files if not (index.parent / str(file)).is_file()]
    return wrong


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Turns any error of reading a checkpoint into one line with the remedy. A file without permission, or a device without
    memory, is not damage."""
    try:
        yield
    except (PermissionError, torch.OutOfMemoryError, DamagedCheckpointError):
        raise
    except DamagedFileError as error:
        if isinstance(error.__cause__, PermissionError):
            raise
        raise DamagedCheckpointError(path, _without_remedy(error, path)) from error
    except (*_READING, SafetensorError, CheckpointException) as error:
        raise DamagedCheckpointError(path, _reason(error)) from error


def _without_remedy(error: DamagedFileError, path: Path) -> str:
    """The damage in a file of a checkpoint, without the file's own remedy."""
    return str(error).removeprefix(f"{path}/").rpartition(":")[0]


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that the run can write this step again. An older damaged one of this step is removed."""
    aside = path.with_name(path.name.replace(_PREFIX, _DAMAGED))
    shutil.rmtree(aside, ignore_errors=True)
    return path.replace(aside)


# Listing and removing checkpoints


def latest(folder: Path) -> Path | None:
    return max(_complete(folder), key=step_of, default=None)


def steps_in(folder: Path) -> list[int]:
    """The steps with a checkpoint, in order."""
    return sorted(map(step_of, _complete(folder)))


def folder_name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def prune(folder: Path, *, keep: int, best: int | None) -> None:
    """Removes all checkpoints but the last ``keep`` and the best, and folders that a killed process left unfinished."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in sorted(_complete(folder), key=step_of)[:-keep]:
        if step_of(path) != best:
            _remove(path)


def drop_after(folder: Path, step: int) -> None:
    """Removes the checkpoints of later steps."""
    for path in sorted(_complete(folder), key=step_of, reverse=True):
        if step_of(path) > step:
            _remove(path)


def _remove(path: Path) -> None:
    # Renamed first, since a half-removed folder must not look like a checkpoint.
    doomed = path.with_name(f"{_UNFINISHED}{path.name.removeprefix(_PREFIX)}")
    path.replace(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _complete(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]


# What is in a checkpoint


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and persistent buffers, which are the masks. They are the tensors themselves, not copies."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())
    return parameters | {name: buffers[name] for name in model.state_dict() if name in buffers}


def optimizer_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """State tensors named ``<parameter>/<what>``, such as ``norm.weight/exp_avg``. Learning rates and other options follow from
    the configuration."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{what}": value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for what, value in state.items()
        if value is not None
    }


def _read_optimizer_state(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Reads state into optimizers that have made no step. If the checkpoint keeps a weight as non-zeros and the model as a
    matrix, or the reverse, the optimizer's state of this weight is converted at the first step."""
    homes = {id(p): (o, g) for o in optimizers for g in o.param_groups for p in g["params"]}
    for key, entry in stored_tensors(folder).items():
        name, _, what = key.partition("/")
        weight = weight_of(model, name)
        optimizer, group = homes[id(weight.parameter)]
        optimizer.state[weight.parameter][what] = _empty_state(entry, weight.parameter, group)
        if weight.is_foreign(entry.size):
            watch_optimizers(model, replaced=())
    read_tensors(folder, optimizer_state(model, optimizers))


def _empty_state(entry: TensorStorageMetadata, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
    dtype = entry.properties.dtype
    if tuple(entry.size) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format).detach()
    # Fused optimizers keep the step count on the parameter's device, others on the CPU.
    beside = entry.size or group.get("fused") or group.get("capturable")
    return torch.zeros(entry.size, dtype=dtype, device=parameter.device if beside else torch.device("cpu"))


def _reason(error: BaseException) -> str:
    """The cause in one line, unwrapped from torch's own errors."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
