"""What the page of a study shows, finished or not."""

import json
import math
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from smupar.lm.config.run_config import RunConfig
from smupar.output.page import read_page
from smupar.study.config import EngineConfig
from smupar.study.kinds.sweep import define_sweep
from smupar.study.kinds.transfer import define_transfer
from smupar.study.live import beating, read_planned, read_signs, repeated, write_planned
from smupar.study.page.view import StudyView
from smupar.study.progress import StudyProgress
from smupar.study.report import write_report
from smupar.study.stages import run_study
from smupar.study.store import Study
from tests.watch.studies import CONFIG, RUN, end_run, make_study


def rows_of(document):
    table = document["table"]
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_target_that_is_the_proxy_itself_decides_nothing(tmp_path):
    make_study(tmp_path)
    config = replace(
        CONFIG, widths=(32,), sparsities=(0.0, 0.75)
    ).normalised  # runs of the proxy, and none of width 32 and sparse
    (tmp_path / "study.json").write_text(
        json.dumps(json.loads((tmp_path / "study.json").read_text()) | {"definition": define_transfer(config).stored})
    )
    document = StudyView(tmp_path).document()
    assert document["headline"] == "Not known yet: no target has its best learning rate."
    assert document["answers"] == []


def test_finished_transfer_study_says_how_far_optima_moved(tmp_path):
    make_study(tmp_path)
    document = StudyView(tmp_path).document()
    assert (
        document["headline"] == "The learning rate transfers under SmuPar (its best stays within 2x), not under SP."
    )  # 2^-6 to 2^-8, and to 2^-5.5
    sp, smupar = document["answers"]
    assert (sp["value"], sp["tone"]) == ("moves 4x", "bad")
    assert sp["text"].startswith("best learning rate 0.0156 on the dense proxy\n")
    assert (smupar["value"], smupar["tone"]) == ("moves 1.4x", "good")
    assert [chart["rule"] for chart in document["charts"]] == ["SP", "SmuPar"]
    chart = document["charts"][0]
    assert chart["marked"][0] == pytest.approx(2**-6)
    assert [line["best"]["smooth"] for line in chart["lines"]] == pytest.approx([2**-6, 2**-8])
    assert document["progress"]["done"] == document["progress"]["total"] == 24
    assert not document["is_live"]


def test_unfinished_study_draws_what_ended_and_what_waits(tmp_path):
    left = make_study(tmp_path, num_left_out=6)  # all of SmuPar on the target
    document = StudyView(tmp_path).document()
    assert document["headline"] == "So far the learning rate does not transfer under SP."
    assert document["sentence"].startswith("The best learning rate may still move on 1 curve: SmuPar at density 1/4")
    target = document["charts"][1]["lines"][1]
    assert [point["y"] for point in target["points"]] == [None] * 6
    assert [point["runs"] for point in target["points"]] == [[run.id] for run in left]
    assert target["best"] is None
    assert document["progress"] | {"workers": 0} == {
        "done": 18, "running": 0, "waiting": 6, "diverged": 0, "stalled": 0, "total": 24, "seconds_left": None, "doing": "",
        "tokens_per_second": None, "workers": 0,
    }  # fmt: skip


def test_optimum_is_provisional_while_its_neighbours_wait(tmp_path):
    left = make_study(tmp_path, num_left_out=6)
    for run in left[:5]:
        end_run(tmp_path / "runs" / run.id, run)
    best = StudyView(tmp_path).document()["charts"][1]["lines"][1]["best"]
    assert (best["x"], best["low"], best["high"]) == (2**-6, 2**-7, 2**-5)
    assert not best["is_final"]
    end_run(tmp_path / "runs" / left[5].id, left[5])
    assert StudyView(tmp_path).document()["charts"][1]["lines"][1]["best"]["is_final"]


def test_optimum_on_the_edge_counts_once_its_curve_is_whole(tmp_path):
    left = make_study(tmp_path, num_left_out=6)
    by_lr = {run.lr: run for run in left}
    for lr in list(by_lr)[:3]:  # falling so far: the optimum lies beyond
        end_run(tmp_path / "runs" / by_lr[lr].id, by_lr[lr], loss=3 - lr)
    document = StudyView(tmp_path).document()
    assert document["headline"] == "So far the learning rate does not transfer under SP."
    assert "may still move on 1 curve: SmuPar at density 1/4, width 64." in document["sentence"]
    sp = [row["id"] for row in rows_of(document) if row["rule"] == "SP" and row["sparsity"] == 0.75]
    for run in map(RunConfig.from_json, [(tmp_path / "runs" / id_ / "config.json").read_text() for id_ in sp]):
        end_run(tmp_path / "runs" / run.id, run, loss=3 - run.lr)  # all of SP's runs have ended, the last is the best
    assert StudyView(tmp_path).document()["answers"][0]["value"] == "moves 4x or further"


