"""Models of transformers that see or hear: classifiers, two towers, and language models with eyes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.support.architectures.architecture import HEAD_DIM, NUM_CLASSES, VOCAB, Architecture, labels, noise, tokens
from tests.support.architectures.language import SPECIAL, dict_loss, names

IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 3}


def tower(width: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    return {**sizes, "num_attention_heads": width // HEAD_DIM}


def classifier(name: str, stem: str, **fixed: Any) -> Architecture:
    def make(width: int) -> nn.Module:
        config = getattr(hf, f"{stem}Config")(**tower(width), **{**IMAGE, "num_labels": NUM_CLASSES, **fixed})
        return getattr(hf, f"{stem}ForImageClassification")(config)

    def batch(seed: int) -> dict[str, Tensor]:
        return {"pixel_values": noise(seed, 4, 3, 8, 8), "labels": labels(seed, 4)}

    return Architecture(name, make, batch, dict_loss, lambda model, given: model(pixel_values=given["pixel_values"]).logits)


def siglip(width: int) -> nn.Module:
    text = {**tower(width), "vocab_size": VOCAB, "max_position_embeddings": 16, **SPECIAL}
    config = hf.SiglipConfig(text_config=text, vision_config={**tower(width), **IMAGE}, num_labels=NUM_CLASSES)
    return hf.SiglipForImageClassification(config)


def convnext(width: int) -> nn.Module:
    sizes = {"hidden_sizes": [width, 2 * width], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "image_size": 8}
    return hf.ConvNextForImageClassification(hf.ConvNextConfig(**sizes, num_labels=NUM_CLASSES, layer_scale_init_value=0.1))


def pictures(seed: int, *, num: int = 4) -> dict[str, Tensor]:
    return {"pixel_values": noise(seed, num, 3, 8, 8), "labels": labels(seed, num)}


def clip(width: int, *, projection: int | None = None) -> nn.Module:
    text = {**tower(width), "vocab_size": VOCAB, "max_position_embeddings": 16, **SPECIAL}
    vision = {**tower(width), **IMAGE}
    # A temperature of 1: at the usual 1/14, sizes of gradients differ so much between seeds that eight do not suffice.
    ends = {"projection_dim": projection or width, "logit_scale_init_value": 0.0}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, **ends))


def captioned(seed: int) -> dict[str, Any]:
    """Pictures with a colour of their own, since to a random tower pictures of mere noise look alike."""
    captions = tokens(seed, num=4, length=5).clamp(min=3)
    captions[:, -1] = SPECIAL["eos_token_id"]  # the text tower reads the token at the end
    coloured = noise(seed, 4, 3, 8, 8) + 3 * noise(seed + 500, 4, 3, 1, 1)
    return {"pixel_values": coloured, "input_ids": captions, "return_loss": True}


def similarities(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch).logits_per_image


def whisper(width: int) -> nn.Module:
    layers = {f"{part}_layers": 2 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": width // HEAD_DIM for part in ("encoder", "decoder")}
    inside = {f"{part}_ffn_dim": 2 * width for part in ("encoder", "decoder")}
    ends = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "decoder_start_token_id": 1, **SPECIAL}
    config = hf.WhisperConfig(vocab_size=VOCAB, d_model=width, dropout=0.0, **layers, **heads, **inside, **ends)
    return hf.WhisperForConditionalGeneration(config)


def spoken(seed: int) -> dict[str, Tensor]:
    return {"input_features": noise(seed, 1, 8, 16), "labels": tokens(seed, num=1, length=8)}


def llava(width: int) -> nn.Module:
    vision = hf.CLIPVisionConfig(**tower(width), **IMAGE)
    text = hf.LlamaConfig(**names(width), num_key_value_heads=width // HEAD_DIM)
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=3, vision_feature_layer=-1)
    )


def paligemma(width: int) -> nn.Module:
    vision = hf.SiglipVisionConfig(**tower(width), **IMAGE)
    text = hf.GemmaConfig(**names(width), num_key_value_heads=width // HEAD_DIM, head_dim=HEAD_DIM)
    config = hf.PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=3, projection_dim=width)
    return hf.PaliGemmaForConditionalGeneration(config)


def seen(seed: int) -> dict[str, Tensor]:
    """Two pictures of four patches each, and what is said about them."""
    said = tokens(seed).clamp(min=4)
    ids = torch.cat([torch.full((2, 4), 3), said], 1)
    return {"input_ids": ids, "pixel_values": noise(seed, 2, 3, 8, 8), "labels": torch.where(ids == 3, -100, ids)}


def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).logits


SEEING = [
    classifier("ViT", "ViT"),
    classifier("DeiT", "DeiT"),
    classifier("DINOv2", "Dinov2"),
    classifier("BEiT", "Beit"),
    Architecture("SigLIP, classifier", siglip, pictures, dict_loss, logits_of),
    # One picture has 16 positions, which are its tokens.
    Architecture("ConvNeXt", convnext, partial(pictures, num=1), dict_loss, logits_of),
    Architecture("CLIP", clip, captioned, dict_loss, similarities, roles={"*patch_embedding.weight": "embedding"}),
    Architecture(
        "CLIP, projection of fixed size",
        partial(clip, projection=32),
        captioned,
        dict_loss,
        similarities,
        roles={"*patch_embedding.weight": "embedding", "*_projection.weight": "hidden"},
    ),
    Architecture("Whisper", whisper, spoken, dict_loss, logits_of),
    Architecture("LLaVA", llava, seen, dict_loss, logits_of),
    Architecture("PaliGemma", paligemma, seen, dict_loss, logits_of),
]
