"""Computes loglikelihoods of texts for downstream tasks. Requests come from one file, and scores go to another, so this can run
on a GPU machine without the evaluation harness.

It does the same as the harness's own ``HFLM``. Spaces at the end of a context belong to the continuation. Context and
continuation are tokenised together, and the tokens after the context's tokens belong to the continuation. A text that is too
long is cut at its beginning.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from smupar.lm.config.commands import ScoringConfig
from smupar.lm.data.tokenizer import Tokenizer
from smupar.lm.model.gpt import GPT
from smupar.lm.run.distributed import pick_device
from smupar.lm.run.folder import versions
from smupar.lm.use.load import (
    is_export,
    is_of_transformers,
    load_model,
    load_run,
    load_transformers,
    num_positions,
    read_description,
)
from smupar.lm.use.score_files import SCORES_FORMAT, Score, ScoreRequest, begin_scores, read_requests, score_line
from smupar.output.files import resolved, writing
from smupar.refusals import refuse

_AT_ONCE = 1024  # number of positions whose probabilities are in memory at the same time


@dataclass(frozen=True)
class ScoringModel:
    """The parts of a model and its tokenizer that scoring uses."""

    # (tokens, rows, positions) -> logits at these positions. For our own models, only these logits are computed, because
    # computing all of them would take most of the time and memory.
    logits: Callable[[Tensor, Tensor, Tensor], Tensor]
    encode: Callable[[str], list[int]]
    encode_plain: Callable[[str], list[int]]  # without the token that some tokenizers add before a text
    prefix: int | None  # the token that replaces an empty context
    vocab_size: int
    positions: int | None  # the largest number of positions; None if there is no limit
    identity: dict[str, Any]  # identifies the model, in the header of the scores


# Models


def refuse_without_model(folder: str | Path) -> None:
    path = Path(folder)
    refuse(
        not read_description(path) and resolved(path).parent.name != "checkpoints",
        f"{path} holds no model: give a run, a checkpoint, an export, or a folder that transformers wrote",
    )


def load_scoring_model(folder: str | Path, device: torch.device) -> ScoringModel:
    """Loads a model from a run, one of its checkpoints, an export, or a folder that transformers reads."""
    path = Path(folder)
    refuse_without_model(path)
    if is_of_transformers(path):
        return _from_transformers(path, device)
    if is_export(path):
        return scoring_model_of(*load_model(path, device=device), _identity(path))
    run = load_run(path, device=device)
    return scoring_model_of(run.model, run.tokenizer, _identity(path) | {"config_id": run.config.id, "step": run.step})


def _identity(path: Path) -> dict[str, Any]:
    return {"folder": str(path), "config_id": None, "step": None}


def scoring_model_of(model: GPT, tokenizer: Tokenizer, identity: dict[str, Any]) -> ScoringModel:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).tolist()

    return ScoringModel(
        logits=lambda tokens, rows, positions: model.unembedding(model.features(tokens)[rows, positions]),
        encode=encode,
        encode_plain=encode,
        prefix=tokenizer.eot,
        vocab_size=model.config.vocab_size,
        positions=model.config.context if model.config.positions == "learned" else None,
        identity=identity | {"weights": _fingerprint(model), "tokenizer": tokenizer.sha256[:16]},
    )


def _from_transformers(path: Path, device: torch.device) -> ScoringModel:
    model, tokenizer = load_transformers(path)
    model = model.to(device)
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    start = None if prefix is None else tokenizer.decode([prefix])

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=start is None or not text.startswith(start))

    vocabulary = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
    return ScoringModel(
        logits=lambda tokens, rows, positions: model(tokens).logits[rows, positions],
        encode=encode,
        encode_plain=partial(tokenizer.encode, add_special_tokens=False),
        prefix=prefix,
        vocab_size=model.get_input_embeddings().num_embeddings,
        positions=num_positions(model),
        identity=_identity(path) | {"weights": _fingerprint(model), "tokenizer": vocabulary},
    )


def _fingerprint(model: nn.Module) -> str:
    """A hash of some of the weights, to tell models apart. Reading all weights would take as long as loading them."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sample = parameter.detach().flatten()[:: max(1, parameter.numel() // 64)].float().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


# Scoring


