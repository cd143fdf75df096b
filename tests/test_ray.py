"""The engine on a real Ray cluster: three nodes on this machine, each with processes of its own."""

import sys
import threading
import time
from dataclasses import replace

import pytest

from smupar.lm.config import ModelConfig, RunConfig
from smupar.study.engines import execute
from smupar.study.ray_engine import execute_on_ray, split
from smupar.study.store import Study

TINY = RunConfig(
    model=ModelConfig(width=32, depth=1, head_dim=16),
    base_width=32,
    sparsity=0.0,
    steps=300,
    batch_size=4,
    seq_len=32,
    valid_batches=1,
)
RATES = [2.0**exponent for exponent in range(-12, -4)]


@pytest.fixture
def cluster():
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


def test_study_is_complete_when_a_worker_is_killed(cluster, tmp_path):
    configs = [replace(TINY, lr=rate, steps=500) for rate in RATES]
    found: list[int] = []

    def kill_one() -> None:
        while not list(tmp_path.glob("ray/runs/*/summary.json")):
            time.sleep(0.1)
        cluster.remove_node(cluster.workers[0], allow_graceful=False)
        found.append(len(list(tmp_path.glob("ray/runs/*/summary.json"))))

    killer = threading.Thread(target=kill_one, daemon=True)
    with Study.open(tmp_path / "ray", {}, "") as study:
        killer.start()
        execute(study, configs, engine="ray", address=cluster.address)
        killer.join(timeout=60)
        assert found
        assert 1 <= found[0] < len(configs)  # it was killed during the study
        on_ray = study.results(configs)
    with Study.open(tmp_path / "serial", {}, "") as study:
        execute(study, configs, engine="serial", device="cpu")
        serial = study.results(configs)
    assert len(on_ray) == len(configs)
    assert [result.loss for result in on_ray] == pytest.approx([result.loss for result in serial], rel=1e-4)


def test_error_of_a_worker_is_one_line_and_finished_runs_stay(cluster, tmp_path):
    good, bad = replace(TINY, steps=20), replace(TINY, steps=20, data=str(tmp_path / "nowhere"))
    with Study.open(tmp_path / "study", {}, "") as study:
        with pytest.raises(ValueError, match=r"^1 of 2 runs have no result \(.*nowhere.*the same command goes on$"):
            execute_on_ray(study, [good, bad], address=cluster.address)
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


def test_every_slot_has_something_to_do():
    configs = [replace(TINY, lr=rate, seed=seed) for rate in RATES for seed in range(10)]
    assert [len(part) for part in split(configs, num_slots=2, kind="CPU")] == [10] * 8
    assert sorted(len(part) for part in split(configs, num_slots=3, kind="GPU")) == [26, 27, 27]
    assert len(split(configs, num_slots=1, kind="GPU")) == 2  # a stack has at most 64


def test_costly_runs_come_first_and_alone():
    wide = replace(TINY, model=replace(TINY.model, width=512))
    parts = split([*(replace(TINY, lr=rate) for rate in RATES), wide, replace(wide, lr=0.1)], num_slots=2, kind="CPU")
    assert parts[:2] == [[wide], [replace(wide, lr=0.1)]]
    assert [len(part) for part in parts[2:]] == [8]
