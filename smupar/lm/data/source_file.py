"""Reads a file once, hashes it while reading, and notices if the file changes during the reading or later."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from smupar.refusals import refuse

# Number of bytes that are read, and of characters that are handed on, at a time. Tokenizers run one thread per piece.
PIECE = 1 << 18


@dataclass(frozen=True)
class ReadBytes:
    """Number and hash of the bytes that were read from the start of a file."""

    num_bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()


class HashedFile(io.FileIO):
    """A file that hashes what is read from it."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._sha256 = hashlib.sha256()
        self._num_bytes = 0
        self._so_far = ReadBytes()

    @property
    def so_far(self) -> ReadBytes:
        if self._so_far.num_bytes != self._num_bytes:
            self._so_far = ReadBytes(self._num_bytes, self._sha256.hexdigest())
        return self._so_far

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self._sha256.update(content)
        self._num_bytes += len(content)
        return content

    def readinto(self, buffer: Any, /) -> int:
        num_bytes = super().readinto(buffer)
        self._sha256.update(memoryview(buffer)[:num_bytes])
        self._num_bytes += num_bytes
        return num_bytes


@contextmanager
def open_source(path: Path, size: int | None) -> Iterator[tuple[io.BufferedReader, HashedFile]]:
    """The decompressed content, and the raw file. If ``size`` is given, the file must be read to its end, have that size, and
    not change meanwhile."""
    try:
        with HashedFile(path) as raw:
            before = _state(path)
            # The type checker does not accept GzipFile as a RawIOBase, but it works as one.
            content: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            with io.BufferedReader(content, PIECE) as stream:
                yield stream, raw
                if size is not None:
                    _refuse_if_changed(path, raw.so_far, size, looks_the_same=_state(path) == before)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is not gzip, or damaged ({error}): get it again, or rename it if it is not compressed"
        ) from error
    except OSError as error:
        raise ValueError(
            f"cannot read {path} ({error.strerror or error}): check that it exists and that you may read it"
        ) from error


def _state(path: Path) -> tuple[int, ...]:
    """A value that changes with every write to the file. It contains the time of the last change (ctime), which programs cannot
    set. Other actions, such as new permissions, change it too."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _refuse_if_changed(path: Path, read: ReadBytes, size: int, *, looks_the_same: bool) -> None:
    same = read.num_bytes == size
    if same and not looks_the_same:
        with path.open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == read.sha256
    refuse(not same, f"{path} changed while it was read: run the same command again when nothing writes to it")


def still_begins_with(path: Path, read: ReadBytes, bar: tqdm[Any]) -> bool:
    """Whether a file still begins with what was read from it before."""
    with open_source(path, None) as (_, raw):
        while missing := read.num_bytes - raw.so_far.num_bytes:
            chunk = raw.read(min(missing, PIECE))
            bar.update(len(chunk))
            if not chunk:
                return False
        return raw.so_far == read
