"""Shows progress. On a terminal, a thread draws the same line again a few times a second, so that it moves although the work
itself prints nothing. Elsewhere a plain line is printed now and then, so that logs stay readable.

The code that works keeps plain numbers, which a ``Display`` reads when it draws:

    with Display(lambda: Status(share=done / total, words=(f"{done} of {total} done",))):
        ...
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from smupar.output.terminal import can_show, columns, is_terminal

_DRAW_SECONDS = 0.25
_FIRST_LINE = 2.0  # seconds before the first plain line
# The time between plain lines is this many seconds, or this share of the time so far if that is longer. So the log of a
# long run stays short.
_LINE_SECONDS, _LINE_SHARE = 10.0, 0.02
# The time left is estimated from the speed in the last half of the time so far, or in the last _WINDOW seconds if that
# is longer.
_WINDOW = 60.0
_STALL = 5.0  # seconds without growth after which the estimated speed falls
_LEAST_BAR, _MOST_BAR = 8, 30
_ERASE = "\r\x1b[K"


@dataclass(frozen=True)
class Status:
    """The progress to show."""

    share: float | None = None  # share of the work that is done, 0 to 1; None if unknown
    words: tuple[str, ...] = ()  # in the order in which they are shown
    # Importance of each word, 0 for the most important; by default their order. The least important words are left out if the
    # line is too long.
    rank: tuple[int, ...] = ()
    is_working: bool = True  # False while the share cannot grow, for example because models are built


class Clock:
    """Estimates the time left from the shares that were done at earlier times. Time in which the share could not grow says
    nothing about the speed, so it is left out."""

    def __init__(self, now: float) -> None:
        self.start = self._noted = now
        self.seen: list[tuple[float, float]] = []  # (time, share) whenever the share had grown
        self._idle = 0.0  # seconds in which the share could not grow

    def note(self, now: float, share: float, *, is_working: bool = True) -> None:
        if not is_working:
            self._idle += now - self._noted
        self._noted = now
        now -= self._idle
        if self.seen and share < self.seen[-1][1]:  # other work has begun
            self.seen = []
        # Until the share has grown once, the time goes into loading, compiling, or reading a checkpoint.
        if not self.seen or share > self.seen[-1][1]:
            self.seen.append((now, share))
        window = max(_WINDOW, (now - self.start) / 2)
        while len(self.seen) > 2 and self.seen[1][0] < now - window:
            del self.seen[0]

    def left(self, now: float) -> float | None:
        """Seconds left; None while they are unknown."""
        if len(self.seen) < 2:
            return None
        (first, was), (last, share) = self.seen[min(1, len(self.seen) - 2)], self.seen[-1]
        waited = now - self._idle - last
        if waited > _STALL:  # the longer the share does not grow, the lower the estimated speed
            return (last + waited - first) * (1 - share) / (share - was)
        return max(0.0, (last - first) * (1 - share) / (share - was) - waited)


def rendered(status: Status, seconds: float, left: float | None, width: int, *, plain: bool = False) -> str:
    """The line, at most ``width`` columns wide. If ``plain``, the bar is drawn in ASCII."""
    time_word = f"{duration(seconds)}" if left is None else f"{duration(left)} left"
    head, bar = "", False
    if status.share is not None:
        head, bar = f"{int(100 * status.share):3d}% ", True
    room = width - len(head) - len(time_word) - (_LEAST_BAR + 1 if bar else 0)
    by_importance = sorted(range(len(status.words)), key=lambda index: status.rank[index] if status.rank else index)
    shown: set[int] = set()
    for index in by_importance:
        if len(status.words[index]) + 2 <= room:
            shown.add(index)
            room -= len(status.words[index]) + 2
    words = ", ".join([*(status.words[index] for index in sorted(shown)), time_word])
    if not bar or room < 0:
        return f"{head}{words}"[:width]
    return f"{head}{_bar(status.share or 0.0, min(_MOST_BAR, _LEAST_BAR + room), plain)} {words}"


def _bar(share: float, width: int, plain: bool) -> str:
    full = min(width, max(0, int(share * width)))
    if plain:
        return "#" * full + "." * (width - full)
    part = int((share * width - full) * 8)
    edge = " ▏▎▍▌▋▊▉"[part] if full < width and part else ""
    return "█" * full + edge + "░" * (width - full - len(edge))


def duration(seconds: float) -> str:
    """0:05, 12:30, 3:07:00, 2d 03:00."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, in_day = divmod(hours, 24)
    if days:
        return f"{days}d {in_day:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Display:
    """A context that shows what ``read()`` returns, on standard error."""

    def __init__(self, read: Callable[[], Status], *, lines: bool = True) -> None:
        """``lines``: whether to write plain lines if standard error is not a terminal."""
        self.read, self.lines = read, lines
        self.stream: TextIO = sys.stderr
        self.on_terminal = is_terminal(self.stream)
        self.lock, self.ended = threading.RLock(), threading.Event()
        self.is_drawn = False
        self.at_start_of_line = True  # whether this process's last output ended a line
        self._redirects = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._repeat, name="smupar-progress", daemon=True)
        self._last_words = ""

    def __enter__(self) -> Display:
        self.clock = Clock(time.monotonic())
        self.next_line = self.clock.start + _FIRST_LINE
        if self.on_terminal:
            self._redirects.enter_context(self._written_above())
            self.draw()
        if self.on_terminal or self.lines:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.erase()
        self._redirects.close()

    def _repeat(self) -> None:
        while not self.ended.wait(_DRAW_SECONDS):
            self.draw() if self.on_terminal else self.write_line()

    def draw(self) -> None:
        """Draws the line on the terminal again."""
        status, now = self._read()
        # The last column stays free, since some terminals begin a new line there.
        plain = not can_show("█░▏", self.stream)
        text = rendered(status, now - self.clock.start, self.clock.left(now), columns(self.stream) - 1, plain=plain)
        with self.lock:
            if self.at_start_of_line:
                self._write(f"{_ERASE}{text}")
                self.is_drawn = True

    def erase(self) -> None:
        with self.lock:
            if self.is_drawn:
                self.is_drawn = False
                self._write(_ERASE)

    def write_line(self) -> None:
        """Writes a plain line, if one is due and something has changed."""
        status, now = self._read()
        words = ", ".join(status.words)
        if now < self.next_line or words == self._last_words:
            return
        left = self.clock.left(now)
        share = "" if status.share is None else f"{int(100 * status.share)}%, "
        time_word = f"{duration(now - self.clock.start)} gone" if left is None else f"{duration(left)} left"
        self._write(f"{share}{words}, {time_word}\n")
        self._last_words = words
        self.next_line = now + max(_LINE_SECONDS, _LINE_SHARE * (now - self.clock.start))

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed; the work continues
            self.stream.write(text)
            self.stream.flush()

    def _read(self) -> tuple[Status, float]:
        status, now = self.read(), time.monotonic()
        if status.share is not None:
            self.clock.note(now, status.share, is_working=status.is_working)
        return status, now

    @contextlib.contextmanager
    def _written_above(self) -> Iterator[None]:
        """A context in which other output of the process appears above the line."""
        with contextlib.ExitStack() as stack:
            if sys.stdout.isatty():
                stack.enter_context(contextlib.redirect_stdout(_Above(sys.stdout, self)))
            stack.enter_context(contextlib.redirect_stderr(_Above(sys.stderr, self)))
            yield


class _Above:
    """A stream that writes above the line of a display."""

    def __init__(self, stream: TextIO, display: Display) -> None:
        self._stream, self._display = stream, display

    def write(self, text: str) -> int:
        with self._display.lock:
            self._display.erase()
            written = self._stream.write(text)
            self._stream.flush()
            if text:
                self._display.at_start_of_line = text.endswith(("\n", _ERASE))  # _ERASE comes from another display that ended
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def waiting(what: str) -> Display:
    """Shows on a terminal what is going on before there is any progress."""
    return Display(lambda: Status(words=(what,)), lines=False)
