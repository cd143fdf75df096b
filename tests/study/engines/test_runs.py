"""Engines give the same results, however they train the runs of a study."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from smupar.lm.config.run_config import Execution, ModelConfig
from smupar.lm.run.train import train
from smupar.study.axes import grid
from smupar.study.engines import groups, run_group
from smupar.study.progress import StudyProgress
from smupar.study.stacks.size import largest_stack
from smupar.study.store import Study
from tests.study.tiny import AXES, TINY, run


@pytest.mark.parametrize("engine", ["stacked", "auto"])
def test_engines_give_the_same_results(serial, tmp_path, engine):
    configs = list(grid(TINY, AXES))
    ours = run(tmp_path / "study", engine, configs).results(configs)
    for mine, theirs in zip(ours, serial.results(configs), strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert mine.summary.valid_loss == pytest.approx(theirs.summary.valid_loss, rel=1e-4)
        assert mine.summary.sparsity == theirs.summary.sparsity


def test_group_that_is_split_may_mix_seeds(serial, tmp_path, monkeypatch):
    monkeypatch.setattr("smupar.study.stacks.size.MOST_STACKED", 3)
    configs = list(grid(TINY, AXES))
    ours = run(tmp_path / "study", "stacked", configs).results(configs)
    assert [result.loss for result in ours] == pytest.approx([result.loss for result in serial.results(configs)], rel=1e-4)


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
    monkeypatch.setattr("smupar.lm.run.loop.LONGEST_LOOK", float("inf"))  # steps alone decide
    seen = []

    class Watched(StudyProgress):
        def steps(self, num, running):
            seen.append(num)

    runs = [replace(TINY, steps=120, lr=lr) for lr in (0.01, 0.02)]
    with Study.open(tmp_path / "study", {"kind": "x"}, "") as study:
        run_group(study, runs, "stacked", torch.device("cpu"), Watched(runs))
    assert seen == [100, 100, 40, 0]
