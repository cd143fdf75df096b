"""Signals that ask a process to end: SIGTERM from a scheduler, SIGINT from the keyboard."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Literal

TERMINATED = 143  # the exit code that a shell gives to a process that SIGTERM ended


@contextlib.contextmanager
def handled(handlers: Mapping[int, Any]) -> Iterator[Callable[[], None]]:
    """Handles these signals within the block, and puts the former handlers back after it. Yields a function that installs the
    handlers again, for blocks in which a library installs its own."""
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
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
    """Whether a signal has asked to stop. A loop that watches it can save before it ends; a second SIGINT ends it at once."""

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
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the block, so that a job that is preempted ends in order and with the exit code of a shell."""
    with handled({signal.SIGTERM: lambda *_: sys.exit(TERMINATED)}):
        try:
            yield
        except SystemExit as error:
            raise SystemExit(TERMINATED) from error  # while Ray waits, it turns ours into its own, with code 1


def end_if_stopped(status: str) -> None:
    """Ends the process as the signal that stopped a run would have ended it."""
    if status == "interrupted":
        raise KeyboardInterrupt
    if status == "terminated":
        sys.exit(TERMINATED)
