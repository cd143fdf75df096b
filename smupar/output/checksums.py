"""Checksums of large files: ``sums.json`` in a folder lists its files, cut into parts, with the XXH3 of each part.

A part is a tensor of a safetensors file, the header of such a file, or a whole file of another kind. So the message about
damage can name the tensor. The list carries a seal (json_files.py). XXH3 finds damage, but does not stop somebody who replaces
both the tensors and the list.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from smupar.output.files import refuse_other_than_plain, write_atomic
from smupar.output.json_files import DamagedFileError, as_record, is_sealed, read_object, sealed_json

SUMS = "sums.json"
FORMAT = "smupar-sums/1"

_CHUNK = 1 << 22  # bytes that are read at a time
_THREADS = 4
_HEADER, _WHOLE = "", "*"  # no tensor has these names
_LENGTH = 8  # bytes at the start of a safetensors file that say how long its header is


class UncheckedWarning(UserWarning):
    """Files were read that an older version wrote without checksums."""


@dataclass(frozen=True)
class FilePart:
    """Consecutive bytes of a file. The parts of a file follow each other without gaps."""

    name: str
    num_bytes: int
    xxh3: str


Parts = Sequence[FilePart]


@dataclass(frozen=True)
class _Sums:
    """The content of sums.json."""

    format: str
    files: dict[str, list[tuple[str, int, str]]]


def parts_of(data: bytes) -> Parts:
    """The parts of a safetensors file that is in memory."""
    view = memoryview(data)
    length = _LENGTH + int.from_bytes(view[:_LENGTH], "little")
    parts, start = [], 0
    for name, size in _layout(bytes(view[:length])):
        parts.append(FilePart(name, size, xxhash.xxh3_64_hexdigest(view[start : start + size])))
        start += size
    return parts


def write_sums(folder: Path, files: Iterable[str], known: Mapping[str, Parts] | None = None) -> None:
    """Lists these files of a folder in its sums.json. ``known`` has the parts of files that were hashed when they were written;
    other files are read."""
    parts = {name: known[name] if known and name in known else _parts_on_disk(folder / name) for name in files}
    listed = {name: [(part.name, part.num_bytes, part.xxh3) for part in parts[name]] for name in sorted(parts)}
    write_atomic(folder / SUMS, sealed_json({"format": FORMAT, "files": listed}, indent=None))


def read_sums(folder: Path, *, remedy: str) -> dict[str, Parts]:
    """The files that sums.json lists, by their paths in the folder."""
    source = str(folder / SUMS)
    sums = as_record(_Sums, read_object(folder / SUMS, remedy=remedy), source=source, remedy=remedy)
    if sums.format != FORMAT or any(part[1] < 0 for parts in sums.files.values() for part in parts):
        raise DamagedFileError(f"{source} is not a list of checksums in format {FORMAT!r}: {remedy}")
    return {name: [FilePart(*part) for part in parts] for name, parts in sums.files.items()}


def wrong_parts(
    folder: Path, sums: Mapping[str, Parts], *, share: tuple[int, int] = (0, 1), show: Callable[[int], None] = lambda size: None
) -> list[str]:
    """Reads the files and names each part that does not match its checksum.

    share   (number of this process, number of processes), if several processes divide the parts
    show    is called with the number of bytes after each read
    """
    wrong_files, todo = [], []
    for name, parts in sums.items():
        problem = _wrong_size(folder / name, sum(part.num_bytes for part in parts))
        if problem:
            wrong_files.append(f"{name} {problem}")
            continue
        start = 0
        for part in parts:
            todo.append((name, part, start))
            start += part.num_bytes

    def differs(item: tuple[str, FilePart, int]) -> bool:
        name, part, start = item
        return _hash_on_disk(folder / name, start, part.num_bytes, show) != part.xxh3

    todo = todo[share[0] :: share[1]]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        differing = [item for item, wrong in zip(todo, pool.map(differs, todo), strict=True) if wrong]
    return wrong_files + [f"{_named(name, part)} does not match its checksum" for name, part, _ in differing]


def check_sums(folder: Path, *, remedy: str, only: Callable[[str], bool] = lambda name: True) -> bool:
    """Raises DamagedFileError if a file in the folder's sums.json is missing or damaged. ``only`` says which files to check.
    Returns False if the folder has no sums.json."""
    if not (folder / SUMS).exists():
        return False
    sums = {name: parts for name, parts in read_sums(folder, remedy=remedy).items() if only(name)}
    for wrong in wrong_parts(folder, sums):
        raise DamagedFileError(f"{folder} is damaged ({wrong}): {remedy}")
    return True


def refuse_lost_seal(file: Path, folder: Path, *, remedy: str) -> None:
    """Raises for a JSON file without a seal in a folder with checksums, since every version that wrote checksums also wrote
    seals."""
    if (folder / SUMS).exists() and not is_sealed(file):
        raise DamagedFileError(f"{file} is damaged (it has lost its checksum): {remedy}")


def num_bytes(sums: Mapping[str, Parts]) -> int:
    return sum(part.num_bytes for parts in sums.values() for part in parts)


def _named(file: str, part: FilePart) -> str:
    if part.name == _WHOLE:
        return file
    return f"the header of {file}" if part.name == _HEADER else f"tensor {part.name} in {file}"


def _wrong_size(path: Path, expected: int) -> str:
    size = path.stat().st_size if path.is_file() else None
    if size == expected:
        return ""
    return "is missing" if size is None else f"has {size} bytes, expected {expected}"


def _layout(start: bytes) -> list[tuple[str, int]]:
    """(name, size) of the parts of a safetensors file, from its length field and header."""
    header = json.loads(start[_LENGTH:])
    ranges = sorted((*entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__")
    return [(_HEADER, len(start))] + [(name, end - first) for first, end, name in ranges]


def _parts_on_disk(path: Path) -> Parts:
    refuse_other_than_plain(path)
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            length = file.read(_LENGTH)
            layout = _layout(length + file.read(int.from_bytes(length, "little")))
    else:
        layout = [(_WHOLE, path.stat().st_size)]
    parts, start = [], 0
    for name, size in layout:
        parts.append(FilePart(name, size, _hash_on_disk(path, start, size)))
        start += size
    return parts


def _hash_on_disk(path: Path, start: int, size: int, show: Callable[[int], None] = lambda size: None) -> str:
    """The XXH3 of some bytes of a file. The file is not mapped into memory, because a mapped file that shrinks kills the
    process."""
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while size > 0 and (chunk := file.read(min(_CHUNK, size))):
            digest.update(chunk)
            show(len(chunk))
            size -= len(chunk)
    return digest.hexdigest()
