"""Shards on disk: the writer, the index, verification, and windows over several arrays."""

import hashlib
import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smupar.lm.data import shard_hashes
from smupar.lm.data.shard_hashes import verify
from smupar.lm.data.shard_writer import ShardWriter
from smupar.lm.data.shards import ShardIndex, TokenizerInfo, read_index, token_dtype
from smupar.lm.data.tokens import Tokens, open_tokens
from smupar.output.files import write_atomic
from smupar.output.json_files import read_object, sealed_json

INFO = TokenizerInfo("tiny", 1000, 7, "0" * 64)


def _made(folder, *, info=INFO, shard_tokens=10, lengths=(4, 8, 3, 9)):
    """Counting tokens in documents of these lengths: 0, 1, 2, ... up to 23."""
    folder.mkdir()
    writer = ShardWriter(folder, vocab_size=info.vocab_size, shard_tokens=shard_tokens)
    first = 0
    for length in lengths:
        writer.append(np.arange(first, first + length), ends_document=True)
        first += length
    writer.close()
    index = ShardIndex(info, writer.largest_token, tuple(writer.shards), {"sources": []})
    write_atomic(folder / "index.json", index.to_json())
    return index


def _message(call, *args):
    with pytest.raises(ValueError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_writer_closes_a_shard_at_the_first_end_at_or_beyond_its_size(tmp_path):
    index = _made(tmp_path / "out")
    assert [shard.num_tokens for shard in index.shards] == [12, 12]
    assert [shard.num_documents for shard in index.shards] == [2, 2]
    assert (index.num_tokens, index.num_documents, index.largest_token) == (24, 4, 23)
    content = (tmp_path / "out" / "tokens-00001.bin").read_bytes()
    assert content == np.arange(12, 24, dtype="<u2").tobytes()
    assert index.shards[1].sha256 == hashlib.sha256(content).hexdigest()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["index.json", "tokens-00000.bin", "tokens-00001.bin"]


def test_index_reads_back_as_written(tmp_path):
    index = _made(tmp_path / "out")
    assert read_index(tmp_path / "out") == index
    values = json.loads((tmp_path / "out" / "index.json").read_text())
    assert (values["format"], values["dtype"], values["num_tokens"]) == ("smupar-tokens/1", "u2", 24)
    assert values["tokenizer"] == {"name": "tiny", "vocab_size": 1000, "eot": 7, "sha256": "0" * 64}
    assert set(values["shards"][0]) == {"file", "num_tokens", "num_documents", "sha256"}


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_dtype_is_the_smallest_that_holds_the_vocabulary(tmp_path, vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)
    _made(tmp_path / "out", info=TokenizerInfo("tiny", vocab_size, None, ""))
    assert open_tokens(tmp_path / "out").windows(np.array([0]), 24).tolist() == [list(range(24))]


def test_token_outside_the_vocabulary_is_refused(tmp_path):
    writer = ShardWriter(tmp_path, vocab_size=256, shard_tokens=10)
    with pytest.raises(ValueError, match="token 300, outside its vocabulary of 256"):
        writer.append(np.array([1, 300]), ends_document=True)


def test_abandoned_shard_leaves_no_file(tmp_path):
    writer = ShardWriter(tmp_path, vocab_size=256, shard_tokens=10)
    writer.append(np.arange(5), ends_document=True)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens-00000.bin.tmp"]
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
    assert writer.num_tokens == 0


def test_unusable_folders_raise_with_a_remedy(tmp_path):
    assert "no folder" in _message(read_index, tmp_path / "none")
    assert "smupar data prepare FILE --out" in _message(read_index, tmp_path)
    (tmp_path / "progress.json").write_text("{}")
    assert "was interrupted: run the same prepare command again" in _message(read_index, tmp_path)
    for damaged in ("{", "[]", '{"format": "smupar-tokens/1"}', ""):
        (tmp_path / "index.json").write_text(damaged)
        assert "index.json is damaged" in _message(read_index, tmp_path)
    (tmp_path / "index.json").write_text('{"format": "smupar-tokens/9"}')
    assert "'smupar-tokens/9' and this version reads 'smupar-tokens/1'" in _message(read_index, tmp_path)


def test_index_that_does_not_add_up_is_damaged(tmp_path):
    _made(tmp_path / "out")
    path = tmp_path / "out" / "index.json"
    sealed = read_object(path, remedy="")
    for wrong in ({"num_tokens": 25}, {"dtype": "u1"}, {"largest_token": -1}, {"largest_token": 10**9}):
        path.write_text(json.dumps({**sealed, **wrong}))  # without a seal, as older versions wrote it
        assert "do not fit" in _message(read_index, tmp_path / "out")
    path.write_text(sealed_json(sealed).replace('"num_tokens": 24', '"num_tokens": 25'))
    assert "does not match its checksum" in _message(read_index, tmp_path / "out")


def test_index_whose_largest_token_is_too_small_is_found_by_reading(tmp_path):
    """The model would be asked for a token beyond its vocabulary."""
    _made(tmp_path / "out")
    verify(tmp_path / "out")  # remembers that the shards are intact
    path = tmp_path / "out" / "index.json"
    values = read_object(path, remedy="")
    path.write_text(json.dumps({**values, "largest_token": 3}))
    assert "index.json is damaged (largest_token is 3, tokens-00000.bin has" in _message(verify, tmp_path / "out")


def test_missing_and_truncated_shards_are_named(tmp_path):
    _made(tmp_path / "out")
    shard = tmp_path / "out" / "tokens-00001.bin"
    os.truncate(shard, 20)
    for call in (verify, open_tokens):
        assert "tokens-00001.bin is truncated: 24 bytes expected, 20 found" in _message(call, tmp_path / "out")
    shard.unlink()
    assert "tokens-00001.bin is missing: 24 bytes expected, 0 found" in _message(verify, tmp_path / "out")


def test_changed_shard_is_found_also_behind_a_remembered_hash(tmp_path):
    _made(tmp_path / "out")
    assert verify(tmp_path / "out").num_tokens == 24
    shard = tmp_path / "out" / "tokens-00000.bin"
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content)
    assert "tokens-00000.bin has changed since it was prepared" in _message(verify, tmp_path / "out")


