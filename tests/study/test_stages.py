"""Studies from the command to the report: what is kept, refused and said."""

import csv
import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace

import pytest

import smupar
from smupar.cli.main import main
from smupar.lm.config.commands import PrepareConfig
from smupar.lm.config.run_config import RunConfig
from smupar.lm.data.prepare import prepare
from smupar.output.files import locked
from smupar.output.page import read_page
from smupar.study.axes import grid
from smupar.study.config import EngineConfig, TransferConfig
from smupar.study.kinds.transfer import proposals
from smupar.study.report import write_report
from smupar.study.stages import run_study, run_until_complete
from smupar.study.store import Study
from tests.lm.run.processes import kill_at_random_moments, quiet, run_command
from tests.study.tiny import AXES, PROCESSES, TINY, TINY_FLAGS, run

# The store


def test_finished_runs_are_not_repeated(serial, tmp_path):
    configs = list(grid(TINY, AXES))
    assert serial.missing(configs) == []
    stamps = {path: path.stat().st_mtime_ns for path in serial.runs.rglob("summary.json")}
    run(serial.folder, "serial", configs)
    assert {path: path.stat().st_mtime_ns for path in serial.runs.rglob("summary.json")} == stamps


def test_table_has_a_row_per_run(serial):
    rows = list(csv.DictReader((serial.folder / "table.csv").read_text().splitlines()))
    assert len(rows) == 16
    assert {row["status"] for row in rows} == {"finished"}
    assert json.loads((serial.folder / "table.json").read_text())[0]["train_loss"] > 0


def test_study_killed_at_random_moments_ends_with_the_same_table(serial, tmp_path):
    folder = tmp_path / "study"

    def start():
        process = PROCESSES.Process(target=_quietly, args=(folder, tmp_path / "log"))
        process.start()
        return process

    kill_at_random_moments(start, random.Random(1), 5, earliest=0.1, latest=3)
    assert (folder / "table.csv").read_text() == (serial.folder / "table.csv").read_text()


def _quietly(folder, log):
    with quiet(log):
        run(folder, "serial", list(grid(TINY, AXES)))


def test_second_process_on_a_study_is_refused(serial):
    with locked(serial.folder), pytest.raises(ValueError, match="another process is working"):
        run(serial.folder, "serial", [])


def test_study_of_another_definition_or_version_is_refused(serial):
    with pytest.raises(ValueError, match="holds another study"), Study.open(serial.folder, {"kind": "transfer"}, ""):
        pass
    described, file = serial.describe(), serial.folder / "study.json"
    try:
        for version in ("0.0.9", "99.0.0", "unknown"):
            file.write_text(json.dumps({**described, "version": version}))
            with pytest.raises(ValueError, match=f"was made by smupar {version}"):
                run(serial.folder, "serial", [])
        file.write_text(json.dumps({**described, "version": "0.1.0"}))  # its runs are the same
        run(serial.folder, "serial", [])
    finally:
        (serial.folder / "study.json").write_text(json.dumps(described))


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(ValueError, match="holds other files and no study"):
        run(tmp_path, "serial", [])


def test_sweep_page_says_the_best_and_holds_every_run(serial):
    reported = write_report(serial)
    found = reported.findings.sentence
    page = read_page(serial.folder / "report.html")
    assert "Of 16 runs, 0 diverged" in found
    by_seeds = {}
    for result in serial.results():
        by_seeds.setdefault(replace(result.config, seed=0).id, []).append(result)
    means = {id_: sum(result.loss for result in same) / len(same) for id_, same in by_seeds.items()}
    same = by_seeds[min(means, key=means.get)]  # whichever run was luckiest
    best, runs = same[0].config, ", ".join(result.config.id for result in same)
    values = f"rule {best.rule}, sparsity {best.sparsity:g}, lr {best.lr:.5g}"
    assert f"of {min(means.values()):.4f}, the mean of 2 seeds (" in found
    assert f"): {values}, runs {runs}." in found
    assert reported.where == f"{serial.folder}/report.html, picture.png, table.csv"
    points = [point for chart in page["charts"] for line in chart["lines"] for point in line["points"]]
    assert sorted(point["y"] for point in points) == pytest.approx(sorted(means.values()), rel=1e-5)
    ids = sorted(result.config.id for result in serial.results())
    assert sorted(row[0] for row in page["table"]["rows"]) == sorted(id_ for point in points for id_ in point["runs"]) == ids
    assert page["command"].startswith("smupar sweep")
    assert (serial.folder / "picture.png").stat().st_size > 10_000


