"""Damaged files below a folder that is watched: every address is answered, and nothing is printed."""

import contextlib
import http.client
import itertools
import json
import random
import threading

import pytest

from smupar.output.json_files import SEAL
from smupar.watch.server import serving
from tests.faults.damage import KINDS
from tests.watch.studies import RUN, end_run, make_study

LIVE = {
    "host": "elsewhere",
    "pid": 1,
    "device": "cpu",
    "doing": "",
    "seconds_left": 60.0,
    "tokens_per_second": 1.0,
    "runs": {},
    "advanced": 0.0,
    "time": 0.0,
}


@pytest.fixture
def folder(tmp_path):
    runs = make_study(tmp_path / "study", num_left_out=2)
    end_run(tmp_path / "run", RUN)
    trace = {"format": "smupar-trace/1", "num_steps": 4, "at": [0, 2], "effects": {"a": [1.0, None]}, "shapes": {}}
    for name, values in {
        "study/live/elsewhere-1.json": LIVE | {"runs": {runs[0].id: [[1, 2.5]]}},
        "study/planned.json": {"common": {"rule": "sp", "sparsity": 0.5}, "runs": {run.id: {"lr": run.lr} for run in runs}},
        "run/trace.json": trace,
        "run/more/trace.json": trace,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(values))
    return tmp_path


def answers(folder):
    """The status of every address of a page."""
    with serving([folder], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()

        def ask(path):
            with contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
            ) as connection:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read()

        status, body = ask("/state.json")
        found = [status]
        for entry in json.loads(body)["documents"]:
            status, body = ask(f"/document.json?key={entry['key']}")
            found.append(status)
            table = json.loads(body)["table"] if status == 200 else None
            for row in (table or {"rows": []})["rows"][-2:]:
                found += [ask(f"/{what}.json?key={entry['key']}&run={row[0]}&runs={row[0]}")[0] for what in ("run", "curves")]
        server.shutdown()
        thread.join()
    return found


FILES = [
    *("study/study.json", "study/runs/*/config.json", "study/runs/*/summary.json", "study/runs/*/metrics.jsonl"),
    *("study/live/elsewhere-1.json", "study/planned.json", "run/config.json", "run/summary.json", "run/metrics.jsonl"),
    *("run/trace.json", "run/more/trace.json"),
]


@pytest.mark.parametrize("file", FILES)
def test_damaged_files_are_answered_for(folder, capfd, file):
    path = sorted(folder.glob(file))[0]
    content = path.read_bytes()
    assert set(answers(folder)) == {200}
    for kind, damage in KINDS.items():
        damage(path, random.Random(kind))
        assert set(answers(folder)) <= {200, 503}, kind
        path.unlink(missing_ok=True)
        path.write_bytes(content)
    assert capfd.readouterr() == ("", "")


STRANGE = [None, True, -1, 10**400, 1e-320, float("nan"), "x", [], {}, [[1]], {"a": [[None, "b"]]}]


@pytest.mark.parametrize("file", ["study/live/elsewhere-1.json", "study/planned.json", "run/summary.json", "run/config.json"])
def test_values_of_any_type_are_answered_for(folder, capfd, file):
    """As in files that somebody else wrote; they have no seal."""
    path = folder / file
    content = json.loads(path.read_text())
    content.pop(SEAL, None)
    values = itertools.cycle(STRANGE)
    for name in [*content, *content]:
        value = next(values)
        path.write_text(json.dumps(content | {name: value}))
        assert set(answers(folder)) <= {200, 503}, (name, value)
    assert capfd.readouterr() == ("", "")


def test_damaged_run_is_named_on_the_page(folder):
    (folder / "run/config.json").write_text("[")
    with serving([folder], port=0) as server:
        [document] = [entry.document() for entry in server.watched.entries().values() if entry.folder == folder]
    assert "Left out: " in document["sentence"]
    assert "run/config.json is damaged" in document["sentence"]
