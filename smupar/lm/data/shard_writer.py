"""Writes tokens into shards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from smupar.lm.data.shards import INDEX, Shard, ShardIndex, TokenizerInfo, token_dtype
from smupar.output.files import sync_folder, write_atomic
from smupar.refusals import refuse

_CHUNK = 1 << 22  # bytes that are written at a time


class ShardWriter:
    """Appends tokens, and closes a shard once it holds at least ``shard_tokens``. ``shards`` and ``largest_token`` come from an
    interrupted preparation that is resumed."""

    def __init__(
        self, folder: Path, *, vocab_size: int, shard_tokens: int, shards: Sequence[Shard] = (), largest_token: int = -1
    ):
        self.folder = folder
        self.vocab_size = vocab_size
        self.shard_tokens = shard_tokens
        self.shards = list(shards)
        self.largest_token = largest_token
        self._start()

    def _start(self) -> None:
        self._file: IO[bytes] | None = None
        self._num_before = sum(shard.num_tokens for shard in self.shards)
        self._num_tokens = self._num_documents = 0
        self._hash = hashlib.sha256()

    @property
    def num_tokens(self) -> int:
        return self._num_before + self._num_tokens

    @property
    def _path(self) -> Path:
        return self.folder / f"tokens-{len(self.shards):05d}.bin"

    @property
    def _temporary(self) -> Path:
        return self._path.with_suffix(".bin.tmp")

    def append(self, tokens: np.ndarray, *, ends_document: bool) -> bool:
        """Appends tokens. Returns whether this completed a shard."""
        if len(tokens):
            largest = int(tokens.max())
            refuse(
                largest >= self.vocab_size,
                f"the tokenizer gave token {largest}, outside its vocabulary of {self.vocab_size}: "
                "its file is damaged, get it again",
            )
            self.largest_token = max(self.largest_token, largest)
            if self._file is None:
                self._file = self._temporary.open("wb", buffering=_CHUNK)
            data = np.ascontiguousarray(tokens, dtype=token_dtype(self.vocab_size)).view(np.uint8).data
            self._file.write(data)
            self._hash.update(data)
            self._num_tokens += len(tokens)
        self._num_documents += ends_document
        if self._num_tokens < self.shard_tokens:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Completes the current shard, unless it is empty."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._path)
        sync_folder(self.folder)
        self.shards.append(Shard(self._path.name, self._num_tokens, self._num_documents, self._hash.hexdigest()))
        self._start()

    def abandon(self) -> None:
        """Drops the current shard, which also frees its disk space."""
        if self._file is not None:
            # Data that a full disk refused is still buffered, and closing the file tries to write it again.
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                self._temporary.unlink()
        self._start()


def write_tokens(
    folder: str | Path, tokens: np.ndarray, tokenizer: TokenizerInfo, *, shard_tokens: int = 100_000_000
) -> ShardIndex:
    """Makes a prepared folder from tokens. All of them count as one document."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    refuse(any(folder.iterdir()), f"{folder} is not empty: choose another folder")
    writer = ShardWriter(folder, vocab_size=tokenizer.vocab_size, shard_tokens=shard_tokens)
    for start in range(0, len(tokens), shard_tokens):
        part = tokens[start : start + shard_tokens]
        writer.append(part, ends_document=start + len(part) == len(tokens))
    writer.close()
    index = ShardIndex(tokenizer, writer.largest_token, tuple(writer.shards), {"tokens": len(tokens)})
    write_atomic(folder / INDEX, index.to_json())
    return index
