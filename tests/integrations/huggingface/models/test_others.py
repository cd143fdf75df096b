"""Architectures that smupar has no facts about: numbers that follow the width, attention scales, folders and exports."""

import json

import pytest
import torch
import transformers

import smupar
from smupar.cli.main import main
from smupar.integrations import huggingface
from smupar.integrations.huggingface.inputs import example
from smupar.plan.scales.find_attention import find_attentions
from tests.integrations.huggingface.others import OTHERS, build, config_of, two_stacks

BERT = {"num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 32}

pytestmark = pytest.mark.filterwarnings("ignore:.*is not among the known architectures")
# Some layers are thin on purpose: a small rank is what DeepSeek and Mamba are about.
thin = pytest.mark.filterwarnings("ignore:.*keep fewer than 16 weights per neuron")


def parameterized(name, *, base=64, **settings):
    model = build(name)
    return model, huggingface.parameterize(model, base=config_of(name, base), **settings)


@torch.no_grad()
def logits(model):
    return model(**example(model)).logits


@thin
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "rwkv"])  # whose factors cancel at these widths
def test_saved_loaded_and_exported_models_give_the_same_logits(name, tmp_path):
    model, plan = parameterized(name, density=0.5, alpha_input=3.0, alpha_output=2.0)
    assert plan.pending == {}
    assert smupar.audit(model, plan) == []
    with torch.no_grad():  # as if trained: every norm and bias counts
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    wanted = logits(model)
    model.save_pretrained(tmp_path / "sparse")
    again, same_plan = huggingface.load(tmp_path / "sparse")
    assert same_plan.pending == {}
    torch.testing.assert_close(logits(again), wanted, rtol=0, atol=1e-6)
    main(["export", str(tmp_path / "sparse"), str(tmp_path / "plain")])
    plain = type(model).from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits(plain), wanted, rtol=1e-4, atol=1e-4)
    naive = type(model).from_pretrained(tmp_path / "sparse")
    assert (logits(naive) - wanted).abs().max() > 0.05  # what the export is for


@pytest.mark.parametrize(
    ("name", "attribute", "own", "base"),
    [
        ("gemma", "model.embed_tokens.embed_scale", 128**0.5, 8.0),
        ("t5", "model_dim", 128, 64),
        ("granite", "config.logits_scaling", 2.0, 1.0),
    ],
)
def test_number_that_follows_the_width_gets_the_value_of_the_base(name, attribute, own, base):
    def number(model):
        for part in attribute.split("."):
            model = getattr(model, part)
        return float(model)

    assert number(build(name)) == pytest.approx(own)
    model, plan = parameterized(name)
    assert number(model) == pytest.approx(base)
    assert attribute in str([note.text for note in plan.notes if note.kind == "multipliers"])
    model, plan = parameterized(name, multipliers="ask")
    assert number(model) == pytest.approx(own)
    assert list(plan.pending) == ["multipliers"]


def test_relative_positions_of_t5_get_the_size_of_the_base():
    torch.manual_seed(0)
    _, plan = parameterized("t5", base=32)
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert plan[name].kept_factor == 2  # drawn with std 1 / sqrt(width)


def test_frozen_sines_of_whisper_stay():
    model, plan = parameterized("whisper")
    name = "model.encoder.embed_positions.weight"
    assert torch.equal(model.get_parameter(name), build("whisper").get_parameter(name))
    assert plan[name].init_std is None


@thin
def test_indexer_is_no_attention(tmp_path):
    model, plan = parameterized("deepseek_v32")
    assert {change.path.rpartition(".")[2] for change in plan.attention} == {"self_attn"}
    assert model.model.layers[0].self_attn.indexer.softmax_scale == 1 / 4
    for layer in model.model.layers:
        layer.self_attn.indexer.softmax_scale = 1 / 16  # by hand: it changes no choice, so an export may leave it out
    wanted = logits(model)
    model.save_pretrained(tmp_path / "sparse")
    huggingface.export(tmp_path / "sparse", tmp_path / "plain")
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path / "plain")), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind", "field", "value"),
    [
        ("llava", "CLIPAttention", "scale", 1 / 16),
        ("llava", "LlamaAttention", "scaling", 1 / 16),
        ("gptj", "GPTJAttention", "scale_attn", 16.0),  # a divisor
        ("bloom", "BloomAttention", "inv_norm_factor", 1 / 16),
        ("t5", "T5Attention", "scaling", 1 / 16),  # the head size is called key_value_proj_dim
        ("deepseek", "DeepseekV3Attention", "scaling", 1 / 24),  # qk_head_dim = 16 + 8
    ],
)
@thin
def test_every_attention_gets_the_scale_in_its_own_field(name, kind, field, value):
    model, plan = parameterized(name)
    modules = [module for module in model.modules() if type(module).__name__ == kind]
    assert modules
    assert {getattr(module, field) for module in modules} == {value}
    assert "attention_scale" not in plan.pending


