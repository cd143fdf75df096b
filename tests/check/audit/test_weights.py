"""audit: silent on untouched models, and for every planted fault the right name and what to do about it."""

import copy
import math

import lion_pytorch
import pytest
import torch
from torch import nn

import smupar
from smupar.lm.config.run_config import ModelConfig
from smupar.lm.model.gpt import GPT
from tests.check.audit.audited import PATTERNS, RULES, adamw, findings, mlp, only_finding, ready, train
from tests.support.models import MLP

# Untouched models


SEEDS = [range(3), pytest.param(range(3, 20), marks=pytest.mark.slow)]


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_untouched_models_pass_for_twenty_seeds(pattern, seeds):
    for seed in seeds:
        model, plan = mlp(PATTERNS[pattern], pattern=pattern, seed=seed)
        assert smupar.audit(model, plan, adamw(model, plan), lr=0.01) == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("density", [1, 1 / 2, 1 / 16, {"fc2.weight": 1 / 8}, smupar.erk(1 / 4)], ids=str)
def test_untouched_models_pass_for_every_rule_and_density(rule, density):
    for kind in (torch.optim.AdamW, torch.optim.SGD, lion_pytorch.Lion):
        model, plan = mlp(density, rule=rule)
        optimizer = kind(smupar.param_groups(model, plan, lr=0.01, weight_decay=0.1, optimizer=kind))
        assert smupar.audit(model, plan, optimizer, lr=0.01) == []


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [48, 64, 80])
def test_untouched_models_pass_in_other_precisions(dtype, width, seeds):
    # Alphas and 16 / 48 are no numbers of bfloat16: what the layer rounds is not the factor.
    for seed in seeds:
        model, plan = mlp(1 / 4, dtype, width, seed=seed, alpha_output=1.095)
        assert model.head.smupar_factor.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert smupar.audit(model, plan, adamw(model, plan)) == []


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
def test_model_rounded_to_bfloat16_passes_after_attach(seeds):
    for seed in seeds:
        model, plan = mlp(seed=seed)
        model.bfloat16()
        smupar.attach(model, plan)
        assert smupar.audit(model, plan) == []


def test_tied_gpt_passes_in_float32_and_bfloat16():
    for dtype in (torch.float32, torch.bfloat16):
        for seed in range(5):
            model, base = (GPT(ModelConfig(width=width, depth=1, vocab_size=64)).to(dtype) for width in (96, 32))
            plan = smupar.parameterize(
                model, base=base, density=1 / 4, seed=seed, init_std=0.087, alpha_input=9.17, alpha_output=1.095
            )
            plan.settle("attention_scale")
            assert smupar.audit(model, plan, adamw(model, plan)) == []


def test_custom_init_stds_pass():
    model, plan = mlp(init_std={"head.weight": 0.02, "fc2.*": 0.5, "*": "fan_in"})
    assert smupar.audit(model, plan) == []


def test_zero_readout_passes_and_its_factor_is_still_checked():
    model, plan = mlp(init_std={"head.weight": 0.0, "*": "fan_in"})
    assert not model.head.weight.any()
    assert smupar.audit(model, plan, adamw(model, plan)) == []
    model.head.smupar_factor.fill_(1.0)
    assert only_finding(model, plan).startswith("'head' ('head.weight') multiplies its output by 1, the plan says 0.375")


def test_zero_readout_that_is_not_zero_is_found():
    model, plan = mlp(init_std={"head.weight": 0.0, "*": "fan_in"})
    nn.init.normal_(model.head.weight, std=0.01)
    assert only_finding(model, plan).startswith("'head.weight': init std is 0.0")


def test_masks_of_the_users_own_pass():
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[:, ::4] = True
    model, plan = mlp(masks={"fc2.weight": mask})
    assert smupar.audit(model, plan, adamw(model, plan)) == []


def test_pending_items_are_returned_until_settled():
    model, base = (GPT(ModelConfig(width=width, depth=1, vocab_size=64)) for width in (64, 32))
    plan = smupar.parameterize(model, base=base, density=1 / 2)
    (line,) = smupar.audit(model, plan, adamw(model, plan))
    assert line.startswith("attention_scale: ")
    assert "plan.attention_scale(head_dim)" in line
    assert plan.attention_scale(32) == 1 / 32
    assert smupar.audit(model, plan) == [line]  # reading the number sets nothing
    plan.settle("attention_scale")
    assert smupar.audit(model, plan) == []


def attention_scales(model, value):
    for block in model.blocks:
        block.attention.scale.fill_(value)


@pytest.mark.parametrize(("value", "num_left"), [(1 / 32, 0), (32**-0.5, 1), (1 / 64, 1)])
def test_attention_scale_that_modules_show_beside_their_head_size_is_seen(value, num_left):
    model, base = (GPT(ModelConfig(width=width, depth=2, vocab_size=64)) for width in (64, 32))
    plan = smupar.parameterize(model, base=base, density=1 / 2)
    before = plan.to_json()
    attention_scales(model, value)
    assert len(smupar.audit(model, plan)) == num_left
    assert plan.to_json() == before  # the audit reads the plan
    attention_scales(model.bfloat16(), value)
    smupar.attach(model, plan)
    assert len(smupar.audit(model, plan)) == num_left


