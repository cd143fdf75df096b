"""The training loop in one process: resumed, killed, stopped, out of disk, diverged."""

import functools
import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch

from smupar.cli.main import main
from smupar.lm.config.run_config import RunConfig
from smupar.lm.run.folder import read_summary
from smupar.lm.run.train import train
from smupar.output.json_files import read_object, write_sealed
from tests.lm.run.processes import PROCESSES, in_process, kill_at_random_moments, run_command
from tests.lm.run.runs import CURVE, HOW, assert_same_curve, assert_same_run, checkpoints, losses, resumable, rows, tensors


def test_training_learns_and_leaves_a_summary(finished, config):
    folder, _ = finished
    summary = read_summary(folder)
    assert summary.status == "finished"
    assert summary.num_tokens == 30 * 4 * 32
    assert summary.sparsity == 0.75
    assert rows(folder)[0]["loss"] > 4
    assert summary.valid_loss < 3.2  # letters and spaces at random would be log(27) = 3.3
    assert [row["step"] for row in rows(folder)] == sorted({*range(2, 31, 2), *range(3, 31, 3)})
    assert RunConfig.from_json((folder / "config.json").read_text()) == config


def test_last_checkpoints_and_the_best_are_kept(finished):
    folder, _ = finished
    best = read_summary(folder).best_step
    assert checkpoints(folder) == [f"step-{step:08d}" for step in sorted({27, 30, best})]


def test_checkpoint_holds_masks_and_each_weight_once(finished):
    folder, _ = finished
    names = tensors(folder, 30)
    assert names["model/blocks.0.mlp.up.weight_mask"].dtype == torch.bool
    assert "model/embedding.weight" in names
    assert "model/unembedding.weight" not in names  # tied
    weight, mask = names["model/blocks.0.mlp.up.weight"], names["model/blocks.0.mlp.up.weight_mask"]
    assert weight[~mask].count_nonzero() == 0
    assert names["optimizer/embedding.weight/step"] == 30


def test_checkpoint_has_no_pickle_in_it(finished):
    folder, _ = finished
    kinds = {path.suffix for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json"}


def test_killed_at_random_moments_the_run_ends_with_the_same_bits(finished, config, tmp_path):
    """Runs of other kinds, and other signals: tests/faults/test_killed_runs.py."""
    reference, seconds = finished
    moments, kills = random.Random(0), []
    while sum(kills) < 5:
        how = replace(HOW, out=str(tmp_path / f"run-{len(kills)}"))
        start = functools.partial(in_process, config, how)
        kills.append(kill_at_random_moments(start, moments, 5 - sum(kills), latest=seconds))
        assert_same_run(how.out, reference)


@pytest.mark.parametrize("left", [".unfinished-00000030", ".unfinished-00000027"])
def test_half_written_checkpoints_are_never_read(finished, config, tmp_path, left):
    reference, _ = finished
    folder = resumable(reference, tmp_path / "run", 27)
    half = folder / "checkpoints" / left
    shutil.copytree(folder / "checkpoints" / "step-00000027", half)
    next((half / "model").glob("*.safetensors")).write_bytes(b"half")
    process = in_process(config, replace(HOW, out=str(folder)))
    process.join()
    assert process.exitcode == 0
    assert_same_run(folder, reference)
    assert not half.exists()


def test_metrics_line_cut_off_by_a_kill_is_written_again(finished, config, tmp_path):
    reference, _ = finished
    folder = resumable(reference, tmp_path / "run", 27)
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines[:-30])
    train(config, replace(HOW, out=str(folder)))
    assert_same_run(folder, reference)


def test_finished_run_is_not_trained_again(finished, config, capsys):
    folder, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert train(config, replace(HOW, out=str(folder))) == read_summary(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert "has ended already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code", "status"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_signal_saves_first(config, tmp_path, number, code, status):
    folder = tmp_path / "run"
    flags = "--width 64 --depth 1 --base-width 32 --steps 100000 --seq-len 16 --batch-size 2 --log-every 1 "
    flags += f"--data {config.data} --out {folder}"
    process = PROCESSES.Process(target=run_command, args=(["train", *flags.split()], folder.with_suffix(".log")))
    process.start()
    deadline = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() or len(rows(folder)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == code
    (saved,) = checkpoints(folder)
    assert saved == f"step-{rows(folder)[-1]['step']:08d}"
    assert f"{status} and saved at step {int(saved[-8:])}" in folder.with_suffix(".log").read_text()


def test_full_disk_gives_one_line_and_leaves_the_last_checkpoint(finished, config, tmp_path):
    reference, _ = finished
    folder = resumable(reference, tmp_path / "run", 27)
    before = tensors(folder, 27)
    process = in_process(config, replace(HOW, out=str(folder)), limit=50_000)
    process.join()
    log = folder.with_suffix(".log").read_text().splitlines()
    assert process.exitcode == 2
    (line,) = [line for line in log if line.startswith("error:")]
    assert "the checkpoint of step 30 could not be written" in line
    assert "The checkpoint of step 27 is intact: make room and start the same command again" in line
    assert not [name for name in checkpoints(folder) if "30" in name]
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(folder, 27).items())
    process = in_process(config, replace(HOW, out=str(folder)))  # there is room again
    process.join()
    assert_same_run(folder, reference)


def test_diverged_run_ends_early_and_says_so(config, tmp_path, capsys):
    folder = tmp_path / "run"
    flags = "--width 64 --depth 1 --base-width 32 --steps 200 --seq-len 16 --optimizer sgd --lr 1e9 "
    flags += f"--data {config.data} --out {folder}"
    for _ in range(2):  # also when it is started again
        with pytest.raises(SystemExit) as ended:
            main(["train", *flags.split()])
        assert ended.value.code == 3
        assert "diverged" in capsys.readouterr().out.splitlines()[-1]
    summary = read_summary(folder)
    assert summary.status == "diverged"
    assert summary.steps <= 20
    assert summary.valid_loss is None
    json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)  # JSON knows no NaN


