"""Measured updates under DDP and FSDP2, on two gloo processes with different data.

A batch has 128 rows, as many as are looked at: one process sees all of them, each of two ranks its half.
"""

import functools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.data.batches import open_text
from smupar.lm.run.distributed import World
from smupar.lm.run.step import Stepper
from smupar.updates.observation import Observation
from smupar.updates.trace import Trace
from tests.support.loops import adamw
from tests.support.models import CLASSES, Conv1D
from tests.support.ranks import WORLD, built, full, on_two_ranks, share_of, wrapped
from tests.updates.measured import start

STEPS, WIDTH = 4, 15
HIDDEN = ["up.weight", "down.weight", "mix.weight"]
LAYOUTS = ["ddp", "fsdp"]


class Net(nn.Module):
    """Odd sizes, so that shards are uneven."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.mix = Conv1D(width, width)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = x + self.down(F.relu(self.up(x)))
        return self.last(F.relu(self.mix(x))).log_softmax(-1)  # FSDP2 warns of outputs that are views, as a layer's are


def batch(step, rank=None):
    """The whole batch, or a rank's half of it."""
    rng = torch.Generator().manual_seed(step)
    x, y = torch.randn(128, 6, generator=rng), torch.randint(CLASSES, (128,), generator=rng)
    return share_of(x, rank), share_of(y, rank)


def whole_weights(model):
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def made(layout, density=0.5, width=WIDTH):
    model, base = built(layout, Net, width, 5)
    settings = {"delta": Net(25)} if width == 5 else {}
    plan = smupar.parameterize(model, base=base, density=density, seed=3, reset=True, **settings)
    return model, plan, adamw(model, plan)


def train_net(forward, optimizer, rank=None, look=lambda: None):
    """What is seen after each step."""
    seen = []
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        F.nll_loss(forward(x), y).backward()
        optimizer.step()
        seen.append(look())
    return seen


def run(layout, rank=None, trace=None, same_data=False):
    """What is measured, inputs and weights around the first step, and all weights at the end."""
    model, plan, optimizer = made(layout)
    meter = start(model, plan, optimizer, trace)
    forward = wrapped(layout, model)
    before, inputs = whole_weights(model), {}
    for name in HIDDEN:
        module = model.get_submodule(name.removesuffix(".weight"))
        module.register_forward_pre_hook(functools.partial(keep, inputs, name))
    after, *_, end = train_net(forward, optimizer, 0 if same_data else rank, lambda: whole_weights(model))
    found = {
        "trace": meter.trace.to_json(),
        "factors": dict(meter.rates.measured),
        "updates": {name: after[name] - (1 - decay_of(plan, name)) * before[name] for name in HIDDEN},
        "inputs": inputs,
        "weights": end,
        "keys": list(model.state_dict()),
    }
    meter.remove()
    found["buffers"] = [name for name, _ in model.named_buffers()]
    return found


def keep(inputs, name, module, args):
    """Those of the first step."""
    inputs.setdefault(name, args[0].detach().clone())


def decay_of(plan, name):
    """Learning rate times decay stays what it is at the base."""
    return 0.01 * plan[name].lr_factor("adam") * 0.1 * plan[name].decay_factor("adam")


def observed(layout, rank=None):
    """The observation of four steps."""
    model, plan, optimizer = made(layout)
    with smupar.observe(model, plan, optimizer) as seen:
        train_net(wrapped(layout, model), optimizer, rank)
    return seen.to_json()


def proxy_trace():
    model, plan, optimizer = made("one process", density=1.0, width=5)
    with smupar.record_updates(model, plan, optimizer) as trace:
        train_net(model, optimizer)
    return trace


RUN = RunConfig(
    model=ModelConfig(width=64, depth=1, head_dim=32),
    base_width=32,
    sparsity=0.75,
    lr=2**-7,
    steps=7,
    batch_size=4,
    seq_len=32,
    mask_every=2,
)


