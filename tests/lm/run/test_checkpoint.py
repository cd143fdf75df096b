"""Runs whose checkpoints or metrics were damaged on the disk, and runs that go back to an earlier step."""

import json
import os
import random
import shutil
import signal
import threading
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from smupar.lm.run import checkpoint
from smupar.lm.run.folder import read_summary
from smupar.lm.run.loop import Progress
from smupar.lm.run.train import train
from smupar.lm.use.load import load_run
from smupar.output.checksums import SUMS, UncheckedWarning
from smupar.output.json_files import read_object
from tests.faults.damage import flip_at
from tests.lm.run.runs import HOW, assert_same_run, checkpoints, resumable, rows, tensors

LAST = "checkpoints/step-00000027"
MODEL = "model/model-00001-of-00001.safetensors"
OPTIMIZER = "optimizer/model-00001-of-00001.safetensors"


def place_of(path, name):
    """Where a tensor starts and ends in a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return [8 + length + offset for offset in json.loads(data[8 : 8 + length])[name]["data_offsets"]]


def flip_in_tensor(path, name):
    """Flips a bit of the exponent of the first number."""
    flip_at(path, place_of(path, name)[0] + 3)


def fill_mask(path, name, value):
    data = bytearray(path.read_bytes())
    start, end = place_of(path, name)
    data[start:end] = bytes([value]) * (end - start)
    path.write_bytes(data)


MASK = "blocks.0.mlp.up.weight_mask"
# What is done to the last checkpoint, and what is said about it.
DAMAGE = {
    "a weight": (lambda c: flip_in_tensor(c / MODEL, "norm.weight"), f"tensor norm.weight in {MODEL} does not match"),
    "a moment": (
        lambda c: flip_in_tensor(c / OPTIMIZER, "norm.weight/exp_avg"),
        f"tensor norm.weight/exp_avg in {OPTIMIZER} does not match",
    ),
    "the header": (lambda c: flip_at(c / MODEL, 20, 0x01), f"the header of {MODEL} does not match its checksum"),
    "a mask of ones": (lambda c: fill_mask(c / MODEL, MASK, 1), f"tensor {MASK} in {MODEL} does not match"),
    "a mask of zeros": (lambda c: fill_mask(c / MODEL, MASK, 0), f"tensor {MASK} in {MODEL} does not match"),
    "no optimizer file": (lambda c: (c / OPTIMIZER).unlink(), f"{OPTIMIZER} is missing"),
    "no optimizer folder": (lambda c: shutil.rmtree(c / "optimizer"), f"{OPTIMIZER} is missing"),
    "cut off": (lambda c: (c / MODEL).write_bytes((c / MODEL).read_bytes()[:1000]), f"{MODEL} has 1000 bytes, expected"),
    "no checksums": (lambda c: (c / SUMS).unlink(), "sums.json cannot be read (No such file or directory)"),
    "checksums": (lambda c: flip_at(c / SUMS, 60, 0x01), "sums.json is damaged (its content does not match its checksum)"),
    "no state": (lambda c: (c / "state.json").unlink(), "state.json cannot be read (No such file or directory)"),
    "empty state": (lambda c: (c / "state.json").write_text(""), "state.json is damaged (Expecting value"),
    "another state": (lambda c: (c / "state.json").write_text('{"step": 3}'), "state.json is not of this step"),
    "a changed state": (
        lambda c: (c / "state.json").write_text((c / "state.json").read_text().replace('"step": 27', '"step": 27.0')),
        "state.json is damaged (its content does not match its checksum)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(finished, config, tmp_path, capsys, damage):
    reference, _ = finished
    folder = resumable(reference, tmp_path / "run", 27)
    before = max(step for step in checkpoint.steps_in(folder / "checkpoints") if step < 27)
    make, said = DAMAGE[damage]
    make(folder / LAST)
    train(config, replace(HOW, out=str(folder)))
    lines = [line for line in capsys.readouterr().err.splitlines() if "is damaged" in line]
    assert len(lines) == 1
    assert said in lines[0]
    assert lines[0].endswith(f", and is now called damaged-00000027: using step {before}")
    assert_same_run(folder, reference)


def test_only_checkpoint_that_is_damaged_is_named_with_the_remedy(finished, config, tmp_path):
    folder = resumable(finished[0], tmp_path / "run", 27)
    checkpoint.drop_after(folder / "checkpoints", 0)
    shutil.copytree(finished[0] / LAST, folder / LAST)
    flip_in_tensor(folder / LAST / MODEL, "norm.weight")
    with pytest.raises(
        ValueError, match=r"step-00000027 is damaged \(tensor norm.*: delete it, then the run starts from its fi"
    ):
        train(config, replace(HOW, out=str(folder)))
    assert checkpoints(folder) == ["step-00000027"]


def test_damaged_checkpoint_is_not_loaded_for_use(finished, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "run")
    flip_in_tensor(folder / "checkpoints/step-00000030" / OPTIMIZER, "norm.weight/exp_avg")
    assert load_run(folder).step == 30  # the optimizer's state is not needed for that
    flip_in_tensor(folder / "checkpoints/step-00000030" / MODEL, "embedding.weight")
    with pytest.raises(ValueError, match=r"tensor embedding\.weight in model.*delete it, then the run continues from step 27"):
        load_run(folder)
    assert load_run(folder / LAST).step == 27


def without_checksums(folder):
    """A checkpoint as older versions wrote it."""
    state = read_object(folder / "state.json", remedy="")
    (folder / "state.json").write_text(json.dumps({name: value for name, value in state.items() if name != "since_row"}))
    (folder / SUMS).unlink()


def test_checkpoint_without_checksums_is_loaded_and_says_so(finished, config, tmp_path):
    folder = resumable(finished[0], tmp_path / "run", 27)
    without_checksums(folder / LAST)
    with pytest.warns(UncheckedWarning, match=r"step-00000027 has no checksums, since an older version wrote it") as caught:
        train(config, replace(HOW, out=str(folder)))
    assert len(caught) == 1
    assert_same_run(folder, finished[0])


@pytest.mark.parametrize("damage", ["no optimizer file", "no optimizer folder", "no state", "another state"])
def test_damage_is_found_without_checksums_where_it_can_be(finished, config, tmp_path, capsys, damage):
    folder = resumable(finished[0], tmp_path / "run", 27)
    without_checksums(folder / LAST)
    DAMAGE[damage][0](folder / LAST)
    train(config, replace(HOW, out=str(folder)))
    assert "step-00000027 is damaged" in capsys.readouterr().err
    assert_same_run(folder, finished[0])


@pytest.mark.parametrize("change", [{"speed": 1}, {"losses": "none"}, {"moving": 3}, {"step": "27"}])
def test_state_of_the_wrong_kind_is_named(finished, config, tmp_path, change):
    """Without a seal, only the kinds of its fields can be looked at."""
    folder = resumable(finished[0], tmp_path / "run", 27)
    without_checksums(folder / LAST)
    state = json.loads((folder / LAST / "state.json").read_text())
    (folder / LAST / "state.json").write_text(json.dumps({**state, **change}))
    if change == {"moving": 3}:  # nothing moves in this run
        train(config, replace(HOW, out=str(folder)))
    elif change == {"step": "27"}:
        train(config, replace(HOW, out=str(folder)))
        assert_same_run(folder, finished[0])
    else:
        with pytest.raises(ValueError, match=r"step-00000027 is damaged \(state\.json is damaged, or of another version"):
            train(config, replace(HOW, out=str(folder)))


# Going back


def test_run_goes_back_to_a_step_and_ends_the_same(finished, config, tmp_path, capsys):
    folder = shutil.copytree(finished[0], tmp_path / "run")
    train(config, replace(HOW, out=str(folder), from_step=27))
    assert "continuing from step 27 of 30" in capsys.readouterr().err
    assert_same_run(folder, finished[0])
    train(config, replace(HOW, out=str(folder), from_step=0))
    assert "training in" in capsys.readouterr().err
    assert_same_run(folder, finished[0])


def test_step_without_a_checkpoint_is_refused_with_those_that_exist(finished, config, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "run")
    steps = checkpoint.steps_in(folder / "checkpoints")
    with pytest.raises(ValueError, match=rf"no checkpoint of step 5: pass --from-step 0 or {' or '.join(map(str, steps))}$"):
        train(config, replace(HOW, out=str(folder), from_step=5))
    flip_in_tensor(folder / LAST / MODEL, "norm.weight")
    with pytest.raises(ValueError, match="step-00000027 is damaged"):
        train(config, replace(HOW, out=str(folder), from_step=27))
    assert read_summary(folder) == read_summary(finished[0])
    assert checkpoint.steps_in(folder / "checkpoints") == steps


def test_run_that_diverges_after_it_went_on_doubts_its_checkpoint(finished, config, tmp_path, capsys):
    folder = resumable(finished[0], tmp_path / "run", 27)
    earlier = checkpoint.steps_in(folder / "checkpoints")[:-1]
    fill = load_file(folder / LAST / MODEL)
    fill["norm.weight"][0] = 1e38  # and its checksums are of this value, as if the memory had been at fault
    save_file(fill, folder / LAST / MODEL)
    without_checksums(folder / LAST)
    assert train(config, replace(HOW, out=str(folder))).status == "diverged"
    said = capsys.readouterr().err
    assert (
        f"the checkpoint of step 27, from which it resumed, may be damaged. The same command with --from-step {earlier[-1]}"
        in said
    )
    assert train(config, replace(HOW, out=str(folder), from_step=earlier[-1])).status == "finished"
    assert_same_run(folder, finished[0])


# Metrics


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_rows_of_a_run_that_signals_stopped_are_those_of_the_whole_run(config, tmp_path, number):
    """The moments are random; at all of them this must hold."""
    how = replace(HOW, log_every=7, save_every=0, valid_every=11)
    train(config, replace(how, out=str(tmp_path / "whole")))
    moments, stopped = random.Random(int(number)), []
    while not stopped or stopped[-1].status != "finished":
        alarm = threading.Timer(moments.uniform(0.02, 0.3), os.kill, (os.getpid(), number))
        handlers = {number: signal.signal(number, signal.SIG_IGN)}  # before and after the run
        alarm.start()
        stopped.append(train(config, replace(how, out=str(tmp_path / "run"))))
        alarm.join()
        signal.signal(number, handlers[number])
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_damaged_line_of_metrics_is_named_and_the_others_stay(finished, config, tmp_path):
    folder = resumable(finished[0], tmp_path / "run", 27)
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[3], lines[5], lines[7] = lines[3][:-9], b"\xff" + lines[5], b"[" * 100_000
    file.write_bytes(b"\n".join(lines))
    with pytest.warns(UserWarning, match=r"metrics\.jsonl: line \d+ is damaged and left out") as caught:
        train(config, replace(HOW, out=str(folder)))
    assert [str(warning.message).split(": ")[1] for warning in caught] == [
        f"line {n} is damaged and left out" for n in (4, 6, 8)
    ]
    whole = rows(finished[0])
    assert rows(folder) == [row for number, row in enumerate(whole) if number not in (3, 5, 7)]


def test_temporary_files_of_a_killed_process_are_removed(finished, config, tmp_path):
    folder = resumable(finished[0], tmp_path / "run", 27)
    stale = [folder / "metrics.jsonl.4711.tmp", folder / LAST / "state.json.4711.tmp"]
    for path in stale:
        path.write_text("half")
    (folder / "mine.tmp").write_text("not ours")
    train(config, replace(HOW, out=str(folder)))
    assert not any(path.exists() for path in stale)
    assert (folder / "mine.tmp").exists()


def test_state_of_an_older_version_has_no_losses_since_a_row():
    assert Progress(step=3).since_row == []


def test_checkpoint_lists_every_file(finished):
    folder = finished[0] / LAST
    listed = set(read_object(folder / SUMS, remedy="")["files"])
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert written - listed == {"state.json", SUMS}  # both carry a seal
    assert len(tensors(finished[0], 27)) > 10
