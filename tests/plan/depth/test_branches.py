"""Residual branches that a forward pass shows, and models that scale their branches themselves."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from tests.support.models import Residual

TOKENS = torch.arange(12).reshape(2, 6)


class PreNorm(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        return x + self.mlp(self.norm(x))


class PostNorm(PreNorm):
    def forward(self, x):
        return self.norm(x + self.mlp(x))


class Parallel(PreNorm):
    def forward(self, x):
        y = self.norm(x)
        return x + (self.mix(y) + self.mlp(y))


class NormAtTheEnd(PreNorm):
    def forward(self, x):
        return x + self.norm(self.mlp(x))


class LayerScale(PreNorm):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        return x + self.gamma * F.dropout(self.mlp(self.norm(x)), 0.1, self.training)


class SumInside(PreNorm):
    """The activation is a sum, too: x + x^3."""

    def forward(self, x):
        y = self.mix(self.norm(x))
        return x + self.mlp(y + y**3)


class Torch(nn.TransformerEncoderLayer):
    def __init__(self, width, depth):
        super().__init__(width, 2, 2 * width, batch_first=True)


class Scaled(PreNorm):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.factor = 1 / math.sqrt(2 * depth)

    def forward(self, x):
        return x + self.factor * self.mlp(self.norm(x))


class Raw(PreNorm):
    """What is added is no module's output."""

    def forward(self, x):
        return x + torch.tanh(self.mix(self.norm(x)))


def net(kind, width, depth):
    return Residual(width, (kind(width, depth) for _ in range(depth)), vocab=12)


def plan_of(kind, **settings):
    return smupar.make_plan(net(kind, 32, 4), base=net(kind, 16, 2), **{"example": TOKENS, **settings})


KINDS = {
    PreNorm: {"mix", "mlp.2"},
    PostNorm: {"mlp.2"},
    Parallel: {"mix", "mlp.2"},
    NormAtTheEnd: {"norm"},
    LayerScale: {"mlp.2"},
    SumInside: {"mlp.2"},
    Torch: {"self_attn", "linear2"},
}


@pytest.mark.parametrize(("kind", "ends"), KINDS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_example_shows_what_ends_a_branch(kind, ends):
    assert dict(plan_of(kind).branches) == {f"blocks.{number}.{end}": 0.5 for number in range(4) for end in ends}


def test_equal_widths_need_no_delta_for_branches():
    model, base = net(PreNorm, 16, 4), net(PreNorm, 16, 2)
    plan = smupar.make_plan(model, base=base, delta=net(PreNorm, 32, 2), example=TOKENS)
    assert len(plan.branches) == 8


class Outside(nn.Module):
    """The stream is added to outside of the blocks."""

    def __init__(self, width, depth):
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_blocks_that_are_branches_themselves_are_divided():
    plan = smupar.make_plan(Outside(32, 4), base=Outside(16, 2), example=torch.randn(2, 8))
    assert dict(plan.branches) == {f"layers.{number}.1": 0.5 for number in range(4)}


class Stage(nn.Module):
    """A block of a ResNet; the first of a stage has a projection beside its branch."""

    def __init__(self, inside, outside):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside)
        self.downsample = nn.Conv2d(inside, outside, 1) if inside != outside else None

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return F.relu(y)


class ResNet(nn.Module):
    def __init__(self, width, depths):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        sizes = [(width, width), (width, 2 * width)]
        self.stages = nn.ModuleList(
            nn.Sequential(*(Stage(inside if n == 0 else outside, outside) for n in range(depth)))
            for (inside, outside), depth in zip(sizes, depths, strict=True)
        )
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def test_stages_of_a_resnet_have_multipliers_of_their_own():
    images = torch.randn(2, 3, 4, 4)
    plan = smupar.make_plan(ResNet(16, (4, 6)), base=ResNet(8, (2, 2)), example=images)
    assert dict(plan.branches) == {
        **{f"stages.0.{number}.bn2": 0.5 for number in range(4)},
        **{f"stages.1.{number}.bn2": pytest.approx(1 / 3) for number in range(6)},
    }


def test_branch_that_no_module_returns_is_asked_for():
    with pytest.raises(ValueError, match=r"branches=\['blocks.(.|\n)*not inferred: in some block, what is added is not"):
        plan_of(Raw)
    with pytest.raises(ValueError, match="not inferred: pass example=, a batch for the model"):
        plan_of(PreNorm, example=None)


def test_named_module_that_is_not_added_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"'blocks.0.mlp.0', whose output .* does not add(.|\n)*\['blocks.\*.mix', "):
        plan_of(PreNorm, branches=["blocks.*.mix", "blocks.*.mlp.0"])
    assert len(plan_of(PreNorm, branches=["blocks.*.mix", "blocks.*.mlp"]).branches) == 8  # mlp returns what mlp.2 does


# A model's own factor for its depth


def test_own_factor_is_refused_beside_a_depth_rule():
    with pytest.raises(
        ValueError, match=r"blocks.0.factor = 0.353553 \(base: 0.5\) follows the depth(.|\n)*multipliers='base'"
    ):
        plan_of(Scaled)
    with pytest.raises(ValueError, match="depth='none'"):
        plan_of(Scaled, multipliers="own")
    assert plan_of(Scaled, depth="none").branches == ()


def test_own_factor_is_held_at_the_bases_depth():
    model = net(Scaled, 32, 4)
    plan = smupar.parameterize(model, base=net(Scaled, 16, 2), example=TOKENS, multipliers="base")
    assert {block.factor for block in model.blocks} == {0.5}
    assert any("blocks.0.factor 0.353553 -> 0.5" in note.text for note in plan.notes)
    x = torch.randn(3, 32)
    block = model.blocks[2]
    mlp = block.mlp[:2](block.norm(x))
    torch.testing.assert_close(block(x), x + 0.5 * 0.5 * block.mlp[2].forward(mlp))


def test_own_init_for_the_depth_is_named():
    torch.manual_seed(0)
    model = net(PreNorm, 32, 8)
    for block in model.blocks:
        for layer in (block.mix, block.mlp[0], block.mlp[2]):
            nn.init.normal_(layer.weight, std=0.02 / (4 if layer is block.mlp[2] else 1))  # 1 / sqrt(2 x 8)
    plan = smupar.make_plan(model, base=net(PreNorm, 16, 2), branches=["blocks.*.mlp.2"])
    (note,) = [note.text for note in plan.notes if note.kind == "own init"]
    assert note.startswith("'blocks.*.mlp.2' starts 0.2")
    plain = smupar.make_plan(net(PreNorm, 32, 8), base=net(PreNorm, 16, 2), branches=["blocks.*.mlp.2"])
    assert [note for note in plain.notes if note.kind == "own init"] == []


class Repeated(nn.Module):
    """One layer, called several times."""

    def __init__(self, width, num_layers):
        super().__init__()
        self.num_layers = num_layers
        self.embedding, self.layer, self.head = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x):
        x = self.embedding(x)
        for _ in range(self.num_layers):
            x = x + self.layer(x)
        return self.head(x)


def test_layers_that_share_their_weights_are_refused_if_depth_differs():
    base = Repeated(16, 2)
    with pytest.raises(ValueError, match=r"^num_layers is 8 in the model and 2 in the base, but no list of layers is longer"):
        smupar.make_plan(Repeated(64, 8), base=base)
    assert smupar.make_plan(Repeated(64, 8), base=base, depth="none").branches == ()
    assert smupar.make_plan(Repeated(64, 2), base=base)
