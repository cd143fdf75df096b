"""Turns text into token shards, for ``smupar data prepare``.

A preparation that was killed can be resumed. The content of a shard depends only on the pieces of text up to the shard's end.
So the list of complete shards and the number of their pieces describe the progress. A resumed preparation skips these pieces,
and its result is the same to the byte.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from smupar.lm.config.commands import PrepareConfig
from smupar.lm.data.shard_hashes import BAR_BYTES, check_content, verify
from smupar.lm.data.shard_writer import ShardWriter
from smupar.lm.data.shards import INDEX, PROGRESS, VERIFIED, ShardIndex, check_sizes, read_index, token_dtype
from smupar.lm.data.source_file import ReadBytes, still_begins_with
from smupar.lm.data.sources import BrokenOffError, SourceUnit, TextPiece, describe, find_units
from smupar.lm.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer, read_tokenizer
from smupar.output.files import NO_ROOM, locked, refuse_other_files, write_atomic
from smupar.output.json_files import as_record, read_object, write_sealed
from smupar.output.optional import first_line
from smupar.refusals import refuse

_PROGRESS_FORMAT = "smupar-progress/1"
_OUR_FILES = re.compile(rf"tokens-\d{{5,}}\.bin|{INDEX}|{PROGRESS}|{VERIFIED}|{TOKENIZER_FILE}")
_OUR_TEMPORARY = re.compile(rf"({_OUR_FILES.pattern})(\.\d+)?\.tmp")
_OPTIONS = ("field", "split", "encoding", "errors", "max_tokens", "shard_tokens")

# Characters for one call of the tokenizer: enough to keep its threads busy, few enough to hold in memory.
_BATCH_CHARS = 1 << 22
BATCH_PIECES = 1 << 13


@dataclass(frozen=True)
class PreparationState(ShardIndex):
    """The content of progress.json: an index of the complete shards, and the place in the sources to resume from."""

    num_units: int = 0  # finished files (or datasets)
    num_pieces: int = 0  # finished pieces of the next file
    finished: tuple[str, ...] = ()  # sha256 of every finished file; empty for a dataset
    partial: ReadBytes | None = None  # what has been read of the next file
    # True if the preparation stopped at unreadable input. Then another command may start over in the same folder.
    failed: bool = False

    def write(self, folder: Path) -> None:
        write_sealed(folder / PROGRESS, {"format": _PROGRESS_FORMAT, **asdict(self)})


def prepare(config: PrepareConfig) -> ShardIndex:
    """Tokenises the sources into ``config.out``. Resumes where an earlier call with the same configuration was stopped."""
    folder = Path(config.out)
    refuse(not config.sources, "nothing to prepare: name at least one file, folder or dataset")
    _check_encoding(config)
    tokenizer = load_tokenizer(config.tokenizer)
    units_of = {source: find_units(source, out=folder) for source in config.sources}
    units = [unit for source in config.sources for unit in units_of[source]]
    asked = PreparationState(
        tokenizer.info,
        largest_token=-1,
        shards=(),
        source={
            "sources": [describe(source, units_of[source]) for source in config.sources],
            "options": {name: getattr(config, name) for name in _OPTIONS},
        },
    )

    if (folder / INDEX).is_file():
        _refuse_if_different(folder, _differences(read_index(folder), asked))
        index = verify(folder)
        read_tokenizer(folder, tokenizer.name, sha256=index.tokenizer.sha256)
        (folder / PROGRESS).unlink(missing_ok=True)
        print(f"{folder} is prepared already: nothing to do", file=sys.stderr)
        _say_if_newer(units, folder / INDEX)
        return index
    is_new = not folder.exists()
    with locked(folder):
        return _prepare(folder, tokenizer, units, config, asked, is_new=is_new)


def _prepare(
    folder: Path,
    tokenizer: Tokenizer,
    units: list[SourceUnit],
    config: PrepareConfig,
    asked: PreparationState,
    *,
    is_new: bool,
) -> ShardIndex:
    progress = _resumed(folder, units, asked)
    writer = ShardWriter(
        folder,
        vocab_size=tokenizer.vocab_size,
        shard_tokens=config.shard_tokens,
        shards=progress.shards,
        largest_token=progress.largest_token,
    )
    try:
        progress.write(folder)
        tokenizer.save(folder)
        _fill(writer, tokenizer, units, config, progress)
        index = ShardIndex(tokenizer.info, writer.largest_token, tuple(writer.shards), asked.source)
        write_atomic(folder / INDEX, index.to_json())
    except OSError as error:
        # Read errors have another type, so this error is about writing to the folder.
        writer.abandon()
        remedy = "make space" if error.errno in NO_ROOM else "make the folder writable"
        raise ValueError(
            f"cannot write {folder} ({error.strerror or error}), {writer.num_tokens} tokens in {len(writer.shards)} shards are "
            f"done: {remedy} and run the same command again to resume"
        ) from error
    except ValueError as error:
        writer.abandon()
        # After bad input the user has to run another command, and files of this one must not be in its way.
        if not isinstance(error, BrokenOffError):
            _leave_after_bad_input(folder, remove_folder=is_new)
        raise
    (folder / PROGRESS).unlink(missing_ok=True)
    return index


def _fill(
    writer: ShardWriter, tokenizer: Tokenizer, units: list[SourceUnit], config: PrepareConfig, progress: PreparationState
) -> None:
    eot = np.array([] if tokenizer.eot is None else [tokenizer.eot], dtype=token_dtype(tokenizer.vocab_size))
    finished = list(progress.finished)
    with closing(_Bar(units, progress)) as bar:
        for batch in _batches(_read(units, config, progress, finished)):
            encoded = tokenizer.encode_batch([piece.text for _, _, piece in batch])
            for (unit, number, piece), tokens in zip(batch, encoded, strict=True):
                ids = np.concatenate([tokens, eot]) if piece.ends_document else tokens
                room = len(ids) if config.max_tokens is None else config.max_tokens - writer.num_tokens
                if room <= 0:
                    break
                if writer.append(ids[:room], ends_document=piece.ends_document and len(ids) <= room):
                    replace(
                        progress,
                        shards=tuple(writer.shards),
                        largest_token=writer.largest_token,
                        num_units=unit,
                        num_pieces=number,
                        finished=tuple(finished[:unit]),
                        partial=piece.read,
                    ).write(writer.folder)
            bar.show(batch, writer.num_tokens)
            if config.max_tokens is not None and writer.num_tokens >= config.max_tokens:
                break
    writer.close()
    refuse(not writer.shards, f"no text in {', '.join(config.sources)}: every file or row is empty")


# (number of the piece's unit, number of pieces of that unit up to and including this one, the piece)
Numbered = tuple[int, int, TextPiece]


def _read(
    units: list[SourceUnit], config: PrepareConfig, progress: PreparationState, finished: list[str]
) -> Iterator[Numbered]:
    """The pieces with text. Adds the sha256 of each unit to ``finished`` when it is read to its end."""
    for unit in range(progress.num_units, len(units)):
        skip = progress.num_pieces if unit == progress.num_units else 0
        whole = None
        for number, piece in enumerate(units[unit].read(config, skip=skip), skip + 1):
            whole = piece.read
            if piece.text:
                yield unit, number, piece
        finished.append(whole.sha256 if whole else "")


def _batches(pieces: Iterator[Numbered]) -> Iterator[list[Numbered]]:
    batch: list[Numbered] = []
    num_chars = 0
    for numbered in pieces:
        batch.append(numbered)
        num_chars += len(numbered[2].text)
        if num_chars >= _BATCH_CHARS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


class _Bar:
    """A progress bar. It counts bytes of files, or documents of a dataset, whose size is unknown."""

    def __init__(self, units: list[SourceUnit], progress: PreparationState):
        self._before: list[int] | None = None  # number of bytes before each file, and in the end the total
        scale: dict[str, Any] = {"initial": progress.num_documents, "unit": " documents"}
        if all(unit.size is not None for unit in units):
            self._before = np.cumsum([0, *(unit.size or 0 for unit in units)]).tolist()
            scale = {"total": self._before[-1], "initial": self._before[progress.num_units], "unit": "B"}
        self._bar = tqdm(desc="prepare", unit_scale=True, leave=False, file=sys.stderr, **scale)

    def close(self) -> None:
        self._bar.close()

    def show(self, batch: list[Numbered], num_tokens: int) -> None:
        self._bar.set_postfix_str(f"{num_tokens / 1e6:.1f}M tokens", refresh=False)
        if self._before is None:
            self._bar.update(sum(piece.ends_document for _, _, piece in batch))
        else:
            unit, _, piece = batch[-1]
            self._bar.update(self._before[unit] + piece.position - self._bar.n)


def _check_encoding(config: PrepareConfig) -> None:
    remedy = "pass --encoding utf-8, latin-1, ... and --errors strict, replace or ignore"
    try:
        # Some codecs, such as rot13 and zip, do not turn bytes into text. Decoding an empty string would not even look them up.
        b" ".decode(config.encoding, "ignore")
        codecs.getincrementaldecoder(config.encoding)
        codecs.lookup_error(config.errors)
    except LookupError as error:
        raise ValueError(f"{error}: {remedy}") from error
    except (ValueError, TypeError) as error:  # from codecs that know no "ignore"
        raise ValueError(f"the encoding {config.encoding!r} is not for text files ({first_line(error)}): {remedy}") from error


def _resumed(folder: Path, units: Sequence[SourceUnit], asked: PreparationState) -> PreparationState:
    """The state that an earlier call with the same configuration left, or a new one. Raises if the folder holds other files."""
    for path in folder.iterdir():
        if _OUR_TEMPORARY.fullmatch(path.name):
            path.unlink()
    path = folder / PROGRESS
    if not path.is_file():
        refuse_other_files(folder, "preparation")
        return asked
    progress = _read_progress(path)
    differences = _differences(progress, asked) or _changed_files(units, progress)
    if progress.failed and differences:
        _remove_ours(folder)
        return asked
    _refuse_if_different(folder, differences)
    check_sizes(folder, progress)
    check_content(folder, progress, progress.shards)
    return replace(progress, source=asked.source, failed=False)


def _changed_files(units: Sequence[SourceUnit], progress: PreparationState) -> list[str]:
    """The files, finished or read in part, that no longer hold what was read from them."""
    before = [
        (unit, ReadBytes(unit.size, sha256))
        for unit, sha256 in zip(units, progress.finished, strict=False)
        if unit.size is not None and sha256
    ]
    if progress.partial is not None:
        before.append((units[progress.num_units], progress.partial))
    size = sum(read.num_bytes for _, read in before)
    with tqdm(
        total=size, desc="compare", unit="B", unit_scale=True, disable=True if size < BAR_BYTES else None, leave=False
    ) as bar:
        changed = [unit.name for unit, read in before if not still_begins_with(Path(unit.name), read, bar)]
    return [f"another text in {changed[0]}" + (f" and {len(changed) - 1} more" if len(changed) > 1 else "")] if changed else []


def _say_if_newer(units: Sequence[SourceUnit], written: Path) -> None:
    """Warns if a file is newer than the shards, since it may hold another text of the same size. A new time does not prove
    that, so it is no error."""
    prepared_at = written.stat().st_mtime
    files = [(unit.name, Path(unit.name).stat()) for unit in units if unit.size is not None]
    newer = [name for name, stat in files if max(stat.st_mtime, stat.st_ctime) > prepared_at]
    if newer:
        more = f" and {len(newer) - 1} more were" if len(newer) > 1 else " was"
        print(
            f"{newer[0]}{more} written after {written.parent} was made: if the text changed, delete {written.parent} and "
            "prepare it again",
            file=sys.stderr,
        )


def _read_progress(path: Path) -> PreparationState:
    remedy = "choose another --out, or delete the folder and prepare it again"
    values = read_object(path, remedy=remedy)
    found_format = values.pop("format", None)
    refuse(
        found_format != _PROGRESS_FORMAT,
        f"{path} has format {found_format!r} and this version reads {_PROGRESS_FORMAT!r}: {remedy}",
    )
    progress = as_record(PreparationState, values, source=str(path), remedy=remedy)
    if progress.num_units and not progress.finished:  # written by a version that kept no checksums
        return replace(progress, finished=("",) * progress.num_units)
    return progress


def _differences(there: ShardIndex, asked: ShardIndex) -> list[str]:
    differences = []
    if there.tokenizer.sha256 != asked.tokenizer.sha256:
        old, new = there.tokenizer, asked.tokenizer
        differences.append(
            f"tokenizer {old.name}, not {new.name}"
            if old.name != new.name
            else f"another tokenizer called {old.name}: sha256 {old.sha256[:12]}..., not {new.sha256[:12]}..."
        )
    sources = there.source.get("sources", [])
    if sources != asked.source["sources"]:
        named, now = _named(sources), _named(asked.source["sources"])
        differences.append(f"sources {named}, not {now}" if named != now else f"other names or sizes of files in {now}")
    options = there.source.get("options", {})
    # Shards before the first decoding error do not depend on --errors, so a failed preparation may continue with another value.
    lax = isinstance(there, PreparationState) and there.failed and options.get("errors") == "strict"
    for name, value in asked.source["options"].items():
        if options.get(name) != value and not (name == "errors" and lax):
            differences.append(f"{name} {options.get(name)}, not {value}")
    return differences


def _named(sources: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        source["source"] + (f" ({source['num_bytes']} bytes)" if "num_bytes" in source else "") for source in sources
    )


def _refuse_if_different(folder: Path, differences: list[str]) -> None:
    refuse(
        differences,
        f"{folder} holds another preparation ({'; '.join(differences)}): choose another --out, or delete {folder}",
    )


def _leave_after_bad_input(folder: Path, *, remove_folder: bool) -> None:
    progress = _read_progress(folder / PROGRESS)
    if progress.shards:
        replace(progress, failed=True).write(folder)
        return
    _remove_ours(folder)
    if remove_folder:
        folder.rmdir()


def _remove_ours(folder: Path) -> None:
    """Removes our files, and progress.json last, so that after a kill the next call still knows from it that the other files
    are ours."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == PROGRESS):
        if _OUR_FILES.fullmatch(path.name) or _OUR_TEMPORARY.fullmatch(path.name):
            path.unlink()
