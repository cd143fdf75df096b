"""A tiny run, a grid of such runs, and a study of them."""

import multiprocessing

from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.run.folder import Summary
from smupar.study.engines import execute
from smupar.study.store import Study
from tests.support.texts import words

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["smupar.study.engines"])

TINY = RunConfig(
    model=ModelConfig(width=32, depth=1, head_dim=16), base_width=32, steps=20, batch_size=2, seq_len=16, valid_batches=1,
    data=words(),
)  # fmt: skip
AXES = {"rule": ["sp", "smupar"], "sparsity": [0.0, 0.75], "lr": [2.0**-8, 2.0**-6], "seed": [0, 1]}
TINY_FLAGS = [
    "--depth",
    "1",
    "--head-dim",
    "16",
    "--base-width",
    "32",
    "--steps",
    "4",
    "--seq-len",
    "16",
    "--batch-size",
    "2",
    "--valid-batches",
    "1",
    "--device",
    "cpu",
]
TINY_FLAGS += ["--data", words()]


def run(folder, engine, configs):
    with Study.open(folder, {"kind": "sweep", "axes": AXES}, "smupar sweep") as study:
        execute(study, configs, engine=engine, device="cpu")
        study.write_table()
    return study


def summary(config, loss):
    return Summary(
        id=config.id, status="finished", folder="", steps=config.steps, num_tokens=config.num_tokens, num_parameters=1,
        sparsity=config.sparsity or 0.0, train_loss=loss, valid_loss=loss, best_valid_loss=None, best_step=None, seconds=1.0,
        tokens_per_second=1.0, device="cpu", num_ranks=1, num_threads=1, versions={},
    )  # fmt: skip
