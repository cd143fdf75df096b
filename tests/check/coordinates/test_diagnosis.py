"""Planted faults, one at a time: the diagnosis must name the right cause and the right layer or group, and stay silent on the
untouched model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.check.coordinates.diagnosis import REMEDIES, diagnose
from smupar.check.coordinates.readings import DY, GridPoint
from smupar.check.coordinates.verdict import FAIL
from smupar.lm.config.run_config import ModelConfig
from smupar.lm.data.batches import read_batch
from smupar.lm.data.tokens import Tokens
from smupar.lm.model.gpt import GPT, set_attention_scale
from smupar.lm.run.step import next_token_loss
from smupar.plan.reminders import REMINDERS
from tests.check.grid import one_slope
from tests.support.models import sequential

# Any real text will do, as long as it stays the same: sizes of a few steps depend on it.
TEXT = Tokens([np.fromfile(Path(__file__).parents[2] / "fixtures" / "text.txt", dtype=np.uint8)])


def batches(num=3):
    return [read_batch(TEXT, seed=0, step=step, batch_size=8, seq_len=64) for step in range(num)]


def make_model(width):
    return GPT(ModelConfig(width=width, depth=2, head_dim=32))


def loss_fn(model, batch):
    return next_token_loss(model, batch)


def check(prepare=None, *, make=make_model, widths=(256,), densities=(1, 1 / 4), seeds=(0,), scaled=True, **settings):
    """A small check of SmuPar; ``prepare`` plants a fault after everything was set right."""

    def right_then_wrong(model, plan):
        if scaled:
            set_attention_scale(model, plan)
        if prepare is not None:
            with torch.no_grad():
                prepare(model, plan)

    if isinstance(settings.get("optimizer", type), type):
        settings = {"lr": 2**-6, **settings}
    settings = {"init_std": 0.087, "alpha_input": 9.17, "alpha_output": 1.095, "steps": 3, **settings}
    return smupar.coord_check(
        make,
        loss_fn,
        batches(settings["steps"]),
        base_width=64,
        widths=widths,
        densities=densities,
        seeds=seeds,
        prepare=right_then_wrong,
        progress=False,
        **settings,
    )


def causes(report):
    return {diagnosis.cause: diagnosis for diagnosis in report.diagnoses}


def named(report, cause):
    """The places that the only diagnosis, which must be ``cause``, names."""
    assert list(causes(report)) == [cause], report.explain()
    return causes(report)[cause].places


def adamw(change=None, *, lose=None, **settings):
    """An optimizer function; ``change`` plants a fault in its groups, ``lose`` one in the model that param_groups, which
    attaches what is missing, would repair."""

    def make(model, plan):
        groups = smupar.param_groups(model, plan, lr=2**-6, **settings)
        if change is not None:
            change(groups)
        if lose is not None:
            lose(model)
        return torch.optim.AdamW(groups)

    return make


def of(groups, role):
    return next(group for group in groups if group["name"].startswith(role))


# Untouched


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
def test_untouched_model_raises_no_alarm(seed):
    report = check(seeds=(seed,))
    assert report.verdicts == {"smupar": "pass"}, report.explain()
    assert report.diagnoses == []
    assert report.ok


def test_untouched_model_raises_no_alarm_with_a_scheduler_and_independent_decay():
    report = check(
        optimizer=adamw(weight_decay=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    )
    assert report.ok, report.explain()
    assert report.diagnoses == []


# Weights


def test_wrong_init_of_one_layer_is_named():
    report = check(lambda model, plan: model.blocks[1].mlp.up.weight.mul_(2))
    assert named(report, "init") == ("blocks.1.mlp.up.weight",)
    assert "init not corrected" in report.explain()
    assert not report.ok


def test_init_of_standard_parameterization_is_named_in_every_hidden_layer():
    def standard(model, plan):
        for row in plan:
            if row.role == "hidden":
                weight = model.get_parameter(row.name)
                weight.mul_(0.087 / row.init_std)

    places = named(check(standard), "init")
    assert set(places) == {
        f"blocks.{i}.{name}.weight"
        for i in (0, 1)
        for name in ("attention.qkv", "attention.out", "mlp.gate", "mlp.up", "mlp.down")
    }


@pytest.mark.parametrize("fault", ["init", "lr"])
def test_embedding_scaled_like_a_hidden_weight_is_named(fault):
    if fault == "init":
        report = check(lambda model, plan: model.embedding.weight.mul_(plan["embedding.weight"].width_out ** -0.5))
    else:

        def as_hidden(model, plan):
            row, rest = plan["embedding.weight"], smupar.param_groups(model, plan, lr=2**-6)
            own = {"params": [model.embedding.weight], "lr": 2**-6 / float(row.width_out), "name": "embedding"}
            kept = [{**group, "params": [p for p in group["params"] if p is not model.embedding.weight]} for group in rest]
            return torch.optim.AdamW([{**own, "lr_factor": 1.0, "family": "adam"}, *kept])

        report = check(optimizer=as_hidden)
    assert named(report, "embedding as hidden") == ("embedding.weight" if fault == "init" else "embedding",)
    assert "embedding scaled like a hidden weight" in report.explain()


def test_embedding_given_the_role_hidden_is_named():
    report = check(roles={"embedding.weight": "hidden"}, densities=(1, 1 / 2))
    assert "embedding.weight" in causes(report)["embedding as hidden"].places


# Masks


def test_second_mask_is_named():
    def mask_again(model, plan):
        weight = model.blocks[0].attention.qkv.weight
        weight.mul_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5)

    assert named(check(mask_again), "mask density") == ("blocks.0.attention.qkv.weight",)


def test_mask_of_another_density_is_named():
    def denser(model, plan):
        if plan["blocks.0.mlp.down.weight"].masked:
            model.blocks[0].mlp.down.weight_mask.fill_(True)

    places = causes(check(denser))["mask density"].places
    assert places == ("blocks.0.mlp.down.weight",)


def test_lost_gradient_hooks_are_named_as_moving_off_mask_weights():
    def lose(model):
        (model.blocks[0].attention.out.weight._post_accumulate_grad_hooks or {}).clear()  # a dense one has none

    report = check(optimizer=adamw(lose=lose))
    assert named(report, "off-mask weights") == ("blocks.0.attention.out.weight",)


def test_optimizer_that_moves_off_mask_weights_is_named():
    class AdamW(torch.optim.AdamW):
        """Adds a little to every weight, although its name says that updates stay where the gradient is."""

        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1e-6)

    report = check(optimizer=lambda model, plan: AdamW(smupar.param_groups(model, plan, lr=2**-6)))
    assert "blocks.0.attention.qkv.weight" in causes(report)["off-mask weights"].places


def test_too_few_weights_per_neuron_is_noted():
    report = check(widths=(64,), densities=(1, 1 / 16))
    assert "thin" in causes(report)
    assert "too few weights per neuron for the rule" in report.explain()


def test_thin_layers_are_the_cause_of_a_failure_that_nothing_else_explains():
    tokens = [torch.randint(32, (16,), generator=torch.Generator().manual_seed(step)) for step in range(4)]
    report = smupar.coord_check(
        lambda width: nn.Sequential(nn.Embedding(32, width), *sequential(width, 2, num_in=width, num_out=32)),
        lambda model, batch: F.cross_entropy(model(batch), batch.roll(1)),
        tokens,
        base_width=64,
        widths=(64,),
        densities=(1 / 16, 1 / 32),  # 4 and 2 weights per neuron
        steps=4,
        seeds=8,
        lr=2**-7,
        progress=False,
    )
    assert report.verdicts == {"smupar": FAIL}
    (diagnosis,) = report.diagnoses
    assert diagnosis.cause == "too thin"
    assert "likely cause: too few weights per neuron" in report.explain()
    assert "keep fewer than 16 weights per neuron" in diagnosis.evidence


def test_layers_with_few_inputs_are_the_cause_of_a_failure_over_width():
    """As the first layers of MobileNet, which have 8 inputs at one width and 32 at the other."""

    def planned(width):
        layers = nn.Linear(8, width // 8), nn.Linear(width // 8, width), nn.Linear(width, width), nn.Linear(width, 10)
        return smupar.make_plan(nn.Sequential(*layers), base=nn.Sequential(*(nn.Linear(*size) for size in SIZES)))

    def cause_at(*places):
        slopes = [
            replace(one_slope(-0.5, 0.05), axis="width", width=None, density=1.0, place=place, quantity=DY, verdict=FAIL)
            for place in places
        ]
        plans = {GridPoint("smupar", width, 1.0, None): planned(width) for width in (128, 256)}
        (diagnosis,) = diagnose("smupar", slopes, {}, plans)
        return diagnosis

    assert cause_at("1").cause == "too thin"
    assert "'1.weight' has 16 weights per neuron at width 128, density 1, and needs 64" in cause_at("1").evidence
    assert cause_at("2").cause == cause_at("1", "2").cause == "elsewhere"


SIZES = ((8, 8), (8, 64), (64, 64), (64, 10))


# Learning rates


def test_rate_of_one_group_is_named():
    report = check(optimizer=adamw(lambda groups: of(groups, "hidden").update(lr=2**-5)))
    places = causes(report)["LR"].places
    assert len(causes(report)) == 1
    assert all("hidden" in place or "embedding" in place for place in places)
    assert "LR not corrected" in report.explain()


def test_optimizer_without_groups_is_named_with_the_hidden_weights():
    places = named(check(optimizer=lambda model, plan: torch.optim.AdamW(model.parameters(), lr=2**-6)), "LR")
    assert "blocks.0.attention.qkv.weight" in places
    assert "norm.weight" not in places


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3, eta_min=2**-8),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2**-6, total_steps=10),
    ],
    ids=["cosine", "one cycle"],
)
def test_scheduler_that_erases_ratios_is_named(scheduler):
    report = check(scheduler=scheduler)
    places = named(report, "scheduler")
    assert any("hidden" in place for place in places)
    assert "LR erased by a scheduler" in report.explain()


def test_coupled_decay_is_noted_with_its_group():
    report = check(optimizer=adamw(weight_decay=0.1, decay="coupled"))
    places = named(report, "decay")
    assert all(place.startswith("hidden") for place in places)
    assert "decay coupled" in report.explain()


def test_rate_far_too_high_is_told():
    report = check(lr=1e6, steps=3, optimizer=torch.optim.SGD)
    assert "diverged" in causes(report), report.explain()


# Forward


def test_missing_attention_scale_is_named():
    report = check(scaled=False)
    assert list(causes(report)) == ["attention scale"]
    assert "plan.attention_scale(head_dim)" in report.explain()


class Scaled(nn.Module):
    """Multiplies its embedding by the root of the width."""

    def __init__(self, width):
        super().__init__()
        self.scale = width**0.5
        self.table, self.mix, self.head = nn.Embedding(256, width), nn.Linear(width, width), nn.Linear(width, 256)

    def forward(self, ids):
        return self.head(torch.relu(self.mix(self.table(ids) * self.scale)))


def test_number_that_follows_the_width_is_named():
    report = check(make=Scaled, scaled=False)
    assert list(causes(report)) == ["multipliers"]
    assert "multipliers='base'" in report.explain()


def test_every_reminder_of_a_plan_has_a_remedy():
    assert {name.replace("_", " ") for name in REMINDERS} <= REMEDIES.keys()


@pytest.mark.parametrize(("path", "cause"), [("unembedding", "output factor"), ("embedding", "input factor")])
def test_lost_forward_factor_is_named(path, cause):
    def lose(model):
        module = model.get_submodule(path)
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
        module._forward_hooks.clear()

    report = check(optimizer=adamw(lose=lose))
    assert named(report, cause) == (path,)


class ByHand(nn.Module):
    """Logits made with the embedding, out of reach of any hook."""

    def __init__(self, width):
        super().__init__()
        self.gpt = make_model(width)
        self.gpt.unembedding = nn.Identity()

    def forward(self, ids):
        return F.linear(self.gpt(ids), self.gpt.embedding.weight)


def test_output_factor_that_was_settled_but_not_applied_shows_in_the_slopes():
    report = check(
        lambda model, plan: plan.settle("output_factor"), make=ByHand, widths=(64, 256), densities=(1,), seeds=(0, 1, 2)
    )
    assert list(causes(report)) == ["output factor"], report.explain()
    assert "grad X" in report.explain()


class Uncalled(GPT):
    """Has a readout, and uses its weight alone."""

    def forward(self, tokens, cache=None):
        return F.linear(self.features(tokens, cache), self.unembedding.weight)


def test_readout_that_is_never_called_is_noted():
    report = check(make=lambda width: Uncalled(ModelConfig(width=width, depth=2, head_dim=32)))
    assert named(report, "uncalled") == ("unembedding",)
    assert "the forward pass never calls these layers" in report.explain()


def test_wrong_layer_of_a_failing_slope_comes_with_its_direction():
    def weaker_when_wider(model, plan):
        # Not in any weight: a layer norm whose gain falls with the width, which no audit compares.
        model.blocks[1].norm_mlp.weight.fill_(64 / model.blocks[1].norm_mlp.weight.numel())

    report = check(weaker_when_wider, widths=(64, 256), densities=(1,), seeds=(0, 1, 2))
    assert not report.ok
    assert "shrinks with width" in report.explain()
    assert "blocks.1.mlp" in report.explain()


def test_fault_inside_attention_is_not_blamed_on_a_scale_that_is_set():
    def weaker_when_wider(model, plan):
        for block in model.blocks:
            block.norm_attention.weight.fill_(64 / block.norm_attention.weight.numel())

    report = check(weaker_when_wider, widths=(64, 256), densities=(1,), seeds=(0, 1, 2))
    failing = [slope.place for slope in report.slopes if slope.verdict == FAIL and slope.step == 1]
    assert failing
    assert all("attention" in place for place in failing)
    assert list(causes(report)) == ["elsewhere"], report.explain()
