"""Laws that controls put in the place of measured updates: what they measure, and that runs follow it."""

import copy
import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from smupar.lm.config.run_config import Execution, ModelConfig, RunConfig
from smupar.lm.data.batches import open_text
from smupar.lm.run.schedule import lr_share
from smupar.lm.run.stack import GPTStack
from smupar.lm.run.train import train
from smupar.updates.law import Law, parse_law
from smupar.updates.probe import some_rows
from smupar.updates.trace import Trace
from tests.support.texts import words

RUN = RunConfig(
    model=ModelConfig(width=32, depth=1, head_dim=16), base_width=16, sparsity=0.5, steps=30, batch_size=2, seq_len=16,
    valid_batches=1, record=True, data=words(), weight_decay=0.3,
)  # fmt: skip
NAME = "blocks.0.mlp.down.weight"


def stack_of(*configs):
    return GPTStack(configs, open_text(configs[0]), torch.device("cpu"))


def test_law_is_read_from_its_text():
    assert parse_law("") == Law()
    assert parse_law("function,every=25,old=0.95,tokens=512,held-out") == Law("function", 0.95, 25, 512, held_out=True)
    assert [Law(every=25).is_measured(step) for step in (0, 19, 20, 25)] == [True, True, False, True]


WRONG = {"size": "none of effect", "every": "none of", "every=0": "at least 1", "old=1": r"\[0, 1\)", "tokens=a": "a number"}


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=WRONG)
def test_law_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        replace(RUN, law=text)


def test_law_without_a_trace_is_refused_and_so_is_one_outside_studies(tmp_path):
    with pytest.raises(ValueError, match="runs that record or follow"):
        replace(RUN, record=False, law="rms")
    with pytest.raises(ValueError, match="for sweeps and"):
        train(replace(RUN, law="rms"), Execution(out=str(tmp_path / "run"), device="cpu"), shows=False)


def logits(model, weights, batch):
    """What a model returns with these weights."""
    model.load_state_dict({NAME: weights}, strict=False)
    with torch.no_grad():
        return model(batch[0][:8])


@pytest.mark.parametrize("size", ["effect", "rms", "trust", "spectral", "function"])
def test_recorded_size_is_that_of_the_update(size):
    """The second model of a stack, against the numbers that its weights before and after a step give."""
    stack = stack_of(*(replace(RUN, lr=lr, law=size) for lr in (2**-8, 2**-6)))
    for step in range(3):
        stack.step(step)
    batch = stack._batch(stack.corpus.train, 3)
    before = stack.stack.tensors.params[NAME][1].clone()
    x = stack.stack.inputs(batch, some_rows)[NAME][1]
    stack.stack.write_back()
    model = copy.deepcopy(stack.stack.models[1])
    stack.step(3)
    after = stack.stack.tensors.params[NAME][1].clone()
    lr = 2**-6 * lr_share(3, RUN)
    update = after - (1 - lr * 0.3) * before  # decay is independent of the factor on the learning rate
    assert (update[after == 0] == 0).all()
    expected = {
        "effect": (x @ update.T).square().mean().sqrt(),
        "rms": (update.square().sum() / (before != 0).sum()).sqrt(),
        "trust": update.norm() / before.norm(),
        "spectral": torch.linalg.matrix_norm(update, 2) * math.sqrt(update.shape[1] / update.shape[0]),
    }
    if size == "function":
        expected[size] = (logits(model, before + update, batch) - logits(model, before, batch)).square().mean().sqrt()
    # A trace has sizes for each unit of base learning rate, and eight power iterations end a little below the norm.
    found = stack.traces()[1].effects[NAME][3]
    assert found == pytest.approx(float(expected[size]) / lr, rel=0.1 if size == "spectral" else 2e-3)


@pytest.mark.parametrize("law", ["rms", "trust", "spectral", "function", "effect,tokens=16,held-out"])
def test_run_that_follows_a_constant_keeps_its_size_there(law, tmp_path):
    run = replace(RUN, steps=60, law=f"{law},old=0")
    (usual,) = _trained(run)
    wanted = {name: [4 * values[10]] for name, values in usual.effects.items()}
    Trace(run.steps, [0], wanted, usual.shapes, usual.optimizer).save(tmp_path / "constant.json")
    (found,) = _trained(replace(run, record=False, follow=str(tmp_path / "constant.json")))
    free, ours = (abs(fmean(math.log(x / wanted[NAME][0]) for x in trace.effects[NAME][15:])) for trace in (usual, found))
    assert ours < free / 4


def _trained(config):
    stack = stack_of(config)
    for step in range(config.steps):
        stack.step(step)
    return stack.traces()


def test_tokens_that_are_held_out_come_from_the_text_for_validation():
    traces = [_trained(replace(RUN, steps=4, law=law))[0].effects[NAME] for law in ("", "effect,held-out")]
    assert traces[0] != traces[1]
    assert traces[0] == pytest.approx(traces[1], rel=0.5)
