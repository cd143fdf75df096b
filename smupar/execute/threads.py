"""Sets how many CPU threads torch uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def cpu_threads(num: int) -> Iterator[None]:
    """A context in which torch uses this many threads; 0 changes nothing."""
    before = torch.get_num_threads()
    if num:
        torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
