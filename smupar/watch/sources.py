"""Finds studies, runs, pages and traces in folders, and keeps a document of each up to date."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from smupar.output.json_files import WRONG_TYPES
from smupar.output.page import read_page
from smupar.output.page.document import Document
from smupar.refusals import refuse
from smupar.study.live import LIVE, PLANNED
from smupar.study.page.view import StudyView
from smupar.updates.page import read_trace, trace_document
from smupar.watch.runs import Runs

_DEPTH = 4  # levels of folders that are searched below the named ones
_SEARCH_SECONDS = 5.0  # seconds between searches for new sources
# A document that took t seconds to make is not made again for _COST t seconds, or for _LONGEST_WAIT seconds if that is shorter.
# So a finished run shows within five seconds.
_COST, _LONGEST_WAIT = 30.0, 2.5
# The errors that damaged or half-written files may raise.
UNREADABLE = (ValueError, OSError, RecursionError, *WRONG_TYPES)
_PAGES = ("report.html", "check.html")


class Source(Protocol):
    """Files that have a document: a study, runs, a page or a trace."""

    @property
    def version(self) -> object: ...

    def document(self) -> Document: ...

    def curve(self, run: str) -> list[list[float | None]]: ...

    def folder_of(self, run: str) -> Path | None: ...


class StudySource:
    """A study, running or not."""

    def __init__(self, folder: Path) -> None:
        self.view = StudyView(folder)

    @property
    def version(self) -> object:
        folder = self.view.study.folder
        live = [path.stat().st_mtime for path in (folder, folder / PLANNED, folder / "runs", folder / LIVE) if path.exists()]
        return live, [path.stat().st_mtime for path in (folder / LIVE).glob("*.json")], self.view.version

    def document(self) -> Document:
        return self.view.document(with_curves=False)

    def curve(self, run: str) -> list[list[float | None]]:
        return self.view.curve(run) if self.folder_of(run) else []

    def folder_of(self, run: str) -> Path | None:
        folder = self.view.study.runs / run
        return folder if folder.parent == self.view.study.runs and run.isalnum() else None


class _FileSource:
    """A source that is one file, and has no folders of runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def version(self) -> object:
        return self.path.stat().st_mtime

    def folder_of(self, run: str) -> Path | None:
        return None


class PageSource(_FileSource):
    """A page that a check or a reproduction has written, with its document inside."""

    def document(self) -> Document:
        document = read_page(self.path)
        refuse(document is None, f"{self.path} holds no document any more")
        assert document is not None
        return {**document, "folder": str(self.path.parent)}  # the page may have been moved since

    def curve(self, run: str) -> list[list[float | None]]:
        return self.document()["curves"].get(run, [])


class TraceSource(_FileSource):
    """A trace that was saved on its own."""

    def document(self) -> Document:
        values = read_trace(self.path)
        refuse(values is None, f"{self.path} holds no trace any more")
        assert values is not None
        return trace_document(values, folder=str(self.path))

    def curve(self, run: str) -> list[list[float | None]]:
        return []


class Entry:
    """A source in the list that the page shows. Its document is made again when the source has changed."""

    def __init__(self, source: Source, folder: Path, name: str) -> None:
        self.source, self.folder = source, folder
        self.key = hashlib.sha256(name.encode()).hexdigest()[:8]
        self.lock = threading.Lock()
        self._made: tuple[object, Document, str] | None = None
        self._next = 0.0

    def document(self) -> dict[str, Any]:
        """The document with its version. While files are half written, this is the last document that could be made."""
        with self.lock:
            try:
                if self._made is None or time.monotonic() >= self._next:
                    self._make()
            except UNREADABLE:
                if self._made is None:
                    raise
            assert self._made is not None
            return {**self._made[1], "version": self._made[2]}

    def brief(self) -> dict[str, Any]:
        """The entry's line in the list. Until its document has been made, the line has only the folder."""
        if self._made is None:
            return {"key": self.key, "title": "", "headline": "", "folder": str(self.folder), "is_live": False, "version": ""}
        document = self.document()
        return {"key": self.key} | {name: document[name] for name in ("title", "headline", "folder", "is_live", "version")}

    def _make(self) -> None:
        state = self.source.version
        if self._made is not None and self._made[0] == state:
            return
        start = time.process_time()
        document = self.source.document()
        self._next = time.monotonic() + min(_COST * (time.process_time() - start), _LONGEST_WAIT)
        content = {name: value for name, value in document.items() if name != "made"}
        self._made = state, document, hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


