"""Preparing text: what becomes a document, going on after a kill, and every kind of bad input."""

import dataclasses
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from smupar.lm.config.commands import PrepareConfig
from smupar.lm.data import sources
from smupar.lm.data.prepare import prepare
from smupar.lm.data.shard_hashes import verify
from smupar.lm.data.shards import read_index
from smupar.lm.data.sources import cut_at
from smupar.lm.data.tokenizer import load_tokenizer, read_tokenizer
from smupar.lm.data.tokens import open_tokens
from smupar.output.json_files import SEAL
from tests.support.texts import bpe


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _text(out="out"):
    """All that was prepared; with bytes, NUL ends a document."""
    tokens = open_tokens(out)
    return read_tokenizer(Path(out), read_index(out).tokenizer.name).decode(tokens.windows(np.array([0]), len(tokens))[0])


def _config(*names, out="out", **options):
    return PrepareConfig(names, out, **options)


def _message(config, kind=ValueError):
    with pytest.raises(kind) as caught:
        prepare(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _write(name, content):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


def _lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def _files(out="out"):
    """What a preparation is: everything but the memory of hashes."""
    return {path.name: path.read_bytes() for path in Path(out).iterdir() if path.name != "verified.json"}


def _bpe(name="tiny.json"):
    library = bpe(["def line of code(self):\n\n        return self.code\n"] * 9, vocab_size=400)
    Path(name).write_text(library.to_str(), encoding="utf-8")
    return name


# What becomes a document.


def test_file_becomes_a_document_with_an_end():
    _write("a.txt", "Grüße\r\naus Köln\n")
    index = prepare(_config("a.txt"))
    assert _text() == "Grüße\r\naus Köln\n\0"
    assert (index.num_tokens, index.num_documents, index.largest_token) == (20, 1, 0xC3)
    assert verify("out") == index == read_index("out")
    assert sorted(_files()) == ["index.json", "tokens-00000.bin"]


def test_folder_is_walked_in_order_without_hidden_and_empty_files():
    for name in ("d/b.md", "d/a/z.txt", "d/.git/config", "d/.hidden", "d/c.py"):
        _write(name, name + " ")
    _write("d/empty.txt", "")
    _write("d/a/packed.txt.gz", gzip.compress(b"packed ", mtime=0))
    assert prepare(_config("d")).num_documents == 4
    assert _text() == "packed \0d/a/z.txt \0d/b.md \0d/c.py \0"


def test_folder_that_holds_the_output_does_not_read_it():
    _write("d/a.txt", "text")
    prepare(_config("d", out="d/out"))
    assert prepare(_config("d", out="d/out")).num_tokens == 5


def test_links_that_lead_in_circles_are_followed_once():
    _write("d/a.txt", "a")
    _write("other/b.txt", "b")
    Path("d/circle").symlink_to(Path("d").resolve())
    Path("d/other").symlink_to(Path("other").resolve())
    prepare(_config("d"))
    assert _text() == "a\0b\0"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"])
def test_line_of_json_becomes_a_document(name):
    content = _lines({"text": "one\ntwo"}, {"text": None}, {"text": ""}, {"text": "drei ü", "id": 3}).encode() + b"\n"
    _write(name, gzip.compress(content) if name.endswith(".gz") else b"\xef\xbb\xbf" + content)
    assert prepare(_config(name)).num_documents == 2
    assert _text() == "one\ntwo\0drei ü\0"


def test_row_of_parquet_becomes_a_document():
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [f"row {i}" if i % 5 else None for i in range(40)]
    parquet.write_table(pyarrow.table({"body": rows, "n": list(range(40))}), "a.parquet", row_group_size=7)
    assert prepare(_config("a.parquet", field="body")).num_documents == 32
    assert _text() == "".join(row + "\0" for row in rows if row)
    (unit,) = sources.find_units("a.parquet", out=Path("out"))
    *read, last = unit.read(_config("a.parquet", field="body"), skip=17)
    assert [piece.text for piece in read] == [row or "" for row in rows[17:]]
    assert last.read.sha256 == hashlib.sha256(Path("a.parquet").read_bytes()).hexdigest()


def test_rows_of_a_dataset_are_streamed(monkeypatch):
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", Path("cache").resolve())
    _write("d/train.jsonl", _lines(*({"text": f"row {i}", "n": i} for i in range(9)), {"text": None, "n": 9}))
    assert prepare(_config("hf:d", shard_tokens=20)).num_documents == 9
    assert _text() == "".join(f"row {i}\0" for i in range(9))
    rows = [piece.text for piece in sources.SourceUnit("d").read(_config("hf:d"), skip=7)]
    assert rows == ["row 7", "row 8", ""]
    assert "row 1: no field 'body', it has 'text', 'n'" in _message(_config("hf:d", field="body", out="other"))
    assert "Bad split: test" in _message(_config("hf:d", split="test", out="other"))
    assert not Path("other").exists()


def test_dataset_that_breaks_off_goes_on_with_the_same_command(monkeypatch):
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", Path("cache").resolve())
    monkeypatch.setattr("smupar.lm.data.prepare.BATCH_PIECES", 1)
    _write("d/train-0.jsonl", _lines(*({"text": f"row {i}"} for i in range(9))))
    _write("d/train-1.jsonl", "{")
    message = _message(_config("hf:d", shard_tokens=20))
    assert "the dataset d broke off after row 9" in message
    assert "run the same command again" in message
    assert sorted(_files()) == ["progress.json", "tokens-00000.bin", "tokens-00001.bin"]
    _write("d/train-1.jsonl", _lines({"text": "row 9"}))
    prepare(_config("hf:d", shard_tokens=20))
    assert _text() == "".join(f"row {i}\0" for i in range(10))


def test_several_sources_follow_each_other_with_a_bpe():
    _write("a.txt", "code of self")
    _write("b.jsonl", _lines({"text": "<|endoftext|>"}, {"text": "def"}))
    index = prepare(_config("a.txt", "b.jsonl", tokenizer=_bpe()))
    assert _text() == "code of self<|endoftext|><|endoftext|><|endoftext|>def<|endoftext|>"
    ids = open_tokens("out").windows(np.array([0]), index.num_tokens)[0]
    assert (ids == 0).sum() == index.num_documents == 3  # the one written out is text
    assert index.dtype.itemsize == 2


def test_other_encodings_are_decoded():
    for encoding in ("latin-1", "utf-16", "utf-8"):
        _write(f"{encoding}.txt", "größer".encode(encoding))
        prepare(_config(f"{encoding}.txt", out=encoding, encoding=encoding))
        assert _text(encoding) == "größer\0"
    _write("bom.txt", b"\xef\xbb\xbfa")
    prepare(_config("bom.txt"))
    assert _text() == "a\0"


def test_errors_can_be_replaced_or_ignored():
    _write("a.txt", b"a\xffb")
    for errors, text in (("replace", "a\ufffdb\0"), ("ignore", "ab\0")):
        prepare(_config("a.txt", out=errors, errors=errors))
        assert _text(errors) == text
    _write("half.jsonl", '{"text": "a\\ud800b"}\n')
    assert "line 1: half a surrogate pair at character 1" in _message(_config("half.jsonl"))
    prepare(_config("half.jsonl", errors="replace"))
    assert _text() == "a?b\0"


# Pieces of long files.


def test_long_file_gives_the_tokens_it_gives_in_one_piece():
    lines = ["def line of code(self):", "", "        return self.code", "é" * 50, "\t"]
    text = "\n".join(random.Random(0).choices(lines, k=50_000))
    _write("a.txt", text)
    (unit,) = sources.find_units("a.txt", out=Path("out"))
    *pieces, end = unit.read(_config("a.txt"))
    assert [piece.ends_document for piece in pieces] == [False, False, False, True]
    for skip in range(5):
        assert list(unit.read(_config("a.txt"), skip=skip)) == [*pieces[skip:], end]
    prepare(_config("a.txt", tokenizer=_bpe(), shard_tokens=75_000))
    ids = load_tokenizer("tiny.json").encode(text)
    tokens = open_tokens("out")
    assert tokens.windows(np.array([0]), len(tokens))[0].tolist() == [*ids.tolist(), 0]
    assert [shard.num_documents for shard in read_index("out").shards] == [0, 0, 0, 1]


def test_pieces_end_after_a_line_or_between_words_if_there_is_one():
    assert cut_at("aaaa\nbbbb\ncc\n\n  dd") == len("aaaa\nbbbb\n")
    assert cut_at("aaaa bbbb\n\n\n") == len("aaaa bbbb\n\n")
    assert cut_at("aaaa bbbb cccc") == len("aaaa bbbb")
    assert cut_at("aaaabbbb") == 7
    assert cut_at("aaaa\n") == 4  # never at the very end: a document's last piece has text


def test_bad_byte_far_into_a_file_is_named_by_its_offset():
    text = "é" * 1_500_000  # characters of two bytes, cut in the middle by odd reads
    _write("a.txt", b"x" + text.encode() + b"\xff" + b"y" * 10)
    message = _message(_config("a.txt"))
    assert "a.txt is not text in utf-8 (invalid start byte at byte 3000001)" in message
    assert "--encoding latin-1 or --errors replace" in message


# Sizes.


@pytest.mark.parametrize(("max_tokens", "documents"), [(1, 0), (10, 1), (11, 1), (12, 2), (18, 3), (1000, 3)])
def test_max_tokens_cuts_exactly(max_tokens, documents):
    _write("a.jsonl", _lines({"text": "abcd"}, {"text": "efghij"}, {"text": "klmno"}))
    whole = "abcd\0efghij\0klmno\0"
    index = prepare(_config("a.jsonl", max_tokens=max_tokens, shard_tokens=4))
    assert _text() == whole[:max_tokens]
    assert index.num_tokens == min(max_tokens, 18)
    assert index.num_documents == whole[:max_tokens].count("\0") == documents


def test_shards_end_with_documents():
    _write("a.jsonl", _lines(*({"text": "x" * length} for length in (3, 3, 9, 1, 1, 1, 1))))
    assert [shard.num_tokens for shard in prepare(_config("a.jsonl", shard_tokens=8)).shards] == [8, 10, 8]


def test_numbers_below_one_raise():
    for name in ("shard_tokens", "max_tokens"):
        with pytest.raises(ValueError, match=f"{name} must be a positive whole number"):
            _config("a.txt", **{name: 0})


# Going on.

# Prepares in a process of its own, which kills itself before or after a certain rename: they are the only moments at which
# anything changes for a later process. Batches are small here, so that they end at other places than in this process.
_SCRIPT = """
import json, os, resource, signal, sys
import smupar.lm.data.prepare as module
from smupar.lm.config.commands import PrepareConfig
module.BATCH_PIECES = 7
left, before, largest_file, options = json.loads(sys.argv[1])
rename = os.replace
def replace(*args):
    global left
    left -= 1
    if left == 0 and before: os.kill(os.getpid(), signal.SIGKILL)
    rename(*args)
    if left == 0: os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace
if largest_file:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
print("begin", flush=True)
try: module.prepare(PrepareConfig(**options))
except ValueError as error: sys.exit(str(error))
"""


def _start(config, *, kill_at=0, before=False, largest_file=0):
    argument = json.dumps([kill_at, before, largest_file, dataclasses.asdict(config)])
    return subprocess.Popen([sys.executable, "-c", _SCRIPT, argument], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _many_documents():
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta\n"]
    _write("d/a.jsonl", _lines(*({"text": " ".join(rng.choices(words, k=rng.randrange(60)))} for _ in range(120))))
    _write("d/b.txt", " ".join(rng.choices(words, k=900)))
    _write("d/c.jsonl.gz", gzip.compress(_lines(*({"text": "x" * rng.randrange(999)} for _ in range(30))).encode()))
    config = _config("d", shard_tokens=2000)
    assert len(prepare(dataclasses.replace(config, out="reference")).shards) >= 10
    return config


def test_preparation_killed_at_every_commit_gives_the_same_bytes():
    # Renames: progress, then shard and progress for each shard, then the index. Every process goes on from what the last
    # one left, and is killed at its second, third or fourth.
    config = _many_documents()
    kills = 0
    for step in range(1, 100):
        process = _start(config, kill_at=2 + step % 3, before=step % 2 == 0)
        process.communicate(timeout=30)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    assert kills >= 8
    assert _files() == _files("reference")


def test_preparation_killed_at_random_moments_gives_the_same_bytes():
    config = dataclasses.replace(_many_documents(), shard_tokens=300)
    began = time.perf_counter()
    prepare(dataclasses.replace(config, out="small"))
    seconds = time.perf_counter() - began
    rng = random.Random(1)
    kills = 0
    while kills < 10:
        process = _start(config)
        process.stdout.readline()  # it is about to begin
        time.sleep(rng.random() * seconds / 2)
        process.kill()
        process.communicate(timeout=30)
        kills += process.returncode == -signal.SIGKILL
        if Path("out/index.json").exists():
            assert {**_files(), "progress.json": b""} == {**_files("small"), "progress.json": b""}
            shutil.rmtree("out")
    prepare(config)
    assert _files() == _files("small")


def test_finished_preparation_returns_at_once(capsys):
    _write("a.txt", "text")
    index = prepare(_config("a.txt"))
    before = {path.name: path.stat().st_mtime_ns for path in Path("out").iterdir()}
    assert prepare(_config("a.txt")) == index
    assert {path.name: path.stat().st_mtime_ns for path in Path("out").iterdir()} == before
    said = capsys.readouterr().err
    assert "out is prepared already: nothing to do" in said
    assert "written after" not in said


def test_damage_to_a_finished_preparation_is_named():
    _write("a.txt", "some text")
    prepare(_config("a.txt"))
    shard = Path("out/tokens-00000.bin")
    shard.write_bytes(shard.read_bytes().swapcase())
    with pytest.raises(ValueError, match=r"tokens-00000\.bin has changed since it was prepared"):
        prepare(_config("a.txt"))


def test_source_of_the_same_size_that_was_written_later_is_named(capsys):
    _write("a.txt", "text")
    prepare(_config("a.txt"))
    _write("a.txt", "tixt")
    later = Path("out/index.json").stat().st_mtime + 10
    os.utime("a.txt", (later, later))
    prepare(_config("a.txt"))
    assert "a.txt was written after out was made: if the text changed, delete out" in capsys.readouterr().err


def _interrupted():
    """A preparation of a.jsonl that was killed when two shards were finished."""
    _write("a.jsonl", _lines(*({"text": f"document {i}"} for i in range(9))))
    config = _config("a.jsonl", shard_tokens=20)
    process = _start(config, kill_at=5)
    process.communicate(timeout=30)
    assert sorted(_files()) == ["progress.json", "tokens-00000.bin", "tokens-00001.bin"]
    return config


def test_interrupted_preparation_says_so_and_goes_on():
    _interrupted()
    with pytest.raises(ValueError, match="was interrupted: run the same prepare command again"):
        read_index("out")
    Path("out/tokens-00002.bin").write_bytes(b"of an unfinished shard")
    Path("out/tokens-00002.bin.tmp").write_bytes(b"also")
    prepare(_config("a.jsonl", shard_tokens=20))
    assert _text() == "".join(f"document {i}\0" for i in range(9))
    assert not list(Path("out").glob("*.tmp"))


def test_shard_that_is_damaged_between_kill_and_resume_is_named():
    config = _interrupted()
    shard = Path("out/tokens-00001.bin")
    shard.write_bytes(shard.read_bytes().swapcase())
    assert "tokens-00001.bin has changed since it was prepared" in _message(config)


def _changed(name, content):
    """Writes a file again, with the size and times that it had."""
    stat = Path(name).stat()
    assert len(content) == stat.st_size
    Path(name).write_bytes(content)
    os.utime(name, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("name", ["d/a.jsonl", "d/b.txt"])
def test_source_that_changed_between_kill_and_resume_is_named(name):
    _write("d/a.jsonl", _lines({"text": "first"}, {"text": "second"}))
    _write("d/b.txt", "third\n" * 100_000)
    _write("d/c.txt", "fourth")
    config = _config("d", shard_tokens=100_000)
    _start(config, kill_at=3).communicate(timeout=30)  # when the first shard and its progress are on disk
    before = _files()
    assert sorted(before) == ["progress.json", "tokens-00000.bin"]
    text = Path(name).read_bytes()
    _changed(name, text.replace(b"i", b"I"))
    assert f"out holds another preparation (another text in {name}): choose another --out, or delete out" in _message(config)
    assert _files() == before
    _changed(name, text)
    _changed("d/c.txt", b"FOURTH")  # was not read yet
    prepare(config)
    assert _text() == "first\0second\0" + "third\n" * 100_000 + "\0FOURTH\0"


def _halfway(name):
    """The pieces of a file from the second on, when the first was read."""
    (unit,) = sources.find_units(name, out=Path("out"))
    pieces = unit.read(_config(name))
    next(pieces)
    return pieces


@pytest.mark.parametrize(
    "change",
    [
        lambda text: _changed("a.txt", b"otherwise" + text[9:]),
        lambda text: _write("a.txt", text + b"more"),
        lambda text: _write("a.txt", text[:-9]),
        lambda text: _write("a.txt", b""),
    ],
    ids=["start", "grows", "shrinks", "is emptied"],
)
def test_source_that_changes_while_it_is_read_is_named(change):
    text = b"some text\n" * 100_000
    _write("a.txt", text)
    rest = _halfway("a.txt")
    change(text)
    with pytest.raises(ValueError, match=r"^a\.txt changed while it was read: run the same command again"):
        list(rest)


def test_source_with_new_times_and_the_same_text_is_read():
    _write("a.txt", "some text\n" * 100_000)
    rest = _halfway("a.txt")
    Path("a.txt").touch()
    *_, last = rest
    assert last.read.sha256 == hashlib.sha256(Path("a.txt").read_bytes()).hexdigest()


def test_preparation_whose_source_changed_meanwhile_starts_over_with_the_same_command(monkeypatch):
    monkeypatch.setattr("smupar.lm.data.prepare.BATCH_PIECES", 1)
    text = b"some text\n" * 100_000
    _write("a.txt", text)
    config = _config("a.txt", shard_tokens=1000)
    read = sources.SourceUnit.read

    def changed_after_the_second_piece(unit, *args, **options):
        for number, piece in enumerate(read(unit, *args, **options)):
            if number == 2:
                _changed("a.txt", text.upper())
            yield piece

    with monkeypatch.context() as patched:
        patched.setattr(sources.SourceUnit, "read", changed_after_the_second_piece)
        assert "a.txt changed while it was read" in _message(config)
    assert len(_files()) > 2  # finished shards of the old text
    prepare(config)
    assert _text() == text.decode().upper() + "\0"


def test_progress_of_an_older_version_without_checksums_goes_on():
    config = _interrupted()
    progress = json.loads(Path("out/progress.json").read_text())
    for name in ("finished", "partial", SEAL):
        del progress[name]
    Path("out/progress.json").write_text(json.dumps(progress))
    prepare(config)
    assert _text() == "".join(f"document {i}\0" for i in range(9))


def test_refusals_tell_both_sides_apart():
    _write("d/a.txt", "text " * 9)
    prepare(_config("d", tokenizer=_bpe("tok.json")))
    Path("d/a.txt").rename("d/b.txt")
    assert "(other names or sizes of files in d (45 bytes))" in _message(_config("d", tokenizer="tok.json"))
    Path("d/b.txt").rename("d/a.txt")
    hashes = [hashlib.sha256(Path("tok.json").read_bytes()).hexdigest()[:12]]
    Path("tok.json").write_text(bpe(["another text"] * 9, vocab_size=300).to_str(), encoding="utf-8")
    hashes.append(hashlib.sha256(Path("tok.json").read_bytes()).hexdigest()[:12])
    expected = "(another tokenizer called tok: sha256 {}..., not {}...)".format(*hashes)
    assert expected in _message(_config("d", tokenizer="tok.json"))


@pytest.mark.parametrize("complete", [False, True])
def test_other_preparation_is_not_overwritten(complete):
    _interrupted()
    if complete:
        prepare(_config("a.jsonl", shard_tokens=20))
    before = _files()
    _write("b.jsonl", _lines({"text": "b"}))
    for config, difference in (
        (_config("a.jsonl", shard_tokens=20, tokenizer=_bpe()), "tokenizer bytes, not tiny"),
        (_config("b.jsonl", shard_tokens=20), "sources a.jsonl (207 bytes), not b.jsonl (14 bytes)"),
        (_config("a.jsonl", shard_tokens=21), "shard_tokens 20, not 21"),
        (
            _config("a.jsonl", shard_tokens=20, max_tokens=5, errors="ignore"),
            "errors strict, not ignore; max_tokens None, not 5",
        ),
    ):
        message = _message(config)
        assert f"out holds another preparation ({difference}): choose another --out" in message
    _write("a.jsonl", _lines({"text": "changed"}))
    assert "sources a.jsonl (207 bytes), not a.jsonl (20 bytes)" in _message(_config("a.jsonl", shard_tokens=20))
    assert _files() == before


def test_foreign_files_are_not_overwritten():
    _write("a.txt", "text")
    _write("out/thesis.tex", "dear")
    assert "out holds other files" in _message(_config("a.txt"))
    assert _files() == {"thesis.tex": b"dear"}
    assert "a.txt is a file: choose another --out" in _message(_config("a.txt", out="a.txt"))


def test_damaged_shard_of_an_interrupted_preparation_is_noticed():
    _interrupted()
    os.truncate("out/tokens-00001.bin", 3)
    assert "tokens-00001.bin is truncated" in _message(_config("a.jsonl", shard_tokens=20))
    Path("out/progress.json").write_text("{")
    assert "progress.json is damaged" in _message(_config("a.jsonl", shard_tokens=20))


def test_bad_input_after_finished_shards_keeps_them_for_the_remedy(monkeypatch):
    monkeypatch.setattr("smupar.lm.data.prepare.BATCH_PIECES", 1)
    rows = [json.dumps({"text": f"document {i}", "body": "b"}).encode() for i in range(9)]
    rows[7] = rows[7].replace(b"7", b"\xff")
    _write("a.jsonl", b"\n".join(rows))
    config = _config("a.jsonl", shard_tokens=20)
    offset = sum(len(row) + 1 for row in rows[:7]) + rows[7].index(b"\xff")
    assert f"invalid start byte at byte {offset}" in _message(config)
    assert sorted(_files()) == ["progress.json", "tokens-00000.bin", "tokens-00001.bin", "tokens-00002.bin"]
    kept = Path("out/tokens-00000.bin").stat().st_mtime_ns
    lenient = dataclasses.replace(config, errors="replace")
    prepare(lenient)
    assert Path("out/tokens-00000.bin").stat().st_mtime_ns == kept
    prepare(dataclasses.replace(lenient, out="reference"))
    assert _files() == _files("reference")


def test_bad_input_after_finished_shards_does_not_block_another_command(monkeypatch):
    monkeypatch.setattr("smupar.lm.data.prepare.BATCH_PIECES", 1)
    _write("a.jsonl", _lines({"text": "a" * 30, "body": "b"}, {"text": "a" * 30, "body": "c"}, {"body": "d"}))
    assert "a.jsonl, line 3: no field 'text', it has 'body'" in _message(_config("a.jsonl", shard_tokens=20))
    assert len(_files()) == 3
    prepare(_config("a.jsonl", shard_tokens=20, field="body"))
    assert _text() == "b\0c\0d\0"
    assert sorted(_files()) == ["index.json", "tokens-00000.bin"]


def test_full_disk_says_how_far_it_came_and_the_same_command_goes_on():
    _write("a.jsonl", _lines(*({"text": "x" * length} for length in (2999, 2999, 9999, 9))))
    config = _config("a.jsonl", shard_tokens=2000)
    _, errors = _start(config, largest_file=5000).communicate(timeout=30)
    assert (
        errors.decode()
        .splitlines()[-1]
        .endswith(
            "cannot write out (File too large), 6000 tokens in 2 shards are done: "
            "make space and run the same command again to resume"
        )
    )
    assert sorted(_files()) == ["progress.json", "tokens-00000.bin", "tokens-00001.bin"]
    first = Path("out/tokens-00000.bin").stat().st_mtime_ns
    prepare(config)
    assert Path("out/tokens-00000.bin").stat().st_mtime_ns == first
    prepare(dataclasses.replace(config, out="reference"))
    assert _files() == _files("reference")


# Bad input: one line each, and nothing left behind.


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("empty.txt", "", {}, "empty.txt is empty"),
        ("empty.txt.gz", gzip.compress(b"", mtime=0), {}, "no text in empty.txt.gz"),
        ("bad.txt", b"ab\xff", {}, "not text in utf-8 (invalid start byte at byte 2)"),
        ("cut.txt", b"ab\xc3", {}, "not text in utf-8 (unexpected end of data at byte 2)"),
        ("bom.txt", b"\xef\xbb\xbfa\xff", {}, "at byte 4)"),
        ("ascii.txt", b"a\xc3", {"encoding": "ascii"}, "not text in ascii (ordinal not in range(128) at byte 1)"),
        ("a.txt", "a", {"encoding": "klingon"}, "unknown encoding: klingon: pass --encoding utf-8, latin-1"),
        ("a.txt", "a", {"encoding": "rot13"}, "'rot13' is not a text encoding"),
        ("a.txt", "a", {"encoding": "zip"}, "'zip' is not a text encoding"),
        ("a.txt", "a", {"encoding": "undefined"}, "the encoding 'undefined' is not for text files"),
        ("a.txt", "a", {"tokenizer": "gpt5"}, "unknown tokenizer 'gpt5'"),
        ("a.txt.zst", "a", {}, "a.txt.zst is compressed in an unsupported format"),
        ("a.txt.gz", "plain", {}, "a.txt.gz is not gzip, or damaged"),
        ("a.txt.gz", gzip.compress(b"a" * 999, mtime=0)[:-9], {}, "a.txt.gz is not gzip, or damaged"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', {}, "a.jsonl, line 2: not JSON (Expecting value at column"),
        ("a.jsonl", '{"text": ' + "[" * 99999 + "\n", {}, "a.jsonl, line 1: JSON that Python cannot read"),
        ("a.jsonl", '{"text": ' + "9" * 9999 + "}\n", {}, "a.jsonl, line 1: JSON that Python cannot read"),
        ("a.jsonl", "[1]\n", {}, "a.jsonl, line 1: a JSON object is expected, found list"),
        ("a.jsonl", '{"body": 1, "id": 2}\n', {}, "line 1: no field 'text', it has 'body', 'id': choose one with --field"),
        ("a.jsonl", '{"text": 7}\n', {}, "field 'text' holds int, not text"),
        ("a.jsonl", '{"text": null}\n{"text": ""}\n\n', {}, "no text in a.jsonl: every file or row is empty"),
        ("a.jsonl", '{"text": "a"}\n', {"encoding": "utf-16"}, "convert the file to UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b\xff"}\n', {}, "at byte 25)"),
        ("b.parquet", "no", {}, "b.parquet is not Parquet, or damaged"),
        ("d/sub/.hidden", "a", {"sources": ["d"]}, "the folder d holds only empty files, or none"),
        ("a.txt", "a", {"sources": ["hf:"]}, "names no dataset"),
    ],
)
def test_bad_input_raises_one_line_and_leaves_nothing(name, content, options, expected):
    _write(name, content)
    config = _config(*options.get("sources", (name,)), **{key: value for key, value in options.items() if key != "sources"})
    assert expected in _message(config)
    assert not Path("out").exists()
    Path("out").mkdir()
    assert expected in _message(config)
    assert list(Path("out").iterdir()) == []


def test_parquet_without_the_column_names_those_it_has():
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), "a.parquet")
    assert "no column 'text', it has 'body', 'n': choose one with --field" in _message(_config("a.parquet"))
    assert "column 'n' holds int64, not text" in _message(_config("a.parquet", field="n"))
    assert not Path("out").exists()


def test_missing_source_and_no_source_raise():
    assert "no file or folder none.txt" in _message(_config("none.txt"), FileNotFoundError)
    assert "nothing to prepare" in _message(_config())
    assert not Path("out").exists()


def test_folder_that_cannot_be_made_raises_one_line():
    _write("a.txt", "a")
    assert "cannot write a.txt/out (Not a directory)" in _message(_config("a.txt", out="a.txt/out"))


def test_missing_library_says_what_to_install():
    _write("a.parquet", "x")
    code = (
        "import sys; sys.modules['pyarrow'] = sys.modules['pyarrow.parquet'] = sys.modules['datasets'] = None\n"
        "from smupar.lm.config.commands import PrepareConfig\nfrom smupar.lm.data.prepare import prepare\n"
        "for source in ('a.parquet', 'hf:a'):\n"
        "    try: prepare(PrepareConfig((source,), 'out'))\n"
        "    except ValueError as error: print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "reading Parquet (a.parquet) needs pyarrow: pip install 'smupar[data]'",
        "streaming the dataset a needs datasets: pip install 'smupar[data]'",
    ]
    assert not Path("out").exists()
