"""Studies: grids, the store, engines that agree, and the transfer verdict."""

import contextlib
import csv
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import smupar
from smupar.cli.main import main
from smupar.lm.config.commands import PrepareConfig
from smupar.lm.config.run import Execution, ModelConfig, RunConfig
from smupar.lm.data.prepare import prepare
from smupar.lm.run.folder import Summary
from smupar.lm.run.train import train
from smupar.output.files import locked
from smupar.output.page import read_page
from smupar.study.config import EngineConfig, TransferConfig
from smupar.study.curves import Line, Panel, Point
from smupar.study.definition import more_seeds
from smupar.study.engines import StudyProgress, execute, groups, largest_stack, run_group, run_study, settle
from smupar.study.optima import Curve, move_in_words, moved
from smupar.study.picture import draw_png
from smupar.study.report import write_report
from smupar.study.space import grid, parse_axes, parse_axis
from smupar.study.store import Study
from smupar.study.transfer import Verdict, analyse, panels, proposals, sentence
from tests.texts import words

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["smupar.study.engines"])

TINY = RunConfig(
    model=ModelConfig(width=32, depth=1, head_dim=16), base_width=32, steps=20, batch_size=2, seq_len=16, valid_batches=1,
    data=words(),
)  # fmt: skip
AXES = {"rule": ["sp", "smupar"], "sparsity": [0.0, 0.75], "lr": [2.0**-8, 2.0**-6], "seed": [0, 1]}


def run(folder, engine, configs):
    with Study.open(folder, {"kind": "sweep", "axes": AXES}, "smupar sweep") as study:
        execute(study, configs, engine=engine, device="cpu")
        study.write_table()
    return study


# Grids


def test_grid_is_every_combination():
    configs = list(grid(TINY, AXES))
    assert len(configs) == 16
    assert len({config.id for config in configs}) == 16
    assert {(c.rule, c.sparsity, c.lr, c.seed) for c in configs} >= {("sp", 0.75, 2.0**-6, 1)}


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("lr=2^-10..2^-8", "lr", [2.0**-10, 2.0**-9, 2.0**-8]),
        ("sparsity=0,0.75,none", "sparsity", [0.0, 0.75, None]),
        ("rule=sp,smupar", "rule", ["sp", "smupar"]),
        ("width=64,128", "width", [64, 128]),
        ("head-dim=16", "head_dim", [16]),
        ("biases=true,false", "biases", [True, False]),
        ("width=2^5..2^7", "width", [32, 64, 128]),
        ("seed=2^0,2^1", "seed", [1, 2]),
        ("lr=2^-6.5", "lr", [2**-6.5]),
        ("betas=0.9:0.95,0.9:0.99", "betas", [(0.9, 0.95), (0.9, 0.99)]),
    ],
)
def test_axis_is_read_with_the_type_of_its_field(text, name, values):
    assert parse_axis(text) == (name, values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=1", "a run has no field called 'speed'"),
        ("lr=", "the axis lr has no values"),
        ("lr=fast", "lr takes numbers, got 'fast'"),
        ("lr=1..2", "a range is written 2\\^-8..2\\^-4"),
        ("biases=maybe", "biases is true or false"),
        ("width=2^-1", "width cannot be 2\\^-1"),
        ("width=0.5", "width takes whole numbers, got '0.5'"),
        ("rule=2^3", "rule cannot be 2\\^3"),
        ("lr=2^5000", "2\\^5000 is not a number that floating point holds: powers go from 2\\^-1022 to 2\\^1023"),
        ("lr=2^-5000", "2\\^-5000 is not a number that floating point holds"),
        ("lr=2^-99999999..2^4", "2\\^-99999999 is not a number"),
        ("lr=2^nan", "2\\^nan is not a number"),
        ("lr=2^-7.5..2^-4", "from one whole power to another"),
        ("betas=0.9", "betas takes two numbers such as 0.9:0.95, got '0.9'"),
    ],
)
def test_bad_axis_raises_with_the_remedy(text, message):
    with pytest.raises(ValueError, match=message):
        parse_axis(text)


def test_axis_without_values_raises():
    with pytest.raises(ValueError, match="the axis lr has no values"):
        list(grid(TINY, {"lr": []}))


