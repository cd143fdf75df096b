"""Studies of all engines, killed at random moments and started again, end with the bits of studies that were not.

``python -m tests.faults.test_killed_studies 30 SEED`` makes 30 kills and says what became of each study. Kinds of studies may
follow.
"""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from smupar.cli.main import main
from smupar.lm.run import loop
from smupar.study.stacks import training
from smupar.study.stacks.division import recorded_divisions
from smupar.study.store import Study
from tests.lm.run.processes import quiet
from tests.support.studies import ends_of, tables_of
from tests.support.texts import words

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["smupar.study.engines", "smupar.cli.main", "smupar.study.kinds.tune", "smupar.study.report"])

RUN = "--depth 1 --head-dim 16 --base-width 32 --seq-len 16 --batch-size 2 --valid-batches 1 --steps 150 --device cpu"
MOVING = "--mask-every 10 --sparsity 0.75 --width 32"
STUDIES = {
    "sweep": f"sweep lr=2^-6..2^-4 dynamic=none,rigl,gmp {MOVING}",
    "rounds": "sweep lr=2^-6..2^-4 seed=0,1 --dynamic imp --rounds 2 --sparsity 0.75 --width 32 --clip 1",
    "transfer": "transfer --rules smupar measured --values 0.004 0.008 0.016 --sparsities 0.75 --widths 64 --seeds 2",
    "tune": "tune --num-samples 6",
}
# The stages of a transfer study depend on the results of those before, so with auto it is not told beforehand what to expect.
CASES = [*itertools.product(("sweep", "rounds", "tune"), ("serial", "stacked", "auto"))]
CASES += [("transfer", "serial"), ("transfer", "stacked")]
CODES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}


def command(kind, engine, out):
    return [*STUDIES[kind].split(), *RUN.split(), "--data", words(), "--engine", engine, "--out", str(out)]


def _run(argv, log):
    """Runs a command in a process of its own, with states of stacks that are saved often."""
    training.SAVE_SECONDS, loop.LONGEST_LOOK = 0.3, 0.05
    with quiet(log, "a"):
        main(argv)


def start(kind, engine, folder):
    process = PROCESSES.Process(target=_run, args=(command(kind, engine, folder / "study"), folder / "log"))
    process.start()
    return process


class Whole:
    """Studies that nothing interrupts, each run once, and the seconds that they take."""

    def __init__(self, root):
        self.root, self.seconds = root, {}

    def __call__(self, kind, engine):
        folder = self.root / f"{kind}-{engine}"
        if (kind, engine) not in self.seconds:
            folder.mkdir()
            began = time.monotonic()
            process = start(kind, engine, folder)
            process.join()
            assert process.exitcode == 0, (folder / "log").read_text()
            self.seconds[kind, engine] = time.monotonic() - began
        return Study(folder / "study")


def kill_and_compare(kind, engine, folder, moments, num_kills, whole):
    """Kills a study so many times and lets it end. Returns the signals that hit it, and whether its files are those of the
    study that was not killed."""
    possible = ("serial", "stacked") if engine == "auto" else (engine,)
    expected = {at: whole(kind, at) for at in possible}
    longest, hits = min(whole.seconds[kind, at] for at in possible), []
    for _ in range(num_kills):
        process = start(kind, engine, folder)
        process.join(timeout=moments.uniform(0.2, longest / 3))
        number = moments.choice(list(CODES))
        if process.exitcode is None:
            os.kill(process.pid, number)
            process.join()
            hits.append(number.name)
            # 0: it had ended; -number, and 1 for SIGINT: the command had not begun.
            allowed = {CODES[number], -number, 0} | ({1} if number == signal.SIGINT else set())
            assert process.exitcode in allowed, (number, process.exitcode, (folder / "log").read_text())
    process = start(kind, engine, folder)
    process.join()
    assert process.exitcode == 0, (folder / "log").read_text()
    study = Study(folder / "study")
    chosen = engine
    if engine == "auto":  # what it chose at its first start, which measures
        [division] = recorded_divisions(study, ends_of(study).keys())
        chosen = "serial" if division.size == 1 else "stacked"
    same = tables_of(study) == tables_of(expected[chosen]) and ends_of(study) == ends_of(expected[chosen])
    return hits, same and not list(study.stacks.glob("*/"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Whole(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "engine"), CASES)
def test_killed_study_ends_with_the_same_bits(tmp_path, whole, kind, engine):
    hits, same = kill_and_compare(kind, engine, tmp_path, random.Random(f"{kind} {engine}"), 4, whole)
    assert same, f"{hits}, {tmp_path / 'log'}"


def campaign(num_kills, seed, kinds):
    """Kills studies in turn until there were so many kills."""
    root = Path(tempfile.mkdtemp(prefix="killed-studies-"))
    (root / "whole").mkdir()
    whole, moments, done, failed = Whole(root / "whole"), random.Random(seed), 0, 0
    for number, (kind, engine) in enumerate(itertools.cycle(case for case in CASES if case[0] in kinds)):
        if done >= num_kills:
            break
        folder = root / str(number)
        folder.mkdir()
        hits, same = kill_and_compare(kind, engine, folder, moments, 3, whole)
        done, failed = done + len(hits), failed + (not same)
        found = "the same bits" if same else f"DIFFERS, see {folder}"
        print(f"{kind} {engine}: {', '.join(hits) or 'no kill'}: {found}", flush=True)
    print(f"{done} kills, {failed} studies differ")
    if not failed:
        shutil.rmtree(root)
    return failed


if __name__ == "__main__":
    _, number, first_seed, *chosen = sys.argv
    sys.exit(campaign(int(number), first_seed, chosen or STUDIES) > 0)
