"""Traces: through files, in pictures, between steps, for other lengths and depths, and those in doubt."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import smupar
from smupar.updates.meter import UpdatesWarning
from smupar.updates.trace import Trace, TraceReader, same_moment
from tests.support.loops import adamw, optimizers_of, weights_of
from tests.updates.measured import Attending, Net, assert_untouched, make, ready, recorded, started, train


def test_trace_goes_through_a_file_and_back_exactly(proxy, tmp_path):
    proxy.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == proxy
    assert Trace.from_json(proxy.to_json()).to_json() == proxy.to_json()
    assert json.loads(proxy.to_json())["format"] == "smupar-trace/1"


def test_trace_of_a_run_that_diverged_is_plain_json(tmp_path):
    wild = Trace(2, [0, 1], {"a.weight": [1.0, math.inf], "b.weight": [math.nan, 2.0]}, {}, "adamw")
    wild.save(tmp_path / "trace.json")
    assert "NaN" not in (tmp_path / "trace.json").read_text()
    back = Trace.load(tmp_path / "trace.json")
    assert back.diverged
    assert back.effects["b.weight"][1] == 2.0
    assert math.isnan(back.effects["b.weight"][0])
    assert not Trace(1, [0], {"a.weight": [1.0]}).diverged


DAMAGED = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a list": lambda text: "[1, 2]",
    "a number": lambda text: "3",
    "another format": lambda text: text.replace("smupar-trace/1", "smupar-trace/9"),
    "no format": lambda text: json.dumps({"num_steps": 3}),
    "a field more": lambda text: text[:-1] + ', "speed": 1}',
    "no shapes": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "shapes"}),
    "effects of another kind": lambda text: json.dumps({**json.loads(text), "effects": [1.0]}),
    "fewer effects than steps": lambda text: json.dumps({**json.loads(text), "effects": {"blocks.0.weight": [1.0]}}),
    "effects that are text": lambda text: json.dumps({**json.loads(text), "effects": {"blocks.0.weight": ["1"] * 24}}),
    "negative effects": lambda text: json.dumps({**json.loads(text), "effects": {"blocks.0.weight": [-1.0] * 24}}),
    "no steps": lambda text: json.dumps({**json.loads(text), "num_steps": 0}),
    "fewer steps than none": lambda text: json.dumps({**json.loads(text), "num_steps": -5}),
    "steps out of order": lambda text: json.dumps({**json.loads(text), "at": [1, 0, *json.loads(text)["at"][2:]]}),
    "nested too deeply": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_file_that_is_no_trace_is_refused_by_name(proxy, tmp_path, damage):
    file = tmp_path / "trace.json"
    file.write_text(DAMAGED[damage](proxy.to_json()))
    with pytest.raises(ValueError, match=r"trace\.json is .*: record one with record_updates$"):
        Trace.load(file)
    file.write_bytes(b"\xff\xfe\x00\x80")  # and one that is not text
    with pytest.raises(ValueError, match=r"trace\.json"):
        Trace.load(file)


def test_trace_is_followed_from_its_file(proxy, tmp_path):
    proxy.save(tmp_path / "trace.json")
    factors = []
    for trace in (proxy, str(tmp_path / "trace.json"), tmp_path / "trace.json"):
        model, _, optimizer, follower = started(trace)
        train(model, optimizer, range(2))
        factors.append(dict(follower.rates.measured))
    assert factors[0] == factors[1] == factors[2]


@pytest.mark.parametrize("beside", [True, False])
def test_trace_is_drawn_with_and_without_a_proxy(proxy, tmp_path, beside):
    longer = Trace(3, [0, 1, 2], {"blocks.0.weight": [1.0, 2.0, 3.0], "head.weight": [1.0, math.nan, 2.0]})
    longer.plot(tmp_path / "picture.png", proxy=proxy if beside else None)
    picture = (tmp_path / "picture.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_trace_is_read_between_steps_along_the_logarithm():
    trace = Trace(40, [0, 10, 20], {"a.weight": [1.0, 100.0, 4.0]})
    found = [trace.effect("a.weight", at) for at in (0, 5, 10, 15, 20, 39)]
    assert found == pytest.approx([1, 10, 100, 20, 4, 4])
    assert Trace(40, [3, 10], {"a.weight": [7.0, 100.0]}).effect("a.weight", 0) == 7.0


def test_longer_run_reads_first_steps_by_number_and_the_last_from_the_last():
    trace = Trace(20, [0, 10], {"a.weight": [1.0, 100.0]})
    reader = TraceReader(trace, ["a.weight"], 40)
    # Step 10 of 40 is step 8 of 20: 1 / 8 = 1 / 10 + 1 / 20 - 1 / 40.
    assert [reader.effect("a.weight", at) for at in (0, 10, 20, 40)] == pytest.approx([1, 100**0.8, 100, 100])
    shorter = TraceReader(trace, ["a.weight"], 10)  # 3 / 20 = 1 / 5 + 1 / 20 - 1 / 10
    assert [shorter.effect("a.weight", at) for at in (0, 5, 10)] == pytest.approx([1, 100 ** (2 / 3), 100])
    assert TraceReader(trace, ["a.weight"]).effect("a.weight", 5) == pytest.approx(10)


@pytest.mark.parametrize("lengths", [(1000, 250), (250, 1000), (300, 300)])
def test_moments_of_runs_of_other_lengths(lengths):
    own, other = lengths
    moments = [same_moment(step, own, other) for step in range(own + 1)]
    assert moments[:2] == pytest.approx([0, 1], rel=4e-3)
    assert moments[-1] == pytest.approx(other)
    assert moments == sorted(moments)
    assert [same_moment(step, own, other) for step in (own + 1, 100 * own)] == pytest.approx([other, other])
    assert [same_moment(round(there), other, own) for there in (1, other)] == pytest.approx([1, own], rel=4e-3)  # and back


def test_trace_of_twenty_steps_is_followed_for_forty():
    trace = recorded(20)
    model, plan, optimizer = ready()
    follower = smupar.follow_updates(model, plan, optimizer, trace=trace, steps=40)
    train(model, optimizer, range(40))
    name, mean = "blocks.1.weight", None
    for number in follower.trace.at:
        wanted = trace.effect(name, number / (1 + number / 40))  # 1 / there = 1 / number + 1 / 20 - 1 / 40
        mean = wanted if mean is None else 0.8 * mean + 0.2 * wanted
    assert follower.trace.num_steps == 40
    assert follower.state_dict()["averages"][name][0] == pytest.approx(mean, rel=1e-9)


def guide_of(num_own, num_theirs, at=0):
    """Effects 1, 10, 100, ... in the layers of the proxy, as each layer of the target reads them."""
    trace = Trace(1, [0], {f"blocks.{number}.up.weight": [10.0**number] for number in range(num_theirs)})
    names = [f"blocks.{number}.up.weight" for number in range(num_own)]
    reader = TraceReader(trace, names)
    return [reader.effect(name, at) for name in names]


@pytest.mark.parametrize(
    ("num_own", "num_theirs", "expected"),
    [
        (2, 2, [1, 10]),
        (4, 2, [1, 10 ** (1 / 3), 10 ** (2 / 3), 10]),
        (3, 2, [1, 10**0.5, 10]),
        (2, 3, [1, 100]),
        (3, 4, [1, 10**1.5, 1000]),
        (3, 1, [1, 1, 1]),
        (1, 3, [1]),
        (1, 1, [1]),
    ],
)
def test_other_depth_reads_the_trace_at_the_same_share_of_the_depth(num_own, num_theirs, expected):
    assert guide_of(num_own, num_theirs) == pytest.approx(expected)


def test_every_kind_of_layer_is_read_from_its_own():
    effects = {"blocks.0.up.weight": [1.0], "blocks.0.down.weight": [5.0], "blocks.1.up.weight": [4.0]}
    effects["blocks.1.down.weight"] = [20.0]
    names = [f"blocks.{number}.{kind}.weight" for kind in ("up", "down") for number in range(3)]
    reader = TraceReader(Trace(1, [0], effects), names)
    assert [reader.effect(name, 0) for name in names] == pytest.approx([1, 2, 4, 5, 10, 20])


@pytest.mark.parametrize("depth", [1, 4])
def test_model_of_another_depth_follows(depth):
    trace = recorded(6)
    model, _, optimizer, follower = started(trace, depth=depth)
    train(model, optimizer, range(3))
    assert len(follower.rates.measured) == depth
    first = [trace.effects["blocks.0.weight"][number] for number in range(3)]
    mean = first[0]
    for value in first[1:]:
        mean = 0.8 * mean + 0.2 * value
    assert follower.state_dict()["averages"]["blocks.0.weight"][0] == pytest.approx(mean)


def test_absurd_trace_warns_once_and_is_held(proxy):
    for factor, held in ((1e9, 1e4), (1e-9, 1e-4)):
        effects = {name: [value * factor for value in values] for name, values in proxy.effects.items()}
        model, plan = make()
        optimizer = adamw(model, plan, weight_decay=0.0, lr=1e-6)
        follower = smupar.follow_updates(model, plan, optimizer, trace=replace(proxy, effects=effects))
        with pytest.warns(UpdatesWarning, match=rf"would be .*, and is held at {held:g}") as caught:
            train(model, optimizer, range(3))
        assert len(caught) == 1
        assert set(follower.rates.measured.values()) == {held}


def test_trace_of_a_run_that_diverged_warns_and_is_followed_where_it_can_be(proxy):
    effects = {name: [*values[:2], *[math.nan] * (len(values) - 2)] for name, values in proxy.effects.items()}
    model, plan, optimizer = ready()
    with pytest.warns(UpdatesWarning, match="diverged: record a trace at a smaller learning rate"):
        follower = smupar.follow_updates(model, plan, optimizer, trace=replace(proxy, effects=effects))
    train(model, optimizer, range(2))
    factors = dict(follower.rates.measured)
    train(model, optimizer, range(2, 5))
    assert follower.rates.measured == factors
    assert all(weight.isfinite().all() for weight in weights_of(model).values())


def test_target_that_diverges_keeps_its_last_factor_and_says_so_in_its_trace(proxy):
    model, _, optimizer, follower = started(proxy)
    train(model, optimizer, range(2))
    factors = dict(follower.rates.measured)
    with torch.no_grad():
        model.first.weight.fill_(math.nan)
    train(model, optimizer, [2])
    assert follower.rates.measured == factors
    assert follower.trace.diverged


def test_trace_of_another_optimizer_warns(proxy):
    model, plan = make()
    optimizers = optimizers_of("sgd", model, plan)
    with pytest.warns(UpdatesWarning, match="recorded with adamw, but this is sgd"):
        smupar.follow_updates(model, plan, optimizers, trace=proxy)


@pytest.mark.parametrize("doubt", ["optimizer", "diverged", "blind"])
def test_warning_raised_as_an_error_leaves_the_model_alone(proxy, doubt):
    model, plan, optimizer = ready(Attending if doubt == "blind" else Net)
    trace = replace(proxy, optimizer="lion") if doubt == "optimizer" else proxy
    if doubt == "diverged":
        trace = replace(proxy, effects={name: [math.nan] * len(values) for name, values in proxy.effects.items()})
    measure = smupar.record_updates if doubt == "blind" else partial(smupar.follow_updates, trace=trace)
    with pytest.raises(UpdatesWarning):  # warnings are errors here
        measure(model, plan, optimizer)
    assert_untouched(model)


def test_warnings_point_at_the_line_of_the_caller(proxy):
    model, plan = make(Attending)
    with pytest.warns(UpdatesWarning) as caught:
        smupar.record_updates(model, plan, adamw(model, plan, weight_decay=0.0))
    model, plan = make()
    bad = replace(proxy, effects={name: [math.nan] * len(values) for name, values in proxy.effects.items()}, optimizer="lion")
    with pytest.warns(UpdatesWarning) as more:
        smupar.follow_updates(model, plan, adamw(model, plan, weight_decay=0.0), trace=bad)
    assert [Path(warning.filename).name for warning in (*caught, *more)] == [Path(__file__).name] * 3
