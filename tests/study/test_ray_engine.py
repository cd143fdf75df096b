"""The engine on a real Ray cluster: three nodes on this machine, each with processes of its own."""

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.study import ray_engine
from smupar.study.engines import execute
from smupar.study.ray_engine import execute_on_ray, split, tasks_of
from smupar.study.stacks.division import Division
from smupar.study.store import Study
from tests.support.texts import words

TINY = RunConfig(
    model=ModelConfig(width=32, depth=1, head_dim=16),
    base_width=32,
    sparsity=0.0,
    steps=200,
    batch_size=4,
    seq_len=32,
    valid_batches=1,
    data=words(),
)
RATES = [2.0**exponent for exponent in range(-12, -4)]
LONG = [replace(TINY, lr=rate) for rate in RATES[:6]]  # about a second each


@contextlib.contextmanager
def started_cluster():
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    store = 80 * 2**20
    # A node that does not answer for a second is lost; Ray's own default takes half a minute.
    health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 4}
    head = {"num_cpus": 0, "object_store_memory": store, "include_dashboard": False, "_system_config": health}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        made.workers = [made.add_node(num_cpus=1, object_store_memory=store) for _ in range(2)]
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def cluster():
    """A cluster that a test may break."""
    with started_cluster() as made:
        yield made


@pytest.fixture(scope="module")
def shared_cluster():
    with started_cluster() as made:
        yield made


@pytest.fixture(scope="module")
def serial_losses(tmp_path_factory):
    with Study.open(tmp_path_factory.mktemp("serial"), {}, "") as study:
        execute(study, LONG, engine="serial", device="cpu")
        return [result.loss for result in study.results(LONG)]


@pytest.mark.parametrize(
    "num_retries",
    [
        pytest.param(3, id="retried by Ray", marks=pytest.mark.slow),
        pytest.param(0, id="submitted again", marks=pytest.mark.slow),
    ],
)
def test_study_is_complete_when_a_worker_is_killed(cluster, serial_losses, tmp_path, monkeypatch, num_retries):
    monkeypatch.setattr(ray_engine, "NUM_RETRIES", num_retries)
    victim = cluster.workers[0]
    missing_at_kill: list[int] = []

    def kill_one() -> None:
        """Like a machine that fails: the node and its worker at once, in the middle of a part."""
        finished: list[Path] = []
        at_work: list[int] = []
        while not (finished and at_work):
            time.sleep(0.05)
            finished, at_work = list(tmp_path.glob("ray/runs/*/summary.json")), _at_work(victim)
        for pid in at_work:
            os.kill(pid, signal.SIGKILL)
        missing_at_kill.append(len(LONG) - len(finished))
        cluster.remove_node(victim, allow_graceful=False)

    killer = threading.Thread(target=kill_one, daemon=True)
    with Study.open(tmp_path / "ray", {}, "") as study:
        killer.start()
        execute(study, LONG, engine="ray", address=cluster.address)
        killer.join(timeout=60)
        assert missing_at_kill
        assert missing_at_kill[0] >= 2  # what the victim was doing, and more
        results = study.results(LONG)
    assert len(results) == len(LONG)
    assert [result.loss for result in results] == pytest.approx(serial_losses, rel=1e-4)


def _at_work(node) -> list[int]:
    """Workers of a node that are training now: Ray names the process after the task while that runs."""
    raylet = node.all_processes["raylet"][0].process.pid
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            name = folder.joinpath("cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if parent == raylet and name.startswith(b"ray::_train_part"):
            found.append(int(folder.name))
    return found


def test_runs_that_were_begun_together_stay_in_one_task(tmp_path):
    runs = [replace(TINY, lr=rate) for rate in RATES]
    with Study.open(tmp_path / "study", {}, "") as study:
        Division(tuple(run.id for run in runs[1:7]), 3, own_batches=False, device="cpu").write(study)
        tasks = tasks_of(study, runs[4:], runs, num_slots=4, resource="CPU")
    assert tasks == [(runs[4:7], runs[1:4]), ([runs[7]], [])]


def test_workers_keep_the_weights_of_a_study_that_keeps_them(shared_cluster, tmp_path):
    with Study.open(tmp_path / "study", {}, "", keeps_weights=True) as study:
        execute_on_ray(study, [replace(TINY, steps=2)], address=shared_cluster.address)
    assert len(list(tmp_path.glob("study/runs/*/checkpoints/step-00000002"))) == 1


def test_error_of_a_worker_is_one_line_and_finished_runs_stay(shared_cluster, tmp_path):
    good, bad = replace(TINY, steps=20), replace(TINY, steps=20, data=str(tmp_path / "nowhere"))
    with Study.open(tmp_path / "study", {}, "") as study:
        with pytest.raises(ValueError, match=r"^1 of 2 runs have no result \(.*nowhere.*start the same command again$"):
            execute_on_ray(study, [good, bad], address=shared_cluster.address)
        assert study.missing([good, bad]) == [bad]


def test_no_cluster_is_one_line_with_the_remedy(tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match=r"^no Ray cluster answers at 127\.0\.0\.1:1: start one with `ray start --head`"):
        execute_on_ray(Study(tmp_path), [TINY], address="127.0.0.1:1")


def test_missing_ray_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'smupar\[ray\]'"):
        execute_on_ray(Study(tmp_path), [TINY])


def test_nothing_to_do_needs_no_ray(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    execute_on_ray(Study(tmp_path), [])
    assert list(tmp_path.iterdir()) == []


def test_every_slot_has_something_to_do():
    configs = [replace(TINY, lr=rate, seed=seed) for rate in RATES for seed in range(10)]
    assert [len(part) for part in split(configs, num_slots=2, resource="CPU")] == [10] * 8
    assert sorted(len(part) for part in split(configs, num_slots=3, resource="GPU")) == [26, 27, 27]
    assert len(split(configs, num_slots=1, resource="GPU")) == 2  # a stack has at most 64


def test_costly_runs_come_first_and_alone():
    wide = replace(TINY, model=replace(TINY.model, width=512))
    parts = split([*(replace(TINY, lr=rate) for rate in RATES), wide, replace(wide, lr=0.1)], num_slots=2, resource="CPU")
    assert parts[:2] == [[wide], [replace(wide, lr=0.1)]]
    assert [len(part) for part in parts[2:]] == [8]
