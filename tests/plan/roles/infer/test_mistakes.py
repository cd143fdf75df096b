"""Bases that do not fit, roles that do not exist, and models that ask."""

import warnings

import pytest
import torch
from torch import nn
from torch.ao.nn.quantized import dynamic as quantized
from torch.nn.utils import parametrizations

import smupar
from tests.plan.roles.nets import LM, EncoderDecoder, Raw, TwoHeads, WithGetter, refusal, roles, suggested
from tests.support.models import sequential


def test_base_and_model_may_live_on_meta():
    with torch.device("meta"):
        base, model = LM(8, tied=True), LM(32, tied=True)
    on_meta = smupar.make_plan(model, base=base)
    assert on_meta.to_json() == smupar.make_plan(LM(32, tied=True), base=LM(8, tied=True)).to_json()
    assert on_meta["embed.weight"].forward == (("embed", 1.0), ("head", 0.25))


class Spectral(nn.Module):
    """As in a Fourier neural operator."""

    def __init__(self, width):
        super().__init__()
        self.first, self.head = nn.Linear(3, width), nn.Linear(width, 3)
        self.modes = nn.Parameter(torch.randn(width, width, 4, dtype=torch.cfloat))


@pytest.mark.parametrize("call", [smupar.make_plan, smupar.parameterize])
def test_complex_weights_are_refused_with_the_remedy(call):
    with pytest.raises(ValueError, match=r"'modes' is complex.*view_as_real"):
        call(Spectral(16), base=Spectral(4))


def test_lazy_modules_ask_for_a_forward_pass_and_work_after_it():
    def model(width):
        return nn.Sequential(nn.LazyLinear(width), nn.ReLU(), nn.LazyLinear(2))

    lazy, base = model(16), model(4)
    with pytest.raises(ValueError, match=r"'0.weight' of the model has no shape yet"):
        smupar.make_plan(lazy, base=base)
    lazy(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"'0.weight' of base has no shape yet"):
        smupar.make_plan(lazy, base=base)
    base(torch.zeros(1, 3))
    plan = smupar.make_plan(lazy, base=base)
    assert roles(plan) == {"0.weight": "embedding", "0.bias": "vector", "2.weight": "unembedding", "2.bias": "fixed"}


def test_roles_overrule_what_would_be_inferred():
    plan = smupar.make_plan(
        sequential(64), base=sequential(16), roles={"2.weight": ("hidden", 0), "0.weight": "fixed"}, density=0.5
    )
    assert plan["2.weight"].in_dims == (0,)
    assert plan["0.weight"].role == "fixed"
    assert plan["0.weight"].forward == ()


def test_table_of_biases_for_the_heads_is_no_embedding():
    class Relative(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.tokens = nn.Embedding(20, width)
            self.bias = nn.Embedding(32, width // 4)
            self.inner = nn.Linear(width, width)
            self.head = nn.Linear(width, 20)

    plan = smupar.make_plan(Relative(64), base=Relative(16), alpha_input=5)
    assert roles(plan)["bias.weight"] == "vector"
    assert plan["bias.weight"].forward == ()
    assert plan["tokens.weight"].forward == (("tokens", 5.0),)


def untied_decoder(width):
    """As many parameters under the same canonical names, tied in fewer places."""
    model = EncoderDecoder(width, share="module")
    model.head.weight = model.encoder["embed"].weight
    model.decoder["embed"] = nn.Identity()
    return model


def with_scale(width, *shape):
    model = sequential(width)
    model.scale = nn.Parameter(torch.ones(shape))
    return model


MLP = {"model": lambda: sequential(64), "base": lambda: sequential(16)}
NO_ROLE = r"roles: '2.weight' of shape \(64, 64\).*embedding, hidden, unembedding, router, vector, fixed"
REFUSED = {
    "another class": ({"model": lambda: LM(32), "base": lambda: sequential(8)}, "base is a Sequential, the model a LM"),
    "another depth": (
        {**MLP, "base": lambda: sequential(16)[:3]},
        r"base has 4 parameters and the model 6 \(only in the model: 4.bias, 4.weight\)(.|\n)*number of blocks",
    ),
    "tied in the model": (
        {"model": lambda: LM(32, tied=True), "base": lambda: LM(8)},
        r"'head.weight' is tied to another parameter in only one of model and base.*to_empty unties",
    ),
    "tied in other places": (
        {"model": lambda: EncoderDecoder(16, share="weight"), "base": lambda: untied_decoder(4)},
        r"'encoder.embed.weight' is tied in only one of model and base",
    ),
    "other dimensions": (
        {"model": lambda: with_scale(64, 64, 1), "base": lambda: with_scale(16, 16)},
        r"'scale' has shape \(64, 1\) in the model and \(16,\) in base",
    ),
    # A head of another vocabulary scales on both sides and would pass for a hidden weight.
    "other outputs": (
        {"model": lambda: sequential(64, num_out=100), "base": lambda: sequential(16, num_out=50)},
        "do model and base have different numbers of outputs",
    ),
    "scripted": (
        {"model": lambda: torch.jit.trace(sequential(64), torch.zeros(1, 8)), "base": lambda: sequential(16)},
        "parameterize the model before it is scripted",
    ),
    "quantized": (
        {"model": lambda: nn.Sequential(nn.Linear(8, 64), quantized.Linear(64, 4)), "base": lambda: sequential(16)},
        "'1' is a quantized Linear, whose weight is no parameter",
    ),
    "delta of another class": ({**MLP, "delta": lambda: LM(8)}, "delta is a LM, the model a Sequential"),
    "delta of another depth": ({**MLP, "delta": lambda: sequential(32)[:3]}, "delta has 4 parameters and the model 6"),
    "glob without a match": (
        {**MLP, "roles": {"layers.*": "hidden"}},
        r"roles: 'layers.\*' matches none of the parameters: 0.weight, 0.bias",
    ),
    "glob after another": ({**MLP, "roles": {"2.*": "fixed", "2.weight": "hidden"}}, r"'2.weight' has no effect"),
    "hidden without its input dimension": (
        {"model": lambda: Raw(16, expand=3), "base": lambda: Raw(4, expand=3), "roles": {"expand": "hidden"}},
        r"roles=\{'expand': \('hidden', IN_DIM\)\}",
    ),
    **{
        f"role {role}": ({**MLP, "roles": {"2.weight": role}}, NO_ROLE)
        for role in ("readout", ("hidden", 2), ("hidden", -1), ("embedding", 0))
    },
}


@pytest.mark.filterwarnings("ignore:.*deprecated")  # of torch: scripts and quantized layers
@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_mistakes_are_refused_by_name(given, message):
    refusal(**{name: value() if callable(value) else value for name, value in given.items()}, match=message)


def weight_norm(norm):
    def build(width):
        layers = sequential(width)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that one of them is old is the point
            norm(layers[2])
        return layers

    return build


def stack(width):
    return nn.ModuleDict({"layers": nn.ModuleList(LM(width, num_kv_heads=1, tied=True) for _ in range(3))})


def head_first(width):
    return nn.ModuleDict({"head": nn.Linear(width, 3), "embed": nn.Embedding(9, width), "fc": nn.Linear(width, width)})


def cnn(width):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 3), nn.Flatten(), nn.Linear(width * 16, 10))


