"""Files and folders are written whole or not at all, and errors of the disk say what to do."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from smupar.output.files import NO_ROOM, read_plain, sentence_of, whole_folder, write_atomic, writing

ROOM = "Make room there (delete files, or have the quota raised) or name another path, then run the same command again"


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("number", [*NO_ROOM, errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_error_of_the_system_names_path_and_remedy(number):
    with pytest.raises(OSError) as caught, writing(Path("runs/a")):
        raise OSError(number, os.strerror(number))
    remedy = {errno.ENOTDIR: "Name another path", errno.EACCES: "Name a path that this", errno.EROFS: "Name a path that this"}
    assert sentence_of(caught.value).startswith(f"runs/a: {os.strerror(number)}. {remedy.get(number, ROOM)}")


def test_error_of_a_library_in_rust_names_path_and_remedy():
    with pytest.raises(OSError) as caught, writing(Path("runs/a")):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert sentence_of(caught.value) == f"runs/a: No space left on device. {ROOM}"


def test_errors_about_other_things_stay_as_they_are():
    for error in (
        ValueError("ours (os error 28)"),
        RuntimeError("unrelated"),
        FileNotFoundError(errno.ENOENT, "no", "elsewhere"),
    ):
        with pytest.raises(type(error)) as caught, writing(Path("runs/a")):
            raise error
        assert caught.value is error
    assert sentence_of(OSError("a sentence of ours")) == "a sentence of ours"


def test_file_that_does_not_fit_keeps_the_old_content(tmp_path, small_files):
    path = tmp_path / "table.csv"
    write_atomic(path, "old")
    with pytest.raises(OSError) as caught, small_files(4096):
        write_atomic(path, "x" * 5000)
    assert sentence_of(caught.value) == f"{path}: File too large. {ROOM}"
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_temporary_file_of_a_killed_process_is_removed_and_others_stay(tmp_path):
    left = tmp_path / f"a.json.{ended_process()}.tmp"
    others = [tmp_path / f"a.json.{os.getppid()}.tmp", tmp_path / "a.json.mine.tmp", tmp_path / "b.json.99999999.tmp"]
    for path in (left, *others):
        path.touch()
    write_atomic(tmp_path / "a.json", "{}")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a.json", *others])


def test_name_of_a_folder_that_is_not_utf_8_can_be_written(tmp_path):
    write_atomic(tmp_path / "a.md", os.fsdecode(b"gr\xf6\xdfe"))
    assert (tmp_path / "a.md").read_text(encoding="utf-8") == r"gr\udcf6\udcdfe"


def test_link_in_place_of_the_temporary_file_is_not_followed(tmp_path):
    """In a folder that users share, another one may have put it there."""
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / f"a.json.{os.getpid()}.tmp").symlink_to(tmp_path / "theirs")
    write_atomic(tmp_path / "a.json", "{}")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert (tmp_path / "a.json").read_text() == "{}"


def test_links_and_devices_are_written_to_and_not_replaced(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomic(tmp_path / "link", b"text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"text"
    write_atomic(Path("/dev/null"), "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path, "text")


def test_link_to_a_device_is_refused_unless_it_is_one_of_the_system(tmp_path):
    """What is written to /dev/null is lost."""
    (tmp_path / "best.json").symlink_to("/dev/null")
    with pytest.raises(OSError) as caught:
        write_atomic(tmp_path / "best.json", "{}")
    assert sentence_of(caught.value).startswith(f"{tmp_path / 'best.json'}: Not a plain file. Name another path")
    assert (tmp_path / "best.json").readlink() == Path("/dev/null")
    script = "from pathlib import Path; from smupar.output.files import write_atomic; write_atomic(Path('/dev/stdout'), 'text')"
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout == "text"


# Folders


def test_pipe_without_a_reader_is_refused_and_one_with_a_reader_gets_the_content(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"):
        write_atomic(pipe, "text")
    with pytest.raises(OSError, match="Not a plain file"):
        read_plain(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)


def test_link_in_a_circle_is_replaced(tmp_path):
    path = tmp_path / "circle"
    path.symlink_to("circle")
    write_atomic(path, "text")
    assert (path.is_symlink(), path.read_text()) == (False, "text")


def test_folder_appears_whole_and_touches_no_other(tmp_path):
    theirs = tmp_path / "out.unfinished"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("dear")
    with whole_folder(tmp_path / "out") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("a")
        assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.unfinished"]
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["sub", "a"]
    assert (theirs / "thesis.tex").read_text() == "dear"
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == stat.S_IMODE(theirs.stat().st_mode)  # as the umask says


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_folder_that_is_not_finished_is_removed(tmp_path, error):
    def fill(folder):
        (folder / "a").touch()
        raise error

    with pytest.raises(error), whole_folder(tmp_path / "out") as folder:
        fill(folder)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_does_not_fit_is_removed_and_named(tmp_path, small_files):
    with pytest.raises(OSError) as caught, small_files(4096), whole_folder(tmp_path / "out") as folder:
        (folder / "a").write_bytes(b"x" * 5000)
    assert sentence_of(caught.value) == f"{tmp_path / 'out'}: File too large. {ROOM}"
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_killed_process_is_removed_by_the_next_call(tmp_path):
    script = (
        "import os, sys; from pathlib import Path; from smupar.output.files import whole_folder\n"
        "with whole_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'a').touch(); os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, tmp_path / "out"]).returncode == -9
    (left,) = tmp_path.iterdir()
    theirs = tmp_path / "out.0a1b2c3d.unfinished"  # by its name it could be ours
    theirs.mkdir()
    (theirs / "a").touch()
    with whole_folder(tmp_path / "out.2"):  # another path
        assert left.exists()
    with whole_folder(tmp_path / "out") as folder:
        assert not left.exists()
        with whole_folder(tmp_path / "out"):  # leaves what another call is writing
            assert folder.exists()
        (tmp_path / "out").rmdir()
    assert (theirs / "a").exists()


def test_files_and_folders_are_synced_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    calls, fsync, rename = [], os.fsync, os.rename

    def noted_fsync(handle):
        calls.append(("fsync", Path(f"/proc/self/fd/{handle}").readlink().name))
        fsync(handle)

    def noted_rename(old, new):
        calls.append(("rename", Path(old).name))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    with whole_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("a")
    assert {("fsync", "a"), ("fsync", folder.name)} <= set(calls[: calls.index(("rename", folder.name))])
    assert calls[-1] == ("fsync", tmp_path.name)
