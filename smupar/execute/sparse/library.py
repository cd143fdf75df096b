"""Compiles our kernel for CPUs, ``kernel.cpp``, on first use, and loads it.

The interface is plain C, so compiling takes seconds and needs no headers of torch, and the library works with any version of
torch. It is kept in the user's cache, in a folder that no other user can write to. Its file name contains the sha256 of its
content, which is checked before loading; a damaged library is compiled again. If the cache cannot be used, the library is
compiled into a temporary folder for this process only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from smupar.output.files import sync, sync_folder
from smupar.output.private_folders import cache_folder, private_folder, private_temporary_folder, read_own

_SOURCE = Path(__file__).with_name("kernel.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-Wno-ignored-attributes", "-Wno-psabi")
_UNFINISHED = re.compile(r"kernel-[0-9a-f]{16}-\d+\.tmp")
_ADDRESS, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_FORWARD = [_ADDRESS, _LONG, _LONG, _LONG, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _INT]
_BACKWARD = [_ADDRESS, _ADDRESS, _LONG, _LONG, _LONG, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _INT]
_TRAINING = {"forward": _FORWARD, "backward": _BACKWARD}


class NoKernel(Exception):  # noqa: N818  # not an error, since torch's products are used instead
    """Our own kernel is not available. The text says why."""


class SparseWarning(UserWarning):
    """Sparse execution works, but slower than it could."""


def library() -> ctypes.CDLL:
    """The compiled kernel. Raises ``NoKernel`` if there is none."""
    loaded = _library()
    if isinstance(loaded, str):
        raise NoKernel(loaded)
    return loaded


@cache
def _library() -> ctypes.CDLL | str:
    compiler = next(
        (path for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and (path := shutil.which(name))), None
    )
    if compiler is None:
        return "there is no C++ compiler (c++, g++ or clang++; set CXX to name another)"
    build = _Build(compiler)
    try:
        return build.from_cache() or build.for_this_process()
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return f"{compiler} could not compile {_SOURCE.name}: {lines[0] if lines else error}"
    except OSError as error:
        return f"the compiled kernel could not be stored or loaded: {error}"


@dataclass(frozen=True)
class _Build:
    compiler: str

    @property
    def prefix(self) -> str:
        """The start of the library's file name, with a hash of everything from which the library is made."""
        made_of = b"/".join([_SOURCE.read_bytes(), _machine(), self.compiler.encode()])
        return f"kernel-{hashlib.sha256(made_of).hexdigest()[:16]}"

    def from_cache(self) -> ctypes.CDLL | None:
        """The library in the user's cache, compiled now if needed; None if the cache cannot be used."""
        try:
            with private_folder(cache_folder()) as folder:
                folder.chmod(0o700)
                return self.stored(folder) or self.compiled(folder)
        except OSError as error:
            warnings.warn(
                f"the kernel is compiled for this process only, since the cache cannot be used ({error}): set XDG_CACHE_HOME "
                "to a folder of your own",
                SparseWarning,
                stacklevel=2,
            )
            return None

    def for_this_process(self) -> ctypes.CDLL:
        with private_temporary_folder() as folder:  # a loaded library works without its file
            return self.compiled(folder)

    def stored(self, folder: Path) -> ctypes.CDLL | None:
        """The library that an earlier process compiled; None if there is none or it is damaged."""
        for path in sorted(folder.glob(f"{self.prefix}-*.so")):
            if self.is_whole(path):
                return _typed(ctypes.CDLL(str(path)))
            path.unlink(missing_ok=True)
            warnings.warn(
                f"the compiled kernel {path.name} in {cache_folder()} is damaged: it is compiled again",
                SparseWarning,
                stacklevel=2,
            )
        return None

    def is_whole(self, path: Path) -> bool:
        try:
            return path.name == self.name_of(read_own(path))
        except OSError:
            return False

    def name_of(self, content: bytes) -> str:
        return f"{self.prefix}-{hashlib.sha256(content).hexdigest()}.so"

    def compiled(self, folder: Path) -> ctypes.CDLL:
        with _alone_in(folder) as lock:
            if already := self.stored(folder):  # another process compiled it while this one waited
                return already
            unfinished = folder / f"{self.prefix}-{os.getpid()}.tmp"
            try:
                self.compile(unfinished, lock)
                sync(unfinished)  # a file under its final name is complete, even if the power fails
                path = folder / self.name_of(read_own(unfinished))
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
            sync_folder(folder)
            return _typed(ctypes.CDLL(str(path)))

    def compile(self, path: Path, lock: int) -> None:
        # The compiler inherits the lock. So even if this process is killed, no other process removes the file while it is
        # written.
        run = partial(subprocess.run, check=True, capture_output=True, text=True, cwd=path.parent, pass_fds=(lock,))
        command = [self.compiler, *_FLAGS, str(_SOURCE.resolve()), "-o", path.name]
        try:
            run([*command, "-fopenmp"])
        except subprocess.CalledProcessError:  # Apple's compiler has no OpenMP, so the kernel uses one thread
            run([*command, "-Wno-unknown-pragmas"])


def _machine() -> bytes:
    """A description of this processor, since code compiled for it may not run on another processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.platform()} {platform.machine()} {flags}".encode()


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[int]:
    """A context for compiling in a folder, which one process at a time can enter. Removes files that killed processes left
    there. Yields the lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
            for path in folder.iterdir():
                if _UNFINISHED.fullmatch(path.name):
                    path.unlink()
        yield handle
    finally:
        os.close(handle)


def _typed(loaded: ctypes.CDLL) -> ctypes.CDLL:
    functions = {f"{name}_{suffix}": arguments for name, arguments in _TRAINING.items() for suffix in ("f32", "f64")}
    for name, arguments in {**functions, "packed_f32": _FORWARD, "packed_bf16": _FORWARD}.items():
        try:
            function = getattr(loaded, f"smupar_{name}")
        except AttributeError as error:
            raise OSError(f"it lacks a function ({error})") from error
        function.argtypes, function.restype = arguments, None
    return loaded