class Weight(nn.Module):
    """A layer written by hand."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))


def by_hand(width):
    return nn.ModuleDict({"table": Weight(50, width), "mix": Weight(width, width), "head": Weight(50, width)})


def second_head(width):
    return WithGetter(width, probe=True)


KV = {"layers.*.k_proj.weight": "hidden", "layers.*.v_proj.weight": "hidden"}  # one line for all layers, numbers as stars
ASKS = {
    "keys and values of fixed size": (stack, 32, 8, "roles=", KV),
    "two heads": (TwoHeads, 16, 4, "cannot be inferred(.|\n)*policy.weight", None),
    "two heads at base width": (TwoHeads, 4, 4, "cannot be inferred(.|\n)*policy.weight", None),
    "a second head": (second_head, 16, 4, "cannot be inferred", {"probe.weight"}),
    "a second head at base width": (second_head, 4, 4, "cannot be inferred", {"probe.weight"}),
    "a head that is not last": (head_first, 16, 4, "has a scaling input and a fixed output", {"head.weight"}),
    "a flattened image": (cnn, 16, 16, "roles=", {"3.weight": "unembedding"}),
    "layers written by hand": (
        by_hand, 128, 32, "may use the scaling dimension as input or as output",
        {"table.weight": "embedding", "head.weight": ...},
    ),
    # The norm of such a weight is a tensor of its own, so an init of the other would change nothing.
    "weight norm": (
        weight_norm(parametrizations.weight_norm), 64, 16,
        r"original1 .*one of several tensors from which a weight is computed: it is better to remove", None,
    ),
    "old weight norm": (weight_norm(nn.utils.weight_norm), 64, 24, r"2\.weight_v", None),
}  # fmt: skip


@pytest.mark.parametrize(("build", "width", "base_width", "message", "suggestion"), ASKS.values(), ids=ASKS)
def test_models_that_do_not_tell_ask_with_a_line_to_paste(build, width, base_width, message, suggestion):
    error = refusal(build(width), base=build(base_width), match=message)
    if suggestion is not None:
        assert (suggested(error) if isinstance(suggestion, dict) else suggested(error).keys()) == suggestion


def test_question_with_dots_names_no_layer_that_is_decided():
    """A pasted role would otherwise also be given to the first layer of each head, and to its norm."""

    def head(width):
        return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 8))

    class Heads(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inp, self.a, self.b = nn.Linear(5, width), head(width), head(width)

    with pytest.raises(ValueError, match=r"roles=\{'a\.3\.weight': \.\.\., 'b\.3\.weight': \.\.\.\}"):
        smupar.make_plan(Heads(256), base=Heads(64))
