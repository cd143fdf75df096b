"""Many models as one: the same numbers as one by one, for a mixed bag of rules, densities, rates and seeds."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import smupar
from smupar.execute.cuda_graphs import compile_static
from smupar.execute.stack.gather import Hyperparameters
from smupar.execute.stack.stack import Stack, train_stacked
from smupar.lm.data.batches import open_text, read_batch
from smupar.lm.model.gpt import build
from smupar.lm.run.optimizers import make_optimizers, set_lr
from smupar.lm.run.schedule import lr_share
from smupar.lm.run.stack import GPTStack
from smupar.lm.run.step import next_token_loss
from tests.lm.run.bags import BAG, BASE, DEEP_BAG
from tests.support.loops import loss_of, relative_error
from tests.support.models import sequential
from tests.support.texts import words


@pytest.fixture(scope="module")
def text():
    return open_text(BASE)


def one_by_one(config, text, steps):
    """The plain loop, with torch's own optimizers."""
    model, plan = build(config)
    optimizers = make_optimizers(model, plan, config)
    losses = []
    for step in range(steps):
        set_lr(optimizers, lr_share(step, config))
        batch = read_batch(text.train, seed=config.seed, step=step, batch_size=config.batch_size, seq_len=config.seq_len)
        loss = next_token_loss(model, batch)
        loss.backward()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses), model


def test_mixed_bag_gives_the_losses_of_single_runs_over_a_hundred_steps(text):
    stack = GPTStack(BAG, text, torch.device("cpu"))
    ours = torch.stack([stack.step(step) for step in range(100)])
    for index, config in enumerate(BAG):
        theirs, _ = one_by_one(config, text, 100)
        assert relative_error(ours[:, index], theirs) < 1e-4, config


@pytest.mark.parametrize(
    ("optimizer", "lr", "tolerance"),
    [("adamw", 2**-7, 1e-5), ("adam", 2**-7, 1e-5), ("sgd", 0.05, 1e-5), ("lion", 2**-9, 1e-5), ("muon", 0.02, 1e-3)],
)
@pytest.mark.parametrize("clip", [None, 0.5, 100.0])  # the last is above every norm
def test_every_update_is_that_of_torch(text, optimizer, lr, tolerance, clip):
    shared = replace(BASE, optimizer=optimizer, weight_decay=0.1, clip=clip, rest_lr=2**-8)
    bag = [replace(shared, sparsity=sparsity, lr=lr * factor) for sparsity, factor in ((0.0, 1.0), (0.75, 0.5), (0.9, 1.0))]
    stack = GPTStack(bag, text, torch.device("cpu"))
    ours = torch.stack([stack.step(step) for step in range(20)])
    for index, config in enumerate(bag):
        theirs, _ = one_by_one(config, text, 20)
        assert relative_error(ours[:, index], theirs) < tolerance


def test_depth_rules_of_a_stack_give_the_losses_of_single_runs(text):
    stack = GPTStack(DEEP_BAG, text, torch.device("cpu"))
    ours = torch.stack([stack.step(step) for step in range(8)])
    for index, config in enumerate(DEEP_BAG):
        assert relative_error(ours[:, index], one_by_one(config, text, 8)[0]) < 1e-5, config
    assert relative_error(ours[-1, 0], ours[-1, 3]) > 1e-3


def test_single_model_is_not_batched_and_gives_the_same(text):
    stack = GPTStack(BAG[1:2], text, torch.device("cpu"))
    ours = torch.cat([stack.step(step) for step in range(10)])
    assert relative_error(ours, one_by_one(BAG[1], text, 10)[0]) < 1e-5


