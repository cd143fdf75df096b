"""The coordinate check of the built-in GPT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from smupar.coordinates.check import coord_check
from smupar.coordinates.report import Report
from smupar.lm import data
from smupar.lm.config import ModelConfig, TrainConfig
from smupar.lm.gpt import GPT, set_attention_scale
from smupar.lm.train import next_token_loss
from smupar.plan import Plan


def check_gpt(
    *,
    rules: Sequence[str],
    base_width: int,
    widths: Sequence[int],
    sparsities: Sequence[float],
    pattern: str,
    optimizer: str,
    lr: float,
    steps: int,
    seeds: int,
    depth: int,
    head_dim: int,
    batch_size: int,
    seq_len: int,
    out: str | None,
) -> Report:
    """Runs ``coord_check`` on GPTs with the tuned defaults of ``TrainConfig``; writes check.png, .html and .json to ``out``."""

    def make_model(width: int) -> GPT:
        return GPT(ModelConfig(width=width, depth=depth, head_dim=head_dim))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return next_token_loss(model, *batch)

    def prepare(model: nn.Module, plan: Plan) -> None:
        set_attention_scale(model, plan)

    text, _ = data.split(data.standard_library())
    tuned = TrainConfig()
    report = coord_check(
        make_model,
        loss_fn,
        [data.batch(text, seed=0, step=step, batch_size=batch_size, seq_len=seq_len) for step in range(steps)],
        base_width=base_width,
        rules=rules,
        widths=widths,
        densities=[1 - sparsity for sparsity in sparsities],
        optimizer={"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer],
        lr=lr,
        steps=steps,
        seeds=seeds,
        prepare=prepare,
        pattern=pattern,
        init_std=tuned.init_std,
        alpha_input=tuned.alpha_input,
        alpha_output=tuned.alpha_output,
    )
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        report.to_json(folder / "check.json")
        report.plot(folder / "check.png")
        report.to_html(folder / "check.html")
    return report
