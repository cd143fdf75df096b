"""Runs that fit in one stack."""

from dataclasses import replace

from smupar.lm.config.run_config import ModelConfig, RunConfig

BASE = RunConfig(model=ModelConfig(width=64, depth=1), base_width=32, steps=100, batch_size=4, seq_len=32, valid_batches=1)
BAG = [
    replace(BASE, rule="mup", sparsity=0.0, lr=2**-7),
    replace(BASE, rule="smupar", sparsity=0.75, lr=2**-6, seed=1),
    replace(BASE, rule="sp", sparsity=0.9, lr=2**-9, schedule="cosine"),
    replace(BASE, rule="smupar-init-only", sparsity=0.9, lr=2**-8, init_std=0.05, alpha_input=4.0, seed=1),
    replace(BASE, pattern="2:4", lr=2**-7, weight_decay=0.1, warmup=0),
]
DEEP = replace(BASE, model=replace(BASE.model, depth=3), base_depth=1, sparsity=0.5)
DEEP_BAG = [DEEP, replace(DEEP, depth_rule="depth-mup", lr=2**-7), replace(DEEP, rule="mup"), replace(DEEP, depth_rule="none")]
