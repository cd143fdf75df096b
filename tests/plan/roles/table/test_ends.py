"""Roles at both ends of a model: tables, heads, ties, and weights with several holders."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smupar
from tests.plan.roles.nets import LM, TOKENS, EncoderDecoder, TwoHeads, WithGetter, refusal, roles, suggested, widths
from tests.support.models import sequential


def both_logits(model, base, inputs, **settings):
    """The plan, and the logits of the parameterized model and of a plain model with the same weights."""
    plain = type(model)(**model.built_with)
    plan = smupar.parameterize(model, base=base, **settings)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        return plan, model.eval()(inputs), plain.eval()(inputs)


class Tied(LM):
    def __init__(self, **built_with):
        super().__init__(tied=True, **built_with)
        self.built_with = built_with


@pytest.mark.parametrize("head_first", [False, True])
def test_tied_embedding_is_one_row_with_two_forward_factors(head_first):
    model, base = (Tied(width=width, head_first=head_first) for width in (32, 8))
    plan, scaled, plain = both_logits(model, base, TOKENS, alpha_output=2)
    name = "head.weight" if head_first else "embed.weight"  # the first name torch lists
    assert [row.name for row in plan if row.forward] == [name]
    assert plan[name].role == "embedding"
    assert plan[name].forward == (("embed", 1.0), ("head", 2 / 4))
    assert widths(plan, name) == [(1, 4)]
    # A tied table starts at the fan-in of its logits, 8 in the base: a lookup's 1 would blow them up.
    assert plan[name].init_std == pytest.approx(8**-0.5, rel=1e-12)
    assert plan.pending.keys() == {"attention_scale"}
    torch.testing.assert_close(scaled, plain * (2 / 4), rtol=1e-6, atol=1e-6)


def test_tied_head_bias_is_fixed_and_not_scaled():
    model, base = (Tied(width=width, head_bias=True) for width in (32, 8))
    with torch.no_grad():
        model.head.bias.copy_(torch.arange(40.0))
    plan, scaled, plain = both_logits(model, base, TOKENS, alpha_output=2)
    assert plan["head.bias"].role == "fixed"
    bias = torch.arange(40.0)
    torch.testing.assert_close(scaled - bias, (plain - bias) / 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", ["module", "weight"])
def test_encoder_decoder_sharing_one_table_scale_each_use_once(share):
    model, base = EncoderDecoder(16, share=share), EncoderDecoder(4, share=share)
    plan, scaled, plain = both_logits(model, base, TOKENS, alpha_input=3, alpha_output=2)
    assert roles(plan) == {"encoder.embed.weight": "embedding", "encoder.fc.weight": "hidden", "decoder.fc.weight": "hidden"}
    second = [("decoder.embed", 3.0)] if share == "weight" else []  # else it is the same module
    assert plan["encoder.embed.weight"].forward == (("encoder.embed", 3.0), *second, ("head", 0.5))
    torch.testing.assert_close(scaled, plain * 3 * 0.5, rtol=1e-5, atol=1e-5)  # the model is linear


def test_untied_head_alone_and_last_is_unembedding():
    plan = smupar.make_plan(LM(32, head_bias=True), base=LM(8, head_bias=True), alpha_output=3)
    assert plan["head.weight"].role == "unembedding"
    assert plan["head.weight"].forward == (("head", 3 / 4),)
    assert plan["head.bias"].role == "fixed"
    assert plan["embed.weight"].forward == (("embed", 1.0),)
    assert plan["embed.weight"].init_std == 1.0  # a lookup reads one row
    assert plan["head.weight"].init_std == pytest.approx(8**-0.5, rel=1e-12)
    assert "output_factor" not in plan.pending


def test_two_heads_both_named_get_both_factors():
    heads = {"policy.weight": "unembedding", "value.weight": "unembedding"}
    plan = smupar.make_plan(TwoHeads(16), base=TwoHeads(4), roles=heads, alpha_output=2)
    assert plan["policy.weight"].forward == (("policy", 0.5),)
    assert plan["value.weight"].forward == (("value", 0.5),)
    assert plan["policy.bias"].role == plan["value.bias"].role == "fixed"


@pytest.mark.parametrize("width", [16, 4], ids=["wider than the base", "as wide as the base"])
def test_get_output_embeddings_decides(width):
    plan = smupar.make_plan(WithGetter(width), base=WithGetter(4))
    assert roles(plan) == {
        "lm.weight": "unembedding",
        "lm.bias": "fixed",
        "embed.weight": "embedding",
        "fc.weight": "hidden",
        "fc.bias": "vector",
    }


class DeclaresTooEarly(nn.Module):
    """As DeBERTa-v2: the layer before the logits is declared, and the table makes the logits by hand."""

    def __init__(self, width):
        super().__init__()
        self.table, self.dense, self.norm = nn.Embedding(40, width), nn.Linear(width, width), nn.LayerNorm(width)

    def get_output_embeddings(self):
        return self.dense

    def forward(self, tokens):
        return self.norm(self.dense(self.table(tokens))) @ self.table.weight.T


@pytest.mark.parametrize("example", [None, TOKENS])
def test_layer_that_is_declared_the_output_but_writes_the_width_is_hidden(example):
    plan = smupar.make_plan(DeclaresTooEarly(64), base=DeclaresTooEarly(16), example=example)
    assert roles(plan)["dense.weight"] == "hidden"
    assert list(plan.pending) == ["output_factor"]


def test_headless_trunk_has_no_unembedding_and_reminds_of_the_output():
    plan = smupar.make_plan(sequential(64)[:3], base=sequential(16)[:3])
    assert roles(plan) == {"0.weight": "embedding", "0.bias": "vector", "2.weight": "hidden", "2.bias": "vector"}
    assert plan.output_factor == 0.25
    assert "output_factor" in plan.pending


class LogitsByHand(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.fc = nn.Linear(width, width)

    def forward(self, tokens):
        return F.linear(self.fc(self.embed(tokens)), self.embed.weight)


def test_output_factor_is_pending_when_the_model_makes_its_own_logits():
    plan = smupar.make_plan(LogitsByHand(16), base=LogitsByHand(4), alpha_output=2)
    assert plan.output_factor == 2 / 4
    assert "plan.output_factor = 0.5" in plan.pending["output_factor"]
    plan.settle("output_factor")
    assert "output_factor" not in plan.pending


def test_output_factor_is_not_pending_under_sp():
    plan = smupar.make_plan(LogitsByHand(16), base=LogitsByHand(4), rule="sp", alpha_output=2)
    assert plan.output_factor == 1
    assert plan.pending == {}


class Siamese(nn.Module):
    """Two input layers that share a weight."""

    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(8, width), nn.Linear(8, width)
        self.right.weight = self.left.weight
        self.mix, self.head = nn.Linear(width, width), nn.Linear(width, 3)


class Named(nn.Module):
    """Layers as attributes, and again in a container."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 3)
        self.net = nn.Sequential(self.first, nn.ReLU(), self.second, nn.ReLU(), self.head)