class Watched:
    """All sources below some folders, with new sources as they appear. The folders themselves may appear later, for example if
    the study that makes them was started at the same time."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self.folders = [Path(folder) for folder in folders]
        for folder in self.folders:
            refuse(
                not _existing(folder).is_dir(),
                f"{_existing(folder)} is not a folder: name the folder of a study, a run, a check or a reproduction",
            )
        self._entries: dict[str, Entry] = {}
        self._searched = -_SEARCH_SECONDS
        self._lock = threading.Lock()
        for folder in self.folders:
            refuse(
                folder.exists() and not _is_begun(folder) and not any(_sources_in(folder)),
                f"{folder} holds no study, run, check, reproduction or trace: name the folder of one, or a folder above it",
            )

    @property
    def missing(self) -> list[Path]:
        """The folders that hold nothing to show yet."""
        return [
            folder for folder in self.folders if not folder.exists() or (_is_begun(folder) and not any(_sources_in(folder)))
        ]

    def entries(self) -> dict[str, Entry]:
        """All entries by key. As long as there are no entries, every call searches for sources."""
        with self._lock:
            if not self._entries or time.monotonic() - self._searched >= _SEARCH_SECONDS:
                self._search()
                self._searched = time.monotonic()
            return dict(self._entries)

    def _search(self) -> None:
        entries: dict[str, Entry] = {}
        for folder in self.folders:
            for source, place, name in _sources_in(folder) if folder.exists() else ():
                entry = Entry(source, place, name)
                old = self._entries.get(entry.key)
                entries[entry.key] = old if old is not None and not _has_other_runs(old.source, source) else entry
        self._entries = entries


def _is_begun(folder: Path) -> bool:
    """Whether a folder is still empty, or holds a run that has not taken a step."""
    return (folder / "config.json").exists() or not any(folder.iterdir())


def _existing(folder: Path) -> Path:
    """The folder, or the nearest path above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _has_other_runs(old: Source, new: Source) -> bool:
    return isinstance(old, Runs) and isinstance(new, Runs) and old.runs.keys() != new.runs.keys()


def _sources_in(folder: Path, depth: int = _DEPTH) -> Iterator[tuple[Source, Path, str]]:
    """The sources in a folder and below it, each with its folder and name. Folders inside a study or run are not searched."""
    if (folder / "study.json").exists():
        yield StudySource(folder), folder, f"study {folder}"
        return
    if (folder / "config.json").exists() and (folder / "metrics.jsonl").exists():
        yield Runs(folder, [folder]), folder, f"run {folder}"
        return
    for name in _PAGES:
        if read_page(folder / name) is not None:
            yield PageSource(folder / name), folder, f"page {folder / name}"
    for path in sorted(folder.glob("*.json")):
        if "trace" in path.name and read_trace(path) is not None:
            yield TraceSource(path), folder, f"trace {path}"
    if depth:
        yield from _below(folder, depth)


def _below(folder: Path, depth: int) -> Iterator[tuple[Source, Path, str]]:
    runs = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name.startswith(".") or not path.is_dir():
            continue
        if (path / "config.json").exists() and (path / "metrics.jsonl").exists() and not (path / "study.json").exists():
            runs.append(path)
        else:
            yield from _sources_in(path, depth - 1)
    if runs:
        yield Runs(folder, runs), folder, f"runs {folder}"
