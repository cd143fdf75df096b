"""Prepared text on disk: a folder of raw token arrays and an index that describes these arrays.

``tokens-00000.bin``, ``tokens-00001.bin``, ... hold little-endian unsigned integers, of 1, 2 or 4 bytes, as the size of the
vocabulary requires. A file that has its final name is complete and on disk. ``index.json`` is written last: a folder that has
one is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from smupar.output.files import sync_folder, write_atomic
from smupar.output.json_files import DamagedFileError, as_record, read_object, sealed_json
from smupar.refusals import refuse

FORMAT = "smupar-tokens/1"
INDEX, PROGRESS, VERIFIED = "index.json", "progress.json", "verified.json"

_CHUNK = 1 << 22  # bytes that are read or written at a time
_AGAIN = "delete the folder and prepare it again"
BAR_BYTES = 1 << 30  # hashing fewer bytes takes about a second and needs no progress bar
_SMALL = BAR_BYTES  # a text of up to this size is read at each start, since a disk can damage it and keep its time


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
    values = read_object(path, remedy=_AGAIN)
    other = values.get("format", FORMAT)
    refuse(other != FORMAT, f"{path} has format {other!r} and this version reads {FORMAT!r}: {_AGAIN}")
    stored = as_record(_StoredIndex, values, source=str(path), remedy=_AGAIN)
    index = ShardIndex(stored.tokenizer, stored.largest_token, stored.shards, stored.source)
    consistent = (
        stored.num_tokens == index.num_tokens > 0
        and stored.dtype == f"u{index.dtype.itemsize}"
        and 0 <= index.largest_token < max(index.tokenizer.vocab_size, 1)
        and all(shard.num_tokens >= 0 and Path(shard.file).name == shard.file for shard in index.shards)
    )
    refuse(not consistent, f"{path} is damaged (its numbers do not fit its shards and vocabulary): {_AGAIN}")
    return index


def check_sizes(folder: str | Path, index: ShardIndex, shards: Sequence[Shard] | None = None) -> None:
    """Checks that shards exist and have the expected length, by default all shards. This is fast, since it reads none."""
    for shard in index.shards if shards is None else shards:
        path = Path(folder) / shard.file
        expected = shard.num_tokens * index.dtype.itemsize
        size = path.stat().st_size if path.is_file() else None
        if size != expected:
            what = "is missing" if size is None else "is truncated" if size < expected else "is too long"
            raise ValueError(f"shard {path} {what}: {expected} bytes expected, {size or 0} found; {_AGAIN}")


def verify(folder: str | Path) -> ShardIndex:
    """Checks the size of every shard, and the hash of each that is not recorded as intact. A small text is read once by each
    process. Intact shards of a large one are recorded, so that the next start is quick."""
    folder = Path(folder)
    index = read_index(folder)
    check_sizes(folder, index)
    now = {shard.file: _state(folder, shard) for shard in index.shards}
    now[INDEX] = {"sha256": hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()}
    if index.num_tokens * index.dtype.itemsize <= _SMALL:
        _check_once(folder.resolve(), json.dumps(now))
        return index
    verified = _read_verified(folder)
    same_index = verified.get(INDEX) == now[INDEX]
    todo = [shard for shard in index.shards if not same_index or verified.get(shard.file) != now[shard.file]]
    if not todo:
        return index
    check_content(folder, index, todo)
    # In a read-only folder the record cannot be written, so shards are hashed again next time.
    with suppress(OSError):
        write_atomic(folder / VERIFIED, json.dumps(now, indent=1) + "\n")
    return index


@lru_cache(maxsize=64)
def _check_once(folder: Path, state: str) -> None:
    """Reads all shards, but only once for each ``state`` of the files, since the runs of a study share a text."""
    index = read_index(folder)
    check_content(folder, index, index.shards)


def check_content(folder: Path, index: ShardIndex, shards: Sequence[Shard]) -> None:
    """Reads these shards, whose sizes have been checked. Raises if one differs from the index."""
    size = sum(shard.num_tokens for shard in shards) * index.dtype.itemsize
    with tqdm(
        total=size, desc="verify", unit="B", unit_scale=True, disable=True if size < BAR_BYTES else None, leave=False
    ) as bar:
        for wrong in wrong_shards(folder, index, shards, bar.update):
            raise ValueError(f"{wrong}: {_AGAIN}")


def wrong_shards(
    folder: Path, index: ShardIndex, shards: Sequence[Shard], show: Callable[[int], object] = lambda size: None
) -> Iterator[str]:
    """Reads these shards, and says how each damaged one differs from the index. ``show`` is called with the number of bytes
    read."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda shard: _hash_and_largest(folder / shard.file, index.dtype, show), shards)
        try:
            for shard, (sha256, largest) in zip(shards, found, strict=True):
                if sha256 != shard.sha256:
                    yield (
                        f"shard {folder / shard.file} has changed since it was prepared (sha256 {sha256[:12]}..., expected "
                        f"{shard.sha256[:12]}...)"
                    )
                elif largest > index.largest_token:
                    yield f"{folder / INDEX} is damaged (largest_token is {index.largest_token}, {shard.file} has {largest})"
        finally:
            pool.shutdown(cancel_futures=True)


