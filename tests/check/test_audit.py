"""audit: silent on untouched models, and for every planted fault the right name and what to do about it."""

import copy
import math

import lion_pytorch
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import smupar
from smupar.lm.config.run import ModelConfig
from smupar.lm.model.gpt import GPT
from smupar.model.parameterize import has_factor_hook
from tests.models import MLP

RULES = ("sp", "mup", "smupar", "smupar-init-only", "smupar-lr-only")
PATTERNS = {
    "random": 1 / 4,
    "bernoulli": 1 / 4,
    "fan_in": 1 / 4,
    "2:4": 1 / 2,
    "2:4-transposable": 1 / 2,
    "block-16": 1 / 2,
    "neuron": 1 / 2,
}


def mlp(density=1 / 2, dtype=torch.float32, width=64, **settings):
    torch.manual_seed(0)  # biases keep the values they were built with
    model = MLP(width, 2).to(dtype)
    settings = {"alpha_input": 9.17, "alpha_output": 1.5, **settings}
    return model, smupar.parameterize(model, base=MLP(16, 2), density=density, **settings)


def adamw(model, plan, lr=0.01, **options):
    return torch.optim.AdamW(smupar.param_groups(model, plan, lr=lr, weight_decay=0.1, **options))


def ready(*args, **settings):
    model, plan = mlp(*args, **settings)
    return model, plan, adamw(model, plan)


def train(model, *optimizers):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    model(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def findings(model, plan, optimizer=None, **options):
    with pytest.raises(smupar.AuditError) as error:
        smupar.audit(model, plan, optimizer, **options)
    assert isinstance(error.value, ValueError)
    lines = [str(finding) for finding in error.value.findings]
    assert all(line in str(error.value) for line in lines[:20])
    return lines


def only_finding(model, plan, optimizer=None, **options):
    (line,) = findings(model, plan, optimizer, **options)
    return line


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


def test_mask_of_another_density_is_found():
    model, plan = mlp()
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


def test_bernoulli_mask_of_another_density_is_found():
    model, plan = mlp(pattern="bernoulli")
    with torch.no_grad():
        model.fc2.weight_mask[::2] = False
        model.fc2.weight.mul_(model.fc2.weight_mask)
    assert only_finding(model, plan).startswith("'fc2.weight': its mask keeps 0.2")


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


# Faults in the forward pass


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


# Faults in the optimizer


def test_optimizer_of_all_parameters_is_found():
    model, plan = mlp()
    lines = findings(model, plan, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert [line.split(":")[0] for line in lines] == ["'fc2.weight'", "'fc3.weight'"]
    assert all("learning rate is 0.01, the plan says 0.005" in line for line in lines)
    assert all("smupar.param_groups(model, plan, lr=...)" in line for line in lines)


def test_optimizer_of_all_parameters_is_found_under_a_warm_up_from_zero():
    model, plan = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    lines = findings(model, plan, optimizer)
    assert [line.split(":")[0] for line in lines] == ["'fc2.weight'", "'fc3.weight'"]


def test_groups_of_another_family_are_found():
    model, plan = mlp()
    line = only_finding(model, plan, torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01, optimizer="sgd")))
    assert "sgd family" in line
    assert "AdamW" in line
    assert "optimizer='adamw' to param_groups" in line
    line = only_finding(model, plan, torch.optim.SGD(smupar.param_groups(model, plan, lr=0.01)))
    assert "adam family" in line
    assert "optimizer='sgd' to param_groups" in line


def test_one_group_with_twice_its_lr_is_found_and_named():
    for doubled in range(3):
        model, plan = mlp({"fc2.weight": 1 / 8, "fc3.weight": 1 / 2})
        optimizer = adamw(model, plan)
        names = [group["name"] for group in optimizer.param_groups]
        assert len(names) == 3
        optimizer.param_groups[doubled]["lr"] *= 2
        line = only_finding(model, plan, optimizer)
        assert [name for name in names if repr(name) in line] == [names[doubled]]


