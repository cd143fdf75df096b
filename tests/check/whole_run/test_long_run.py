"""Real runs, to the end."""

import math

import pytest
import torch

import smupar
from smupar.check.whole_run.report import RunReport
from smupar.cli.main import main
from smupar.lm.config.commands import CheckConfig
from tests.check.coordinates.test_depth import ENDS, net
from tests.check.coordinates.test_depth import loss_of as depth_loss
from tests.check.grid import Fork, batches_of, token_batches
from tests.support.loops import loss_of


def check(steps=24, **settings):
    given = {"base_width": 16, "widths": [32], "densities": [1, 1 / 2], "lr": 2**-7, "seeds": 1, "horizon": steps}
    return smupar.coord_check(Fork, loss_of, batches_of(steps), **{**given, "progress": False, **settings})


def test_runs_are_observed_to_the_end():
    found = check(weight_decay=0.1)
    assert isinstance(found, RunReport)
    assert {seen.num_steps for seen in found.observations.values()} == {24}
    assert {seen.at[-1] for seen in found.observations.values()} == {24}
    assert {drift.axis for drift in found.drifts} == {"density"}
    assert found.ok


def test_moving_masks_are_seen():
    def moving(model, plan, optimizers):
        return smupar.RigL(model, plan, optimizers, every=2, stop=24)

    assert "masks move" in [diagnosis.cause for diagnosis in check(sparsifier=moving).diagnoses]
    assert "masks move" not in [diagnosis.cause for diagnosis in check().diagnoses]


def test_run_that_diverges_fails_and_is_named():
    found = check(optimizer=lambda model, plan: Exploding(smupar.param_groups(model, plan, lr=2**-7)), lr=None)
    assert not found.ok
    assert "likely cause: training diverged" in found.explain()


class Exploding(torch.optim.AdamW):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        super().step(closure)
        if self.steps == 9:
            for group in self.param_groups:
                for parameter in group["params"]:
                    torch.nn.init.constant_(parameter, math.nan)


def test_fewer_batches_than_the_horizon_are_refused():
    with pytest.raises(ValueError, match="batches ran out: 30 steps need as many batches, but there are 24"):
        check(24, horizon=30)


def test_steps_beside_a_horizon_are_refused():
    with pytest.raises(ValueError, match="steps and horizon are both numbers of steps: pass one of them"):
        smupar.coord_check(Fork, loss_of, batches_of(24), base_width=16, widths=[32], steps=24, horizon=24)
    with pytest.raises(ValueError, match="--steps and --whole-run are both numbers of steps: pass one of them"):
        CheckConfig(steps=24, whole_run=24)


def test_sparsifier_without_a_horizon_is_refused():
    with pytest.raises(ValueError, match="sparsifier= is for a check over a whole run: pass horizon= too"):
        check(horizon=None, sparsifier=smupar.RigL)


def test_command_trains_a_whole_run_and_writes_its_files(tmp_path, capsys):
    torch.manual_seed(0)
    options = "--widths 64 --base-width 32 --sparsities 0 0.5 --seeds 1 --rules smupar --whole-run 12 --weight-decay 0.1"
    main(["check", *options.split(), "--depth", "1", "--out", str(tmp_path)])
    assert "PASS SmuPar over 12 steps of 2 runs" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} >= {"check.json", "check.html", "check.png"}


def deep(**settings):
    """A check over depth, of models whose branches CompleteP divides."""
    batches = token_batches(24, shape=(2, 8))
    given = {"base_width": 16, "widths": [32], "depths": [2, 8], "lr": 2**-7, "weight_decay": 0.1, "seeds": 2, "horizon": 24}
    return smupar.coord_check(net, depth_loss, batches, progress=False, **{"branches": ENDS, **given, **settings})


def test_whole_runs_are_compared_over_depth_at_the_same_places():
    found = deep()
    assert found.ok, found.explain()
    assert {drift.axis for drift in found.drifts} == {"depth"}
    assert {reading.place for reading in found.readings if reading.depth == 8} == {
        f"blocks.{number}.{layer}" for number in (0, 1) for layer in ("mix.0", "mix.2", "up", "down")
    }
    # A factor that was forgotten or counted twice makes slopes of gradients 1 or -1, in the layer that ends a branch or inside.
    slopes = {drift.kind: drift.slopes[1] for drift in found.drifts if drift.quantity == "grad X"}
    assert max(map(abs, slopes.values())) < 0.35, slopes