def prepared(folder, letters):
    source = folder / "text.txt"
    source.write_text(letters * 2000)
    prepare(PrepareConfig((str(source),), out=str(folder / "tokens")))
    return str(folder / "tokens")


def test_study_refuses_a_text_that_has_changed_under_its_name(tmp_path, capsys):
    data = prepared(tmp_path, "some text ")
    sweep = ["sweep", "lr=0.01,0.02", "--width", "32", "--depth", "1", "--head-dim", "16", "--base-width", "32"]
    sweep += ["--steps", "2", "--seq-len", "16", "--data", data, "--device", "cpu", "--out", str(tmp_path / "study")]
    main(sweep)
    main(sweep)
    shutil.rmtree(data)
    prepared(tmp_path, "other text")
    with pytest.raises(SystemExit):
        main(sweep)
    assert "is not the one that" in capsys.readouterr().err


def test_report_of_a_study_that_is_not_finished_says_so(tmp_path, capsys):
    folder = tmp_path / "study"
    main(["transfer", "--widths", "64", "--sparsities", "0.5", "--rules", "mup", *TINY_FLAGS, "--out", str(folder)])
    assert "best learning rate" in capsys.readouterr().out
    for path in sorted(folder.glob("runs/*"))[:3]:
        shutil.rmtree(path)
    main(["report", str(folder)])
    said = capsys.readouterr().out
    assert "Not finished: 13 of 16 runs are done" in said
    assert "moved" not in said
    main(["sweep", "lr=0.01,0.02,0.04", *TINY_FLAGS, "--width", "32", "--out", str(tmp_path / "sweep")])
    shutil.rmtree(next((tmp_path / "sweep").glob("runs/*")))
    main(["report", str(tmp_path / "sweep")])
    assert "Not finished: 2 of 3 runs are done" in capsys.readouterr().out


def test_study_refuses_two_traces_of_one_name(tmp_path, capsys):
    proxy = ["train", *TINY_FLAGS, "--width", "32", "--sparsity", "0", "--record"]
    for name, lr in (("a", "0.01"), ("b", "0.02")):
        main([*proxy, "--lr", lr, "--out", str(tmp_path / name)])
    traces = ",".join(str(tmp_path / name / "trace.json") for name in "ab")
    with pytest.raises(SystemExit):
        main(["sweep", f"follow={traces}", *TINY_FLAGS, "--width", "64", "--out", str(tmp_path / "study")])
    assert "the trace 'trace.json' is not the one that" in capsys.readouterr().err


def test_another_study_is_told_by_the_field_that_differs(tmp_path, capsys):
    sweep = ["sweep", "lr=0.01,0.02", *TINY_FLAGS, "--width", "32", "--out", str(tmp_path / "study")]
    main(sweep)
    with pytest.raises(SystemExit):
        main([*sweep, "--steps", "5"])
    assert "holds another study (steps 4 there, 5 here): choose another --out" in capsys.readouterr().err
    sweep[1] = "lr=0.01,0.04"
    with pytest.raises(SystemExit):
        main(sweep)
    assert "holds another study (axes {'lr': [0.01, 0.02]} there, {'lr': [0.01, 0.04]} here)" in capsys.readouterr().err


def test_sweep_can_grow(tmp_path, capsys):
    sweep = ["sweep", "lr=0.01,0.02", *TINY_FLAGS, "--width", "32", "--out", str(tmp_path / "study")]
    main(sweep)
    main([sweep[0], "lr=0.005,0.01,0.02", *sweep[2:]])
    said = capsys.readouterr()
    assert "3 runs, 2 of them done" in said.err
    assert "Of 3 runs, 0 diverged" in said.out
    with pytest.raises(SystemExit):
        main(sweep)
    assert "holds another study" in capsys.readouterr().err  # which would hide what is there


