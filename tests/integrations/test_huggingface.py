"""Models of transformers under a rule: widths, coordinates, generation, folders and exports. Nothing is downloaded.

Tiny configurations at random init, in a file of its own because importing transformers takes seconds.
"""

import copy
import importlib
import itertools
import json
import sys
from fractions import Fraction

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import smupar
from smupar.cli.main import main
from smupar.integrations import huggingface
from smupar.integrations.huggingface.families import attentions
from smupar.lm.data import batches as data
from smupar.lm.use.score import load_scoring_model
from smupar.model.parameterize import mask_of

# The defaults lie outside of a small vocabulary, which transformers complains about.
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SMALL = {"vocab_size": 256, "max_position_embeddings": 32, **SPECIAL}
BLOCKS = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}
LLAMA = {**SMALL, **BLOCKS, "intermediate_size": 160, "num_key_value_heads": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KINDS = {
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=1, n_head=8, **NO_DROPOUT, **SPECIAL),
    ),
    "llama": (LlamaForCausalLM, LlamaConfig(**LLAMA)),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SMALL, **BLOCKS, intermediate_size=256)),
    "vit": (
        ViTForImageClassification,
        ViTConfig(**BLOCKS, intermediate_size=256, image_size=8, patch_size=4, num_labels=4),
    ),
}
# Further corners of the same families.
MORE_KINDS = {
    "gpt2 untied": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=8, tie_word_embeddings=False, n_inner=96,
                   scale_attn_by_inverse_layer_idx=True, **SPECIAL),
    ),
    "llama tied": (LlamaForCausalLM, LlamaConfig(**LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**LLAMA)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**LLAMA)),
    "qwen3 tied": (Qwen3ForCausalLM, Qwen3Config(**LLAMA, head_dim=16, tie_word_embeddings=True)),
}  # fmt: skip
EVERY_KIND = KINDS | MORE_KINDS


def build(kind, width=64):
    model_class, config = EVERY_KIND[kind]
    torch.manual_seed(0)
    return model_class(huggingface.base_config(config, width)).eval()


def images(number, seed=0, *, doubt=0.0):
    """One of four pictures in noise, and which; a share of the labels, the doubt, is drawn again."""
    pictures = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (number,), generator=rng)
    shown = pictures[labels] + 0.5 * torch.randn(number, 3, 8, 8, generator=rng)
    drawn_again = torch.rand(number, generator=rng) < doubt
    return shown, torch.where(drawn_again, torch.randint(4, (number,), generator=rng), labels)


def inputs(kind):
    if kind == "vit":
        return {"pixel_values": images(4)[0]}
    tokens = torch.randint(256, (2, 10), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def labelled(kind):
    given = inputs(kind)
    return {**given, "labels": images(4)[1] if kind == "vit" else given["input_ids"]}


@torch.no_grad()
def logits(model, kind):
    return model(**inputs(kind)).logits


def trained(kind, **settings):
    """A few steps, so that norms and biases are not what every model starts with."""
    model = build(kind)
    plan = huggingface.parameterize(model, **{"base": 32, "density": 0.5, "alpha_input": 3.0, "alpha_output": 2.0, **settings})
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=2**-6, weight_decay=0.1))
    assert smupar.audit(model, plan, optimizer) == []
    losses = []
    for _ in range(4):
        loss = model(**labelled(kind)).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
    return model, plan


# Configurations


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_base_config_keeps_heads_and_proportions(kind):
    model_class, config = EVERY_KIND[kind]
    base = huggingface.base_config(config, 32)
    assert (base.hidden_size, base.num_attention_heads, base.num_hidden_layers) == (32, 4, config.num_hidden_layers)
    inside = "n_inner" if config.model_type == "gpt2" else "intermediate_size"
    assert getattr(base, inside) == (getattr(config, inside) and getattr(config, inside) // 2)
    assert config.hidden_size == 64  # not changed
    assert type(base) is type(config)
    wide, narrow = (dict(attentions(model_class(one))) for one in (config, base))
    assert wide.keys() == narrow.keys()
    for path, attention in wide.items():
        assert attention.scaling == narrow[path].scaling  # heads of the same size
        if hasattr(attention, "num_key_value_groups"):
            assert attention.num_key_value_groups == narrow[path].num_key_value_groups == 2


def test_base_config_says_which_widths_are_possible():
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8)
    with pytest.raises(ValueError, match=r"num_attention_heads 32 and num_key_value_heads 8.*choose a multiple of 512"):
        huggingface.base_config(config)
    base = huggingface.base_config(config, 512)
    assert (base.num_attention_heads, base.num_key_value_heads, base.head_dim) == (4, 1, 128)
    assert base.intermediate_size == 11008 // 8


