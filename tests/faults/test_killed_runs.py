"""Training runs of all kinds, killed at random moments and started again, end with the bits of runs that were not.

``python -m tests.faults.test_killed_runs 60 SEED`` makes 60 kills and says what became of each run. Kinds of runs may follow.
"""

import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.faults.test_killed_studies import CODES
from tests.lm.run.processes import PROCESSES, run_command
from tests.lm.run.runs import assert_same_run
from tests.support.texts import bpe

STEPS = 240
SHAPE = "--depth 1 --head-dim 16 --base-width 32 --seq-len 16 --batch-size 4 --valid-batches 2 --device cpu --peak-tflops 1"
RUN = f"{SHAPE} --steps {STEPS} --width 64 --sparsity 0.75 --valid-every 40 --log-every 7 --vocab-size 320"
SAVES = ("--save-every 9", "")  # by steps; or only at validations that improved, at signals and at the end
RUNS = {
    "plain": "",
    "rigl": "--dynamic rigl --mask-every 10",
    "measured": "--dynamic set --mask-every 10 --follow trace.json",
    "csr": "--storage csr --optimizer sgd",
    "gmp": "--dynamic gmp --mask-every 10",
    "accumulation": "--micro-batch 1 --clip 1",
}
CASES = [*itertools.product(RUNS, SAVES)]


def make_files(root):
    """A text with a tokenizer, and the trace of a proxy, in the working directory."""
    (root / "source.txt").write_text("Größe zählt, die Breite auch. " * 400, encoding="utf-8")
    bpe(["Größe zählt, die Breite auch. " * 40]).save(str(root / "bpe.json"))
    proxy = f"train {RUN} --width 32 --sparsity 0 --data text --record --out proxy"
    for command in ("data prepare source.txt --tokenizer bpe.json --out text", proxy):
        finish(start(command, root / "log"), root / "log")
    shutil.copy(root / "proxy/trace.json", root)


def start(command, log):
    process = PROCESSES.Process(target=run_command, args=(command.split(), log))
    process.start()
    return process


def finish(process, log):
    process.join()
    assert process.exitcode == 0, log.read_text()


def kill_and_compare(kind, saves, name, moments, num_kills):
    """Kills a run so many times and lets it end. Returns the signals that hit it. Fails if its files are not those of a run
    that nobody killed."""
    command = f"train {RUN} {RUNS[kind]} {saves} --data text --out"
    whole, folder = Path(f"{name}-whole"), Path(name)
    log = folder.with_suffix(".log")
    began = time.monotonic()
    finish(start(f"{command} {whole}", log), log)
    seconds, hits = time.monotonic() - began, []
    for _ in range(num_kills):
        process = start(f"{command} {folder}", log)
        process.join(timeout=moments.uniform(0.1, seconds))
        number = moments.choice(list(CODES))
        if process.exitcode is None:
            os.kill(process.pid, number)
            process.join()
            hits.append(number.name)
            # 0: it had ended; -number, and 1 for SIGINT: the command had not begun.
            allowed = {CODES[number], -number, 0} | ({1} if number == signal.SIGINT else set())
            assert process.exitcode in allowed, (number, process.exitcode, log.read_text())
    finish(start(f"{command} {folder}", log), log)
    assert_same_run(folder, whole, steps=STEPS)
    assert not [*folder.rglob("*.tmp"), *folder.rglob(".unfinished*")]
    return hits


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        make_files(root)
        yield root


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "saves"), CASES)
def test_killed_run_ends_with_the_same_bits(files, kind, saves):
    kill_and_compare(kind, saves, f"{kind}-{len(saves)}", random.Random(f"{kind} {saves}"), 3)


def campaign(num_kills, seed, kinds):
    """Kills runs in turn until there were so many kills."""
    root = Path(tempfile.mkdtemp(prefix="killed-runs-"))
    os.chdir(root)
    make_files(root)
    moments, done, failed = random.Random(seed), 0, 0
    for number, (kind, saves) in enumerate(itertools.cycle(case for case in CASES if case[0] in kinds)):
        if done >= num_kills:
            break
        try:
            hits = kill_and_compare(kind, saves, f"run-{number}", moments, 4)
            done, found = done + len(hits), "the same bits"
        except AssertionError as error:
            hits, failed, found = [], failed + 1, f"DIFFERS, see {root}/run-{number}: {error}"
        print(f"{kind} {saves}: {', '.join(hits) or 'no kill'}: {found}", flush=True)
    print(f"{done} kills, {failed} runs differ")
    if not failed:
        shutil.rmtree(root)
    return failed


if __name__ == "__main__":
    _, wanted, first_seed, *chosen = sys.argv
    sys.exit(campaign(int(wanted), first_seed, chosen or RUNS) > 0)