def test_transfer_grown_in_steps_is_the_one_that_was_asked_for_at_once(tmp_path, capsys):
    def transfer(out, values, rules, seeds):
        flags = ["--widths", "64", "--sparsities", "0.5", "--values", *values, "--rules", *rules, "--seeds", seeds]
        main(["transfer", *TINY_FLAGS, *flags, "--out", str(tmp_path / out)])
        return capsys.readouterr()

    transfer("grown", ("0.004", "0.008", "0.016"), ("smupar",), "1")
    grown = transfer("grown", ("0.004", "0.008", "0.016", "0.032"), ("sp", "smupar"), "2")
    assert "16 runs, 6 of them done" in grown.err
    fresh = transfer("fresh", ("0.004", "0.008", "0.016", "0.032"), ("sp", "smupar"), "2")
    assert grown.out.splitlines()[:-1] == fresh.out.splitlines()[:-1]


def test_default_values_of_a_transfer_can_be_added_to(tmp_path, capsys):
    transfer = [
        "transfer",
        *TINY_FLAGS,
        *["--widths", "64", "--sparsities", "0.5", "--rules", "mup", "--out"],
        str(tmp_path / "x"),
    ]
    main(transfer)
    main([*transfer, "--values", *(str(2.0**exponent) for exponent in range(-12, -3))])
    assert "18 runs, 16 of them done" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize(("engine", "axis"), [("serial", "optimizer=nadam,radam"), ("stacked", "lr=0.01,0.02")])
def test_study_that_is_ended_by_a_signal_says_what_is_kept(tmp_path, number, code, engine, axis):
    folder, log = tmp_path / "study", tmp_path / "log"
    argv = ["sweep", axis, *TINY_FLAGS, "--width", "32", "--steps", "1000000", "--engine", engine, "--out", str(folder)]
    process = PROCESSES.Process(target=run_command, args=(argv, log))
    process.start()
    deadline = time.monotonic() + 60
    while "2 runs, 0 of them done" not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    time.sleep(2)  # most likely it trains by now; what it says is the same if not
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == code
    assert "0 of 2 runs are done and kept. Start the same command again: runs that were interrupted continue" in log.read_text()


