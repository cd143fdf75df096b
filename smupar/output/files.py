"""Writes files and folders atomically, and locks a folder for one process at a time. If the disk is full, or a path cannot be
written, the error says what to do."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from smupar.refusals import refuse

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_MARK = ".unfinished-by-smupar"  # the name of a file in every folder that whole_folder has not finished


def sentence_of(error: OSError) -> str:
    """An error of the operating system in one line for users: the path, the problem and the remedy."""
    if error.strerror is None or (error.filename is None and error.errno not in NO_ROOM):
        return str(error)  # a message of our own
    return f"{error.filename or 'writing failed'}: {error.strerror}. {remedy_of(error)}"


def remedy_of(error: OSError) -> str:
    if error.errno in NO_ROOM:
        return "Make room there (delete files, or have the quota raised) or name another path, then run the same command again"
    if error.errno in _NOT_ALLOWED:
        return "Name a path that this user may read and write, or change its permissions"
    return "Name another path, or make this one usable"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context that adds the path to errors of the operating system. Python names no path if the disk is full, and libraries
    written in Rust raise their own errors, with the error number in the text."""
    try:
        yield
    except ValueError:  # a message of our own
        raise
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else int((_OS_ERROR.search(str(error)) or "00")[1])
        named = str(getattr(error, "filename", None) or path)
        if not number or not named.startswith(str(path)):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def resolved(path: Path) -> Path:
    """The absolute path with links followed. Unlike ``path.resolve()`` it does not raise if links lead in a circle."""
    return Path(os.path.realpath(path))


def changed_at(path: Path) -> float:
    """When a file or folder last changed, in seconds since the epoch; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def read_plain(path: Path) -> bytes:
    refuse_other_than_plain(path)
    return path.read_bytes()


def refuse_other_than_plain(path: Path) -> None:
    """Raises OSError for a folder, and for a pipe or a device, since reading these might never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "Is a directory" if path.is_dir() else "Not a plain file", str(path))


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file so that it has either the old or the new content, even if the power fails.

    If the path is a link to a file, the link stays, and the file is written. A device or a pipe is written to if the path names
    it. A link to a device or a pipe is refused, since the content would be lost in silence.
    """
    # The name of a folder may contain bytes that are not UTF-8, and be part of the content.
    data = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    is_special = path.exists() and not path.is_file()
    if is_special and path.is_symlink() and not path.is_relative_to("/dev"):  # /dev/stdout is a link
        refuse_other_than_plain(path)
    with writing(path):
        if is_special:
            _write_into(path, data)
        else:
            _replace(resolved(path) if path.is_symlink() else path, data)


def _write_into(path: Path, data: bytes) -> None:
    """Writes to a device or a pipe, which must not be replaced by a file. Raises for a folder."""
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # opening a pipe must not wait for a reader
    os.set_blocking(handle, True)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _replace(path: Path, data: bytes) -> None:
    """Writes a temporary file beside the path, and renames it when its content is on disk."""
    _remove_left_over(path)
    # Several ranks may write the same file at the same time, so the temporary file is named after the process.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # "x" does not follow a link that somebody else has put there
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def _remove_left_over(path: Path) -> None:
    """Removes the temporary files of ``write_atomic`` that killed processes left beside a file."""
    for left in path.parent.iterdir():
        number = left.name.removeprefix(f"{path.name}.").removesuffix(".tmp")
        if number.isdecimal() and left.name == f"{path.name}.{number}.tmp" and not is_alive(int(number)):
            left.unlink(missing_ok=True)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 only asks whether the process exists
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # a process of another user
        return True
    return True


def sync(path: Path) -> None:
    """Makes the content of a file durable. A folder's content is the list of names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Makes a rename in the folder durable."""
    sync(folder)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A context with a folder under a temporary name. At the end the folder is synced to disk and gets its final name; after an
    error it is removed. The next call for the same path removes what a killed process left."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(path)
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.unfinished")
        unfinished.mkdir()
        handle = os.open(unfinished, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # a killed process holds no lock
            (unfinished / _MARK).touch()
            yield unfinished
            for written in (*unfinished.rglob("*"), unfinished):
                sync(written)
            unfinished.rename(path)
            (path / _MARK).unlink()
            sync_folder(path.parent)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        finally:
            os.close(handle)


def _remove_unfinished(path: Path) -> None:
    """Removes the folders that ``whole_folder`` did not finish, except those that another process is still writing."""
    for left in path.parent.iterdir():
        ours = left.name.startswith(f"{path.name}.") and left.name.endswith(".unfinished") and (left / _MARK).is_file()
        if ours and not left.is_symlink():
            handle = os.open(left, os.O_RDONLY)
            try:
                with contextlib.suppress(BlockingIOError):  # another process holds the lock
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)


def refuse_existing(path: Path) -> None:
    refuse(path.exists(), f"{path} exists already and is not overwritten: choose another folder")


def refuse_other_files(folder: Path, what: str, is_ours: Callable[[str], bool] = lambda name: False) -> None:
    """Raises if the folder holds files that are not ours, by default any file. ``what`` is only for the message."""
    has_others = not all(is_ours(path.name) for path in folder.iterdir())
    refuse(has_others, f"{folder} holds other files and no {what}: choose another --out")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context that locks a folder, and makes it if it does not exist. The lock ends with the context or with the process,
    even if the process is killed. At the end, folders that were made here are removed again if they are empty."""
    refuse(folder.exists() and not folder.is_dir(), f"{folder} is a file: choose another --out")
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {folder} ({error.strerror}): choose another --out") from error
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is working in {folder}: wait for it, or choose another --out") from error
        try:
            yield
        finally:
            _remove_empty(missing)
    finally:
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine has locked a folder. This only looks: a reader that took the lock could make a process
    fail that starts at this moment."""
    with contextlib.suppress(OSError):  # systems without /proc cannot tell
        inode = f":{folder.stat().st_ino} "
        return any(" FLOCK " in line and inode in line for line in Path("/proc/locks").read_text(encoding="ascii").splitlines())
    return False


def _remove_empty(folders: Sequence[Path]) -> None:
    """Removes these folders, the innermost first, up to the first that is not empty, so that a refused command leaves none."""
    with contextlib.suppress(OSError):
        for folder in folders:
            if folder.exists():
                folder.rmdir()
