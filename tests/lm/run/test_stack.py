"""Stacks of runs that move and are measured, against the same runs one by one."""

import functools
import json
from dataclasses import fields, replace

import pytest
import torch

from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.data.batches import open_text
from smupar.lm.run.stack import STACKABLE_FIELDS, GPTStack, fastest_attention, hyperparameters, stack_key
from smupar.model.attached import mask_of
from tests.lm.run.bags import BAG, BASE, DEEP, DEEP_BAG
from tests.lm.run.runs import CPU, stepper_of

STACKED = RunConfig(
    model=ModelConfig(width=64, depth=2, head_dim=32),
    base_width=32,
    sparsity=0.75,
    lr=2**-7,
    steps=40,
    seq_len=32,
    batch_size=4,
    mask_every=8,
    valid_batches=1,
)


def losses_one_by_one(steps, num=None):
    return torch.tensor([steps.step(number).item() for number in range(num or steps.config.steps)])


@pytest.fixture(scope="module")
def library():
    """The text of Python's standard library."""
    return open_text(STACKED)


@pytest.fixture(scope="module")
def traces(library, tmp_path_factory):
    """File of the trace of the dense model of base width, by optimizer."""
    folder = tmp_path_factory.mktemp("traces")

    @functools.cache
    def file(**fields):
        config = replace(STACKED, model=replace(STACKED.model, width=32), sparsity=0.0, record=True, **fields)
        stepper = stepper_of(config, library)
        losses_one_by_one(stepper)
        path = folder / f"{config.id}.json"
        stepper.companions.updates.trace.save(path)
        return str(path)

    return file


def assert_stack_is_one_by_one(bag, library, *, tolerance, steps=40, trace_tolerance=None, mask_tolerance=1e-4):
    stack = GPTStack(bag, library, CPU)
    losses = torch.stack([stack.step(number) for number in range(steps)])
    for index, config in enumerate(bag):
        alone = stepper_of(config, library)
        expected = losses_one_by_one(alone, steps)
        assert (losses[:, index] / expected - 1).abs().max() < tolerance, config
        assert stack.sparsities[index] == pytest.approx(alone.sparsities[0], abs=1e-6)
        different = num = 0
        for name in stack.stack.hidden:
            mask, ours = mask_of(alone.model, name), stack.stack.tensors.masks[name][index]
            different += int((ours ^ (torch.ones_like(ours) if mask is None else mask)).sum())
            num += ours.numel()
        assert different < mask_tolerance * num, config  # weights that are equal but for a rounding may change places
        if alone.companions.updates is not None:
            trace = stack.traces()[index]
            assert trace.at == alone.companions.updates.trace.at
            assert trace.optimizer == alone.companions.updates.trace.optimizer
            assert trace.shapes == alone.companions.updates.trace.shapes
            for name, effects in alone.companions.updates.trace.effects.items():
                assert trace.effects[name] == pytest.approx(effects, rel=trace_tolerance or tolerance)
    return stack, losses


def mixed_bag(trace):
    return [
        replace(STACKED, follow=trace),
        replace(STACKED, dynamic="rigl"),
        replace(STACKED, dynamic="set", seed=1),
        replace(STACKED, dynamic="gmp"),
        replace(STACKED, dynamic="gmp", correction="fixed"),
        replace(STACKED, dynamic="rigl", follow=trace, sparsity=0.9),
        replace(STACKED, dynamic="gmp", follow=trace, allocation="erk"),
        STACKED,
    ]


def test_mixed_bag_that_moves_gives_losses_masks_and_traces_of_single_runs(traces, library):
    bag = mixed_bag(traces())
    assert len({stack_key(config) for config in bag}) == 1
    stack, losses = assert_stack_is_one_by_one(bag, library, tolerance=1e-4, trace_tolerance=1e-3)
    assert len({round(loss, 6) for loss in losses[-1].tolist()}) == len(bag)
    stack.refill(list(reversed(bag)))
    again = torch.stack([stack.step(number) for number in range(12)])
    torch.testing.assert_close(again.flip(1), losses[:12], rtol=1e-6, atol=0)
    assert [trace.at for trace in stack.traces()] == [list(range(12))] * len(bag)