@pytest.mark.parametrize("name", ["falcon", "modernbert"])
@torch.no_grad()
def test_scale_that_no_field_holds_is_put_into_the_queries(name):
    model = build(name)
    fused = {"falcon": "query_key_value", "modernbert": "Wqkv"}[name]
    layers = [module for path, module in model.named_modules() if path.endswith(fused)]
    own = [layer.weight.clone() for layer in layers]
    for layer in layers:
        layer.weight.mul_(8)  # logits whose scale is easy to see
    plan = smupar.parameterize(model, base=build(name, 64), init_std=0.5)
    before = logits(model)
    huggingface.set_attention_scale(model, plan)
    after = logits(model)
    assert plan.pending == {}
    assert (after - before).abs().max() > 1e-3
    # By hand: Falcon has two query heads, a key and a value in each group of heads; ModernBERT three parts one after the other.
    for layer in layers:
        layer._forward_hooks.clear()
        parts = layer.weight.view(-1, 4, 16, 128)[:, :2] if name == "falcon" else layer.weight[:128]
        parts.mul_(1 / 4)
    torch.testing.assert_close(logits(model), after, rtol=1e-4, atol=1e-5)
    assert len(own) == 2


def test_hint_of_a_scale_that_cannot_be_set_names_no_other_field():
    """Without a forward pass nothing shows where ModernBERT makes its queries."""
    model, base = build("modernbert"), build("modernbert", 64)
    plan = smupar.parameterize(model, base=base)
    with pytest.warns(smupar.PlanWarning, match=r"ModernBertAttention \('model.layers.0.attn'") as caught:
        smupar.set_attention_scale(model, plan)
    assert "rot" not in str(caught[0].message)
    assert list(plan.pending) == ["attention_scale"]


@pytest.mark.parametrize("name", ["gemma", "bloom"])
def test_plan_of_an_earlier_version_is_loaded_with_its_scale(name, tmp_path):
    model, _ = parameterized(name, multipliers="own")
    model.save_pretrained(tmp_path)
    plan = json.loads((tmp_path / "smupar_plan.json").read_text())
    for newer in ("attention", "multipliers", "seal"):
        del plan[newer]
    for row in plan["rows"]:
        del row["kept_factor"]
    (tmp_path / "smupar_plan.json").write_text(json.dumps(plan))
    (tmp_path / "sums.json").unlink()
    again, _ = huggingface.load(tmp_path)
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=1e-6)


def test_scale_that_was_set_by_hand_is_loaded_again(tmp_path):
    model, base = build("bloom"), build("bloom", 64)
    plan = smupar.parameterize(model, base=base)
    for attention in find_attentions(model):
        attention.module.inv_norm_factor = 1 / 40
    plan.settle("attention_scale")
    huggingface.save(model, plan, tmp_path)
    again, _ = huggingface.load(tmp_path)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", ["mamba", "rwkv"])  # RWKV's modules are called attention, but multiply no queries
def test_attention_free_model_needs_no_scale(name, tmp_path):
    model, plan = parameterized(name)
    assert plan.attention == []
    assert plan.pending == {}
    model.save_pretrained(tmp_path)
    again, plan = huggingface.load(tmp_path)  # without a warning, which would be an error here
    assert plan.pending == {}
    assert torch.equal(logits(again), logits(model))


def test_export_that_differs_from_the_original_is_not_kept(tmp_path):
    """Marian does not save its table of sines, so a factor that is folded into the table is lost."""
    torch.manual_seed(0)
    kind = transformers.MarianMTModel
    wide, narrow = (kind.config_class(**two_stacks(width, max_position_embeddings=64)) for width in (128, 64))
    for alpha, is_lost in ((1.0, False), (3.0, True)):
        model = kind(wide).eval()
        huggingface.parameterize(model, base=narrow, alpha_input=alpha)
        model.save_pretrained(tmp_path / f"sparse-{alpha}")
        out = tmp_path / f"plain-{alpha}"
        if is_lost:
            with pytest.raises(ValueError, match="has other outputs than the original, so it was not kept"):
                huggingface.export(tmp_path / f"sparse-{alpha}", out)
        else:
            huggingface.export(tmp_path / f"sparse-{alpha}", out)
        assert out.exists() == (not is_lost)