# Engines


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    return run(tmp_path_factory.mktemp("serial") / "study", "serial", list(grid(TINY, AXES)))


@pytest.mark.parametrize("engine", ["stacked", "auto"])
def test_engines_give_the_same_results(serial, tmp_path, engine):
    configs = list(grid(TINY, AXES))
    ours = run(tmp_path / "study", engine, configs).results(configs)
    for mine, theirs in zip(ours, serial.results(configs), strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert mine.summary.valid_loss == pytest.approx(theirs.summary.valid_loss, rel=1e-4)
        assert mine.summary.sparsity == theirs.summary.sparsity


def test_group_that_is_split_may_mix_seeds(serial, tmp_path, monkeypatch):
    monkeypatch.setattr("smupar.study.engines._MOST", 3)
    configs = list(grid(TINY, AXES))
    ours = run(tmp_path / "study", "stacked", configs).results(configs)
    assert [one.loss for one in ours] == pytest.approx([one.loss for one in serial.results(configs)], rel=1e-4)


def test_optimizer_that_cannot_be_stacked_goes_through_the_trainer(tmp_path, capfd):
    configs = [replace(TINY, optimizer="nadam", lr=lr) for lr in (2.0**-8, 2.0**-7)]
    assert [len(group) for group in groups(configs)] == [1, 1]
    results = run(tmp_path / "study", "auto", configs).results(configs)
    assert [result.summary.status for result in results] == ["finished", "finished"]


def test_runs_of_different_shapes_are_apart():
    configs = [TINY, replace(TINY, lr=0.1), replace(TINY, steps=5), replace(TINY, model=replace(TINY.model, width=64))]
    assert sorted(len(group) for group in groups(configs)) == [1, 1, 2]


def test_stack_is_bounded_by_memory():
    huge = replace(TINY, model=ModelConfig(width=8192, depth=40, head_dim=128), base_width=256)
    assert largest_stack(huge, torch.device("cpu")) == 0  # the trainer takes its batches in parts
    assert largest_stack(TINY, torch.device("cpu")) == 64


def test_diverged_runs_are_marked_and_hurt_nobody(tmp_path):
    configs = [replace(TINY, optimizer="sgd", lr=lr, sparsity=0.5) for lr in (0.01, 1e12, 0.02)]
    results = run(tmp_path / "study", "stacked", configs).results(configs)
    assert [result.summary.status for result in results] == ["finished", "diverged", "finished"]
    assert math.isinf(results[1].loss)
    assert results[0].loss < 6


def test_trainer_and_stack_tell_the_same_of_a_run(tmp_path):
    calm, wild = (replace(TINY, optimizer="sgd", lr=lr, sparsity=0.5) for lr in (0.01, 1e12))
    stacked = run(tmp_path / "study", "stacked", [calm, wild])
    for config in (calm, wild):
        out = tmp_path / config.id
        alone = train(config, Execution(out=str(out), device="cpu", log_every=1, valid_every=TINY.steps, peak_tflops=1))
        (result,) = stacked.results([config])
        machine = {"folder": "", "seconds": 0.0, "tokens_per_second": 0.0}
        assert_near(*(asdict(replace(summary, **machine)) for summary in (result.summary, alone)))
        ours, theirs = (rows_of(folder) for folder in (stacked.runs / config.id, out))
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_near(mine | {"tokens_per_second": 0.0}, other | {"tokens_per_second": 0.0})
    assert alone.status == "diverged"
    assert (alone.train_loss, alone.valid_loss) == (None, None)
    assert alone.steps == len(theirs) - 1  # the last row is that of the step whose loss is no number
    assert theirs[-1]["loss"] is None


def assert_near(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), name


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_of_a_long_stack_are_means_and_their_last_one_is_validated(tmp_path):
    config = replace(TINY, steps=120)
    rows = rows_of(run(tmp_path / "study", "stacked", [config, replace(config, lr=0.02)]).runs / config.id)
    assert [row["step"] for row in rows] == list(range(2, 121, 2))
    alone = train(config, Execution(out=str(tmp_path / "run"), device="cpu", log_every=1, peak_tflops=1))
    losses = {row["step"]: row["loss"] for row in rows_of(Path(alone.folder))}
    assert [row["loss"] for row in rows] == pytest.approx(
        [(losses[step - 1] + losses[step]) / 2 for step in range(2, 121, 2)], rel=1e-4
    )
    assert ["valid_loss" in row for row in rows] == [False] * 59 + [True]


def test_losses_of_a_stack_are_fetched_every_fifty_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("smupar.lm.run.loop._LONGEST_LOOK", float("inf"))  # steps alone decide
    seen = []

    class Watched(StudyProgress):
        def steps(self, num, running):
            seen.append(num)

    runs = [replace(TINY, steps=120, lr=lr) for lr in (0.01, 0.02)]
    with Study.open(tmp_path / "study", {"kind": "x"}, "") as study:
        run_group(study, runs, "stacked", torch.device("cpu"), Watched(runs))
    assert seen == [100, 100, 40, 0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stack_that_a_signal_stops_says_what_is_kept(tmp_path, number, code):
    folder, log = tmp_path / "study", tmp_path / "log"
    argv = ["sweep", "lr=0.01,0.02", *TINY_FLAGS, "--width", "32", "--steps", "1000000", "--out", str(folder)]
    process = PROCESSES.Process(target=_command, args=([*argv, "--engine", "stacked"], log))
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
    moments = random.Random(1)
    kills = 0
    folder = tmp_path / "study"
    while True:
        process = PROCESSES.Process(target=_quietly, args=(folder, tmp_path / "log"))
        process.start()
        process.join(timeout=moments.uniform(0.1, 3) if kills < 5 else None)
        if process.exitcode is not None:
            assert process.exitcode == 0, (tmp_path / "log").read_text()
            break
        process.kill()
        process.join()
        kills += 1
    assert (folder / "table.csv").read_text() == (serial.folder / "table.csv").read_text()


def _quietly(folder, log):
    torch.set_num_threads(1)
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        run(folder, "serial", list(grid(TINY, AXES)))


def test_second_process_on_a_study_is_refused(serial):
    with locked(serial.folder), pytest.raises(ValueError, match="another process is working"):
        run(serial.folder, "serial", [])


def test_study_of_another_definition_or_version_is_refused(serial):
    with pytest.raises(ValueError, match="holds another study"), Study.open(serial.folder, {"kind": "transfer"}, ""):
        pass
    described = serial.describe()
    (serial.folder / "study.json").write_text(json.dumps({**described, "version": "0.0.1"}))
    try:
        with pytest.raises(ValueError, match=r"was made by smupar 0\.0\.1"):
            run(serial.folder, "serial", [])
    finally:
        (serial.folder / "study.json").write_text(json.dumps(described))


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(ValueError, match="holds other files and no study"):
        run(tmp_path, "serial", [])


def test_sweep_page_says_the_best_and_holds_every_run(serial):
    found = str(write_report(serial))
    page = read_page(serial.folder / "report.html")
    assert "Of 16 runs, 0 diverged" in found
    by_seeds = {}
    for result in serial.results():
        by_seeds.setdefault(replace(result.config, seed=0).id, []).append(result)
    means = {id_: sum(one.loss for one in same) / len(same) for id_, same in by_seeds.items()}
    same = by_seeds[min(means, key=means.get)]  # whichever run was luckiest
    best, runs = same[0].config, ", ".join(one.config.id for one in same)
    values = f"rule {best.rule}, sparsity {best.sparsity:g}, lr {best.lr:.5g}"
    assert f"of {min(means.values()):.4f}, the mean of 2 seeds (" in found
    assert f"): {values}, runs {runs}.\n{serial.folder}/report.html, picture.png, table.csv" in found
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


TINY_FLAGS = [
    "--depth",
    "1",
    "--head-dim",
    "16",
    "--base-width",
    "32",
    "--steps",
    "4",
    "--seq-len",
    "16",
    "--batch-size",
    "2",
    "--valid-batches",
    "1",
    "--device",
    "cpu",
]
TINY_FLAGS += ["--data", words()]


def test_report_of_a_study_that_is_not_finished_says_so(tmp_path, capsys):
    folder = tmp_path / "study"
    main(["transfer", "--widths", "64", "--sparsities", "0.5", "--rules", "mup", *TINY_FLAGS, "--out", str(folder)])
    assert "best learning rate" in capsys.readouterr().out
    for run in sorted(folder.glob("runs/*"))[:3]:
        shutil.rmtree(run)
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
def test_study_that_is_ended_by_a_signal_says_what_is_kept(tmp_path, number, code):
    folder, log = tmp_path / "study", tmp_path / "log"
    argv = ["sweep", "optimizer=nadam,radam", *TINY_FLAGS, "--width", "32", "--steps", "100000", "--out", str(folder)]
    process = PROCESSES.Process(target=_command, args=(argv, log))
    process.start()
    deadline = time.monotonic() + 60
    while not list(folder.glob("runs/*/metrics.jsonl")):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == code
    assert "0 of 2 runs are done and kept" in log.read_text()


def _command(argv, log):
    torch.set_num_threads(1)
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        main(argv)


@pytest.mark.parametrize("dynamic", ["rigl", "set", "gmp"])
def test_masks_that_hardly_move_are_told(dynamic, tmp_path):
    config = replace(TINY, steps=8, sparsity=0.5, dynamic=dynamic, mask_every=4)
    times = "2 times" if dynamic == "gmp" else "once"
    with (
        Study.open(tmp_path / "study", {"kind": "sweep"}, "") as study,
        pytest.warns(smupar.PlanWarning, match=f"masks move {times} in 8 steps: a smaller --mask-every than 4"),
    ):
        settle(study, lambda study: [config], EngineConfig(device="cpu"))
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
        ("transfer --pattern 2:4", "the pattern 2:4 keeps 2 of 4 weights: leave --sparsity out, or say 0.5"),
        ("transfer --widths 0", "seeds and widths must be at least 1, got 1 and 0"),
        ("train --pattern 2:0", "needs 0 < N < M"),
        ("sweep lr=2^-4..2^-8", "the smaller end of a range comes first"),
        ("sweep optimizer=adamw,adamz lr=2^-8..2^-4", "no learning-rate rule is known for optimizer 'adamz'"),
        ("sweep rule=sp,smupr lr=2^-8..2^-4", "unknown rule 'smupr'"),
        ("sweep pattern=random,randm lr=2^-8..2^-4", "randm"),
        ("check --sparsities 0 75", "sparsity must lie in [0, 1), got 75"),
        ("train --momentum 0.5", "--momentum does nothing with --optimizer adamw: it is for sgd, muon"),
        ("train --optimizer sgd --betas 0.5 0.5", "--betas does nothing with --optimizer sgd"),
        ("train --context 64", "--context does nothing with --positions alibi: it is for learned"),
        ("train --gpus 8", "--gpus is for --dry-run; on several GPUs: torchrun"),
        ("train --alpha-input -1", "alpha_input must be a number, at least 0"),
        ("train --dynamic gmp --drop-fraction 0.1", "--drop-fraction does nothing with --dynamic gmp: it is for rigl, set"),
        ("train --mask-every=10", "--mask-every does nothing with --dynamic none: it is for rigl, set, gmp"),
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--width 64", "does not take --width: name the targets' widths with --widths"),
        ("--rule=sp", "does not take --rule: name the rules to compare with --rules"),
        ("--lr 0.1", "does not take --lr: it is the swept field, give its values with --values"),
        ("--axis init_std --init-std 0.1", "does not take --init-std: it is the swept field"),
        ("--follow x.json", "recorded and followed by --rules measured"),
    ],
)
def test_flags_that_transfer_sets_itself_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        main(["transfer", *flags.split()])
    assert message in capsys.readouterr().err


