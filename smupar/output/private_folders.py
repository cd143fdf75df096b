"""Folders for code that is compiled here and loaded later. No other user of the machine can write to them, so nobody else can
make smupar run their code."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from smupar.output.files import is_alive

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_TEMPORARY = re.compile(r"smupar-(\d+)-\w{8}")


class NotPrivateError(OSError):
    """Another user owns a folder or file, or can write to it, or it is not a plain one."""


def cache_folder() -> Path:
    """smupar's folder in the user's cache. It may not exist yet, and its owner is not checked here."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "smupar"
    try:
        return Path.home() / ".cache" / "smupar"
    except RuntimeError as error:
        raise FileNotFoundError("this user has no home folder") from error


@contextlib.contextmanager
def private_folder(path: Path) -> Iterator[Path]:
    """A context that holds a folder open, and makes it if it does not exist. Raises ``NotPrivateError`` if another user owns
    the folder or can write to it.

    The path that the context yields leads to this folder even if somebody swaps a parent folder meanwhile. This needs /proc.
    Without it, as on macOS, the context yields the plain path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if path.is_symlink():
        raise NotPrivateError(f"{path} is a symbolic link")
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            raise NotPrivateError(f"{path} belongs to another user")
        if status.st_mode & _OTHERS_MAY_WRITE:
            raise NotPrivateError(f"other users can write to {path}; delete it, and smupar makes a private folder")
        by_handle = Path(f"/proc/self/fd/{handle}")
        yield by_handle if by_handle.is_dir() else path
    finally:
        os.close(handle)


@contextlib.contextmanager
def private_temporary_folder() -> Iterator[Path]:
    """A context with a private folder, which is removed at the end. Folders that killed processes left are removed first."""
    for path in Path(tempfile.gettempdir()).iterdir():
        if _is_left_over(path):
            shutil.rmtree(path, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"smupar-{os.getpid()}-"))
    try:
        with private_folder(temporary) as folder:
            yield folder
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_left_over(path: Path) -> bool:
    named = _TEMPORARY.fullmatch(path.name)
    try:
        return named is not None and path.lstat().st_uid == os.geteuid() and not is_alive(int(named[1]))
    except FileNotFoundError:  # its process has just removed it
        return False


def read_own(path: Path) -> bytes:
    """The content of a file. Raises ``OSError`` if it is not a plain file, or belongs to another user."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening a pipe must not wait for a writer
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise NotPrivateError(f"{path.name} is not a plain file, or belongs to another user")
        return file.read()
