"""The compiled kernel: nothing damaged is loaded, nothing of another user is run, nothing is left over."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from smupar.execute.sparse import library
from smupar.execute.sparse.library import SparseWarning

NOBODY = 65534
_SOURCE = Path(library.__file__).with_name("kernel.cpp")


def _others_can_read(path):
    return path.stat().st_mode & 0o004 and all(parent.stat().st_mode & 0o001 for parent in path.parents)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A compiler that takes no time: it copies the kernel that the real one made."""
    folder = tmp_path_factory.mktemp("once")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder))
        assert load() == []
        (kernel,) = library.cache_folder().iterdir()
    return _script(folder / "copies", f"cp {kernel} $out")


def _script(path, command):
    path.write_text(f'#!/bin/bash\nout="${{@: -2:1}}"\n{command}\n')
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def places(compiler, tmp_path, monkeypatch):
    """A cache and a temporary folder of this test alone."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    library._library.cache_clear()
    yield tmp_path / "cache" / "smupar", tmp_path / "tmp"
    library._library.cache_clear()


def load():
    """Loads the kernel as a new process would. Returns what was said."""
    library._library.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert library.library().smupar_forward_f32
    return [str(warning.message) for warning in said]


def load_in_a_new_process():
    """The same in a process of its own, since the system does not load a library of the same name twice. Returns stderr."""
    script = "from smupar.execute.sparse import library; library.library()"
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, check=True)
    return done.stderr


def hostile(path, proof):
    """A library that writes a file as soon as it is loaded."""
    source = f'#include <cstdio>\n__attribute__((constructor)) static void run() {{ fopen("{proof}", "w"); }}\n'
    subprocess.run(["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", path], input=source, text=True, check=True)


@pytest.fixture
def cached(places):
    """The kernel in the cache."""
    assert load() == []
    (path,) = places[0].iterdir()
    return path


def test_kernel_is_compiled_once_into_a_private_folder(places, cached):
    before = cached.stat()
    assert stat.S_IMODE(cached.parent.stat().st_mode) == 0o700
    assert load() == []
    assert cached.stat() == before  # loaded, not compiled again
    cached.parent.chmod(0o755)
    assert load() == []
    assert stat.S_IMODE(cached.parent.stat().st_mode) == 0o700


def flipped(content):
    return content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]


@pytest.mark.parametrize(
    "damage",
    [lambda c: c[: len(c) // 2], lambda c: b"", flipped, lambda c: b"\0" * len(c), lambda c: c + b"x"],
    ids=["truncated", "empty", "one bit flipped", "zeroed", "too long"],
)
def test_damaged_kernel_is_compiled_again(cached, damage):
    whole = cached.read_bytes()
    cached.unlink()  # it is mapped into this process
    cached.write_bytes(damage(whole))
    assert load() == [f"the compiled kernel {cached.name} in {cached.parent} is damaged: it is compiled again"]
    assert cached.read_bytes() == whole
    assert load() == []


def test_library_of_others_under_our_name_is_not_run(cached, tmp_path):
    cached.unlink()
    hostile(cached, tmp_path / "proof")
    assert "is damaged: it is compiled again" in load_in_a_new_process()
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("kind", ["link", "folder is a link", "pipe", "old name"])
def test_what_is_not_a_plain_file_of_ours_is_not_run(cached, tmp_path, kind):
    hostile(tmp_path / "evil.so", tmp_path / "proof")
    if kind == "folder is a link":
        cached.parent.rename(tmp_path / "elsewhere")
        cached.parent.symlink_to(tmp_path / "elsewhere")
    elif kind == "old name":  # of versions that kept no checksum
        (tmp_path / "evil.so").rename(cached.with_name(cached.name[:23] + ".so"))
    else:
        cached.unlink()
        cached.symlink_to(tmp_path / "evil.so") if kind == "link" else os.mkfifo(cached)
    said = load_in_a_new_process()
    assert not (tmp_path / "proof").exists()
    assert ("SparseWarning" in said) == (kind != "old name")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_folder_that_others_can_write_is_not_used(places, cached, mode):
    cached.parent.chmod(mode)
    (said,) = load()
    assert f"other users can write to {cached.parent}; delete it" in said
    assert list(places[1].iterdir()) == []


@as_root
@pytest.mark.parametrize("what", ["file", "folder"])
def test_kernel_of_another_user_is_not_run(places, cached, tmp_path, what):
    # The other user knows the name scheme, so that name and content fit.
    hostile(tmp_path / "evil.so", tmp_path / "proof")
    content = (tmp_path / "evil.so").read_bytes()
    evil = cached.with_name(f"{cached.name[:23]}-{library.hashlib.sha256(content).hexdigest()}.so")
    cached.unlink()
    evil.write_bytes(content)
    os.chown(evil, NOBODY, NOBODY)
    if what == "folder":
        os.chown(evil.parent, NOBODY, NOBODY)
    said = load_in_a_new_process()
    assert ("belongs to another user" if what == "folder" else "is compiled again") in said
    assert not (tmp_path / "proof").exists()
    assert list(places[1].iterdir()) == []


@as_root
@pytest.mark.skipif(not _others_can_read(_SOURCE), reason="this checkout is closed to other users of the machine")
def test_another_user_does_not_use_our_folder(cached, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # pytest's own folders are closed to others
        Path(shared).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", shared)
        monkeypatch.setenv("XDG_CACHE_HOME", shared)
        shutil.copytree(cached.parent, Path(shared) / "smupar")
        (Path(shared) / "smupar").chmod(0o755)
        monkeypatch.setenv("CXX", str(_script(Path(shared) / "c++", "echo out of ink >&2; exit 1")))
        library._library.cache_clear()
        os.seteuid(NOBODY)
        try:
            with pytest.warns(SparseWarning, match="smupar belongs to another user"):
                assert "out of ink" in library._library()  # it tried to compile a kernel of its own
        finally:
            os.seteuid(0)
        assert sorted(path.name for path in Path(shared).iterdir()) == ["c++", "smupar"]


def test_folder_that_is_swapped_after_the_check_is_not_used(cached, tmp_path):
    with library.private_folder(cached.parent) as folder:
        cached.parent.rename(tmp_path / "ours")
        cached.parent.mkdir()
        (cached.parent / "theirs").touch()
        assert [path.name for path in folder.iterdir()] == [cached.name]


@pytest.mark.parametrize("command", ["exit 0", "touch $out", "echo 'void f() {}' | c++ -shared -fPIC -x c++ - -o $out"])
def test_compiler_that_makes_no_kernel_is_no_traceback(places, tmp_path, monkeypatch, command):
    monkeypatch.setenv("CXX", str(_script(tmp_path / "odd", command)))
    with pytest.warns(SparseWarning), pytest.raises(library.NoKernel, match="could not be stored or loaded"):
        library.library()
    assert list(places[1].iterdir()) == []


def test_without_a_cache_nothing_is_left_in_the_temporary_folder(places, tmp_path, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, other = (places[1] / f"smupar-{pid}-abcdefgh" for pid in (ended.pid, os.getpid()))
    for folder in (left, other):
        folder.mkdir()
        (folder / "kernel.so").touch()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "the kernel is compiled for this process only" in load()[0]
    assert list(places[1].iterdir()) == [other]  # of a process that lives


def test_file_of_a_killed_compilation_is_removed(cached):
    unfinished = cached.with_name(f"{cached.name[:23]}-99999999.tmp")
    cached.rename(unfinished)
    assert load() == []
    assert list(cached.parent.iterdir()) == [cached]
