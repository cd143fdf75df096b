"""Text to token ids and back: plain bytes, or anything the ``tokenizers`` library reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from smupar.lm.data.shards import TokenizerInfo, token_dtype
from smupar.output.files import read_plain, write_atomic
from smupar.output.json_files import read_object
from smupar.output.optional import first_line, optional
from smupar.refusals import refuse

TOKENIZER_FILE = "tokenizer.json"

# Names of the end-of-document token in common vocabularies. The first one that a vocabulary has is used.
_END_OF_TEXT = ("<|endoftext|>", "</s>", "<eos>", "[EOS]")
_KINDS = "bytes, gpt2, a tokenizers JSON file, or a folder with GPT-2 style vocabulary and merges"


class Tokenizer:
    """A tokenizer of bytes, or the one in ``definition``, which is JSON of the ``tokenizers`` library."""

    def __init__(self, name: str, definition: str | None = None):
        self.name = name
        self._definition = definition
        self._library: Any = None
        if definition is None:
            self.vocab_size = 256
            self.eot: int | None = 0  # NUL, which never occurs in text
        else:
            self._library = _from_json(name, definition)
            vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
            # The largest id counts, not the number of tokens, because a vocabulary may have gaps.
            self.vocab_size = max(vocabulary.values(), default=-1) + 1
            self.eot = next((vocabulary[token] for token in _END_OF_TEXT if token in vocabulary), None)
            refuse(not self.vocab_size, f"the tokenizer {name} has no vocabulary: get its file again")
        self.sha256 = hashlib.sha256((definition or "bytes").encode()).hexdigest()

    @property
    def info(self) -> TokenizerInfo:
        return TokenizerInfo(self.name, self.vocab_size, self.eot, self.sha256)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One array of ids per text, in the smallest type that fits, without special tokens at either end."""
        if self._library is None:
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        # Convert through int64 and check, because an id that is too large for the type would wrap around silently.
        encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        arrays = [np.array(text.ids, dtype=np.int64) for text in encoded]
        return [ids.astype(token_dtype(self.vocab_size)) if ids.max(initial=0) < self.vocab_size else ids for ids in arrays]

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        numbers = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        outside = numbers[(numbers < 0) | (numbers >= self.vocab_size)]
        if len(outside):
            raise ValueError(f"token {outside[0]} is outside the vocabulary of {self.name}, which has {self.vocab_size}")
        if self._library is None:
            return numbers.astype(np.uint8).tobytes().decode(errors="replace")
        return self._library.decode(numbers.tolist(), skip_special_tokens=False)

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, unless the tokenizer is bytes."""
        if self._definition is not None:
            write_atomic(Path(folder) / TOKENIZER_FILE, self._definition)


def load_tokenizer(spec: str) -> Tokenizer:
    """``bytes``, ``gpt2``, a ``tokenizers`` JSON file, or a folder that holds one or a GPT-2 style vocabulary and merges."""
    if spec == "bytes":
        return Tokenizer("bytes")
    if spec == "gpt2":
        return _gpt2_from_hub()
    path = Path(spec)
    if path.is_dir():
        # A tokenizer.json is a complete definition. Vocabulary and merges do not say how text is split into words.
        return _from_file(path / TOKENIZER_FILE) if (path / TOKENIZER_FILE).is_file() else _from_vocabulary(path)
    if path.is_file():
        return _from_file(path)
    raise ValueError(f"unknown tokenizer {spec!r}, and no such file or folder: pass {_KINDS}")


def read_tokenizer(folder: Path, name: str, *, sha256: str | None = None) -> Tokenizer:
    """The tokenizer of a run, an export or a prepared folder. The folder holds tokenizer.json, unless tokens are bytes. Raises
    if that file does not have the given hash."""
    path = folder / TOKENIZER_FILE
    refuse(not path.is_file() and name != "bytes", f"{path} is missing: copy the JSON of the tokenizer {name} there")
    return Tokenizer(name, read_definition(folder, sha256=sha256))


def read_definition(folder: Path, *, sha256: str | None) -> str | None:
    """The content of the folder's tokenizer.json; None if it has none. Raises if it does not have the given hash."""
    path = folder / TOKENIZER_FILE
    if not path.exists():
        return None
    definition = _read(path)
    found = hashlib.sha256(definition.encode()).hexdigest()
    refuse(
        sha256 not in (None, found),
        f"{path} is not the tokenizer that made the tokens (sha256 {found[:12]}..., expected {str(sha256)[:12]}...): "
        "restore it from a copy, or prepare the text again",
    )
    return definition