def _state(folder: Path, shard: Shard) -> dict[str, Any]:
    stat = (folder / shard.file).stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "sha256": shard.sha256}


def _read_verified(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / VERIFIED, remedy="")
    except DamagedFileError:
        return {}


def _hash_and_largest(path: Path, dtype: np.dtype[Any], show: Callable[[int], object]) -> tuple[str, int]:
    digest, largest = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            whole = len(chunk) // dtype.itemsize * dtype.itemsize
            largest = max(largest, int(np.frombuffer(chunk[:whole], dtype).max(initial=0)))
            show(len(chunk))
    return digest.hexdigest(), largest


class Tokens:
    """Several arrays, memory-mapped or not, as one read-only sequence. Data is read only when it is needed."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        # Plain ndarray views, because every slice of a np.memmap costs microseconds of Python.
        self._arrays = [np.asarray(array).view(np.ndarray) for array in arrays if len(array)]
        self._starts = np.cumsum([0, *(len(array) for array in self._arrays)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def slice(self, start: int, stop: int) -> Tokens:
        """A view of the tokens from ``start`` up to, but not including, ``stop``."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"slice [{start}, {stop}) is outside the {len(self)} tokens")
        pairs = zip(self._arrays, self._starts.tolist(), strict=False)
        return Tokens([array[max(0, start - first) : max(0, stop - first)] for array, first in pairs])

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """``length`` tokens from each start, as int64 of shape (len(starts), length)."""
        starts = np.asarray(starts)
        refuse(length < 1, f"windows have at least one token, got length {length}")
        refuse(
            starts.ndim != 1 or starts.dtype.kind not in "iu",
            f"starts must be a vector of whole numbers, got {starts.dtype} of shape {starts.shape}",
        )
        windows = np.empty((len(starts), length), dtype=np.int64)
        if not len(starts):
            return windows
        if starts.min() < 0 or starts.max() + length > len(self):
            raise IndexError(
                f"windows of {length} from {starts.min()} to {starts.max()} leave the {len(self)} tokens: "
                f"the last start is {len(self) - length}"
            )
        shards = np.searchsorted(self._starts, starts, side="right") - 1
        offsets = starts - self._starts[shards]
        for window, shard, offset in zip(windows, shards.tolist(), offsets.tolist(), strict=True):
            filled = 0
            while filled < length:  # a window may continue in the next shards
                part = self._arrays[shard][offset : offset + length - filled]
                window[filled : filled + len(part)] = part
                filled += len(part)
                shard, offset = shard + 1, 0
        return windows


def open_tokens(folder: str | Path) -> Tokens:
    """Maps the shards into memory. It checks sizes; ``verify`` checks hashes."""
    index = read_index(folder)
    check_sizes(folder, index)
    return Tokens([np.memmap(Path(folder) / shard.file, dtype=index.dtype, mode="r") for shard in index.shards])


# Writing


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
