"""Small texts to train on, written once for each test process and shared with those that it starts."""

import functools
import os
import tempfile
from pathlib import Path

import numpy as np

from smupar.lm.data.shard_writer import write_tokens
from smupar.lm.data.shards import TokenizerInfo


@functools.cache
def _folder():
    if "SMUPAR_TEST_TEXTS" in os.environ:
        return Path(os.environ["SMUPAR_TEST_TEXTS"]), None
    made = tempfile.TemporaryDirectory(prefix="smupar-tests-")  # goes away with the process
    os.environ["SMUPAR_TEST_TEXTS"] = made.name
    return Path(made.name), made


@functools.cache
def words():
    """Folder of 20,000 words of a tiny language, so that there is something to learn. Python's library takes longer to read."""
    folder = _folder()[0] / "words"
    if not folder.exists():
        rng = np.random.default_rng(0)
        spelled = [rng.integers(97, 123, size=rng.integers(2, 7), dtype=np.uint8) for _ in range(50)]
        spaced = [np.append(spelled[i], np.uint8(32)) for i in rng.integers(50, size=20_000)]
        write_tokens(folder, np.concatenate(spaced), TokenizerInfo("bytes", 256, 0, "b"))
    return str(folder)


def bpe(texts, *, vocab_size=300, special=("<|endoftext|>",)):
    """A tokenizer of the library of that name: byte-level, as GPT-2's, trained on these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    settings = {"special_tokens": list(special), "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    library.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **settings))
    return library
