"""Models of transformers under a rule: widths, coordinates, generation, folders and exports. Nothing is downloaded.

Tiny configurations at random init, in a file of its own because importing transformers takes seconds.
"""

import itertools
from fractions import Fraction

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import smupar
from smupar.integrations import huggingface
from smupar.lm.data.batches import read_batch, split, standard_library
from smupar.plan.scales.find_attention import find_attentions
from tests.integrations.huggingface.tiny import EVERY_KIND, KINDS, LLAMA, SPECIAL, build, images


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_base_config_keeps_heads_and_proportions(kind):
    model_class, config = EVERY_KIND[kind]
    base = huggingface.base_config(config, 32)
    assert (base.hidden_size, base.num_attention_heads, base.num_hidden_layers) == (32, 4, config.num_hidden_layers)
    inside = "n_inner" if config.model_type == "gpt2" else "intermediate_size"
    assert getattr(base, inside) == (getattr(config, inside) and getattr(config, inside) // 2)
    assert config.hidden_size == 64  # not changed
    assert type(base) is type(config)
    wide, narrow = (
        {attention.path: attention.module for attention in find_attentions(model_class(chosen_config))}
        for chosen_config in (config, base)
    )
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


def scales(model):
    found = {attention.path: attention.module.scaling for attention in find_attentions(model)}
    assert found
    return found


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_parameterize_leaves_nothing_to_the_user(kind):
    model = build(kind)
    own = scales(model)
    plan = huggingface.parameterize(model, base=32, density=0.25)
    assert plan.pending == {}
    assert plan.output_factor == 0.5
    hidden = [row for row in plan if row.role == "hidden"]
    assert {row.width_in for row in hidden} == {row.width_out for row in hidden} == {2}
    assert {row.density for row in hidden} == {Fraction(1, 4)}
    size = 16 if kind == "qwen3 tied" else 8
    assert scales(model) == pytest.approx({path: scale * size**-0.5 for path, scale in own.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_sp_keeps_the_models_own_attention(kind):
    model = build(kind)
    own = scales(model)
    huggingface.parameterize(model, base=32, rule="sp")
    assert scales(model) == own


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
    text, _ = split(standard_library())
    tokens = [read_batch(text, seed=0, step=step, batch_size=16, seq_len=32)[0].long() for step in range(steps)]
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in tokens]


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


def bloom(width):
    return BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=width, n_layer=1, n_head=width // 8, **SPECIAL)).eval()


def test_unknown_architecture_needs_a_base_and_says_what_to_confirm():
    model = bloom(64)
    with pytest.raises(ValueError, match=r"not 'bloom': build the base's config yourself"):
        huggingface.parameterize(model, base=32)
    with pytest.warns(smupar.PlanWarning, match=r"'bloom' is not among.*Please confirm.*nothing is left under TO DO"):
        plan = huggingface.parameterize(model, base=bloom(32).config, density=0.5)
    assert plan.pending == {}
    assert {row.role for row in plan} == {"embedding", "hidden", "vector"}


def test_base_with_another_activation_is_named():
    base = huggingface.base_config(LlamaConfig(**LLAMA), 32)
    base.hidden_act = "relu"
    with pytest.warns(smupar.PlanWarning, match=r"differ in widths only, but hidden_act \('silu', base 'relu'\) differ"):
        huggingface.parameterize(build("llama"), base=base)