def test_dense_runs_go_by_the_rules_that_were_asked_for(tmp_path):
    make_study(tmp_path)
    rows = rows_of(StudyView(tmp_path).document())
    assert {row["rule"] for row in rows} == {"SP", "SmuPar"}  # dense ones are trained under muP
    assert [row["rule"] for row in rows] == ["SP"] * 12 + ["SmuPar"] * 12
    first = rows[0]
    assert (first["rule"], first["sparsity"], first["width"], first["lr"]) == ("SP", 0.0, 32, 2**-9)
    assert StudyView(tmp_path).document()["table"]["varied"][:4] == ["rule", "sparsity", "width", "lr"]


def test_view_sees_a_run_that_has_ended_since_and_reads_others_once(tmp_path):
    (run, *_) = make_study(tmp_path, num_left_out=2)
    view = StudyView(tmp_path)
    assert view.document()["progress"]["done"] == 22
    version = view.version
    (tmp_path / "runs" / next(iter(view.study.ended)) / "summary.json").write_text("{")  # not read again
    end_run(tmp_path / "runs" / run.id, run)
    assert view.version != version
    assert view.document()["progress"]["done"] == 23


@pytest.mark.parametrize("content", ["", "{", '{"id": 1}', "[]", '{"status": "finished"'])
def test_half_written_run_counts_as_waiting(tmp_path, content):
    (run,) = make_study(tmp_path, num_left_out=1)
    end_run(tmp_path / "runs" / run.id, run)
    (tmp_path / "runs" / run.id / "summary.json").write_text(content)
    assert StudyView(tmp_path).document()["progress"]["waiting"] == 1
    end_run(tmp_path / "runs" / run.id, run)
    (tmp_path / "runs" / run.id / "metrics.jsonl").write_text('{"step": 4, "loss": 3.5}\n{"step": 8, "lo')
    document = StudyView(tmp_path).document()
    assert document["progress"]["done"] == 24
    assert document["curves"][run.id] == [[4, 3.5, None]]


def test_diverged_run_has_no_loss_and_is_counted(tmp_path):
    (run,) = make_study(tmp_path, num_left_out=1)
    end_run(tmp_path / "runs" / run.id, run, status="diverged")
    document = StudyView(tmp_path).document()
    assert document["progress"]["diverged"] == 1
    assert document["charts"][1]["lines"][1]["points"][-1] == {"x": 2**-4, "y": None, "runs": [run.id]}
    assert "Infinity" not in json.dumps(document)


# What a running study tells


def sign(folder, run, **changes):
    now = time.time()
    values = {"host": socket.gethostname(), "pid": os.getpid(), "device": "cpu", "doing": "", "tokens_per_second": 800.0}
    values |= {"runs": {run: [[4, 3.5], [8, 3.25]]}, "seconds_left": 180.0, "advanced": now, "time": now}
    (folder / "live").mkdir(exist_ok=True)
    (folder / "live" / "x.json").write_text(json.dumps(values | changes))


def test_running_stack_shows_its_losses_speed_and_time_left(tmp_path):
    run, other = make_study(tmp_path, num_left_out=2)
    sign(tmp_path, run.id)
    document = StudyView(tmp_path).document()
    progress = document["progress"]
    assert (progress["running"], progress["waiting"], progress["tokens_per_second"]) == (1, 1, 800.0)
    assert progress["seconds_left"] == pytest.approx(180, abs=2)
    assert progress["doing"] == ""
    assert document["is_live"]
    assert document["curves"][run.id] == [[4, 3.5], [8, 3.25]]
    (row,) = [row for row in rows_of(document) if row["id"] == run.id]
    assert (row["state"], row["loss"], row["steps_done"]) == ("running", 3.25, 8)
    assert other.id not in document["curves"]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"advanced": 0.0}, "stalled"),
        ({"host": "elsewhere", "time": 1.0}, "stopped"),
        ({"pid": 2**22 + 1}, "stopped"),  # above the largest process id
        ({"host": "elsewhere"}, "running"),
    ],
)
def test_process_that_does_not_move_or_is_gone_is_told_apart(tmp_path, changes, state):
    (run,) = make_study(tmp_path, num_left_out=1)
    sign(tmp_path, run.id, **changes)
    signs = read_signs(tmp_path)
    assert [worker["state"] for worker in signs.workers] == [state]
    assert signs.states == {run.id: state}
    assert StudyView(tmp_path).document()["is_live"] == (state != "stopped")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"runs": {}, "doing": "building models"}, "building models"), ({}, "starting the next run")],  # its run has ended
)
def test_process_between_runs_says_what_it_does(tmp_path, changes, words):
    make_study(tmp_path, num_left_out=2)
    ended = next((tmp_path / "runs").iterdir()).name
    sign(tmp_path, ended, **changes)
    document = StudyView(tmp_path).document()
    assert (document["progress"]["running"], document["progress"]["waiting"]) == (0, 2)
    assert document["progress"]["doing"] == words
    assert document["is_live"]


