"""The random text that benchmarks train on."""

from __future__ import annotations

import numpy as np

from smupar.lm.config.run_config import RunConfig
from smupar.lm.data.batches import Corpus, CorpusInfo
from smupar.lm.data.tokens import Tokens


def random_text(config: RunConfig) -> Corpus:
    """Random tokens for a few steps of the run."""
    drawn = np.random.default_rng(0).integers(config.model.vocab_size, size=4 * config.batch_size * config.seq_len)
    part = Tokens([drawn.astype(np.uint32)])
    return Corpus(part, part, CorpusInfo("random", len(part), "", 0, {}), None)
