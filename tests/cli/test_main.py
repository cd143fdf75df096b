"""Commands as processes of their own: on a terminal, in a pipe, without UTF-8, interrupted."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import warnings

import pytest

from smupar.cli.main import main

SIZE = ["--width", "64", "--depth", "1", "--seq-len", "16", "--batch-size", "2", "--valid-batches", "1"]
SWEEP = ["sweep", "lr=0.01,0.02", *SIZE, "--engine", "stacked", "--device", "cpu"]
COMMAND = [sys.executable, "-m", "smupar"]


def on_terminal(argv, columns, *, until=None):
    """What a command writes to a terminal, and its exit code. Ctrl-C comes when ``until`` has been seen."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen([*COMMAND, *argv], stdin=other, stdout=other, stderr=other, env=variables | {"TERM": "xterm"})
    os.close(other)
    said = b""
    while True:
        try:
            more = os.read(main, 65536)
        except OSError:  # the last writer has closed it
            break
        said += more
        if until is not None and until in said.decode(errors="replace"):
            process.send_signal(signal.SIGINT)
            until = None
    os.close(main)
    return said.decode(), process.wait()


@pytest.mark.parametrize("columns", [pytest.param(40, marks=pytest.mark.slow), 80])
def test_progress_of_a_study_stays_within_the_terminal(tmp_path, columns):
    said, code = on_terminal([*SWEEP, "--steps", "40", "--out", str(tmp_path / "s")], columns)
    assert code == 0, said
    drawn = re.findall(r"\r\x1b\[K([^\r\n]+)(?=\r\x1b\[K)", said)
    assert max(map(len, drawn)) < columns
    bars = [line for line in drawn if "%" in line]
    assert all("of 2 done" in bar for bar in bars)
    assert bars[0].startswith("  0% ░")
    # What stays on the screen has no rest of a line that was drawn.
    screen = re.sub(r"[^\n]*\r\x1b\[K", "", said.replace("\r\n", "\n"))
    assert "%" not in screen
    assert "\x1b[1mThe best loss is" in screen


def test_interrupted_study_ends_without_a_traceback(tmp_path):
    argv = [*SWEEP, "--steps", "1000000", "--out", str(tmp_path / "s")]
    said, code = on_terminal(argv, 80, until="2 running")
    assert code == 130
    assert "0 of 2 runs are done and kept" in said
    assert "Traceback" not in said


def test_command_that_is_still_loading_is_interrupted_at_once(tmp_path):
    said, code = on_terminal(["sweep", "lr=0.01,0.02", "--out", str(tmp_path / "s")], 80, until="loading PyTorch")
    assert (code, "smupar: interrupted" in said, "Traceback" in said) == (130, True, False)
    assert not (tmp_path / "s").exists()


def test_note_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main sets it for the whole process
    main(["rules"])
    for text in ("thin", "thin", "wide"):
        warnings.showwarning(text, UserWarning, "", 0)
    assert capsys.readouterr().err.splitlines() == ["smupar: note: thin", "smupar: note: wide"]


def test_reader_that_ends_first_is_no_error():
    with subprocess.Popen([*COMMAND, "train", "--help-all"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.slow
def test_encoding_without_blocks_or_accents_is_no_error(tmp_path):
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    argv = ["train", *SIZE, "--steps", "2", "--out", str(tmp_path / "run")]
    done = subprocess.run([*COMMAND, *argv], env=ascii_only, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    argv = ["generate", str(tmp_path / "run"), "--prompt", "é", "--tokens", "3"]
    done = subprocess.run([*COMMAND, *argv], env=ascii_only, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"?")


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_closed_streams_are_no_error(closed):
    done = subprocess.run(
        ["sh", "-c", f'exec {closed}>&-; exec "$0" "$@"', *COMMAND, "rules"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("eta / (m_in m_rho)" in done.stdout) == (closed != 1)