@pytest.mark.parametrize(
    ("fields", "steps", "tolerance"),
    [
        ({"optimizer": "lion", "lr": 2**-10, "weight_decay": 1.0}, 16, 1e-3),
        ({"optimizer": "sgd", "lr": 0.1, "rest_lr": 2**-8}, 16, 1e-3),
        ({"optimizer": "muon", "lr": 0.005, "rest_lr": 2**-8, "weight_decay": 1.0}, 8, 0.02),  # its products are in bf16
        ({"optimizer": "adam", "weight_decay": 0.1}, 16, 1e-3),
        ({"weight_decay": 1.0, "clip": 0.5}, 16, 1e-3),
    ],
    ids=["lion", "sgd", "muon", "adam", "adamw"],
)
def test_every_optimizer_follows_in_a_stack_as_alone(traces, library, fields, steps, tolerance):
    shared = replace(STACKED, **fields, steps=steps)
    trace = traces(**{name: value for name, value in fields.items() if name != "clip"})
    bag = [replace(shared, follow=trace), replace(shared, follow=trace, dynamic="gmp", sparsity=0.9), shared]
    assert_stack_is_one_by_one(
        bag, library, tolerance=1e-3, steps=steps, trace_tolerance=tolerance, mask_tolerance=max(1e-4, tolerance / 2)
    )


IMP = replace(STACKED, dynamic="imp", rounds=3, steps=24)
FOLLOWS = {"follow": "trace"}
# name -> (what the runs share, what each has of its own, how near losses are)
ALIKE = {
    "rounds of imp": (IMP, [{}, {"correction": "fixed"}, FOLLOWS], 1e-4),
    "rounds of imp with the last density follow": (replace(IMP, correction="fixed"), [FOLLOWS, {**FOLLOWS, "seed": 1}], 1e-4),
    "rounds of imp are recorded": (replace(IMP, rounds=1, steps=50, record=True), [{}], 1e-4),
    "a rate of its own for the rest follows": (replace(STACKED, rest_lr=2**-8, steps=6), [FOLLOWS], 1e-5),
    "one run is recorded": (replace(STACKED, record=True, steps=8), [{}], 1e-5),
}


@pytest.mark.parametrize(("shared", "own", "tolerance"), ALIKE.values(), ids=ALIKE)
def test_runs_in_a_stack_are_as_alone(traces, library, shared, own, tolerance):
    bag = [replace(shared, **fields | ({"follow": traces()} if "follow" in fields else {})) for fields in own]
    assert_stack_is_one_by_one(bag, library, tolerance=tolerance, steps=shared.steps, trace_tolerance=1e-3)


def test_run_that_diverges_in_a_stack_says_so_in_its_trace_and_hurts_nobody(library):
    calm = replace(STACKED, optimizer="sgd", lr=0.05, record=True, steps=6)
    stack = GPTStack([calm, replace(calm, lr=1e12)], library, CPU)
    for number in range(6):
        stack.step(number)
    calm_trace, wild_trace = stack.traces()
    assert wild_trace.diverged
    assert not calm_trace.diverged
    alone = stepper_of(calm, library)
    losses_one_by_one(alone)
    for name, effects in alone.companions.updates.trace.effects.items():
        assert calm_trace.effects[name] == pytest.approx(effects, rel=1e-3)


def test_state_of_other_models_is_refused_and_changes_nothing(library):
    small, wide = (GPTStack([replace(STACKED, model=replace(STACKED.model, width=width))], library, CPU) for width in (32, 64))
    before = {name: tensor.clone() for name, tensor in wide.state_dict().items()}
    with pytest.raises(ValueError, match=r"is \(1, .*\) in the state, but \(1, .*\) in the stack: load the state of the same"):
        wide.load_state_dict(small.state_dict(), num_steps=1)
    assert all(torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) for name, tensor in wide.state_dict().items())
    assert wide.num_steps == 0


def test_state_is_put_into_the_tensors_that_a_step_is_bound_to(library):
    bag = [replace(STACKED, dynamic="rigl", mask_every=2), replace(STACKED, seed=1)]
    stack = GPTStack(bag, library, CPU)
    losses = [stack.step(number) for number in range(4)]
    state = stack.state_dict()
    losses += [stack.step(number) for number in range(4, 8)]
    stack.refill(bag)
    places = [tensor.data_ptr() for tensor in stack.stack.state_dict().values()]
    stack.load_state_dict(state, num_steps=4)
    assert [tensor.data_ptr() for tensor in stack.stack.state_dict().values()] == places
    assert torch.equal(torch.stack(losses[4:]), torch.stack([stack.step(number) for number in range(4, 8)]))


# What runs share, and what they may differ in