def test_attention_scale_of_some_modules_only_is_left():
    model, base = (GPT(ModelConfig(width=width, depth=2, vocab_size=64)) for width in (64, 32))
    plan = smupar.parameterize(model, base=base, density=1 / 2)
    attention_scales(model, 1 / 32)
    model.blocks[1].attention.scale.fill_(32**-0.5)
    assert len(smupar.audit(model, plan)) == 1
    attention_scales(model, 1 / 32)
    del model.blocks[1].attention.scale  # kept elsewhere: out of sight
    assert len(smupar.audit(model, plan)) == 1


def test_audit_changes_nothing():
    model, plan, optimizer = ready()
    train(model)  # leaves gradients
    model.fc2.eval()
    modes = [module.training for module in model.modules()]
    values = {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    versions = [parameter._version for parameter in model.parameters()]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    rng = torch.get_rng_state()
    smupar.audit(model, plan, optimizer, lr=0.01)
    assert torch.equal(torch.get_rng_state(), rng)
    assert [module.training for module in model.modules()] == modes
    assert [parameter._version for parameter in model.parameters()] == versions
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert after.keys() == values.keys()
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert all(torch.equal(parameter.grad, gradients[name]) for name, parameter in model.named_parameters())
    assert groups == [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert not optimizer.state


# Faults in the weights


@pytest.mark.parametrize("name", ["fc1.weight", "fc2.weight", "fc3.weight", "head.weight"])
def test_layer_initialised_again_is_found(name):
    model, plan = mlp()
    with torch.no_grad():
        model.get_parameter(name).mul_(1.5)
    line = only_finding(model, plan)
    assert line.startswith(f"{name!r}: init std is ")
    assert f"the plan says {plan[name].init_std:.4g}" in line
    assert "initialise before parameterize" in line


def test_parameterization_that_was_never_switched_on_is_found():
    model = MLP(64, 2)
    plan = smupar.make_plan(model, base=MLP(16, 2), density={"fc2.weight": 1 / 2})
    lines = findings(model, plan, torch.optim.AdamW(model.parameters(), lr=0.01))
    for name in ("fc1.weight", "fc3.weight", "head.weight"):
        assert any(line.startswith(f"{name!r}: init std is ") for line in lines)
    assert "'fc2.weight' has no mask: call smupar.attach(model, plan)" in lines
    assert any(line.startswith("'head' ('head.weight') does not apply its forward factor 0.25: call") for line in lines)
    for name in ("fc2.weight", "fc3.weight"):
        assert any(line.startswith(f"{name!r}: learning rate is 0.01") for line in lines)


def test_init_left_to_torch_is_found_although_groups_attached_the_rest():
    model = MLP(64, 2)
    plan = smupar.make_plan(model, base=MLP(16, 2))
    with pytest.raises(ValueError, match=r"not parameterized: call smupar\.parameterize first"):
        adamw(model, plan)
    smupar.attach(model, plan)  # masks and factors, not values
    optimizer = adamw(model, plan)
    lines = findings(model, plan, optimizer)
    assert [line.split(":")[0] for line in lines] == ["'fc1.weight'", "'fc2.weight'", "'fc3.weight'", "'head.weight'"]
    assert all("init std" in line for line in lines)


def test_weight_that_is_not_a_number_is_found():
    model, plan = mlp()
    with torch.no_grad():
        model.fc3.weight[model.fc3.weight_mask] = math.nan
    assert any(line.startswith("'fc3.weight' holds values that are not finite") for line in findings(model, plan))


def test_model_of_another_width_is_found():
    _, plan = mlp()
    model, _ = mlp(width=128)
    lines = findings(model, plan)
    assert "'fc2.weight' has shape (128, 128), the plan (64, 64): make a plan for this model" in lines
    assert any(line.startswith("'fc1.bias' has shape (128,), the plan (64,)") for line in lines)


def test_model_with_other_names_is_found():
    _, plan = mlp()
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4))
    lines = findings(model, plan)
    assert "'fc2.weight' is not in the model: the plan is for another model, make a new plan" in lines
    assert any(line.startswith("'0.weight' is not in the plan") for line in lines)


@pytest.mark.parametrize("change", ["module", "parameter"])
def test_parameter_added_after_parameterize_is_found(change):
    model, plan, optimizer = ready()
    if change == "module":
        model.adapter = nn.Linear(64, 64, bias=False)
    else:
        model.scale = nn.Parameter(torch.ones(64))
    name = "adapter.weight" if change == "module" else "scale"
    lines = findings(model, plan, optimizer)
    assert any(line.startswith(f"{name!r} is not in the plan") and "parameterize" in line for line in lines)
    assert any(line.startswith(f"{name!r} is trained but in no optimizer group") for line in lines)
    assert all(line.startswith(repr(name)) for line in lines)


# Faults in the masks


