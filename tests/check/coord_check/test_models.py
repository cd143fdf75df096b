"""What the check says of models that are right and wrong: a GPT, MLPs, CNNs, patterns, allocations."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from smupar.check.coordinates.readings import DY, JUDGED, Y
from smupar.check.coordinates.verdict import FAIL, PASS, overall
from smupar.lm.config.run_config import ModelConfig
from smupar.lm.data.batches import read_batch, split, standard_library
from smupar.lm.model.gpt import GPT, Attention, set_attention_scale
from smupar.lm.run.step import next_token_loss
from tests.check.grid import CNN, MLP, batches_of, check, slope_of


class Bottleneck(nn.Module):
    """Layers of such different shapes that ERK keeps ``squeeze`` dense while it prunes the others."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.squeeze = nn.Linear(width, width // 8)
        self.expand = nn.Linear(width // 8, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = F.relu(self.first(x))
        for layer in (self.up, self.down, self.squeeze, self.expand):
            x = F.relu(layer(x))
        return self.head(x)


class GeluMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class GeluTransformer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(ModelConfig(width=width))
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = GeluMLP(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(self.norm_attention(x))
        return self.head(self.norm(x + self.mlp(self.norm_mlp(x))))


GPT_SETTINGS = {"init_std": 0.087, "alpha_input": 9.17, "alpha_output": 1.095, "prepare": set_attention_scale}


def gpt_check(*, steps=3, seeds=3, batch_size=4, seq_len=32, make_model=None, **changes):
    text, _ = split(standard_library())
    return smupar.coord_check(
        make_model or (lambda width: GPT(ModelConfig(width=width, depth=2))),
        next_token_loss,
        [read_batch(text, seed=0, step=step, batch_size=batch_size, seq_len=seq_len) for step in range(steps)],
        steps=steps,
        seeds=seeds,
        progress=False,
        **{"base_width": 64, "widths": (256,), **GPT_SETTINGS, **changes},
    )


@pytest.fixture(scope="module")
def gpt_over_density():
    # SP's first attention block measures 1.13 on 32 tokens and 1.09 on 64: the longer ones leave a margin to 1.15.
    return gpt_check(rules=("sp", "mup", "smupar"), densities=(1, 1 / 4, 1 / 16), seq_len=64)


def hidden_and_blocks(report, rule, quantity, *, step=1):
    found = [
        slope
        for slope in report.slopes
        if slope.rule == rule and slope.quantity == quantity and slope.step == step and slope.role in ("hidden", "block")
    ]
    assert found
    return found


@pytest.mark.parametrize("rule", ["sp", "mup"])
def test_gpt_slopes_at_step_1_are_the_papers_without_density_correction(gpt_over_density, rule):
    for block in ("blocks.0", "blocks.1"):
        assert slope_of(gpt_over_density, rule, f"{block}.attention") == pytest.approx(1.0, abs=0.15)
        assert slope_of(gpt_over_density, rule, f"{block}.mlp") == pytest.approx(1.5, abs=0.15)
        for layer in ("attention.qkv", "mlp.gate", "mlp.up"):
            assert slope_of(gpt_over_density, rule, f"{block}.{layer}") == pytest.approx(0.5, abs=0.1)


def test_gpt_slopes_at_step_1_are_flat_under_smupar(gpt_over_density):
    found = [
        slope for slope in gpt_over_density.slopes if slope.rule == "smupar" and slope.step == 1 and slope.quantity in JUDGED
    ]
    assert len(found) > 30
    for slope in found:
        assert abs(slope.slope) < 0.2, slope


def test_gpt_later_slopes_have_the_sign_of_the_paper(gpt_over_density):
    for rule in ("sp", "mup"):
        for slope in hidden_and_blocks(gpt_over_density, rule, Y, step=3):
            assert slope.slope > 0.3, slope


def test_gpt_over_density_passes_under_smupar_and_fails_under_sp_and_mup(gpt_over_density):
    assert gpt_over_density.verdicts == {"sp": FAIL, "mup": FAIL, "smupar": PASS}
    assert gpt_over_density.ok  # SP and muP are baselines beside SmuPar
    for rule in ("sp", "mup"):
        for quantity in JUDGED:
            assert FAIL in {
                slope.verdict for slope in gpt_over_density.slopes if (slope.rule, slope.quantity) == (rule, quantity)
            }


def test_gpt_over_width_fails_under_sp_and_never_under_smupar():
    report = gpt_check(rules=("sp", "smupar"), widths=(64, 128, 256), steps=2)
    assert report.verdicts["sp"] == FAIL
    assert FAIL not in {slope.verdict for slope in report.slopes if slope.rule == "smupar"}


def test_gelu_mlp_block_has_slope_1_without_density_correction():
    report = gpt_check(
        make_model=GeluTransformer, rules=("sp", "mup", "smupar"), densities=(1, 1 / 4, 1 / 16), steps=1, seeds=2
    )
    for rule in ("sp", "mup"):
        assert slope_of(report, rule, "mlp") == pytest.approx(1.0, abs=0.15)
        assert slope_of(report, rule, "attention") == pytest.approx(1.0, abs=0.15)
        assert slope_of(report, rule, "mlp.up") == pytest.approx(0.5, abs=0.1)
    assert slope_of(report, "smupar", "mlp") == pytest.approx(0.0, abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_gpt_over_density_at_full_size(optimizer):
    report = gpt_check(
        rules=("sp", "mup", "smupar"),
        densities=(1, 1 / 2, 1 / 4, 1 / 8, 1 / 16),
        steps=10,
        batch_size=8,
        seq_len=64,
        optimizer=optimizer,
        lr=2**-6 if optimizer is torch.optim.AdamW else 0.1,
    )
    assert report.verdicts == {"sp": FAIL, "mup": FAIL, "smupar": PASS}, report.explain()


@pytest.mark.slow
@pytest.mark.parametrize("density", [1, 1 / 4])
def test_gpt_over_width_at_full_size(density):
    report = gpt_check(
        rules=("sp", "smupar"), widths=(64, 128, 256, 512), densities=(density,), steps=10, batch_size=8, seq_len=64
    )
    assert report.verdicts == {"sp": FAIL, "smupar": PASS}, report.explain()


PATTERNS = {
    "2:4": {"pattern": "2:4", "densities": (1, 1 / 2)},
    "fan_in": {"pattern": "fan_in", "densities": (1, 1 / 4, 1 / 16)},
    "erk": {"allocation": smupar.erk, "densities": (1, 1 / 4, 1 / 16)},
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gpt_passes_under_smupar_with_other_patterns(pattern):
    report = gpt_check(steps=2, **PATTERNS[pattern])
    assert report.verdicts == {"smupar": PASS}, report.explain()


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gpt_patterns_at_full_size(pattern):
    report = gpt_check(rules=("sp", "mup", "smupar"), steps=10, batch_size=8, seq_len=64, **PATTERNS[pattern])
    assert report.verdicts == {"sp": FAIL, "mup": FAIL, "smupar": PASS}, report.explain()


def overall_density(plan):
    hidden = [row for row in plan if row.role == "hidden"]
    return sum(row.num_kept for row in hidden) / sum(math.prod(row.shape) for row in hidden)


def one_init_for_all(model, plan):
    """Each hidden weight as if its density were that of the whole model."""
    overall = overall_density(plan)
    with torch.no_grad():
        for row in plan:
            if row.role == "hidden":
                model.get_parameter(row.name).mul_(math.sqrt(float(row.density) / overall))


def one_lr_for_all(model, plan):
    rate = 2**-8 / overall_density(plan)  # width is the base width here
    hidden = [model.get_parameter(row.name) for row in plan if row.role == "hidden"]
    rest = [model.get_parameter(row.name) for row in plan if row.role != "hidden"]
    return torch.optim.AdamW([{"params": hidden, "lr": rate}, {"params": rest, "lr": 2**-8}], weight_decay=0.0)


def test_erk_passes_with_each_layers_own_density_and_fails_with_one_correction_for_all():
    settings = {
        "batches": batches_of(3, (16,), num_classes=10, size=64),
        "base_width": 256,
        "widths": (256,),
        "densities": (1, 1 / 2, 1 / 4),
        "allocation": smupar.erk,
        "steps": 3,
        "seeds": 5,
        "lr": 2**-8,
    }
    right = check(Bottleneck, **settings)
    squeezed = right.plans["smupar", 256, 1 / 4, None]
    assert squeezed["squeeze.weight"].density > 3 * squeezed["up.weight"].density
    assert right.verdicts == {"smupar": PASS}, right.explain()

    wrong = check(Bottleneck, **{**settings, "lr": None}, prepare=one_init_for_all, optimizer=one_lr_for_all)
    # The audit knows as well; here the sizes themselves must show it.
    assert overall(wrong.slopes) == FAIL
    failing = {(slope.place, slope.quantity) for slope in wrong.slopes if slope.verdict == FAIL and slope.step == 1}
    assert {("squeeze", Y), ("squeeze", DY)} <= failing


LRS = {torch.optim.AdamW: 2**-8, torch.optim.SGD: 0.1}


OPTIMIZERS = pytest.mark.parametrize("optimizer", LRS)


RULES = ("sp", "mup", "smupar")


# Over width 5 seeds leave the readout's dY under SGD undecided (-0.15 +- 0.20 at step 1).
SEEDS = {torch.optim.AdamW: 5, torch.optim.SGD: 8}


def mlp_check(optimizer, **changes):
    settings = {"base_width": 64, "densities": (1,), "steps": 5, "seeds": SEEDS[optimizer], "rules": RULES, **changes}
    return check(MLP, batches=batches_of(5, (16,), num_classes=10, size=64), optimizer=optimizer, lr=LRS[optimizer], **settings)


def cnn_check(optimizer, **changes):
    settings = {"base_width": 64, "densities": (1,), "steps": 3, "seeds": SEEDS[optimizer], "rules": RULES, **changes}
    batches = batches_of(3, (3, 8, 8), num_classes=10, size=16)
    return check(CNN, batches=batches, optimizer=optimizer, lr=LRS[optimizer], **settings)


SMUPAR_ALONE = {"sp": FAIL, "mup": FAIL, "smupar": PASS}
GRIDS = {
    "mlp, density": (mlp_check, {"widths": (256,), "densities": (1, 1 / 4, 1 / 16)}, SMUPAR_ALONE),
    "mlp, width": (mlp_check, {"widths": (64, 128, 256, 512)}, {"sp": FAIL, "mup": PASS, "smupar": PASS}),
    "sparse mlp, width": (
        mlp_check,
        {"widths": (64, 128, 256, 512), "densities": (1 / 4,), "rules": ("sp", "smupar")},
        {"sp": FAIL, "smupar": PASS},
    ),
    "cnn, density": (cnn_check, {"widths": (128,), "densities": (1, 1 / 4, 1 / 16)}, SMUPAR_ALONE),
    "cnn, width": (cnn_check, {"widths": (64, 128, 256), "rules": ("sp", "smupar")}, {"sp": FAIL, "smupar": PASS}),
}


@OPTIMIZERS
@pytest.mark.parametrize(("checked", "grid", "verdicts"), GRIDS.values(), ids=GRIDS)
def test_smupar_passes_over_width_and_density_where_others_fail(checked, grid, verdicts, optimizer):
    report = checked(optimizer, **grid)
    assert report.verdicts == verdicts, report.explain()


@pytest.mark.slow
@OPTIMIZERS
@pytest.mark.parametrize("density", [1, 1 / 4])
def test_cnn_over_width_at_full_size(optimizer, density):
    report = cnn_check(optimizer, widths=(64, 128, 256, 512), densities=(density,), rules=("sp", "smupar"), seeds=10)
    assert report.verdicts == {"sp": FAIL, "smupar": PASS}, report.explain()