def test_run_that_missed_its_last_validation_does_it_when_it_goes_on(finished, config, tmp_path):
    reference, _ = finished
    folder = resumable(reference, tmp_path / "run", 30)
    state_file = folder / "checkpoints" / "step-00000030" / "state.json"
    state = read_object(state_file, remedy="")
    write_sealed(state_file, {**state, "valid_step": 20, "valid_loss": 9.0})
    expected = read_summary(reference).valid_loss
    assert train(config, replace(HOW, out=str(folder))).valid_loss == expected
    assert json.loads(state_file.read_text())["valid_loss"] == expected
    assert rows(folder)[-1] == {"step": 30, "valid_loss": expected}


def test_run_stopped_in_its_validation_saves_without_it(config, tmp_path):
    """The signal comes while the validation of step 10 runs, which takes for ever."""
    folder = tmp_path / "run"
    endless = replace(config, valid_batches=10**6)
    process = in_process(endless, replace(HOW, out=str(folder)))
    deadline = time.monotonic() + 60
    while not (folder / "checkpoints" / "step-00000009").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == 0, folder.with_suffix(".log").read_text()
    assert checkpoints(folder)[-1] in ("step-00000009", "step-00000010")
    state = json.loads((folder / "checkpoints" / checkpoints(folder)[-1] / "state.json").read_text())
    assert state["valid_step"] is None


def test_run_goes_on_where_its_text_lies_now(finished, config, text, tmp_path):
    reference, _ = finished
    folder = resumable(reference, tmp_path / "run", 27)
    moved = shutil.copytree(text, tmp_path / "moved")
    summary = train(replace(config, data=f"{moved}/"), replace(HOW, out=str(folder)))
    assert_same_run(folder, reference)
    assert summary.id == config.id
    assert replace(config, data=f"{text}/").id == config.id
    assert RunConfig(data="./stdlib").data == "./stdlib"  # a folder of that name, not the text that needs none


def test_gradient_accumulation_gives_the_same_curve(one_rank, short, tmp_path):
    train(short, replace(CURVE, out=str(tmp_path / "run"), micro_batch=1))
    assert_same_curve(tmp_path / "run", one_rank, 1e-5)


def test_bf16_follows_the_curve_of_fp32(one_rank, short, tmp_path):
    train(replace(short, dtype="bf16"), replace(CURVE, out=str(tmp_path / "run")))
    assert losses(tmp_path / "run") != losses(one_rank)
    assert_same_curve(tmp_path / "run", one_rank, 0.03)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
def test_compiled_run_gives_the_same_curve(one_rank, short, tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    train(short, replace(CURVE, out=str(tmp_path / "run"), compile=True))
    assert_same_curve(tmp_path / "run", one_rank, 1e-5)


def test_run_without_warm_up_or_optimizer_state_resumes(short, tmp_path):
    """Plain SGD has no state to save."""
    plain = replace(short, optimizer="sgd", momentum=0.0, lr=0.1)
    train(plain, replace(CURVE, out=str(tmp_path / "whole")))
    folder = resumable(tmp_path / "whole", tmp_path / "run", 10)
    train(plain, replace(CURVE, out=str(folder)))
    assert losses(folder) == losses(tmp_path / "whole")


@pytest.mark.parametrize("depth_rule", ["completep", "depth-mup", "none"])
def test_base_of_the_same_depth_changes_no_bit(short, tmp_path, depth_rule):
    train(short, replace(CURVE, out=str(tmp_path / "without")))
    same = replace(short, base_depth=short.model.depth, depth_rule=depth_rule)
    train(same, replace(CURVE, out=str(tmp_path / "same")))
    assert losses(tmp_path / "same") == losses(tmp_path / "without")


@pytest.mark.parametrize("storage", ["dense", "csr"])
def test_deep_run_resumes_with_its_branch_factors(short, tmp_path, storage):
    deep, how = replace(short, model=replace(short.model, depth=2), base_depth=1), replace(CURVE, storage=storage)
    train(deep, replace(how, out=str(tmp_path / "whole")))
    folder = resumable(tmp_path / "whole", tmp_path / "run", 10)
    train(deep, replace(how, out=str(folder)))
    assert losses(folder) == losses(tmp_path / "whole")
    train(replace(deep, base_depth=None), replace(CURVE, out=str(tmp_path / "undivided")))
    assert losses(folder) != pytest.approx(losses(tmp_path / "undivided"), rel=1e-4)


def test_run_uses_the_threads_that_are_asked_for_and_gives_them_back(config, tmp_path):
    before = torch.get_num_threads()
    how = replace(HOW, out=str(tmp_path / "run"), threads=before + 2)
    assert train(replace(config, steps=3), how).num_threads == before + 2
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="threads"):
        replace(HOW, threads=-1)
