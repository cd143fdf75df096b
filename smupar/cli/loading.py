"""Shows that PyTorch, or something else that takes seconds, is being loaded."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator

from smupar.lm.run.signals import handled
from smupar.output.progress import waiting


@contextlib.contextmanager
def loading(what: str = "loading PyTorch") -> Iterator[None]:
    """Shows on a terminal that something is being loaded. Ctrl-C ends the process at once, since libraries that are interrupted
    during their import may be left half loaded, and there is nothing to save yet."""
    is_main = int(os.environ.get("RANK", 0)) == 0  # ranks of torchrun share a terminal
    with handled({signal.SIGINT: _leave}), waiting(what) if is_main else contextlib.nullcontext(), _without_collections():
        yield


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Turns the garbage collector off while PyTorch is loaded. Afterwards it skips everything that was loaded. The half a
    million objects of PyTorch live as long as the process, and searching them took a fifth of the time."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _leave(*_: object) -> None:
    with contextlib.suppress(OSError, ValueError):
        print("\nsmupar: interrupted", file=sys.stderr, flush=True)
    os._exit(130)