def test_base_config_leaves_a_single_head_for_keys_alone():
    config = LlamaConfig(**{**LLAMA, "num_key_value_heads": 1})
    base = huggingface.base_config(config, 32)
    assert (base.num_attention_heads, base.num_key_value_heads) == (4, 1)
    plan = huggingface.parameterize(LlamaForCausalLM(config), base=32)
    assert plan["model.layers.0.self_attn.k_proj.weight"].role == "hidden"
    assert plan["model.layers.0.self_attn.k_proj.weight"].width_out == 1


@pytest.mark.parametrize("width", [0, -64, 64.0, True])
def test_base_config_refuses_widths_that_are_none(width):
    with pytest.raises(ValueError, match="positive whole number"):
        huggingface.base_config(GPT2Config(), width)


# Plans


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_parameterize_leaves_nothing_to_the_user(kind):
    model = build(kind)
    own = {path: attention.scaling for path, attention in attentions(model)}
    plan = huggingface.parameterize(model, base=32, density=0.25)
    assert plan.pending == {}
    assert plan.output_factor == 0.5
    hidden = [row for row in plan if row.role == "hidden"]
    assert {row.width_in for row in hidden} == {row.width_out for row in hidden} == {2}
    assert {row.density for row in hidden} == {Fraction(1, 4)}
    size = 16 if kind == "qwen3 tied" else 8
    for path, attention in attentions(model):
        assert attention.scaling == pytest.approx(own[path] * size**-0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_sp_keeps_the_models_own_attention(kind):
    model = build(kind)
    own = [attention.scaling for _, attention in attentions(model)]
    huggingface.parameterize(model, base=32, rule="sp")
    assert [attention.scaling for _, attention in attentions(model)] == own


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_model_of_base_width_gets_the_roles_of_a_wider_one(kind):
    here, wider = (huggingface.parameterize(build(kind, width), base=32) for width in (32, 64))
    assert {row.name: row.role for row in here} == {row.name: row.role for row in wider}
    assert here.output_factor == 1


def test_base_may_be_a_config_or_a_model_with_as_many_key_heads():
    config = huggingface.base_config(LlamaConfig(**LLAMA), 32)
    config.num_key_value_heads = 4  # as the model has: by shapes alone keys and values look like readouts
    by_config = huggingface.parameterize(build("llama"), base=config)
    by_model = huggingface.parameterize(build("llama"), base=LlamaForCausalLM(config))
    assert by_config.to_json() == by_model.to_json()
    row = by_config["model.layers.0.self_attn.v_proj.weight"]
    assert (row.role, row.width_in, row.width_out) == ("hidden", 2, 1)


def test_users_roles_win():
    roles = {"*.k_proj.weight": "vector"}
    plan = huggingface.parameterize(build("llama"), base=32, roles=roles)
    assert plan["model.layers.0.self_attn.k_proj.weight"].role == "vector"
    assert plan["model.layers.0.self_attn.v_proj.weight"].role == "hidden"


def test_classifier_on_a_llama_is_the_unembedding():
    model = LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=3))
    plan = huggingface.parameterize(model, base=32)
    assert plan["score.weight"].role == "unembedding"
    assert plan.pending == {}


# Coordinates