def test_study_is_alive_from_its_first_check_to_its_last_run(tmp_path):
    run = replace(RUN, steps=2, model=replace(RUN.model, width=32), valid_batches=1)
    sweep = define_sweep(run, {"lr": [0.01, 0.02]})
    seen = []

    def doing():
        return [worker["doing"] for worker in read_signs(tmp_path / "study").workers]

    def look():
        deadline = time.monotonic() + 20
        while doing() != ["checking runs and text"] and time.monotonic() < deadline:
            pass  # a thread writes it
        seen.append(doing())

    def propose(study):
        look()
        return sweep.stages[0](study)

    with run_study(tmp_path / "study", replace(sweep, stages=[propose]), "", EngineConfig(engine="serial", device="cpu")):
        pass
    assert seen == [["checking runs and text"]] * len(seen)
    assert len(seen) == 2  # before the runs, and after them


def test_interrupted_study_leaves_a_page_that_is_not_live(tmp_path):
    folder, sweep = tmp_path / "study", define_sweep(RUN, {"lr": [0.01, 0.02]})
    signs = []

    def propose(study):
        """Is interrupted once the process has shown a sign of life. The page asks for the runs again."""
        deadline = time.monotonic() + 20
        while not signs and time.monotonic() < deadline:
            if read_signs(folder).is_running:
                signs.append(1)
                end_run(folder / "runs" / run.id, run)  # otherwise nothing has begun, and the folder is removed
                raise KeyboardInterrupt
        return sweep.stages[0](study)

    run = sweep.stages[0](None)[0]
    definition = replace(sweep, stages=[propose])
    with (
        pytest.raises(KeyboardInterrupt),
        run_study(folder, definition, "", EngineConfig(engine="serial", device="cpu")),
    ):
        pass
    document = read_page(folder / "report.html")
    assert (document["is_live"], document["progress"]["done"]) == (False, 1)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"host": "a"}', "null"])
def test_sign_that_is_half_written_says_nothing(tmp_path, content):
    make_study(tmp_path, num_left_out=1)
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "x.json").write_text(content)
    assert read_signs(tmp_path).workers == ()


def test_planned_runs_are_known_without_the_definition(tmp_path):
    left = make_study(tmp_path, num_left_out=3, definition={"kind": "reproduce", "scale": "cpu"})
    write_planned(Study(tmp_path), left)
    assert list(read_planned(tmp_path)) == [run.id for run in left]
    document = StudyView(tmp_path).document()
    assert document["progress"]["waiting"] == 3
    waiting = [row for row in rows_of(document) if row["state"] == "waiting"]
    assert sorted(row["lr"] for row in waiting) == [run.lr for run in left]
    write_planned(Study(tmp_path), [])
    assert read_planned(tmp_path) is None


def test_errors_and_cost_of_repeated_work_never_reach_the_study():
    calls = []

    def fails():
        calls.append(0)
        raise ValueError

    with repeated(fails, every=0.001):
        deadline = time.monotonic() + 10
        while len(calls) < 3 and time.monotonic() < deadline:
            pass
    assert len(calls) >= 3


def test_study_leaves_a_page_and_no_traces_of_its_life(tmp_path):
    run = replace(RUN, steps=3, model=replace(RUN.model, width=32), valid_batches=1)
    sweep = define_sweep(run, {"lr": [0.01, 0.02, 0.04]})
    with run_study(tmp_path / "study", sweep, "smupar sweep", EngineConfig(engine="stacked", device="cpu")) as (study, _):
        write_report(study, sweep)
    assert not {"live", "planned.json"} & {path.name for path in study.folder.iterdir()}
    page = (study.folder / "report.html").read_text(encoding="utf-8")
    assert len(page) < 1_500_000
    document = read_page(study.folder / "report.html")
    assert [chart["x_label"] for chart in document["charts"]] == ["lr"]
    assert sorted(document["curves"]) == sorted(result.config.id for result in study.results())
    losses = {result.config.id: result.loss for result in study.results()}
    points = document["charts"][0]["lines"][0]["points"]
    assert [point["y"] for point in points] == pytest.approx([losses[point["runs"][0]] for point in points], rel=1e-5)


def test_signs_of_life_hold_the_time_left(tmp_path):
    study, progress = Study(tmp_path), StudyProgress()

    def left():
        deadline = time.monotonic() + 20
        while (seconds := read_signs(tmp_path).seconds_left) is None and time.monotonic() < deadline:
            progress.steps(1, 1)
            progress.running = {str(progress.num_steps): []}  # so that a sign is written soon
        return seconds

    with beating(study, progress):
        progress.plan([replace(RUN, steps=10**6)], "cpu")
        progress.begin(RUN)
        assert left() > 1


def test_page_of_a_study_needs_no_torch(tmp_path):
    make_study(tmp_path)
    code = (
        "import sys; from pathlib import Path; import smupar.watch.server; from smupar.study.page.view import StudyView\n"
        f"assert StudyView(Path({str(tmp_path)!r})).document()['headline']; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_best_of_all_diverged_runs_is_not_a_number(tmp_path):
    runs = make_study(tmp_path, num_left_out=24)
    for run in runs[:3]:
        end_run(tmp_path / "runs" / run.id, run, status="diverged")
    document = StudyView(tmp_path).document()
    assert document["headline"] == "Not known yet: no target has its best learning rate."
    assert all(line["best"] is None for chart in document["charts"] for line in chart["lines"])
    assert math.isfinite(document["made"])
    assert CONFIG.values[0] == 2**-9
