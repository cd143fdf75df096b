"""The server of `smupar watch`: the page, and JSON about what the folders hold. It only reads, and only below those folders.

The page of another site could reach a server on this machine by a domain name that resolves to this machine (DNS rebinding). So
the Host header of a request must be localhost, an address, or the name that was given with --host.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import ipaddress
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from smupar.output.files import changed_at, resolved
from smupar.output.json_files import read_object
from smupar.output.page import page
from smupar.output.page.document import thinned
from smupar.refusals import refuse
from smupar.study.live import LIVE
from smupar.watch.sources import UNREADABLE, Entry, Watched

_TYPES = {
    ".csv": "text/csv; charset=utf-8",
    ".json": "application/json",
    ".jsonl": "text/plain; charset=utf-8",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
USUAL_PORT = 8765
_NUM_PORTS = 20  # number of ports that are tried, from the usual port on
_MOST_CURVES, _MOST_POINTS = 100, 400
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
Query = Mapping[str, str]


class NotFoundError(Exception):
    """There is nothing under this address."""


@contextlib.contextmanager
def serving(folders: Sequence[str | Path], *, host: str = "127.0.0.1", port: int | None = None) -> Iterator[WatchServer]:
    """A context with a server for these folders, bound to host and port. Without a port, it takes the first free port from
    ``USUAL_PORT`` on. Call its ``serve_forever``."""
    watched = Watched(folders)
    with _bound(watched, host, port) as server:
        yield server


def _bound(watched: Watched, host: str, port: int | None) -> WatchServer:
    ports = range(USUAL_PORT, USUAL_PORT + _NUM_PORTS) if port is None else [port]
    for number in ports:
        try:
            return WatchServer((host, number), watched)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = error.strerror or error
                raise ValueError(
                    f"cannot listen on {host}, port {number} ({reason}): choose another --host or --port"
                ) from error
    taken = f"port {port} is" if port is not None else f"the ports {ports[0]} to {ports[-1]} are"
    raise ValueError(f"{taken} in use on {host}: choose another --port, or 0 for any free port")


class WatchServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # on POSIX a port in use is still refused

    def __init__(self, address: tuple[str, int], watched: Watched) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.watched, self.host = watched, address[0]
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        host = self.host if self.host not in ("0.0.0.0", "::", "") else socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores closed connections: browsers close theirs when they stop loading a page."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def knows(self, header: str) -> bool:
        """Whether a Host header names this server."""
        name = urlsplit(f"//{header}").hostname or ""
        if self.host in ("0.0.0.0", "::", ""):  # listens on all addresses of this machine; foreign names are still refused
            return _is_address(name) or name in ("localhost", socket.gethostname().lower(), socket.getfqdn().lower())
        return name in ("localhost", "127.0.0.1", "::1", self.host.lower())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "smupar", ""

    def do_GET(self) -> None:
        if not self.server.knows(self.headers.get("Host", "")):
            self._send(
                HTTPStatus.FORBIDDEN, b"This server answers to localhost; name another host with --host.\n", "text/plain"
            )
            return
        try:
            body, kind = self._answer()
        except NotFoundError:
            self._send(HTTPStatus.NOT_FOUND, b"There is nothing here.\n", "text/plain")
        except UNREADABLE as error:  # a file is damaged, or only half written so far
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(), "text/plain; charset=utf-8")
        else:
            self._send(HTTPStatus.OK, body, kind)

    do_HEAD = do_GET  # noqa: N815

    def _refuse_method(self) -> None:
        self.close_connection = True
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"This server only shows: GET and HEAD.\n", "text/plain")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (as http.server calls it)
        """Logs nothing, since a page sends a request every two seconds."""

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _answer(self) -> tuple[bytes, str]:
        address = urlsplit(self.path)
        if address.path == "/":
            return page([], live=True).encode(), "text/html; charset=utf-8"
        entries = self.server.watched.entries()
        if address.path == "/state.json":
            return _json(_state(self.server.watched, entries))
        if address.path.startswith("/files/"):
            return _file(entries, address.path)
        answers = _ANSWERS.get(address.path)
        if answers is None:
            raise NotFoundError
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        return _json(answers(entries, query))


def _json(values: dict[str, Any]) -> tuple[bytes, str]:
    return json.dumps(values, allow_nan=False).encode(), "application/json"


def _state(watched: Watched, entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {
        "documents": [_line(entry) for entry in entries.values()],
        "waiting": [_waiting(folder) for folder in watched.missing],
    }


def _waiting(folder: Path) -> str:
    return f"waiting for the first step in {folder}" if folder.exists() else f"waiting for {folder} to appear"


def _line(entry: Entry) -> dict[str, Any]:
    """What the list and the overview show of an entry: its brief, when it last changed, and how many of its runs have ended."""
    brief = entry.brief()
    progress = entry.document()["progress"] if brief["version"] else None
    kept = {name: progress[name] for name in ("done", "total", "seconds_left")} if progress else None
    return brief | {"changed": _changed(entry.folder), "progress": kept}


def _changed(folder: Path) -> float:
    """When a folder last changed, or when its processes last gave a sign of life."""
    return max(changed_at(path) for path in (folder, *(folder / LIVE).glob("*.json")))


def _document(entries: Mapping[str, Entry], query: Query) -> dict[str, Any]:
    return _entry(entries, query).document()


def _curves(entries: Mapping[str, Entry], query: Query) -> dict[str, Any]:
    entry, runs = _entry(entries, query), query.get("runs", "").split(",")[:_MOST_CURVES]
    return {run: thinned(curve, _MOST_POINTS) for run in runs if (curve := entry.source.curve(run))}


def _run(entries: Mapping[str, Entry], query: Query) -> dict[str, Any]:
    entry, run = _entry(entries, query), query.get("run", "")
    folder = entry.source.folder_of(run)
    files, config = [], None
    if folder is not None and folder.is_dir():
        names = [path.name for path in sorted(folder.iterdir()) if path.suffix in _TYPES and path.is_file()]
        below = folder.relative_to(entry.folder).as_posix()
        files = [{"name": name, "address": f"files/{entry.key}/{quote(f'{below}/{name}')}"} for name in names]
        with contextlib.suppress(ValueError, OSError):
            config = read_object(folder / "config.json", remedy="")
    return {"config": config, "curve": thinned(entry.source.curve(run), 5 * _MOST_POINTS), "files": files}


_ANSWERS: dict[str, Callable[[Mapping[str, Entry], Query], dict[str, Any]]] = {
    "/document.json": _document,
    "/curves.json": _curves,
    "/run.json": _run,
}


def _entry(entries: Mapping[str, Entry], query: Query) -> Entry:
    try:
        return entries[query["key"]]
    except KeyError as error:
        raise NotFoundError from error


def _file(entries: Mapping[str, Entry], address: str) -> tuple[bytes, str]:
    """A file below the folder of an entry. Links that lead out of the folder are not followed."""
    _, _, key, *parts = unquote(address).split("/")
    entry = entries.get(key)
    if entry is None or any(part.startswith(".") or "\\" in part or "\0" in part for part in parts):
        raise NotFoundError
    root = resolved(entry.folder)
    path = resolved(root.joinpath(*filter(None, parts)))
    if not path.is_relative_to(root) or path.suffix not in _TYPES or not path.is_file():
        raise NotFoundError
    return path.read_bytes(), _TYPES[path.suffix]


def watch(folders: Sequence[str | Path], *, host: str, port: int | None, say: Callable[[str], None] = print) -> None:
    """Serves the page until it is interrupted."""
    refuse(port is not None and not 0 <= port < 2**16, f"--port must lie in 0 to 65535, got {port}")
    with serving(folders, host=host, port=port) as server:
        say(f"watching {', '.join(map(str, folders))} on {server.url}  (Ctrl-C ends it)")
        for folder in server.watched.missing:
            say(f"{_waiting(folder)} (Ctrl-C to stop)")
        threading.Thread(target=_read_ahead, args=(server.watched,), daemon=True).start()
        with contextlib.suppress(OSError, AttributeError):
            os.nice(5)  # training on this machine goes first; threads that already run keep their priority
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def _read_ahead(watched: Watched) -> None:
    """Makes every document once, so that it is ready for the first request. The garbage collector is off meanwhile, so that
    reading thousands of runs takes two thirds of the time."""
    gc.disable()
    for entry in watched.entries().values():
        with contextlib.suppress(*UNREADABLE):  # the page will show the error
            entry.document()
    gc.freeze()  # from now on the garbage collector skips what was read
    gc.enable()
