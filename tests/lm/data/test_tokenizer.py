"""Tokenizers: bytes, JSON files, GPT-2 style folders, and the way back from a prepared folder."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, processors

from smupar.lm.config.commands import PrepareConfig
from smupar.lm.data.prepare import prepare
from smupar.lm.data.tokenizer import _byte_level_bpe, load_tokenizer, read_tokenizer
from tests.support.texts import bpe

TEXT = "the cat sat on the mat, the dog sat on the cat. Grüße aus Köln!\n\n  the 你好 end 🙂\r\n"


def _trained(special=("<|endoftext|>",), vocab_size=300):
    return bpe([TEXT] * 4, vocab_size=vocab_size, special=special)


def _json_file(tmp_path, library, name="tiny.json"):
    (tmp_path / name).write_text(library.to_str(), encoding="utf-8")
    return str(tmp_path / name)


def _folder(path, vocabulary="vocab.json", merges="merges.txt"):
    """A folder as GPT-2 is published: the ids are those of the library that is returned."""
    library = _trained()
    model = json.loads(library.to_str())["model"]
    path.mkdir()
    (path / vocabulary).write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (path / merges).write_text("\n".join(lines), encoding="utf-8")
    return library


def test_bytes_are_utf8_with_nul_behind_documents():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eot) == (256, 0)
    assert tokenizer.encode("aé").tolist() == [97, 195, 169]
    assert tokenizer.encode("a").dtype == np.uint8
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode([97, 195]) == "a\ufffd"


def test_json_file_gives_the_ids_of_the_library(tmp_path):
    library = _trained()
    tokenizer = load_tokenizer(_json_file(tmp_path, library))
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot) == ("tiny", 300, 0)
    assert tokenizer.encode(TEXT).tolist() == library.encode(TEXT).ids
    assert tokenizer.encode(TEXT).dtype == np.dtype("<u2")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert [ids.tolist() for ids in tokenizer.encode_batch(["the", ""])] == [library.encode("the").ids, []]


def test_sha256_is_the_one_of_the_file(tmp_path):
    tokenizer = load_tokenizer(_json_file(tmp_path, _trained()))
    assert tokenizer.sha256 == hashlib.sha256((tmp_path / "tiny.json").read_bytes()).hexdigest()


def test_truncation_padding_and_template_of_a_file_are_not_applied(tmp_path):
    library = _trained(special=("</s>", "[CLS]"))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    tokenizer = load_tokenizer(_json_file(tmp_path, library))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert [len(ids) for ids in tokenizer.encode_batch(["!", TEXT])] == [1, len(tokenizer.encode(TEXT))]


@pytest.mark.parametrize(("special", "eot"), [(("[EOS]", "</s>"), 1), (("<eos>",), 0), ((), None)])
def test_eot_is_the_first_known_name(tmp_path, special, eot):
    assert load_tokenizer(_json_file(tmp_path, _trained(special))).eot == eot


def test_vocabulary_with_a_hole_counts_to_its_largest_id(tmp_path):
    vocabulary = {"a": 0, "b": 7}
    library = Library(models.WordLevel(vocabulary, unk_token="a"))
    assert load_tokenizer(_json_file(tmp_path, library)).vocab_size == 8


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("gpt2-encoder.json", "gpt2-vocab.bpe")])
def test_folder_of_vocabulary_and_merges_gives_the_same_ids(tmp_path, names):
    library = _folder(tmp_path / "mine", *names)
    tokenizer = load_tokenizer(str(tmp_path / "mine"))
    assert tokenizer.name == ("mine" if names[0] == "vocab.json" else "gpt2")
    assert (tokenizer.vocab_size, tokenizer.eot) == (300, 0)
    assert tokenizer.encode(TEXT).tolist() == library.encode(TEXT).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_end_of_text_written_out_is_text(tmp_path):
    _folder(tmp_path / "mine")
    for spec in (str(tmp_path / "mine"), _json_file(tmp_path, _trained()), "bytes"):
        tokenizer = load_tokenizer(spec)
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.eot not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert load_tokenizer(str(tmp_path / "mine")).decode([0]) == "<|endoftext|>"


def test_folder_and_library_define_the_same_tokenizer(tmp_path):
    # What is downloaded under the name gpt2 goes through the same lines, so that both have one hash.
    library = _folder(tmp_path / "mine")
    model = json.loads(library.to_str())["model"]
    definition = _byte_level_bpe(model["vocab"], [tuple(pair) for pair in model["merges"]])
    assert hashlib.sha256(definition.encode()).hexdigest() == load_tokenizer(str(tmp_path / "mine")).sha256


def test_folder_with_a_tokenizer_json_uses_it(tmp_path):
    _folder(tmp_path / "mine")
    _json_file(tmp_path / "mine", _trained(vocab_size=280), "tokenizer.json")
    tokenizer = load_tokenizer(str(tmp_path / "mine"))
    assert (tokenizer.name, tokenizer.vocab_size) == ("mine", 280)


def test_prepared_folder_gives_its_tokenizer_back(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    for spec in ("bytes", _json_file(tmp_path, _trained())):
        out = tmp_path / f"out-{load_tokenizer(spec).name}"
        prepare(PrepareConfig((str(tmp_path / "a.txt"),), str(out), tokenizer=spec))
        read = read_tokenizer(out, load_tokenizer(spec).name)
        assert read.info == load_tokenizer(spec).info
        assert read.encode(TEXT).tolist() == load_tokenizer(spec).encode(TEXT).tolist()
    (out / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing: copy the JSON of the tokenizer tiny there"):
        read_tokenizer(out, "tiny")


def test_token_outside_the_vocabulary_is_not_decoded(tmp_path):
    for spec, outside in (("bytes", 256), (_json_file(tmp_path, _trained()), 300)):
        with pytest.raises(ValueError, match=f"token {outside} is outside"):
            load_tokenizer(spec).decode([97, outside])


def test_bad_tokenizers_raise_one_line(tmp_path):
    def message(spec):
        with pytest.raises(ValueError) as caught:
            load_tokenizer(str(spec))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "unknown tokenizer 'gpt3'" in message("gpt3")
    (tmp_path / "no.json").write_text('{"a": 1}')
    assert f"{tmp_path / 'no.json'}: no is not a tokenizers JSON" in message(tmp_path / "no.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert "not text in UTF-8" in message(tmp_path / "binary.json")
    (tmp_path / "empty").mkdir()
    assert "encoder.json or vocab.json" in message(tmp_path / "empty")
    _folder(tmp_path / "two")
    (tmp_path / "two" / "other-vocab.json").write_text("{}")
    assert "several: other-vocab.json, vocab.json" in message(tmp_path / "two")
    _folder(tmp_path / "list")
    (tmp_path / "list" / "vocab.json").write_text("[1]")
    assert "vocab.json is damaged (expected fields, got [1]): get it again" in message(tmp_path / "list")
    (tmp_path / "list" / "vocab.json").write_text('{"a": []}')
    assert "not a vocabulary" in message(tmp_path / "list")
    _folder(tmp_path / "merge")
    first = (tmp_path / "merge" / "merges.txt").read_text(encoding="utf-8").splitlines()[1]
    (tmp_path / "merge" / "merges.txt").write_text(f"#version: 0.2\n{first}\nq zz\n", encoding="utf-8")
    assert "merge 2 of" in message(tmp_path / "merge")


def test_gpt2_without_network_says_to_pass_a_folder(tmp_path):
    load = "try: load_tokenizer('gpt2')\nexcept ValueError as error: print(error)"
    code = f"from smupar.lm.data.tokenizer import load_tokenizer\n{load}"
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cannot download the tokenizer gpt2")
    assert "pass a folder with its encoder.json and vocab.bpe" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_missing_library_says_what_to_install():
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from smupar.lm.data.tokenizer import Tokenizer\n"
        "assert Tokenizer('bytes').encode('a').tolist() == [97]\n"
        "assert 'torch' not in sys.modules\n"
        "try: Tokenizer('x', '{}')\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "the tokenizer x needs tokenizers: pip install 'smupar[data]'\n"
