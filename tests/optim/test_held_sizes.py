"""Weights whose size is held: their RMS stays that of their init, in every engine."""

from dataclasses import replace

import pytest
import torch

from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.data.batches import open_text
from smupar.lm.run.distributed import World
from smupar.lm.run.stack import GPTStack
from smupar.lm.run.step import Stepper

RUN = RunConfig(
    model=ModelConfig(width=64, depth=1),
    base_width=32,
    sparsity=0.75,
    steps=100,
    batch_size=4,
    seq_len=32,
    valid_batches=1,
    decay="held",
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text():
    return open_text(RUN)


def stepped(text, config, num_steps=6, **how):
    stepper = Stepper(config, Execution(device="cpu", **how), World(0, 1, CPU, "ddp"), text)
    return stepper, torch.stack([stepper.step(step) for step in range(num_steps)])


def size_over_init(plan, name, values, mask):
    return (values.double().square().sum() / mask.sum()).sqrt().item() / plan[name].init_std


@pytest.mark.parametrize("config", [RUN, replace(RUN, rule="mup", sparsity=0.0), replace(RUN, dynamic="rigl", mask_every=2)])
def test_hidden_weights_keep_the_rms_of_their_init(text, config):
    stepper, losses = stepped(text, config)
    assert losses[-1] < losses[0]
    for name, weight in stepper.companions.held_sizes.weights.items():
        assert size_over_init(stepper.plan, name, weight.full(), weight.full_mask()) == pytest.approx(1, abs=1e-5)
    free, _ = stepped(text, replace(config, decay="independent"))
    sizes = [size_over_init(free.plan, name, free.model.get_parameter(name).detach(), weight.full_mask())
             for name, weight in stepper.companions.held_sizes.weights.items()]  # fmt: skip
    assert min(abs(size - 1) for size in sizes) > 1e-3


def test_other_parameters_decay_and_are_not_scaled(text):
    held, _ = stepped(text, RUN, 1)
    free, _ = stepped(text, replace(RUN, decay="independent"), 1)
    for row in held.plan:
        same = torch.equal(held.model.get_parameter(row.name), free.model.get_parameter(row.name))
        assert same == (row.role != "hidden"), row.name
    decays = {group["name"].partition(",")[0]: group["weight_decay"] for group in held.optimizers[0].param_groups}
    assert decays == {"embedding+vector": 0.1, "hidden": 0.0}


def test_runs_of_a_stack_are_held_each_by_its_own_plan_or_not_at_all(text):
    bag = [RUN, replace(RUN, decay="independent"), replace(RUN, rule="mup", sparsity=0.0, lr=2**-8)]
    stack = GPTStack(bag, text, CPU)
    ours = torch.stack([stack.step(step) for step in range(6)])
    for number, config in enumerate(bag):
        torch.testing.assert_close(ours[:, number], stepped(text, config)[1], rtol=1e-5, atol=0)


def test_held_weights_that_keep_only_their_non_zeros_train_alike(text):
    torch.testing.assert_close(stepped(text, RUN, storage="csr")[1], stepped(text, RUN)[1], rtol=1e-5, atol=0)
