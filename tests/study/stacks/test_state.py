"""Studies that were interrupted end with the numbers, to the bit, of a study that was not."""

import json
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.run.train import train
from smupar.study.engines import execute, run_group
from smupar.study.progress import StudyProgress
from smupar.study.stacks.division import recorded_divisions, remove_leftovers
from smupar.study.store import Study
from smupar.study.verify import verify
from tests.faults.damage import flip_at
from tests.support.studies import ends_of
from tests.support.texts import words

CPU = torch.device("cpu")
RUN = RunConfig(
    model=ModelConfig(width=32, depth=1, head_dim=16),
    base_width=32,
    sparsity=0.75,
    steps=60,
    batch_size=2,
    seq_len=16,
    valid_batches=1,
    mask_every=8,
    data=words(),
)


class StoppedProgress(StudyProgress):
    """Sends a signal, or raises an error, when so many steps of all runs have been shown."""

    def __init__(self, configs, after, how):
        super().__init__(configs)
        self.left, self.how = after, how

    def steps(self, num, running):
        super().steps(num, running)
        self.left -= num
        if self.left <= 0 and self.how:
            how, self.how = self.how, None
            if isinstance(how, Exception):
                raise how
            os.kill(os.getpid(), how)


def open_study(folder):
    return Study.open(folder, {"kind": "sweep", "axes": {}}, "smupar sweep")


def run_whole(folder, configs, engine="stacked"):
    with open_study(folder) as study:
        execute(study, configs, engine=engine, device="cpu")
    return ends_of(study)


def interrupt(folder, configs, *, after, how=signal.SIGTERM, engine="stacked"):
    with suppress(SystemExit, KeyboardInterrupt, ConnectionError), open_study(folder) as study:
        run_group(study, configs, engine, CPU, StoppedProgress(configs, after, how))
    return Study(folder)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proxy")
    train(replace(RUN, sparsity=0.0, steps=40, record=True), Execution(out=str(folder), device="cpu", peak_tflops=1))
    return str(folder / "trace.json")


def mixed(trace):
    """Runs that differ in everything that a stack may mix, and whose state is largest."""
    run = replace(RUN, steps=100)  # whose rows are means of two steps
    moving = [replace(run, dynamic=dynamic) for dynamic in ("none", "rigl", "set", "gmp")]
    return [*moving, replace(run, follow=trace), replace(run, dynamic="gmp", correction="fixed", seed=1, follow=trace)]


CASES = {
    "everything that a stack mixes": mixed,
    "recorded updates": lambda trace: [replace(RUN, record=True, lr=lr) for lr in (0.01, 0.02)],
    "rounds": lambda trace: [replace(RUN, dynamic="imp", rounds=2, steps=60, lr=lr) for lr in (0.01, 0.02)],
    "clipping, muon": lambda trace: [replace(RUN, clip=0.5, optimizer="muon", lr=lr) for lr in (0.01, 0.02)],
    "a first run that diverges": lambda trace: [replace(RUN, optimizer="sgd", lr=lr) for lr in (1e12, 0.01)],
    "all diverge while masks move": lambda trace: [replace(RUN, optimizer="sgd", dynamic="gmp", lr=lr) for lr in (1e12, 1e13)],
}


@pytest.fixture
def look_often(monkeypatch):
    """Makes a loop look at its losses after each step, as it does where steps are slow."""
    return lambda: monkeypatch.setattr("smupar.lm.run.loop.LONGEST_LOOK", 0.0)


@pytest.mark.parametrize("case", CASES)
def test_stack_stopped_by_a_signal_goes_on_to_the_same_bits(tmp_path, trace, case, look_often):
    configs = CASES[case](trace)
    whole = run_whole(tmp_path / "whole", configs)
    assert len(whole) == len(configs)
    look_often()
    study = interrupt(tmp_path / "study", configs, after=30 * len(configs))
    assert steps_of_states(study) == [31]
    assert ends_of(study) == {}
    interrupt(tmp_path / "study", configs, after=(47 - 31) * len(configs), how=signal.SIGINT)
    assert run_whole(tmp_path / "study", configs) == whole
    assert not list(study.stacks.glob("*/"))