class OwnLogits(nn.Module):
    """Holds its table's weight itself, for logits that no module makes."""

    def __init__(self, width):
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, width), nn.Linear(width, width)
        self.out = self.embed.weight


def test_input_layers_that_share_a_weight_both_have_the_factor_of_inputs():
    plan = smupar.make_plan(Siamese(128), base=Siamese(32), alpha_input=3)
    assert plan["left.weight"].forward == (("left", 3.0), ("right", 3.0))


def test_layers_with_two_names_are_scaled_once():
    model = Named(128)
    plan = smupar.parameterize(model, base=Named(32), alpha_input=3)
    assert plan["first.weight"].forward == (("first", 3.0),)
    assert (float(model.first.smupar_factor), float(model.head.smupar_factor)) == (3.0, 0.25)
    assert smupar.audit(model, plan) == []


def test_module_that_holds_a_table_for_logits_of_its_own_gets_no_factor():
    model = OwnLogits(128)
    plan = smupar.parameterize(model, base=OwnLogits(32))
    assert plan["out"].forward == (("embed", 1.0),)
    assert plan.output_factor == 0.25
    assert "output_factor" in plan.pending
    assert not model._forward_pre_hooks


def test_cells_are_known_as_recurrent_layers_are():
    def make(width):
        return nn.ModuleDict({"cell": nn.GRUCell(8, width), "mix": nn.Linear(width, width), "head": nn.Linear(width, 3)})

    plan = smupar.make_plan(make(128), base=make(32), density=0.25)
    assert (plan["cell.weight_ih"].role, plan["cell.weight_hh"].role) == ("embedding", "hidden")
    assert plan["cell.weight_ih"].init_std == pytest.approx(8**-0.5)