# The defaults of `smupar check` for every family (learning rate, steps, tokens, base width, largest width and sparsity), with
# eight seeds. The middle of three equally distant points has no weight in a slope, so the ends are enough.
CHECK = {"base_width": 64, "lr": 2**-6, "steps": 10, "seeds": 8}
QUICK_CHECK = {**CHECK, "steps": 4, "seeds": 4}
AXES = {"width": {"widths": (64, 256)}, "density": {"widths": (256,), "densities": (1, 1 / 16)}}
# From 64 weights per neuron, as on the dense axis: from 16, dY at step 1 drifts by -0.2 at every learning rate.
DEEPER_AXES = {"width": {"widths": (128, 512), "densities": (1 / 2,)}, "density": AXES["density"]}
# Random logits of four classes have the size 1 at the base width and shrink from there, and the first updates with them.
READOUTS = {"vit": {"init_std": {"classifier.weight": 2**-7, "*": "fan_in"}}}


def batches(kind, steps):
    if kind == "vit":
        # Without doubt the pictures are learned in a few steps, in fewer by wider models, and gradients vanish with the loss.
        return [dict(zip(("pixel_values", "labels"), images(128, step, doubt=0.5), strict=True)) for step in range(steps)]
    text, _ = data.split(data.standard_library())
    tokens = [data.batch(text, seed=0, step=step, batch_size=16, seq_len=32)[0].long() for step in range(steps)]
    return [{"input_ids": one, "labels": one, "attention_mask": torch.ones_like(one)} for one in tokens]


def check(kind, *, layers=1, settings=CHECK, **axis):
    model_class, config = KINDS[kind]

    def make_model(width):
        wanted = huggingface.base_config(config, width)
        wanted.num_hidden_layers = layers
        return model_class(wanted)

    return smupar.coord_check(
        make_model,
        lambda model, batch: model(**batch).loss,
        batches(kind, settings["steps"]),
        rules=("smupar", "sp"),
        prepare=huggingface.set_attention_scale,
        progress=False,
        **settings,
        **READOUTS.get(kind, {}),
        **axis,
    )


@pytest.mark.parametrize(("kind", "axis"), [("llama", "density"), ("vit", "width")])
def test_a_quick_check_passes_under_smupar_and_fails_under_sp(kind, axis):
    report = check(kind, settings=QUICK_CHECK, **AXES[axis])
    assert report.verdicts == {"smupar": "pass", "sp": "fail"}, report.explain()


@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize(("kind", "axis"), list(itertools.product(KINDS, AXES)))
def test_coordinates_pass_under_smupar_and_fail_under_sp(kind, axis):
    report = check(kind, **AXES[axis])
    assert report.verdicts == {"smupar": "pass", "sp": "fail"}, report.explain()


@pytest.mark.slow
@pytest.mark.parametrize("axis", DEEPER_AXES)
@pytest.mark.parametrize("kind", KINDS)
def test_coordinates_of_deeper_models(kind, axis):
    report = check(kind, layers=2, **DEEPER_AXES[axis])
    assert report.verdicts == {"smupar": "pass", "sp": "fail"}, report.explain()


# Generation, folders, exports


def generate(model, kind):
    given = {name: tensor[:, :4] for name, tensor in inputs(kind).items()}
    return model.generate(**given, max_new_tokens=6, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
                          output_logits=True)  # fmt: skip


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_saved_loaded_and_exported_models_give_the_same_logits(kind, tmp_path):
    model, plan = trained(kind)
    wanted = logits(model, kind)
    model.save_pretrained(tmp_path / "sparse")
    again, same_plan = huggingface.load(tmp_path / "sparse")
    assert same_plan.diff(plan) == []
    assert smupar.audit(again, same_plan, trained=True) == []
    assert torch.equal(logits(again, kind), wanted)
    own, read = model.state_dict(), again.state_dict()
    assert own.keys() == read.keys()
    assert all(torch.equal(own[name], read[name]) for name in own)

    main(["export", str(tmp_path / "sparse"), str(tmp_path / "plain")])
    plain, seen = type(model).from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(seen.values())  # no key missing, none too many
    torch.testing.assert_close(logits(plain, kind), wanted, rtol=1e-4, atol=1e-5)
    naive = type(model).from_pretrained(tmp_path / "sparse")
    assert (logits(naive, kind) - wanted).abs().max() > 0.1  # what the export is for
    for row in plan:
        if row.masked:
            assert not plain.get_parameter(row.name)[~mask_of(model, row.name)].any()

    if model.can_generate():
        tokens = generate(model, kind)
        # One token at a time, with a cache, the factors are there as well.
        with torch.no_grad():
            at_once = model(tokens.sequences).logits[:, 3:-1]
        torch.testing.assert_close(torch.stack(tokens.logits, 1), at_once, rtol=1e-4, atol=1e-4)
        assert torch.equal(generate(again, kind).sequences, tokens.sequences)
        assert torch.equal(generate(plain, kind).sequences, tokens.sequences)


