"""Mistakes that other code bases shipped with, and that belong to no single module: here they cannot be made."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import smupar
from smupar.lm.config.run_config import ModelConfig
from smupar.lm.model.gpt import GPT
from tests.support.models import MLP, parameterized_mlp


def mlp(density=1 / 4, *args, **settings):
    return parameterized_mlp(density, *args, **settings)


def data(dtype=torch.float32):
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def train(model, optimizer, steps=1):
    for step in range(steps):
        model(data() + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def lrs(model, groups):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: float(group["lr"]) for group in groups for parameter in group["params"]}


class Identity(nn.Module):
    def forward(self, weight):
        return weight


def test_init_reaches_the_weight_that_the_forward_pass_uses():
    # An init written to the temporary that a parametrization computes is lost, and torch's default init stays.
    for parametrized in (False, True):
        models = [MLP(64), MLP(8)]
        if parametrized:
            for model in models:
                parametrize.register_parametrization(model.fc2, "weight", Identity())
        model, base = models
        plan = smupar.parameterize(model, base=base, rule="sp", density=1 / 4, init_std=0.5)
        weight = model.fc2(torch.eye(64)) - model.fc2(torch.zeros(1, 64))  # what the layer does, whatever it holds
        kept = weight[weight.abs() > 1e-6]
        assert len(kept) == 1024
        # 1024 draws of std 0.5 scatter by 2.2 %; torch's default would be 0.072.
        assert kept.square().mean().sqrt().item() == pytest.approx(0.5, rel=0.1)
        assert smupar.audit(model, plan) == []


def test_logits_are_the_same_in_training_evaluation_and_generation():
    # The output factor applied only when targets are given: text is generated at the wrong temperature.
    model, _ = mlp(alpha_output=1.5)
    in_training = model.train()(data())
    with torch.no_grad():
        without_gradient = model(data())
        in_evaluation = model.eval()(data())
        one_by_one = torch.cat([model(row[None]) for row in data()])
    with torch.inference_mode():
        in_inference = model(data())
    for logits in (without_gradient, in_evaluation, in_inference):
        assert torch.equal(logits, in_training)
    torch.testing.assert_close(one_by_one, in_training.detach())
    # 1.5 / 8 on the product and not on the bias.
    features = torch.tanh(model.fc2(torch.tanh(model.fc1(data()))))
    expected = F.linear(features * (1.5 / 8), model.head.weight, model.head.bias)
    torch.testing.assert_close(in_training, expected)


def test_nothing_hangs_on_parameters_that_a_copy_would_lose():
    # Width and factor as attributes of parameters: gone after deepcopy, sharding or a checkpoint.
    model, plan = mlp()
    assert all(not vars(parameter) for parameter in model.parameters())
    restored = smupar.Plan.from_json(plan.to_json())
    assert plan.diff(restored) == []
    planned = lrs(model, smupar.param_groups(model, plan, lr=0.01))
    assert planned["fc2.weight"] == pytest.approx(0.005)
    clone = copy.deepcopy(model)
    loaded, _ = mlp(seed=1)
    loaded.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for other in (clone, loaded):
        groups = smupar.param_groups(other, restored, lr=0.01)
        assert lrs(other, groups) == planned
        optimizer = torch.optim.AdamW(groups)
        assert smupar.audit(other, restored, optimizer, lr=0.01) == []
        train(other, optimizer, steps=2)
        assert not other.fc2.weight[~other.fc2.weight_mask].any()
    assert torch.equal(clone(data()), loaded(data()))


def test_a_scheduler_that_erases_the_ratios_is_told():
    # Schedulers that set absolute values make all groups equal, and nobody notices.
    model, plan = mlp()
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    smupar.audit(model, plan, optimizer)  # leaves the guard
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    assert len({group["lr"] for group in optimizer.param_groups}) == 1
    with pytest.warns(smupar.LRRatioWarning, match=r"'hidden, LR x 0\.5, width 8, density 0\.25'.*max_lr=\[") as caught:
        train(model, optimizer, steps=3)
    assert len(caught) == 1
    with pytest.raises(smupar.AuditError, match="lost their ratios"):
        smupar.audit(model, plan, optimizer)


class GroupedQueryAttention(nn.Module):
    """Two heads of 8 for keys and values at every width."""

    def __init__(self, width):
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, 16, bias=False)
        self.v_proj = nn.Linear(width, 16, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)


class GatedMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)


class Llama(nn.Module):
    """Its parts are called after the letters that a careless ``strip("module.")`` eats."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.module = GroupedQueryAttention(width)
        self.mode = GatedMLP(width)
        self.lm = nn.Linear(width, 10, bias=False)
        self.lm.weight = self.embedding.weight


