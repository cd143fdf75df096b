"""Hugging Face models that shapes do not decide, with an example: nothing has to be asked for.

In a file of its own because importing transformers takes seconds. Nothing is downloaded.
"""

import pytest
import torch
import transformers as hf

import smupar
from tests.plan.roles.nets import roles, widths

TOKENS = torch.arange(12).reshape(2, 6)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
TEXT = {"vocab_size": 40, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def sizes(width):
    return {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": width // 8}


def opt(width):
    config = hf.OPTConfig(**TEXT, **sizes(width), ffn_dim=4 * width, word_embed_proj_dim=24, do_layer_norm_before=False)
    return hf.OPTForCausalLM(config)


def mixtral(width):
    """Experts of fixed size."""
    config = hf.MixtralConfig(
        **TEXT, **sizes(width), intermediate_size=16, num_key_value_heads=width // 8, num_local_experts=4, num_experts_per_tok=2
    )
    return hf.MixtralForCausalLM(config)


def mamba(width):
    config = hf.MambaConfig(vocab_size=40, hidden_size=width, state_size=8, num_hidden_layers=2, pad_token_id=0, eos_token_id=0)
    return hf.MambaForCausalLM(config)


def deepseek(width):
    """Latent attention of fixed ranks, and experts of fixed size."""
    config = hf.DeepseekV3Config(
        **TEXT, **sizes(width), num_key_value_heads=width // 8, intermediate_size=2 * width, moe_intermediate_size=16,
        n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
        q_lora_rank=12, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    return hf.DeepseekV3ForCausalLM(config)


def clip(width):
    text = {**TEXT, **sizes(width), "intermediate_size": 4 * width}
    vision = {**sizes(width), "intermediate_size": 4 * width, "image_size": 8, "patch_size": 4}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


# The example, and (role, m_in, m_out) of weights that would have been asked for, or guessed wrong.
MODELS = {
    "OPT-350m": (opt, TOKENS, {
        "model.decoder.project_in.weight": ("embedding", 1, 4),
        "model.decoder.project_out.weight": ("unembedding", 4, 1),
        "model.decoder.embed_tokens.weight": ("fixed", 1, 1),
    }),
    "Mixtral": (mixtral, TOKENS, {
        "model.layers.0.mlp.gate.weight": ("router", 4, 1),
        "model.layers.0.mlp.experts.gate_up_proj": ("hidden", 4, 1),
        "model.layers.1.mlp.experts.down_proj": ("hidden", 1, 4),
        "lm_head.weight": ("unembedding", 4, 1),
    }),
    "Mamba": (mamba, TOKENS, {
        "backbone.layers.0.mixer.A_log": ("vector", 1, 4),
        "backbone.layers.0.mixer.conv1d.weight": ("vector", 1, 4),
        "backbone.layers.1.mixer.dt_proj.weight": ("hidden", 4, 4),
    }),
    "DeepSeek-V3": (deepseek, TOKENS, {
        "model.layers.0.self_attn.q_a_proj.weight": ("hidden", 4, 1),
        "model.layers.0.self_attn.q_b_proj.weight": ("hidden", 1, 4),
        "model.layers.1.mlp.gate.weight": ("router", 4, 1),
        "model.layers.1.mlp.experts.down_proj": ("hidden", 1, 4),
    }),
    "CLIP": (clip, {"input_ids": TOKENS, "pixel_values": IMAGES}, {
        "vision_model.embeddings.patch_embedding.weight": ("embedding", 1, 4),
        "visual_projection.weight": ("hidden", 4, 1),
        "text_projection.weight": ("hidden", 4, 1),
    }),
}  # fmt: skip


@pytest.mark.parametrize(("make", "example", "expected"), MODELS.values(), ids=MODELS)
def test_example_decides_every_role(make, example, expected):
    plan = smupar.make_plan(make(64), base=make(16), example=example)
    found = {name: (roles(plan)[name], *widths(plan, name)[0]) for name in expected}
    assert found == expected
    assert not {note.kind for note in plan.notes} & {"example", "dot product", "reads in part"}


def test_fused_output_of_mamba_is_noted():
    plan = smupar.make_plan(mamba(64), base=mamba(16), example=TOKENS)
    (note,) = (note for note in plan.notes if note.kind == "writes in part")
    assert "x_proj.weight" in str(note)
