"""What record_updates and follow_updates refuse, leaving the model alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import smupar
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.model.gpt import build
from smupar.model.seam import optimizers
from smupar.updates.trace import Trace, TraceReader
from tests.support.loops import adamw
from tests.support.wiring import wiring
from tests.updates.measured import Net, ready, start, train
from tests.updates.meter.test_factor import SCHEDULERS


def scheduled(made):
    def spoil(model, plan, optimizer):
        SCHEDULERS[made](optimizer)
        return model, optimizer

    return spoil


def compiled(model, plan, optimizer):
    model.blocks[1].compile(backend="eager")
    return model, optimizer


SPOILED = {
    "a scheduler made before": (
        scheduled("LambdaLR"),
        r"this optimizer already has a scheduler.* make the scheduler afterwards",
    ),
    "another scheduler made before": (
        scheduled("CosineAnnealingLR"),
        r"this optimizer already has a scheduler.* make the scheduler afterwards",
    ),
    "a model without a plan": (
        lambda model, plan, optimizer: (Net(32), optimizer),
        r"this model is not parameterized: call smupar\.parameterize first",
    ),
    "an optimizer of plain groups": (
        lambda model, plan, optimizer: (model, torch.optim.AdamW(model.parameters())),
        r"with 'blocks\.0\.weight' was not made by smupar\.param_groups",
    ),
    "no optimizer": (lambda model, plan, optimizer: (model, []), "no optimizer was given"),
    "no hidden weight": (
        lambda model, plan, optimizer: (model, adamw(model, plan, only="rest")),
        "no hidden weight can be measured",
    ),
    "a compiled module": (compiled, r"'blocks\.1' is compiled already and would ignore new hooks: compile afterwards"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED)
def test_what_cannot_be_measured_is_refused(proxy, spoil, message, follows):
    model, plan, optimizer = ready()
    model, optimizer = spoil(model, plan, optimizer)
    before = wiring(model, *optimizers(optimizer))
    with pytest.raises(ValueError, match=message):
        start(model, plan, optimizer, proxy if follows else None)
    assert wiring(model, *optimizers(optimizer)) == before


TRACES = {
    "no steps": (lambda proxy: Trace(), "the trace has no measured step: record it over a whole run"),
    "another architecture": (
        lambda proxy: replace(proxy, effects={f"encoder.{name}": values for name, values in proxy.effects.items()}),
        r"it has no layer like 'blocks\.0\.weight' \(it has encoder",
    ),
    "no file": (lambda proxy: Path("missing.json"), r"missing\.json cannot be read \(No such file.*record_updates"),
}


@pytest.mark.parametrize(("trace", "message"), TRACES.values(), ids=TRACES)
def test_trace_that_does_not_fit_is_refused(proxy, trace, message):
    model, plan, optimizer = ready()
    before = wiring(model, optimizer)
    with pytest.raises(ValueError, match=message):
        smupar.follow_updates(model, plan, optimizer, trace=trace(proxy))
    assert wiring(model, optimizer) == before
    train(model, optimizer, range(2))


def test_trace_that_misses_some_layers_is_refused():
    effects = {"blocks.0.up.weight": [1.0], "blocks.0.down.weight": [1.0], "blocks.1.up.weight": [1.0]}
    names = [*effects, "blocks.1.down.weight"]
    with pytest.raises(ValueError, match=r"the trace misses layers: it has 1 like 'blocks\.\*\.down\.weight'"):
        TraceReader(Trace(1, [0], effects), names)


def test_trace_of_a_shallower_proxy_is_refused_under_depth_mup():
    run = RunConfig(model=ModelConfig(width=64, depth=2), base_width=32, base_depth=1, sparsity=0.5, depth_rule="depth-mup")
    names = [f"blocks.0.{layer}.weight" for layer in ("attention.qkv", "attention.out", "mlp.gate", "mlp.up", "mlp.down")]
    trace = Trace(1, [0], {name: [1.0] for name in names}, dict.fromkeys(names, (32, 32)), optimizer="adamw")
    model, plan = build(run)
    with pytest.raises(ValueError, match=r"the model has 10 layers in lists that are deeper than the base's: under depth-muP"):
        smupar.follow_updates(model, plan, adamw(model, plan), trace=trace)
    model, plan = build(replace(run, depth_rule="completep"))
    smupar.follow_updates(model, plan, adamw(model, plan), trace=trace)
