"""Progress: the line of a terminal, plain lines elsewhere, and the time left."""

import io
import sys

import pytest

from smupar.output.progress import Clock, Display, Status, duration, rendered
from smupar.output.terminal import columns, has_colours, painted, wrapped

STUDY = Status(0.4, ("10 of 24 done", "8 running", "0 diverged", "best 2.134"), rank=(0, 1, 3, 2))


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def show_on(stream, monkeypatch):
    """Makes the stream standard error. In a fixture, pytest would put its own in its place before the test."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_line_of_eighty_columns_shows_everything():
    line = rendered(STUDY, 60, 83, 79)
    assert line == " 40% █████▌░░░░░░░░ 10 of 24 done, 8 running, 0 diverged, best 2.134, 1:23 left"
    assert len(line) == 79


@pytest.mark.parametrize("width", [10, 20, 40, 60, 79, 200])
@pytest.mark.parametrize("share", [None, 0.0, 0.5, 1.0])
def test_line_never_exceeds_the_terminal(width, share):
    assert len(rendered(Status(share, STUDY.words, STUDY.rank), 5, None, width)) <= width


def test_narrow_line_keeps_what_matters():
    assert rendered(STUDY, 60, 83, 39) == " 40% ███▌░░░░░ 10 of 24 done, 1:23 left"
    diverged = Status(0.4, (*STUDY.words[:2], "3 diverged", STUDY.words[3]), rank=(0, 1, 2, 3))
    assert "3 diverged" in rendered(diverged, 60, 83, 65)
    assert "best" not in rendered(diverged, 60, 83, 65)


def test_bar_is_ascii_where_the_encoding_has_no_blocks():
    assert rendered(STUDY, 60, 83, 79, plain=True).isascii()


def test_time_left_follows_from_growth_and_not_from_the_start():
    clock = Clock(0.0)
    clock.note(100.0, 0.0)  # loading and compiling took long
    assert clock.left(101.0) is None
    for second in range(1, 11):
        clock.note(100.0 + second, second / 100)
    assert clock.left(110.0) == pytest.approx(90.0)
    assert clock.left(112.0) == pytest.approx(88.0)
    assert clock.left(210.0) > 500  # nothing has grown for long


def test_time_left_begins_again_with_other_work():
    clock = Clock(0.0)
    for second in range(11):
        clock.note(float(second), second / 10)
    for second in range(11, 21):
        clock.note(float(second), (second - 11) / 100)
    assert clock.left(20.0) == pytest.approx(91.0)


def test_time_in_which_nothing_can_grow_does_not_count():
    clock = Clock(0.0)
    for second in range(11):
        clock.note(float(second), second / 100)
    for second in range(11, 111):
        clock.note(float(second), 0.1, is_working=False)  # compiling
    assert clock.left(110.0) == pytest.approx(90.0)
    clock.note(111.0, 0.11)
    assert clock.left(111.0) == pytest.approx(89.0)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0:00"), (65, "1:05"), (3599.6, "1:00:00"), (11220, "3:07:00"), (183600, "2d 03:00")]
)
def test_duration_in_words(seconds, words):
    assert duration(seconds) == words


def test_terminal_line_is_drawn_at_once_and_erased_at_the_end(monkeypatch):
    terminal = show_on(Terminal(), monkeypatch)
    with Display(lambda: STUDY):
        first = terminal.getvalue()
        assert first.startswith("\r\x1b[K 40% ")
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert sys.stderr is terminal


def test_what_is_printed_meanwhile_stands_above_the_line(monkeypatch):
    terminal = show_on(Terminal(), monkeypatch)
    with Display(lambda: STUDY) as display:
        print("a note", file=sys.stderr)
        display.draw()
    assert "\r\x1b[Ka note\n\r\x1b[K 40% " in terminal.getvalue()


def test_line_waits_until_a_line_of_others_is_whole(monkeypatch):
    terminal = show_on(Terminal(), monkeypatch)
    with Display(lambda: STUDY) as display:
        print("half", end="", file=sys.stderr)
        display.draw()
        assert terminal.getvalue().endswith("half")
        print(file=sys.stderr)


def test_elsewhere_lines_are_plain_and_rare(monkeypatch):
    show_on(io.StringIO(), monkeypatch)
    seconds = iter(range(100_000))
    monkeypatch.setattr("smupar.output.progress.time.monotonic", lambda: float(next(seconds)))
    done = iter(range(100_000))
    display = Display(lambda: Status(0.5, (f"{next(done)} done",)))
    display.clock, display.next_line = Clock(0.0), 2.0
    for _ in range(50_000):
        display.write_line()
    lines = sys.stderr.getvalue().splitlines()
    assert 20 < len(lines) < 400
    assert "\r" not in sys.stderr.getvalue()
    assert "\x1b" not in sys.stderr.getvalue()
    assert lines[0].startswith("50%, ")


def test_closed_terminal_does_not_end_the_work(monkeypatch):
    class Closed(Terminal):
        def write(self, text):
            raise BrokenPipeError

    show_on(Closed(), monkeypatch)
    with Display(lambda: STUDY):
        pass


def test_dumb_terminals_and_files_have_no_colours(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colours(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert has_colours(Terminal())
    assert not has_colours(io.StringIO())
    assert painted("x", "plain", on=Terminal()) == "x"


def test_width_is_that_of_the_terminal_and_never_nothing(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert columns(io.StringIO(), most=100) == 100
    monkeypatch.setenv("COLUMNS", "3")
    assert columns(Terminal()) == 20


def test_paths_and_flags_stay_whole_when_wrapped():
    path = "runs/smupar-width256-sparse0.9375-c4fc44fa84/checkpoints"
    assert path in wrapped(f"see {path} there", 20)
