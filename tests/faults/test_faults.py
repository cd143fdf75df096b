"""One file is damaged: ``smupar verify`` names it, and the command that reads it says so, or does what it would have done."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys

import pytest

from tests.faults.conftest import COMMANDS, run
from tests.faults.damage import KINDS

GENERATE = "--prompt G --tokens 5 --seed 1 --device cpu"
LAST = "step-00000008"
ON = COMMANDS["run"].replace("--out run", "--out stopped")

# A file; what to verify; the command that reads it; what it says if the file is damaged. None: the command does not need the
# file, or the file is only a record, and the result is the same.
FILES = {
    "text/index.json": ("text", ON, r"text/index\.json|no index\.json"),
    "text/tokens-00000.bin": ("text", ON, r"tokens-00000\.bin"),
    "text/tokenizer.json": ("text", ON, r"text/tokenizer\.json"),
    "trace.json": ("trace.json", ON, r"trace\.json"),
    "run/config.json": ("run", f"generate run {GENERATE}", r"run/config\.json|run is not the folder"),
    "run/data.json": ("run", f"generate run {GENERATE}", r"data\.json"),
    "run/tokenizer.json": ("run", f"generate run {GENERATE}", r"tokenizer\.json"),
    "run/summary.json": ("run", COMMANDS["run"], r"run/summary\.json"),
    "run/metrics.jsonl": ("run", None, None),
    "run/trace.json": ("run", None, None),
    "run/sums.json": ("run", None, None),
    "run/checkpoints/step-00000012/sums.json": ("run", f"generate run {GENERATE}", r"step-00000012 is damaged.*sums\.json"),
    "run/checkpoints/step-00000012/state.json": ("run", f"generate run {GENERATE}", r"state\.json|has no checkpoint"),
    "run/checkpoints/step-00000012/model/model-00001-of-00001.safetensors": (
        "run",
        f"generate run {GENERATE}",
        r"step-00000012 is damaged \(.*model/model-00001-of-00001",
    ),
    "stopped/followed.json": ("stopped", ON, r"stopped/followed\.json"),
    "stopped/tokenizer.json": ("stopped", ON, r"stopped/tokenizer\.json"),
    "stopped/config.json": ("stopped", ON, r"stopped/config\.json|holds other files and no run"),
    "stopped/metrics.jsonl": (
        "stopped",
        ON,
        r"metrics\.jsonl: (line \d+ is damaged|.* rows .* missing|a row .* has changed|Not a )",
    ),
    f"stopped/checkpoints/{LAST}/sums.json": ("stopped", ON, rf"{LAST} is damaged.*using step"),
    f"stopped/checkpoints/{LAST}/state.json": ("stopped", ON, rf"{LAST} is damaged.*using step"),
    f"stopped/checkpoints/{LAST}/model/model-00001-of-00001.safetensors": ("stopped", ON, rf"{LAST} is damaged.*using step"),
    f"stopped/checkpoints/{LAST}/optimizer/model-00001-of-00001.safetensors": (
        "stopped",
        ON,
        rf"{LAST} is damaged.*using step",
    ),
    f"stopped/checkpoints/{LAST}/model/model.safetensors.index.json": ("stopped", ON, rf"{LAST} is damaged.*using step"),
    "export/config.json": (
        "export",
        f"generate export {GENERATE}",
        r"export( is damaged \(|/)config\.json|export is not the fo",
    ),
    "export/model.safetensors": ("export", f"generate export {GENERATE}", r"export is damaged \(.*model\.safetensors"),
    "export/tokenizer.json": ("export", f"generate export {GENERATE}", r"tokenizer\.json"),
    "export/sums.json": ("export", f"generate export {GENERATE}", r"sums\.json"),
    "study/runs/*/config.json": ("study", "report study", r"config\.json"),
    "study/runs/*/summary.json": ("study", "report study", r"summary\.json"),
    "study/runs/*/metrics.jsonl": ("study", None, None),
}
SAMPLE = {
    ("text/tokens-00000.bin", "flip"),
    ("text/tokenizer.json", "zero"),
    ("trace.json", "nest"),
    ("run/config.json", "flip"),
    ("run/metrics.jsonl", "flip"),
    ("run/checkpoints/step-00000012/model/model-00001-of-00001.safetensors", "flip late"),
    (f"stopped/checkpoints/{LAST}/optimizer/model-00001-of-00001.safetensors", "remove"),
    (f"stopped/checkpoints/{LAST}/state.json", "nest"),
    ("stopped/metrics.jsonl", "not text"),
    ("export/model.safetensors", "flip late"),
    ("export/config.json", "cut"),
    ("study/runs/*/summary.json", "a list"),
    ("run/summary.json", "pipe"),
    ("stopped/metrics.jsonl", "device"),
    ("trace.json", "pipe"),
    ("run/config.json", "circle"),
    ("text/tokenizer.json", "device"),
    ("stopped/tokenizer.json", "pipe"),
    ("stopped/tokenizer.json", "zero"),
    ("run/sums.json", "remove"),
}
CASES = [
    pytest.param(file, kind, marks=() if (file, kind) in SAMPLE else pytest.mark.slow, id=f"{file} {kind}")
    for file in FILES
    for kind in KINDS
]


def same_json(path, before):
    """Whether a JSON file still says the same, as when an e of 1e-5 became an E."""
    try:
        return path.is_file() and json.loads(path.read_bytes()) == json.loads(before)
    except (ValueError, RecursionError):
        return False


# A run that has not ended has no list of its files: what is missing was perhaps never written.
UNSEEN = {("stopped/followed.json", kind) for kind in ("remove", "circle")}  # a link in a circle is no file
# The command of a run whose summary is missing writes it again.
UNSAID = UNSEEN | {("run/summary.json", kind) for kind in ("remove", "circle")}


def verified(file, path, before, kind, capsys):
    """``smupar verify`` finds the damage, unless there is none."""
    where = FILES[file][0]
    answer = run(f"verify {where}", capsys)
    if answer.code == 2:  # the folder is not even recognised
        assert kind in ("remove", "circle") or where == str(path.name)
        return
    quiet = (file, kind) in UNSEEN or same_json(path, before) or (file == "stopped/metrics.jsonl" and answer.code == 0)
    assert answer.code == (0 if quiet else 1), answer.said
    if not quiet:
        assert re.search(rf"{re.escape(path.name)}|{re.escape(path.parent.name)}", answer.out), answer.out


@pytest.mark.parametrize(("file", "kind"), CASES)
def test_damage_is_named_by_verify_and_by_the_command_that_reads_the_file(here, capsys, file, kind):
    (path,) = sorted(here.glob(file))[:1]
    before = path.read_bytes()
    KINDS[kind](path, random.Random(f"{file} {kind}"))
    verified(file, path, before, kind, capsys)
    _, command, said = FILES[file]
    if command is None:
        return
    answer = run(command, capsys)
    assert answer.code in (0, 2), answer.said
    if not re.search(said, answer.said):
        quiet = (file, kind) in UNSAID or same_json(path, before) or file in ("stopped/metrics.jsonl", "trace.json")
        assert quiet, answer.said
        assert answer.code == 0 or (file, kind) in UNSAID, answer.said
    if command == ON and answer.code == 0 and file != "stopped/metrics.jsonl":
        assert losses(here / "stopped") == losses(here / "run")


def losses(folder):
    summary = json.loads((folder / "summary.json").read_text())
    return [summary[name] for name in ("status", "train_loss", "valid_loss", "best_valid_loss", "best_step", "sparsity")]


def test_everything_is_intact_before_it_is_damaged(here, capsys):
    for name in ("text", "trace.json", "run", "stopped", "export", "study", "proxy"):
        answer = run(f"verify {name}", capsys)
        assert (answer.code, f"{name}: intact: " in answer.out) == (0, True), answer.said
    assert run(f"generate run {GENERATE}", capsys).out == run(f"generate export {GENERATE}", capsys).out
    assert run(ON, capsys).code == 0
    assert losses(here / "stopped") == losses(here / "run")


def test_verify_reads_also_what_has_an_old_time(here, capsys):
    """A flipped bit with the time put back: training starts quickly and trusts the time, verify does not."""
    shard = here / "text/tokens-00000.bin"
    run(ON, capsys)
    times = shard.stat()
    KINDS["flip"](shard, random.Random(0))
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    answer = run("verify text", capsys)
    assert answer.code == 1
    assert "tokens-00000.bin has changed since it was prepared" in answer.out
    assert run("data verify text", capsys).code == 1


def test_files_of_another_run_are_named(here, capsys):
    """They are whole, and their seals are good."""
    for name in ("summary.json", "checkpoints/step-00000012"):
        (here / "run" / name).rename(here / "own")
        (here / "proxy" / name).rename(here / "run" / name)
        answer = run(COMMANDS["run"] if name == "summary.json" else f"generate run {GENERATE}", capsys)
        assert answer.code == 2
        assert re.search(rf"{name} is damaged \(it belongs to (another )?run", answer.err), answer.err
        (here / "run" / name).rename(here / "proxy" / name)
        (here / "own").rename(here / "run" / name)
    assert run(COMMANDS["run"], capsys).code == 0


def test_missing_rows_are_counted(here, capsys):
    rows = (here / "stopped/metrics.jsonl").read_text().splitlines(keepends=True)
    (here / "stopped/metrics.jsonl").write_text("".join(rows[1:]))
    answer = run(ON, capsys)
    assert answer.code == 0
    assert re.search(r"stopped/metrics\.jsonl: 1 of \d+ rows up to step 8 are missing", answer.err)


def test_row_that_has_changed_is_noticed_if_it_is_still_a_row(here, capsys):
    """A digit of a run that has not ended: its last checkpoint knows the rows."""
    file = here / "stopped/metrics.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    loss = json.loads(rows[0])["loss"]
    file.write_text(rows[0].replace(str(loss), str(loss + 1)) + "".join(rows[1:]))
    assert f"{file.relative_to(here)}: a row up to step 8 has changed" in run("verify stopped", capsys).out
    answer = run(ON, capsys)
    assert answer.code == 0
    assert f"{file.relative_to(here)}: a row up to step 8 has changed since it was written" in answer.err
    assert "has changed" not in run("verify stopped", capsys).out  # the run has ended, with this row


def test_tokenizer_is_copied_whatever_the_locale(here):
    """A locale without umlauts: text that is read or written by it would be mangled or refused."""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "smupar", *COMMANDS["run"].replace("--out run", "--out latin").split()]
    done = subprocess.run(command, env={**os.environ, **locale}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max((here / "text/tokenizer.json").read_bytes()) > 127
    assert (here / "latin/tokenizer.json").read_bytes() == (here / "text/tokenizer.json").read_bytes()
