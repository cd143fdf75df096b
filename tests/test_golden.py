"""The runs of golden.py end with their stored losses; files that an older version wrote load and go on as they would have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import smupar
from tests.support import golden

FIXTURES = Path(__file__).parent / "fixtures"
OLDER = FIXTURES / "older"
TINY = "--width 16 --base-width 8 --depth 1 --head-dim 8 --seq-len 16 --batch-size 2 --valid-batches 1 --device cpu --data text"
TRANSFER = (
    TINY.removeprefix("--width 16 ")
    + " --rules sp smupar --sparsities 0 0.5 --widths 16 --steps 10 --weight-decay 0 --out transfer"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return golden.run_all(tmp_path_factory.mktemp("golden"))


def numbers(value):
    """All numbers of nested values, with where they are."""
    if isinstance(value, dict):
        return {f"{key}/{place}": number for key, part in value.items() for place, number in numbers(part).items()}
    if isinstance(value, list):
        return numbers(dict(enumerate(value)))
    return {} if isinstance(value, str) or value is None else {"": value}


def losses(run):
    """Traces are left out: they hold differences of nearly equal numbers, which processors round differently."""
    return numbers({name: part for name, part in run.items() if name != "trace"})


@pytest.mark.parametrize("name", ["single", "stacked", "rigl with measured updates", "csr storage", "two ranks"])
def test_golden_run_has_its_stored_losses(runs, name):
    stored = json.loads((FIXTURES / "golden.json").read_text())[name]
    assert losses(runs[name]) == pytest.approx(losses(stored), rel=1e-5)


@pytest.fixture
def older(tmp_path, monkeypatch):
    """A folder with the files of an older version, and the text that they were made from."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(OLDER, tmp_path, dirs_exist_ok=True)
    golden.main(["data", "prepare", str(golden.ROOT / "LICENSE"), "--out", "text"])
    return tmp_path


RUNS = {
    "rigl": "--sparsity 0.5 --steps 30 --dynamic rigl --mask-every 4 --follow trace.json --weight-decay 0.1",
    "csr": "--sparsity 0.5 --steps 30 --dynamic set --mask-every 4 --storage csr --weight-decay 0",
    "gmp": "--sparsity 0.5 --steps 30 --dynamic gmp --mask-every 4 --optimizer muon --lr 0.01 --weight-decay 0",
}


@pytest.mark.parametrize("name", RUNS)
def test_older_checkpoint_goes_on_as_it_would_have(older, capsys, name):
    folder = older / name
    expected = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    golden.main(["train", "demo", *f"{TINY} {RUNS[name]} --log-every 1 --save-every 15 --out {name}".split()])
    assert "continuing from step 24 of 30" in capsys.readouterr().err
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-5)
    assert found[-1]["valid_loss"] == pytest.approx(expected[-1]["valid_loss"], rel=1e-5)


@pytest.mark.filterwarnings("default:.*does not say in which stacks")
def test_older_sweep_is_complete_and_can_grow(older, capsys):
    sweep = f"{TINY} --sparsity 0.5 --steps 20 --weight-decay 0 --out sweep"
    golden.main(["sweep", "lr=0.01,0.02", "rule=sp,smupar", *sweep.split()])
    assert "4 runs, 4 of them done" in capsys.readouterr().err
    golden.main(["sweep", "lr=0.01,0.02,0.04", "rule=sp,smupar", *sweep.split()])
    said = capsys.readouterr().err
    assert "6 runs, 4 of them done" in said
    assert "does not say in which stacks 4 runs were trained" in said  # their version did not record it


def test_older_transfer_study_is_complete_and_reported(older, capsys):
    golden.main(["transfer", *TRANSFER.split(), "--values", "0.005", "0.01", "0.02"])
    assert "18 runs, 18 of them done" in capsys.readouterr().err
    golden.main(["report", "transfer"])
    assert "best learning rate" in capsys.readouterr().out


def test_older_trace_loads():
    trace = smupar.Trace.load(OLDER / "trace.json")
    assert trace.num_steps == 30
    assert trace.optimizer == "adamw"
    assert not trace.diverged
