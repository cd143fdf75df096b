"""Every reader of JSON, given anything: it raises a ValueError with the file's name in it, or reads what it can use."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smupar.lm.data.shards import read_index
from smupar.lm.run import checkpoint
from smupar.lm.run.folder import read_config, read_corpus_info, read_summary
from smupar.lm.run.metrics import damaged_rows
from smupar.lm.use.load import read_export
from smupar.lm.use.score_files import read_requests, read_scores
from smupar.output.checksums import read_sums
from smupar.output.json_files import SEAL
from smupar.paper.published import read_published, results
from smupar.plan.plan import Plan
from smupar.study.kinds.tune import doubts, read_hps
from smupar.updates.trace import Trace, TraceReader
from tests.faults.damage import places, replaced

ROOT = Path(__file__).parents[2]


def read_plan(path):
    return Plan.from_json(path.read_text(encoding="utf-8", errors="replace"), source=str(path))


def follow(path):
    """A trace as a run of another length reads it."""
    trace = Trace.load(path)
    reader = TraceReader(trace, list(trace.effects), 7)
    return [reader.effect(name, step) for name in trace.effects for step in range(9)]


def state_of(path):
    return checkpoint.read_state(path.parent)


# The name of the file, what reads it, and a file that is good.
READERS = {
    "config.json": (lambda path: read_config(path.parent), "run/config.json"),
    "data.json": (lambda path: read_corpus_info(path.parent), "run/data.json"),
    "summary.json": (lambda path: read_summary(path.parent), "run/summary.json"),
    "trace.json": (follow, "trace.json"),
    "index.json": (lambda path: read_index(path.parent), "text/index.json"),
    "state.json": (state_of, "run/checkpoints/step-00000012/state.json"),
    "sums.json": (lambda path: read_sums(path.parent, remedy="restore it"), "run/sums.json"),
    "export/config.json": (lambda path: read_export(path.parent), "export/config.json"),
    "plan.json": (read_plan, None),
    "best.json": (lambda path: [read_hps(path), doubts(path, optimizer="adamw", rule="sp")], None),
    "published.json": (lambda path: results(read_published(path)), None),
    "scores.jsonl": (read_scores, None),
    "requests.jsonl": (read_requests, None),
}
GOOD = {
    "plan.json": lambda: (ROOT / "tests/fixtures/older/plan.json").read_text(),
    "best.json": lambda: json.dumps(
        {"format": "smupar-hps/1", "source": {"optimizer": "adamw", "rule": "mup"}, "base_width": 64}
        | dict.fromkeys(("lr", "init_std", "alpha_input", "alpha_output"), 0.5)
    ),
    "published.json": lambda: (ROOT / "docs/results/fig01.json").read_text(),
    "scores.jsonl": lambda: '{"format": "smupar-scores/1"}\n{"key": "a", "loglikelihood": -1.5, "is_greedy": true}\n',
    "requests.jsonl": lambda: '{"format": "smupar-requests/1"}\n',
}

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_reader_of_json_refuses_by_name_or_reads(made, tmp_path, name, data):
    read, source = READERS[name]
    file = tmp_path / "step-00000012" / Path(name).name
    file.parent.mkdir(exist_ok=True)
    good = (made / source).read_text() if source else GOOD[name]()
    lines = good.splitlines() if name.endswith(".jsonl") else [good]
    parsed = [json.loads(line) for line in lines]
    kind = data.draw(st.sampled_from(["value", "field", "cut", "bytes", "any"]))
    if kind in ("value", "field"):
        number = data.draw(st.integers(0, len(parsed) - 1))
        parsed[number].pop(SEAL, None)  # as if an older version had written it
        path = data.draw(st.sampled_from(sorted(places(parsed[number], 12), key=str)))
        if kind == "value":
            parsed[number] = replaced(parsed[number], path, data.draw(ANYTHING))
        elif path and isinstance(parsed[number], dict):
            del parsed[number][path[0]]
        text = "\n".join(map(json.dumps, parsed)).encode()
    elif kind == "cut":
        text = good.encode()[: data.draw(st.integers(0, len(good)))]
    elif kind == "bytes":
        text = data.draw(st.binary(max_size=40))
    else:
        text = json.dumps(data.draw(ANYTHING)).encode()
    file.write_bytes(text)
    said = file.name
    try:
        read(file)
    except (ValueError, FileNotFoundError) as error:
        said = str(error)
    assert file.name in said or "trace" in said
    assert "\n" not in said


@given(st.binary(max_size=60))
@settings(max_examples=50, deadline=None)
def test_any_bytes_are_damaged_rows_or_rows(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    file.write_bytes(data)
    assert all(number > 0 for number in damaged_rows(file))


def test_text_is_read_and_written_as_utf_8_whatever_the_locale():
    """Every call of read_text, write_text and open in the package names an encoding, or is for bytes."""
    loose = []
    for path in sorted((ROOT / "smupar").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _reads_text(node) and not any(word.arg == "encoding" for word in node.keywords):
                loose.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert loose == []


def _reads_text(call):
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in ("read_text", "write_text"):
        return not any(word.arg == "remedy" for word in call.keywords)  # our own, which is always UTF-8
    if name != "open" or getattr(getattr(call.func, "value", None), "id", "") in ("os", "Study"):
        return False
    words = [*call.args, *(word.value for word in call.keywords)]
    modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return not any("b" in mode for mode in modes)
