"""Runs that stop and go on, bit for bit."""

import io

import pytest
import torch

import smupar
from tests.dynamic.moving import SIZES, moving, train
from tests.support.loops import assert_same_tensors, state_of

RUNS = {
    "RigL": {"every": 5, "stop": 20},
    "SET": {"every": 5, "stop": 20},
    "RigL, restarted": {"every": 3, "stop": 20, "restart_bias_correction": True},
    "GMP": {"density": 0.25, "every": 5, "stop": 12},
    "GMP, fixed": {"density": 0.25, "every": 5, "stop": 12, "correction": "fixed"},
    "GMP, global": {"start_from": 0.5, "density": smupar.erk(0.25), "every": 5, "stop": 12, "pool": "global"},
    "IMP": {"density": 0.25, "rounds": 2, "every": 5, "rewind": 2},
}


def start_run(name, **settings):
    return moving(name.partition(",")[0], plan_settings={"seed": 3, **settings}, **RUNS[name])


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_resumes(name, stop, steps=13, **settings):
    """As if it had never stopped after ``stop`` steps."""
    model, optimizer, sparsifier = start_run(name, **settings)
    train(model, optimizer, sparsifier, range(stop))
    saved = through_a_file([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()])
    moved = train(model, optimizer, sparsifier, range(stop, steps))

    again, other, fresh = start_run(name, **settings)
    for part, state in zip((again, other, fresh), saved, strict=True):
        part.load_state_dict(state)
    assert train(again, other, fresh, range(stop, steps)) == moved
    assert_same_tensors(again.state_dict(), model.state_dict())
    for key in SIZES:
        assert_same_tensors(state_of(other, again.get_parameter(key)), state_of(optimizer, model.get_parameter(key)))
    assert fresh.num_steps == sparsifier.num_steps == steps
    assert fresh.densities == sparsifier.densities


# Updates are after 5 and 10 steps (3, 6, 9, 12 with restarts; GMP's last at 12): right before, right after, in between.
@pytest.mark.parametrize("stop", [1, 4, 5, 6, 9, 10])
@pytest.mark.parametrize("name", RUNS)
def test_stopped_run_goes_on_bit_for_bit(name, stop):
    assert_resumes(name, stop)


@pytest.mark.parametrize("settings", [{"base_density": smupar.erk(0.5)}, {"pattern": "bernoulli"}])
@pytest.mark.parametrize("stop", [1, 6])
def test_stopped_gmp_goes_on_with_its_learning_rates(stop, settings):
    assert_resumes("GMP, global", stop, **settings)


def test_state_dict_holds_no_masks_of_its_own():
    _, _, sparsifier = start_run("RigL")
    assert sparsifier.state_dict() == {"num_steps": 0, "born": {}}
