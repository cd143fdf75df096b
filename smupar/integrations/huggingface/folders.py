"""Saves and loads folders with a model, its masks and its plan. Exports plain folders, which ``from_pretrained`` reads."""

from __future__ import annotations

import shutil
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from smupar.integrations.huggingface.folding import folded, has_outputs, has_two_factors, outputs, same
from smupar.integrations.huggingface.inputs import forward_passes
from smupar.model.attached import let_masks_move
from smupar.model.attention_scale import set_scales
from smupar.model.csr import MASK, expand_state, is_compressed
from smupar.model.parameterize import add_masks, attach
from smupar.model.weights import weight_of
from smupar.output.checksums import SUMS, UncheckedWarning, check_sums, write_sums
from smupar.output.files import refuse_existing, whole_folder, write_atomic
from smupar.output.json_files import read_text
from smupar.output.optional import first_line
from smupar.plan.forward.run_copy import Example
from smupar.plan.plan import PLAN_FILE, Plan, PlanWarning
from smupar.plan.scales.find_attention import AttentionChange, find_attentions
from smupar.refusals import refuse
from smupar.rules import SP

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TOLERANCES = {"fp32": 1e-3, "bf16": 0.1}  # allowed differences of outputs, relative to the largest output
# Files that determine what a model computes.
_OF_MODEL = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", PLAN_FILE)
# Files of a tokenizer or an image processor, which an export copies.
_BESIDE = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.model",
           "preprocessor_config.json", "processor_config.json")  # fmt: skip


class _Saving:
    """Replaces a model's ``save_pretrained``, and also writes the plan beside the weights.

    It is an object with a reference to the model, so that after a deepcopy the copy saves itself and not the original.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan) -> None:
        self.model, self.plan = model, plan

    def __call__(self, save_directory: str | PathLike[str], is_main_process: bool = True, **kwargs: Any) -> None:
        refuse(
            kwargs.get("push_to_hub"),
            "save_pretrained(push_to_hub=True) would not write the plan: use model.push_to_hub(repo_id)",
        )
        # Tensors keep the model's own names, so that masks match their weights and the Trainer can load its checkpoints.
        kwargs.setdefault("save_original_format", False)
        type(self.model).save_pretrained(self.model, save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            _record_scales(self.model, self.plan)
            write_atomic(Path(save_directory) / PLAN_FILE, self.plan.to_json())
            _write_sums(Path(save_directory))


def _write_sums(folder: Path) -> None:
    """Writes checksums of the files that describe the model. Other files in the folder, such as the Trainer's, are not ours."""
    write_sums(folder, sorted({path.name for pattern in _OF_MODEL for path in folder.glob(pattern)}))


def _record_scales(model: PreTrainedModel, plan: Plan) -> None:
    """Adds to the plan the attention scales that the user set, so that ``load`` can restore them."""
    known = {change.path for change in plan.attention}
    for attention in find_attentions(model):
        is_known = {attention.holder, attention.path} & known or any(path.startswith(f"{attention.path}.") for path in known)
        if attention.field and not is_known:
            plan.attention.append(AttentionChange(attention.holder, attention.field, attention.value))
            known.add(attention.holder)


def keep_plan(model: PreTrainedModel, plan: Plan) -> None:
    """Makes ``save_pretrained`` write the plan too: when you call it, when the Trainer does, and in a push to the hub."""
    setattr(model, "save_pretrained", _Saving(model, plan))  # noqa: B010  # an attribute of the instance replaces the method


def save(model: PreTrainedModel, plan: Plan, folder: str | PathLike[str]) -> None:
    """``model.save_pretrained`` for a model that was parameterized by ``smupar.parameterize`` and not by this integration."""
    keep_plan(model, plan)
    model.save_pretrained(folder)


def load(folder: str | PathLike[str], *, model_class: type[PreTrainedModel] | None = None) -> tuple[PreTrainedModel, Plan]:
    """Loads the model that ``save_pretrained`` wrote, with its masks, hooks and attention scale, and its plan. The model is in
    eval mode, as after ``from_pretrained``.

    model_class   class of the model; by default the one that the config names, if transformers has it
    """
    path = Path(folder)
    is_checked = check_sums(path, remedy=f"save the model again, or delete {SUMS} if you changed the file on purpose")
    plan = _read_plan(path)
    if not is_checked:
        warnings.warn(f"{path} has no checksums, so it is loaded without a check", UncheckedWarning, stacklevel=2)
    config = _read_config(path)
    tensors = _read_tensors(path)
    for row in plan:
        if is_compressed(tensors, row.name):  # the model was saved with sparse storage
            expand_state(tensors, row.name, row.shape)
    masks = {row.name: tensors.pop(f"{row.name}{MASK}") for row in plan if f"{row.name}{MASK}" in tensors}
    kind: Any = model_class or _class_of(config, path)
    model, info = kind.from_pretrained(None, config=config, state_dict=tensors, output_loading_info=True)
    lost = [name for name in info["missing_keys"] if name in plan]
    lost += [f"{row.name}{MASK}" for row in plan if row.masked and row.name not in masks]
    if lost:
        raise ValueError(f"{path} is incomplete: it lacks {lost[0]!r} and {len(lost) - 1} more tensors; save the model again")
    if model.can_generate() and (path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path)
    _put_masks(model, plan, masks)
    if not plan.attention and plan.rule != SP.name:  # plans of earlier versions did not record how the scale was set
        set_scales(model, plan, forward_passes(model))
    keep_plan(model, plan)
    return model, plan