def test_one_group_with_twice_its_lr_before_its_scheduler_is_found():
    model, plan, optimizer = ready()
    optimizer.param_groups[1]["lr"] *= 2
    lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # lr is 0 now; what it will be is in initial_lr
    lines = findings(model, plan, optimizer)
    assert [line.split(":")[0] for line in lines] == ["'fc2.weight'", "'fc3.weight'"]
    assert all("learning rate is 0.01, the plan says 0.005" in line for line in lines)


def test_scheduler_that_erased_the_ratios_is_found():
    model, plan, optimizer = ready()
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    line = only_finding(model, plan, optimizer)
    assert "'hidden, LR x 0.5, width 4, density 0.5'" in line
    assert "give OneCycleLR max_lr=[g['lr'] for g in optimizer.param_groups]" in line


def test_schedulers_that_multiply_pass():
    model, plan = mlp()
    for make in (
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 10),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.01),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [group["lr"] for group in optimizer.param_groups], 10),
    ):
        optimizer = adamw(model, plan)
        scheduler = make(optimizer)
        assert smupar.audit(model, plan, optimizer) == []
        # The lr and initial_lr of one cycle are its start; the rate that was asked for is its max_lr.
        if not isinstance(scheduler, lr_scheduler.LinearLR):
            assert smupar.audit(model, plan, optimizer, lr=0.01) == []


def test_lr_checks_the_base_rate():
    model, plan = mlp()
    optimizer = adamw(model, plan, lr=0.02)
    assert smupar.audit(model, plan, optimizer) == []
    assert smupar.audit(model, plan, optimizer, lr=0.02) == []
    lines = findings(model, plan, optimizer, lr=0.01)
    assert len(lines) == len(plan)
    assert "'fc2.weight': learning rate is 0.01, the plan says 0.005 (base 0.01 x 0.5, adam family)" in "\n".join(lines)


def test_tensor_lrs_pass_and_are_checked():
    model, plan = mlp()
    optimizer = adamw(model, plan, lr=torch.tensor(0.01))
    assert smupar.audit(model, plan, optimizer, lr=0.01) == []
    optimizer.param_groups[1]["lr"].mul_(2)
    assert "'hidden, LR x 0.5, width 4, density 0.5'" in only_finding(model, plan, optimizer)


def test_parameter_missing_from_the_optimizer_is_found():
    model, plan = mlp()
    groups = smupar.param_groups(model, plan, lr=0.01)
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not model.fc3.bias]
    line = only_finding(model, plan, torch.optim.AdamW(groups))
    assert line.startswith("'fc3.bias' is trained but in no optimizer group")
    assert "param_groups" in line or "requires_grad" in line  # what to do about it


def test_frozen_parameter_need_not_be_in_the_optimizer():
    model, plan = mlp()
    model.fc3.weight.requires_grad_(False)
    assert smupar.audit(model, plan, adamw(model, plan)) == []


def test_parameter_in_two_optimizers_is_found():
    model, plan = mlp()
    muon = torch.optim.Muon(smupar.param_groups(model, plan, lr=0.01, optimizer="muon", only="hidden"))
    smupar.attach(model, plan, muon)
    everything = adamw(model, plan)  # only="rest" was forgotten
    lines = findings(model, plan, [muon, everything])
    assert any("fc2.weight" in line for line in lines)


def test_adafactor_is_found():
    model, plan = mlp()
    for groups in (model.parameters(), smupar.param_groups(model, plan, lr=0.01)):
        line = only_finding(model, plan, torch.optim.Adafactor(groups))
        assert "Adafactor" in line
        assert "Use AdamW or SGD" in line
        assert "measured updates" in line


def test_groups_that_name_an_unknown_family_are_found():
    class Mine(torch.optim.AdamW):
        pass

    model, plan = mlp()
    optimizer = Mine(smupar.param_groups(model, plan, lr=0.01))
    for group in optimizer.param_groups:
        group["family"] = "mine"
    assert "no learning-rate rule is known for optimizer 'Mine'" in only_finding(model, plan, optimizer)


