"""Damaged files of a study: what is wrong is said in one line, and nothing is lost in silence."""

import json
import shutil
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smupar.cli.main import main
from smupar.lm.run.folder import read_summary
from smupar.output.json_files import SEAL, DamagedFileError, write_sealed
from smupar.study.kinds.tune import FORMAT, doubts, read_hps
from smupar.study.report import definition_of, write_report
from smupar.study.store import Study
from tests.faults.damage import places, replaced
from tests.support.texts import words

RUN = ["--width", "32", "--depth", "1", "--head-dim", "16", "--base-width", "32", "--steps", "4", "--seq-len", "16"]
RUN += ["--batch-size", "2", "--valid-batches", "1", "--data", words()]
SWEEP = ["sweep", "lr=0.01,0.02,0.04", *RUN, "--device", "cpu", "--engine", "stacked"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "study"
    main([*SWEEP, "--out", str(folder)])
    return Study(folder)


@pytest.fixture
def study(sweep, tmp_path):
    shutil.copytree(sweep.folder, tmp_path / "study")
    return Study(tmp_path / "study")


def run_id(study, lr):
    return next(result.config.id for result in study.results() if result.config.lr == lr)


# Runs


def change_digit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def unsealed(path):
    """A file as versions without seals wrote it."""
    values = json.loads(path.read_text())
    values.pop(SEAL, None)
    path.write_text(json.dumps(values, indent=1))
    return values


DAMAGES = {
    "config of another run": lambda run: (
        unsealed(run / "config.json"),
        change_digit(run / "config.json", '"lr": 0.02', '"lr": 0.03'),
    ),
    "summary of another run": lambda run: (
        unsealed(run / "summary.json"),
        change_digit(run / "summary.json", f'"id": "{run.name}"', '"id": "0123456789"'),
    ),
    "changed digit of a summary": lambda run: (
        write_sealed(run / "summary.json", unsealed(run / "summary.json")),
        change_digit(run / "summary.json", '"train_loss": 4.', '"train_loss": 3.'),
    ),
    "changed digit of a summary without a seal": lambda run: (
        unsealed(run / "summary.json"),
        change_digit(run / "summary.json", '"train_loss": 4.', '"train_loss": 3.'),
    ),
    "summary without a field": lambda run: (
        unsealed(run / "summary.json"),
        change_digit(run / "summary.json", '"num_parameters"', '"num_weights"'),
    ),
    "empty summary": lambda run: (run / "summary.json").write_text(""),
    "summary that is a list": lambda run: (run / "summary.json").write_text("[]"),
    "cut config": lambda run: (run / "config.json").write_text((run / "config.json").read_text()[:100]),
    "no config": lambda run: (run / "config.json").unlink(),
}


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_run_is_left_out_aloud_and_run_again(study, sweep, damage, capsys):
    damaged = run_id(study, 0.02)
    DAMAGES[damage](study.runs / damaged)
    main(["report", str(study.folder)])
    said = capsys.readouterr()
    assert f"smupar: note: run {damaged} is left out, and the study's command runs it again: {study.runs}" in said.err
    page = (study.folder / "report.html").read_text()
    assert "Not finished: 2 of 3 runs are done" in said.out
    for text in (said.out, page):
        assert f"Left out, because their files are damaged: {damaged};" in text
        assert "Of 2 runs, 0 diverged" in text
    assert len((study.folder / "table.csv").read_text().splitlines()) == 1 + 2

    main([*SWEEP, "--out", str(study.folder)])
    said = capsys.readouterr()
    assert "3 runs, 2 of them done" in said.err
    assert "Of 3 runs, 0 diverged" in said.out
    assert "Left out" not in said.out
    for name in ("table.csv", "table.json"):
        assert (study.folder / name).read_bytes() == (sweep.folder / name).read_bytes()
    assert (study.folder / "damaged" / damaged).is_dir()


@pytest.mark.filterwarnings("default::UserWarning")
def test_run_whose_summary_is_lost_is_named(study, sweep, capsys):
    lost = run_id(study, 0.02)
    (study.runs / lost / "summary.json").unlink()
    main(["report", str(study.folder)])
    said = capsys.readouterr()
    assert said.err.count(f"run {lost} is left out, and the study's command runs it again: {study.runs / lost}") == 1
    assert "Not finished: 2 of 3 runs are done" in said.out
    main([*SWEEP, "--out", str(study.folder)])
    assert (study.folder / "table.csv").read_bytes() == (sweep.folder / "table.csv").read_bytes()


@pytest.mark.filterwarnings("default::UserWarning")
def test_lost_record_of_stacks_is_said(study, capsys):
    """The run that is left would be trained in a stack of another size."""
    shutil.rmtree(study.stacks)
    shutil.rmtree(study.runs / run_id(study, 0.02))
    main([*SWEEP, "--out", str(study.folder)])
    assert f"{study.stacks} does not say in which stacks 2 runs were trained" in capsys.readouterr().err


def test_results_from_published_rows_are_in_no_stack(study, capsys):
    """Such results have no folder."""
    shutil.rmtree(study.stacks)
    shutil.rmtree(study.runs / run_id(study, 0.02))
    for path in study.runs.glob("*/summary.json"):
        replace(read_summary(path.parent), folder="").write(path.parent, None)
    main([*SWEEP, "--out", str(study.folder)])
    assert "does not say in which stacks" not in capsys.readouterr().err


# Files of the study


TEXTS = {
    "empty": "",
    "cut": '{"format": "smupar-study/1", "version"',
    "list": "[1, 2]",
    "nested": "[" * 100_000,
    "number": "1" * 5000,
    "no field": "{}",
}


@pytest.mark.parametrize("name", ["study.json", "data.json"])
@pytest.mark.parametrize("damage", [*TEXTS, "latin-1", "a folder"])
def test_damaged_file_of_a_study_is_told_in_one_line(study, name, damage, capsys):
    path = study.folder / name
    if damage == "a folder":
        path.unlink()
        path.mkdir()
    elif damage == "latin-1":
        path.write_bytes('{"größe": 1}'.encode("latin-1"))
    else:
        path.write_text(TEXTS[damage])
    if (name, damage) == ("data.json", "no field"):
        return  # nothing is recorded, as before the first run
    commands = [[*SWEEP, "--out", str(study.folder)]] + ([["report", str(study.folder)]] if name == "study.json" else [])
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        [line] = capsys.readouterr().err.strip().splitlines()
        assert line.startswith(f"smupar: {path} ")
        assert line.endswith("restore it from a copy, or choose another --out")


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"definition": None},
        {"definition": []},
        {"command": 3},
        {"more": 1},
        {"definition": {"kind": "sweep", "axes": 3, "run": {}}},
        {"definition": {"kind": "sweep", "axes": {"lr": 0.1}, "run": {}}},
        {"definition": {"kind": "sweep", "axes": {"lr": ["fast"]}, "run": None}},
        {"definition": {"kind": "transfer", "run": {}, "values": 3}},
        {"definition": {"kind": "mine", "axes": {"speed": [1, 2]}}},
        {"definition": {"kind": ["sweep"], "axes": {"lr": [{}]}, "run": {"model": {}, "betas": []}}},
    ],
)
def test_study_json_of_other_types_is_told_in_one_line(study, change, capsys):
    path = study.folder / "study.json"
    path.write_text(json.dumps(study.describe() | change))
    for command in (["report", str(study.folder)], [*SWEEP, "--out", str(study.folder)]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        [line] = capsys.readouterr().err.strip().splitlines()
        assert str(study.folder) in line


def test_changed_digit_of_study_json_is_noticed(study):
    change_digit(study.folder / "study.json", "   0.04", "   0.05")
    with pytest.raises(DamagedFileError, match="its content does not match its checksum"):
        write_report(study)


# Fuzz

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=8
)
FUZZED = settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def damaged(draw, values):
    """Values of which one is replaced by anything; or other bytes."""
    if draw(st.booleans()):
        path = draw(st.sampled_from(list(places(values))))
        return json.dumps(replaced(values, path, draw(VALUES))).encode()
    text = json.dumps(values).encode()
    cut = draw(st.integers(0, len(text)))
    return text[:cut] + draw(st.binary(max_size=8)) + text[cut + draw(st.integers(0, 8)) :]