@pytest.mark.parametrize("small", [0, 1 << 30])
def test_shard_that_is_changed_and_gets_its_old_time_is_noticed(tmp_path, monkeypatch, small):
    """A small text is read; a large one has another time of change in the file system."""
    monkeypatch.setattr(shard_hashes, "_SMALL", small)
    _made(tmp_path / "out")
    verify(tmp_path / "out")
    assert (tmp_path / "out" / "verified.json").exists() == (small == 0)
    shard = tmp_path / "out" / "tokens-00000.bin"
    stat = shard.stat()
    shard.write_bytes(bytes(stat.st_size))
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert "has changed" in _message(verify, tmp_path / "out")


@pytest.mark.parametrize("small", [0, 1 << 30])
def test_shard_is_hashed_once_by_a_process(tmp_path, monkeypatch, small):
    """That of a large text once by all processes."""
    monkeypatch.setattr(shard_hashes, "_SMALL", small)
    _made(tmp_path / "out")
    verify(tmp_path / "out")
    hashed = []
    monkeypatch.setattr(shard_hashes, "_hash_and_largest", lambda *each: hashed.append(each))
    verify(tmp_path / "out")
    assert hashed == []


@pytest.mark.parametrize("content", ["{", "[1]", '{"tokens-00000.bin": 3}', "\x00"])
def test_damaged_memory_of_hashes_is_ignored(tmp_path, monkeypatch, content):
    monkeypatch.setattr(shard_hashes, "_SMALL", 0)
    _made(tmp_path / "out")
    (tmp_path / "out" / "verified.json").write_text(content)
    assert verify(tmp_path / "out").num_tokens == 24
    assert set(json.loads((tmp_path / "out" / "verified.json").read_text())) == {
        "tokens-00000.bin",
        "tokens-00001.bin",
        "index.json",
    }


def test_folder_that_cannot_remember_is_hashed_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_hashes, "_SMALL", 0)
    _made(tmp_path / "out")
    (tmp_path / "out" / "verified.json").mkdir()  # refuses to be replaced, also for root
    assert verify(tmp_path / "out").num_tokens == 24
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_windows_cross_the_borders_of_shards(tmp_path):
    _made(tmp_path / "out", shard_tokens=1)  # a shard per document: 4, 8, 3 and 9 tokens
    tokens = open_tokens(tmp_path / "out")
    assert len(tokens) == 24
    windows = tokens.windows(np.array([0, 3, 2, 12, 11, 17]), 7)
    assert windows.dtype == np.int64
    assert windows.tolist() == [list(range(start, start + 7)) for start in (0, 3, 2, 12, 11, 17)]
    assert tokens.windows(np.array([0]), 24).tolist() == [list(range(24))]
    assert tokens.windows(np.array([], dtype=np.int64), 5).shape == (0, 5)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    cut=st.tuples(st.integers(0, 36), st.integers(0, 36)),
    length=st.integers(1, 12),
    data=st.data(),
)
def test_windows_of_a_slice_equal_those_of_one_array(lengths, cut, length, data):
    whole = np.arange(sum(lengths), dtype=np.uint16)
    tokens = Tokens(np.split(whole, np.cumsum(lengths)[:-1]))
    start, stop = sorted(min(edge, len(whole)) for edge in cut)
    part, expected = tokens.slice(start, stop), whole[start:stop]
    assert len(part) == len(expected)
    if len(expected) >= length:
        starts = data.draw(st.lists(st.integers(0, len(expected) - length), max_size=4))
        windows = part.windows(np.array(starts, dtype=np.int64), length)
        assert windows.tolist() == [expected[at : at + length].tolist() for at in starts]


def test_slice_is_a_view():
    array = np.arange(10, dtype=np.uint8)
    part = Tokens([array]).slice(2, 8).slice(1, 5)
    array[3] = 99
    assert part.windows(np.array([0]), 4).tolist() == [[99, 4, 5, 6]]


def test_windows_out_of_range_raise():
    tokens = Tokens([np.arange(5), np.arange(5)])
    for starts, length in (([8], 3), ([-1], 2), ([0], 11)):
        with pytest.raises(IndexError, match="10 tokens"):
            tokens.windows(np.array(starts), length)
    with pytest.raises(ValueError, match="at least one token"):
        tokens.windows(np.array([0]), 0)
    with pytest.raises(ValueError, match="whole numbers"):
        tokens.windows(np.array([0.5]), 1)
    for start, stop in ((-1, 3), (4, 3), (0, 11)):
        with pytest.raises(IndexError, match="outside the 10 tokens"):
            tokens.slice(start, stop)