def test_fused_attention_of_a_stack_is_for_long_sequences_in_bf16_on_a_gpu():
    gpu, long = torch.device("cuda"), replace(BASE, seq_len=256, dtype="bf16")
    assert fastest_attention(long, gpu) == "fused"
    assert fastest_attention(replace(long, seq_len=128), gpu) == "products"
    assert fastest_attention(replace(long, dtype="fp32"), gpu) == "products"
    assert fastest_attention(BASE, CPU) == "fused"


def test_stack_key_tells_what_fits_together():
    assert len({stack_key(config) for config in BAG}) == 1
    assert stack_key(replace(BASE, steps=99)) != stack_key(BASE)
    assert stack_key(replace(BASE, model=replace(BASE.model, width=96))) != stack_key(BASE)
    assert stack_key(replace(BASE, optimizer="nadam")) is None
    assert len({stack_key(config) for config in DEEP_BAG}) == 1
    # The model's own factor is a plain number, which all models of a stack share.
    own = [replace(config, model=replace(DEEP.model, residual_factor=True)) for config in DEEP_BAG]
    assert len({stack_key(config) for config in own}) == 2


# What runs of a stack may differ in. For each such field: what both runs share, and the value that the second one has.
DIFFERENT = {
    "rule": ({}, "sp"),
    "base_width": ({}, 64),
    "kappa": ({"rule": "smupar-aligned", "kappa": 1.0}, 100.0),
    "depth_rule": ({"model": replace(BASE.model, depth=2), "base_depth": 1}, "none"),
    "sparsity": ({}, 0.5),
    "pattern": ({"sparsity": None}, "1:2"),
    "allocation": ({}, "erk"),
    "init_std": ({}, 0.03),
    "alpha_input": ({}, 3.0),
    "alpha_output": ({}, 3.0),
    "dynamic": ({"mask_every": 1}, "set"),
    "mask_every": ({"dynamic": "set"}, 1),
    "mask_stop": ({"dynamic": "set", "mask_every": 1}, 0.2),
    "drop_fraction": ({"dynamic": "set", "mask_every": 1}, 0.6),
    "correction": ({"dynamic": "gmp", "mask_every": 1}, "fixed"),
    "follow": ({}, "trace"),
    "lr": ({}, 2**-4),
    "rest_lr": ({"rest_lr": 2**-8}, 2**-5),
    "eps": ({}, 1e-3),
    "eps_scaling": ({"eps": 1e-2}, "width"),
    "weight_decay": ({}, 1.0),
    "decay": ({"weight_decay": 1.0}, "coupled"),
    "decayed": ({"weight_decay": 1.0}, "hidden"),
    "clip": ({"clip": 10.0}, 0.01),
    "schedule": ({}, "cosine"),
    "warmup": ({}, 3),
    "seed": ({}, 1),
}


def test_every_field_is_fixed_by_the_key_of_a_stack_or_may_differ():
    assert set(DIFFERENT) == set(STACKABLE_FIELDS)
    assert {item.name for item in fields(RunConfig)} - set(STACKABLE_FIELDS) <= json.loads(stack_key(BASE)).keys()


@pytest.mark.parametrize("name", STACKABLE_FIELDS)
def test_stack_reads_a_field_that_may_differ_from_each_run(name, library, tmp_path):
    shared, value = DIFFERENT[name]
    first = replace(BASE, **{"steps": 6, "sparsity": 0.75, "mask_stop": 1.0, "mask_every": 2} | shared)
    if value == "trace":
        proxy = stepper_of(replace(first, model=replace(first.model, width=32), sparsity=0.0, record=True), library)
        for step in range(6):
            proxy.step(step)
        proxy.companions.updates.trace.save(tmp_path / "trace.json")
        value = str(tmp_path / "trace.json")
    pair = [first, replace(first, **{name: value})]
    assert stack_key(pair[0]) == stack_key(pair[1])
    stack = GPTStack(pair, library, CPU)
    stacked = torch.stack([stack.step(step) for step in range(6)])
    single = [stepper_of(config, library) for config in pair]
    alone = torch.tensor([[stepper.step(step).item() for stepper in single] for step in range(6)])
    torch.testing.assert_close(stacked, alone, rtol=1e-4, atol=0)
    assert (alone[:, 0] / alone[:, 1] - 1).abs().max() > 1e-3  # or nobody could tell that the field was not read


def test_hyperparameters_are_those_of_the_run():
    config = replace(BASE, lr=0.1, clip=2.0, betas=(0.8, 0.9))
    made = hyperparameters(config)
    assert (made.lr, made.clip, made.betas) == (0.1, 2.0, (0.8, 0.9))