def test_export_of_equal_factors_stays_tied(tmp_path):
    model, _ = trained("gpt2", rule="sp")
    model.save_pretrained(tmp_path / "sparse")
    huggingface.export(tmp_path / "sparse", tmp_path / "plain", dtype="bf16")
    plain = GPT2LMHeadModel.from_pretrained(tmp_path / "plain")
    assert plain.lm_head.weight is plain.transformer.wte.weight
    assert plain.dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "wanted"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_export_has_the_dtype_that_was_asked_for(dtype, wanted, tmp_path):
    model, _ = trained("gpt2")
    model.bfloat16().save_pretrained(tmp_path / "sparse")
    assert f", {dtype}, " in huggingface.export(tmp_path / "sparse", tmp_path / "plain", dtype=dtype)
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "plain").dtype == wanted


def test_export_in_another_dtype_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dtype must be one of fp32, bf16, got 'fp16'"):
        huggingface.export(tmp_path, tmp_path / "plain", dtype="fp16")


def test_loaded_model_trains_with_masked_gradients(tmp_path):
    model, _ = trained("gpt2")
    model.save_pretrained(tmp_path)
    again, plan = huggingface.load(tmp_path)
    again.train()
    again(**labelled("gpt2")).loss.backward()
    name = "transformer.h.0.mlp.c_fc.weight"
    mask, gradient = mask_of(again, name), again.get_parameter(name).grad
    assert gradient[mask].any()
    assert not gradient[~mask].any()
    assert plan[name].density == 0.5


def test_copy_saves_its_own_weights(tmp_path):
    model, plan = trained("gpt2")
    other = copy.deepcopy(model)
    smupar.attach(other, plan)
    with torch.no_grad():
        other.transformer.ln_f.weight.mul_(2)
    other.save_pretrained(tmp_path)
    again, _ = huggingface.load(tmp_path)
    assert torch.equal(again.transformer.ln_f.weight, other.transformer.ln_f.weight)


def test_model_in_several_files_is_loaded(tmp_path):
    model, _ = trained("llama")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits(huggingface.load(tmp_path)[0], "llama"), logits(model, "llama"))


def test_other_ranks_leave_the_plan_to_the_first(tmp_path):
    model, _ = trained("gpt2")
    model.save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.iterdir())


def test_pushing_without_the_plan_is_refused(tmp_path):
    model, _ = trained("gpt2")
    with pytest.raises(ValueError, match=r"use model\.push_to_hub"):
        model.save_pretrained(tmp_path, push_to_hub=True)


def test_masks_that_pruning_added_are_loaded(tmp_path):
    model = build("llama")
    plan = huggingface.parameterize(model, base=32)
    optimizer = torch.optim.AdamW(smupar.param_groups(model, plan, lr=2**-6))
    sparsifier = smupar.GMP(model, plan, optimizer, density=0.25, every=1, stop=2)
    for _ in range(2):
        model(**labelled("llama")).loss.backward()
        optimizer.step()
        sparsifier.step()
    model.save_pretrained(tmp_path)
    again, same_plan = huggingface.load(tmp_path)
    assert torch.equal(logits(again, "llama"), logits(model, "llama"))
    mask = mask_of(again, "model.layers.0.mlp.up_proj.weight")
    assert int(mask.sum()) == mask.numel() // 4
    assert smupar.audit(again, same_plan, trained=True) == []


def test_model_that_keeps_only_non_zeros_is_saved_loaded_and_exported(tmp_path):
    model, plan = trained("llama")
    wanted = logits(model, "llama")
    smupar.sparsify_storage(model, plan, backend="csr")
    model.save_pretrained(tmp_path / "sparse")
    again, _ = huggingface.load(tmp_path / "sparse")
    assert smupar.audit(again, plan, trained=True) == []
    torch.testing.assert_close(logits(again, "llama"), wanted, rtol=1e-4, atol=1e-5)
    huggingface.export(tmp_path / "sparse", tmp_path / "plain")
    plain = type(model).from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(logits(plain, "llama"), wanted, rtol=1e-4, atol=1e-5)


