"""Text as bytes. The embedded default is the source of the running Python's standard library: real text on every machine,
no download. It differs between Python versions, so losses on it are not comparable across them."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Share of the text, at its end, that is never trained on.
_VALID_SHARE = 0.05
_NOT_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def standard_library() -> Tensor:
    """All ``.py`` files of the standard library, in order of their paths, as one uint8 tensor (about 12 MB)."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not _NOT_TEXT.intersection(path.relative_to(root).parts))
    text = b"".join(path.read_bytes() for path in files)
    if not text:
        raise FileNotFoundError(f"no Python source found under {root}: this Python ships without its library's source")
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def split(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Training and validation text."""
    cut = int(len(tokens) * (1 - _VALID_SHARE))
    return tokens[:cut], tokens[cut:]


def batch(tokens: Tensor, *, seed: int, step: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step: a pure function of (seed, step)."""
    if len(tokens) <= seq_len:
        raise ValueError(f"the text has {len(tokens)} tokens, fewer than one sequence of {seq_len} and its target")
    digest = hashlib.sha256(f"{seed}/batch/{step}".encode()).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    starts = torch.randint(len(tokens) - seq_len, (batch_size,), generator=rng)
    window = tokens[starts[:, None] + torch.arange(seq_len + 1)].long()
    return window[:, :-1], window[:, 1:]