@pytest.mark.parametrize("rates", [(0.01, 0.02), (0.01, 1e12)], ids=["both end", "one diverges"])
def test_stack_stopped_in_its_validation_has_the_same_rows(tmp_path, rates):
    configs = [replace(RUN, optimizer="sgd", lr=lr) for lr in rates]
    whole = run_whole(tmp_path / "whole", configs)
    study = interrupt(tmp_path / "study", configs, after=60 * 2)  # shown before the validation
    assert steps_of_states(study) == [60]
    assert run_whole(tmp_path / "study", configs) == whole


def test_verify_reads_the_states_of_stacks(tmp_path, look_often):
    look_often()
    study = interrupt(tmp_path / "study", [replace(RUN, lr=lr) for lr in (0.01, 0.02)], after=30 * 2)
    assert verify(study.folder).wrong == []
    [tensors], [record] = study.stacks.glob("*/step-*"), study.stacks.glob("*.json")
    for file in (tensors, tensors.with_name("state.json"), record):
        content = file.read_bytes()
        file.write_bytes(content[:-2] + b"\x91?")
        [wrong] = [line for line in verify(study.folder).wrong if file.name in line]
        assert "is damaged" in wrong
        file.write_bytes(content)
    record.unlink()
    assert [line for line in verify(study.folder).wrong if "that no file in" in line]


def steps_of_states(study):
    return [json.loads(path.read_text())["step"] for path in study.stacks.glob("*/state.json")]