def test_model_parameterized_by_hand_can_be_saved(tmp_path):
    model = build("gpt2")
    plan = smupar.parameterize(model, base=build("gpt2", 32), density=0.5)
    huggingface.set_attention_scale(model, plan)
    huggingface.save(model, plan, tmp_path)
    again, _ = huggingface.load(tmp_path, model_class=GPT2LMHeadModel)
    assert torch.equal(logits(again, "gpt2"), logits(model, "gpt2"))


# Bad input


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    model = build("gpt2")
    huggingface.parameterize(model, base=32, density=0.5)
    model.save_pretrained(path)
    return path


def copied(folder, out):
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    return out


def test_loading_a_plain_folder_says_how_to_save(tmp_path):
    build("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no smupar_plan.json.*from_pretrained"):
        huggingface.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"format": "smupar-plan/1"}'])
def test_damaged_plan_names_the_file(folder, tmp_path, text):
    out = copied(folder, tmp_path / "copy")
    (out / "smupar_plan.json").write_text(text)
    with pytest.raises(ValueError, match=r"smupar_plan.json: "):
        huggingface.load(out)


@pytest.mark.parametrize("lost", ["transformer.ln_f.weight", "transformer.h.0.mlp.c_fc.weight_mask"])
def test_missing_tensor_is_named(folder, tmp_path, lost):
    out = copied(folder, tmp_path / "copy")
    tensors = load_file(out / "model.safetensors")
    del tensors[lost]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"incomplete, it lacks '{lost}'"):
        huggingface.load(out)


def test_damaged_or_missing_weights_are_named(folder, tmp_path):
    out = copied(folder, tmp_path / "copy")
    whole = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(ValueError, match="weights are damaged"):
        huggingface.load(out)
    (out / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        huggingface.load(out)


def test_class_that_transformers_lacks_is_asked_for(folder, tmp_path):
    out = copied(folder, tmp_path / "copy")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "architectures": ["MyGPT2"]}))
    with pytest.raises(ValueError, match=r"no class called MyGPT2.*model_class="):
        huggingface.load(out)
    assert type(huggingface.load(out, model_class=GPT2LMHeadModel)[0]) is GPT2LMHeadModel


def test_export_command_refuses_what_it_cannot_do(folder, tmp_path, capsys):
    for flags in (["--format", "sparse"], ["--best"]):
        with pytest.raises(SystemExit, match="2"):
            main(["export", str(folder), str(tmp_path / "out"), *flags])
        assert "reads dense weights: leave out" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(folder), str(tmp_path)])
    assert "exists already" in capsys.readouterr().err


def test_scoring_a_folder_that_needs_its_plan_is_refused(folder):
    with pytest.raises(ValueError, match="smupar export"):
        load_scoring_model(folder, torch.device("cpu"))


