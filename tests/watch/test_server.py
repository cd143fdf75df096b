"""The server of `smupar watch`, asked over HTTP on loopback."""

import contextlib
import http.client
import json
import os
import threading

import pytest

from smupar.output.files import locked
from smupar.updates.page import trace_document
from smupar.watch.runs import Runs
from smupar.watch.server import WatchServer, serving
from smupar.watch.server import watch as serve
from tests.watch.studies import RUN, end_run, make_study


class Client:
    def __init__(self, server):
        self.server, self.port = server, server.server_address[1]

    def ask(self, path, method="GET", **headers):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.putrequest(method, path, skip_host="Host" in headers)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.read()

    def json(self, path):
        status, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)

    def keys(self):
        """Keys by the last part of the folder."""
        return {entry["folder"].rpartition("/")[2]: entry["key"] for entry in self.json("/state.json")["documents"]}


@pytest.fixture
def watch():
    """Serves folders for the time of a test."""
    servers = []

    def start(*folders, **options):
        context = serving(folders, port=0, **options)
        server = context.__enter__()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((context, server, thread))
        return Client(server)

    yield start
    for context, server, thread in servers:
        server.shutdown()
        thread.join()
        context.__exit__(None, None, None)


def test_documents_are_listed_and_served(watch, tmp_path):
    make_study(tmp_path / "study")
    client = watch(tmp_path)
    status, page = client.ask("/")
    assert status == 200
    assert page.startswith(b"<!doctype html>")
    document = client.json(f"/document.json?key={client.keys()['study']}")
    assert document["headline"] == "The learning rate transfers under SmuPar (its best stays within 2x), not under SP."
    (listed,) = client.json("/state.json")["documents"]
    assert (listed["title"], listed["version"]) == ("Does the learning rate transfer?", document["version"])


def test_run_that_ends_changes_the_version(watch, tmp_path):
    (run,) = make_study(tmp_path / "study", num_left_out=1)
    client = watch(tmp_path / "study")
    key = client.keys()["study"]
    before = client.json(f"/document.json?key={key}")
    end_run(tmp_path / "study" / "runs" / run.id, run)
    (entry,) = client.server.watched.entries().values()
    entry._next = 0.0  # as if time had passed
    after = client.json(f"/document.json?key={key}")
    assert after["version"] != before["version"]
    assert (before["progress"]["done"], after["progress"]["done"]) == (23, 24)


def test_curves_and_files_of_a_run_are_served(watch, tmp_path):
    make_study(tmp_path / "study")
    client = watch(tmp_path)
    key = client.keys()["study"]
    run = next((tmp_path / "study" / "runs").iterdir()).name
    curve = client.json(f"/curves.json?key={key}&runs={run},nothing,..%2F..")
    assert list(curve) == [run]
    assert [step for step, *_ in curve[run]] == list(range(4, 41, 4))
    details = client.json(f"/run.json?key={key}&run={run}")
    assert details["config"]["base_width"] == 32
    addresses = {file["name"]: file["address"] for file in details["files"]}
    assert list(addresses) == ["config.json", "metrics.jsonl", "summary.json"]
    status, body = client.ask(f"/{addresses['summary.json']}")
    assert (status, json.loads(body)["id"]) == (200, run)


@pytest.mark.parametrize(
    "path",
    [
        "/files/{key}/../secret.json",
        "/files/{key}/runs/../../secret.json",
        "/files/{key}/%2e%2e/secret.json",
        "/files/{key}/..%2fsecret.json",
        "/files/{key}//../secret.json",
        "/files/{key}/..\\secret.json",
        "/files/{key}/link.json",
        "/files/{key}/linked/secret.json",
        "/files/{key}/.hidden.json",
        "/files/{key}/weights.safetensors",
        "/files/{key}/secret.json%00.png",
        "/files/{key}/runs",
        "/files/{key}/",
        "/files/{key}",
        "/files/unknown/study.json",
        "/files/",
        "/../secret.json",
        "/study.json",
        "/document.json",
        "/document.json?key=unknown",
        "//etc/passwd",
    ],
)
def test_nothing_outside_is_served(watch, tmp_path, path):
    folder = tmp_path / "study"
    make_study(folder)
    (tmp_path / "secret.json").write_text('"secret"')
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.json").write_text('"secret"')
    (folder / "link.json").symlink_to(tmp_path / "secret.json")
    (folder / "linked").symlink_to(tmp_path / "outside")
    for name in (".hidden.json", "weights.safetensors"):
        (folder / name).write_text('"secret"')
    client = watch(folder)
    status, body = client.ask(path.format(key=client.keys()["study"]))
    assert status == 404
    assert b"secret" not in body


def test_folder_of_a_run_must_be_a_run_of_the_study(watch, tmp_path):
    make_study(tmp_path / "study")
    client = watch(tmp_path / "study")
    key = client.keys()["study"]
    for run in ("..", "../..", "%2e%2e", "a/b", ""):
        assert client.json(f"/run.json?key={key}&run={run}") == {"config": None, "curve": [], "files": []}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_server_only_shows(watch, tmp_path, method):
    make_study(tmp_path / "study")
    assert watch(tmp_path).ask("/state.json", method)[0] == 405


