"""Signals that ask a process to end: SIGTERM from a scheduler, SIGINT from the keyboard."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Literal

TERMINATED = 143  # a shell's exit code for a process that SIGTERM ended


@contextlib.contextmanager
def handled(handlers: Mapping[int, Any]) -> Iterator[Callable[[], None]]:
    """Handles these signals within the block, and restores the former handlers after it. Yields a function that installs the
    handlers again, in case a library has installed its own."""
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers only in the main thread
        handlers = {}

    def install() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    before = {number: signal.getsignal(number) for number in handlers}
    install()
    try:
        yield install
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop:
    """Whether a signal has asked the process to stop. A loop that watches this can save before it ends; a second SIGINT ends
    the process at once."""

    requested = False
    status: Literal["interrupted", "terminated"] = "terminated"

    @classmethod
    @contextlib.contextmanager
    def on_signals(cls) -> Iterator[Stop]:
        stop = cls()
        with handled(dict.fromkeys((signal.SIGTERM, signal.SIGINT), stop._note)):
            yield stop

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        self.status = "interrupted" if number == signal.SIGINT else "terminated"


@contextlib.contextmanager
def ended_by_sigint() -> Iterator[None]:
    """Makes SIGINT end the process at once in the block. Python's own handler, which raises KeyboardInterrupt, runs only when a
    call into C++ returns, and ranks wait for each other in one for up to 30 minutes. Other handlers stay."""
    is_own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with handled({signal.SIGINT: signal.SIG_DFL} if is_own else {}):
        yield


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit in the block, so that a preempted job cleans up and ends with a shell's exit code."""
    with handled({signal.SIGTERM: lambda *_: sys.exit(TERMINATED)}):
        try:
            yield
        except SystemExit as error:
            raise SystemExit(TERMINATED) from error  # Ray turns our SystemExit into its own, with code 1


def end_if_stopped(status: str) -> None:
    """Ends the process with the exit code of the signal that stopped a run."""
    if status == "interrupted":
        raise KeyboardInterrupt
    if status == "terminated":
        sys.exit(TERMINATED)