@pytest.mark.parametrize("pattern", ["random", "bernoulli"])
def test_mask_of_another_density_is_found(pattern):
    model, plan = mlp(pattern=pattern)
    with torch.no_grad():  # half of the mask goes, with its weights, so that nothing else is wrong
        model.fc2.weight_mask[::2] = False
        model.fc2.weight.mul_(model.fc2.weight_mask)
    line = only_finding(model, plan)
    assert line.startswith("'fc2.weight': its mask keeps 0.2")
    assert "the plan says 0.5" in line
    assert "draw the masks again" in line


def test_one_weight_more_in_an_exact_mask_is_found():
    model, plan = mlp()
    model.fc3.weight_mask.view(-1)[model.fc3.weight_mask.view(-1).logical_not().nonzero()[0]] = True
    assert only_finding(model, plan).startswith("'fc3.weight': its mask keeps 0.500244 of the weights, the plan says 0.5")


def test_other_mask_of_the_same_density_is_found():
    model, plan = mlp()
    model.fc2.weight_mask = model.fc2.weight_mask.roll(1)
    assert any("'fc2.weight': " in line and "weights off the mask are not 0" in line for line in findings(model, plan))


def test_single_weight_off_the_mask_is_found():
    model, plan = mlp()
    with torch.no_grad():
        model.fc3.weight.view(-1)[model.fc3.weight_mask.view(-1).logical_not().nonzero()[0]] = 1e-6
    line = only_finding(model, plan)
    assert line.startswith("'fc3.weight': 1 weights off the mask are not 0")
    assert "multiply the weight by its mask" in line


def test_mask_that_is_gone_is_found():
    model, plan = mlp()
    del model.fc2.weight_mask
    assert only_finding(model, plan) == "'fc2.weight' has no mask: call smupar.attach(model, plan)"


def test_gradient_hooks_lost_by_deepcopy_are_found_and_attach_brings_them_back():
    model, plan = mlp()
    clone = copy.deepcopy(model)
    lines = findings(clone, plan)
    assert [line.split(":")[0] for line in lines] == ["'fc2.weight'", "'fc3.weight'"]
    assert all("gradient is not masked" in line and "smupar.attach(model, plan)" in line for line in lines)
    smupar.attach(clone, plan)
    assert smupar.audit(clone, plan) == []


def test_parameter_that_was_replaced_is_found():
    model, plan = mlp()
    model.fc2.weight = nn.Parameter(model.fc2.weight.detach().clone())
    assert only_finding(model, plan).startswith("'fc2.weight': its gradient is not masked")


# After training has begun


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),  # keeps no state from which steps could be seen
        (lion_pytorch.Lion, {}),
    ],
    ids=["AdamW", "SGD momentum", "SGD", "Lion"],
)
def test_std_is_not_checked_after_training_steps(kind, options):
    model, plan = mlp()
    groups = smupar.param_groups(model, plan, lr=0.02, weight_decay=1.0, optimizer=kind)
    optimizer = kind(groups, **options)
    smupar.audit(model, plan, optimizer)
    for _ in range(20):  # decay alone shrinks the weights by a third
        train(model, optimizer)
    assert any("init std" in line for line in findings(model, plan))  # seen where no optimizer tells why
    assert smupar.audit(model, plan, optimizer) == []


def test_other_faults_are_found_after_training_steps():
    model, plan, optimizer = ready()
    train(model, optimizer)
    with torch.no_grad():
        model.fc2.weight.add_(1e-3)
    assert only_finding(model, plan, optimizer).startswith("'fc2.weight': 2048 weights off the mask are not 0")


def test_large_embedding_passes():
    def make(width):
        return nn.Sequential(nn.Embedding(50257, width), nn.Linear(width, width), nn.Linear(width, 4))

    model = make(768)  # 38.6 million weights, whose squares drift if they are summed up in single precision
    with torch.device("meta"):
        base = make(64)
    plan = smupar.parameterize(model, base=base, density=1 / 8)
    assert smupar.audit(model, plan, adamw(model, plan)) == []


class Centred(torch.optim.AdamW):
    """An optimizer that nothing is known of, and which mixes entries."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim > 1:
                    parameter.grad -= parameter.grad.mean(1, keepdim=True)
        return super().step(closure)


def test_optimizer_that_may_mix_entries_passes_and_its_updates_are_masked(recwarn):
    model, plan = mlp()
    optimizer = Centred(smupar.param_groups(model, plan, lr=1e-3, optimizer="adamw"))
    smupar.audit(model, plan, optimizer)
    assert not recwarn.list
    train(model, optimizer)
    assert not model.fc2.weight.detach()[~model.fc2.weight_mask].any()


def test_epsilon_of_zero_is_refused_with_masks():
    model, plan = mlp()
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01), eps=0.0)
    assert "the update of a weight off the mask is 0 / 0, which is NaN" in only_finding(model, plan, optimizer)
    train(model, optimizer)
    assert model.fc2.weight.isnan().any()  # or it would be no fault
    dense, plan = mlp(density=1)
    smupar.audit(dense, plan, torch.optim.AdamW(smupar.param_groups(dense, plan, lr=0.01), eps=0.0))