@functools.cache
def text():
    return open_text(RUN)


def train(config, world):
    """Losses over all ranks, and what moves."""
    stepper = Stepper(config, Execution(device="cpu"), world, text())
    losses = [world.mean(stepper.step(step)).item() for step in range(config.steps)]
    state = stepper.state_dict()
    return {"losses": losses, "trace": state["updates"]["trace"], "moving": repr(state), "sparsity": stepper.sparsities}


def gpt_runs(trace_file):
    follows = replace(RUN, follow=trace_file)
    return {kind: replace(follows, dynamic=kind) for kind in ("rigl", "gmp")}


def work(rank, folder, trace):
    found = {}
    for layout in LAYOUTS:
        world = World(rank, WORLD, torch.device("cpu"), layout)
        found[layout] = {
            "record": run(layout, rank),
            "follow": run(layout, rank, trace),
            "same data": run(layout, rank, same_data=True),
            "observed": observed(layout, rank),
            **{f"gpt, {kind}": train(config, world) for kind, config in gpt_runs(f"{folder}/gpt.json").items()},
        }
    return found


@pytest.fixture(scope="module")
def trace():
    return proxy_trace()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the trace of a small GPT."""
    path = tmp_path_factory.mktemp("ranks")
    dense = replace(RUN, model=replace(RUN.model, width=32), sparsity=0.0, record=True)
    (path / "gpt.json").write_text(train(dense, World(0, 1, torch.device("cpu"), "ddp"))["trace"])
    return path


@pytest.fixture(scope="module")
def both(folder, trace):
    """What each rank found: one start of two processes for all."""
    return on_two_ranks(work, folder, str(folder), trace)


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request, both):
    return [found[request.param] for found in both]


@pytest.fixture(scope="module")
def one():
    return run("one process")


def effects(found):
    return Trace.from_json(found["trace"]).effects


def squares(x, update):
    """Sum of squares of the change of the output, and their number; update is (out, in)."""
    rows = x.double()[torch.arange(128) % len(x)]
    change = rows @ update.double().T
    return change.square().sum().item(), change.numel()


def as_out_in(name, update):
    return update.T if name == "mix.weight" else update


def test_ranks_agree_on_what_they_measured(ranks):
    for kind in ("record", "follow", "same data"):
        assert effects(ranks[0][kind]) == effects(ranks[1][kind])
        assert list(effects(ranks[0][kind])) == HIDDEN
        assert ranks[0][kind]["factors"] == ranks[1][kind]["factors"]


def test_effect_under_ddp_is_the_mean_square_over_the_inputs_of_both_ranks(both):
    seen = [found["ddp"]["record"] for found in both]
    assert not torch.equal(seen[0]["inputs"]["up.weight"], seen[1]["inputs"]["up.weight"])
    for name in HIDDEN:
        parts = [squares(record["inputs"][name], as_out_in(name, record["updates"][name])) for record in seen]
        expected = math.sqrt(sum(total for total, _ in parts) / sum(num for _, num in parts)) / 0.01
        assert effects(seen[0])[name][0] == pytest.approx(expected, rel=1e-4)


def test_effect_under_fsdp_is_that_of_every_rank_on_its_own_rows(both):
    seen = [found["fsdp"]["record"] for found in both]
    for name in HIDDEN:
        parts = []
        for rank, record in enumerate(seen):
            update = record["updates"][name]
            # Of (out, in) a rank has some outputs; of (in, out) it would have some inputs, so there the whole is looked at.
            own = update.T if name == "mix.weight" else update.chunk(WORLD)[rank]
            parts.append(squares(record["inputs"][name], own))
        expected = math.sqrt(sum(total for total, _ in parts) / sum(num for _, num in parts)) / 0.01
        assert effects(seen[0])[name][0] == pytest.approx(expected, rel=1e-4)


def test_ddp_records_the_trace_of_one_process_with_all_data(both, one):
    for name, values in effects(one).items():
        assert effects(both[0]["ddp"]["record"])[name] == pytest.approx(values, rel=1e-4)


def test_fsdp_records_the_trace_of_one_process_up_to_the_choice_of_tokens(both, one):
    for name, values in effects(one).items():
        assert effects(both[0]["fsdp"]["record"])[name] == pytest.approx(values, rel=0.2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_observe_what_one_process_with_all_data_does(both, layout):
    """Up to the choice of tokens and random signs, and under DDP of rows that a rank repeats."""
    alone, (first, second) = Observation.from_json(observed("one process")), (found[layout]["observed"] for found in both)
    assert first == second
    seen = Observation.from_json(first)
    assert seen.at == alone.at == [1, 2, 3, 4]
    for quantity, rows in alone.sizes.items():
        # The loss of a rank is the mean over half of the batch, so its gradients are twice as large.
        factor = 2 if quantity == "grad X" else 1
        for name, values in rows.items():
            expected = [factor * value for value in values]
            tolerance = 0.25 if quantity in ("Y", "grad X", "dY", "alignment") else 0.02
            assert seen.sizes[quantity][name] == pytest.approx(expected, rel=tolerance), (quantity, name)


def test_ranks_with_the_same_data_record_the_trace_of_one_process_with_it(ranks):
    """Then it does not matter which tokens are looked at."""
    alone = run("one process", rank=0)
    for name, values in effects(alone).items():
        assert effects(ranks[0]["same data"])[name] == pytest.approx(values, rel=1e-4)


def test_recording_does_not_change_a_run_of_two_ranks(ranks, one):
    for found in ranks:
        torch.testing.assert_close(found["record"]["weights"], one["weights"], rtol=1e-4, atol=1e-6)


def test_weights_of_ranks_that_follow_stay_equal(ranks):
    theirs = ranks[1]["follow"]["weights"]
    assert all(torch.equal(weight, theirs[name]) for name, weight in ranks[0]["follow"]["weights"].items())
    assert not torch.equal(ranks[0]["follow"]["weights"]["up.weight"], ranks[0]["record"]["weights"]["up.weight"])


def test_ranks_follow_as_one_process_with_all_data(both, trace):
    alone = run("one process", trace=trace)
    assert set(alone["factors"]) == set(HIDDEN)
    assert both[0]["ddp"]["follow"]["factors"] == pytest.approx(alone["factors"], rel=1e-4)
    torch.testing.assert_close(both[0]["ddp"]["follow"]["weights"], alone["weights"], rtol=1e-3, atol=1e-5)
    assert both[0]["fsdp"]["follow"]["factors"] == pytest.approx(alone["factors"], rel=0.2)


def test_inputs_are_never_saved_and_go_away(ranks):
    for found in ranks:
        assert not [name for name in found["record"]["keys"] if "smupar_input" in name]
        assert not [name for name in found["record"]["buffers"] if "smupar_input" in name]


@pytest.mark.parametrize("kind", ["rigl", "gmp"])
def test_trainer_on_two_ranks_measures_and_follows_as_on_one(both, folder, kind):
    alone = train(gpt_runs(str(folder / "gpt.json"))[kind], World(0, 1, torch.device("cpu"), "ddp"))
    for layout, tolerance, loss_tolerance in (("ddp", 1e-3, 1e-4), ("fsdp", 0.25, 0.02)):
        seen = [found[layout][f"gpt, {kind}"] for found in both]
        assert seen[0]["moving"] == seen[1]["moving"]
        assert seen[0]["sparsity"] == pytest.approx(alone["sparsity"], abs=1e-6)
        assert seen[0]["losses"] == pytest.approx(alone["losses"], rel=loss_tolerance)
        for name, values in effects(alone).items():
            assert effects(seen[0])[name] == pytest.approx(values, rel=tolerance), (layout, name)
