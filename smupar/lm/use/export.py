"""Exports a model as a folder to share. Every factor of the rule is folded into the weights, so that a plain GPT gives the same
logits. A model card describes the model and its risks."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from smupar.lm.config.commands import ExportConfig
from smupar.lm.data.tokenizer import TOKENIZER_FILE
from smupar.lm.model.gpt import GPT, attentions, blocks, residual_factor
from smupar.lm.run import checkpoint
from smupar.lm.run.folder import read_corpus_info, read_summary
from smupar.lm.use.load import EXPORT_FORMAT, LoadedRun, load_run
from smupar.model.attached import mask_of
from smupar.model.csr import compress_export
from smupar.model.factors import BRANCH, FACTOR
from smupar.output.checksums import write_sums
from smupar.output.files import refuse_existing, whole_folder, write_atomic
from smupar.output.json_files import write_sealed
from smupar.plan.plan import PLAN_FILE
from smupar.refusals import refuse


def export(config: ExportConfig) -> str:
    """Writes the folder. Returns a line about its content."""
    out = Path(config.out)
    refuse_existing(out)
    run = load_run(config.folder, best=config.best)
    tensors = folded(run.model)
    if config.format == "sparse":
        for row in run.plan:
            mask = mask_of(run.model, row.name)
            if mask is not None and len(row.shape) == 2:
                compress_export(tensors, row.name, mask)
    if config.dtype == "bf16":
        tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    described = {
        "format": EXPORT_FORMAT,
        "storage": config.format,
        "model": asdict(replace(run.config.model, tied=False)),
        "tokenizer": read_corpus_info(run.folder).tokenizer,
    }
    with whole_folder(out) as folder:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        write_sealed(folder / "config.json", described)
        write_atomic(folder / "README.md", model_card(run))
        if (run.folder / TOKENIZER_FILE).exists():
            run.tokenizer.save(folder)
        # People edit the model card, so it has no checksum.
        write_sums(folder, [name for name in ("model.safetensors", "config.json", TOKENIZER_FILE) if (folder / name).exists()])
    size = (out / "model.safetensors").stat().st_size
    return f"step {run.step} of {run.folder}, {config.format}, {size / 2**20:.1f} MiB, with a model card: {out}"


def is_of_transformers(config: ExportConfig) -> bool:
    """Whether the Hugging Face integration saved the folder. It exports such models itself."""
    if not (Path(config.folder) / PLAN_FILE).exists():
        return False
    refuse(
        config.format != "dense" or config.best,
        f"{config.folder} is a model of transformers, which reads dense weights: leave out --format and --best",
    )
    return True


@torch.no_grad()
def folded(model: GPT) -> dict[str, Tensor]:
    """The state dict of an untied, plain GPT with the same logits. The weights of embedding and unembedding are multiplied by
    their factors. The queries are multiplied by the rule's attention scale divided by the usual 1 / sqrt(head_dim). The weights
    that end a residual branch are multiplied by its branch factor divided by the plain model's branch factor."""
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tensors["unembedding.weight"] = model.unembedding.weight.detach().clone()
    for path in ("embedding", "position", "unembedding"):
        factor = getattr(model.get_submodule(path), FACTOR, None) if hasattr(model, path) else None
        if factor is not None:
            tensors[f"{path}.weight"] *= factor
    for number, attention in enumerate(attentions(model)):
        factor = attention.scale * attention.head_dim**0.5
        for name in ("weight", "bias"):
            if f"blocks.{number}.attention.qkv.{name}" in tensors:
                tensors[f"blocks.{number}.attention.qkv.{name}"][: model.config.width] *= factor
    plain = residual_factor(model.config, model.config.depth)
    for number, block in enumerate(blocks(model)):
        for path, module in block.named_modules(prefix=f"blocks.{number}"):
            for name, _ in module.named_parameters() if hasattr(module, BRANCH) else ():
                tensors[f"{path}.{name}"] *= getattr(module, BRANCH) * (block.factor / plain)
    return tensors


def model_card(run: LoadedRun) -> str:
    config, plan, model = run.config, run.plan, run.config.model
    state = checkpoint.read_state(run.folder / "checkpoints" / checkpoint.folder_name(run.step))
    sizes = {name: parameter.numel() for name, parameter in run.model.named_parameters()}
    masks = {name: mask_of(run.model, name) for name in sizes}
    kept = {name: sizes[name] if mask is None else int(mask.sum()) for name, mask in masks.items()}
    hidden = [row.name for row in plan if row.role == "hidden"]
    density = sum(kept[name] for name in hidden) / sum(sizes[name] for name in hidden)
    valid_loss, text = state.get("valid_loss"), read_corpus_info(run.folder)
    rows = {
        "model": f"GPT, width {model.width}, depth {model.depth}, {model.num_heads} heads of {model.head_dim}, "
        f"{model.positions} positions, {model.activation}",
        "parameters": f"{sum(sizes.values()):,}, of which the masks keep {sum(kept.values()):,}",
        "density of hidden weights": f"{density:.4g} ({config.pattern} masks, {config.allocation}, seed "
        f"{plan.seed}" + (f", moved by {config.dynamic})" if config.dynamic != "none" else ")"),
        "rule": f"{config.rule}, tuned at width {config.base_width}: LR {config.lr:g}, init std {config.init_std:g}, "
        f"alphas {config.alpha_input:g} and {config.alpha_output:g}",
        "optimizer": f"{config.optimizer}, {config.schedule} schedule, warm-up of {config.warmup_steps} steps, weight decay "
        f"{config.weight_decay:g} ({config.decay})",
        "data": f"{text.name} ({text.num_tokens:,} tokens, tokenizer {text.tokenizer['name']}, sha256 {text.sha256[:16]})",
        "trained": f"{run.step:,} of {config.steps:,} steps of {config.batch_size} x {config.seq_len} tokens, {config.dtype}",
        "validation loss": "not measured" if valid_loss is None else f"{valid_loss:.4f} nats per token",
    }
    table = "\n".join(f"| {what} | {text} |" for what, text in rows.items())
    return _CARD.format(table=table, energy=_energy(run, state.get("seconds", 0.0) / 3600))


def _energy(run: LoadedRun, hours: float) -> str:
    summary = read_summary(run.folder)
    device, num_ranks = (summary.device, summary.num_ranks) if summary else ("an unknown device", 1)
    watts = 100.0 if device == "cpu" else 700.0  # a guess for a CPU, and the datasheet's value for an H200
    return (
        f"About {hours * watts * num_ranks / 1000:.3g} kWh: {hours:.3g} hours on {num_ranks} x {device}, at {watts:g} W each."
    )


_CARD = """# A sparse GPT trained with smupar

| | |
|---|---|
{table}

## Energy

{energy} An estimate from time and nominal power, without cooling, data
preparation or the runs that tuned the hyperparameters.

## What to be careful with

- Removing weights does not hurt evenly: rare facts, rare languages and underrepresented groups lose more than the mean loss
  shows. Compare with a dense model on what you care about before using this one.
- A base language model repeats what is in its data, including what is false, private or offensive. It was not aligned.
- The sparsity is unstructured unless the pattern says otherwise. It saves memory here only in the sparse format, and time
  only with kernels that skip zeros.

## Files

`model.safetensors` holds the weights of a plain pre-norm GPT whose attention is scaled by 1 / sqrt(head_dim): the rule's
factors are folded in. In the sparse format a masked matrix is `<name>.crow_indices`, `.col_indices` and `.values` (CSR).
`smupar generate FOLDER` samples from it.
"""
