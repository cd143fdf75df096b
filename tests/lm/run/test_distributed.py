"""The training loop over two ranks."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from smupar.cli.main import main
from smupar.lm.run.folder import read_summary
from smupar.lm.run.train import train
from tests.lm.run.processes import free_port, start_rank, start_ranks
from tests.lm.run.runs import CURVE, assert_same_curve, checkpoints, resumable, rows


def two_ranks(config, how):
    logs = [Path(f"{how.out}.{rank}.log") for rank in range(2)]
    ranks = start_ranks(partial(train, config, how), logs)
    for process in ranks:
        process.join()
    texts = [log.read_text() for log in logs]
    assert [process.exitcode for process in ranks] == [0, 0], texts
    return texts


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def two(request, short, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "run"
    logs = two_ranks(short, replace(CURVE, out=str(folder), parallel=request.param))
    return folder, logs


def test_two_ranks_give_the_curve_of_one(two, one_rank):
    folder, _ = two
    assert_same_curve(folder, one_rank, 1e-5)
    ours, theirs = read_summary(folder), read_summary(one_rank)
    assert ours.valid_loss == pytest.approx(theirs.valid_loss, rel=1e-5)
    assert (ours.num_ranks, ours.num_parameters) == (2, theirs.num_parameters)


def test_only_the_main_rank_speaks(two):
    _, (main_rank, other) = two
    assert "rule SmuPar" in main_rank
    assert other == ""


def test_run_saved_on_two_ranks_goes_on_with_one(two, one_rank, short, tmp_path):
    folder = resumable(two[0], tmp_path / "run", 10)
    train(short, replace(CURVE, out=str(folder)))
    assert read_summary(folder).num_ranks == 1
    assert_same_curve(folder, one_rank, 1e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_run_saved_on_one_rank_goes_on_with_two_and_accumulates(one_rank, short, tmp_path, parallel):
    folder = resumable(one_rank, tmp_path / "run", 10)
    two_ranks(short, replace(CURVE, out=str(folder), parallel=parallel, micro_batch=1))
    assert_same_curve(folder, one_rank, 1e-5)


def with_muon(run):
    return replace(run, optimizer="muon", lr=0.01, rest_lr=2**-8, steps=5)


def with_branches_to_divide(run):
    return replace(run, model=replace(run.model, depth=4), base_depth=1, steps=5)


@pytest.mark.parametrize(
    ("changed", "parallel", "tolerance"),
    [(with_muon, "fsdp", 1e-3), (with_branches_to_divide, "ddp", 1e-5), (with_branches_to_divide, "fsdp", 1e-5)],
)
def test_run_on_two_ranks_is_as_on_one(short, tmp_path, changed, parallel, tolerance):
    train(changed(short), replace(CURVE, out=str(tmp_path / "one")))
    two_ranks(changed(short), replace(CURVE, out=str(tmp_path / "two"), parallel=parallel))
    assert_same_curve(tmp_path / "two", tmp_path / "one", tolerance)


def test_rank_that_waits_for_the_others_is_interrupted_at_once(config, tmp_path):
    argv = f"train --width 64 --depth 1 --base-width 32 --device cpu --data {config.data} --out {tmp_path}/run".split()
    port, log = free_port(), tmp_path / "log"
    process = start_rank(partial(main, argv), 0, port, log)
    while not listens(port):  # from then on it waits for rank 1, which never comes
        assert process.exitcode is None, log.read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(30)
    still_there = process.exitcode is None
    process.kill()
    assert not still_there


def listens(port):
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_rank_that_loses_the_other_says_so_in_one_line(config, tmp_path):
    folder = tmp_path / "run"
    flags = "train --width 64 --depth 1 --base-width 32 --steps 100000 --seq-len 16 --batch-size 2 --device cpu "
    argv = f"{flags} --data {config.data} --out {folder}".split()
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = start_ranks(partial(main, argv), logs)
    while not (folder / "metrics.jsonl").exists() or len(rows(folder)) < 2:
        assert all(process.exitcode is None for process in ranks), [log.read_text() for log in logs]
        time.sleep(0.05)
    ranks[1].kill()
    ranks[0].join(60)
    assert ranks[0].exitcode == 2, logs[0].read_text()
    assert (
        logs[0].read_text().splitlines()[-1]
        == "smupar: rank 0 has lost another rank: see the output of that rank, then start again"
    )


def test_signal_to_two_ranks_saves_first(config, tmp_path):
    folder = tmp_path / "run"
    flags = "--width 64 --depth 1 --base-width 32 --steps 100000 --seq-len 16 --batch-size 2 --device cpu "
    flags += f"--data {config.data} --out {folder}"
    launcher = "-m torch.distributed.run --nproc-per-node 2 -m smupar train"
    command = [sys.executable, *f"{launcher} {flags}".split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 90
    while not (folder / "metrics.jsonl").exists() or len(rows(folder)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    process.wait(timeout=60)
    (saved,) = checkpoints(folder)
    assert saved == f"step-{rows(folder)[-1]['step']:08d}" or int(saved[-8:]) > rows(folder)[-1]["step"]
