"""Hugging Face models as they are, from tiny configurations: roles, multipliers, and factors seen by running them.

In a file of its own because importing transformers takes seconds. Nothing is downloaded.
"""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import smupar
from tests.plan.roles.nets import roles, suggested

TOKENS = torch.arange(12).reshape(2, 6)
# The defaults lie outside of a vocabulary of 40, which transformers complains about.
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2(width, *, tied=True):
    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=width, n_layer=2, n_head=width // 8, tie_word_embeddings=tied, **SPECIAL
    )
    return GPT2LMHeadModel(config).eval()


def llama(width, *, num_kv_heads=None, tied=False):
    num_heads = width // 8
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=width,
        intermediate_size=width * width // 8,  # a multiplier of its own
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads or num_heads // 2,
        head_dim=8,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
        **SPECIAL,
    )
    return LlamaForCausalLM(config).eval()


def vit(width):
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=width // 8,
        intermediate_size=4 * width,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    return ViTForImageClassification(config).eval()


def neox(width):
    config = GPTNeoXConfig(
        vocab_size=40,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=width // 8,
        intermediate_size=4 * width,
        max_position_embeddings=16,
        **SPECIAL,
    )
    return GPTNeoXForCausalLM(config).eval()


def names(plan, role):
    """Names with this role, layers after the first left out."""
    return {row.name for row in plan if row.role == role and ".1." not in row.name}


def widths(plan, names):
    return {(plan[name].width_in, plan[name].width_out) for name in names}


def logits(model, inputs=TOKENS):
    with torch.no_grad():
        return model(inputs).logits


def check_output_factor(build, *, inputs=TOKENS, roles=None):
    """Logits at alpha_output 2 and four times the width, against a plain model with the same weights."""
    model, plain = build(64), build(64)
    plan = smupar.parameterize(model, base=build(16), alpha_output=2, roles=roles)
    assert plan.output_factor == 0.5
    plain.load_state_dict(model.state_dict())
    expected = logits(plain, inputs)
    assert float(expected.std()) > 0.01  # logits of zero would agree with anything
    torch.testing.assert_close(logits(model, inputs), 0.5 * expected, rtol=1e-5, atol=1e-6)
    assert smupar.audit(model, plan) == [f"attention_scale: {plan.pending['attention_scale']}"]
    return plan