RATES = [replace(RUN, lr=2.0**power) for power in (-8, -7, -6, -5, -4)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A study of five runs in stacks of three and two."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("smupar.study.stacks.size.MOST_STACKED", 3)
        folder = tmp_path_factory.mktemp("whole") / "study"
        run_whole(folder, RATES)
    return Study(folder)


def copy_of(study, folder):
    shutil.copytree(study.folder, folder)
    return Study(folder)


@pytest.mark.parametrize("num_left", [1, 2, 4])
def test_runs_that_are_left_are_run_as_they_would_have_been(tmp_path, whole, num_left):
    study = copy_of(whole, tmp_path / "study")
    for config in RATES[-num_left:]:
        shutil.rmtree(study.runs / config.id)
    assert run_whole(study.folder, RATES) == ends_of(whole)


def test_stack_that_is_refilled_goes_on_after_a_crash(tmp_path, whole, look_often, monkeypatch):
    monkeypatch.setattr("smupar.study.stacks.size.MOST_STACKED", 3)
    monkeypatch.setattr("smupar.study.stacks.training.SAVE_SECONDS", 0.0)  # saved after each step
    look_often()
    study = interrupt(tmp_path / "study", RATES, after=60 * 3 + 40 * 2, how=ConnectionError())
    assert len(ends_of(study)) == 3
    assert steps_of_states(study) == [39]  # of the second stack
    assert run_whole(study.folder, RATES) == ends_of(whole)


def test_study_that_grows_leaves_what_was_begun_in_its_stacks(tmp_path, whole, monkeypatch):
    monkeypatch.setattr("smupar.study.stacks.size.MOST_STACKED", 3)
    study = interrupt(tmp_path / "study", RATES, after=60 * 3 + 50 * 2)
    grown = [replace(RUN, lr=2.0**-9), *RATES]
    ends = run_whole(study.folder, grown)
    assert {run: ends[run] for run in ends_of(whole)} == ends_of(whole)
    sizes = [(len(division.runs), division.size) for division in recorded_divisions(study, [config.id for config in grown])]
    assert sorted(sizes) == [(1, 1), (5, 3)]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A study of two runs, which was stopped after 51 steps."""
    return interrupt(tmp_path_factory.mktemp("interrupted") / "study", RATES[:2], after=50 * 2)


@pytest.fixture(scope="module")
def stacked(tmp_path_factory):
    """What these two runs leave if they are stacked."""
    return run_whole(tmp_path_factory.mktemp("stacked") / "study", RATES[:2])


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """What these two runs leave if they are run one after the other."""
    return run_whole(tmp_path_factory.mktemp("serial") / "study", RATES[:2], "serial")


def test_engine_auto_goes_on_as_was_begun_whatever_is_faster(tmp_path, interrupted, stacked, serial):
    assert run_whole(copy_of(interrupted, tmp_path / "stacked").folder, RATES[:2], "auto") == stacked
    interrupt(tmp_path / "serial", RATES[:2], after=50, engine="serial")
    assert run_whole(tmp_path / "serial", RATES[:2], "auto") == serial
    assert stacked != serial  # by rounding


def test_another_engine_begins_again_and_says_so(tmp_path, interrupted, serial):
    study = copy_of(interrupted, tmp_path / "study")
    with pytest.warns(UserWarning, match="were begun in stacks of 2 .* and --engine serial trains them differently"):
        assert run_whole(study.folder, RATES[:2], "serial") == serial
    assert not list(study.stacks.glob("*/"))


def test_stacks_that_were_begun_elsewhere_say_so(tmp_path, interrupted, stacked):
    study = copy_of(interrupted, tmp_path / "study")
    [record] = study.stacks.glob("*.json")
    [division] = recorded_divisions(study, [RATES[0].id])
    record.unlink()
    replace(division, device="another machine").write(study)
    with pytest.warns(
        UserWarning, match="on another machine: they continue in the same way on .*, and results may differ in the last"
    ):
        assert run_whole(study.folder, RATES[:2]) == stacked


def test_runs_that_nobody_asks_for_any_more_leave_the_others_as_they_are(tmp_path, interrupted, stacked):
    study = copy_of(interrupted, tmp_path / "study")
    ends = run_whole(study.folder, RATES[1:2])
    assert ends == {RATES[1].id: stacked[RATES[1].id]}


# Damaged files


def flip_a_byte(path):
    flip_at(path, path.stat().st_size // 2)


def drop_a_tensor(path):
    tensors = load_file(path)
    del tensors["stack.alive"]
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("files", "damage"),
    [
        ("*/state.json", flip_a_byte),
        ("*/state.json", lambda path: path.write_text("")),
        ("*/state.json", lambda path: path.write_text("[" * 100_000)),
        ("*/state.json", lambda path: path.write_text("[1, 2]")),
        ("*/step-*", flip_a_byte),
        ("*/step-*", drop_a_tensor),
        ("*/step-*", lambda path: path.write_bytes(path.read_bytes()[:1000])),
        ("*/step-*", lambda path: path.unlink()),
    ],
)
def test_damaged_state_is_named_and_its_runs_begin_again(tmp_path, interrupted, stacked, files, damage):
    study = copy_of(interrupted, tmp_path / "study")
    [path] = study.stacks.glob(files)
    damage(path)
    with pytest.warns(UserWarning, match=f"{path.parent}.*: the 2 runs of this stack begin again$"):
        assert run_whole(study.folder, RATES[:2]) == stacked


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"runs": [], "size": 3, "own_batches": false, "device": ""}'])
def test_damaged_record_of_stacks_is_named_and_made_again(tmp_path, whole, text):
    study = copy_of(whole, tmp_path / "study")
    [record] = study.stacks.glob("*.json")
    record.write_text(text)
    shutil.rmtree(study.runs / RATES[0].id)
    named = pytest.warns(UserWarning, match=f"{record.name} is damaged.*are put into new stacks$")
    with named, pytest.warns(UserWarning, match=f"does not say in which stacks {len(RATES) - 1} runs were trained"):
        ends = run_whole(study.folder, RATES)
    assert ends.keys() == ends_of(whole).keys()


def test_state_of_a_stack_that_has_ended_is_removed(tmp_path, whole):
    study = copy_of(whole, tmp_path / "study")
    [division] = recorded_divisions(study, [RATES[0].id])
    shutil.rmtree(study.runs / RATES[4].id)
    for number in range(2):  # as a process leaves them that was killed before it removed them
        division.state_folder(study, number).mkdir()
    remove_leftovers(study)
    assert list(study.stacks.glob("*/")) == [division.state_folder(study, 1)]
