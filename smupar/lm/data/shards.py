"""Prepared text on disk: a folder of raw token arrays and an index that describes these arrays.

``tokens-00000.bin``, ``tokens-00001.bin``, ... hold little-endian unsigned integers, of 1, 2 or 4 bytes, as the size of the
vocabulary requires. A file that has its final name is complete and on disk. ``index.json`` is written last: a folder that has
one is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smupar.output.json_files import as_record, read_object, sealed_json
from smupar.refusals import refuse

FORMAT = "smupar-tokens/1"
INDEX, PROGRESS, VERIFIED = "index.json", "progress.json", "verified.json"

PREPARE_AGAIN = "delete the folder and prepare it again"


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer that made the tokens. Tokenizers with equal ``sha256`` make equal tokens."""

    name: str
    vocab_size: int
    eot: int | None
    sha256: str


@dataclass(frozen=True)
class Shard:
    file: str
    num_tokens: int
    num_documents: int  # documents that end in this shard
    sha256: str


@dataclass(frozen=True)
class ShardIndex:
    """The content of index.json."""

    tokenizer: TokenizerInfo
    largest_token: int
    shards: tuple[Shard, ...]
    source: dict[str, Any]  # the sources with their sizes, and the options of the preparation

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.tokenizer.vocab_size)

    def to_json(self) -> str:
        values = {
            "format": FORMAT,
            "tokenizer": asdict(self.tokenizer),
            "dtype": f"u{self.dtype.itemsize}",
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "largest_token": self.largest_token,
            "shards": [asdict(shard) for shard in self.shards],
            "source": self.source,
        }
        return sealed_json(values) + "\n"


@dataclass(frozen=True)
class _StoredIndex:
    """The stored form of index.json, with fields that follow from others."""

    format: str
    tokenizer: TokenizerInfo
    dtype: str
    num_tokens: int
    num_documents: int
    largest_token: int
    shards: tuple[Shard, ...]
    source: dict[str, Any]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest integer type that holds every id of the vocabulary."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def read_index(folder: str | Path) -> ShardIndex:
    folder = Path(folder)
    path = folder / INDEX
    refuse(folder.is_file(), f"{folder} is a file: make a folder of it with smupar data prepare {folder} --out FOLDER")
    refuse(not folder.is_dir(), f"no folder {folder}: make it with smupar data prepare FILE --out {folder}")
    refuse(
        not path.is_file() and (folder / PROGRESS).is_file(),
        f"the preparation of {folder} was interrupted: run the same prepare command again to resume",
    )
    refuse(
        not path.is_file(),
        f"{folder} is not a prepared folder (no {INDEX}): make one with smupar data prepare FILE --out FOLDER",
    )
    values = read_object(path, remedy=PREPARE_AGAIN)
    other = values.get("format", FORMAT)
    refuse(other != FORMAT, f"{path} has format {other!r} and this version reads {FORMAT!r}: {PREPARE_AGAIN}")
    stored = as_record(_StoredIndex, values, source=str(path), remedy=PREPARE_AGAIN)
    index = ShardIndex(stored.tokenizer, stored.largest_token, stored.shards, stored.source)
    consistent = (
        stored.num_tokens == index.num_tokens > 0
        and stored.dtype == f"u{index.dtype.itemsize}"
        and 0 <= index.largest_token < max(index.tokenizer.vocab_size, 1)
        and all(shard.num_tokens >= 0 and Path(shard.file).name == shard.file for shard in index.shards)
    )
    refuse(not consistent, f"{path} is damaged (its numbers do not fit its shards and vocabulary): {PREPARE_AGAIN}")
    return index


def check_sizes(folder: str | Path, index: ShardIndex, shards: Sequence[Shard] | None = None) -> None:
    """Checks that shards exist and have the expected length, by default all shards. This is fast, since it reads none."""
    for shard in index.shards if shards is None else shards:
        path = Path(folder) / shard.file
        expected = shard.num_tokens * index.dtype.itemsize
        size = path.stat().st_size if path.is_file() else None
        if size != expected:
            what = "is missing" if size is None else "is truncated" if size < expected else "is too long"
            raise ValueError(f"shard {path} {what}: {expected} bytes expected, {size or 0} found; {PREPARE_AGAIN}")
