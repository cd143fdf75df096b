"""Our own kernel for CPUs: ``kernel.cpp``, compiled when it is first needed and kept in the user's cache.

Its interface is plain C. So the compiler needs no headers of torch and takes seconds, and the library works with any version of
torch. Without a compiler torch's own products are used, with a warning that says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache, partial
from pathlib import Path

_SOURCE = Path(__file__).with_name("kernel.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-Wno-ignored-attributes", "-Wno-psabi")
_ADDRESS, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_FORWARD = [_ADDRESS, _LONG, _LONG, _LONG, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _INT]
_BACKWARD = [_ADDRESS, _ADDRESS, _LONG, _LONG, _LONG, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _INT]


class NoKernel(Exception):  # noqa: N818  # an answer, not a failure: torch's products are used instead
    """Our own kernel is not available here; the text says why."""


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
        return "there is no C++ compiler (c++, g++ or clang++; CXX names another)"
    made_of = b"/".join([_SOURCE.read_bytes(), _machine(), compiler.encode()])
    name = f"kernel-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    try:
        folder = _folder()
        if not (folder / name).exists():
            _compile(compiler, folder, name)
        return _typed(ctypes.CDLL(str(folder / name)))
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        return f"{compiler} could not compile {_SOURCE.name}: {said[0] if said else error}"
    except OSError as error:
        return f"the compiled kernel could not be kept or loaded: {error}"


def _machine() -> bytes:
    """A description of this processor, since code that is compiled for it may not run on another."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.platform()} {platform.machine()} {flags}".encode()


def _folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smupar"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="smupar-"))


def _compile(compiler: str, folder: Path, name: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        path = Path(unfinished) / name
        run = partial(subprocess.run, check=True, capture_output=True, text=True)
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(path)]
        try:
            run([*command, "-fopenmp"])
        except subprocess.CalledProcessError:  # Apple's compiler has no OpenMP: one thread then
            run([*command, "-Wno-unknown-pragmas"])
        path.replace(folder / name)  # whole, whichever process was first


def _typed(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for suffix in ("f32", "f64"):
        for name, arguments in (("forward", _FORWARD), ("backward", _BACKWARD)):
            function = getattr(loaded, f"smupar_{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
    return loaded