def test_tables_that_are_read_side_by_side_are_embeddings():
    def make(width):
        parts = {"word": nn.Embedding(50, width), "char": nn.Embedding(20, width // 4)}
        read = {"read": nn.LSTM(width + width // 4, width), "mix": nn.Linear(width, width), "head": nn.Linear(width, 50)}
        return nn.ModuleDict({**parts, **read})

    plan = smupar.make_plan(make(128), base=make(32), alpha_input=9)
    assert plan["word.weight"].forward[0][1] == plan["char.weight"].forward[0][1] == 9


def test_frozen_table_keeps_its_values():
    def make(width):
        frozen = nn.Embedding.from_pretrained(torch.arange(4.0)[:, None].expand(4, width).clone())
        return nn.ModuleDict({"pos": frozen, "mix": nn.Linear(width, width), "head": nn.Linear(width, 3)})

    model = make(32)
    plan = smupar.parameterize(model, base=make(8), alpha_input=2.0)
    assert torch.equal(model["pos"].weight[:, 0], torch.arange(4.0))
    assert plan["pos.weight"].init_std is None
    assert plan["pos.weight"].forward == (("pos", 2.0),)  # as every other table that is read
    assert "'pos.weight' is frozen, so the model's values stay" in str(plan)
    assert smupar.make_plan(make(32), base=make(8), roles={"pos.weight": "embedding"})["pos.weight"].init_std == 1


def test_frozen_matrix_inside_is_overwritten_with_a_warning():
    def make(width):
        model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 3))
        model[1].weight.requires_grad_(False)
        return model

    with pytest.warns(smupar.PlanWarning, match="'1.weight' is frozen, but initialised anyway"):
        smupar.make_plan(make(32), base=make(8))


def test_readout_that_may_be_taken_for_hidden_is_named_before_it_is_made_sparse():
    def make(width):
        layers = {"first": nn.Linear(8, width), "mix": nn.Linear(width, width)}
        return nn.ModuleDict({**layers, "policy": nn.Linear(width, 128), "value": nn.Linear(width, 1)})

    with pytest.warns(smupar.PlanWarning, match="'policy.weight' is taken as hidden, and made sparse.*pass delta="):
        smupar.make_plan(make(64), base=make(64), density=0.25)
    assert not any("policy" in str(note) for note in smupar.make_plan(make(64), base=make(64)).notes)


class Router(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, width))


def test_matrix_of_the_users_own_beside_a_readout_is_asked_for_without_a_suggestion():
    def make(width):
        return nn.ModuleDict({"first": nn.Linear(8, width), "router": Router(width), "head": nn.Linear(width, 3)})

    with pytest.raises(ValueError, match=r"roles=\{'router.weight': \.\.\.\}\nNothing suggests a role where there are dots"):
        smupar.make_plan(make(32), base=make(8))
    with pytest.raises(ValueError, match=r"put the role of 'router.weight' in the place of the dots: one of embedding"):
        smupar.make_plan(make(32), base=make(8), roles={"router.weight": ...})
    # A second readout makes the first one doubtful.
    with pytest.raises(ValueError, match=r"roles=\{'head.weight': 'unembedding'\}"):
        smupar.make_plan(make(32), base=make(8), roles={"router.weight": "unembedding"})
    plan = smupar.make_plan(make(32), base=make(8), roles={"router.weight": "unembedding", "head.weight": "unembedding"})
    assert "no layer of router.weight could be scaled" in plan.pending["output_factor"]
    assert not smupar.make_plan(make(32), base=make(8), roles={"router.weight": ("hidden", 1)}).pending


class Gated(nn.Module):
    """A gate of one output, and logits from the table."""

    def __init__(self, width, *, tied):
        super().__init__()
        self.table, self.gate, self.last = nn.Embedding(40, width), nn.Linear(width, 1), nn.Linear(width, 40, bias=False)
        if tied:
            self.last.weight = self.table.weight


def test_single_output_is_suggested_as_router_only_beside_tied_logits():
    assert suggested(refusal(Gated(64, tied=True), base=Gated(16, tied=True))) == {"gate.weight": "router"}
    error = refusal(Gated(64, tied=False), base=Gated(16, tied=False))  # a value beside a policy looks the same
    assert suggested(error) == {"gate.weight": ..., "last.weight": "unembedding"}


def test_last_layer_beside_a_norm_of_its_outputs_is_suggested_to_be_hidden():
    def make(width):
        head = nn.ModuleDict({"norm": nn.LayerNorm(5), "last": nn.Linear(width, 5)})
        return nn.ModuleDict({"first": nn.Linear(6, width), "head": head})

    assert suggested(refusal(make(64), base=make(16))) == {"head.last.weight": "hidden"}


def test_autoencoders_do_not_tell_what_reads_the_data():
    def make(width):
        return nn.Sequential(nn.Linear(24, width), nn.Linear(width, 4), nn.Linear(4, width), nn.Linear(width, 24))

    wanted = {"0.weight": ..., "1.weight": "hidden", "2.weight": "hidden", "3.weight": "unembedding"}
    assert suggested(refusal(make(64), base=make(16))) == wanted


class NormedBefore(nn.Module):
    """A readout of 16 outputs after a norm over the width."""

    def __init__(self, width):
        super().__init__()
        self.first, self.hidden = nn.Linear(6, width), nn.Linear(width, width)
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, 16)


@pytest.mark.parametrize("width", [16, 64])
def test_norm_over_the_width_says_nothing_about_as_many_outputs(width):
    assert (
        smupar.make_plan(NormedBefore(width), base=NormedBefore(16), delta=NormedBefore(32))["last.weight"].role
        == "unembedding"
    )


class Bilinear(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.hidden, self.mix = nn.Linear(6, width), nn.Linear(width, width), nn.Bilinear(width, 4, 5)
        self.last = nn.Linear(width, 3)


def test_bilinear_layer_sums_over_its_inputs_and_is_asked_for():
    error = refusal(Bilinear(64), base=Bilinear(16), match="roles=")
    assert suggested(error) == {"mix.weight": ...}
    plan = smupar.make_plan(Bilinear(64), base=Bilinear(16), roles={"mix.weight": ("hidden", (1, 2))})
    assert plan["mix.weight"].lr_factor("adam") == 1 / 4
