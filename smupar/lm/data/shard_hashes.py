"""Compares the shards of a prepared text with the hashes in its index."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from smupar.lm.data.shards import INDEX, PREPARE_AGAIN, VERIFIED, Shard, ShardIndex, check_sizes, read_index
from smupar.output.files import write_atomic
from smupar.output.json_files import DamagedFileError, read_object

BAR_BYTES = 1 << 30  # hashing fewer bytes takes about a second and needs no progress bar
_SMALL = BAR_BYTES  # a text of up to this size is read at each start, since a disk can damage it without changing its time
_CHUNK = 1 << 22  # bytes that are read at a time


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
            raise ValueError(f"{wrong}: {PREPARE_AGAIN}")


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
