"""What only a GPU can show: captured and stacked steps give the losses of the plain step."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.data.batches import open_text
from smupar.lm.run.distributed import World
from smupar.lm.run.stack import GPTStack
from smupar.lm.run.step import Stepper
from smupar.lm.run.train import train
from tests.support.loops import relative_error

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),  # compilers and drivers warn as they like
]

GPU = torch.device("cuda")
STEPS = 30
RUN = RunConfig(
    model=ModelConfig(width=128, depth=2, head_dim=64, vocab_size=256),
    base_width=64,
    sparsity=0.75,
    lr=2**-8,
    seq_len=64,
    batch_size=16,
    steps=STEPS,
    clip=1.0,
)
BAG = [RUN, replace(RUN, rule="sp", sparsity=0.9, lr=2**-10), replace(RUN, rule="mup", sparsity=0.0, seed=1)]


@pytest.fixture(scope="module")
def text():
    return open_text(RUN)


def losses_of(step):
    return torch.stack([step(number).detach().clone() for number in range(STEPS)]).cpu()


def plain(config, text, **how):
    return losses_of(Stepper(config, Execution(device="cuda", **how), World(0, 1, GPU, "ddp"), text).step)


def test_captured_step_gives_the_losses_of_the_plain_step(text):
    uncaptured = plain(RUN, text, compile=False)
    assert uncaptured[-1] < 0.8 * uncaptured[0]
    assert relative_error(plain(RUN, text, graph=True), uncaptured) < 1e-4
    assert relative_error(plain(RUN, text, graph=True, compile=False), uncaptured) < 1e-5


def test_captured_step_in_bf16_gives_the_losses_of_the_plain_step(text):
    half = replace(RUN, dtype="bf16")
    assert relative_error(plain(half, text, graph=True), plain(half, text)) < 2e-3


@pytest.mark.parametrize("compiled", [False, True])
def test_stack_on_a_gpu_gives_the_losses_of_single_runs(text, compiled):
    stacked = losses_of(GPTStack(BAG, text, GPU, compile=compiled).step)
    for index, config in enumerate(BAG):
        assert relative_error(stacked[:, index], plain(config, text, compile=False)) < 1e-4


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_stack_with_fused_attention_gives_the_losses_of_products(text, head_dim):
    model = replace(RUN.model, head_dim=head_dim)
    bag = [replace(config, model=model, dtype="bf16", seq_len=256, batch_size=4) for config in BAG]
    fused, products = (losses_of(GPTStack(bag, text, GPU, attention=kernel).step) for kernel in ("fused", "products"))
    assert relative_error(fused[:5], products[:5]) < 5e-4
    assert relative_error(fused[-5:].mean(0), products[-5:].mean(0)) < 5e-3  # as two seeds of the rounding differ


def measured_trace(text, tmp_path):
    stepper = Stepper(
        replace(RUN, sparsity=0.0, record=True), Execution(device="cuda", compile=False), World(0, 1, GPU, "ddp"), text
    )
    losses_of(stepper.step)
    path = tmp_path / "trace.json"
    stepper.traces()[0].save(path)
    return str(path)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["moving", "imp", "held", "follow"])
def test_stack_with_companions_on_a_gpu_gives_the_losses_of_single_runs(text, tmp_path, kind, compiled):
    """Companions change rates, masks and weights between steps, in the tensors that a captured step is bound to."""
    moving = replace(RUN, mask_every=5, mask_stop=0.8)
    bag = {
        "moving": lambda: [
            *(replace(moving, dynamic=name) for name in ("rigl", "set", "gmp")),
            replace(moving, dynamic="gmp", correction="fixed"),
        ],
        "imp": lambda: [replace(RUN, dynamic="imp", rounds=2), replace(RUN, dynamic="imp", rounds=2, sparsity=0.9)],
        "held": lambda: [replace(RUN, decay="held"), RUN],
        "follow": lambda: [replace(RUN, follow=measured_trace(text, tmp_path)), RUN],
    }[kind]()
    stacked = losses_of(GPTStack(bag, text, GPU, compile=compiled).step)
    for index, config in enumerate(bag):
        # Rounding decides between weights that are nearly as small, so masks may differ in a few entries.
        assert relative_error(stacked[:, index], plain(config, text, compile=False)) < 5e-3


def test_memory_of_fused_attention_grows_with_the_length_and_not_with_its_square(text):
    def peak(seq_len, kernel):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        runs = [replace(config, dtype="bf16", seq_len=seq_len, batch_size=8192 // seq_len) for config in BAG]
        stack = GPTStack(runs, text, GPU, compile=False, attention=kernel)
        stack.step(0)
        return torch.cuda.max_memory_allocated()

    assert peak(2048, "fused") < 1.2 * peak(256, "fused")  # as many tokens in both
    assert peak(2048, "products") > 2 * peak(256, "products")


def test_refilled_stack_gives_the_losses_of_a_new_one(text):
    stack = GPTStack(BAG, text, GPU, own_batches=True)
    losses_of(stack.step)
    stack.refill(BAG[::-1])
    again = losses_of(stack.step)
    assert relative_error(again.flip(1), losses_of(GPTStack(BAG, text, GPU, own_batches=True).step)) < 1e-6


def test_captured_stack_goes_on_from_its_state_without_another_capture(text):
    stack = GPTStack(BAG, text, GPU, own_batches=True)
    whole = losses_of(stack.step)
    captured = stack.stack._call.output
    assert stack.is_captured
    stack.refill(BAG)
    for number in range(10):
        stack.step(number)
    state = stack.state_dict()
    stack.refill(BAG)
    stack.load_state_dict(state, num_steps=10)
    again = torch.stack([stack.step(number) for number in range(10, STEPS)]).cpu()
    assert relative_error(again, whole[10:]) < 1e-6
    assert stack.stack._call.output is captured


def test_serial_engine_gives_the_losses_of_the_plain_step(text):
    assert relative_error(losses_of(GPTStack([RUN], text, GPU).step)[:, 0], plain(RUN, text, compile=False)) < 1e-4


def test_captured_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    how = Execution(device="cuda", graph=True, compile=False, out=str(tmp_path / "whole"), save_every=10, keep=10)
    whole = train(RUN, how)
    pieces = replace(how, out=str(tmp_path / "pieces"))
    train(RUN, pieces)
    for checkpoint in sorted((tmp_path / "pieces").glob("checkpoints/*"))[1:]:
        shutil.rmtree(checkpoint)
    (tmp_path / "pieces" / "summary.json").unlink()
    again = train(RUN, pieces)
    assert again.train_loss == pytest.approx(whole.train_loss, rel=1e-5)
