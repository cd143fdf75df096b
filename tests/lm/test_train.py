"""The training loop: resumed, killed, stopped, out of disk, diverged, and over two ranks."""

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from smupar.cli.main import main
from smupar.lm.config.run import Execution, ModelConfig, RunConfig
from smupar.lm.data.shards import TokenizerInfo, write_tokens
from smupar.lm.run.folder import read_summary
from smupar.lm.run.train import train
from smupar.output.files import locked

# Processes are forked from a server that has torch loaded, so that one starts in milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["smupar.lm.run.train", "smupar.cli.main"])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Words of a tiny language, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("text") / "words"
    rng = np.random.default_rng(0)
    words = [rng.integers(97, 123, size=rng.integers(2, 7), dtype=np.uint8) for _ in range(50)]
    spaced = [np.append(words[i], np.uint8(32)) for i in rng.integers(50, size=20_000)]
    write_tokens(folder, np.concatenate(spaced), TokenizerInfo("bytes", 256, 0, "b"))
    return str(folder)


@pytest.fixture(scope="module")
def config(text):
    model = ModelConfig(width=64, depth=1, vocab_size=128)
    return RunConfig(model=model, base_width=32, sparsity=0.75, steps=30, batch_size=4, seq_len=32, valid_batches=2, data=text)


HOW = Execution(save_every=3, valid_every=10, log_every=2, keep=2, device="cpu", peak_tflops=0.1)


def in_process(config, how, limit=None):
    """Runs in a process of its own, quietly. A limit on the size of files stands for a full disk."""
    process = PROCESSES.Process(target=_run, args=(config, how, limit))
    process.start()
    return process


def _run(config, how, limit):
    torch.set_num_threads(1)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    log = Path(how.out).with_suffix(".log")
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            train(config, how)
        except OSError as error:
            print("error:", error)
            raise SystemExit(2) from error


def checkpoints(folder):
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


