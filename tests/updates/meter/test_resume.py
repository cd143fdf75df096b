"""Runs whose updates are measured stop and go on, bit for bit."""

import copy
import json
from dataclasses import replace

import pytest

import smupar
from tests.support.loops import assert_same_tensors, optimizers_of, weights_of
from tests.updates.measured import make, start, train


def start_run(name, proxy, follows):
    """Everything that has a state, freshly made."""
    model, plan = make(density=1.0 if name == "GMP" else 0.5)
    kind = "muon" if name == "Muon" else "adamw"
    optimizers = optimizers_of(kind.partition("+")[0], model, plan)
    meter = start(model, plan, optimizers, replace(proxy, optimizer=kind) if follows else None)
    sparsifier = None
    if name == "RigL":
        sparsifier = smupar.RigL(model, plan, optimizers, every=3, stop=20)
    if name == "GMP":
        sparsifier = smupar.GMP(model, plan, optimizers, density=0.25, every=3, stop=11)
    return model, optimizers, meter, sparsifier


def go_on(run, steps):
    model, optimizers, _, sparsifier = run
    for number in steps:
        train(model, optimizers, [number])
        if sparsifier is not None:
            sparsifier.step()


@pytest.mark.parametrize("stop", [1, 3, 4, 22, 25])
@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("name", ["plain", "Muon", "RigL", "GMP"])
def test_stopped_run_goes_on_bit_for_bit(proxy, name, follows, stop):
    whole = start_run(name, proxy, follows)
    go_on(whole, range(stop))
    meter = json.loads(json.dumps(whole[2].state_dict()))
    parts = copy.deepcopy([whole[0].state_dict(), [optim.state_dict() for optim in whole[1]]])
    moving = copy.deepcopy(whole[3].state_dict()) if whole[3] else None
    go_on(whole, range(stop, 28))

    again = start_run(name, proxy, follows)
    again[0].load_state_dict(parts[0])
    for optim, state in zip(again[1], parts[1], strict=True):
        optim.load_state_dict(state)
    again[2].load_state_dict(meter)
    if moving:
        again[3].load_state_dict(moving)
    go_on(again, range(stop, 28))
    assert_same_tensors(weights_of(again[0]), weights_of(whole[0]))
    assert again[2].trace == whole[2].trace
    assert again[2].rates.measured == whole[2].rates.measured
    assert again[2].rates.corrections == whole[2].rates.corrections
    assert bool(again[2].rates.measured) == follows
    assert again[2].trace.num_steps == 28


def test_handed_out_trace_goes_on_when_recording_does():
    whole = start_run("plain", None, False)
    go_on(whole, range(2))
    state = whole[2].state_dict()
    again = start_run("plain", None, False)
    with again[2] as trace:
        again[2].load_state_dict(state)
        go_on(again, range(2))
    assert trace.at == [0, 1, 2, 3]
    assert trace is again[2].trace


@pytest.mark.parametrize("follows", [True, False])
def test_state_dict_stays_as_it_was_while_the_run_goes_on(proxy, follows):
    run = start_run("plain", proxy, follows)
    go_on(run, range(3))
    state = run[2].state_dict()
    before = json.dumps(state)
    go_on(run, range(3, 5))
    run[2].remove()
    assert json.dumps(state) == before


def test_loading_an_earlier_state_takes_later_factors_away(proxy):
    run = start_run("plain", proxy, True)
    start_state = json.dumps(run[2].state_dict())
    go_on(run, range(3))
    run[2].load_state_dict(json.loads(start_state))
    assert run[2].rates.measured == {}
    assert run[2].state_dict()["averages"] == {}
    assert run[2].trace.at == []


def test_run_that_stopped_before_a_step_without_a_learning_rate_goes_on_bit_for_bit(proxy):
    def lr(run, share):
        for group in run[1][0].param_groups:
            group["lr"] = share * 0.01 * group["lr_factor"]

    runs = [start_run("plain", proxy, True) for _ in range(2)]
    go_on(runs[0], range(3))
    states = copy.deepcopy([part.state_dict() for part in (runs[0][0], runs[0][1][0], runs[0][2])])
    for part, state in zip((runs[1][0], runs[1][1][0], runs[1][2]), states, strict=True):
        part.load_state_dict(state)
    for run in runs:
        lr(run, 0.0)
        go_on(run, [3])
        lr(run, 1.0)
        go_on(run, [4])
    assert runs[0][2].trace == runs[1][2].trace
    assert runs[0][2].rates.measured == runs[1][2].rates.measured
