"""Runs of thirty steps that save every third: their folders, and what is in them."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.run.distributed import World
from smupar.lm.run.folder import read_summary
from smupar.lm.run.step import Stepper

CPU = torch.device("cpu")
CONFIG = RunConfig(
    model=ModelConfig(width=64, depth=1, vocab_size=128), base_width=32, sparsity=0.75, mask_every=4, mask_stop=0.7,
    steps=30, batch_size=4, seq_len=32, valid_batches=2,
)  # fmt: skip
HOW = Execution(save_every=3, valid_every=10, log_every=2, keep=2, device="cpu", peak_tflops=0.1)


def stepper_of(config, text, how=HOW):
    """The steps of a run, one by one, on a CPU."""
    return Stepper(config, how, World(0, 1, CPU, "ddp"), text)


def checkpoints(folder):
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


def tensors(folder, step):
    """All of a checkpoint that one process wrote."""
    path = Path(folder) / "checkpoints" / f"step-{step:08d}"
    files = [(part, file) for part in ("model", "optimizer") for file in (path / part).glob("*.safetensors")]
    return {f"{part}/{name}": tensor for part, file in files for name, tensor in load_file(file).items()}


def rows(folder):
    """Metrics, without the speed."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines]


def resumable(finished, folder, step):
    """A copy of a run as it was when the checkpoint of a step was its last."""
    shutil.copytree(finished, folder)
    for file in ("summary.json", "trace.json"):
        (folder / file).unlink(missing_ok=True)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name[-8:]) > step:
            shutil.rmtree(path)
    return folder


def assert_same_run(folder, reference, steps=30):
    ours, theirs = tensors(folder, steps), tensors(reference, steps)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    a, b = read_summary(Path(folder)), read_summary(Path(reference))
    names = ("status", "train_loss", "valid_loss", "best_step", "sparsity")
    assert [getattr(a, name) for name in names] == [getattr(b, name) for name in names]
    assert a.status == "finished"
    assert rows(folder) == rows(reference)
    traces = [Path(place) / "trace.json" for place in (folder, reference)]
    assert len({trace.read_text() if trace.exists() else None for trace in traces}) == 1


def losses(folder):
    return {row["step"]: row["loss"] for row in rows(folder)}


def assert_same_curve(folder, reference, relative):
    ours, theirs = losses(folder), losses(reference)
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[step] / theirs[step] - 1) for step in theirs) < relative


CURVE = Execution(log_every=1, valid_every=10, save_every=10, keep=9, device="cpu", peak_tflops=0.1)