def test_unknown_optimizer_is_found_unless_its_groups_name_a_family():
    class Signum(torch.optim.SGD):
        """An optimizer of the user's own."""

    model, plan = mlp()
    line = only_finding(model, plan, Signum(model.parameters(), lr=0.01))
    assert "'Signum'" in line
    assert "optimizer='adamw'" in line
    own = Signum(smupar.param_groups(model, plan, lr=0.01, optimizer="adamw"))
    assert smupar.audit(model, plan, own, lr=0.01) == []
    own.param_groups[1]["lr"] *= 2
    assert "'hidden, LR x 0.5, width 4, density 0.5'" in only_finding(model, plan, own)


def muon_and_adamw(model, plan):
    muon = torch.optim.Muon(smupar.param_groups(model, plan, lr=0.02, optimizer="muon", only="hidden"))
    return [muon, adamw(model, plan, only="rest")]


@pytest.mark.parametrize("attached", [False, True])
def test_muon_passes_with_and_without_attach(attached):
    model, plan = mlp()
    optimizers = muon_and_adamw(model, plan)
    if attached:
        smupar.attach(model, plan, optimizers)
    assert smupar.audit(model, plan, optimizers) == []


def test_muon_that_sizes_its_update_in_another_way_is_found():
    model, plan = mlp(1)
    optimizers = muon_and_adamw(model, plan)
    for group in optimizers[0].param_groups:
        group["adjust_lr_fn"] = "match_rms_adamw"
    assert only_finding(model, plan, optimizers).startswith("Muon with adjust_lr_fn='match_rms_adamw'")


def test_infinite_weight_on_the_mask_is_not_off_it():
    model, plan = mlp()
    place = model.fc2.weight_mask.nonzero()[0]
    with torch.no_grad():
        model.fc2.weight[tuple(place)] = math.inf
    assert not any("off the mask" in line for line in findings(model, plan))


def test_dense_muon_passes():
    model, plan = mlp(1)
    assert smupar.audit(model, plan, muon_and_adamw(model, plan)) == []


def test_muon_with_other_than_hidden_weights_is_found():
    model, plan = mlp(1)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]
    line = only_finding(model, plan, optimizers)
    assert "not hidden weights" in line
    assert "only='hidden'" in line


def test_every_optimizer_of_a_list_is_checked():
    model, plan = mlp()
    hidden, rest = adamw(model, plan, only="hidden"), adamw(model, plan, only="rest")
    assert smupar.audit(model, plan, [hidden, rest], lr=0.01) == []
    lines = findings(model, plan, hidden)
    assert len(lines) == len(plan) - 2
    assert all("in no optimizer group" in line for line in lines)
    sgd = torch.optim.SGD(smupar.param_groups(model, plan, lr=0.01, only="rest"))
    assert "adam family but given to SGD" in only_finding(model, plan, [hidden, sgd])


def test_all_faults_are_told_at_once():
    model, plan = mlp()
    with torch.no_grad():
        model.fc1.weight.mul_(1.5)
        model.fc3.weight.add_(0.1)
    model.head.smupar_factor.fill_(2.0)
    lines = "\n".join(findings(model, plan, torch.optim.Adafactor(model.parameters())))
    for part in ("'fc1.weight': init std", "'fc3.weight': 2048 weights off the mask", "'head' ('head.weight')", "Adafactor"):
        assert part in lines


def test_passed_audit_leaves_the_guard_for_schedulers_that_come_later():
    model, plan, optimizer = ready()
    smupar.audit(model, plan, optimizer)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.005)
    train(model, optimizer)
    scheduler.step()
    with pytest.warns(smupar.LRRatioWarning, match=r"hidden, LR x 0\.5"):
        train(model, optimizer)


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


def test_decay_given_to_the_optimizer_alone_is_found():
    model, plan = mlp()
    text = only_finding(model, plan, torch.optim.AdamW(smupar.param_groups(model, plan, lr=0.01), weight_decay=0.2))
    assert "weight_decay=0.2 was given to AdamW, where it has no effect" in text
    assert "pass it to param_groups(..., weight_decay=...)" in text
    groups = smupar.param_groups(model, plan, lr=0.01, weight_decay=0.2)
    assert smupar.audit(model, plan, torch.optim.AdamW(groups, weight_decay=0.2)) == []


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
