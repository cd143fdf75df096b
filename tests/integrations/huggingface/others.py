"""Small models of architectures that smupar has no facts about, at any width: heads of 16, two layers."""

import torch
import transformers

from tests.integrations.huggingface.tiny import SPECIAL

TOKENS = {"vocab_size": 64, "max_position_embeddings": 64, **SPECIAL}


def blocks(width, **more):
    return {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": width // 16,
            **more}  # fmt: skip


def grouped(width, **more):
    return {**blocks(width), **TOKENS, "num_key_value_heads": width // 32, **more}


def pictures(width):
    return blocks(width, image_size=16, patch_size=8)


def two_stacks(width, **more):
    sizes = {"layers": 2, "attention_heads": width // 16, "ffn_dim": 2 * width}
    stacks = {f"{stack}_{name}": value for stack in ("encoder", "decoder") for name, value in sizes.items()}
    return {"d_model": width, "vocab_size": 64, "decoder_start_token_id": 0, **stacks, **SPECIAL, **more}


def llava(width):
    return {
        "vision_config": transformers.CLIPVisionConfig(**pictures(width)),
        "text_config": transformers.LlamaConfig(**grouped(width)),
        "image_token_index": 5,
    }


def deepseek(width):
    heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": width}
    return grouped(width, num_key_value_heads=width // 16, first_k_dense_replace=1, **heads, **experts)


# name -> (class, arguments of its config at a width)
OTHERS = {
    "gemma": ("GemmaForCausalLM", lambda width: grouped(width, head_dim=16)),
    "gemma2": ("Gemma2ForCausalLM", lambda width: grouped(width, head_dim=16, query_pre_attn_scalar=16)),
    "gemma3": ("Gemma3ForCausalLM", lambda width: grouped(width, head_dim=16, query_pre_attn_scalar=16)),
    "gemma3n": (  # a scale of its routers, whose effect is small
        "Gemma3nForCausalLM",
        lambda width: {**grouped(width, head_dim=16, layer_types=["full_attention", "full_attention"]),
                       "intermediate_size": [2 * width] * 2, "hidden_size_per_layer_input": 32, "laurel_rank": 32,
                       "vocab_size_per_layer_input": 64, "activation_sparsity_pattern": [0.0, 0.0],
                       "num_kv_shared_layers": 0},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        lambda width: {"d_model": width, "d_kv": 16, "d_ff": 2 * width, "num_layers": 2, "num_heads": width // 16,
                       "vocab_size": 64, "decoder_start_token_id": 0, **SPECIAL},
    ),
    "switch": (  # divides its logits by a root of the width only while its head is tied
        "SwitchTransformersForConditionalGeneration",
        lambda width: {"d_model": width, "d_kv": 16, "d_ff": 2 * width, "num_layers": 2, "num_sparse_encoder_layers": 1,
                       "num_decoder_layers": 2, "num_sparse_decoder_layers": 1, "num_heads": width // 16, "num_experts": 4,
                       "expert_capacity": 16, "vocab_size": 64, "decoder_start_token_id": 0, **SPECIAL},
    ),
    "granite": (
        "GraniteForCausalLM",
        lambda width: grouped(width, logits_scaling=width / 64, attention_multiplier=0.5),
    ),
    "llava": ("LlavaForConditionalGeneration", llava),
    "falcon": (
        "FalconForCausalLM",
        lambda width: {**blocks(width), "vocab_size": 64, "num_kv_heads": width // 32, "new_decoder_architecture": True,
                       **SPECIAL},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        lambda width: {**blocks(width), **TOKENS, "cls_token_id": 0, "sep_token_id": 0},
    ),
    "gptj": (
        "GPTJForCausalLM",
        lambda width: {"n_embd": width, "n_layer": 2, "n_head": width // 16, "n_positions": 64, "rotary_dim": 8,
                       "vocab_size": 64, **SPECIAL},
    ),
    "bloom": (
        "BloomForCausalLM",
        lambda width: {"hidden_size": width, "n_layer": 2, "n_head": width // 16, "vocab_size": 64, **SPECIAL},
    ),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        deepseek,
    ),
    "deepseek_v32": (  # an indexer chooses tokens, and its dot products are no attention
        "DeepseekV32ForCausalLM",
        lambda width: {**deepseek(width), "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4},
    ),
    "flaubert": (  # divides queries in code
        "FlaubertWithLMHeadModel",
        lambda width: {"emb_dim": width, "n_layers": 2, "n_heads": width // 16, "vocab_size": 64, "pad_index": 0,
                       "max_position_embeddings": 64, "bos_index": 1, "eos_index": 2},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        lambda width: grouped(width, num_local_experts=4, num_experts_per_tok=2),
    ),
    "mamba": (
        "MambaForCausalLM",
        lambda width: {"hidden_size": width, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 64, **SPECIAL},
    ),
    "rwkv": (
        "RwkvForCausalLM",
        lambda width: {"hidden_size": width, "attention_hidden_size": width, "intermediate_size": 2 * width,
                       "num_hidden_layers": 2, "context_length": 32, "vocab_size": 64, **SPECIAL},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        lambda width: grouped(width, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    ),
    "qwen3_next": (  # norms multiply by 1 + weight; linear attention with queries and keys of length 1
        "Qwen3NextForCausalLM",
        lambda width: grouped(width, head_dim=16, linear_num_key_heads=width // 32, linear_num_value_heads=width // 16,
                              linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2,
                              moe_intermediate_size=width, shared_expert_intermediate_size=width,
                              layer_types=["linear_attention", "full_attention"]),
    ),
    "segformer": (  # its config has no size of pictures
        "SegformerForSemanticSegmentation",
        lambda width: {"hidden_sizes": [width, 2 * width], "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
                       "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [width // 16, width // 8],
                       "mlp_ratios": [2, 2], "decoder_hidden_size": width, "num_labels": 8},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        lambda width: two_stacks(width, num_mel_bins=8, max_source_positions=16, max_target_positions=16),
    ),
}  # fmt: skip


def config_of(name, width):
    kind, arguments = OTHERS[name]
    return getattr(transformers, kind).config_class(**arguments(width))


def build(name, width=128):
    torch.manual_seed(0)
    return getattr(transformers, OTHERS[name][0])(config_of(name, width)).eval()
