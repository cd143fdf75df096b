"""Small inputs for a model of transformers, from its config alone. They are for probes, and have no meaning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

NUM_TOKENS = 6


def runs(model: PreTrainedModel) -> list[Callable[[], Any]]:
    """Forward passes of the model and of every model inside it, such as the vision tower of a model that reads both."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [partial(_run, part) for part in parts]


def _run(model: PreTrainedModel) -> Any:
    return model(**example(model))


def example(model: PreTrainedModel) -> dict[str, Any]:
    """Inputs that the model can be called with."""
    config: Any = model.config
    makers: dict[str, Callable[[Any, nn.Module], Tensor]] = {
        "input_ids": _tokens,
        "pixel_values": _pixels,
        "input_features": _features,
    }
    inputs = {model.main_input_name: makers[model.main_input_name](config, model)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = _tokens(config, model)
    if hasattr(config, "vision_config") and hasattr(config, "text_config") and hasattr(model, "logit_scale"):
        inputs["pixel_values"] = _pixels(config, model)  # compares texts with pictures
    return inputs


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
    size = vision.image_size
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    shape = (1, getattr(vision, "num_channels", 3), *sizes)
    return _waves(shape, model)


def _features(config: Any, model: nn.Module) -> Tensor:
    """Spectra, as Whisper reads them: its encoder halves their number."""
    shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
    return _waves(shape, model)


def _waves(shape: tuple[int, ...], model: nn.Module) -> Tensor:
    values = torch.arange(torch.Size(shape).numel(), device=_device(model)).reshape(shape).sin()
    return values.to(next(model.parameters()).dtype)
