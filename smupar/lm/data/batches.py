"""Batches are a pure function of (seed, step), for any number of ranks.

An epoch cuts the text into sequences and uses each of them once, in an order that is computed, not stored. The default text is
the source of the running Python's standard library, which needs no download. It differs between Python versions, so losses
cannot be compared across versions.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smupar.lm.config.run_config import STANDARD_LIBRARY, RunConfig, padded_vocab
from smupar.lm.data.shard_hashes import verify
from smupar.lm.data.shards import read_index
from smupar.lm.data.tokenizer import TOKENIZER_FILE, Tokenizer, read_definition
from smupar.lm.data.tokens import Tokens, open_tokens
from smupar.refusals import refuse

# Share of the text that is kept for validation, unless there is a separate text for that.
_VALID_SHARE = 0.05
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class CorpusInfo:
    """What is known about the text of a run, the content of data.json."""

    name: str
    num_tokens: int
    sha256: str  # hash of all text, including validation
    largest_token: int
    tokenizer: dict[str, Any]


@dataclass(frozen=True)
class Corpus:
    """The tokens that a run reads."""

    train: Tokens
    valid: Tokens
    info: CorpusInfo
    tokenizer: str | None  # the JSON of its tokenizer; None if tokens are bytes


def open_text(config: RunConfig, *, check: bool = True) -> Corpus:
    """The text of a run, split into training and validation. Raises ValueError if the text does not fit the model. ``check``
    also compares shards with their checksums."""
    tokens, info = _open(config.data, check)
    if config.valid_data is None:
        train, valid = split(tokens)
    else:
        valid, valid_info = _open(config.valid_data, check)
        refuse(
            valid_info.tokenizer["sha256"] != info.tokenizer["sha256"],
            f"{config.data} and {config.valid_data} have different tokenizers ({info.tokenizer['name']} and "
            f"{valid_info.tokenizer['name']}): prepare both with the same one",
        )
        train = tokens
        info = CorpusInfo(
            f"{info.name}, validated on {valid_info.name}",
            info.num_tokens + valid_info.num_tokens,
            _sha256(info.sha256.encode() + valid_info.sha256.encode()),
            max(info.largest_token, valid_info.largest_token),
            info.tokenizer,
        )
    refuse(
        info.largest_token >= config.model.vocab_size,
        f"the text has token {info.largest_token}, beyond the model's vocabulary of {config.model.vocab_size}: "
        f"pass --vocab-size {padded_vocab(info.tokenizer['vocab_size'])}",
    )
    for part, what in ((train, "training"), (valid, "validation")):
        num_sequences(part, config.seq_len, what)  # raises if the text is too short for one sequence
    definition = (
        None if config.data == STANDARD_LIBRARY else read_definition(Path(config.data), sha256=info.tokenizer["sha256"])
    )
    return Corpus(train, valid, info, definition)


def standard_library() -> Tokens:
    """The ``.py`` files of the standard library without its tests, in order of their paths, as bytes (about 12 MB)."""
    return Tokens([np.frombuffer(_python_source(), dtype=np.uint8)])


def _python_source() -> bytes:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts))
    text = b"".join(path.read_bytes() for path in files)
    if not text:
        raise FileNotFoundError(f"no Python source found under {root}: this Python ships without its library's source")
    return text


def split(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Training and validation text."""
    cut = int(len(tokens) * (1 - _VALID_SHARE))
    return tokens.slice(0, cut), tokens.slice(cut, len(tokens))


def _open(name: str, check: bool) -> tuple[Tokens, CorpusInfo]:
    if name == STANDARD_LIBRARY:
        source = _python_source()
        info = CorpusInfo(name, len(source), _sha256(source), max(source), asdict(Tokenizer("bytes").info))
        return Tokens([np.frombuffer(source, dtype=np.uint8)]), info
    index = verify(name) if check else read_index(name)
    refuse(
        "sources" in index.source and index.tokenizer.name != "bytes" and not (Path(name) / TOKENIZER_FILE).exists(),
        f"{Path(name) / TOKENIZER_FILE} is missing: restore it from a copy, or prepare the text again",
    )
    sha256 = _sha256("".join([index.tokenizer.sha256, *(shard.sha256 for shard in index.shards)]).encode())
    return open_tokens(name), CorpusInfo(name, index.num_tokens, sha256, index.largest_token, asdict(index.tokenizer))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Batches


def read_batch(
    tokens: Tokens,
    *,
    seed: int,
    step: int,
    batch_size: int,
    seq_len: int,
    rows: tuple[int, int] | None = None,
    to: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step. ``rows`` is (from, to) if a rank needs only a part of the batch. ``to`` moves tensors to
    a device."""
    first, last = (0, batch_size) if rows is None else rows
    count = num_sequences(tokens, seq_len)
    positions = step * batch_size + np.arange(first, last)
    epochs = range(int(positions[0]) // count, int(positions[-1]) // count + 1)
    starts = np.empty(len(positions), dtype=np.int64)
    for epoch in epochs:
        here = slice(None) if len(epochs) == 1 else positions // count == epoch
        offset, keys = _epoch(seed, epoch, len(tokens) - count * seq_len)
        starts[here] = offset + seq_len * shuffled(positions[here] % count, count, keys)
    windows = to(torch.from_numpy(tokens.windows(starts, seq_len + 1)))
    return windows[:, :-1], windows[:, 1:]


@lru_cache(maxsize=64)
def _epoch(seed: int, epoch: int, room: int) -> tuple[int, np.ndarray]:
    """The position of an epoch's first cut, and the keys of its permutation. Both differ between epochs."""
    digest = hashlib.sha256(f"{seed}/epoch/{epoch}".encode()).digest()
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    return int(rng.integers(room)), rng.integers(2**63, size=_ROUNDS).astype(np.uint64)


def num_sequences(tokens: Tokens, seq_len: int, what: str = "given") -> int:
    """The number of sequences in an epoch. It is one fewer than would fit, but at least one, so that epochs can cut the text at
    different places."""
    refuse(
        len(tokens) <= seq_len,
        f"the {what} text has {len(tokens)} tokens, fewer than one sequence of {seq_len} and its target: "
        "pass a smaller --seq-len, or more text",
    )
    return max(1, (len(tokens) - 1) // seq_len - 1)


_ROUNDS = 4


def shuffled(positions: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Permutes positions from 0 to count - 1. ``keys`` choose the permutation. A Feistel network over an even number of bits
    computes each position without a stored table. If a result is out of range, the network is applied again."""
    half = max(1, (int(count - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    bits = np.uint64(half)
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> bits, values[outside] & low
        for key in keys.astype(np.uint64):
            left, right = right, left ^ (_mix(right ^ key) & low)
        values[outside] = left << bits | right
        outside = values >= count
    return values.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Mixes bits, so that every bit of the result depends on every bit of x (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
