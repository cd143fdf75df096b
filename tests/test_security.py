"""What SECURITY.md promises about files from others, and that the tests that it names exist."""

import ast
import contextlib
import io
import json
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from smupar.cli.main import main
from smupar.lm.data.shard_hashes import verify
from smupar.lm.data.tokenizer import load_tokenizer
from smupar.lm.use.load import load_model
from smupar.lm.use.score_files import read_requests
from smupar.output.json_files import SEAL
from smupar.plan.masks.patterns import read_masks
from smupar.plan.plan import Plan
from smupar.study.kinds.tune import read_hps
from smupar.study.store import Study
from smupar.updates.trace import Trace
from tests.lm.use.tiny import trained_run

ROOT = Path(__file__).parent.parent


def named_tests():
    """(file, function) of every test that SECURITY.md names."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))


def test_every_line_of_the_threat_model_names_tests_that_exist():
    rows = [row for row in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 8
    assert [row for row in rows if "`tests/" not in row] == []
    for file, name in named_tests():
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file} has no {name}"


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Path(trained_run(tmp_path_factory.mktemp("run"), b"Some text to train on. " * 60))


READERS = {
    "export/model.safetensors": lambda root: load_model(root / "export"),
    "export/config.json": lambda root: load_model(root / "export"),
    "run/config.json": lambda root: load_model(root / "run"),
    "run/summary.json": lambda root: main(["export", str(root / "run"), str(root / "again")]),
    "run/checkpoints/step-00000005/state.json": lambda root: main(["export", str(root / "run"), str(root / "again")]),
    "run/checkpoints/step-00000005/model/model-00001-of-00001.safetensors": lambda root: load_model(root / "run"),
    "text/index.json": lambda root: verify(root / "text"),
    "text/tokens-00000.bin": lambda root: verify(root / "text"),
    "text/verified.json": lambda root: verify(root / "text"),
    "tokenizer.json": lambda root: load_tokenizer(str(root / "tokenizer.json")),
    "masks.pt": lambda root: read_masks(root / "masks.pt"),
    "masks.safetensors": lambda root: read_masks(root / "masks.safetensors"),
    "trace.json": lambda root: Trace.load(root / "trace.json"),
    "plan.json": lambda root: Plan.from_json((root / "plan.json").read_text(errors="replace")),
    "best.json": lambda root: read_hps(root / "best.json"),
    "requests.jsonl": lambda root: read_requests(root / "requests.jsonl"),
    "study/study.json": lambda root: Study(root / "study").results(),
}


def saved_by_torch(value):
    content = io.BytesIO()
    torch.save({"weight_mask": value}, content)
    return content.getvalue()


@pytest.mark.parametrize("dumps", [pickle.dumps, saved_by_torch])
@pytest.mark.parametrize("name", READERS)
def test_pickle_in_place_of_a_file_is_not_run(run, tmp_path, name, dumps):
    shutil.copytree(run.parent, tmp_path, dirs_exist_ok=True)
    main(["export", str(tmp_path / "run"), str(tmp_path / "export")])
    proof, path = tmp_path / "proof", tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(dumps(Bomb(proof)))
    with contextlib.suppress(Exception, SystemExit):  # other tests look at what is said
        READERS[name](tmp_path)
    assert not proof.exists()


def test_bomb_goes_off_where_pickles_are_run(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "first")))
    torch.load(io.BytesIO(saved_by_torch(Bomb(tmp_path / "second"))), weights_only=False)
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


def test_memory_error_without_a_text_is_one_line(monkeypatch, capsys):
    def full(*args, **keywords):
        raise MemoryError

    monkeypatch.setattr("smupar.cli.main._run", full)
    with pytest.raises(SystemExit) as ended:
        main(["rules"])
    assert (ended.value.code, capsys.readouterr().err) == (2, "smupar: out of memory\n")


def test_codes_for_the_terminal_are_not_printed(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run/summary.json"
    values = json.loads(path.read_text()) | {"id": "\x1b]0;evil\x07"}
    path.write_text(json.dumps({name: value for name, value in values.items() if name != SEAL}))
    (tmp_path / "run/sums.json").unlink()  # as an older version left it
    size = "--width 64 --depth 1 --steps 1 --batch-size 1 --seq-len 8"
    for command in (f"verify {tmp_path}/run", f"sweep {size} --out {tmp_path}/run", f"train {size} --hps \x1b]0;evil\x07"):
        with pytest.raises(SystemExit):
            main(command.split())
    said = capsys.readouterr()
    assert "summary.json belongs to another run ( ]0;evil )" in said.out
    assert not {"\x1b", "\x07"} & {*said.out, *said.err}


def test_text_of_others_is_escaped_in_pages(command, run, tmp_path, monkeypatch):
    evil = "<script>alert(1)</script>"
    data = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(run.parent / "text", data)
    monkeypatch.setattr(sys, "argv", ["smupar", "sweep", evil])  # the page shows the command
    size = ["--width", "64", "--depth", "1", "--steps", "1", "--batch-size", "1", "--seq-len", "8", "--valid-batches", "1"]
    done = command("sweep", "lr=0.01,0.02", *size, "--engine", "serial", "--data", data, "--out", tmp_path / "s")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "s" / "report.html").read_text(encoding="utf-8")
    assert "\\u003cscript\\u003ealert(1)" in page  # inside JSON
    assert "\\u003cimg src=x" in page
    assert evil not in page
    assert "<img src=x" not in page
