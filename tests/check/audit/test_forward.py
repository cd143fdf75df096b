"""The audit finds faults in forward factors and branches."""

import pytest
import torch

import smupar
from smupar.lm.config.run_config import ModelConfig
from smupar.lm.model.gpt import GPT
from smupar.model.factors import has_factor_hook
from tests.check.audit.audited import mlp, only_finding


@pytest.mark.parametrize(("path", "factor"), [("head", "0.375"), ("fc1", "9.17")])
def test_forward_hook_that_was_removed_is_found(path, factor):
    model, plan = mlp()
    module = model.get_submodule(path)
    module._forward_pre_hooks.clear()
    assert not has_factor_hook(module)
    line = only_finding(model, plan)
    assert line == f"{path!r} ('{path}.weight') does not apply its forward factor {factor}: call smupar.attach(model, plan)"
    smupar.attach(model, plan)
    assert smupar.audit(model, plan) == []


def test_factor_that_was_changed_is_found():
    model, plan = mlp()
    model.head.smupar_factor.fill_(1.0)
    line = only_finding(model, plan)
    assert line == "'head' ('head.weight') multiplies its output by 1, the plan says 0.375: call smupar.attach(model, plan)"


def test_factor_that_was_rounded_is_found():
    model, plan = mlp()
    model.bfloat16()  # 9.17 becomes 9.1875; 0.375 stays what it is
    line = only_finding(model, plan)
    assert line.startswith("'fc1' ('fc1.weight') multiplies its output by 9.1")
    assert "the plan says 9.17: call smupar.attach(model, plan)" in line


def test_factor_applied_twice_is_found():
    model, plan = mlp()
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * module.smupar_factor,))
    line = only_finding(model, plan)
    assert line.startswith("'head' ('head.weight') multiplies its output by 0.140625, the plan says 0.375")


def test_hook_that_adds_noise_in_training_or_wants_whole_batches_is_no_fault():
    model, base = (GPT(ModelConfig(width=width, depth=1, vocab_size=64)) for width in (64, 32))
    plan = smupar.parameterize(model, base=base, density=1 / 2, alpha_input=9.17)
    plan.settle("attention_scale")
    noisy = model.embedding.register_forward_hook(
        lambda module, args, output: output + torch.randn(output.size(2)) if module.training else output
    )
    assert smupar.audit(model, plan) == []
    assert model.embedding.training
    noisy.remove()
    model.embedding.register_forward_hook(lambda module, args, output: output.transpose(1, 2).transpose(1, 2))
    assert smupar.audit(model, plan) == []


def test_embedding_factor_that_was_changed_is_found():
    model, base = (GPT(ModelConfig(width=width, depth=1, vocab_size=64)) for width in (64, 32))
    plan = smupar.parameterize(model, base=base, density=1 / 2, alpha_input=9.17, alpha_output=1.5)
    model.embedding.smupar_factor.fill_(1.0)
    assert only_finding(model, plan).startswith(
        "'embedding' ('embedding.weight') multiplies its output by 1, the plan says 9.17"
    )