def tensors(folder, step):
    """All of a checkpoint that one process wrote."""
    path = Path(folder) / "checkpoints" / f"step-{step:08d}"
    return {
        f"{part}/{name}": tensor
        for part in ("model", "optimizer")
        for file in (path / part).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def rows(folder):
    """Metrics, without the speed."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines]


def assert_same_run(folder, reference, steps):
    ours, theirs = tensors(folder, steps), tensors(reference, steps)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    a, b = read_summary(Path(folder)), read_summary(Path(reference))
    assert (a.status, a.train_loss, a.valid_loss, a.best_step) == ("finished", b.train_loss, b.valid_loss, b.best_step)
    assert rows(folder) == rows(reference)


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """The run, uninterrupted: its folder, and the seconds it took."""
    for name in ("first", "run"):  # the first one waits for the server to load torch
        folder = tmp_path_factory.mktemp("finished") / name
        start = time.perf_counter()
        process = in_process(config, replace(HOW, out=str(folder)))
        process.join()
        assert process.exitcode == 0, folder.with_suffix(".log").read_text()
    return folder, time.perf_counter() - start


def resumable(finished, folder, step):
    """A copy of the run as it was when the checkpoint of a step was its last; that run kept all of them."""
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    for path in (folder / "checkpoints").iterdir():
        if int(path.name[-8:]) > step:
            shutil.rmtree(path)
    return folder


# One process


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


@pytest.mark.parametrize("number", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_the_run_ends_with_the_same_bits(finished, config, tmp_path, number):
    reference, seconds = finished
    moments = random.Random(0)
    kills = runs = 0
    while kills < number or not runs:
        folder = tmp_path / f"run-{runs}"
        while True:
            process = in_process(config, replace(HOW, out=str(folder)))
            process.join(timeout=moments.uniform(0, seconds) if kills < number else None)
            if process.exitcode is not None:
                assert process.exitcode == 0, folder.with_suffix(".log").read_text()
                break
            process.kill()
            process.join()
            kills += 1
        assert_same_run(folder, reference, 30)
        runs += 1


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
    assert_same_run(folder, reference, 30)
    assert not half.exists()


def test_metrics_line_cut_off_by_a_kill_is_written_again(finished, config, tmp_path):
    reference, _ = finished
    folder = resumable(reference, tmp_path / "run", 27)
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines[:-30])
    train(config, replace(HOW, out=str(folder)))
    assert_same_run(folder, reference, 30)


def test_finished_run_is_not_trained_again(finished, config, capsys):
    folder, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert train(config, replace(HOW, out=str(folder))) == read_summary(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert "has ended already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "code", "status"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_signal_saves_first(config, tmp_path, number, code, status):
    folder = tmp_path / "run"
    flags = f"--width 64 --depth 1 --base-width 32 --steps 100000 --seq-len 16 --batch-size 2 --log-every 1 --out {folder}"
    process = PROCESSES.Process(target=_main, args=(["train", *flags.split(" ")], folder.with_suffix(".log")))
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


def _main(argv, log):
    torch.set_num_threads(1)
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        main(argv)


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
    assert "That of step 27 is intact: make room and start the same command again" in line
    assert not [name for name in checkpoints(folder) if "30" in name]
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(folder, 27).items())
    process = in_process(config, replace(HOW, out=str(folder)))  # there is room again
    process.join()
    assert_same_run(folder, reference, 30)


def test_diverged_run_ends_early_and_says_so(config, tmp_path, capsys):
    folder = tmp_path / "run"
    flags = f"--width 64 --depth 1 --base-width 32 --steps 200 --seq-len 16 --optimizer sgd --lr 1e9 --out {folder}"
    for _ in range(2):  # also when it is started again
        with pytest.raises(SystemExit) as ended:
            main(["train", *flags.split(" ")])
        assert ended.value.code == 3
        assert "diverged" in capsys.readouterr().out.splitlines()[-1]
    summary = read_summary(folder)
    assert summary.status == "diverged"
    assert summary.steps <= 20
    assert summary.valid_loss is None
    json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)  # JSON knows no NaN


# Bad input


def test_folder_of_another_configuration_is_refused_and_left_alone(finished, config):
    folder, _ = finished
    before = {path: path.read_bytes() for path in folder.rglob("*.json*") if path.is_file()}
    other = replace(config, lr=0.5, model=replace(config.model, depth=2))
    with pytest.raises(ValueError, match=r"depth 1 there, 2 here; lr 0.015625 there, 0.5 here.*another --out"):
        train(other, replace(HOW, out=str(folder)))
    assert {path: path.read_bytes() for path in before} == before


def test_folder_with_other_files_is_refused(config, tmp_path):
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(ValueError, match="holds other files and no run"):
        train(config, replace(HOW, out=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_text_that_changed_since_the_start_is_refused(finished, config, tmp_path):
    reference, _ = finished
    folder, other = resumable(reference, tmp_path / "run", 27), tmp_path / "text"
    write_tokens(other, np.zeros(50_000, np.uint8), TokenizerInfo("bytes", 256, 0, "b"))
    (folder / "config.json").write_text(replace(config, data=str(other)).to_json())
    with pytest.raises(ValueError, match="is not the one that"):
        train(replace(config, data=str(other)), replace(HOW, out=str(folder)))


def test_folder_in_use_is_refused(config, tmp_path):
    with locked(tmp_path / "run"), pytest.raises(ValueError, match="another process is at work"):
        train(config, replace(HOW, out=str(tmp_path / "run")))


def test_micro_batches_that_do_not_divide_raise(config, tmp_path):
    with pytest.raises(ValueError, match="4 sequences are no multiple of micro_batch 3"):
        train(config, replace(HOW, out=str(tmp_path / "run"), micro_batch=3))


def test_configuration_that_cannot_be_built_does_not_keep_the_folder(config, tmp_path):
    how = replace(HOW, out=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="no learning-rate rule is known"):
        train(replace(config, optimizer="typo"), how)
    assert train(replace(config, steps=3), how).status == "finished"


@pytest.mark.parametrize("damage", ["truncated", "missing", "no state", "state of another step"])
def test_damaged_checkpoint_is_named_with_the_remedy(finished, config, tmp_path, damage):
    folder = resumable(finished[0], tmp_path / "run", 27)
    last = folder / "checkpoints" / "step-00000027"
    (weights,) = (last / "model").glob("*.safetensors")
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "missing":
        shutil.rmtree(last / "optimizer")
    else:
        (last / "state.json").write_text("{" if damage == "no state" else '{"step": 3}')
    with pytest.raises(ValueError, match=r"the checkpoint .*step-00000027 is damaged .* delete it"):
        train(config, replace(HOW, out=str(folder)))
    shutil.rmtree(last)  # then it goes on from the one before
    assert train(config, replace(HOW, out=str(folder))).status == "finished"


def test_run_that_missed_its_last_validation_does_it_when_it_goes_on(finished, config, tmp_path):
    reference, _ = finished
    folder = resumable(reference, tmp_path / "run", 30)
    state_file = folder / "checkpoints" / "step-00000030" / "state.json"
    state = json.loads(state_file.read_text())
    state_file.write_text(json.dumps({**state, "valid_step": 20, "valid_loss": 9.0}))
    expected = read_summary(reference).valid_loss
    assert train(config, replace(HOW, out=str(folder))).valid_loss == expected
    assert json.loads(state_file.read_text())["valid_loss"] == expected
    assert rows(folder)[-1] == {"step": 30, "valid_loss": expected}


def test_run_stopped_in_its_validation_saves_without_it(config, tmp_path):
    """The signal comes while the validation of step 10 runs, which takes for ever."""
    folder = tmp_path / "run"
    endless = replace(config, valid_batches=10**9)
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


def test_graph_without_a_gpu_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match="--graph is for one GPU"):
        train(config, replace(HOW, out=str(tmp_path / "run"), graph=True))


# What must not change the result


def losses(folder):
    return {row["step"]: row["loss"] for row in rows(folder)}


def assert_same_curve(folder, reference, relative):
    ours, theirs = losses(folder), losses(reference)
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[step] / theirs[step] - 1) for step in theirs) < relative


@pytest.fixture(scope="module")
def short(config):
    """Twenty steps, for curves that are compared."""
    return replace(config, steps=20, model=replace(config.model, depth=2), clip=1.0, weight_decay=0.1)


CURVE = Execution(log_every=1, valid_every=10, save_every=10, keep=9, device="cpu", peak_tflops=0.1)


@pytest.fixture(scope="module")
def one_rank(short, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    train(short, replace(CURVE, out=str(folder)))
    return folder


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


# Two ranks


def two_ranks(config, how):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [PROCESSES.Process(target=_rank, args=(rank, port, config, how)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    logs = [Path(f"{how.out}.{rank}.log").read_text() for rank in range(2)]
    assert [process.exitcode for process in ranks] == [0, 0], logs
    return logs


def _rank(rank, port, config, how):
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # each rank has a global RNG of its own
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with Path(f"{how.out}.{rank}.log").open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        train(config, how)


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


def test_muon_runs_on_two_sharded_ranks_as_on_one(short, tmp_path):
    muon = replace(short, optimizer="muon", lr=0.01, rest_lr=2**-8, steps=5)
    train(muon, replace(CURVE, out=str(tmp_path / "one")))
    two_ranks(muon, replace(CURVE, out=str(tmp_path / "two"), parallel="fsdp"))
    assert_same_curve(tmp_path / "two", tmp_path / "one", 1e-3)


def test_signal_to_two_ranks_saves_first(config, tmp_path):
    folder = tmp_path / "run"
    flags = f"--width 64 --depth 1 --base-width 32 --steps 100000 --seq-len 16 --batch-size 2 --device cpu --out {folder}"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "smupar",
        "train",
        *flags.split(" "),
    ]
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


def test_ranks_that_do_not_divide_the_batch_raise():
    from smupar.lm.run.distributed import World

    with pytest.raises(ValueError, match="batch_size 5 does not divide among 2 ranks"):
        World(0, 2, torch.device("cpu"), "ddp").share_of(5)


def test_run_goes_on_where_its_text_lies_now(finished, config, text, tmp_path):
    reference, _ = finished
    folder = resumable(reference, tmp_path / "run", 27)
    moved = shutil.copytree(text, tmp_path / "moved")
    summary = train(replace(config, data=f"{moved}/"), replace(HOW, out=str(folder)))
    assert_same_run(folder, reference, 30)
    assert summary.id == config.id
    assert replace(config, data=f"{text}/").id == config.id
    assert RunConfig(data="./stdlib").data == "./stdlib"  # a folder of that name, not the text that needs none