@torch.no_grad()
def _put_masks(model: nn.Module, plan: Plan, masks: dict[str, Tensor]) -> None:
    attach(model, plan, masks={name: mask for name, mask in masks.items() if plan[name].masked})
    if any(not plan[name].masked for name in masks):  # a sparsifier pruned weights that are dense in the plan
        add_masks(model, plan)
        for name, mask in masks.items():
            weight = weight_of(model, name)
            weight.load(weight.full(), mask)
    if any(plan[name].num_kept not in (None, int(mask.sum())) for name, mask in masks.items()):
        let_masks_move(model)


def export(
    folder: str | PathLike[str], out: str | PathLike[str], *, dtype: str = "fp32", example: Example | None = None
) -> str:
    """Writes a folder that a plain ``from_pretrained`` reads, with the same logits. Returns a line about its content.

    Before the folder gets its final name, the model is loaded and compared with the original on small inputs, and on
    ``example``, a batch for the model. A warning says so if the whole model could not be compared."""
    source, target = Path(folder), Path(out)
    refuse(dtype not in _DTYPES, f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    refuse_existing(target)
    model, plan = load(source)
    plain = folded(model.float(), plan, example)  # fold in fp32, and round once at the end
    nn.Module.to(plain, _DTYPES[dtype])
    with whole_folder(target) as unfinished:
        plain.save_pretrained(unfinished)
        _check_export(model, unfinished, dtype, example)
        for file in (file for pattern in _BESIDE for file in source.glob(pattern)):
            shutil.copy(file, unfinished)
        _write_sums(unfinished)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    return (
        f"{type(plain).__name__} of {source}, {dtype}, {size / 2**20:.1f} MiB, every factor folded in"
        f"{', embedding and head untied' if has_two_factors(plan) else ''}: {target}"
    )


def _check_export(model: PreTrainedModel, folder: Path, dtype: str, example: Example | None) -> None:
    """Loads the exported folder with a plain ``from_pretrained``, and raises if its outputs differ from those of ``model``."""
    wanted = list(outputs(model, example))
    plain = type(model).from_pretrained(folder).float()
    if not same(wanted, list(outputs(plain, example)), _TOLERANCES[dtype]):
        raise ValueError(
            f"the exported {type(model).__name__} has other outputs than the original, so it was not kept: share the folder "
            "that save_pretrained writes"
        )
    if not has_outputs(model, example):
        parts = "only the models inside it were" if wanted else "it was not"
        warnings.warn(
            f"no inputs for a {type(model).__name__} are known, so {parts} compared with the original: pass example=, a batch "
            "for the model, or compare their outputs yourself",
            PlanWarning,
            stacklevel=4,
        )


def _read_plan(folder: Path) -> Plan:
    file = folder / PLAN_FILE
    refuse(
        not file.exists(),
        f"{folder} has no {PLAN_FILE}: it was not saved by save_pretrained of a model that this integration parameterized. "
        "Read a plain model with from_pretrained. Use save(model, plan, folder) for a model that smupar.parameterize changed.",
    )
    return Plan.from_json(read_text(file, remedy="save the model again"), source=str(file))


def _read_config(folder: Path) -> Any:
    try:
        # Without this argument transformers would ask at the terminal whether to run code from the folder.
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # missing or damaged files and unknown architectures may raise any type
        raise ValueError(f"transformers cannot read {folder / 'config.json'} ({first_line(error)}): save it again") from error


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    refuse(not files, f"{folder} has a plan but no model.safetensors: save the model again")
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise ValueError(f"{folder}: its weights are damaged ({error}): save the model again") from error


def _class_of(config: Any, folder: Path) -> type[PreTrainedModel]:
    names = config.architectures or []
    for name in names:
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
            return kind
    raise ValueError(
        f"transformers has no class called {' or '.join(names) or '?'}, which {folder} asks for: pass model_class="
    )