def test_export_keeps_the_heads_if_fewer_of_them_would_have_the_same_scale(tmp_path):
    """A single head of size 16 has the usual scale of 1/4, which is the rule's scale of heads of size 4."""
    kind = transformers.BertForMaskedLM
    model = kind(kind.config_class(hidden_size=16, num_attention_heads=4, **BERT)).eval()
    huggingface.parameterize(model, base=kind.config_class(hidden_size=8, num_attention_heads=2, **BERT))
    model.save_pretrained(tmp_path / "sparse")
    huggingface.export(tmp_path / "sparse", tmp_path / "plain")
    plain = kind.from_pretrained(tmp_path / "plain")
    assert plain.config.num_attention_heads == 4
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-5)


def musicgen(folder, rule):
    """A saved decoder of MusicGen, which reads a row of tokens for each codebook, and a batch for it."""
    kind = transformers.MusicgenForCausalLM
    fixed = {"num_hidden_layers": 1, "num_codebooks": 2, "vocab_size": 16, "pad_token_id": 16, "bos_token_id": 16}
    widths = ({"hidden_size": width, "ffn_dim": width, "num_attention_heads": width // 8} for width in (32, 16))
    wide, narrow = (kind.config_class(**sizes, **fixed) for sizes in widths)
    tokens, text = torch.arange(12).reshape(2, 6), torch.linspace(-1, 1, 96).reshape(1, 3, 32)
    model, batch = kind(wide).eval(), {"input_ids": tokens, "encoder_hidden_states": text}
    plan = huggingface.parameterize(model, base=narrow, rule=rule, roles={"lm_heads.*.weight": "unembedding"})
    huggingface.set_attention_scale(model, plan, batch)
    model.save_pretrained(folder)
    return model, batch


@pytest.mark.filterwarnings("ignore:no inputs for a forward pass are known", "ignore:.*not set")
def test_export_of_a_model_whose_inputs_are_unknown_needs_an_example(tmp_path):
    model, batch = musicgen(tmp_path / "sparse", "smupar")
    with pytest.raises(ValueError, match=r"no forward pass that smupar knows reaches this module: pass example="):
        huggingface.export(tmp_path / "sparse", tmp_path / "plain")
    huggingface.export(tmp_path / "sparse", tmp_path / "plain", example=batch)
    plain = type(model).from_pretrained(tmp_path / "plain")
    with torch.no_grad():
        torch.testing.assert_close(plain(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-5)


def test_export_says_that_it_did_not_compare_the_model(tmp_path):
    _, batch = musicgen(tmp_path / "sparse", "sp")
    with pytest.warns(UserWarning, match="it was not compared with the original: pass example="):
        huggingface.export(tmp_path / "sparse", tmp_path / "plain")
    huggingface.export(tmp_path / "sparse", tmp_path / "again", example=batch)


# name -> (fields of the config that count layers, ends of branches)
DEEPER = {
    "gptj": (["n_layer"], {"attn.out_proj", "mlp.fc_out"}),  # attention and MLP in parallel
    "falcon": (["num_hidden_layers"], {"self_attention.dense", "mlp.dense_4h_to_h"}),
    "mixtral": (["num_hidden_layers"], {"self_attn.o_proj", "mlp.experts"}),
    "mamba": (["num_hidden_layers"], {"mixer.out_proj"}),
    "whisper": (["encoder_layers", "decoder_layers"], {"self_attn.out_proj", "encoder_attn.out_proj", "fc2"}),
}


@thin
@pytest.mark.parametrize(("name", "fields", "ends"), [(name, *about) for name, about in DEEPER.items()])
def test_branches_of_a_model_that_is_deeper_than_its_base_are_found(name, fields, ends):
    kind, arguments = OTHERS[name][:2]
    base = getattr(transformers, kind).config_class(**{**arguments(64), **dict.fromkeys(fields, 1)})
    plan = huggingface.parameterize(build(name), base=base)
    assert {factor for _, factor in plan.branches} == {0.5}
    assert {path.split(".1.")[1] for path, _ in plan.branches if ".1." in path} == ends


def test_layers_that_share_their_weights_cannot_be_counted():
    sizes = {"vocab_size": 64, "embedding_size": 32, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    configs = [transformers.AlbertConfig(**sizes, num_hidden_layers=layers) for layers in (4, 2)]
    with pytest.raises(ValueError, match=r"num_hidden_layers is 4 in the model and 2 in the base.*with as many layers"):
        huggingface.parameterize(transformers.AlbertForMaskedLM(configs[0]), base=configs[1])