def test_quantized_model_is_refused_unchanged():
    model = build("gpt2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    with pytest.raises(ValueError, match="quantized"):
        huggingface.parameterize(model, base=32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_lora_model_is_refused_unchanged():
    model = build("llama")
    layer = model.model.layers[0].self_attn.q_proj
    layer.lora_A = torch.nn.Linear(64, 4, bias=False)  # as PEFT names it
    with pytest.raises(ValueError, match=r"LoRA.*merge_and_unload"):
        huggingface.parameterize(model, base=32)
    assert not smupar.model.parameterize.is_parameterized(model)


def test_other_modules_and_wrapped_models_are_refused():
    with pytest.raises(ValueError, match=r"a Linear is no model of transformers: use smupar\.parameterize"):
        huggingface.parameterize(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="parameterize first, then compile or wrap it"):
        huggingface.parameterize(torch.nn.DataParallel(build("gpt2")), base=32)


def test_second_parameterize_is_refused():
    model = build("gpt2")
    huggingface.parameterize(model, base=32)
    with pytest.raises(ValueError, match="parameterized already"):
        huggingface.parameterize(model, base=32)


def test_base_of_another_architecture_is_refused():
    with pytest.raises(ValueError, match="config is of a 'llama', the model a 'gpt2'"):
        huggingface.parameterize(build("gpt2"), base=LlamaConfig(**LLAMA))


def import_anew(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("smupar.integrations.huggingface")]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("smupar.integrations.huggingface")


@pytest.mark.parametrize("version", ["4.57.1", "6.0.0", "unknown"])
def test_other_versions_of_transformers_are_refused(version, monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=rf"transformers 5\.x, this is {version}: pip install 'smupar\[hf\]'"):
        import_anew(monkeypatch)


@pytest.mark.parametrize("field", ["scaling", "q_proj"])
def test_attention_of_an_earlier_version_is_refused_unchanged(field):
    model = build("vit")
    for _, attention in list(attentions(model)):
        delattr(attention, field)
    with pytest.raises(ValueError, match="attention of this vit is not what current versions of transformers have"):
        huggingface.parameterize(model, base=32)
    assert not smupar.model.parameterize.is_parameterized(model)


def test_missing_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'smupar\[hf\]'"):
        import_anew(monkeypatch)


def test_names_are_found_and_others_are_not():
    assert [name for name in dir(huggingface) if not callable(getattr(huggingface, name))] == []
    with pytest.raises(AttributeError, match="no attribute 'from_pretrained'"):
        _ = huggingface.from_pretrained


def test_pretrained_weights_are_not_lost_in_silence(folder):
    model = GPT2LMHeadModel.from_pretrained(folder)
    with pytest.warns(smupar.PlanWarning, match="replaced by a fresh init"):
        huggingface.parameterize(model, base=32)


# Architectures that are not known


def bloom(width):
    return BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=width, n_layer=1, n_head=width // 8, **SPECIAL)).eval()


def test_unknown_architecture_needs_a_base_and_says_what_to_confirm(tmp_path):
    model = bloom(64)
    with pytest.raises(ValueError, match=r"not 'bloom': build the base's config yourself"):
        huggingface.parameterize(model, base=32)
    with pytest.warns(smupar.PlanWarning, match=r"'bloom' is not among.*Please confirm.*attention scale"):
        plan = huggingface.parameterize(model, base=bloom(32).config, density=0.5)
    assert "attention_scale" in plan.pending
    assert {row.role for row in plan} == {"embedding", "hidden", "vector"}
    model.save_pretrained(tmp_path / "sparse")
    with pytest.warns(smupar.PlanWarning, match="attention scale of a 'bloom' is not known"):
        again, _ = huggingface.load(tmp_path / "sparse")
    assert torch.equal(logits(again, "gpt2"), logits(model, "gpt2"))
    with pytest.raises(ValueError, match="attention of a 'bloom' is not known"):
        huggingface.export(tmp_path / "sparse", tmp_path / "plain")


def test_unknown_architecture_is_told_where_its_scale_may_be():
    config = GemmaConfig(**{**LLAMA, "head_dim": 8})
    base = GemmaConfig(**{**LLAMA, "head_dim": 8, "hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4,
                          "num_key_value_heads": 2})  # fmt: skip
    model = GemmaForCausalLM(config)
    with pytest.warns(smupar.PlanWarning, match=r"'gemma' is not among.*it may be GemmaAttention\.scaling"):
        plan = huggingface.parameterize(model, base=base)
    assert list(plan.pending) == ["attention_scale"]
    huggingface.set_attention_scale(model, plan)
    assert plan.pending == {}
    assert model.model.layers[0].self_attn.scaling == 1 / 8


def test_scale_is_set_where_the_size_of_heads_has_another_name_and_refused_where_there_is_none():
    config = BertConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=8)
    base = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    model = BertForMaskedLM(config)
    with pytest.warns(smupar.PlanWarning, match=r"it may be BertSelfAttention\.scaling"):
        plan = huggingface.parameterize(model, base=base)
    huggingface.set_attention_scale(model, plan)
    assert model.bert.encoder.layer[0].attention.self.scaling == 1 / 8
    assert plan.pending == {}
    with pytest.raises(ValueError, match="no module of this BloomForCausalLM has the fields 'scaling'"):
        huggingface.set_attention_scale(bloom(32), plan)