def test_tied_grouped_and_gated_weights_are_scaled_once_under_their_own_names():
    # Tied embeddings rescaled twice; grouped queries and gates unsupported; names that lose letters.
    model, base = Llama(64), Llama(16)
    with pytest.raises(ValueError, match=r"(?s)module\.k_proj\.weight.*roles=.*'hidden'") as error:
        smupar.parameterize(model, base=base)  # keys and a readout have the same shape: ask, do not guess
    assert "module.v_proj.weight" in str(error.value)
    plan = smupar.parameterize(
        model,
        base=base,
        density=1 / 2,
        init_std=0.087,
        alpha_input=9.0,
        alpha_output=1.5,
        roles={"module.[kv]_proj.weight": "hidden"},
    )
    assert [row.name for row in plan] == [name for name, _ in model.named_parameters()]
    assert [row.name for row in plan if row.role == "hidden"] == [
        *(f"module.{letter}_proj.weight" for letter in "qkvo"),
        *(f"mode.{part}.weight" for part in ("gate", "up", "down")),
    ]
    assert {row.lr_factor("adam") for row in plan if row.role == "hidden"} == {1 / 2}  # 1 / (4 x 1/2)
    assert plan["module.k_proj.weight"].lr_factor("sgd") == 1 / 2  # m_out is 1: eta / (m_in m_rho)
    assert plan["module.k_proj.weight"].forward == ()
    # The tied tensor: one row, one init, one group entry, and a factor for each of its two uses.
    assert plan["embedding.weight"].forward == (("embedding", 9.0), ("lm", 1.5 / 4))
    assert model.lm.weight is model.embedding.weight
    assert model.embedding.weight.std().item() == pytest.approx(0.087, rel=0.1)
    held = [parameter for group in smupar.param_groups(model, plan, lr=0.01) for parameter in group["params"]]
    assert sum(parameter is model.embedding.weight for parameter in held) == 1
    torch.testing.assert_close(model.embedding(torch.tensor([3])), 9.0 * model.embedding.weight[3:4])
    torch.testing.assert_close(model.lm(torch.ones(1, 64)), model.lm.weight.sum(1)[None] * (1.5 / 4))
    assert smupar.audit(model, plan) != []  # the attention scale is left to the user
    assert list(plan.pending) == ["attention_scale"]


def test_a_parameterization_that_is_not_switched_on_fails_before_step_0():
    # muP that was never switched on, for months: nothing compared the model with the plan.
    model, base = (GPT(ModelConfig(width=width, depth=1, vocab_size=64)) for width in (64, 32))
    plan = smupar.make_plan(model, base=base, rule="mup", alpha_input=9.17, init_std=0.087)
    with pytest.raises(smupar.AuditError) as error:
        smupar.audit(model, plan, torch.optim.AdamW(model.parameters(), lr=0.01))
    message = str(error.value)
    assert "'blocks.0.mlp.up.weight': init std is" in message
    assert "'embedding' ('embedding.weight') does not apply its forward factor 9.17" in message
    assert "'unembedding' ('embedding.weight') does not apply its forward factor 0.5" in message
    assert "'blocks.0.attention.qkv.weight': learning rate is 0.01, the plan says 0.005" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = smupar.parameterize(model, base=base, rule="mup", alpha_input=9.17, init_std=0.087)
    plan.settle("attention_scale")
    assert smupar.audit(model, plan, torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01)), lr=0.01) == []
