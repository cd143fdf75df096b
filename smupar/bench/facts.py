"""Facts about the machine for benchmarks, and the random text that they train on."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import torch

from smupar.lm.config.run import RunConfig
from smupar.lm.data import batches as data
from smupar.lm.data.shards import Tokens


def hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {_processor()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def random_text(config: RunConfig) -> data.Corpus:
    """Random tokens for a few steps of the run."""
    drawn = np.random.default_rng(0).integers(config.model.vocab_size, size=4 * config.batch_size * config.seq_len)
    part = Tokens([drawn.astype(np.uint32)])
    return data.Corpus(part, part, data.CorpusFacts("random", len(part), "", 0, {}), None)