def test_gpt2_reads_transposed_weights_and_has_one_tied_row():
    plan = smupar.make_plan(gpt2(64), base=gpt2(16))
    layer = "transformer.h.0"
    assert names(plan, "embedding") == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert names(plan, "unembedding") == names(plan, "fixed") == set()
    hidden = {f"{layer}.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert names(plan, "hidden") == hidden
    assert widths(plan, hidden) == {(4, 4)}
    # Conv1D keeps its weight as (in, out): reading it as a Linear's would take the MLP's 4 d for the fan-in.
    assert plan[f"{layer}.mlp.c_fc.weight"].shape == (64, 256)
    assert {plan[name].in_dims for name in hidden} == {(0,)}
    assert plan[f"{layer}.mlp.c_fc.weight"].init_std == pytest.approx((16 * 4) ** -0.5, rel=1e-12)
    assert plan[f"{layer}.mlp.c_proj.weight"].init_std == pytest.approx((64 * 4) ** -0.5, rel=1e-12)
    assert plan["transformer.wte.weight"].forward == (("transformer.wte", 1.0), ("lm_head", 0.25))
    assert plan["transformer.wpe.weight"].forward == (("transformer.wpe", 1.0),)
    vectors = [row for row in plan if row.role == "vector"]
    assert len(vectors) == 2 * 8 + 2  # per block two norms of two and four biases, and the last norm
    assert {(row.width_in, row.width_out) for row in vectors} == {(1, 4)}


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_logits_carry_the_output_factor(tied):
    plan = check_output_factor(lambda width: gpt2(width, tied=tied))
    assert ("lm_head.weight" in plan) is not tied


def test_gpt2_sparse_masks_follow_the_transposed_layout():
    model = gpt2(64)
    plan = smupar.parameterize(model, base=gpt2(16), density=0.25, pattern="fan_in")
    weight = model.transformer.h[0].mlp.c_fc.weight  # (in, out)
    assert set(torch.count_nonzero(weight, dim=0).tolist()) == {16}  # a quarter of 64 inputs for each output
    assert plan["transformer.h.0.mlp.c_fc.weight"].density == 0.25


@pytest.mark.parametrize("tied", [True, False])
def test_llama_with_scaling_kv_heads_is_hidden_inside(tied):
    plan = smupar.make_plan(llama(64, tied=tied), base=llama(16, tied=tied))
    attention = {f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    into, out_of = (
        {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")},
        {"model.layers.0.mlp.down_proj.weight"},
    )
    assert names(plan, "hidden") == attention | into | out_of
    assert plan["model.layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    assert widths(plan, attention) == {(4, 4)}
    assert widths(plan, into) == {(4, 16)}
    assert widths(plan, out_of) == {(16, 4)}
    assert names(plan, "embedding") == {"model.embed_tokens.weight"}
    assert names(plan, "unembedding") == (set() if tied else {"lm_head.weight"})
    head = plan["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert dict(head.forward)["lm_head"] == 0.25
    assert plan["model.norm.weight"].role == "vector"


@pytest.mark.parametrize("tied", [True, False])
def test_llama_with_fixed_kv_heads_asks_for_them_only_and_the_line_works(tied):
    def build(width):
        return llama(width, num_kv_heads=1, tied=tied)

    with pytest.raises(ValueError, match="cannot be inferred") as error:
        smupar.make_plan(build(64), base=build(16))
    pasted = suggested(error.value)
    # get_output_embeddings knows the head, so it is not asked for; one line serves both layers.
    assert pasted == {f"model.layers.*.self_attn.{part}_proj.weight": "hidden" for part in "kv"}
    plan = check_output_factor(build, roles=pasted)
    fixed = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "kv"}
    assert {plan[name].role for name in fixed} == {"hidden"}
    assert widths(plan, fixed) == {(4, 1)}


def test_llama_alpha_input_multiplies_what_the_blocks_read():
    model, plain = llama(64), llama(64)
    smupar.parameterize(model, base=llama(16), alpha_input=3, alpha_output=2)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        plain.model.embed_tokens.weight *= 3
        plain.lm_head.weight *= 2 / 4
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)


def test_llama_generates_with_the_output_factor():
    # Peers applied it only when targets were given; here the cache and one token at a time must see it as well.
    model = llama(64)
    smupar.parameterize(model, base=llama(16), alpha_output=2)
    whole = logits(model)
    with torch.no_grad():
        first = model(TOKENS[:, :5], use_cache=True)
        last = model(TOKENS[:, 5:], past_key_values=first.past_key_values, use_cache=True).logits
    torch.testing.assert_close(last[:, 0], whole[:, 5], rtol=1e-4, atol=1e-5)


def test_vit_has_a_convolution_as_embedding_and_raw_vectors():
    plan = smupar.make_plan(vit(64), base=vit(16))
    assert plan.pending.keys() == {"attention_scale"}
    projection = "vit.embeddings.patch_embeddings.projection"
    assert names(plan, "embedding") == {f"{projection}.weight"}
    assert plan[f"{projection}.weight"].forward == ((projection, 1.0),)
    assert plan[f"{projection}.weight"].init_std == pytest.approx((3 * 4 * 4) ** -0.5, rel=1e-12)
    assert names(plan, "unembedding") == {"classifier.weight"}
    assert names(plan, "fixed") == {"classifier.bias"}
    assert plan["classifier.weight"].forward == (("classifier", 0.25),)
    assert plan["vit.embeddings.cls_token"].role == plan["vit.embeddings.position_embeddings"].role == "vector"
    hidden = {row.name for row in plan if row.role == "hidden"}
    assert len(hidden) == 2 * 6  # q, k, v, o and two of the MLP
    assert widths(plan, hidden) == {(4, 4)}


def test_vit_logits_carry_the_output_factor_and_the_bias_does_not():
    images = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
    bias = torch.arange(5.0)
    model, plain = vit(64), vit(64)
    with torch.no_grad():
        model.classifier.bias.copy_(bias)
    smupar.parameterize(model, base=vit(16), alpha_output=2)
    plain.load_state_dict(model.state_dict())
    expected = logits(plain, images) - bias
    assert float(expected.std()) > 0.01
    torch.testing.assert_close(logits(model, images) - bias, 0.5 * expected, rtol=1e-4, atol=1e-5)


def test_gpt_neox_is_hidden_inside_and_its_logits_carry_the_factor():
    plan = check_output_factor(neox)
    hidden = {row.name for row in plan if row.role == "hidden"}
    layer = "gpt_neox.layers.0"
    inside = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    assert {name for name in hidden if name.startswith(layer)} == {f"{layer}.{name}.weight" for name in inside}
    assert widths(plan, hidden) == {(4, 4)}
    assert len(names(plan, "embedding")) == len(names(plan, "unembedding")) == 1


SAME_WIDTH = {"gpt2 tied": gpt2, "gpt2 untied": lambda width: gpt2(width, tied=False), "gpt-neox": neox}


@pytest.mark.parametrize("build", SAME_WIDTH.values(), ids=SAME_WIDTH.keys())
def test_roles_at_base_width_agree_with_those_at_a_larger_width(build):
    here, wider = smupar.make_plan(build(16), base=build(16)), smupar.make_plan(build(64), base=build(16))
    assert roles(here) == roles(wider)
    assert {row.name: row.scaling for row in here} == {row.name: row.scaling for row in wider}
    assert here.output_factor == 1


def test_vit_at_base_width_asks_and_the_line_or_delta_gives_the_roles_of_a_larger_width():
    wider = roles(smupar.make_plan(vit(64), base=vit(16)))
    with pytest.raises(ValueError, match="cannot be inferred") as error:
        smupar.make_plan(vit(16), base=vit(16))
    assert roles(smupar.make_plan(vit(16), base=vit(16), delta=vit(32))) == wider
    # Its input getter returns the container of the patch convolution, which is no table.
    assert roles(smupar.make_plan(vit(16), base=vit(16), roles=suggested(error.value))) == wider


def test_base_on_meta_gives_the_same_plan():
    with torch.device("meta"):
        base = gpt2(16)
    assert smupar.make_plan(gpt2(64), base=base).to_json() == smupar.make_plan(gpt2(64), base=gpt2(16)).to_json()


def test_base_with_other_tying_raises_and_names_the_head():
    with pytest.raises(ValueError, match=r"'lm_head.weight' is tied to another parameter"):
        smupar.make_plan(llama(64, tied=True), base=llama(16, tied=False))


@pytest.mark.parametrize("tied", [False, True])
def test_llama_with_fewer_kv_heads_asks_at_base_width_and_delta_answers(tied):
    with pytest.raises(ValueError, match=r"self_attn.k_proj.weight.*\n(.*\n)*.*delta="):
        smupar.make_plan(llama(16, tied=tied), base=llama(16, tied=tied))
    here = smupar.make_plan(llama(16, tied=tied), base=llama(16, tied=tied), delta=llama(64, tied=tied))
    assert roles(here) == roles(smupar.make_plan(llama(64, tied=tied), base=llama(16, tied=tied)))
