"""Tensors on disk, as safetensors. torch.distributed.checkpoint writes and reads them, each rank its own shards. Files are
hashed while they are written."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from smupar.lm.run.distributed import World
from smupar.output.checksums import Parts, parts_of
from smupar.output.files import sync_folder


def write_tensors(folder: Path, tensors: dict[str, Tensor], world: World) -> dict[str, Parts]:
    """Writes tensors into a new folder. Returns the checksums of the files that this rank wrote, by name."""
    files = _SummedFiles()
    if tensors:  # plain SGD has no state
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=world.size > 1)
        writer.fs = files
        with _quiet():
            save_tensors(tensors, storage_writer=writer, no_dist=world.size == 1)
    elif world.is_main:
        folder.mkdir()
    if world.is_main:
        sync_folder(folder)
    return files.sums()


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and type of every tensor in a folder."""
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {key: entry for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Reads the stored values into these tensors."""
    if tensors:
        with _quiet():
            load_tensors(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))


class _SummedFiles(FileSystem):
    """The file system that torch writes through. A thread hashes a file while the operating system writes it, so this costs no
    time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._hashing: dict[str, Future[Parts]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            summed = _SummedStream(cast(IO[Any], stream), lambda data: self._hash(Path(path).name, data))
            yield cast(io.IOBase, summed if mode == "wb" else stream)

    def _hash(self, name: str, data: bytes) -> None:
        assert name not in self._hashing, "torch writes a safetensors file by one call"
        self._hashing[name] = self._pool.submit(parts_of, data)

    def sums(self) -> dict[str, Parts]:
        self._pool.shutdown()
        return {name: parts.result() for name, parts in self._hashing.items()}


class _SummedStream:
    """A file that also passes on what is written to it."""

    def __init__(self, stream: IO[Any], hand_on: Any) -> None:
        self._stream, self._hand_on = stream, hand_on

    def write(self, data: bytes) -> int:
        self._hand_on(data)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's warning that it saves and loads in one process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield
