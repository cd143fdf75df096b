"""The coordinate check of the built-in GPT."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from smupar.check.coord_check import coord_check
from smupar.check.coordinates.report import Report
from smupar.execute.threads import cpu_threads
from smupar.lm.config.commands import CheckConfig
from smupar.lm.config.run_config import ModelConfig
from smupar.lm.data.batches import read_batch, split, standard_library
from smupar.lm.model.gpt import BRANCHES, GPT, set_attention_scale
from smupar.lm.run.distributed import pick_device
from smupar.lm.run.step import next_token_loss
from smupar.output.files import locked, refuse_other_files
from smupar.output.pictures import missing_pictures


def check_gpt(config: CheckConfig, *, lr: Mapping[str, float] | None = None) -> Report:
    """Runs ``coord_check`` on GPTs; writes check.png, .html and .json. ``lr`` gives each rule its own learning rate instead
    of the common one."""
    folder = Path(config.out)
    with cpu_threads(config.threads), locked(folder):  # raises before any work if the folder cannot be written
        if not (folder / "check.json").exists():
            refuse_other_files(folder, "check")
        if missing := missing_pictures():
            warnings.warn(missing, UserWarning, stacklevel=2)
        report = _checked(config, lr)
        report.to_json(folder / "check.json")
        report.to_html(folder / "check.html")
        if not missing:
            report.plot(folder / "check.png")
    return report


def files_of(config: CheckConfig) -> list[str]:
    """The files that a check writes into its folder, the page first."""
    return [name for name in ("check.html", "check.png", "check.json") if (Path(config.out) / name).exists()]


def _checked(config: CheckConfig, lr: Mapping[str, float] | None) -> Report:
    device = pick_device(config.device)

    def make_model(width: int, depth: int = config.depth) -> GPT:
        model = GPT(ModelConfig(width=width, depth=depth, head_dim=config.head_dim))
        return model if next(model.parameters()).is_meta else model.to(device)

    text, _ = split(standard_library())
    batches = (
        read_batch(
            text, seed=0, step=step, batch_size=config.batch_size, seq_len=config.seq_len, to=lambda part: part.to(device)
        )
        for step in range(config.whole_run or config.steps)
    )

    def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """A schedule with warm-up for a tenth of the run, and a learning rate that then falls to zero."""
        steps = config.whole_run or config.steps
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 10 * (step + 1) / steps) * (1 - step / steps))

    return coord_check(
        make_model,
        next_token_loss,
        batches,
        base_width=config.base_width,
        base_depth=config.base_depth,
        rules=config.rules,
        widths=config.widths,
        densities=[1 - sparsity for sparsity in config.sparsities],
        depths=config.depths,
        optimizer={"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[config.optimizer],
        lr=config.lr if lr is None else lr,
        steps=None if config.whole_run else config.steps,
        horizon=config.whole_run,
        weight_decay=config.weight_decay,
        scheduler=None if config.whole_run is None else falling,
        seeds=config.seeds,
        prepare=set_attention_scale,
        pattern=config.pattern,
        init_std=config.init_std,
        alpha_input=config.alpha_input,
        alpha_output=config.alpha_output,
        branches=BRANCHES,
        depth=config.depth_rule,
    )
