"""Writes the shards of a prepared folder. A file that has its final name is complete and on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from smupar.lm.config.validation import refuse
from smupar.lm.data.shards import INDEX, Shard, ShardIndex, TokenizerInfo, token_dtype
from smupar.output.files import sync_folder, write_atomic

_BUFFER = 1 << 22


class ShardWriter:
    """Appends tokens and closes a shard as soon as it holds ``shard_tokens`` or more. ``shards`` and ``largest_token``
    are what an earlier process completed."""

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
                self._file = self._temporary.open("wb", buffering=_BUFFER)
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
        """Completes the current shard, if anything is in it."""
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
            # What a full disk refused is still buffered, and closing tries once more to write it.
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
