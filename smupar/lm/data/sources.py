"""Reads text from files, folders and Hugging Face datasets, as a stream of pieces.

A document is a text file, a line of JSONL, a row of Parquet or of a dataset. Text files are cut into pieces, so that a huge
file needs little memory and uses all cores.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smupar.lm.config.commands import PrepareConfig
from smupar.lm.data.source_file import PIECE, HashedFile, ReadBytes, open_source
from smupar.output.files import resolved
from smupar.output.optional import first_line, optional
from smupar.refusals import refuse

_UTF8_BOM = b"\xef\xbb\xbf"


class TextPiece(NamedTuple):
    """A document, or a part of one."""

    text: str  # empty for a row without text; empty pieces are counted, so that a resumed preparation can skip by number
    ends_document: bool
    position: int  # bytes of the file read so far, for the progress bar
    read: ReadBytes | None  # size and hash of the file up to that position, for Parquet of the whole file; None for a dataset


class BrokenOffError(ValueError):
    """The stream broke off. The input is fine, so the same command can resume."""


@dataclass(frozen=True)
class SourceUnit:
    """One file or one dataset. A source that the user names, such as a folder, may consist of many units."""

    name: str
    size: int | None = None  # bytes; None for a dataset
    config_name: str | None = None  # for datasets only

    def read(self, config: PrepareConfig, *, skip: int = 0) -> Iterator[TextPiece]:
        """The pieces from number ``skip`` on. A file ends with an empty piece, which describes the whole file. Raises if the
        file changes meanwhile."""
        if self.size is None:
            yield from _read_dataset(self, config, skip)
            return
        path = Path(self.name)
        kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
        read = _read_parquet if path.suffix == ".parquet" else _read_jsonl if kind in (".jsonl", ".json") else _read_text
        with open_source(path, self.size) as (stream, raw):
            yield from read(path, stream, raw, config, skip)
            yield TextPiece("", False, self.size, raw.so_far)


def find_units(source: str, *, out: Path) -> list[SourceUnit]:
    """The files or the dataset of a source. Folders are searched, except for ``out``."""
    if source == "slimpajama":
        return [SourceUnit("cerebras/SlimPajama-627B")]
    if source.startswith("hf:"):
        name, _, config_name = source.removeprefix("hf:").partition(":")
        refuse(not name, f"the source {source!r} names no dataset: write hf:NAME or hf:NAME:CONFIG")
        return [SourceUnit(name, config_name=config_name or None)]
    path = Path(source)
    if path.is_dir():
        files = [path for path in _walk(path, resolved(out)) if path.stat().st_size]
        refuse(not files, f"the folder {source} holds only empty files, or none: name a folder with text")
    elif path.is_file():
        files = [path]
        refuse(not path.stat().st_size, f"{source} is empty: leave it out, or name a file with text")
    else:
        raise FileNotFoundError(f"no file or folder {source}: check the path, or write hf:NAME for a Hugging Face dataset")
    for file in files:
        refuse(
            file.name.lower().endswith((".zst", ".xz", ".bz2", ".lz4", ".zip", ".tar", ".7z")),
            f"{file} is compressed in an unsupported format: decompress it, or compress it with gzip",
        )
    return [SourceUnit(str(file), file.stat().st_size) for file in files]


def describe(source: str, units: list[SourceUnit]) -> dict[str, Any]:
    """Identifies a source without reading it: a dataset by its name, files by their names and sizes."""
    if units[0].size is None:
        return {"source": source}
    listing = "".join(f"{Path(unit.name).relative_to(source).as_posix()}\t{unit.size}\n" for unit in units)
    return {
        "source": source,
        "num_files": len(units),
        "num_bytes": sum(unit.size or 0 for unit in units),
        "listing_sha256": hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest(),
    }


def _walk(root: Path, out: Path) -> list[Path]:
    paths: list[Path] = []
    seen = {out, resolved(root)}  # links may form cycles
    for folder, folders, files in os.walk(root, followlinks=True):
        here = Path(folder)
        new = {name: resolved(here / name) for name in sorted(folders) if not name.startswith(".")}
        folders[:] = [name for name, real in new.items() if real not in seen]
        seen.update(new.values())
        paths += [here / name for name in files if not name.startswith(".") and (here / name).is_file()]
    return sorted(paths, key=lambda path: path.as_posix())


def _undecodable(path: Path, error: UnicodeDecodeError, offset: int) -> ValueError:
    remedy = "--errors replace" if error.encoding.startswith("latin") else "--encoding latin-1 or --errors replace"
    return ValueError(
        f"{path} is not text in {error.encoding} ({error.reason} at byte {offset}): if it is text at all, pass {remedy}"
    )


def _read_text(path: Path, stream: io.BufferedReader, raw: HashedFile, config: PrepareConfig, skip: int) -> Iterator[TextPiece]:
    decoder = codecs.getincrementaldecoder(config.encoding)(config.errors)
    is_utf8 = codecs.lookup(config.encoding).name == "utf-8"
    number = num_bytes = 0
    text = ""
    while True:
        chunk = stream.read(PIECE)
        before = num_bytes - len(decoder.getstate()[0])  # the decoder may hold part of a character
        num_bytes += len(chunk)
        if before == 0 and is_utf8 and chunk.startswith(_UTF8_BOM):
            before, chunk = len(_UTF8_BOM), chunk[len(_UTF8_BOM) :]
        try:
            text += decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise _undecodable(path, error, before + error.start) from error
        if not chunk:
            break
        if len(text) >= PIECE:
            cut = cut_at(text)
            number += 1
            if number > skip:
                yield TextPiece(text[:cut], False, raw.so_far.num_bytes, raw.so_far)
            text = text[cut:]
    if text and number >= skip:
        yield TextPiece(text, True, raw.so_far.num_bytes, raw.so_far)


def cut_at(text: str) -> int:
    """Where to cut a long text: after a line end between two words, if the second half has one. A byte-level BPE splits there
    anyway, so the cut does not change the tokens. Some text always remains after the cut, so that the last piece of a document
    is never empty."""
    half, end = len(text) // 2, len(text) - 1
    at = end
    while (at := text.rfind("\n", half, at)) > 0:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
    if (at := text.rfind("\n", half, end)) > 0:
        return at + 1
    return at if (at := text.rfind(" ", half, end)) > 0 else end


def _read_jsonl(
    path: Path, stream: io.BufferedReader, raw: HashedFile, config: PrepareConfig, skip: int
) -> Iterator[TextPiece]:
    refuse(
        "\n".encode(config.encoding) != b"\n",
        f"{path}: lines of JSON in {config.encoding} are not supported, convert the file to UTF-8",
    )
    offset = 0
    for number, line in enumerate(stream, 1):
        if number > skip:
            content = line.removeprefix(_UTF8_BOM) if number == 1 else line
            try:
                decoded = content.decode(config.encoding, config.errors)
            except UnicodeDecodeError as error:
                raise _undecodable(path, error, offset + len(line) - len(content) + error.start) from error
            text = _field_of_line(decoded, config, f"{path}, line {number}") if decoded.strip() else ""
            yield TextPiece(text, True, raw.so_far.num_bytes, raw.so_far)
        offset += len(line)


def _field_of_line(line: str, config: PrepareConfig, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno}); one object per line is expected") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number with thousands of digits
        raise ValueError(f"{where}: JSON that Python cannot read ({first_line(error)}); remove the line") from error
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: a JSON object is expected, found {type(row).__name__}; give each line a field that holds text"
        )
    text = _field(row, config.field, where)
    # JSON escapes may contain half a surrogate pair, which no encoding can represent.
    if "\\u" in line:
        try:
            text = text.encode(errors=config.errors).decode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: half a surrogate pair at character {error.start}: pass --errors replace") from error
    return text


def _field(row: dict[str, Any], field: str, where: str) -> str:
    if field not in row:
        raise ValueError(f"{where}: no field {field!r}, it has {_names(row)}: choose one with --field")
    text = row[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} holds {type(text).__name__}, not text: choose another with --field")
    return text


def _names(names: Any) -> str:
    return ", ".join(map(repr, names)) or "none"


def _read_parquet(
    path: Path, stream: io.BufferedReader, raw: HashedFile, config: PrepareConfig, skip: int
) -> Iterator[TextPiece]:
    parquet = optional("pyarrow.parquet", f"reading Parquet ({path})")
    arrow_error = optional("pyarrow", f"reading Parquet ({path})").ArrowException
    while stream.read(PIECE):  # Parquet is not read from start to end, so it is hashed first
        pass
    try:
        with parquet.ParquetFile(path) as file:
            for text, position in _rows(file, path, config, skip):
                yield TextPiece(text, True, position, raw.so_far)
    except (OSError, arrow_error) as error:
        raise ValueError(f"{path} is not Parquet, or damaged ({first_line(error)}): get it again, or rename it") from error


def _rows(file: Any, path: Path, config: PrepareConfig, skip: int) -> Iterator[tuple[str, int]]:
    schema = file.schema_arrow
    refuse(
        config.field not in schema.names,
        f"{path}: no column {config.field!r}, it has {_names(schema.names)}: choose one with --field",
    )
    kind = str(schema.field(config.field).type)
    refuse(
        "string" not in kind or "list" in kind or "struct" in kind,
        f"{path}: column {config.field!r} holds {kind}, not text: choose another with --field",
    )
    size, num_rows = path.stat().st_size, file.metadata.num_rows
    row = 0
    for group in range(file.num_row_groups):
        rows_of_group = file.metadata.row_group(group).num_rows
        if row + rows_of_group <= skip:
            row += rows_of_group
            continue
        for batch in file.iter_batches(1024, row_groups=[group], columns=[config.field]):
            for text in batch.column(0).to_pylist():
                row += 1
                if row > skip:
                    yield text or "", size * row // num_rows


def _read_dataset(unit: SourceUnit, config: PrepareConfig, skip: int) -> Iterator[TextPiece]:
    datasets = optional("datasets", f"streaming the dataset {unit.name}")
    try:
        rows = datasets.load_dataset(unit.name, unit.config_name, split=config.split, streaming=True)
    except Exception as error:  # a missing dataset, configuration, split or network may raise any type
        raise ValueError(
            f"cannot open the dataset {unit.name} ({first_line(error)}): "
            "check its name and configuration, --split and the network"
        ) from error
    if config.field in (rows.column_names or ()):
        rows = rows.select_columns([config.field])  # other columns need not be read
    stream = iter(rows.skip(skip) if skip else rows)
    for number in itertools.count(skip + 1):
        try:
            row = next(stream, None)
        except Exception as error:
            raise BrokenOffError(
                f"the dataset {unit.name} broke off after row {number - 1} ({first_line(error)}): run the same command again, "
                "it resumes after the last finished shard"
            ) from error
        if row is None:
            return
        yield TextPiece(_field(row, config.field, f"{unit.name}, row {number}"), True, 0, None)
