"""The built-in GPT, its data and its loop."""

import dataclasses

import pytest
import torch

from smupar.lm import data
from smupar.lm.config import ModelConfig, RunConfig
from smupar.lm.gpt import GPT, alibi_slopes, build, plan_on_meta
from smupar.lm.train import lr_share, train

TINY = RunConfig(model=ModelConfig(width=64, depth=1), base_width=32, sparsity=0.75, steps=5, batch_size=2, seq_len=16)


def test_gpt_does_not_look_ahead():
    model = GPT(ModelConfig(width=64, depth=2))
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 6:] = 99
    with torch.no_grad():
        assert torch.equal(model(tokens)[0, :6], model(changed)[0, :6])
        assert not torch.equal(model(tokens)[0, 6:], model(changed)[0, 6:])


def test_alibi_slopes_of_eight_heads_are_powers_of_two():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]


def test_built_gpt_has_the_attention_scale_of_its_rule():
    for rule, scale in (("smupar", 1 / 32), ("mup", 1 / 32), ("sp", 32**-0.5)):
        model, plan = build(dataclasses.replace(TINY, rule=rule))
        assert model.blocks[0].attention.scale.item() == pytest.approx(scale, rel=1e-7)
        assert not plan.pending


def test_plan_on_meta_equals_the_plan_of_the_built_model():
    assert plan_on_meta(TINY).diff(build(TINY)[1]) == []


def test_batches_are_a_function_of_seed_and_step():
    text = torch.arange(1000, dtype=torch.int32)
    inputs, targets = data.batch(text, seed=3, step=7, batch_size=4, seq_len=8)
    again, _ = data.batch(text, seed=3, step=7, batch_size=4, seq_len=8)
    other, _ = data.batch(text, seed=3, step=8, batch_size=4, seq_len=8)
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)
    assert torch.equal(inputs + 1, targets)  # on counting text the target is the next number


def test_text_shorter_than_a_sequence_raises():
    with pytest.raises(ValueError, match="fewer than one sequence"):
        data.batch(torch.zeros(8), seed=0, step=0, batch_size=1, seq_len=8)


def test_standard_library_is_python_source_without_tests():
    text = data.standard_library().numpy().tobytes()
    assert len(text) > 5_000_000
    assert b"def " in text[:100_000]


def test_lr_share_warms_up_then_decays_to_a_tenth():
    shares = [lr_share(step, 100) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == 1.0
    assert shares[10] == 1.0
    assert shares[99] == pytest.approx(0.1 + 0.9 / 90)


def test_training_twice_gives_the_same_summary(capsys):
    first, second = train(TINY), train(TINY)
    assert (first.train_loss, first.valid_loss) == (second.train_loss, second.valid_loss)
    assert first.valid_loss < 5.6  # log(256) = 5.55 is a uniform guess


def test_bad_widths_raise_with_a_remedy():
    with pytest.raises(ValueError, match="not a multiple of head_dim"):
        ModelConfig(width=100, head_dim=32)