@pytest.mark.parametrize(
    ("host", "header", "status"),
    [
        ("127.0.0.1", "localhost:8765", 200),
        ("127.0.0.1", "127.0.0.1", 200),
        ("127.0.0.1", "evil.example", 403),
        ("127.0.0.1", "evil.example:8765", 403),
        ("127.0.0.1", "127.0.0.1.evil.example", 403),
        ("127.0.0.1", "10.0.0.7", 403),
        ("127.0.0.1", "", 403),
        ("0.0.0.0", "10.0.0.7:8765", 200),
        ("0.0.0.0", "evil.example", 403),
    ],
)
def test_host_that_was_not_asked_for_is_refused(watch, tmp_path, host, header, status):
    make_study(tmp_path / "study")
    assert watch(tmp_path, host=host).ask("/state.json", Host=header)[0] == status


def test_port_in_use_is_refused_or_passed_over(watch, tmp_path):
    make_study(tmp_path / "study")
    first = watch(tmp_path)
    with pytest.raises(ValueError, match=f"port {first.port} is in use on 127.0.0.1: choose another --port"):
        serving([tmp_path], port=first.port).__enter__()
    with serving([tmp_path]) as server, serving([tmp_path]) as other:  # two watchers of a folder
        assert server.server_address[1] < other.server_address[1]
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1"):
        serving([tmp_path], host="192.0.2.1").__enter__()


def test_folder_that_holds_nothing_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    for path in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "study"):
        with pytest.raises(ValueError, match=r"notes\.txt is not a folder: name the folder of a study"):
            serving([path]).__enter__()
    with pytest.raises(ValueError, match="holds no study, run, check, reproduction or trace"):
        serving([tmp_path]).__enter__()


def test_study_that_does_not_exist_yet_is_waited_for(watch, tmp_path):
    study = tmp_path / "runs" / "demo"
    client = watch(study)
    assert client.json("/state.json") == {"documents": [], "waiting": [f"waiting for {study} to appear"]}
    make_study(study)
    state = client.json("/state.json")
    assert [document["folder"] for document in state["documents"]] == [str(study)]
    assert state["waiting"] == []


def test_watching_says_once_that_it_waits(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(WatchServer, "serve_forever", lambda server: None)
    monkeypatch.setattr(os, "nice", lambda step: step)  # the tests keep their priority
    make_study(tmp_path / "there")
    serve([tmp_path / "there", tmp_path / "demo"], host="127.0.0.1", port=0, say=lines.append)
    assert lines[0].startswith("watching ")
    assert lines[1:] == [f"waiting for {tmp_path / 'demo'} to appear (Ctrl-C to stop)"]


def test_folder_that_has_just_been_made_is_waited_for(watch, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    client = watch(run)
    assert client.json("/state.json") == {"documents": [], "waiting": [f"waiting for the first step in {run}"]}
    (run / "config.json").write_text(RUN.to_json())
    assert client.json("/state.json")["waiting"] == [f"waiting for the first step in {run}"]
    end_run(run, RUN)
    state = client.json("/state.json")
    assert (len(state["documents"]), state["waiting"]) == (1, [])


def test_interrupted_run_is_stopped_at_once_and_a_quiet_one_with_a_process_runs(tmp_path):
    run = tmp_path / "run"
    end_run(run, RUN)
    (run / "summary.json").unlink()
    source = Runs(run, [run])

    def seen():
        return source.document()["headline"].partition(":")[0], source.version

    state, version = seen()
    assert state == "Running"
    (run / "checkpoints" / "step-00000040").mkdir(parents=True)  # it was interrupted and saved
    assert seen()[0] == "Stopped"
    assert seen()[1] != version  # so that the page is made again
    for name in ("metrics.jsonl", "config.json"):
        os.utime(run / name, (1, 1))
    with locked(run):
        assert seen()[0] == "Running"
    assert seen()[0] == "Stopped"


def test_everything_below_a_folder_is_found(watch, tmp_path):
    make_study(tmp_path / "a" / "study")
    for seed in (0, 1):
        end_run(tmp_path / f"run-{seed}", RUN)
    (tmp_path / "run-1" / "summary.json").unlink()
    os.utime(tmp_path / "run-1" / "metrics.jsonl", (1, 1))
    os.utime(tmp_path / "run-1" / "config.json", (1, 1))
    trace = {"format": "smupar-trace/1", "num_steps": 4, "at": [0, 2], "effects": {"layers.0.w": [1.0, None]}}
    trace |= {"shapes": {}, "note": "<b>"}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "proxy.trace.json").write_text(json.dumps(trace))
    client = watch(tmp_path)
    keys = client.keys()
    assert set(keys) == {"study", tmp_path.name, "b"}
    runs = client.json(f"/document.json?key={keys[tmp_path.name]}")
    states = dict(row[:2] for row in runs["table"]["rows"])
    assert states == {"run-0": "finished", "run-1": "stopped"}
    assert len(client.json(f"/curves.json?key={keys[tmp_path.name]}&runs=run-0,run-1")["run-1"]) == 10
    shown = client.json(f"/document.json?key={keys['b']}")
    assert shown["charts"][0]["lines"] == trace_document(trace)["charts"][0]["lines"]
    assert [point["y"] for point in shown["charts"][0]["lines"][0]["points"]] == [1.0, None]
