"""Writes files and folders atomically, and locks folders so that one process works in them at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Writes a file so that it has either the old or the new content, even if the power fails."""
    # Several ranks may write the same file at the same time: the process id gives each its own temporary file.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes a rename in the folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder under a temporary name. It gets its final name when the block ends without an error."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    unfinished.replace(path)


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise ValueError(f"{path} exists already: choose another folder, nothing is overwritten")


def refuse_other_files(folder: Path, what: str, is_ours: Callable[[str], bool] = lambda name: False) -> None:
    """Raises if a folder holds files whose names are not ours. The caller has checked that the folder has no ``what``."""
    if not all(is_ours(path.name) for path in folder.iterdir()):
        raise ValueError(f"{folder} holds other files and no {what}: choose another --out")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder if it does not exist, and locks it. The lock ends with the block, or with the process, even if the
    process is killed."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {folder} ({error.strerror}): choose another --out") from error
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is at work in {folder}: wait for it, or choose another --out") from error
        yield
    finally:
        os.close(handle)
