"""Fourteen mistakes that other code bases shipped with, one test each: here they cannot be made."""

import copy
import hashlib
import os
import subprocess
import sys
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


def test_mistake_01_init_reaches_the_weight_that_the_forward_pass_uses():
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


DRAW = """
import sys, hashlib, random, warnings, torch, smupar
from torch import nn
rank = int(sys.argv[1])
torch.manual_seed(1000 + rank); random.seed(rank); torch.rand(rank + 1); torch.set_num_threads(rank + 1)
make = lambda width: nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4))
warnings.simplefilter("ignore", smupar.PlanWarning)
model = make(64)
smupar.parameterize(model, base=make(8), density=1 / 4, seed=7)
print(hashlib.sha256(model[1].weight_mask.numpy().tobytes() + model[1].weight.detach().numpy().tobytes()).hexdigest())
"""


def test_mistake_02_masks_are_the_same_on_every_rank():
    # Masks drawn from the global random state after seeding it with the rank: every rank trains another network.
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DRAW, str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(rank)},
        )
        for rank in range(2)
    ]
    digests = [rank.communicate()[0].strip() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]

    def make(width):
        return nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4))

    def draw(seed):
        torch.manual_seed(5)
        model, base = make(64), make(8)
        before = torch.get_rng_state()
        smupar.parameterize(model, base=base, density=1 / 4, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)  # and the global state is left alone
        return hashlib.sha256(model[1].weight_mask.numpy().tobytes() + model[1].weight.detach().numpy().tobytes()).hexdigest()

    assert digests == [draw(7), draw(7)]
    assert draw(8) != digests[0]


def test_mistake_03_a_resumed_model_has_the_masks_and_logits_of_the_saved_one(tmp_path):
    # Masks that are not in the checkpoint: the resumed run draws others, and its logits differ.
    model, plan = mlp(seed=0)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01))
    train(model, optimizer, steps=3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    resumed, other_plan = mlp(seed=1)
    assert not torch.equal(resumed.fc2.weight_mask, model.fc2.weight_mask)
    second = torch.optim.AdamW(smupar.param_groups(resumed, other_plan, lr=0.5))
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    assert torch.equal(resumed.fc2.weight_mask, model.fc2.weight_mask)
    assert torch.equal(resumed(data()), model(data()))
    train(model, optimizer, steps=3)
    train(resumed, second, steps=3)
    assert torch.equal(resumed(data()), model(data()))
    assert not resumed.fc2.weight[~resumed.fc2.weight_mask].any()


def test_mistake_04_logits_are_the_same_in_training_evaluation_and_generation():
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


def test_mistake_05_a_foreign_loop_trains_with_the_planned_rates():
    # The LR factor kept beside the group instead of in its lr: a loop that does not know it trains with the rates of SP.
    model, plan = mlp(1, torch.float64)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01), eps=1e-20, weight_decay=0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(data(torch.float64)).sum().backward()
    optimizer.step()  # nothing in this loop has heard of smupar
    moved = {name: (parameter.detach() - before[name]).abs().max().item() for name, parameter in model.named_parameters()}
    assert moved["fc2.weight"] == pytest.approx(0.00125)
    assert {name: size for name, size in moved.items() if name != "fc2.weight"} == pytest.approx(
        dict.fromkeys(["fc1.weight", "fc1.bias", "fc2.bias", "head.weight", "head.bias"], 0.01)
    )


def test_mistake_06_nothing_hangs_on_parameters_that_a_copy_would_lose():
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


def test_mistake_07_what_the_caller_passed_is_left_alone():
    # A tensor LR divided in place for all groups, the caller's dicts changed, a division by an LR of 0.
    model, plan = mlp()
    lr, head = torch.tensor(0.01), {"params": [model.head.weight], "lr": 0.5}
    groups = smupar.param_groups(model, plan, lr=lr, weight_decay=0.1, extra=[head])
    torch.optim.AdamW(groups)
    assert lr.item() == pytest.approx(0.01)
    assert set(head) == {"params", "lr"}
    assert head["params"] == [model.head.weight]
    assert lrs(model, groups) == pytest.approx(
        {"fc1.weight": 0.01, "fc1.bias": 0.01, "fc2.weight": 0.005, "fc2.bias": 0.01, "head.bias": 0.01, "head.weight": 0.5}
    )
    at_zero = smupar.param_groups(model, plan, lr=0.0, weight_decay=0.1)
    assert sorted(group["weight_decay"] for group in at_zero) == pytest.approx([0.1, 0.2])