# Transfer


def curve(optimum, sparsity=0.0, rule="sp", is_proxy=False, floor=3.0):
    values = tuple(2.0**exponent for exponent in range(-11, -3))
    losses = tuple(floor + 0.1 * (math.log2(value) - optimum) ** 2 for value in values)
    return Curve(rule, 64 if is_proxy else 256, sparsity, values, losses, is_proxy)


@pytest.mark.parametrize(
    ("optima", "words"),
    [
        ((-7, -6, -7.5), "2x"),
        ((-7, -6, -2), "8x or further"),
        ((-2, -6), "4x or further"),
        ((-2, -1, -3), "?x (edge of the grid)"),
        ((-2, -20), "128x or further"),
    ],
)
def test_moves_to_the_edge_of_the_grid_are_not_said_to_be_known(optima, words):
    assert move_in_words([curve(one) for one in optima]) == words


def test_smooth_minimum_is_the_vertex_of_the_parabola():
    assert curve(-7.3).best == pytest.approx(2**-7.3)
    assert not curve(-7.3).on_edge
    assert curve(-12).on_edge
    assert curve(-12).best == 2.0**-11


def test_neighbour_that_diverged_leaves_the_best_on_the_grid():
    steep = curve(-6.3)
    losses = tuple(math.inf if value > 2**-6 else loss for value, loss in zip(steep.values, steep.losses, strict=True))
    assert replace(steep, losses=losses).best == 2.0**-6


