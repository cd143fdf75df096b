"""Loading what a command needs, which takes seconds for PyTorch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from smupar.lm.run.signals import handled
from smupar.output.progress import waiting


@contextlib.contextmanager
def loading(what: str = "loading PyTorch") -> Iterator[None]:
    """Shows on a terminal that something is loaded. Ctrl-C ends the process at once: libraries that are interrupted while they
    are imported go on in pieces, or with errors of their own. There is nothing to save yet."""
    is_main = int(os.environ.get("RANK", 0)) == 0  # of the ranks of torchrun, which share a terminal
    with handled({signal.SIGINT: _leave}), waiting(what) if is_main else contextlib.nullcontext():
        yield


def _leave(*_: object) -> None:
    with contextlib.suppress(OSError, ValueError):
        print("\nsmupar: interrupted", file=sys.stderr, flush=True)
    os._exit(130)
