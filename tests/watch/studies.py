"""Folders of studies and runs as training leaves them, without training."""

import json
import math

from smupar import __version__
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.study.config import TransferConfig
from smupar.study.kinds.transfer import define_transfer, proposals

RUN = RunConfig(model=ModelConfig(width=64, depth=1, head_dim=16), base_width=32, steps=40, batch_size=4, seq_len=32)
CONFIG = TransferConfig(
    run=RUN, rules=("sp", "smupar"), sparsities=(0.75,), widths=(64,), values=tuple(2.0**log2 for log2 in range(-9, -3))
).normalised
_BEST = {"sp": -8.0, "mup": -6.0, "smupar": -5.5}  # the base-2 logarithm of the best learning rate of a sparse model


def loss_of(run):
    """A parabola over log2(lr). Its minimum is at 2^-6 on the dense proxy; on the target at 2^-8 (SP) and 2^-5.5 (SmuPar)."""
    best = _BEST[run.rule] if run.sparsity else -6.0
    return 3 + 0.1 * (math.log2(run.lr) - best) ** 2


def make_study(folder, *, num_left_out=0, definition=None, command="smupar transfer --out here"):
    """A transfer study whose last runs have not ended. Returns those runs."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {"format": "smupar-study/1", "version": __version__, "definition": definition or define_transfer(CONFIG).stored}
    (folder / "study.json").write_text(json.dumps({**described, "command": command}))
    runs = proposals(CONFIG)
    (folder / "runs").mkdir(exist_ok=True)
    for run in runs[: len(runs) - num_left_out]:
        end_run(folder / "runs" / run.id, run)
    return runs[len(runs) - num_left_out :]


def end_run(folder, run, *, loss=None, status="finished"):
    """Writes a run as if it had been trained; its summary comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    loss = loss_of(run) if loss is None else loss
    (folder / "config.json").write_text(run.to_json())
    rows = [{"step": step, "loss": loss + 2 * math.exp(-step / 8), "tokens_per_second": 1000.0} for step in range(4, 41, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "id": run.id,
        "status": status,
        "folder": folder.name,
        "steps": 40,
        "num_tokens": 5120,
        "num_parameters": 1000,
        "sparsity": run.sparsity or 0.0,
        "train_loss": loss if status == "finished" else None,
        "valid_loss": loss + 0.01 if status == "finished" else None,
        "best_valid_loss": loss,
        "best_step": 40,
        "seconds": 1.5,
        "tokens_per_second": 1000.0,
        "device": "cpu",
        "num_ranks": 1,
        "num_threads": 1,
        "versions": {},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