@torch.no_grad()
def score(
    model: ScoringModel, requests: Iterable[ScoreRequest], config: ScoringConfig, device: torch.device
) -> Iterator[list[tuple[ScoreRequest, Score]]]:
    """Yields scores batch by batch. The longest texts come first, so that a lack of memory shows immediately. Texts that differ
    only in their last token, such as yes and no, share a pass. The model is causal, so padding on the right changes nothing."""
    length = min(config.max_length, model.positions or config.max_length)
    asked: dict[tuple[int, ...], list[tuple[ScoreRequest, list[int]]]] = defaultdict(list)
    num_cut = 0
    for request in requests:
        context, continuation = encode_pair(model, request, length)
        num_cut += len(context) + len(continuation) > length + 1
        asked[tuple([*context, *continuation][-(length + 1) : -1])].append((request, continuation))
    if num_cut:
        warnings.warn(f"{num_cut} requests are longer than {length} tokens: their beginning was cut off", stacklevel=2)
    inputs = sorted(asked, key=len, reverse=True)
    for first in range(0, len(inputs), config.batch_size):
        batch = inputs[first : first + config.batch_size]
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in batch], batch_first=True)
        places: list[tuple[int, int, int]] = []  # row, position, target
        answers: list[tuple[ScoreRequest, int]] = []  # each request, with the number of its places
        for row, ids in enumerate(batch):
            for request, continuation in asked[ids]:
                start = len(ids) - len(continuation)
                places += [(row, position, target) for position, target in enumerate(continuation, start)]
                answers.append((request, len(continuation)))
        rows, positions, targets = torch.tensor(places, device=device).T
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
            logits = model.logits(tokens.to(device), rows, positions)
        judged = [_judged(*part) for part in zip(logits.split(_AT_ONCE), targets.split(_AT_ONCE), strict=True)]
        sizes = [size for _, size in answers]
        numbers, greedy = (torch.cat(parts).cpu().split(sizes) for parts in zip(*judged, strict=True))
        yield [
            (request, Score(logs.sum().item(), bool(is_greedy.all())))
            for (request, _), logs, is_greedy in zip(answers, numbers, greedy, strict=True)
        ]


def _judged(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of each target's probability, and whether it is the most likely token."""
    log_shares = logits.float().log_softmax(-1)
    return log_shares.gather(-1, targets[:, None])[:, 0], log_shares.argmax(-1) == targets


def encode_pair(model: ScoringModel, request: ScoreRequest, length: int) -> tuple[list[int], list[int]]:
    """Tokens of context and continuation. Both have at least one token."""
    context, continuation = request.context, request.continuation
    if spaces := len(context) - len(context.rstrip()):
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    before = model.encode(context) if context else []
    if before:
        after = model.encode(context + continuation)[len(before) :]
    else:
        after = model.encode_plain(continuation)
        if model.prefix is None:
            raise ValueError(f"{request.where} has no context, and the tokenizer has no end-of-text token to replace it")
        before, after = (after[:1], after[1:]) if after[:1] == [model.prefix] else ([model.prefix], after)
    refuse(
        not 0 < len(after) <= length,
        f"{request.where} has a continuation of {len(after)} tokens, but the model takes 1 to {length}",
    )
    largest = max(*before, *after)  # both have at least one token
    refuse(
        largest >= model.vocab_size,
        f"{request.where} has token {largest}, beyond the model's vocabulary of {model.vocab_size}",
    )
    return before, after


def score_file(folder: str, requests: str | Path, out: str | Path, config: ScoringConfig) -> str:
    """Scores the requests that ``out`` lacks. Returns a line with their number."""
    _, asked = read_requests(requests)
    path = Path(out)
    device = pick_device(config.device)
    model = load_scoring_model(folder, device)
    answered = begin_scores(
        path,
        {
            "format": SCORES_FORMAT,
            **model.identity,
            "dtype": config.dtype,
            "max_length": min(config.max_length, model.positions or config.max_length),
            "versions": versions(),
        },
    )
    missing = {request.key: request for request in asked if request.key not in answered}
    bar = tqdm(total=len(missing), desc=str(folder), unit=" requests", disable=None, leave=False)
    with bar, writing(path), path.open("a", encoding="utf-8") as file:
        for scored in score(model, missing.values(), config, device):
            for request, answer in scored:
                refuse(
                    not math.isfinite(answer.loglikelihood),
                    f"{folder} gives {request.where} a loglikelihood that is not finite: has the model diverged?",
                )
                row = {"task": request.task, "doc": request.doc, "index": request.index, "key": request.key}
                file.write(score_line(row | asdict(answer)))
            file.flush()
            bar.update(len(scored))
    return f"{folder}: {len(missing):,} scores, {len(answered):,} already computed, in {path}"
