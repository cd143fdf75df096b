"""Language models of transformers: decoders, mixtures of experts, state-space models, encoders, encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import transformers as hf
from torch import Tensor, nn

from tests.support.architectures.architecture import FIXED, HEAD_DIM, VOCAB, Architecture, labels, tokens

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def names(width: int) -> dict[str, Any]:
    """The fields that most configs have."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": width // HEAD_DIM,
        "max_position_embeddings": 32,
        **SPECIAL,
    }


def gpt_names(width: int) -> dict[str, Any]:
    return {"vocab_size": VOCAB, "n_embd": width, "n_layer": 2, "n_head": width // HEAD_DIM, "n_positions": 32, **SPECIAL}


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MOE = {"num_experts_per_tok": 2, "output_router_logits": False}


def shifted_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def logits_of(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).logits if isinstance(batch, dict) else model(input_ids=batch).logits


def dict_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def decoder(
    name: str,
    model: str,
    config: str,
    fields: Callable[[int], dict[str, Any]] = lambda width: {},
    *,
    start: Callable[[int], dict[str, Any]] = names,
    **facts: Any,
) -> Architecture:
    """A language model that predicts the next token."""

    def make(width: int) -> nn.Module:
        return getattr(hf, model)(getattr(hf, config)(**{**start(width), **fields(width)}))

    return Architecture(name, make, tokens, shifted_loss, logits_of, **facts)


def dense(name: str, stem: str, **fixed: Any) -> Architecture:
    """A decoder whose classes follow the usual names."""
    return decoder(name, f"{stem}ForCausalLM", f"{stem}Config", lambda width: fixed)


def grouped(width: int, **others: Any) -> dict[str, Any]:
    return {"num_key_value_heads": width // HEAD_DIM // 2, "head_dim": HEAD_DIM, **others}


def masked_lm(name: str, model: str, config: str, **fixed: Any) -> Architecture:
    def make(width: int) -> nn.Module:
        return getattr(hf, model)(getattr(hf, config)(**{**names(width), **BERT_DROPOUT, **fixed}))

    def batch(seed: int) -> dict[str, Tensor]:
        return {"input_ids": tokens(seed, length=8), "labels": tokens(seed + 500, length=8)}

    return Architecture(name, make, batch, dict_loss, lambda model, given: model(input_ids=given["input_ids"]).logits)


def bert_classifier(width: int) -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**names(width), **BERT_DROPOUT, num_labels=8))


def classified(seed: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(seed, num=4, length=4), "labels": labels(seed, 4)}


def pairs(seed: int) -> dict[str, Tensor]:
    """A sequence for the encoder and one for the decoder."""
    return {"input_ids": tokens(seed, num=1, length=8), "labels": tokens(seed + 500, num=1, length=8)}