@pytest.mark.parametrize("dynamic", ["rigl", "set", "gmp"])
def test_masks_that_hardly_move_are_told(dynamic, tmp_path):
    config = replace(TINY, steps=8, sparsity=0.5, dynamic=dynamic, mask_every=4)
    times = "2 times" if dynamic == "gmp" else "once"
    with (
        Study.open(tmp_path / "study", {"kind": "sweep"}, "") as study,
        pytest.warns(smupar.PlanWarning, match=f"masks move {times} in 8 steps: a smaller --mask-every than 4"),
    ):
        run_until_complete(study, lambda study: [config], EngineConfig(device="cpu"))
    assert RunConfig(dynamic=dynamic, steps=1000).few_moves_warning is None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("transfer --axis alpha_output", "SP has no alpha_output to sweep: leave it out of --rules"),
        (
            "transfer --rules smupar moment",
            "moment is SmuPar with the current density of masks that move: it needs --dynamic gmp or imp",
        ),
        ("transfer --base_width 32 --init_std 0.1 --axis init_std", "transfer does not take --init-std"),
        ("transfer --pattern 2:4", "the pattern 2:4 keeps 2 of 4 weights, so the sparsity is 0.5"),
        ("transfer --widths 0", "seeds and widths must be at least 1, got 1 and 0"),
        ("train --pattern 2:0", "needs 0 < N < M"),
        ("train --pattern 2:3", "the pattern 2:3 needs a width that is a multiple of 3, not 256: 288 would be"),
        ("check --pattern 2:4", "so the sparsity is 0.5 (or 0 for a dense model), not 0.75"),
        ("check --pattern block-48 --widths 64", "a multiple of 48, not 64: 96 would be"),
        ("transfer --rules sp smupr", "smupar-aligned, measured, moment"),
        ("sweep lr=2^-4..2^-8", "the smaller end of a range comes first"),
        ("sweep optimizer=adamw,adamz lr=2^-8..2^-4", "no learning-rate rule is known for optimizer 'adamz'"),
        ("sweep rule=sp,smupr lr=2^-8..2^-4", "unknown rule 'smupr'"),
        ("sweep pattern=random,randm lr=2^-8..2^-4", "randm"),
        ("check --sparsities 0 75", "sparsity must lie in [0, 1), got 75.0: write 0.75 for 75 %"),
        ("train --gpus 8", "--gpus only changes the estimate of --dry-run. To train on several GPUs: torchrun"),
        ("train --alpha-input -1", "alpha_input must be a number, at least 0"),
        ("train --dynamic gmp --drop-fraction 0.1", "--drop-fraction does nothing with --dynamic gmp: it is for rigl, set"),
    ],
)
def test_studies_without_sense_are_refused_before_they_start(command, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--out", str(tmp_path / "study")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_values_that_are_given_twice_are_taken_once():
    config = TransferConfig(run=TINY, rules=("sp", "sp"), sparsities=(0.75, 0.75), widths=(64, 64))
    once = TransferConfig(run=TINY, rules=("sp",), sparsities=(0.75,), widths=(64,))
    assert config.normalised == once.normalised == replace(once, values=tuple(2.0**exponent for exponent in range(-11, -3)))
    assert proposals(config.normalised) == proposals(once.normalised)


def test_mistaken_command_leaves_no_folder_behind(tmp_path, capsys):
    sweep = ["sweep", "--device", "cpu", "--steps", "2", "--out", str(tmp_path / "study")]
    for mistake, message in ((["width=64,100"], "multiple of head_dim"), (["lr=0.1,0.2", "--data", "nowhere"], "nowhere")):
        with pytest.raises(SystemExit):
            main([*sweep, *mistake])
        assert message in capsys.readouterr().err
        assert not (tmp_path / "study").exists()


# Transfer


@pytest.mark.parametrize("bad", [{"rules": ()}, {"seeds": 0}, {"values": (0.1, 0.2)}, {"widths": ()}])
def test_bad_study_raises(bad):
    with pytest.raises(ValueError, match=r"empty|at least 1|three or more"):
        TransferConfig(run=TINY, **bad)


def test_tune_page_has_a_panel_for_each_hyperparameter(tmp_path):
    from smupar.study.config import TuneConfig
    from smupar.study.kinds.tune import define_search

    search = define_search(TuneConfig(run=replace(TINY, sparsity=0.0, steps=5), num_samples=3))
    with run_study(tmp_path / "study", search, "smupar tune", EngineConfig()) as (study, _):
        assert "Of 3 runs" in write_report(study).findings.sentence
    charts = read_page(tmp_path / "study" / "report.html")["charts"]
    assert [chart["x_label"] for chart in charts] == ["lr", "init_std", "alpha_input", "alpha_output"]
    assert [len(line["points"]) for chart in charts for line in chart["lines"]] == [3] * 4


def test_study_whose_growth_has_a_mistake_stays_as_it_was(tmp_path, capsys):
    sweep = ["sweep", "rule=sp,mup", *TINY_FLAGS, "--width", "32", "--out", str(tmp_path / "study")]
    main(sweep)
    with pytest.raises(SystemExit):
        main([sweep[0], "rule=sp,mup,smupr", *sweep[2:]])
    main([sweep[0], "rule=sp,mup,smupar", *sweep[2:]])
    assert "3 runs, 2 of them done" in capsys.readouterr().err


def test_run_that_a_sweep_names_twice_counts_once(tmp_path, capsys):
    main(["sweep", "lr=0.02,0.01,0.02", *TINY_FLAGS, "--width", "32", "--out", str(tmp_path / "study")])
    said = capsys.readouterr().out
    assert "Of 2 runs" in said
    assert "seeds" not in said
