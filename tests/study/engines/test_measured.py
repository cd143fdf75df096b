"""Studies with measured updates and moving masks."""

import contextlib
import io
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from smupar.cli.main import main
from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.run.train import train
from smupar.study.engines import execute
from smupar.study.report import write_report
from smupar.study.store import Study
from smupar.updates.trace import Trace
from tests.support.texts import words

TINY = RunConfig(
    model=ModelConfig(width=32, depth=1, head_dim=16), base_width=32, steps=20, batch_size=2, seq_len=16, valid_batches=1,
    data=words(),
)  # fmt: skip


FLAGS = (
    f"--depth 1 --head-dim 16 --base-width 32 --steps 20 --batch-size 2 --seq-len 16 --widths 64 --device cpu "
    f"--valid-batches 1 --data {words()} --values 0.002 0.008 0.03 "
)


MEASURED = FLAGS + "--rules smupar measured --sparsities 0 0.75 "


def run_transfer(folder, flags=MEASURED, engine="stacked"):
    """What `smupar transfer` doubts about its findings, in a sentence."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(f"transfer {flags} --engine {engine} --out {folder}".split())
    return said.getvalue().splitlines()[-2]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured") / "study"
    return folder, run_transfer(folder)


def stamps(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.glob("runs/**/*") if path.is_file()}


def test_measured_runs_of_a_study_follow_the_best_run_of_the_proxy(study):
    folder, found = study
    results = Study(folder).results()
    proxies = [result for result in results if result.config.record]
    assert {result.config.lr for result in proxies} == {0.002, 0.008, 0.03}
    assert {result.config.model.width for result in proxies} == {32}
    assert all((folder / "runs" / result.config.id / "trace.json").exists() for result in proxies)
    best = min(proxies, key=lambda one: one.loss)
    (trace,) = folder.glob("*.trace.json")
    assert trace.read_text() == (folder / "runs" / best.config.id / "trace.json").read_text()
    followers = [result for result in results if result.config.follow]
    assert len(followers) == 2 * 3
    assert {Path(result.config.follow).name for result in followers} == {trace.name}
    assert {result.config.rule for result in followers} == {"smupar"}
    assert "measured updates" in found


def test_measured_runs_are_those_of_the_trainer(study, tmp_path):
    folder, _ = study
    result = next(result for result in Study(folder).results() if result.config.follow and result.config.sparsity == 0.75)
    summary = train(result.config, Execution(out=str(tmp_path / "run"), device="cpu", peak_tflops=0.1))
    assert summary.train_loss == pytest.approx(result.loss, rel=1e-4)
    ours, theirs = (Trace.load(path / "trace.json") for path in (tmp_path / "run", folder / "runs" / result.config.id))
    assert ours.at == theirs.at
    for name, effects in ours.effects.items():
        assert theirs.effects[name] == pytest.approx(effects, rel=1e-2)


def test_study_started_again_runs_nothing(study):
    folder, found = study
    before = stamps(folder)
    assert run_transfer(folder) == found
    assert stamps(folder) == before
    assert len(list(folder.glob("*.trace.json"))) == 1


def test_moved_study_is_reported_and_goes_on(study, tmp_path):
    folder, found = study
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    assert found in write_report(Study(moved)).findings.sentence
    before = stamps(moved)
    assert run_transfer(moved) == found
    assert stamps(moved) == before


def test_reading_a_study_writes_no_trace(study, tmp_path):
    folder, found = study
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    for trace in moved.glob("*.trace.json"):
        trace.unlink()
    assert found in write_report(Study(moved)).findings.sentence
    assert not list(moved.glob("*.trace.json"))


def test_study_that_lost_a_measured_run_runs_that_alone(study, tmp_path):
    folder, found = study
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    lost = next(result.config for result in Study(moved).results() if result.config.follow)
    shutil.rmtree(moved / "runs" / lost.id)
    before = stamps(moved)
    assert run_transfer(moved) == found
    assert {path: stamp for path, stamp in stamps(moved).items() if lost.id not in path.parts} == before
    assert (moved / "runs" / lost.id / "summary.json").exists()


def test_serial_engine_gives_the_same_study(study, tmp_path):
    run_transfer(tmp_path / "study", FLAGS + "--rules measured --sparsities 0.75", engine="serial")
    theirs = {
        (result.config.lr, result.config.sparsity, bool(result.config.follow)): result.loss
        for result in Study(study[0]).results()
        if result.config.rule == "smupar"
    }
    ours = [result for result in Study(tmp_path / "study").results() if result.config.follow]
    assert len(ours) == 3
    for result in ours:
        assert result.loss == pytest.approx(theirs[result.config.lr, result.config.sparsity, True], rel=1e-4)


def test_transfer_with_gmp_compares_the_density_of_the_moment_with_the_paper(tmp_path):
    flags = FLAGS + "--rules smupar moment measured --sparsities 0.75 --dynamic gmp --mask-every 4"
    found = run_transfer(tmp_path / "study", flags)
    results = Study(tmp_path / "study").results()
    targets = [result for result in results if result.config.model.width == 64]
    assert len(targets) == 9
    assert all(
        result.config.dynamic == "gmp" and result.summary.sparsity == pytest.approx(0.75, abs=1e-3) for result in targets
    )
    by_rule = {(result.config.correction, bool(result.config.follow)) for result in targets}
    assert by_rule == {("fixed", False), ("moment", False), ("moment", True)}
    assert len({result.loss for result in targets}) == 9
    assert "density of the moment" in found
    assert all(result.config.dynamic == "none" for result in results if result.config.model.width == 32)


def test_optimizer_that_cannot_be_stacked_is_measured_by_the_trainer(tmp_path):
    flags = FLAGS.replace("--steps 20", "--steps 6") + "--rules measured --sparsities 0.75 --optimizer nadam"
    assert "measured updates" in run_transfer(tmp_path / "study", flags)
    followers = [result for result in Study(tmp_path / "study").results() if result.config.follow]
    assert len(followers) == 3


def test_proxy_may_be_shorter_and_shallower_than_what_follows_it(tmp_path):
    flags = FLAGS.replace("--depth 1", "--depth 3") + "--rules measured --sparsities 0.75 --proxy-depth 2 --proxy-steps 10"
    run_transfer(tmp_path / "study", flags)
    results = Study(tmp_path / "study").results()
    assert {(result.config.model.depth, result.config.steps, result.config.record) for result in results} == {
        (2, 10, True),
        (3, 20, False),
    }
    follower = next(result.config for result in results if result.config.follow)
    proxy = Trace.load(next((tmp_path / "study").glob("*.trace.json")))
    assert proxy.num_steps == 10
    assert len(proxy.effects) == 2 * 5
    assert len(Trace.load(tmp_path / "study" / "runs" / follower.id / "trace.json").effects) == 3 * 5


def test_study_in_which_the_proxy_diverges_says_so(tmp_path, capsys):
    flags = FLAGS.replace("0.002 0.008 0.03", "1e11 1e12 1e13") + "--rules measured --sparsities 0.5 --optimizer sgd"
    with pytest.raises(SystemExit) as ended:
        main(f"transfer {flags} --engine stacked --out {tmp_path / 'study'}".split())
    assert ended.value.code == 2
    assert "diverged: sweep smaller values of lr" in capsys.readouterr().err


def test_sweep_over_dynamic_methods_runs_as_one_stack(tmp_path):
    configs = [replace(TINY, sparsity=0.75, dynamic=dynamic, mask_every=4) for dynamic in ("none", "rigl", "set", "gmp")]
    with Study.open(tmp_path / "study", {"kind": "sweep", "axes": {}}, "smupar sweep") as study:
        execute(study, configs, engine="stacked", device="cpu")
        study.write_table()
    results = study.results(configs)
    assert [result.summary.sparsity for result in results] == pytest.approx([0.75] * 4, abs=1e-3)
    assert len({result.loss for result in results}) == 4
