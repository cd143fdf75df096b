"""Shows how far something is. On a terminal it is a line that is drawn again a few times a second, by a thread, so that it
moves while the work itself says nothing. Elsewhere it is a plain line now and then, so that logs can be read.

Whoever works keeps plain numbers; a ``Display`` reads them when it draws:

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
_FIRST_LINE, _LINE_SECONDS, _LINE_SHARE = (
    2.0,
    10.0,
    0.02,
)  # of plain lines: later ones are rarer, so that a long log stays short
_WINDOW = 60.0  # seconds; the time left follows from the speed of the last half of the time, at least these
_STALL = 5.0  # seconds without growth
_LEAST_BAR, _MOST_BAR = 8, 30
_ERASE = "\r\x1b[K"


@dataclass(frozen=True)
class Status:
    """How far something is."""

    share: float | None = None  # of the work that is done, from 0 to 1; None if it is not known
    words: tuple[str, ...] = ()  # in the order in which they are shown
    rank: tuple[int, ...] = ()  # how important each is, 0 first; default: their order. What does not fit is left out


class Clock:
    """Tells the time left from shares done at some times."""

    def __init__(self, now: float) -> None:
        self.start = now
        self.seen: list[tuple[float, float]] = []  # time and share, when the share had grown

    def note(self, now: float, share: float) -> None:
        # What comes before the first growth is the start: loading, compiling, or going on from a checkpoint.
        if not self.seen or share > self.seen[-1][1]:
            self.seen.append((now, share))
        window = max(_WINDOW, (now - self.start) / 2)
        while len(self.seen) > 2 and self.seen[1][0] < now - window:
            del self.seen[0]

    def left(self, now: float) -> float | None:
        """Seconds; None as long as they cannot be told."""
        if len(self.seen) < 2:
            return None
        (first, was), (last, share) = self.seen[min(1, len(self.seen) - 2)], self.seen[-1]
        waited = now - last
        if waited > _STALL:  # the longer nothing grows, the slower it is
            return (now - first) * (1 - share) / (share - was)
        return max(0.0, (last - first) * (1 - share) / (share - was) - waited)


def rendered(status: Status, seconds: float, left: float | None, width: int, *, plain: bool = False) -> str:
    """The line, in at most this many columns. ``plain``: with ASCII only."""
    time_word = f"{duration(seconds)}" if left is None else f"{duration(left)} left"
    head, bar = "", False
    if status.share is not None:
        head, bar = f"{int(100 * status.share):3d}% ", True
    room = width - len(head) - len(time_word) - (_LEAST_BAR + 1 if bar else 0)
    ranked = sorted(range(len(status.words)), key=lambda n: status.rank[n] if status.rank else n)
    shown: set[int] = set()
    for n in ranked:
        if len(status.words[n]) + 2 <= room:
            shown.add(n)
            room -= len(status.words[n]) + 2
    words = ", ".join([*(status.words[n] for n in sorted(shown)), time_word])
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
    """``with Display(read)`` shows what ``read()`` returns, on standard error, until the block ends."""

    def __init__(self, read: Callable[[], Status], *, lines: bool = True) -> None:
        """``lines``: whether plain lines are written where standard error is no terminal."""
        self.read, self.lines = read, lines
        self.stream: TextIO = sys.stderr
        self.on_terminal = is_terminal(self.stream)
        self.lock, self.ended = threading.RLock(), threading.Event()
        self.is_drawn = False
        self.at_start_of_line = True  # of the terminal, as far as this process writes to it
        self._around = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._repeat, name="smupar-progress", daemon=True)
        self._said = ""

    def __enter__(self) -> Display:
        self.clock = Clock(time.monotonic())
        self.next_line = self.clock.start + _FIRST_LINE
        if self.on_terminal:
            self._around.enter_context(self._written_above())
            self.draw()
        if self.on_terminal or self.lines:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.erase()
        self._around.close()

    def _repeat(self) -> None:
        while not self.ended.wait(_DRAW_SECONDS):
            self.draw() if self.on_terminal else self.write_line()

    def draw(self) -> None:
        """Draws the line of a terminal again."""
        status, now = self._noted()
        # The last column stays free: some terminals wrap there.
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
        status, now = self._noted()
        said = ", ".join(status.words)
        if now < self.next_line or said == self._said:
            return
        left = self.clock.left(now)
        share = "" if status.share is None else f"{int(100 * status.share)}%, "
        time_word = f"{duration(now - self.clock.start)} gone" if left is None else f"{duration(left)} left"
        self._write(f"{share}{said}, {time_word}\n")
        self._said = said
        self.next_line = now + max(_LINE_SECONDS, _LINE_SHARE * (now - self.clock.start))

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed: the work goes on
            self.stream.write(text)
            self.stream.flush()

    def _noted(self) -> tuple[Status, float]:
        status, now = self.read(), time.monotonic()
        if status.share is not None:
            self.clock.note(now, status.share)
        return status, now

    @contextlib.contextmanager
    def _written_above(self) -> Iterator[None]:
        """Makes what the process prints meanwhile appear above the line."""
        with contextlib.ExitStack() as stack:
            if sys.stdout.isatty():
                stack.enter_context(contextlib.redirect_stdout(_Above(sys.stdout, self)))
            stack.enter_context(contextlib.redirect_stderr(_Above(sys.stderr, self)))
            yield


class _Above:
    """A stream of the terminal whose text appears above the line of a display."""

    def __init__(self, stream: TextIO, display: Display) -> None:
        self._stream, self._display = stream, display

    def write(self, text: str) -> int:
        with self._display.lock:
            self._display.erase()
            written = self._stream.write(text)
            self._stream.flush()
            if text:
                self._display.at_start_of_line = text.endswith(("\n", _ERASE))  # or another display has ended
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def waiting(what: str) -> Display:
    """Shows on a terminal that something takes its time before there is any progress."""
    return Display(lambda: Status(words=(what,)), lines=False)