def test_refilled_stack_gives_the_same_again(text):
    stack = GPTStack(BAG, text, torch.device("cpu"))
    first = torch.stack([stack.step(step) for step in range(5)])
    stack.refill(list(reversed(BAG)))
    again = torch.stack([stack.step(step) for step in range(5)])
    torch.testing.assert_close(again.flip(1), first, rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_stack_can_be_refilled_with_runs_of_another_depth_rule(text, order):
    first, second = [DEEP_BAG[0], DEEP_BAG[3]][::order]
    stack = GPTStack([first, replace(first, lr=2**-8)], text, torch.device("cpu"))
    stack.refill([second, replace(second, lr=2**-8)])
    ours = torch.stack([stack.step(step) for step in range(5)])
    assert relative_error(ours[:, 0], one_by_one(second, text, 5)[0]) < 1e-5


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_attention_by_a_fused_kernel_gives_the_losses_of_products(text, dtype):
    bag = [replace(config, dtype=dtype) for config in BAG[:3]]
    stacks = {kernel: GPTStack(bag, text, torch.device("cpu"), attention=kernel) for kernel in ("fused", "products")}
    by = {kernel: torch.stack([stack.step(step) for step in range(5)]) for kernel, stack in stacks.items()}
    assert relative_error(by["fused"], by["products"]) < {"fp32": 1e-6, "bf16": 2e-3}[dtype]


@pytest.mark.slow  # compiles for half a minute
@pytest.mark.filterwarnings("default")  # torch warns of itself when it compiles
def test_compiled_stack_is_refilled_with_any_runs_of_its_key_without_compiling_again(text):
    first = replace(BASE, clip=1.0, seed=0)
    others = [
        [replace(first, lr=2**-9), replace(first, rule="mup", sparsity=0.0)],
        [replace(first, rule="sp", seed=3), replace(first, decay="coupled", weight_decay=0.3)],
        [replace(first, decayed="hidden", clip=5.0), replace(first, pattern="2:4", schedule="cosine", alpha_input=2.0)],
        [replace(first, dynamic="rigl", mask_every=2), replace(first, dynamic="gmp", mask_every=2)],
    ]
    stack = GPTStack([first, replace(first, seed=1)], text, torch.device("cpu"), compile=True)
    stack.step(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for bag in others:
            stack.refill(bag)
            ours = torch.stack([stack.step(step) for step in range(6)])
            theirs = GPTStack(bag, text, torch.device("cpu"), own_batches=True)
            assert relative_error(ours, torch.stack([theirs.step(step) for step in range(6)])) < 1e-4, bag


def test_diverged_run_is_frozen_and_does_not_hurt_its_neighbours(text):
    wild = replace(BASE, optimizer="sgd", sparsity=0.5, lr=1e12)
    calm = replace(wild, lr=0.05)
    stack = GPTStack([calm, wild, calm], text, torch.device("cpu"))
    losses = torch.stack([stack.step(step) for step in range(8)])
    assert not losses[-1, 1].isfinite()
    alone = GPTStack([calm], text, torch.device("cpu"))
    assert relative_error(losses[:, 0], torch.cat([alone.step(step) for step in range(8)])) < 1e-5
    assert torch.equal(losses[:, 0], losses[:, 2])
    weights = stack.stack.tensors.params["norm.weight"][1].clone()
    stack.step(8)
    assert torch.equal(stack.stack.tensors.params["norm.weight"][1], weights)


# Models of one's own


def make(width=32):
    return sequential(width, num_out=3)


def test_users_models_are_trained_in_place():
    batches = [(torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(10)]
    made = []
    for density in (1.0, 0.25):
        model = make()
        made.append((model, smupar.parameterize(model, base=make(16), density=density)))
    models, plans = zip(*made, strict=True)
    losses = train_stacked(models, plans, loss_of, batches, lr=[1e-2, 2e-2])
    assert losses.shape == (10, 2)
    reference = make()
    plan = smupar.parameterize(reference, base=make(16), density=0.25)
    with torch.no_grad():  # biases are torch's own random ones
        for name, parameter in reference.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    assert plan.diff(plans[1]) == []
    assert losses[-1].isfinite().all()
    mask = models[1].get_buffer("2.weight_mask")
    assert models[1].get_parameter("2.weight")[~mask].count_nonzero() == 0


def test_models_are_made_in_threads_that_leave_torchs_compiler_alone():
    """Threads that reset it at the same time can bring the process down."""
    code = f"""
import threading, torch, torch._dynamo
torch._dynamo.reset = lambda: print(threading.current_thread() is threading.main_thread())
from smupar.lm.config.run_config import ModelConfig, RunConfig
from smupar.lm.data.batches import open_text, read_batch
from smupar.lm.run.stack import GPTStack
config = RunConfig(model=ModelConfig(width=64, depth=1), steps=1, batch_size=4, seq_len=32, data={words()!r})
GPTStack([config] * 8, open_text(config), torch.device("cpu"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"True"}  # torch 2.9 resets nothing


def test_every_size_is_compiled_however_many_there_are():
    doubled = compile_static(lambda x: 2 * x, backend="eager")
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in range(2, 8):
            doubled(torch.ones(size))
    assert counters["stats"]["unique_graphs"] - before == 6


def with_layer(layer):
    return lambda width: nn.Sequential(nn.Linear(8, width), layer(width), nn.Linear(width, width), nn.Linear(width, 2))


@pytest.mark.parametrize(
    ("build", "widths", "optimizer", "message"),
    [
        (make, (32, 64), "adamw", r"'0.weight' has shape \(64, 8\) in model 1, but \(32, 8\) in the first"),
        (make, (32,), "nadam", "nadam cannot be stacked: use one of adamw"),
        (with_layer(nn.BatchNorm1d), (32,), "adamw", "'1' keeps running statistics"),
        (with_layer(lambda width: nn.Dropout(0.1)), (32,), "adamw", "'1' draws random numbers"),
        (with_layer(lambda width: nn.Linear(width, width).requires_grad_(False)), (32,), "adamw", "'1.weight' is frozen"),
    ],
)
def test_what_a_stack_cannot_do_is_refused(build, widths, optimizer, message):
    models = [build(width) for width in widths]
    plans = [smupar.parameterize(model, base=build(16)) for model in models]
    with pytest.raises(ValueError, match=message):
        Stack(models, plans, loss_of, [Hyperparameters(0.01)] * len(models), optimizer=optimizer)