def _from_json(name: str, definition: str) -> Any:
    library = optional("tokenizers", f"the tokenizer {name}")
    try:
        tokenizer = library.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{name} is not a tokenizers JSON ({first_line(error)}): pass {_KINDS}") from error
    # Files made for inference may turn on truncation and padding, which would change documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # "<|endoftext|>" inside a text is encoded as plain text: only smupar adds the token that ends a document.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _from_file(path: Path) -> Tokenizer:
    definition = _read(path)
    try:
        return Tokenizer(path.resolve().parent.name if path.name == TOKENIZER_FILE else path.stem, definition)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _gpt2_from_hub() -> Tokenizer:
    library = optional("tokenizers", "the tokenizer gpt2")
    try:
        model = json.loads(library.Tokenizer.from_pretrained("gpt2").to_str())["model"]
    except Exception as error:  # a missing network, a proxy or a hub that is down may raise any type
        raise ValueError(
            f"cannot download the tokenizer gpt2 ({first_line(error)}): "
            "pass a folder with its encoder.json and vocab.bpe (or vocab.json and merges.txt) instead"
        ) from error
    return Tokenizer("gpt2", _byte_level_bpe(model["vocab"], [tuple(pair) for pair in model["merges"]]))


def _from_vocabulary(folder: Path) -> Tokenizer:
    vocabulary = _only(folder, "encoder.json", "vocab.json")
    merges = _only(folder, "vocab.bpe", "merges.txt")
    values = read_object(vocabulary, remedy="get it again")
    try:
        ids = {token: int(number) for token, number in values.items()}
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{vocabulary} is not a vocabulary, an object of token and id ({error}): get it again") from error
    lines = [line.rstrip("\r") for line in _read(merges).split("\n")]
    pairs = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    for number, pair in enumerate(pairs, 1):
        refuse(
            len(pair) != 2 or pair[0] not in ids or pair[1] not in ids or "".join(pair) not in ids,
            f"merge {number} of {merges} ({' '.join(pair)!r}) does not fit the vocabulary {vocabulary}",
        )
    name = vocabulary.name.removesuffix("encoder.json").removesuffix("vocab.json").rstrip("-_.") or folder.resolve().name
    return Tokenizer(name, _byte_level_bpe(ids, pairs))


def _only(folder: Path, *endings: str) -> Path:
    files = [path for path in sorted(folder.iterdir()) if path.name.endswith(endings) and not path.name.startswith(".")]
    if len(files) != 1:
        what = "several: " + ", ".join(path.name for path in files) if files else "none"
        raise ValueError(
            f"a tokenizer's folder has one file whose name ends in {' or '.join(endings)}, {folder} has {what}: pass {_KINDS}"
        )
    return files[0]


def _byte_level_bpe(vocabulary: dict[str, int], merges: list[tuple[str, ...]]) -> str:
    """The JSON of a tokenizer that splits text as GPT-2 does. It is written here, not by the library, so that its hash does not
    change with the library's version."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    end = _END_OF_TEXT[0]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": vocabulary[end], "content": end, **special}] if end in vocabulary else [],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])), "merges": merges},
        },
        ensure_ascii=False,
    )


def _read(path: Path) -> str:
    try:
        # Read bytes and decode them, because reading as text would convert newlines and so change the hash.
        return read_plain(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}): pass {_KINDS}") from error
