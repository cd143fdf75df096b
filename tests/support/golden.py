"""Five tiny runs whose numbers must not change when the code is redesigned: on the text of LICENSE, through the command line.

``python tests/support/golden.py OUT.json`` writes losses, metrics and a hash of the final weights. Two commits that run it on
one machine must write the same file; tests/test_golden.py compares the losses with stored ones on any machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import smupar
from smupar.cli import main as cli

ROOT = Path(__file__).parents[2]
SHAPE = (
    "--width 64 --base-width 32 --depth 2 --head-dim 16 --seq-len 32 --batch-size 4 --steps 40 --valid-batches 2 --device cpu"
)
SPARSE = f"{SHAPE} --sparsity 0.875 --weight-decay 0.1 --clip 1.0 --log-every 1"


def run_all(folder: Path) -> dict[str, dict[str, object]]:
    """Each run by its name."""
    text = folder / "text"
    main(["data", "prepare", str(ROOT / "LICENSE"), "--out", str(text)])
    return {
        "single": trained(f"{SPARSE} --data {text} --out {folder / 'single'}"),
        "stacked": {**swept(text, folder / "stacked"), **stacked_by_hand()},
        "rigl with measured updates": measured(text, folder),
        "csr storage": trained(f"{SPARSE} --storage csr --dynamic set --mask-every 7 --data {text} --out {folder / 'csr'}"),
        "two ranks": on_two_ranks(f"{SPARSE} --dynamic rigl --mask-every 7 --data {text} --out {folder / 'ranks'}"),
    }


def main(argv: list[str]) -> None:
    """A command, in this process."""
    try:
        cli.main(argv)
    except SystemExit as error:
        if error.code:
            raise


def trained(flags: str) -> dict[str, object]:
    main(["train", "demo", *flags.split()])
    return outcome(Path(flags.split()[-1]))


def on_two_ranks(flags: str) -> dict[str, object]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "smupar", "train", "demo"]
    # On a machine without a working host name, ranks still find each other.
    command[5:5] = ["--master-addr", "127.0.0.1", "--master-port", str(20000 + os.getpid() % 20000)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *flags.split()], check=True, env=environment, capture_output=True)
    return outcome(Path(flags.split()[-1]))


def measured(text: Path, folder: Path) -> dict[str, object]:
    proxy = f"{SHAPE} --width 32 --sparsity 0 --weight-decay 0.1 --record --data {text} --out {folder / 'proxy'}"
    main(["train", "demo", *proxy.split()])
    trace = folder / "proxy" / "trace.json"
    target = f"{SPARSE} --dynamic rigl --mask-every 7 --follow {trace} --data {text} --out {folder / 'measured'}"
    return {**trained(target), "trace": json.loads(trace.read_text())["effects"]}


def swept(text: Path, folder: Path) -> dict[str, object]:
    """One stack of runs that differ in rule, density, learning rate and in how masks move."""
    axes = "lr=0.01,0.02 dynamic=none,rigl,gmp rule=smupar,mup"
    main(["sweep", *axes.split(), *f"{SHAPE} --sparsity 0.75 --mask-every 7 --weight-decay 0.1".split(), "--engine", "stacked",
          "--data", str(text), "--out", str(folder)])  # fmt: skip
    rows = json.loads((folder / "table.json").read_text())
    return {"losses": {label(row): [row["train_loss"], row["valid_loss"]] for row in sorted(rows, key=label)}}


def label(row: dict[str, object]) -> str:
    return f"{row['rule']} {row['dynamic']} {row['lr']}"


def stacked_by_hand() -> dict[str, object]:
    """Muon on a stack, by the public function, with the weights it leaves."""

    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    models, base = [make(32) for _ in range(3)], make(16)
    densities = (1.0, 0.5, 0.25)
    plans = [smupar.parameterize(m, base=base, density=d, init_std=0.1) for m, d in zip(models, densities, strict=True)]
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
    rng = torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 8, generator=rng), torch.randint(4, (16,), generator=rng)) for _ in range(10)]

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    losses = smupar.train_stacked(models, plans, loss_fn, batches, lr=[0.01, 0.02, 0.04], optimizer="muon", weight_decay=0.1)
    return {
        "muon": losses.tolist(),
        "weights": digest({f"{i}.{n}": p for i, m in enumerate(models) for n, p in m.state_dict().items()}),
    }


def outcome(folder: Path) -> dict[str, object]:
    """Losses of every logged step, the ends, and the weights, of a run's folder."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    last = max((folder / "checkpoints").glob("step-*"))
    tensors = {k: v for file in sorted(last.glob("model/*.safetensors")) for k, v in load_file(file).items()}
    assert tensors, f"no weights in {last}"
    return {
        "losses": [row["loss"] for row in rows],
        "ends": {
            name: summary[name] for name in ("train_loss", "valid_loss", "best_valid_loss", "best_step", "steps", "sparsity")
        },
        "weights": digest(tensors),
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode() + tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        Path(sys.argv[1]).write_text(json.dumps(run_all(Path(temporary)), indent=1) + "\n")
