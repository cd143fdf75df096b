"""Small models of transformers, by family, untrained and trained for a few steps."""

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
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
from smupar.integrations import huggingface

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
    "vit": (ViTForImageClassification, ViTConfig(**BLOCKS, intermediate_size=256, image_size=8, patch_size=4, num_labels=4)),
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
