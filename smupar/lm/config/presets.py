"""Presets are named starting points for runs: functions that return a full configuration, which flags change field by field.
The functions take the rule and the width, because in the paper's settings other fields depend on these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from smupar.lm.config.run_config import ModelConfig, RunConfig

# The paper's values, found on its dense proxy of width 256.
TABLE_3 = {"init_std": 0.08665602, "lr": 1.62e-2, "alpha_input": 9.1705, "alpha_output": 1.0951835}


def demo(rule: str = "smupar", width: int | None = None) -> RunConfig:
    """A small sparse GPT on the source of Python's standard library: a minute on a laptop."""
    return RunConfig(rule=rule)


def gpt_610m(rule: str = "smupar", width: int | None = None) -> RunConfig:
    """The size of the paper's largest model, shaped for a GPU: no biases, vocabulary padded to 50,304, bf16."""
    paper = paper_610m(rule)
    return replace(paper, model=replace(paper.model, ff_multiple=None, vocab_size=50304, biases=False))


def paper_610m(rule: str = "smupar", width: int | None = None) -> RunConfig:
    """Figure 3 and Table 2: 606,519,972 parameters, 12.1B tokens of SlimPajama, linear schedule to zero."""
    # Widths, batch, steps, LR, init, alphas and schedule are Table 4's. The paper does not print the MLP's width (we use 8/3 of
    # the width), the vocabulary (we use GPT-2's), betas, epsilon and decay (defaults of RunConfig) or clipping (as in the
    # paper's code).
    run = RunConfig(
        model=ModelConfig(width=2048, depth=10, head_dim=64, vocab_size=50257, ff_multiple=1, biases=True),
        schedule="linear-to-zero",
        steps=11752,
        warmup=1175,
        batch_size=504,
    )
    return _tuned(run, rule, sp_lr=2e-4)


def paper_iso(rule: str = "smupar", width: int | None = None) -> RunConfig:
    """Figure 10: ten layers, 1B tokens; widths 768, 1088, 1536, 2176 at sparsity 0, 0.5, 0.75, 0.875."""
    run = RunConfig(
        model=ModelConfig(width=768, depth=10, head_dim=64, vocab_size=50257, ff_multiple=1, biases=True),
        sparsity=0.0,
        steps=1907,
        warmup=190,
        batch_size=256,
    )
    return _tuned(run, rule, sp_lr=6e-4 if (width or 768) <= 1088 else 2e-4)


def _tuned(run: RunConfig, rule: str, *, sp_lr: float) -> RunConfig:
    """Table 3's hyperparameters of the proxy of width 256; SP has its own LR and init."""
    run = replace(run, rule=rule, base_width=256, seq_len=2048, data="data/slimpajama", dtype="bf16", clip=1.0)
    if rule == "sp":
        return replace(run, lr=sp_lr, init_std=0.02)
    return replace(run, **TABLE_3)  # type: ignore[arg-type]


PRESETS: dict[str, Callable[[str, int | None], RunConfig]] = {
    "demo": demo,
    "610m": gpt_610m,
    "paper-610m": paper_610m,
    "paper-iso": paper_iso,
}


def preset(name: str, rule: str = "smupar", width: int | None = None) -> RunConfig:
    """The configuration of a preset under a rule, for models of this width."""
    if name not in PRESETS:
        raise ValueError(f"no preset is called {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name](rule, width)
