"""Runs on two ranks, of which one or both are killed at random moments, end with the bits of runs that nobody killed."""

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from smupar.cli.main import main
from tests.faults.test_killed_runs import SHAPE, make_files
from tests.lm.run.processes import start_ranks
from tests.lm.run.runs import assert_same_run

STEPS = 120
RUN = f"{SHAPE} --steps {STEPS} --width 64 --sparsity 0.75 --valid-every 40 --log-every 7 --vocab-size 320 --save-every 9"
RUNS = {
    "ddp": "--parallel ddp --micro-batch 1 --clip 1",
    "fsdp": "--parallel fsdp",
    "ddp rigl": "--parallel ddp --dynamic rigl --mask-every 10",
    "fsdp gmp": "--parallel fsdp --dynamic gmp --mask-every 10",
}
_PATIENCE = 5.0  # seconds after which a launcher kills the ranks that are left


def start(command, logs):
    return start_ranks(partial(main, command.split()), logs)


def finish(ranks, logs):
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0], [log.read_text() for log in logs]


def kill_some(ranks, moments):
    """A launcher sends SIGTERM and SIGINT to all ranks; a machine may lose one of them."""
    number = moments.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    hit = moments.choice([ranks[:1], ranks[1:], ranks]) if number == signal.SIGKILL else ranks
    for process in hit:
        if process.exitcode is None:
            os.kill(process.pid, number)
    until = time.monotonic() + _PATIENCE
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
        process.kill()
        process.join()


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_run_on_two_ranks_that_was_killed_ends_with_the_same_bits(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    moments, logs = random.Random(kind), [tmp_path / f"{number}.log" for number in range(2)]
    command = f"train {RUN} {RUNS[kind]} --data text --out"
    began = time.monotonic()
    finish(start(f"{command} whole", logs), logs)
    seconds = time.monotonic() - began
    for _ in range(3):
        ranks = start(f"{command} run", logs)
        ranks[0].join(moments.uniform(0.3, seconds))
        kill_some(ranks, moments)
    finish(start(f"{command} run", logs), logs)
    assert_same_run(Path("run"), Path("whole"), steps=STEPS)