def refused_or_read(read):
    """Reads. An error must be one for users, in one line."""
    try:
        read()
    except (ValueError, OSError) as error:
        told = str(error)
    else:
        return None
    assert "\n" not in told
    return told


@pytest.mark.filterwarnings("ignore::UserWarning")
@given(st.data())
@FUZZED
def test_any_study_json_is_read_or_refused(sweep, data):
    path = sweep.folder / "study.json"
    before = path.read_bytes()
    described = sweep.describe()
    try:
        path.write_bytes(data.draw(damaged(described)))
        told = refused_or_read(lambda: reported(Study(sweep.folder)))
        assert told is None or str(path) in told
        refused_or_read(lambda: opened(sweep.folder, described))
    finally:
        path.write_bytes(before)


def reported(study):
    """What a report reads, without its pictures."""
    definition = definition_of(study)
    for propose in definition.stages:
        study.missing(propose(study))
    definition.read(study)


def opened(folder, described):
    with Study.open(folder, described["definition"], described["command"]):
        pass


@given(st.data())
@FUZZED
def test_any_data_json_is_read_or_refused(sweep, data):
    path = sweep.folder / "data.json"
    before = path.read_bytes()
    values = json.loads(before)
    try:
        path.write_bytes(data.draw(damaged(values)))
        told = refused_or_read(lambda: sweep.files([result.config for result in sweep.results()]))
        assert told is None or str(path) in told
    finally:
        path.write_bytes(before)


BEST = {
    "format": FORMAT,
    **{"lr": 0.01, "init_std": 0.1, "alpha_input": 9, "alpha_output": 1.0, "base_width": 64},
    "source": {"rule": "smupar", "optimizer": "adamw", "width": 64},
    "sensitivity": {"lr": {"explained": 0.5, "low": 0.1, "high": 0.2}},
}


@given(damaged(BEST))
@FUZZED
def test_any_best_json_is_read_or_refused(tmp_path, content):
    path = tmp_path / "best.json"
    path.write_bytes(content)
    for read in (read_hps, lambda path: doubts(path, optimizer="adamw", rule="smupar")):
        told = refused_or_read(lambda read=read: read(path))
        assert told is None or str(path) in told