def test_excess_is_relative_to_the_best_loss():
    assert curve(-7).excess(2**-9) == pytest.approx(0.4 / 3.0)
    assert curve(-7).excess(2**-8.5) == pytest.approx((0.1 + 0.4) / 2 / 3.0)


def test_sentence_says_how_far_optima_moved_and_what_it_costs():
    config = TransferConfig(run=TINY, rules=("sp", "smupar"))
    verdicts = [
        Verdict("sp", curve(-10, is_proxy=True), (curve(-10), curve(-6, 0.9375))),
        Verdict("smupar", curve(-7, is_proxy=True), (curve(-7, rule="smupar"), curve(-6, 0.9375, "smupar"))),
    ]
    assert moved(verdicts[0].proxy, verdicts[0].targets[1]) == pytest.approx(16)
    text = sentence(config, verdicts)
    assert "SP's 16x, SmuPar's 2x" in text
    assert "at 0.9375 sparsity and width 256 the proxy's best swept learning rate costs SP 53.3%, SmuPar 3.3%" in text
    assert "edge" not in text


def test_value_that_is_best_costs_nothing_wherever_between_the_swept_ones_the_optimum_lies():
    off = curve(-7.4)
    assert off.best_value == 2**-7
    assert off.excess(off.best_value) == 0