def t5(width: int, **fixed: Any) -> nn.Module:
    sizes = {"d_model": width, "d_ff": 2 * width, "d_kv": HEAD_DIM, "num_heads": width // HEAD_DIM, "num_layers": 2}
    special = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout_rate": 0.0}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCAB, **sizes, **special, **fixed))


def bart(width: int, kind: str = "Bart") -> nn.Module:
    heads = {f"{part}_{what}": width // HEAD_DIM for part in ("encoder", "decoder") for what in ("attention_heads",)}
    inside = {f"{part}_ffn_dim": 2 * width for part in ("encoder", "decoder")} | {"encoder_layers": 2, "decoder_layers": 2}
    fixed = {"dropout": 0.0, "max_position_embeddings": 32, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    config = getattr(hf, f"{kind}Config")(vocab_size=VOCAB, d_model=width, **heads, **inside, **fixed, **SPECIAL)
    return getattr(hf, f"{kind}ForConditionalGeneration" if kind == "Bart" else f"{kind}MTModel")(config)


def deepseek(width: int) -> dict[str, Any]:
    latent = {"q_lora_rank": FIXED, "kv_lora_rank": FIXED, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": width, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return {**latent, **experts, "first_k_dense_replace": 1, "num_key_value_heads": width // HEAD_DIM, "n_shared_experts": 1}


def mamba2(width: int) -> dict[str, Any]:
    return {"num_heads": 2 * width // HEAD_DIM, "head_dim": HEAD_DIM, "n_groups": 1, "state_size": 8, "chunk_size": 16}


def opt(width: int) -> dict[str, Any]:
    return {"ffn_dim": 2 * width, "dropout": 0.0, "word_embed_proj_dim": width}


def falcon(width: int) -> dict[str, Any]:
    return {"hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_hidden_size": 2 * width}


def experts_of(width: int, **others: Any) -> dict[str, Any]:
    return {**grouped(width), "num_local_experts": 4, **MOE, **others}


def qwen_experts(inside: int, width: int) -> dict[str, Any]:
    shared = {"moe_intermediate_size": inside, "shared_expert_intermediate_size": inside}
    return {**grouped(width), "num_experts": 4, **shared, **MOE}


EXPERTS = {"*.experts.gate_up_proj": ("hidden", 2), "*.experts.down_proj": ("hidden", 2)}
DECODERS = [
    decoder("GPT-2", "GPT2LMHeadModel", "GPT2Config", lambda w: NO_DROPOUT, start=gpt_names),
    decoder("Llama", "LlamaForCausalLM", "LlamaConfig", grouped),
    decoder("Mistral", "MistralForCausalLM", "MistralConfig", grouped),
    decoder("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", lambda w: {"num_key_value_heads": w // 32}),
    decoder("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", grouped),
    dense("GPT-NeoX", "GPTNeoX", hidden_dropout=0.0),
    decoder("Gemma", "GemmaForCausalLM", "GemmaConfig", grouped),
    decoder("Gemma, one key head", "GemmaForCausalLM", "GemmaConfig", partial(grouped, num_key_value_heads=1)),
    decoder("Gemma 2", "Gemma2ForCausalLM", "Gemma2Config", partial(grouped, query_pre_attn_scalar=HEAD_DIM)),
    decoder("Gemma 3", "Gemma3ForCausalLM", "Gemma3TextConfig", partial(grouped, query_pre_attn_scalar=HEAD_DIM)),
    decoder("OPT", "OPTForCausalLM", "OPTConfig", opt),
    decoder(
        "OPT-350m (narrow embeddings)",
        "OPTForCausalLM",
        "OPTConfig",
        lambda w: opt(w) | {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
        roles={"*project_out.weight": "unembedding", "*project_in.weight": "embedding", "*embed_tokens.weight": "fixed"},
    ),
    dense("Phi", "Phi"),
    decoder("Phi-3", "Phi3ForCausalLM", "Phi3Config", lambda w: {"num_key_value_heads": w // 32}),
    decoder("StarCoder2", "Starcoder2ForCausalLM", "Starcoder2Config", lambda w: {"num_key_value_heads": w // 32}),
    decoder("OLMo 2", "Olmo2ForCausalLM", "Olmo2Config", lambda w: {"num_key_value_heads": w // 32}),
    decoder("Granite", "GraniteForCausalLM", "GraniteConfig", lambda w: {"num_key_value_heads": w // 32}),
    decoder("StableLM", "StableLmForCausalLM", "StableLmConfig", lambda w: {"num_key_value_heads": w // 32}),
    decoder("Cohere", "CohereForCausalLM", "CohereConfig", lambda w: {"num_key_value_heads": w // 32}),
    decoder("SmolLM3", "SmolLM3ForCausalLM", "SmolLM3Config", lambda w: {"num_key_value_heads": w // 32}),
    decoder("GLM", "GlmForCausalLM", "GlmConfig", grouped),
    decoder("Nemotron", "NemotronForCausalLM", "NemotronConfig", grouped),
    decoder("GPT-J", "GPTJForCausalLM", "GPTJConfig", lambda w: NO_DROPOUT | {"rotary_dim": 8}, start=gpt_names),
    decoder(
        "BLOOM", "BloomForCausalLM", "BloomConfig", lambda w: {"n_layer": 2, "n_head": w // HEAD_DIM, "hidden_dropout": 0.0}
    ),
    decoder("Falcon", "FalconForCausalLM", "FalconConfig", lambda w: falcon(w) | {"multi_query": True}),
    decoder(
        "Falcon, new decoder",
        "FalconForCausalLM",
        "FalconConfig",
        lambda w: falcon(w) | {"new_decoder_architecture": True, "num_kv_heads": w // 32},
    ),
    decoder("DeepSeek-V3", "DeepseekV3ForCausalLM", "DeepseekV3Config", deepseek, roles=EXPERTS),
    decoder("Mixtral", "MixtralForCausalLM", "MixtralConfig", experts_of, roles=EXPERTS),
    decoder(
        "Mixtral, experts of fixed size",
        "MixtralForCausalLM",
        "MixtralConfig",
        partial(experts_of, intermediate_size=FIXED),
        roles=EXPERTS,
    ),
    decoder("Qwen2-MoE", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", lambda w: qwen_experts(w, w), roles=EXPERTS),
    decoder(
        "Qwen2-MoE, experts of fixed size",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        lambda w: qwen_experts(FIXED, w),
        roles=EXPERTS,
    ),
    decoder("OLMoE", "OlmoeForCausalLM", "OlmoeConfig", lambda w: grouped(w) | {"num_experts": 4} | MOE, roles=EXPERTS),
    decoder(
        "Mamba",
        "MambaForCausalLM",
        "MambaConfig",
        lambda w: {"state_size": 8, "time_step_rank": w // 4},
        roles={"*.A_log": "vector"},
    ),
    decoder("Mamba-2", "Mamba2ForCausalLM", "Mamba2Config", mamba2),
]

OTHERS = [
    masked_lm("BERT", "BertForMaskedLM", "BertConfig"),
    Architecture("BERT, classifier", bert_classifier, classified, dict_loss, lambda m, b: m(input_ids=b["input_ids"]).logits),
    masked_lm("RoBERTa", "RobertaForMaskedLM", "RobertaConfig"),
    # Its head normalises what it projects to the size of the embeddings: a factor there would be lost.
    replace(
        masked_lm("ELECTRA", "ElectraForMaskedLM", "ElectraConfig", embedding_size=32),
        roles={"*embeddings_project.weight": "embedding", "generator_predictions.dense.weight": "hidden"},
    ),
    replace(masked_lm("ModernBERT", "ModernBertForMaskedLM", "ModernBertConfig", global_attn_every_n_layers=1)),
    Architecture("T5", t5, pairs, dict_loss, logits_of),
    Architecture(
        "T5 v1.1", partial(t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False), pairs, dict_loss, logits_of
    ),
    Architecture("BART", bart, pairs, dict_loss, logits_of),
    Architecture("Marian", partial(bart, kind="Marian"), pairs, dict_loss, logits_of),
]
