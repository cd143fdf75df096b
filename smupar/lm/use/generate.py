"""Sampling text. The model is called as in training, so the logits carry the same output factor."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from smupar.lm.config.commands import GenerateConfig
from smupar.lm.config.validation import check_not_too_large
from smupar.lm.model.gpt import GPT, Cache
from smupar.lm.run.distributed import pick_device
from smupar.lm.use.load import load_model
from smupar.plan.settings import refuse

_COLDEST = 1e-30  # below it logits divided by the temperature overflow fp32; the likeliest token is certain long before


def generate(config: GenerateConfig) -> Iterator[str]:
    """Yields the prompt and then the generated text, piece by piece."""
    refuse(
        config.tokens < 1 or not 0 <= config.temperature < math.inf or config.top_k < 0,
        "--tokens must be above 0, --temperature and --top-k at least 0",
    )
    check_not_too_large("tokens", config.tokens)
    refuse(abs(config.seed) >= 2**63, "--seed must fit into 64 bits: choose a smaller number")
    model, tokenizer = load_model(config.folder, device=pick_device(config.device))
    prompt = tokenizer.encode(config.prompt).tolist()
    refuse(not prompt, "the prompt is empty: give at least one character with --prompt")
    refuse(
        max(prompt) >= model.config.vocab_size,
        f"the prompt has token {max(prompt)}, beyond the model's vocabulary of {model.config.vocab_size}",
    )
    shown = tokenizer.decode(prompt)
    yield shown
    ids = list(prompt)
    for token in sample(model, prompt, config, vocab_size=tokenizer.vocab_size):
        if token == tokenizer.eot:
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # the last character may be incomplete: wait for the next token
            yield text[len(shown) :]
            shown = text
    if rest := tokenizer.decode(ids)[len(shown) :]:
        yield rest


@torch.no_grad()
def sample(model: GPT, prompt: list[int], config: GenerateConfig, *, vocab_size: int) -> Iterator[int]:
    """Samples token by token, and keeps the keys and values of earlier tokens. The extra ids of a padded vocabulary are never
    chosen."""
    device = model.embedding.weight.device
    rng = torch.Generator(device=device).manual_seed(config.seed)
    if model.config.positions == "learned" and len(prompt) + config.tokens > model.config.context:
        room = model.config.context - len(prompt)
        remedy = f"pass --tokens {room} or fewer" if room > 0 else "shorten the prompt"
        raise ValueError(f"the model has positions for {model.config.context} tokens, the prompt has {len(prompt)}: {remedy}")
    cache = Cache(len(model.blocks))
    tokens = torch.tensor([prompt], device=device)
    for _ in range(config.tokens):
        logits = model(tokens, cache)[0, -1, :vocab_size].float()
        tokens = choose(logits, config, rng).view(1, 1)
        yield int(tokens)


def choose(logits: Tensor, config: GenerateConfig, rng: torch.Generator) -> Tensor:
    if config.temperature < _COLDEST:
        return logits.argmax()
    if config.top_k:
        least = logits.topk(min(config.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(torch.softmax(logits / config.temperature, 0), 1, generator=rng)