def test_target_of_which_every_run_diverged_counts_against_its_rule():
    config = TransferConfig(run=TINY, rules=("sp", "smupar"))
    lost = replace(curve(-6, 0.9375), losses=(math.inf,) * 8)
    verdicts = [
        Verdict("sp", curve(-10, is_proxy=True), (curve(-10), lost)),
        Verdict("smupar", curve(-7, is_proxy=True), (curve(-7, rule="smupar"), curve(-6, 0.9375, "smupar"))),
    ]
    text = sentence(config, verdicts)
    assert "SP's out of reach, SmuPar's 2x" in text
    assert "at 0.9375 sparsity and width 256 the proxy's best swept learning rate costs SP a diverged run, SmuPar 3.3%" in text
    assert "Every run diverged, so there is no best learning rate: SP at sparsity 0.9375, width 256." in text
    assert "edge" not in text
    assert panels(config, verdicts)[0].lines[-1].best is None


def test_proposals_share_the_dense_runs_of_mup_and_smupar():
    config = TransferConfig(run=TINY, widths=(64,), sparsities=(0.0, 0.75), values=(0.001, 0.002, 0.004))
    runs = proposals(config)
    # SP: proxy, dense, sparse. muP and SmuPar: proxy and dense together, each a sparse one.
    assert len(runs) == 3 * (3 + 2 + 2)
    assert {run.init_std for run in runs if run.rule == "sp" and run.model.width == 64} == {0.087 * math.sqrt(32 / 64)}


def test_other_axes_are_swept_around_the_tuned_value():
    assert TransferConfig(run=TINY, axis="alpha_output").normalised.values[3] == TINY.alpha_output
    assert len(TransferConfig(run=TINY, axis="init_std").normalised.values) == 7


def test_axes_are_given_once():
    assert parse_axes(["lr=2^-3,0.5", "rule=sp"]) == {"lr": [0.125, 0.5], "rule": ["sp"]}
    with pytest.raises(ValueError, match="the axis lr is given twice: write lr=first,second"):
        parse_axes(["lr=0.01", "lr=0.02"])