def test_mistake_08_a_scheduler_that_erases_the_ratios_is_told():
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


def test_mistake_09_tied_grouped_and_gated_weights_are_scaled_once_under_their_own_names():
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


def test_mistake_10_clipping_sees_kept_gradients_only():
    # Off-mask gradients counted in the norm inflate it by about 1 / sqrt(density), and clip every step too hard.
    model, _ = mlp(1 / 16)
    parameters = dict(model.named_parameters())
    # autograd.grad fires no hooks: these are the gradients of a dense model with the same weights.
    dense = dict(zip(parameters, torch.autograd.grad(model(data()).sum(), parameters.values()), strict=True))
    kept = {name: gradient.clone() for name, gradient in dense.items()}
    kept["fc2.weight"] *= model.fc2.weight_mask
    expected = torch.cat([gradient.flatten() for gradient in kept.values()]).norm().item()
    inflated = dense["fc2.weight"].norm().item() / kept["fc2.weight"].norm().item()
    assert inflated == pytest.approx(4, rel=0.2)
    model(data()).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm.item() == pytest.approx(expected, rel=1e-5)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, kept[name] * (1e-3 / expected), rtol=1e-3, atol=1e-9)
    model.fc2.weight.grad = None
    for _ in range(2):  # also when micro-batches add up
        model(data()).sum().backward()
    torch.testing.assert_close(model.fc2.weight.grad, 2 * kept["fc2.weight"])


def test_mistake_11_a_weight_off_the_mask_has_neither_value_nor_optimizer_state():
    # Regrown weights that keep stale values or moments: off the mask both are 0 at every step, so a weight that is grown
    # later starts from nothing.
    for kind, keys, options in (
        (torch.optim.AdamW, ("exp_avg", "exp_avg_sq"), {}),
        (torch.optim.SGD, ("momentum_buffer",), {"momentum": 0.9, "nesterov": True}),
    ):
        model, plan = mlp()
        optimizer = kind(smupar.param_groups(model, plan, lr=0.05, weight_decay=0.1, optimizer=kind), **options)
        mask = model.fc2.weight_mask.clone()
        for _ in range(10):
            train(model, optimizer)
            assert not model.fc2.weight[~mask].any()
            for key in keys:
                assert not optimizer.state[model.fc2.weight][key][~mask].any()
                assert optimizer.state[model.fc2.weight][key][mask].all()
        assert torch.equal(model.fc2.weight_mask, mask)


def test_mistake_12_masks_hit_their_density_exactly_and_are_never_empty():
    # Sparsity that stays short of its target, and masks that end up without a single weight.
    for density, num_kept in ((1 / 2, 2048), (0.3, 1229), (1 / 3, 1365), (0.9999, 4096), (1 / 4096, 1), (0.5 / 4096, 1)):
        model, plan = mlp(density)
        assert plan["fc2.weight"].num_kept == num_kept
        assert plan["fc2.weight"].density == pytest.approx(num_kept / 4096)
        assert int(torch.count_nonzero(model.fc2.weight)) == num_kept
    for pattern, density in (("random", 1e-4), ("fan_in", 1 / 256), ("block-16", 1 / 64), ("bernoulli", 1e-9)):
        model = MLP(64)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=r"'fc2\.weight'.*(lose every weight|keeps no weight).*raise it"):
            smupar.parameterize(model, base=MLP(8), density=density, pattern=pattern)
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())


def test_mistake_13_counts_above_two_to_the_24_are_exact():
    # Counts and row pointers that pass through float32: it has no odd whole numbers above 2^24.
    def make(width):
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(4, width, bias=False), nn.Linear(width, width), nn.Linear(width, 4))

    for density, num_kept in ((0.5, 18_000_000), (18_000_001 / 36_000_000, 18_000_001)):
        plan = smupar.make_plan(make(6000), base=make(60), density=density)
        row = plan["1.weight"]
        assert row.num_kept == num_kept
        assert row.density * 36_000_000 == num_kept
    mask = plan.draw_mask("1.weight")
    assert int(torch.count_nonzero(mask)) == 18_000_001
    row_pointers = torch.count_nonzero(mask, dim=1).cumsum(0)
    assert row_pointers[-1].item() == 18_000_001
    # As many in each row as chance gives: 3000, scattering by 39.
    assert 2700 < int(torch.count_nonzero(mask, dim=1).min()) < 3000 < int(torch.count_nonzero(mask, dim=1).max()) < 3300


def test_mistake_14_a_parameterization_that_is_not_switched_on_fails_before_step_0():
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
