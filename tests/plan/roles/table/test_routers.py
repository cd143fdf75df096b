"""Routers of mixtures of experts: which weights are routers, their numbers, and that they stay dense."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from tests.plan.roles.nets import refusal, roles, suggested
from tests.support.models import mixture, mixture_of

FEATURES = torch.linspace(-1, 1, 16 * 8).reshape(16, 8)


def plan_of(make, **settings):
    return smupar.make_plan(make(64), base=make(16), **{"example": FEATURES, "density": 0.25, **settings})


def around(block):
    return lambda width: nn.Sequential(nn.Linear(8, width), block(width), nn.LayerNorm(width), nn.Linear(width, 5))


def test_router_has_the_numbers_of_an_output_weight_and_stays_dense():
    """At 4 times the base's width: std (1 / sqrt(16)) / 4, and rates / 4. Hidden weights keep a quarter: m = 4 / 4."""
    plan = plan_of(mixture)
    row, expert = plan["1.gate.weight"], plan["1.experts.0.0.weight"]
    assert (row.role, row.width_in, row.width_out, row.density, row.density_mult) == ("router", 4, 1, 1, 1)
    assert (row.init_std, row.lr_factors, row.eps_factor, row.forward) == (1 / 16, {"adam": 1 / 4, "sgd": 1 / 4}, 1, ())
    assert (expert.role, expert.density, expert.lr_factors["adam"]) == ("hidden", 0.25, 1)


def test_only_a_density_or_a_mask_that_names_a_router_makes_it_sparse():
    model = mixture(64)
    smupar.parameterize(model, base=mixture(16), density=0.25, example=FEATURES)
    assert not hasattr(model[1].gate, "weight_mask")
    assert model[1].experts[0][0].weight_mask.float().mean() == 0.25
    assert plan_of(mixture, density={"1.*": 0.25})["1.gate.weight"].density == 1  # names experts too
    assert plan_of(mixture, density=smupar.erk(0.25))["1.gate.weight"].density == 1

    model = mixture(64)
    plan = smupar.parameterize(model, base=mixture(16), density={"*.gate.weight": 0.5, "*": 0.25}, example=FEATURES)
    row = plan["1.gate.weight"]
    assert model[1].gate.weight_mask.float().mean() == 0.5
    assert (row.init_std, row.lr_factors["adam"]) == (1 / 8, 1 / 2)  # m = m_in m_rho = 4 / 2
    mask = torch.arange(4 * 64).reshape(4, 64) % 2 == 0
    assert plan_of(mixture, masks={"1.gate.weight": mask})["1.gate.weight"].density == 0.5


def test_role_of_the_users_own_makes_a_router_hidden():
    row = plan_of(mixture, roles={"*.gate.weight": "hidden"})["1.gate.weight"]
    assert (row.role, row.density) == ("hidden", 0.25)


class Routed(nn.Module):
    """Weights or chooses the outputs of two layers by ``use(logits, outputs)``."""

    def __init__(self, width, use, *, raw=False):
        super().__init__()
        self.router = nn.Parameter(torch.randn(width, 2)) if raw else nn.Linear(width, 2, bias=False)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.use = use

    def forward(self, x):
        logits = x @ self.router if isinstance(self.router, nn.Parameter) else self.router(x)
        return x + self.use(logits, torch.stack([self.first(x), self.second(x)], 1))


def by_index(logits, outputs):
    return outputs[torch.arange(len(outputs)), logits.argmax(-1)]


def by_top_1(logits, outputs):
    value, index = logits.softmax(-1).topk(1)
    return value * outputs.gather(1, index[..., None].expand(-1, 1, outputs.shape[-1]))[:, 0]


USES = {
    "softmax": lambda logits, outputs: (logits.softmax(-1)[..., None] * outputs).sum(1),
    "sigmoid": lambda logits, outputs: torch.einsum("be,bed->bd", logits.sigmoid(), outputs),
    "top 1": by_top_1,
    "index": by_index,
}


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_example_shows_routers_by_what_their_logits_do(use, raw):
    plan = plan_of(around(lambda width: Routed(width, use, raw=raw)))
    row = plan["1.router" if raw else "1.router.weight"]
    assert (row.role, row.in_dims, row.density) == ("router", (0,) if raw else (1,), 1)


class Keys(nn.Module):
    """Attention with one head of a fixed size, of which two notations exist."""

    def __init__(self, width, *, by_hand=False):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, 4), nn.Linear(width, 4), nn.Linear(width, width)
        self.by_hand = by_hand

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        scores = (q[:, None] * k[None]).sum(-1) if self.by_hand else q @ k.mT
        return x + scores.softmax(-1) @ self.v(x)


class Bottleneck(nn.Module):
    """A gated layer of fixed size: each entry has a gate of its own."""

    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 6), nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x):
        return x + self.down(self.gate(x).sigmoid() * self.up(x))


@pytest.mark.parametrize("block", [Keys, lambda width: Keys(width, by_hand=True), Bottleneck])
def test_attention_and_gates_of_single_entries_have_no_routers(block):
    assert set(roles(plan_of(around(block))).values()) == {"embedding", "hidden", "unembedding", "vector", "fixed"}


def test_probabilities_that_no_layer_is_weighted_by_make_no_router():
    class Head(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.one, self.two = nn.Linear(width, 5), nn.Linear(width, 1)

        def forward(self, x):
            return self.one(x).softmax(-1) * self.two(x).sigmoid()

    def make(width):
        return nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), Head(width))

    plan = plan_of(make)
    assert (plan["2.one.weight"].role, plan["2.two.weight"].role) == ("unembedding", "unembedding")


class RawRouter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width))

    def forward(self, x):
        return F.linear(x, self.weight)


@pytest.mark.parametrize("make_router", [lambda width: nn.Linear(width, 3, bias=False), RawRouter])
def test_without_an_example_a_matrix_beside_its_experts_is_suggested_to_be_a_router(make_router):
    error = refusal(mixture_of(make_router, 3)(64), base=mixture_of(make_router, 3)(16))
    assert suggested(error)["*.gate.weight"] == "router"
    plan = plan_of(mixture_of(make_router, 3), example=None, roles=suggested(error))
    assert (plan["1.gate.weight"].role, plan["1.gate.weight"].init_std) == ("router", 1 / 16)
    other = refusal(mixture_of(make_router, 2)(64), base=mixture_of(make_router, 2)(16))
    assert suggested(other)["*.gate.weight"] != "router"  # three logits for two experts


class Wrapped(nn.Module):
    """As Hunyuan's: a module of its own around the layer."""

    def __init__(self, width):
        super().__init__()
        self.wg = nn.Linear(width, 3, bias=False)

    def forward(self, x):
        return self.wg(x)


def test_without_an_example_a_router_inside_a_module_of_its_own_is_suggested_too():
    error = refusal(mixture_of(Wrapped, 3)(64), base=mixture_of(Wrapped, 3)(16))
    assert suggested(error)["*.gate.wg.weight"] == "router"
    other = refusal(mixture_of(Wrapped, 2)(64), base=mixture_of(Wrapped, 2)(16))
    assert suggested(other)["*.gate.wg.weight"] != "router"
