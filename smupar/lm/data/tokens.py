"""The tokens of a prepared text, as one sequence over all shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from smupar.lm.data.shards import check_sizes, read_index
from smupar.refusals import refuse


class Tokens:
    """Several arrays, memory-mapped or not, as one read-only sequence. Data is read only when it is needed."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        # Plain ndarray views, because every slice of a np.memmap costs microseconds of Python.
        self._arrays = [np.asarray(array).view(np.ndarray) for array in arrays if len(array)]
        self._starts = np.cumsum([0, *(len(array) for array in self._arrays)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def slice(self, start: int, stop: int) -> Tokens:
        """A view of the tokens from ``start`` up to, but not including, ``stop``."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"slice [{start}, {stop}) is outside the {len(self)} tokens")
        pairs = zip(self._arrays, self._starts.tolist(), strict=False)
        return Tokens([array[max(0, start - first) : max(0, stop - first)] for array, first in pairs])

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """``length`` tokens from each start, as int64 of shape (len(starts), length)."""
        starts = np.asarray(starts)
        refuse(length < 1, f"windows have at least one token, got length {length}")
        refuse(
            starts.ndim != 1 or starts.dtype.kind not in "iu",
            f"starts must be a vector of whole numbers, got {starts.dtype} of shape {starts.shape}",
        )
        windows = np.empty((len(starts), length), dtype=np.int64)
        if not len(starts):
            return windows
        if starts.min() < 0 or starts.max() + length > len(self):
            raise IndexError(
                f"windows of {length} from {starts.min()} to {starts.max()} leave the {len(self)} tokens: "
                f"the last start is {len(self) - length}"
            )
        shards = np.searchsorted(self._starts, starts, side="right") - 1
        offsets = starts - self._starts[shards]
        for window, shard, offset in zip(windows, shards.tolist(), offsets.tolist(), strict=True):
            filled = 0
            while filled < length:  # a window may continue in the next shards
                part = self._arrays[shard][offset : offset + length - filled]
                window[filled : filled + len(part)] = part
                filled += len(part)
                shard, offset = shard + 1, 0
        return windows


def open_tokens(folder: str | Path) -> Tokens:
    """Maps the shards into memory. It checks sizes; ``shard_hashes.verify`` checks hashes."""
    index = read_index(folder)
    check_sizes(folder, index)
    return Tokens([np.memmap(Path(folder) / shard.file, dtype=index.dtype, mode="r") for shard in index.shards])