def test_further_seeds_follow_an_optimum_that_they_move(tmp_path):
    curve = [replace(TINY, lr=2.0**power) for power in range(-6, -1)]
    luck = {
        0: (5.0, 4.0, 4.5, 4.1, 4.6),
        1: (5.0, 4.4, 4.5, 4.1, 4.6),
        2: (5.0, 4.4, 4.5, 4.1, 4.6),
    }  # by seed, over the values

    def number(config):
        return curve.index(replace(config, seed=0))

    with Study.open(tmp_path / "study", {"kind": "x"}, "") as study:
        asked = []
        while missing := study.missing(more_seeds(study, curve, "lr", 3) if asked else curve):
            asked.append({number(config) for config in missing})
            for config in missing:
                study.add(config, summary(config, luck[config.seed][number(config)]))
        # The first seed's best is value 1; with three seeds it is value 3, which then gets its own, and its other neighbour.
        assert asked == [{0, 1, 2, 3, 4}, {0, 1, 2}, {3, 4}]
        seeds = more_seeds(study, curve, "lr", 3)
        assert {(number(config), config.seed) for config in seeds} == {(value, seed) for value in range(5) for seed in (1, 2)}
        assert settle(study, lambda study: seeds, EngineConfig(device="cpu")) == seeds  # nothing is missing: nothing is run


def test_further_seeds_do_not_depend_on_where_a_round_was_interrupted(tmp_path):
    curve = [replace(TINY, lr=2.0**power) for power in range(-6, -1)]
    with Study.open(tmp_path / "study", {"kind": "x"}, "") as study:
        for config, loss in zip(curve, (5.0, 4.0, 4.5, 4.1, 4.6), strict=True):
            study.add(config, summary(config, loss))
        whole = more_seeds(study, curve, "lr", 3)
        assert {config.lr for config in whole} == {2.0**-6, 2.0**-5, 2.0**-4}
        for config in whole[2:4]:  # of the best value, which is no longer the best by now
            study.add(config, summary(config, 5.0))
            assert more_seeds(study, curve, "lr", 3) == whole


def summary(config, loss):
    return Summary(
        id=config.id, status="finished", folder="", steps=config.steps, num_tokens=config.num_tokens, num_parameters=1,
        sparsity=config.sparsity or 0.0, train_loss=loss, valid_loss=loss, best_valid_loss=None, best_step=None, seconds=1.0,
        tokens_per_second=1.0, device="cpu", num_ranks=1, num_threads=1, versions={},
    )  # fmt: skip


def test_panels_share_a_legend_only_if_their_series_do(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))

    def panel(*labels):
        return Panel("", "x", "y", tuple(Line(label, (Point(1, 1), Point(2, 2)), 0.5) for label in labels))

    draw_png([panel("0", "0.5"), panel("0", "0.9"), panel("0", "0.9")], tmp_path / "x.png", "")
    legends = [axis.get_legend() for axis in drawn[0].axes]
    assert [legend and [text.get_text() for text in legend.get_texts()] for legend in legends] == [
        ["0", "0.5"],
        None,
        ["0", "0.9"],
    ]


def test_transfer_study_runs_from_end_to_end(tmp_path):
    config = TransferConfig(run=TINY, rules=("sp", "smupar"), widths=(64,), sparsities=(0.75,), values=(0.002, 0.008, 0.03))
    with Study.open(tmp_path / "study", {"kind": "transfer", **asdict(config)}, "smupar transfer") as study:
        execute(study, proposals(config), engine="stacked", device="cpu")
        found = str(write_report(study))
    assert found.splitlines()[0] == sentence(config, analyse(config, study.results()))
    assert "SmuPar" in found


def test_all_runs_diverged_is_said_with_the_remedy(tmp_path):
    wild = replace(TINY, optimizer="sgd", lr=1.0)
    config = TransferConfig(run=wild, rules=("sp",), widths=(64,), sparsities=(0.5,), values=(1e11, 1e12, 1e13))
    with Study.open(tmp_path / "study", {"kind": "x"}, "") as study:
        execute(study, proposals(config), engine="stacked", device="cpu")
        with pytest.raises(ValueError, match="all runs of sp on the proxy diverged: sweep smaller values"):
            analyse(config, study.results())


