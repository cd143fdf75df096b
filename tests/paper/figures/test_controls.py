"""Controls for measured updates: what is run, in which order, and a claim that can fail."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from smupar.paper.figures import controls
from smupar.paper.figures.controls import CONSTANT, MEASURED, SMUPAR
from smupar.paper.reproduce import reproduce
from smupar.paper.settings import Scale
from smupar.study.config import EngineConfig
from smupar.study.kinds.sweep import sweep_from_json
from smupar.study.store import Study
from smupar.updates.trace import Trace
from tests.paper.rows import finished

CPU, SMALL = Scale("cpu"), Scale("small", "data/text", 8192)
OPTIMUM = {MEASURED: 0, SMUPAR: -2, CONSTANT: 1, "trust": 2, "rms": 3, "spectral": 1, "function": 0}


def kind(run):
    """What a run follows, from the name of its trace."""
    return controls._kind(replace(run, follow=run.follow and run.follow.replace("measured-", "proxy-")))


def loss_of(run, floors):
    name, factor = kind(run), math.log2(run.lr / run.rest_lr)
    return floors.get(name, 4.0) + 0.02 * (factor - OPTIMUM.get(name, 0)) ** 2 + 0.001 * run.seed


def rows(floors=None, scale=CPU):
    runs = [run for run in controls.expected(scale) if run.rest_lr is not None]
    named = [replace(run, follow=run.follow and run.follow.replace("measured-", "proxy-")) for run in runs]
    return [finished(run, loss_of(run, floors or {})) for run in named]


def test_runs_differ_from_the_proxy_in_their_hidden_weights_alone():
    targets = [run for run in controls.expected(SMALL) if run.rest_lr is not None]
    assert {run.rest_lr for run in targets} == {controls.proxies(SMALL)[3].lr}
    assert {run.weight_decay for run in targets} == {0.1}
    assert Counter(run.dynamic for run in targets if kind(run) == CONSTANT) == {"rigl": 20, "none": 20, "gmp": 20}
    assert {kind(run) for run in targets} >= {*OPTIMUM, "flat", "shuffled", "other-text", "held-out tokens"}


def test_claim_holds_where_measured_updates_are_ahead_untuned():
    behind = dict.fromkeys((SMUPAR, CONSTANT, "trust", "rms", "spectral", "function", "flat", "shuffled"), 4.2)
    claim = controls.claim(rows(behind))
    assert claim.holds, claim.text
    assert "measured updates are best at factor 1 (factor 1 costs 0.00%" in claim.text


@pytest.mark.parametrize("better", [CONSTANT, "trust", "function"])
def test_claim_fails_where_a_control_is_as_good(better):
    behind = dict.fromkeys({SMUPAR, CONSTANT, "trust", "rms", "spectral", "function", "flat"} - {better}, 4.2)
    claim = controls.claim(rows(behind))
    assert claim.holds is False
    (part,) = [part for part in claim.parts if part.holds is False]
    assert f"ahead of {better} (" in part.text


def test_claim_fails_where_another_factor_is_better():
    def worse_at_1(row):
        is_it = kind(row.config) == MEASURED and row.config.lr == row.config.rest_lr
        return replace(row, summary=replace(row.summary, train_loss=4.3)) if is_it else row

    shifted = [worse_at_1(row) for row in rows()]
    assert any("1 costs" in part.text and part.holds is False for part in controls.claim(shifted).parts)


def test_pictures_have_a_panel_for_each_place():
    (panel,) = controls.draw(rows())
    assert panel.title == "RigL, density 1/16"
    assert {line.label for line in panel.lines} == set(OPTIMUM)


def test_proxies_alone_tell_nothing_and_draw_nothing(tmp_path):
    definition = sweep_from_json({"kind": "reproduce", "scale": "cpu", "data": "stdlib"}).stored
    with Study.open(tmp_path / "cpu" / "study", definition, "smupar reproduce --scale cpu") as study:
        trace = Trace(60, [0, 30], {"blocks.0.mlp.up.weight": [2.0, 8.0]})
        for run in controls.proxies(CPU):
            study.add(run, finished(run, 4.0).summary, (), trace)
    done = reproduce("controls", CPU, EngineConfig(device="cpu"), out=str(tmp_path), so_far=True)
    assert done.claim.holds is None
    assert done.missing == 16
    assert not (done.folder / "picture.png").exists()


def test_parts_come_one_after_the_other_and_a_sweep_goes_on_at_its_end(tmp_path):
    """A study with results in place of training: every run has the loss of its kind, with the optimum of SmuPar far away."""
    definition = {"kind": "reproduce", "scale": "cpu", "data": "stdlib"}
    with Study.open(tmp_path / "study", definition, "smupar reproduce") as study:
        trace = Trace(60, [0, 30], {"blocks.0.mlp.up.weight": [2.0, 8.0], "blocks.0.mlp.down.weight": [1.0, 4.0]})

        def finish(runs):
            for run in study.missing(runs):
                proxy = run.rest_lr is None
                loss = 4 + abs(math.log2(run.lr) + 6) if proxy else loss_of(run, {SMUPAR: 4.1})
                study.add(run, finished(run, loss).summary, (), trace if run.record else None)

        finish(controls.proxies(CPU))
        rounds = []
        while study.missing(asked := controls.then(CPU, study)):
            rounds.append([kind(run) for run in study.missing(asked)])
            finish(asked)
        assert set(rounds[0]) == {MEASURED, CONSTANT, SMUPAR}
        assert all(run.rest_lr in (None, 2**-6) for run in asked)
        followed = {kind(run): Trace.load(run.follow).effects for run in asked if run.follow}
        assert followed[MEASURED] == followed["every 25 steps"] == trace.effects
        assert [value for values in followed[CONSTANT].values() for value in values] == pytest.approx([8**0.5] * 4)
        assert followed["flat"]["blocks.0.mlp.up.weight"] == pytest.approx([4.0, 4.0])
        assert followed["shuffled"]["blocks.0.mlp.up.weight"] == [1.0, 4.0]
        factors = {math.log2(run.lr / run.rest_lr) for run in asked if run.rest_lr and kind(run) == "rms"}
        assert factors == {-1, 0, 1, 2, 3, 4}
        assert {run.seed for run in asked if kind(run) == SMUPAR and run.lr == run.rest_lr / 4} == {0, 1}
        assert len(rounds) >= 5
