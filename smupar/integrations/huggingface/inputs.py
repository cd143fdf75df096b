"""Makes small, meaningless inputs for a model of transformers from its config, to run forward passes and probes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smupar.model.attention_scale import call
from smupar.plan.forward.run_copy import Example, copied_to, run_copy

NUM_TOKENS = 6
NUM_SAMPLES = 3200  # samples of raw sound
NUM_FRAMES = 32  # of spectra, where the config does not fix it
IMAGE_SIZE = 64  # where the config does not fix it, as in convolutional models


def forward_passes(model: PreTrainedModel, batch: Example | None = None) -> list[Callable[[], Any]]:
    """Forward passes of the model on the user's batch, if there is one, and on small inputs; then those of every model inside
    it, such as the vision tower of a multimodal model."""
    device = str(_device(model))
    own = [] if batch is None else [lambda: call(model, copied_to(batch, device))]
    return [*own, *(partial(_run, part) for part in model.modules() if isinstance(part, PreTrainedModel))]


def fitting(model: PreTrainedModel) -> dict[str, Any] | None:
    """Inputs with which the model's forward pass works, with pictures if it reads them; None if no such inputs are known."""
    for make in (_with_pictures, example):
        try:
            inputs = make(model)
            if inputs is not None:
                run_copy(model, inputs, lambda copied, args, kwargs: copied(*args, **kwargs))
                return inputs
        except Exception:  # the config lacks the fields that are read here, or the forward pass needs something else
            continue
    return None


def _run(model: PreTrainedModel) -> Any:
    return model(**example(model))


def example(model: PreTrainedModel) -> dict[str, Any]:
    """Inputs for the model's forward pass."""
    config: Any = model.config
    makers: dict[str, Callable[[Any, nn.Module], Tensor]] = {
        "input_ids": _tokens,
        "pixel_values": _pixels,
        "input_features": _features,
        "input_values": _sound,
        "past_values": _series,
    }
    name = model.main_input_name
    inputs = {name: makers[name](config, model)} if name in makers else dict(model.dummy_inputs)
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = _tokens(config, model)
    if hasattr(config, "vision_config") and hasattr(config, "text_config") and hasattr(model, "logit_scale"):
        inputs["pixel_values"] = _pixels(config, model)  # the model compares texts with pictures
    if "input_ids" in inputs and "token_type_ids" in signature(type(model).forward).parameters:
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])  # some models use more parameters then
    return inputs


def _with_pictures(model: PreTrainedModel) -> dict[str, Any] | None:
    """A picture and a text with its placeholder tokens, for a language model that reads pictures; None for other models."""
    config: Any = model.config
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    if token is None or not hasattr(config, "vision_config"):
        return None
    pixels, text = _pixels(config, model), _tokens(config, model)
    side = config.vision_config.patch_size
    num_patches = pixels.shape[-2] // side * (pixels.shape[-1] // side)
    num_tokens = getattr(config, "mm_tokens_per_image", None) or num_patches
    return {"input_ids": torch.cat([text.new_full((1, num_tokens), token), text], 1), "pixel_values": pixels}


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _tokens(config: Any, model: nn.Module) -> Tensor:
    size = config.get_text_config().vocab_size
    taken = {getattr(config, name, None) for name in ("image_token_index", "image_token_id", "audio_token_id", "pad_token_id")}
    taken |= {getattr(config.get_text_config(), name, None) for name in ("pad_token_id", "bos_token_id")}
    free = [token for token in range(min(size, 64)) if token not in taken]
    return torch.tensor([[free[7 * place % len(free)] for place in range(NUM_TOKENS)]], device=_device(model))


def _pixels(config: Any, model: nn.Module) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or IMAGE_SIZE
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    frames = getattr(vision, "num_frames", None)  # of a video
    shape = (1, *([] if frames is None else [frames]), getattr(vision, "num_channels", 3), *sizes)
    return _waves(shape, model)


def _features(config: Any, model: nn.Module) -> Tensor:
    """Spectra: for Whisper, whose encoder halves their number, or for Speech2Text, which counts bins last."""
    bins = getattr(config, "input_feat_per_channel", None)
    return _waves((1, config.num_mel_bins, 2 * config.max_source_positions) if bins is None else (1, NUM_FRAMES, bins), model)


def _sound(config: Any, model: nn.Module) -> Tensor:
    """Raw sound, which Wav2Vec2 reads, or spectra, which AST reads."""
    bins = getattr(config, "num_mel_bins", None)
    return _waves((1, NUM_SAMPLES) if bins is None else (1, config.max_length, bins), model)


def _series(config: Any, model: nn.Module) -> Tensor:
    """A time series of each channel."""
    return _waves((1, config.context_length, getattr(config, "num_input_channels", 1)), model)


def _waves(shape: tuple[int, ...], model: nn.Module) -> Tensor:
    values = torch.arange(torch.Size(shape).numel(), device=_device(model)).reshape(shape).sin()
    return values.to(next(model.parameters()).dtype)
