"""``observe`` measures what it says, changes nothing, and goes on where it was."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.output.json_files import DamagedFileError
from smupar.updates.observation import ALIGNMENT, DECAY, DY, ENTROPY, GRAD_X, MOVED, TOP, WEIGHTS, Observation, Y
from tests.support.loops import adamw, assert_same_tensors, loss_of, make_step, weights_of
from tests.support.models import on_meta
from tests.updates.measured import Attending, assert_untouched, batch, make, ready, rms, train

NAME = "blocks.0.weight"
LOOKS = [1, 2, 3, 4, 6, 8, 11, 16]


def observed(steps=4, **settings):
    model, plan = make(**settings)
    optimizer = adamw(model, plan)
    with smupar.observe(model, plan, optimizer) as seen:
        train(model, optimizer, range(steps))
    return model, seen


def test_looks_are_at_powers_of_the_root_of_two_and_at_the_last_step():
    model, plan, optimizer = ready()
    with smupar.observe(model, plan, optimizer, steps=19) as seen:
        train(model, optimizer, range(19))
    assert seen.at == [*LOOKS[:-1], 15, 16, 19]
    assert seen.num_steps == 19
    assert observed(19)[1].at == LOOKS


def test_sizes_are_those_of_products_seen_from_outside():
    model, plan = make(density=0.25)
    optimizer = adamw(model, plan, weight_decay=0.0)
    layer, kept = model.blocks[0], {}
    layer.register_forward_hook(lambda module, args, output: kept.update(x=args[0].detach(), y=output) or output.retain_grad())
    before = weights_of(model)
    with smupar.observe(model, plan, optimizer) as seen:
        make_step(model, optimizer, batch(0, 128))
    change = layer.weight.detach() - before[NAME]
    look = {quantity: rows[NAME][0] for quantity, rows in seen.sizes.items() if NAME in rows}
    assert look[Y] == pytest.approx(rms(kept["x"] @ before[NAME].T), rel=1e-5)
    assert look[GRAD_X] == pytest.approx(rms(kept["y"].grad @ before[NAME]), rel=1e-5)
    assert look[DY] == pytest.approx(rms(kept["x"] @ change.T), rel=1e-5)
    random = (kept["x"].square() @ change.square().T).mean().sqrt().item()  # its mean over all signs
    assert look[ALIGNMENT] == pytest.approx(look[DY] / random, rel=0.05)
    kept_weights = before[NAME][before[NAME] != 0]
    assert look[WEIGHTS] == pytest.approx(rms(kept_weights), rel=1e-5)
    largest = torch.linalg.matrix_norm(before[NAME], 2).item()
    assert 0.9 * largest < look[TOP] <= largest * 1.00001


def test_power_iterations_reach_the_top_singular_value():
    model, seen = observed(16)
    assert seen.sizes[TOP][NAME][-1] == pytest.approx(torch.linalg.matrix_norm(model.blocks[0].weight, 2).item(), rel=0.02)


def test_alignment_is_one_for_random_updates_and_root_n_where_all_inputs_agree():
    class Fixed(torch.optim.SGD):
        change = None

        def step(self, closure=None):
            with torch.no_grad():
                self.param_groups[1]["params"][0].add_(self.change)

    found = {}
    for kind in ("random", "agreeing"):
        model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4))
        plan = smupar.parameterize(model, base=nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)))
        groups = smupar.param_groups(model, plan, lr=0.1, optimizer="sgd")
        optimizer = Fixed(sorted(groups, key=lambda group: group["params"][0] is model[1].weight), lr=0.1)
        optimizer.param_groups[1:] = [optimizer.param_groups[-1]]
        x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
        Fixed.change = torch.randn(64, 64) if kind == "random" else torch.ones(64, 64)
        nn.init.zeros_(model[0].weight)
        nn.init.ones_(model[0].bias)  # all inputs of the hidden layer are 1
        with smupar.observe(model, plan, optimizer) as seen:
            model(x).square().mean().backward()
            optimizer.step()
        found[kind] = seen.sizes[ALIGNMENT]["1.weight"][0]
    assert found["random"] == pytest.approx(1, rel=0.2)
    assert found["agreeing"] == pytest.approx(8, rel=0.1)


def test_decay_is_recorded_and_kept_out_of_updates():
    found = []
    for decay in (0.0, 10.0):
        model, plan = make()
        optimizer = adamw(model, plan, weight_decay=decay)
        with smupar.observe(model, plan, optimizer) as seen:
            train(model, optimizer, [0])
        found.append(seen.sizes)
    assert found[1][DY][NAME] == pytest.approx(found[0][DY][NAME], rel=1e-4)
    assert (found[0][DECAY][NAME], found[1][DECAY][NAME]) == ([0.0], [pytest.approx(0.1)])


def test_training_has_the_same_bits_with_and_without():
    model, _ = observed(6)
    plain, plan = make()
    train(plain, adamw(plain, plan), range(6))
    assert_same_tensors(weights_of(model), weights_of(plain))
    assert_untouched(model)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["csr", "rigl", "recorded too", "checkpointed"])
def test_observed_however_it_is_trained(kind):
    settings = {"saves": True} if kind == "checkpointed" else {}
    model, plan = make(density=0.25, **settings)
    if kind == "csr":
        smupar.sparsify_storage(model, plan, backend="csr")
    optimizer = adamw(model, plan)
    if kind == "recorded too":
        recorder = smupar.record_updates(model, plan, optimizer)
    observer = smupar.observe(model, plan, optimizer)
    sparsifier = smupar.RigL(model, plan, optimizer, every=2, stop=9) if kind == "rigl" else None
    for number in range(4):
        train(model, optimizer, [number])
        if sparsifier:
            sparsifier.step()
    seen, (_, plain) = observer.observation, observed(4, density=0.25)
    if kind == "rigl":
        assert seen.sizes[MOVED][NAME] == [0, 0, 1, 0]  # it moves after step 2, and after step 4
    else:
        assert seen.sizes[MOVED][NAME] == [0, 0, 0, 0]
        for quantity, rows in plain.sizes.items():
            assert seen.sizes[quantity][NAME] == pytest.approx(rows[NAME], rel=1e-3), quantity
    if kind == "recorded too":
        effects = [value * 0.01 for value in recorder.trace.effects[NAME]]
        assert seen.sizes[DY][NAME] == pytest.approx(effects, rel=1e-4)


def test_accumulation_looks_at_the_last_micro_batch():
    model, plan, optimizer = ready()
    with smupar.observe(model, plan, optimizer) as seen:
        for part in (batch(0), batch(1)):
            loss_of(model, part).backward()
        optimizer.step()
    alone, plan, optimizer = ready()
    with smupar.observe(alone, plan, optimizer) as expected:
        make_step(alone, optimizer, batch(1))
    for quantity in (Y, GRAD_X):
        assert seen.sizes[quantity][NAME] == pytest.approx(expected.sizes[quantity][NAME], rel=1e-5)


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_observation_goes_on_after_a_stop(stop):
    (whole, seen) = observed(16)
    model, plan = make()
    optimizer = adamw(model, plan)
    observer = smupar.observe(model, plan, optimizer)
    train(model, optimizer, range(stop))
    state = json.loads(json.dumps(observer.state_dict()))
    observer.remove()
    again = smupar.observe(model, plan, optimizer)
    with again as handed_out:
        again.load_state_dict(state)
        train(model, optimizer, range(stop, 16))
    assert_same_tensors(weights_of(model), weights_of(whole))
    assert handed_out.at == seen.at
    for quantity, rows in seen.sizes.items():  # the vector of the power iterations starts again
        assert handed_out.sizes[quantity][NAME] == pytest.approx(rows[NAME], rel=0.05 if quantity == TOP else 1e-6), quantity
    assert again.observation is handed_out


def test_attention_entropy_is_that_of_the_weights():
    class Attends(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.mix, self.last = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 5)

        def forward(self, x):
            x = self.first(x)
            heads = self.mix(x).unflatten(-1, (2, -1)).transpose(1, 2)
            self.weights = (heads @ heads.mT / math.sqrt(heads.shape[-1])).softmax(-1).detach()
            y = F.scaled_dot_product_attention(heads, heads, heads)
            return self.last(y.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = Attends(32)
    plan = smupar.parameterize(model, base=on_meta(Attends, 16), roles={"mix.weight": "hidden"})
    optimizer = adamw(model, plan)
    with smupar.observe(model, plan, optimizer) as seen:
        model(torch.randn(3, 9, 6)).square().mean().backward()
        optimizer.step()
    expected = torch.special.entr(model.weights[:1].double()).sum(-1).mean().item()
    rows = seen.sizes[ENTROPY]
    assert rows == {"attention 0": [pytest.approx(expected, rel=1e-4)], "attention 1": [pytest.approx(expected, rel=1e-4)]}


def test_kappa_follows_from_the_alignment_by_algebra():
    n, kappa = 64.0, 10.0
    aligned = math.sqrt((n + kappa) / (1 + kappa))
    seen = Observation(
        3, [1, 2, 3], {ALIGNMENT: {"a": [aligned] * 3, "b": [1.0] * 3, "c": [8.0] * 3}}, {"a": n, "b": n, "c": n}
    )
    assert seen.kappa() == pytest.approx(kappa)  # the median of 0, 10 and "none agrees"
    assert replace(seen, sizes={ALIGNMENT: {"c": [8.0] * 3}}).kappa() == 0
    with pytest.raises(ValueError, match="no alignment was measured"):
        Observation().kappa()


def test_layers_that_cannot_be_seen_are_named():
    model, plan = make(Attending, 1.0)
    optimizer = adamw(model, plan)
    with pytest.warns(smupar.UpdatesWarning, match="hidden weights are not observed"):
        observer = smupar.observe(model, plan, optimizer)
    with observer as seen:
        train(model, optimizer, [0])
    assert seen.unmeasured
    assert "not measured: " in str(seen)


def test_layer_outside_the_autograd_graph_has_no_gradient_and_is_named():
    model, plan, optimizer = ready()
    with smupar.observe(model, plan, optimizer) as seen:
        x, y = batch(0)
        F.cross_entropy(model(x), y).backward()
        with torch.enable_grad():
            model(x)  # a second pass, of which no gradient comes
        optimizer.step()
    assert seen.unseen[GRAD_X] == ["blocks.0.weight", "blocks.1.weight"]
    assert "grad X was not seen in blocks.0.weight" in str(seen)


def test_sizes_of_a_diverged_run_are_not_finite():
    model, plan, optimizer = ready()
    with smupar.observe(model, plan, optimizer) as seen:
        train(model, optimizer, range(2))
        nn.init.constant_(model.blocks[0].weight, math.nan)
        nn.init.constant_(model.blocks[1].weight, math.nan)
        train(model, optimizer, range(2, 4))
    assert [math.isfinite(size) for size in seen.sizes[Y][NAME]] == [True, True, False, False]


def test_file_is_read_again_and_damage_is_noticed(tmp_path):
    _, seen = observed(3)
    seen.save(tmp_path / "observed.json")
    assert str(Observation.load(tmp_path / "observed.json")) == str(seen)
    text = (tmp_path / "observed.json").read_text()
    (tmp_path / "observed.json").write_text(text.replace('"at": [1, 2, 3]', '"at": [1, 2, 4]'))
    with pytest.raises(DamagedFileError):
        Observation.load(tmp_path / "observed.json")
    with pytest.raises(DamagedFileError, match="steps must increase"):
        Observation.from_json(seen.to_json().replace('"at": [1, 2, 3]', '"at": [1, 2]'))


def test_second_observer_is_refused():
    model, plan, optimizer = ready()
    smupar.observe(model, plan, optimizer)
    with pytest.raises(ValueError, match="model is observed already"):
        smupar.observe(model, plan, optimizer)