@pytest.mark.parametrize("bad", [{"rules": ()}, {"seeds": 0}, {"values": (0.1, 0.2)}, {"widths": ()}])
def test_bad_study_raises(bad):
    with pytest.raises(ValueError, match=r"empty|at least 1|three or more"):
        TransferConfig(run=TINY, **bad)


def test_tune_page_has_a_panel_for_each_hyperparameter(tmp_path):
    from smupar.study.config import TuneConfig
    from smupar.study.tune import define_search

    search = define_search(TuneConfig(run=replace(TINY, sparsity=0.0, steps=5), num_samples=3))
    with run_study(tmp_path / "study", search, "smupar tune", EngineConfig()) as (study, _):
        assert "Of 3 runs" in str(write_report(study))
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


# Ids, and with them the order of the runs, differ.
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_measured_updates_of_a_grown_study_are_judged_by_the_trace_of_its_best_proxy(seed, tmp_path, capsys):
    flags = ["--widths", "64", "--sparsities", "0.5", "--rules", "measured", "--seed", str(seed)]
    few, more = ("0.0001", "0.0002", "0.0004"), ("0.0001", "0.0002", "0.0004", "0.004")

    def transfer(out, values):
        main(["transfer", *TINY_FLAGS, *flags, "--values", *values, "--out", str(tmp_path / out)])
        return capsys.readouterr().out.splitlines()[:-1]

    transfer("grown", few)
    assert transfer("grown", more) == transfer("fresh", more)


def test_transfer_over_depth_has_a_shallow_proxy_and_deep_targets():
    config = TransferConfig(run=TINY, rules=("smupar",), widths=(64, 128), sparsities=(0.75,), depths=(2, 4)).normalised
    runs = proposals(config)
    assert {(run.model.width, run.model.depth, run.base_depth, run.sparsity) for run in runs} == {
        (TINY.base_width, 2, None, 0.0),  # the proxy has the id of a run without depth
        *((width, depth, base, 0.75) for width in (64, 128) for depth, base in ((2, None), (4, 2))),
    }
    deeper = TransferConfig(run=replace(TINY, base_depth=1), rules=("smupar",), widths=(64,), sparsities=(0.0,), depths=(2,))
    assert [(run.model.depth, run.base_depth) for run in proposals(deeper.normalised)[:: len(deeper.normalised.values)]] == [
        (1, None),
        (2, 1),
    ]


def test_transfer_over_depth_says_which_depth():
    values = (0.001, 0.002, 0.004)
    config = TransferConfig(run=TINY, rules=("smupar",), widths=(64,), sparsities=(0.75,), depths=(2, 4), values=values)
    shallow, deep = (2.5, 2.0, 3.0), (4.0, 3.0, 2.0)
    proxy = Curve("smupar", 32, 0.0, values, shallow, is_proxy=True, depth=2)
    targets = tuple(Curve("smupar", 64, 0.75, values, losses, depth=depth) for depth, losses in ((2, shallow), (4, deep)))
    verdicts = [Verdict("smupar", proxy, targets)]
    told = sentence(config.normalised, verdicts)
    assert told.startswith("From the dense proxy of width 32 and depth 2 the best learning rate moved")
    assert "at 0.75 sparsity and width 64, depth 4 the proxy's best swept learning rate costs SmuPar 50.0%" in told
    lines = [line.label for line in panels(config.normalised, verdicts)[0].lines]
    assert lines == ["proxy, width 32, depth 2", *(f"sparsity 0.75, depth {depth}" for depth in (2, 4))]


def test_transfer_to_depths_below_the_base_is_refused():
    with pytest.raises(ValueError, match=r"at least the base depth 2, got \(1, 4\): tune on a model that is not deeper"):
        TransferConfig(run=replace(TINY, model=replace(TINY.model, depth=4), base_depth=2), depths=(1, 4))
    with pytest.raises(ValueError, match="leave out --proxy-depth"):
        TransferConfig(run=TINY, depths=(2, 4), proxy_depth=2)
