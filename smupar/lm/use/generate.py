"""Samples text, for one prompt or several at the same time.

First the model is prepared for decoding: factors of the rule are folded into the weights, so that no hook runs at each token,
and layers keep only their non-zeros if that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smupar.execute.sparse.packed import pack
from smupar.lm.config.commands import GenerateConfig
from smupar.lm.model.gpt import GPT, Cache
from smupar.lm.run.distributed import pick_device
from smupar.lm.use.export import folded
from smupar.lm.use.load import is_of_transformers, load_model, load_transformers, num_positions
from smupar.refusals import refuse

_COLDEST = 1e-30  # fp32 overflows at lower temperatures; the likeliest token is certain long before

Logits = Callable[[Tensor], Tensor]  # new tokens (texts, tokens) -> logits of the next tokens (texts, vocabulary)


@dataclass(frozen=True)
class Decoder:
    """A model that is ready to generate, and its tokenizer."""

    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    vocab_size: int  # the tokenizer's; the extra ids of a padded vocabulary are never chosen
    ends: int | None  # the token that ends a text
    positions: int | None  # number of positions of the model; None: unlimited
    begin: Callable[[Tensor | None], Logits]  # starts a batch of texts, given their numbers of padding tokens on the left


def generate(config: GenerateConfig) -> Iterator[str]:
    """Yields the prompt and then the generated text, piece by piece. For several prompts, yields the complete texts with their
    numbers."""
    decoder = load_decoder(config)
    prompts = [decoder.encode(_valid(prompt)) for prompt in config.prompt]
    for prompt in prompts:
        _check_prompt(prompt, decoder, config.tokens)
    if len(prompts) == 1:
        steps = sample_texts(decoder.begin, prompts, config, vocab_size=decoder.vocab_size)
        yield from _pieces(decoder, prompts[0], (int(step[0]) for step in steps))
        return
    for number, text in enumerate(_whole_texts(decoder, prompts, config), 1):
        yield f"--- {number} of {len(prompts)}\n{text}\n"


def load_decoder(config: GenerateConfig) -> Decoder:
    path, device = Path(config.folder), pick_device(config.device)
    if is_of_transformers(path):
        model, tokenizer = load_transformers(path)
        ready = _ready(model, config, device)
        tell = (lambda text: tokenizer.encode(text)), (lambda ids: tokenizer.decode(ids))
        size = min(len(tokenizer), model.get_input_embeddings().num_embeddings)
        return Decoder(
            ready, *tell, size, tokenizer.eos_token_id, num_positions(model), lambda pads: _OfTransformers(ready, pads)
        )
    trained, own = load_model(path)
    gpt = GPT(replace(trained.config, tied=False))
    gpt.load_state_dict(folded(trained), assign=True)
    ready = _ready(gpt, config, device)
    positions = gpt.config.context if gpt.config.positions == "learned" else None
    return Decoder(ready, lambda text: own.encode(text).tolist(), own.decode, own.vocab_size, own.eot, positions, of_gpt(ready))


def _ready(model: Any, config: GenerateConfig, device: torch.device) -> Any:
    model = model.to(device, torch.bfloat16 if config.dtype == "bf16" else torch.float32).eval()
    pack(model, storage=config.storage, rows=len(config.prompt))
    return model


def of_gpt(model: GPT) -> Callable[[Tensor | None], Logits]:
    def begin(padding: Tensor | None) -> Logits:
        cache = Cache(len(model.blocks), padding)
        return lambda tokens: model(tokens, cache)[:, -1].float()

    return begin


class _OfTransformers:
    """Computes the logits of growing texts with a model of transformers."""

    def __init__(self, model: Any, padding: Tensor | None) -> None:
        self.model, self.padding = model, padding
        self.seen, self.past = 0, None

    def __call__(self, tokens: Tensor) -> Tensor:
        start, self.seen = self.seen, self.seen + tokens.shape[1]
        position = torch.arange(self.seen, device=tokens.device).expand(len(tokens), -1)
        padding = 0 if self.padding is None else self.padding[:, None]
        out = self.model(
            tokens,
            attention_mask=(position >= padding).long(),
            position_ids=(position - padding).clamp(min=0)[:, start:],
            past_key_values=self.past,
            use_cache=True,
        )
        self.past = out.past_key_values
        return out.logits[:, -1].float()


def _valid(prompt: str) -> str:
    """A prompt as text that UTF-8 can hold. Bytes on the command line that the locale could not decode are decoded here."""
    return prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _check_prompt(prompt: list[int], decoder: Decoder, num_tokens: int) -> None:
    vocabulary = decoder.model.get_input_embeddings() if hasattr(decoder.model, "get_input_embeddings") else None
    size = decoder.model.config.vocab_size if vocabulary is None else vocabulary.num_embeddings
    refuse(not prompt, "the prompt has no tokens: give at least one character with --prompt")
    refuse(max(prompt) >= size, f"the prompt has token {max(prompt)}, beyond the model's vocabulary of {size}")
    if decoder.positions is not None and len(prompt) + num_tokens > decoder.positions:
        room = decoder.positions - len(prompt)
        remedy = f"pass --tokens {room} or fewer" if room > 0 else "shorten the prompt"
        raise ValueError(f"the model has positions for {decoder.positions} tokens, but the prompt has {len(prompt)}: {remedy}")


# Tokens


def sample(model: GPT, prompt: list[int], config: GenerateConfig, *, vocab_size: int) -> Iterator[int]:
    """Samples one text token by token."""
    for step in sample_texts(of_gpt(model), [prompt], config, vocab_size=vocab_size):
        yield int(step[0])


def sample_texts(
    begin: Callable[[Tensor | None], Logits], prompts: list[list[int]], config: GenerateConfig, *, vocab_size: int
) -> Iterator[list[int]]:
    """Yields the next token of every text, step by step."""
    device = pick_device(config.device)
    rngs = [torch.Generator(device=device).manual_seed(config.seed) for _ in prompts]
    longest = max(map(len, prompts))
    missing = [longest - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[0] * gap + prompt for gap, prompt in zip(missing, prompts, strict=True)], device=device)
    with torch.no_grad():
        logits_of = begin(torch.tensor(missing, device=device) if any(missing) else None)
    for _ in range(config.tokens):
        with torch.no_grad():  # not around the yield, where it would also affect the caller
            tokens = choose(logits_of(tokens)[:, :vocab_size], config, rngs)
        yield tokens[:, 0].tolist()


def choose(logits: Tensor, config: GenerateConfig, rngs: list[torch.Generator]) -> Tensor:
    """The next token of each text, as a column."""
    if config.temperature < _COLDEST:
        return logits.argmax(1, keepdim=True)
    if config.top_k:
        least = logits.topk(min(config.top_k, logits.shape[1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    shares = torch.softmax(logits / config.temperature, 1)
    return torch.cat([torch.multinomial(row, 1, generator=rng)[None] for row, rng in zip(shares, rngs, strict=True)])


# Text


def _pieces(decoder: Decoder, prompt: list[int], tokens: Iterator[int]) -> Iterator[str]:
    """The text in pieces. For each token, only the text since the last piece is decoded. The last piece is decoded with it,
    since a tokenizer may treat the beginning of a text differently."""
    yield decoder.decode(prompt)
    ids, before, shown = list(prompt), max(0, len(prompt) - 1), len(prompt)
    for token in tokens:
        if token == decoder.ends:
            break
        ids.append(token)
        text = _since(decoder, ids, before, shown)
        if text and not text.endswith("\ufffd"):  # the last character may be incomplete: wait for the next token
            yield text
            before, shown = shown, len(ids)
    if rest := _since(decoder, ids, before, shown):
        yield rest


def _since(decoder: Decoder, ids: list[int], before: int, shown: int) -> str:
    """The text of the tokens from ``shown`` on. Tokens from ``before`` to ``shown`` are decoded with them, for context."""
    return decoder.decode(ids[before:])[len(decoder.decode(ids[before:shown])) :]


def _whole_texts(decoder: Decoder, prompts: list[list[int]], config: GenerateConfig) -> list[str]:
    texts, ended = [list(prompt) for prompt in prompts], [False] * len(prompts)
    for step in sample_texts(decoder.begin, prompts, config, vocab_size=decoder.vocab_size):
        for number, token in enumerate(step):
            ended[number] = ended[number] or token == decoder.ends
            if not ended[number]:
                texts[number].append(token)
        if all(ended):
            break
    return [decoder.decode(text) for text in texts]
